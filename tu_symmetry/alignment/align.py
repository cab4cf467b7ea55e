"""Aligning many networks of one architecture: an ensemble, posterior samples, snapshots of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.activations import Similarity, activation_matching
from tu_symmetry.alignment.consensus import Descend, Match, Reference, find_target
from tu_symmetry.alignment.matching import Solver, weight_distance, weight_matching
from tu_symmetry.alignment.rotations import rotation_matching
from tu_symmetry.alignment.signed import signed_matching
from tu_symmetry.evaluation import reusable
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.states import as_given, mean_state, read_state, unstack
from tu_symmetry.symmetry.action import linear_tensors, signed_tensors
from tu_symmetry.symmetry.certificate import Certificate, measured
from tu_symmetry.symmetry.elements import Maps, Permutation, Signs, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness

MatchOn = Literal["weights", "activations"]
Over = Literal["permutations", "signs", "rotations"]
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
        iterations: passes over the networks.
        signs: for each network, the units that turned after the permutation; empty dictionaries where only permutations
            were asked for.
        maps: for each network, the rotations after both; empty dictionaries where these were not asked for.
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
    iterations: int = 1
    certificates: list[Certificate] = field(default_factory=list)
    uncertified: str = ""
    signs: list[Signs] = field(default_factory=list)
    maps: list[Maps] = field(default_factory=list)

    @property
    def sign_changes(self) -> list[int]:
        """Number of units that turned in each network."""
        return [sum(int((s < 0).sum()) for s in signs.values()) for signs in self.signs]


@leaves_randomness
def align(
    graph: SymmetryGraph,
    states: States,
    *,
    reference: Reference | Mapping[str, Tensor] | nn.Module = "first",
    over: Sequence[Over] = ("permutations",),
    match_on: MatchOn = "weights",
    solver: Solver = "frank_wolfe",
    similarity: Similarity = "product",
    model: nn.Module | None = None,
    dataloader: Iterable[Any] | None = None,
    certify: bool = True,
) -> Alignment[States]:
    """Permute networks so that they lie in one basin.

    The aligned states compute the same functions as the given ones.

    Law: matched by weights, no network ends farther from ``first``, ``medoid`` or a given state than it was, and of
    ``mean`` and ``universe`` the squared distances of all pairs do not add up to more (up to rounding).

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        states: at least two networks: a sequence of state dicts, a stack with a leading sample axis, a LightningModule
            with a deep ensemble of TorchUncertainty, or a sequence of LightningModules with a network each.
        reference: what all are aligned to. ``first``: the first network. ``medoid``: the network with the least sum of
            distances to the others after matching, among at most 16 of them. ``mean``: each network to the mean of
            those aligned before it. ``universe``: from the running mean, each network against the mean of all others
            until nothing moves, which maximizes the sum of all pairs' objectives. Or a state dict.
        over: which symmetries move networks: ``("permutations",)``, or ``("permutations", "signs")`` to turn the signs
            of units too (:func:`~tu_symmetry.alignment.signed_matching`), by weights. With ``"rotations"``, units that
            matrices may mix are rotated (:func:`~tu_symmetry.alignment.rotation_matching`; ``first``, ``medoid``, a
            given state).
        match_on: match units by ``weights``, or by ``activations`` on ``dataloader`` with ``model`` (``first``,
            ``medoid``, a given state).
        solver: how weights are matched, see :func:`~tu_symmetry.weight_matching`.
        similarity: how activations are compared, see :func:`~tu_symmetry.activation_matching`.
        model: the module, for activation matching.
        dataloader: batches for activation matching; read once for each network.
        certify: measure on the graph's example inputs that the outputs of each permuted network stay the same: a few
            forward passes of each, in float64 on the CPU, where the graph holds a network to run.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights; outputs of a permuted network that
            changed by more than rounding explains.
        TypeError: members that are not state dicts.
        ValueError: fewer than two networks, an unknown word, or matching by activations without a model and data.
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
    over = check_over(over)
    if len(over) > 1 and match_on != "weights":
        raise ValueError("signs and rotations are matched by weights; leave out match_on, or leave them out of over=")
    if "rotations" in over and reference in ("mean", "universe"):
        raise ValueError(
            f"reference={reference!r} is of permutations and signs; take 'first' or 'medoid' for rotations"
        )
    match = _matcher(graph, reference, match_on, solver, similarity, model, dataloader)
    descend: Descend | None = None
    if "rotations" in over:
        match = partial(rotation_matching, graph, signs="signs" in over, solver=solver)
    elif "signs" in over:
        match = partial(signed_matching, graph, solver=solver)
        descend = lambda target, member, init: signed_matching(graph, target, member, init=init)  # noqa: E731
    graph.require_verified()
    for k, member in enumerate(members):
        graph.check_state(member, name=f"states[{k}]")
    target = find_target(graph, members, cast("Reference | Mapping[str, Tensor]", reference), match, descend=descend)
    if given:
        graph.check_state(target.state, name="reference")
    maps: list[Maps] = [{} for _ in members]
    elements = []
    for k, member in enumerate(members):
        if "rotations" in over and k != target.index:
            matching = match(target.state, member)
            maps[k] = matching.maps
            elements.append(matching.element)
        else:
            elements.append(target.element(k, member))
    aligned = [
        linear_tensors(graph, turned, signed_tensors(graph, element, member))
        for turned, element, member in zip(maps, elements, members, strict=True)
    ]
    anchor = mean_state(aligned) if reference in ("mean", "universe") else target.state
    certificates, uncertified = certified(
        measured(graph, members[k], aligned[k], f"align: states[{k}]", wanted=certify, rounded=bool(maps[k]))
        for k in range(len(members))
    )
    result: Any = aligned
    if isinstance(states, Mapping):
        result = as_given(states, {name: torch.stack([a[name] for a in aligned]) for name in states})
    return Alignment(
        states=result,
        permutations=[e.permutation for e in elements],
        transpositions=[transposition_count(e.permutation) for e in elements],
        distances_before=[weight_distance(graph, anchor, m) for m in members],
        distances_after=[weight_distance(graph, anchor, a) for a in aligned],
        reference=target.index,
        iterations=1 + target.sweeps,
        certificates=certificates,
        uncertified=uncertified,
        signs=[e.signs for e in elements],
        maps=maps,
    )


def _matcher(
    graph: SymmetryGraph,
    reference: Any,
    match_on: MatchOn,
    solver: Solver,
    similarity: Similarity,
    model: nn.Module | None,
    dataloader: Iterable[Any] | None,
) -> Match:
    """How two networks are matched; refuses unknown words, and options that nothing would read."""
    if isinstance(reference, str) and reference not in get_args(Reference):
        raise ValueError(f"unknown reference {reference!r}: 'first', 'medoid', 'mean', 'universe', or a state dict")
    for word, what, known in ((match_on, "match_on", MatchOn), (solver, "solver", Solver)):
        if word not in get_args(known):
            raise ValueError(f"unknown {what} {word!r}: {' or '.join(map(repr, get_args(known)))}")
    if match_on == "weights" and similarity != "product":
        raise ValueError("similarity= is of activation matching; match_on='weights' does not read it")
    if match_on == "weights":
        return partial(weight_matching, graph, solver=solver)
    if solver != "frank_wolfe":
        raise ValueError("solver= is of weight matching; match_on='activations' does not read it")
    if reference in ("mean", "universe"):
        raise ValueError(
            f"reference={reference!r} averages weights and has no activations of its own; use match_on='weights', "
            "or reference='first' or 'medoid'"
        )
    if model is None or dataloader is None:
        raise ValueError("match_on='activations' needs model= and dataloader=: units are matched by what they compute")
    data = reusable(dataloader)
    return lambda target, member: activation_matching(graph, model, target, member, data, similarity=similarity)


def check_over(over: Sequence[Over]) -> tuple[Over, ...]:
    """Raise a ValueError unless these are symmetries that networks can be aligned over."""
    if isinstance(over, str) or not {"permutations"} <= set(over) <= set(get_args(Over)):
        raise ValueError(
            f"over={over!r}: pass ('permutations',), and beside it what else may move networks, 'signs' or 'rotations'"
        )
    return tuple(over)


def certified(found: Iterable[tuple[Certificate | None, str]]) -> tuple[list[Certificate], str]:
    """The certificates of all networks, or none of them and the first reason."""
    certificates = []
    for certificate, reason in found:
        if certificate is None:
            return [], reason
        certificates.append(certificate)
    return certificates, ""
