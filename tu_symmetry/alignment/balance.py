"""Least mass over positive scales and linear maps: the form in which networks are compared by their weights.

A matrix ``A`` takes what makes units to ``A W`` and what reads them to ``A^-T V``. The mass ``|A W|^2 + |A^-T V|^2`` is
least where both have the same Gram matrix between the units, which leaves orthogonal matrices alone. Neither these nor
permutations and signs change a mass, so that balanced networks differ by nothing else if they compute the same so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tu_symmetry.alignment.gram import units_first
from tu_symmetry.alignment.matching import inner_product
from tu_symmetry.alignment.moves import Move, move_tensors
from tu_symmetry.scaling.canonical import CanonicalForm, canonicalize
from tu_symmetry.states import as_given
from tu_symmetry.symmetry.action import linear_tensors, unfolded
from tu_symmetry.symmetry.certificate import measured
from tu_symmetry.symmetry.elements import LogScale, Maps
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import LinearGroup, numbers_at

_MOST_SWEEPS = 300
_STILL = 1e-11  # the largest entry of a step that counts as none
_LOST = 1e-9  # singular values of the product of what makes and what reads units, relative to the largest


@dataclass(frozen=True, repr=False)
class BalancedForm(CanonicalForm):
    """A network of least mass over its positive scales and general linear maps.

    What it has of :class:`~tu_symmetry.scaling.CanonicalForm` means the same, with sweeps over all groups as
    ``iterations``; its log-factors act first, and are zero for units that a matrix mixes.

    Attributes:
        maps: symmetric matrices that act then, for each general linear group.
        converged: whether the last sweep moved nothing.
        degenerate: group name to the numbers of the blocks that stay as they are, because what makes the units or what
            reads them has a rank below their number, and their mass could be mixed away in part.
    """

    maps: Maps = field(default_factory=dict)
    converged: bool = True


def balanced(graph: SymmetryGraph, state: Mapping[str, Tensor], *, certify: bool = True) -> BalancedForm:
    """Bring a network to its least squared L2 norm over all positive scales and all general linear maps.

    For one group the best matrix is known in closed form, by the singular values of the product of what makes and what
    reads its units. Groups that meet in one tensor, and scales, take turns, in float64, until nothing moves. Scales are
    those of :func:`~tu_symmetry.canonicalize` with ``min_mass``: weights before a normalization stay as they are, as do
    gains that are folded (:func:`~tu_symmetry.fold_norms`).

    Laws: the function is unchanged; the mass never grows; networks that differ by scales and linear maps have forms
    that differ by orthogonal maps, and with these by permutations and signs where they differed by such as well.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: state dict of one network.
        certify: measure on the graph's example inputs that the outputs stay the same.

    Raises:
        SymmetryError: as :func:`~tu_symmetry.canonicalize`.
        ValueError: a stack of states.
    """
    found = _least_mass(graph, state, scales=True)
    form = replace(found, state=move_tensors(graph, Move(found.log_scale, found.maps), state))
    told = measured(graph, state, form.state, "the balanced form", wanted=certify)
    return replace(form, certificate=told[0], uncertified=told[1])


def canonical_linear(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> Maps:
    """The matrices that balance a network, and rotate units so that their Gram matrices are diagonal, descending.

    Units are then the singular vectors of what makes and reads them, ordered by their singular values. Of an orthogonal
    group the Gram matrix of all its tensors together becomes diagonal. Blocks that cannot be balanced (see
    :class:`BalancedForm`) keep the identity. Centered groups, and those whose gains are not folded, are left out.

    Law: networks that differ by linear maps have the same form under :func:`~tu_symmetry.symmetry.apply_linear`, up to
    the signs of units, where no two of a block's singular values are equal.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: a state dict of one network.

    Returns:
        Group name to float64 ``[*blocks, size, size]``, on the CPU.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: a stack of states.
    """
    found = _least_mass(graph, state, scales=False)
    maps: Maps = {}
    for group in graph.linears:
        if group.subgroup == "centered" or unfolded(graph, group, state):
            continue
        left, _, _ = torch.linalg.svd(_triangle(group, found.state, (1.0, -1.0) if group.orthogonal else (1.0,)))
        rotation = left.mT.clone()
        if group.subgroup == "complex":  # a rotation of the pair
            rotation[:, 1] *= torch.linalg.det(rotation).sign().unsqueeze(-1)
        rotation[found.degenerate.get(group.name, [])] = _identity(group)
        maps[group.name] = rotation.reshape(group.shape) @ found.maps.get(group.name, _identity(group))
    return maps


def _least_mass(graph: SymmetryGraph, state: Mapping[str, Tensor], *, scales: bool) -> BalancedForm:
    """The balanced form in float64, without a certificate; over linear maps alone where scales stay."""
    graph.require_verified()
    if graph.check_state(state):
        raise ValueError("a least mass is that of one state, this is a stack: call it for each of its networks")
    current = as_given(state, {n: t.double() if t.is_floating_point() else t for n, t in state.items()})
    before = inner_product(graph, current, current)
    active = [group for group in graph.linears if not unfolded(graph, group, state)]
    groups = [group for group in active if group.subgroup == "general" or (group.subgroup == "complex" and not scales)]
    kept = {group.name: _balancing(group, current)[1] for group in groups}
    rest = _without_own_factors(graph, groups, kept, {name for group in active for name in group.constant})
    log_scale: LogScale = {}
    maps: Maps = {g.name: _identity(g).expand(g.shape) for g in groups}
    sweep, step = 0, math.inf
    while step > _STILL and sweep < _MOST_SWEEPS:
        sweep, step = sweep + 1, 0.0
        if scales and rest.scale_terms:
            form = canonicalize(rest, current, certify=False)
            current = form.state
            for name, own in form.log_scale.items():
                step = max(step, float(own.abs().amax()) if len(own) else 0.0)
                log_scale[name] = log_scale[name] + own if name in log_scale else own
        for group in groups:
            matrices, _ = _balancing(group, current)
            step = max(step, float((matrices - _identity(group)).abs().amax()))
            current = linear_tensors(graph, {group.name: matrices}, current)
            maps[group.name] = matrices @ maps[group.name]
    lost = {name: torch.nonzero(~own).flatten() for name, own in kept.items() if not own.all()}
    masses, still = (before, inner_product(graph, current, current)), step <= _STILL
    return BalancedForm(current, log_scale, *masses, math.nan, sweep, lost, maps=maps, converged=still)


def _identity(group: LinearGroup) -> Tensor:
    return torch.eye(group.size, dtype=torch.float64, device="cpu")


def _triangle(group: LinearGroup, tensors: Mapping[str, Tensor], signs: Sequence[float]) -> Tensor:
    """Triangular ``L`` of each block with ``L L^T`` the Gram matrix of its units in members of these exponents.

    Returns float64 ``[blocks, size, at most size]``, on the CPU.
    """
    blocks = math.prod(group.blocks)
    rows = [
        units_first(m, tensors[m.parameter]).reshape(blocks, group.size, -1)
        for m in group.members
        if math.copysign(1.0, m.exponent) in signs
    ]
    if not rows:
        return torch.zeros(blocks, group.size, 0, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(torch.cat(rows, -1).mT, mode="r").R.mT.to("cpu", torch.float64)


def _balancing(group: LinearGroup, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The symmetric matrices that balance the blocks of a group, and bool ``[blocks]``: whether their rank allows it.

    With the triangles ``L`` and ``M`` of what makes and reads the units and ``M^T L = U S V^T``, the matrix
    ``S^-1/2 U^T M^T`` balances; its polar factor is the symmetric one. Where a tensor has the units on two axes the
    mass ``|A W A^-1|^2`` is at most ``(|A^2 W|^2 + |W A^-2|^2) / 2``, whose minimum is the square root of that matrix.
    """
    made, read = (_triangle(group, tensors, (sign,)) for sign in (1.0, -1.0))
    matrices, kept = _identity(group).repeat(len(made), 1, 1), torch.zeros(len(made), dtype=torch.bool, device="cpu")
    if group.subgroup == "complex":
        ratio = read.square().sum((1, 2)) / made.square().sum((1, 2))
        kept = torch.isfinite(ratio) & (ratio > 0)
        matrices[kept] *= ratio[kept, None, None] ** 0.25
    elif made.shape == read.shape == matrices.shape:
        left, values, _ = torch.linalg.svd(read.mT @ made)
        kept = values[:, -1] > _LOST * values[:, 0]
        balance = values[kept].rsqrt().unsqueeze(-1) * (left[kept].mT @ read[kept].mT)
        _, stretch, right = torch.linalg.svd(balance)
        places = {(m.parameter, m.axis) for m in group.members}
        if len({parameter for parameter, _ in places}) < len(places):
            stretch = stretch.sqrt()
        matrices[kept] = right.mT @ (stretch.unsqueeze(-1) * right)
    return matrices.reshape(group.shape), kept


def _without_own_factors(
    graph: SymmetryGraph, groups: Sequence[LinearGroup], kept: Mapping[str, Tensor], gains: Collection[str]
) -> SymmetryGraph:
    """The graph whose scales leave out the factors of single units that matrices mix, which hold them already.

    So are those of gains that are folded, and have to stay equal.
    """
    own = {number for group in groups for number in _own_factors(graph, group, kept[group.name])}
    own |= {n for gain in gains for term in graph.scale_terms.get(gain, ()) for n in term.index.flatten().tolist()}
    held = torch.tensor(sorted(own), dtype=torch.long, device="cpu")
    terms = {
        name: tuple(replace(t, index=torch.where(torch.isin(t.index, held), -1, t.index)) for t in of_tensor)
        for name, of_tensor in graph.scale_terms.items()
    }
    free = {n: ts for n, ts in terms.items() if any(bool((t.index >= 0).any()) for t in ts)}
    return replace(graph, scale_terms=free if graph.scales else {})


def _own_factors(graph: SymmetryGraph, group: LinearGroup, kept: Tensor) -> Iterator[int]:
    """The numbers of the factors that single units of the kept blocks have; what a whole block shares is none."""
    for member in group.members:
        for term in graph.scale_terms.get(member.parameter, ()):
            found = numbers_at(term.index, member)
            if found is not None:
                columns = found.reshape(len(kept), group.size, -1)[kept].mT.flatten(0, 1)
                yield from columns[(columns != columns[:, :1]).any(1)].flatten().tolist()
