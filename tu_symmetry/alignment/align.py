"""Aligning many networks of one architecture: an ensemble, posterior samples, snapshots of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.activations import Similarity, activation_matching
from tu_symmetry.alignment.consensus import Reference, find_target
from tu_symmetry.alignment.matching import Solver, weight_distance
from tu_symmetry.alignment.moves import Move, Moves, move_tensors
from tu_symmetry.alignment.networks import StateSource
from tu_symmetry.alignment.over import Match, Over, check_over
from tu_symmetry.evaluation import reusable
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.states import as_given, mean_state, read_state, unstack
from tu_symmetry.symmetry.certificate import Certificate, measured
from tu_symmetry.symmetry.elements import transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness

MatchOn = Literal["weights", "activations"]
States = TypeVar("States", bound="Mapping[str, Tensor] | Sequence[Mapping[str, Tensor] | nn.Module] | nn.Module")


@dataclass(frozen=True, repr=False)
class Alignment(Moves, Brief, Generic[States]):
    """Networks in one basin.

    ``log_scales``, ``balances``, ``permutations``, ``signs`` and ``maps`` moved each network, in this order.

    Attributes:
        states: the moved networks, in the form in which they were given (a list, or a stack).
        moves: all elements that moved each network.
        transpositions: number of transpositions (NoT) of each.
        distances_before: L2 distance of each network's parameters to the reference, as given; over scales that between
            both at their least mass.
        distances_after: the same after all moves.
        reference: index of the network that keeps its units, signs and rotations, or None (a mean, a universe, a given
            state).
        iterations: passes over the networks.
        certificates: for each network, by how much its outputs on the graph's example inputs changed, beside what
            rounding explains (:func:`~tu_symmetry.certify`); empty where nothing was measured.
        uncertified: why nothing was measured; empty where something was.
    """

    states: States
    moves: list[Move]
    transpositions: list[int]
    distances_before: list[float]
    distances_after: list[float]
    reference: int | None
    iterations: int = 1
    certificates: list[Certificate] = field(default_factory=list)
    uncertified: str = ""


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
    """Move networks by their symmetries so that they lie in one basin.

    The aligned states compute the same functions as the given ones.

    Law: matched by weights, no network ends farther from ``first``, ``medoid`` or a given state than it was, and of
    ``mean`` and ``universe`` the squared distances of all pairs do not add up to more (up to rounding). Over scales
    this holds for the networks at their least mass, and over rotations for those with folded norms, the reference among
    them: to these all distances refer.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        states: at least two networks: a sequence of state dicts, a stack with a leading sample axis, a LightningModule
            with a deep ensemble of TorchUncertainty, or a sequence of LightningModules with a network each.
        reference: what all are aligned to. ``first``: the first network. ``medoid``: the network with the least sum of
            distances to the others after matching, among at most 16 of them. ``mean``: each network to the mean of
            those aligned before it. ``universe``: from the running mean, each network against the mean of all others
            until nothing moves, which maximizes the sum of all pairs' objectives. Or a state dict.
        over: which symmetries move networks: ``"permutations"``, and beside them, by weights, any of ``"signs"`` of
            units (:func:`~tu_symmetry.alignment.signed_matching`), ``"rotations"`` of units that matrices may mix
            (:func:`~tu_symmetry.alignment.rotation_matching`; the norms of all networks are folded first, see
            :func:`~tu_symmetry.fold_norms`) and ``"scales"``. The latter bring each network, and a given reference, to
            its least squared norm first, which permutations, signs and rotations leave as it is: over positive scales
            (:func:`~tu_symmetry.canonicalize`; what a normalization undoes stays), and with ``"rotations"`` over
            general linear maps too (:func:`~tu_symmetry.alignment.balanced`), so that the orthogonal ones that are then
            matched are all that is left.
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
        raise ValueError(
            "signs, scales and rotations are matched by weights; leave out match_on, or leave them out of over="
        )
    match = _matcher(graph, reference, match_on, solver, similarity, model, dataloader)
    graph.require_verified()
    for k, member in enumerate(members):
        graph.check_state(member, name=f"states[{k}]")
    if given:
        graph.check_state(cast("Mapping[str, Tensor]", reference), name="reference")
    to = cast("Reference | Mapping[str, Tensor]", reference)
    target = find_target(graph, StateSource(members), to, over, match=match, solver=solver)
    moves = [target.move(k, member) for k, member in enumerate(members)]
    aligned = [move_tensors(graph, move, member) for move, member in zip(moves, members, strict=True)]
    anchor = mean_state(aligned) if reference in ("mean", "universe") else target.state
    certificates, uncertified = certified(
        measured(graph, members[k], aligned[k], f"align: states[{k}]", wanted=certify, rounded=moves[k].rounds)
        for k in range(len(members))
    )
    result: Any = aligned
    if isinstance(states, Mapping):
        result = as_given(states, {name: torch.stack([a[name] for a in aligned]) for name in states})
    return Alignment(
        states=result,
        moves=moves,
        transpositions=[transposition_count(move.permutation) for move in moves],
        distances_before=[
            weight_distance(graph, anchor, move_tensors(graph, scales, member))
            for scales, member in zip(target.scales, members, strict=True)
        ],
        distances_after=[weight_distance(graph, anchor, a) for a in aligned],
        reference=target.index,
        iterations=1 + target.sweeps,
        certificates=certificates,
        uncertified=uncertified,
    )


def _matcher(
    graph: SymmetryGraph,
    reference: Any,
    match_on: MatchOn,
    solver: Solver,
    similarity: Similarity,
    model: nn.Module | None,
    dataloader: Iterable[Any] | None,
) -> Match | None:
    """How two networks are matched by activations, None for weights; refuses words and options that nothing reads."""
    if isinstance(reference, str) and reference not in get_args(Reference):
        raise ValueError(f"unknown reference {reference!r}: 'first', 'medoid', 'mean', 'universe', or a state dict")
    for word, what, known in ((match_on, "match_on", MatchOn), (solver, "solver", Solver)):
        if word not in get_args(known):
            raise ValueError(f"unknown {what} {word!r}: {' or '.join(map(repr, get_args(known)))}")
    if match_on == "weights" and similarity != "product":
        raise ValueError("similarity= is of activation matching; match_on='weights' does not read it")
    if match_on == "weights":
        return None
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


def certified(found: Iterable[tuple[Certificate | None, str]]) -> tuple[list[Certificate], str]:
    """The certificates of all networks, or none of them and the first reason."""
    certificates = []
    for certificate, reason in found:
        if certificate is None:
            return [], reason
        certificates.append(certificate)
    return certificates, ""
