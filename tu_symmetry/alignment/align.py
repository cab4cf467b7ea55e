"""Aligning many networks of one architecture: an ensemble, posterior samples, snapshots of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.activations import activation_matching
from tu_symmetry.alignment.barrier import mean_state
from tu_symmetry.alignment.evaluation import reusable
from tu_symmetry.alignment.gram import WeightSimilarities, families, resized, size_exponent, working
from tu_symmetry.alignment.matching import Matching, Progress, descend, weight_distance, weight_matching
from tu_symmetry.alignment.relaxation import synchronized_frank_wolfe
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.certificate import Certificate
from tu_symmetry.symmetry.elements import Permutation, identity_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.measured import measured
from tu_symmetry.symmetry.randomness import leaves_randomness
from tu_symmetry.symmetry.states import State, require_state, unstack

_SWEEPS = 100
States = TypeVar("States", bound="Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]")


@dataclass(frozen=True)
class Alignment(Generic[States]):
    """Networks in one basin.

    Attributes:
        states: the permuted networks, in the form in which they were given (a list, or a stack).
        permutations: one element for each network.
        transpositions: number of transpositions (NoT) of each.
        distances_before: L2 distance of each network's parameters to the reference, as given.
        distances_after: the same after the permutation.
        reference: index of the network that stayed as it is, or None (a mean, a universe, a given state).
        rounds: passes over the networks.
        certificates: of each network, by how much its outputs on the graph's example inputs changed, beside what
            rounding explains (:func:`~tu_symmetry.certify`); empty where nothing was measured.
        uncertified: why nothing was measured; empty where something was.
    """

    states: States
    permutations: list[Permutation]
    transpositions: list[int]
    distances_before: list[float]
    distances_after: list[float]
    reference: int | None
    rounds: int
    certificates: list[Certificate] = field(default_factory=list)
    uncertified: str = ""


@leaves_randomness
def align(
    graph: SymmetryGraph,
    states: States,
    reference: Literal["first", "medoid", "mean", "universe"] | Mapping[str, Tensor] = "first",
    method: Literal["weight", "activation"] = "weight",
    *,
    model: nn.Module | None = None,
    dataloader: Iterable[Any] | None = None,
    max_rounds: int = 20,
    threads: int = 1,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
    certify: bool = True,
    **options: Any,
) -> Alignment[States]:
    """Permute networks so that they lie in one basin.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        states: a sequence of state dicts, or a stack with a leading sample axis; at least two networks.
        reference: what all are aligned to. ``first``: the first network. ``medoid``: the network with the least sum of
            distances to the others after matching (quadratic in number). ``mean``: each network to the mean of those
            aligned before it, then each to the mean of all until nothing moves. ``universe``: the sum of all pairs'
            objectives at once, by Frank-Wolfe on all networks together, then each network against the sum of all
            others until nothing moves (``(||sum W||^2 - sum ||W||^2) / 2``; linear in their number, and consistent
            along every cycle by construction). Or a state dict.
        method: by weights, or by activations on ``dataloader`` with ``model`` (``first``, ``medoid``, a given state).
        model: the module, for activation matching.
        dataloader: batches for activation matching; read once for each network.
        max_rounds: bound on the passes of ``mean`` and ``universe``.
        threads: networks that are matched at the same time (assignments release the GIL).
        generator: for the order of groups in descents; a fixed order without one. The result does not depend on the
            number of threads.
        progress: called after each network with ``{"done", "total", "round"}``.
        certify: measure on the example inputs that the graph was discovered with that the outputs of each permuted
            network stay the same: some six forward passes of each, in float64 on the CPU. Where the graph holds no
            network to run (it was unpickled), the result says so.
        options: passed on to :func:`weight_matching` or :func:`activation_matching` (a universe takes none).

    Returns:
        The alignment. The aligned states compute the same functions as the given ones.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights; outputs of a permuted network that
            changed by more than rounding explains.
        TypeError: members that are not state dicts.
        ValueError: fewer than two networks, a method without what it needs, or options that nothing reads.
    """
    members = unstack(states)
    given = not isinstance(reference, str)
    if given:
        require_state(reference, "reference")
    if len(members) < (1 if given else 2):
        raise ValueError(
            f"aligning needs at least two networks, got {len(members)}; to align one network to another, pass the "
            "other as reference=state"
        )
    if method not in ("weight", "activation"):
        raise ValueError(
            f"unknown method {method!r}: 'weight' or 'activation' (straight_through_matching aligns one network)"
        )
    if options and reference == "universe":
        raise ValueError(f"reference='universe' matches all networks together and takes no {sorted(options)}")
    graph.require_verified()
    for k, member in enumerate(members):
        graph.check_state(member, name=f"states[{k}]")
    if method == "activation":
        if model is None or dataloader is None:
            raise ValueError("method='activation' needs model= and dataloader=: units are matched by what they compute")
        if reference in ("mean", "universe"):
            raise ValueError(
                f"reference={reference!r} averages weights and has no activations of its own; use method='weight', or "
                "reference='first' or 'medoid'"
            )
        dataloader = reusable(dataloader)

    seed = None if generator is None else int(torch.randint(2**62, (), generator=generator))

    def match(target: Mapping[str, Tensor], member: Mapping[str, Tensor], job: int) -> Matching:
        if method == "activation":
            assert model is not None and dataloader is not None
            return activation_matching(graph, model, target, member, dataloader, **options)
        own = None if seed is None else torch.Generator().manual_seed(seed + job)
        return weight_matching(graph, target, member, generator=own, **options)

    runner = _Runner(1 if method == "activation" else threads, progress)
    identity = identity_permutation(graph)
    index: int | None = None
    rounds = 1
    if given or reference == "first":
        target: Mapping[str, Tensor] = reference if isinstance(reference, Mapping) else members[0]
        if given:
            graph.check_state(target, name="reference")
        index = None if given else 0
        todo = list(range(len(members))) if given else list(range(1, len(members)))
        found = runner(lambda k: match(target, members[k], k).permutation, todo)
        permutations = [identity] * (len(members) - len(todo)) + found
    elif reference == "medoid":
        index, permutations = _medoid(graph, members, match, runner)
        target = members[index]
    elif reference in ("mean", "universe"):
        rounds = 0
        if reference == "universe":
            start, rounds = synchronized_frank_wolfe(
                graph, _parameters(graph, members), families(graph), threads=threads
            )
        else:
            start = _running_mean(graph, members, match, _Runner(1, progress))
        permutations, more = _synchronize(graph, members, start, runner, max_rounds, leave_out=reference == "universe")
        rounds += more
        target = mean_state([permute_tensors(graph, p, m) for p, m in zip(permutations, members, strict=True)])
    else:
        raise ValueError(f"unknown reference {reference!r}: 'first', 'medoid', 'mean', 'universe', or a state dict")

    aligned = [permute_tensors(graph, p, m) for p, m in zip(permutations, members, strict=True)]
    certificates, uncertified = _certificates(graph, members, aligned, permutations, certify)
    result: Any = aligned
    if isinstance(states, Mapping):
        result = {name: torch.stack([a[name] for a in aligned]) for name in states}
    return Alignment(
        states=result,
        permutations=permutations,
        transpositions=[transposition_count(p) for p in permutations],
        distances_before=[weight_distance(graph, target, m) for m in members],
        distances_after=[weight_distance(graph, target, a) for a in aligned],
        reference=index,
        rounds=rounds,
        certificates=certificates,
        uncertified=uncertified,
    )


def _certificates(
    graph: SymmetryGraph,
    members: Sequence[State],
    aligned: Sequence[State],
    permutations: Sequence[Permutation],
    wanted: bool,
) -> tuple[list[Certificate], str]:
    """A certificate of each network, or why there is none."""
    identity = identity_permutation(graph)
    certificates: list[Certificate] = []
    for k, (before, after, permutation) in enumerate(zip(members, aligned, permutations, strict=True)):
        if wanted and graph.probe is not None and all(torch.equal(p, identity[n]) for n, p in permutation.items()):
            certificates.append(Certificate(0.0, 0.0, torch.float64, 0))  # it stayed as it is
            continue
        found, reason = measured(graph, before, after, f"align: states[{k}]", wanted=wanted, rounded=False)
        if found is None:
            return [], reason
        certificates.append(found)
    return certificates, ""


T = TypeVar("T")


class _Runner:
    """Applies a function to many items, in threads where asked, and reports progress."""

    def __init__(self, threads: int, progress: Progress | None) -> None:
        self.threads, self.progress = threads, progress

    def __call__(self, function: Callable[[int], T], items: Sequence[int], round_: int = 1) -> list[T]:
        results: list[T] = []

        def done(result: T) -> None:
            results.append(result)
            if self.progress is not None:
                self.progress({"done": len(results), "total": len(items), "round": round_})

        if self.threads <= 1:
            for item in items:
                done(function(item))
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                for result in pool.map(function, items):
                    done(result)
        return results


def _medoid(
    graph: SymmetryGraph, members: list[State], match: Callable[..., Matching], runner: _Runner
) -> tuple[int, list[Permutation]]:
    count = len(members)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    found = dict(
        zip(
            pairs,
            runner(lambda k: match(members[pairs[k][0]], members[pairs[k][1]], k), range(len(pairs))),
            strict=True,
        )
    )
    totals = [sum(found[i, j].distance_after for j in range(count) if j != i) for i in range(count)]
    best = min(range(count), key=lambda i: totals[i])
    identity = identity_permutation(graph)
    return best, [identity if j == best else found[best, j].permutation for j in range(count)]


def _running_mean(
    graph: SymmetryGraph, members: list[State], match: Callable[..., Matching], runner: _Runner
) -> list[Permutation]:
    """Match each network to the mean of those before it."""
    parameters = _parameters(graph, members)
    total = parameters[0]

    def add(k: int) -> Permutation:
        nonlocal total
        if k == 0:
            return identity_permutation(graph)
        mean = {alias: total[n] / k for n in total for alias in graph.aliases[n]}
        found = match({**members[k], **mean}, members[k], k).permutation
        moved = permute_tensors(graph, found, parameters[k])
        total = {n: t + moved[n] for n, t in total.items()}
        return found

    return runner(add, range(len(members)))


def _parameters(graph: SymmetryGraph, members: Sequence[State]) -> list[State]:
    """What enters sums of networks: parameters in one dtype, on one device, divided by one power of two."""
    exponent = size_exponent(graph, *members)
    if exponent:
        members = [resized(graph, m, exponent) for m in members]
    first = working(graph, members[0])
    return [{n: t.to(first[n].device, first[n].dtype) for n, t in working(graph, m).items()} for m in members]


def _synchronize(
    graph: SymmetryGraph,
    members: list[State],
    start: list[Permutation],
    runner: _Runner,
    max_rounds: int,
    *,
    leave_out: bool,
) -> tuple[list[Permutation], int]:
    """Coordinate descent of each network against the others' sum (or against the mean of all), until nothing moves."""
    permutations = list(start)
    family_list = families(graph)
    parameters = _parameters(graph, members)
    aligned = [permute_tensors(graph, p, m) for p, m in zip(permutations, parameters, strict=True)]
    total = {n: torch.stack([a[n] for a in aligned]).sum(0) for n in aligned[0]}
    for round_ in range(1, max_rounds + 1):
        moved = False
        for k, own in enumerate(parameters):
            target = {n: t - aligned[k][n] for n, t in total.items()} if leave_out else total
            found, _, _ = descend(WeightSimilarities(graph, target, own), family_list, permutations[k], _SWEEPS)
            if any(not torch.equal(found[g], permutations[k][g]) for g in found):
                moved = True
                candidate = permute_tensors(graph, found, own)
                total = {n: t - aligned[k][n] + candidate[n] for n, t in total.items()}
                permutations[k], aligned[k] = found, candidate
            if runner.progress is not None:
                runner.progress({"done": k + 1, "total": len(members), "round": round_ + 1})
        if not moved:
            return permutations, round_
    return permutations, max_rounds
