"""Aligning many networks of one architecture: an ensemble, posterior samples, snapshots of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.activations import Similarity, activation_matching
from tu_symmetry.alignment.consensus import Match, bounded, find_target
from tu_symmetry.alignment.consensus import Reference as Reference
from tu_symmetry.alignment.matching import Matching, Progress, Solver, weight_distance, weight_matching
from tu_symmetry.evaluation import reusable
from tu_symmetry.reporting.brief import Brief, span
from tu_symmetry.states import State, as_given, check_number, mean_state, read_state, unstack
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.certificate import Certificate, measured
from tu_symmetry.symmetry.elements import Permutation, identity_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness

MatchOn = Literal["weights", "activations"]
States = TypeVar("States", bound="Mapping[str, Tensor] | Sequence[Mapping[str, Tensor] | nn.Module] | nn.Module")


@dataclass(frozen=True, repr=False)
class Alignment(Brief, Generic[States]):
    """Networks in one basin.

    Attributes:
        states: the permuted networks, in the form in which they were given (a list, or a stack).
        permutations: one for each network.
        transpositions: number of transpositions (NoT) of each.
        distances_before: L2 distance of each network's parameters to the reference, as given.
        distances_after: the same after the permutation.
        reference: index of the network that stayed as it is, or None (a mean, a universe, a given state).
        iterations: passes over the networks, those of the relaxation of a universe included.
        certificates: for each network, by how much its outputs on the graph's example inputs changed, beside what
            rounding explains (:func:`~tu_symmetry.certify`); empty where nothing was measured.
        uncertified: why nothing was measured; empty where something was.
    """

    states: States
    permutations: list[Permutation]
    transpositions: list[int]
    distances_before: list[float]
    distances_after: list[float]
    reference: int | None
    iterations: int
    certificates: list[Certificate] = field(default_factory=list)
    uncertified: str = ""

    def facts(self) -> list[tuple[str, str]]:
        """How many networks, and how far they were moved."""
        moved = [k for k in range(len(self.permutations)) if k != self.reference]
        before, after = (span([d[k] for k in moved]) for d in (self.distances_before, self.distances_after))
        changes = [certificate.change for certificate in self.certificates]
        return [
            ("networks", str(len(self.permutations))),
            ("reference", "none of them" if self.reference is None else f"number {self.reference}"),
            ("NoT", span([self.transpositions[k] for k in moved])),
            ("distance", f"{before} -> {after}"),
            ("outputs changed by", f"{max(changes):.1e} at most" if changes else f"not measured: {self.uncertified}"),
        ]


@leaves_randomness
def align(
    graph: SymmetryGraph,
    states: States,
    *,
    reference: Reference | Mapping[str, Tensor] | nn.Module = "first",
    match_on: MatchOn = "weights",
    solver: Solver = "frank_wolfe",
    similarity: Similarity = "product",
    model: nn.Module | None = None,
    dataloader: Iterable[Any] | None = None,
    candidates: int = 16,
    max_iterations: int = 20,
    threads: int = 1,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
    certify: bool = True,
) -> Alignment[States]:
    """Permute networks so that they lie in one basin.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        states: a sequence of state dicts, or a stack with a leading sample axis; at least two networks. Or what has
            trained them: a LightningModule with a deep ensemble of TorchUncertainty, or a sequence of LightningModules
            with a network each, which stay as they are; the aligned states are then a list.
        reference: what all are aligned to (see :mod:`~tu_symmetry.alignment.consensus`; ``tu-symmetry align`` gives the
            same). ``first``: the first network. ``medoid``: the network with the least sum of distances to the others
            after matching, among at most ``candidates`` of them. ``mean``: each network to the mean of those aligned
            before it. ``universe``: the sum of all pairs' objectives: from the running mean, each network against the
            mean of all others until nothing moves (``(||sum W||^2 - sum ||W||^2) / 2``; linear in their number, and
            consistent along every cycle by construction). Or a state dict.
        match_on: match units by ``weights``, or by ``activations`` on ``dataloader`` with ``model`` (``first``,
            ``medoid``, a given state).
        solver: how weights are matched: ``frank_wolfe``, or ``descent``, from the identity, which misses more
            where networks were permuted.
        similarity: how activations are compared, see :func:`activation_matching`.
        model: the module, for activation matching.
        dataloader: batches for activation matching; read once for each network.
        candidates: bound on the networks that are compared for a medoid (a fixed sample of them if there are more).
        max_iterations: bound on the sweeps of a universe.
        threads: networks that are matched at the same time (assignments release the GIL).
        generator: for the order of groups in descents; a fixed order without one. The result
            does not depend on the number of threads.
        progress: called after each network with ``{"done", "total", "iteration"}``.
        certify: measure on the example inputs that the graph was discovered with that the outputs of each permuted
            network stay the same: some six forward passes of each, in float64 on the CPU. Where the graph holds no
            network to run (it was unpickled), the result says so.

    Returns:
        The alignment. The aligned states compute the same functions as the given ones.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights; outputs of a permuted network that
            changed by more than rounding explains.
        TypeError: members that are not state dicts, counts that are no whole numbers.
        ValueError: fewer than two networks, an unknown word, matching by activations without a model and data, or
            options that nothing reads.
    """
    members = unstack(states)
    given = not isinstance(reference, str)
    if given:
        reference = read_state(reference, "reference")
    if len(members) < (1 if given else 2):
        raise ValueError(
            f"aligning needs at least two networks, got {len(members)}; to align one network to another, pass the "
            "other as reference=state"
        )
    check_number(threads, "threads", whole=True)
    _check_words(reference, match_on, solver, similarity, candidates, max_iterations)
    graph.require_verified()
    for k, member in enumerate(members):
        graph.check_state(member, name=f"states[{k}]")
    match = matcher(graph, match_on, solver, similarity, model, dataloader, generator)
    target = find_target(
        graph,
        members,
        cast("Reference | Mapping[str, Tensor]", reference),
        match,
        candidates=candidates,
        max_iterations=max_iterations,
        threads=1 if match_on == "activations" else threads,
        progress=progress,
    )
    if given:
        graph.check_state(target.state, name="reference")
    known = dict(target.permutations)
    todo = [k for k in range(len(members)) if k not in known]
    found = bounded(
        lambda k: match(target.state, members[k], target.jobs + k).permutation,
        todo,
        1 if match_on == "activations" else threads,
    )
    for done, (k, permutation) in enumerate(found, 1):
        known[k] = permutation
        if progress is not None:
            progress({"step": "aligning", "done": done, "total": len(todo), "iteration": 1})
    permutations = [known[k] for k in range(len(members))]
    aligned = [permute_tensors(graph, p, m) for p, m in zip(permutations, members, strict=True)]
    anchor = mean_state(aligned) if reference in ("mean", "universe") else target.state
    certificates, uncertified = _certificates(graph, members, aligned, permutations, certify)
    result: Any = aligned
    if isinstance(states, Mapping):
        result = as_given(states, {name: torch.stack([a[name] for a in aligned]) for name in states})
    return Alignment(
        states=result,
        permutations=permutations,
        transpositions=[transposition_count(p) for p in permutations],
        distances_before=[weight_distance(graph, anchor, m) for m in members],
        distances_after=[weight_distance(graph, anchor, a) for a in aligned],
        reference=target.index,
        iterations=target.iterations,
        certificates=certificates,
        uncertified=uncertified,
    )


def matcher(
    graph: SymmetryGraph,
    match_on: MatchOn,
    solver: Solver,
    similarity: Similarity,
    model: nn.Module | None,
    dataloader: Iterable[Any] | None,
    generator: torch.Generator | None,
) -> Match:
    """How two networks are matched; the seed of random orders is counted on from one matching to the next.

    Raises:
        ValueError: matching by activations without a model and data.
    """
    if match_on == "activations":
        if model is None or dataloader is None:
            raise ValueError(
                "match_on='activations' needs model= and dataloader=: units are matched by what they compute"
            )
        data = reusable(dataloader)
        return lambda target, member, job: activation_matching(
            graph, model, target, member, data, similarity=similarity
        )
    seed = None if generator is None else int(torch.randint(2**62, (), generator=generator, device="cpu"))

    def match(target: Mapping[str, Tensor], member: Mapping[str, Tensor], job: int) -> Matching:
        own = None if seed is None else torch.Generator().manual_seed(seed + job)
        return weight_matching(graph, target, member, solver=solver, generator=own)

    return match


def _check_words(
    reference: Any, match_on: Any, solver: Any, similarity: Any, candidates: int, max_iterations: int
) -> None:
    """Refuse unknown words, and options that nothing would read."""
    if isinstance(reference, str) and reference not in get_args(Reference):
        raise ValueError(f"unknown reference {reference!r}: 'first', 'medoid', 'mean', 'universe', or a state dict")
    if match_on not in get_args(MatchOn):
        raise ValueError(
            f"unknown match_on {match_on!r}: 'weights' or 'activations' (straight_through_matching aligns one network)"
        )
    if solver not in ("frank_wolfe", "descent"):
        raise ValueError(f"unknown solver {solver!r}: 'frank_wolfe' or 'descent'")
    for value, what in ((candidates, "candidates"), (max_iterations, "max_iterations")):
        check_number(value, what, whole=True)
    if candidates < 2 or max_iterations < 1:
        raise ValueError(
            f"candidates must be at least 2, max_iterations at least 1; got {candidates}, {max_iterations}"
        )
    if match_on == "activations":
        if reference in ("mean", "universe"):
            raise ValueError(
                f"reference={reference!r} averages weights and has no activations of its own; use match_on='weights', "
                "or reference='first' or 'medoid'"
            )
        if solver != "frank_wolfe":
            raise ValueError("solver= is of weight matching; match_on='activations' does not read it")
    elif similarity != "product":
        raise ValueError("similarity= is of activation matching; match_on='weights' does not read it")


UNMOVED = Certificate(0.0, 0.0, torch.float64, 0)  # of a network that stayed as it is


def is_identity(graph: SymmetryGraph, permutation: Permutation) -> bool:
    """Whether a permutation leaves every unit where it is."""
    identity = identity_permutation(graph)
    return all(torch.equal(p, identity[name]) for name, p in permutation.items())


def _certificates(
    graph: SymmetryGraph,
    members: Sequence[State],
    aligned: Sequence[State],
    permutations: Sequence[Permutation],
    wanted: bool,
) -> tuple[list[Certificate], str]:
    """A certificate of each network, or why there is none."""
    certificates: list[Certificate] = []
    for k, (before, after, permutation) in enumerate(zip(members, aligned, permutations, strict=True)):
        if wanted and graph.probe is not None and is_identity(graph, permutation):
            certificates.append(UNMOVED)
            continue
        found, reason = measured(graph, before, after, f"align: states[{k}]", wanted=wanted, rounded=False)
        if found is None:
            return [], reason
        certificates.append(found)
    return certificates, ""
