"""Fingerprints: numbers that are the same for all weights of one orbit, and change with everything else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.alignment.balance import balanced
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.scaling.folding import folding_element
from tu_symmetry.states import State, SymmetryError
from tu_symmetry.symmetry.action import scale_tensors, sign_tensors, unfolded
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import LinearGroup, PermutationGroup, ScaleGroup
from tu_symmetry.symmetry.running.weights import as_computed, is_continuous

_STILL, _MOST_TURNS = 1e-10, 100
_ROUNDING, _LEAST_TOLERANCE = 20, 1e-8  # of a distance that counts as none, in units of the last place


@dataclass(frozen=True, eq=False, repr=False)
class Fingerprint(Brief):
    """Invariants of a network's orbit, all continuous in its weights.

    Attributes:
        invariants: for each tensor, in its least form, what no permutation, sign or rotation changes: the sorted norms
            of its slices along each axis, or the singular values along each axis where matrices mix its entries.
        outputs: what the network computes on the graph's example inputs, in float64 and with epsilons of nearly zero;
            empty where the graph holds no network to run.
        rounding: the rounding of the weights, relative to them.
        left_out: tensors that have no least form, as dead units meet them, or units whose maker or reader has a lower
            rank: of these the outputs alone tell.
    """

    invariants: dict[str, Tensor]
    outputs: dict[str, Tensor]
    rounding: float
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is not finite."""
        bad = [name for name, held in (self.invariants | self.outputs).items() if not bool(torch.isfinite(held).all())]
        if bad:
            raise SymmetryError(f"no fingerprint: {bad[0]} are not finite (a diverged run, or outputs that overflow)")

    def differences(self, other: Fingerprint) -> dict[str, float]:
        """The L2 distance of each part, relative to the larger of both norms; 0 where both are zero."""
        own, others = ({f"weights of {n}": t for n, t in f.invariants.items()} | f.outputs for f in (self, other))
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in others.items()}:
            raise SymmetryError(
                "fingerprints of different architectures, of different example inputs, or of networks of which one "
                "has gains that cannot be folded: take both with one graph"
            )
        sizes = {n: max(float(own[n].norm()), float(others[n].norm())) for n in own}
        return {n: float((own[n] - others[n]).norm()) / size if size else 0.0 for n, size in sizes.items()}

    def distance(self, other: Fingerprint) -> float:
        """The largest of all :meth:`differences`."""
        return max(self.differences(other).values(), default=0.0)

    @property
    def tolerance(self) -> float:
        """The distance that the rounding of weights explains, with room for what computation adds."""
        return max(_LEAST_TOLERANCE, _ROUNDING * self.rounding)

    def matches(self, other: Fingerprint, *, tolerance: float | None = None) -> bool:
        """Whether the distance is within a tolerance; by default within the larger :attr:`tolerance` of both."""
        return self.distance(other) <= (max(self.tolerance, other.tolerance) if tolerance is None else tolerance)


def fingerprint(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> Fingerprint:
    """Numbers that agree for networks that differ by found symmetries, up to rounding, and hardly for others.

    Laws: permutations, scales, signs, linear maps and normalizations leave the fingerprint as it is; it is continuous
    in the weights, but where units die. Networks of one fingerprint compute the same on
    the example inputs, and their tensors have the same norms, or singular values, in least form.

    Not told apart: networks that compute the same without a symmetry that was found (which is told by aligning them),
    and changes that keep norms in what the example inputs do not reach, or change what is ``left_out`` there.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: state dict of one network.

    Raises:
        SymmetryError: as :func:`~tu_symmetry.canonicalize`, and outputs that are not finite.
        ValueError: a stack of states.
    """
    least, degenerate = least_form(graph, state)
    mixing = [group for group in graph.linears if not unfolded(graph, group, least)]
    left_out = _reached(graph, degenerate)
    told = [n for n in graph.shapes if is_continuous(least[n]) and n not in left_out]
    outputs = {}
    if graph.probe is not None:
        found = graph.probe.without_epsilons().run(state)
        wide = [t.flatten().to(as_computed(t.dtype, torch.float64)) for t in found]
        outputs = {f"outputs {k}": t for k, t in enumerate(wide) if is_continuous(t)}
    rounding = max((torch.finfo(t.dtype).eps for t in state.values() if is_continuous(t)), default=0.0)
    invariants = {n: _invariants(graph, n, least[n], mixing) for n in told}
    return Fingerprint(invariants, outputs, rounding, tuple(sorted(left_out)))


def least_form(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> tuple[State, set[str]]:
    """A network in float64 with folded norms, of least mass, and with norms of one before normalizations.

    Networks that differ by found symmetries then differ by permutations, signs and orthogonal matrices alone, but for
    what the groups move of which the names are returned too: some of their units have no least mass.

    Raises:
        SymmetryError: as :func:`~tu_symmetry.canonicalize`, and a form that is not reached.
        ValueError: a stack of states.
    """
    graph.require_verified()
    if graph.check_state(state):
        raise ValueError("a fingerprint is that of one state, this is a stack: call it for each of its networks")
    current: State = {n: t.detach().to("cpu", as_computed(t.dtype, torch.float64)) for n, t in state.items()}
    degenerate = set(canonicalize(graph, current, normalizations="unit_norm", certify=False).degenerate)
    normalized = graph.without(*(g.name for g in graph.scales))
    for _ in range(_MOST_TURNS):
        step = 0.0
        if graph.normalizations:
            form = canonicalize(normalized, current, normalizations="unit_norm", certify=False)
            step, current = max((float(s.abs().max()) for s in form.log_scale.values()), default=0.0), form.state
        logs, signs = folding_element(graph, current)
        least = balanced(graph, sign_tensors(graph, signs, scale_tensors(graph, logs, current)), certify=False)
        current, degenerate = least.state, degenerate | least.degenerate.keys()
        if step <= _STILL:
            return current, degenerate
    raise SymmetryError(
        f"no least form after {_MOST_TURNS} turns of normalizations and masses: the last one moved factors by "
        f"{step:.0e}. Some units are all but dead; prune them first"
    )


def _reached(graph: SymmetryGraph, names: Collection[str]) -> set[str]:
    """The tensors of groups of factors and matrices with these names, and of all that meet one of them in a tensor."""
    groups: tuple[ScaleGroup | LinearGroup, ...] = (*graph.scales, *graph.normalizations, *graph.linears)
    held = [(g.name in names, {m.parameter for m in g.members}) for g in groups]
    reached = set().union(*(own for first, own in held if first))
    while more := set().union(*(own for _, own in held if own & reached)) - reached:
        reached |= more
    return reached


def _invariants(graph: SymmetryGraph, name: str, tensor: Tensor, mixing: Sequence[LinearGroup]) -> Tensor:
    """What permutations and signs of slices leave of a tensor, and matrices too where they mix slices of it."""
    mixed = any(m.parameter == name for g in mixing for m in g.members)
    groups: tuple[PermutationGroup | LinearGroup, ...] = (*graph.permutations, *mixing)
    own = [m for g in groups for m in g.members if m.parameter == name]
    apart = {m.axis for m in own if m.within_axis is not None}  # which slices these are depends on another axis
    parts = [tensor.norm().reshape(1)]
    for axis in range(tensor.ndim) if not (mixed and apart) else ():
        rows = tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
        if axis not in apart:
            parts.append(torch.linalg.svdvals(rows) if mixed else rows.norm(dim=1).sort().values)
    return torch.cat(parts)
