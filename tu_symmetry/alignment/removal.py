"""Removing symmetries from networks, so that distances between weight vectors compare functions (arXiv 2310.08287)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from tu_symmetry.alignment.gram import units_first
from tu_symmetry.alignment.matching import weight_matching
from tu_symmetry.alignment.signed import signed_matching
from tu_symmetry.processes import shared
from tu_symmetry.scaling.canonical import Method, canonicalize
from tu_symmetry.scaling.signs import canonical_signs
from tu_symmetry.states import as_given, sample_count
from tu_symmetry.symmetry.action import permute_tensors, sign_tensors, signed_tensors
from tu_symmetry.symmetry.certificate import UncertifiedWarning, measured
from tu_symmetry.symmetry.elements import LogScale, Permutation, compose, identity_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember

_TIE_BREAKERS = 8


def remove_symmetries(
    graph: SymmetryGraph,
    state: Mapping[str, Tensor],
    *,
    scale: Method | None = "min_mass",
    signs: bool = False,
    reference: Mapping[str, Tensor] | None = None,
    certify: bool = True,
) -> dict[str, Tensor]:
    """One representative of a network's orbit: canonical scale, then hidden units in canonical order.

    Weights before a normalization and dead units get unit norm. Units are sorted by their largest incoming weight,
    descending; ties are broken by their other incoming weights and then by all other weights that belong to them. The
    function is unchanged, where there are normalizations up to their epsilons.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: state dict, or a stack of states with one leading sample axis; each sample is treated by itself.
        scale: canonical scale, see :func:`~tu_symmetry.canonicalize`; None leaves the scale as it is.
        signs: give units canonical signs before they are sorted, see :func:`~tu_symmetry.scaling.canonical_signs`.
        reference: a state dict to align to instead of sorting, which tears apart units whose keys are almost equal.
        certify: measure that the outputs of each network stay the same. Where the graph holds no network to run, an
            :class:`~tu_symmetry.symmetry.certificate.UncertifiedWarning` says so.

    Processes that work :func:`~tu_symmetry.processes.together` each take a share of a stack.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights; outputs that changed by more than
            rounding explains.
        ValueError: a stack with several sample axes.
    """
    graph.require_verified()
    lead = graph.check_state(state)
    if lead > 1:
        raise ValueError(f"remove_symmetries takes a state or a stack of states; this one has {lead} sample axes")
    target = None if reference is None else _scaled(graph, reference, scale)[1]

    name = "remove_symmetries"

    def representative(given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str | None]:
        current = _scaled(graph, given, scale)[1]
        if signs and target is not None:
            current = signed_tensors(graph, signed_matching(graph, target, current).element, current)
        else:
            current = sign_tensors(graph, canonical_signs(graph, current), current) if signs else current
            current = permute_tensors(graph, _ordering(graph, current, target), current)
        _, reason = measured(graph, given, current, name, wanted=certify, rounded=scale is not None or signs)
        return current, reason

    def sample(i: int) -> tuple[dict[str, Tensor], str | None]:
        return representative({name: t[i] for name, t in state.items()})

    found = shared(sample_count(state), sample) if lead else [representative(state)]
    reason = next((reason for _, reason in found if reason), None)
    if reason and certify:
        warnings.warn(f"{name} is not certified: {reason}", UncertifiedWarning, stacklevel=2)
    if not lead:
        return found[0][0]
    every = {name: torch.stack([current[name].to(t.device) for current, _ in found]) for name, t in state.items()}
    return as_given(state, every)


def removal_element(
    graph: SymmetryGraph,
    state: Mapping[str, Tensor],
    *,
    scale: Method | None = "min_mass",
    reference: Mapping[str, Tensor] | None = None,
) -> tuple[LogScale, Permutation]:
    """The group element by which :func:`remove_symmetries` moves one network: its log-factors, then its permutation.

    Applied to any of the network's tensors it gives that tensor of the representative, so that tensors can be compared
    one by one where whole networks do not fit into memory.
    """
    graph.require_verified()
    if graph.check_state(state):
        raise ValueError("removal_element takes one state, this is a stack: call it for each of its networks")
    log_scale, current = _scaled(graph, state, scale)
    target = None if reference is None else _scaled(graph, reference, scale)[1]
    return log_scale, _ordering(graph, current, target)


def _scaled(
    graph: SymmetryGraph, state: Mapping[str, Tensor], scale: Method | None
) -> tuple[LogScale, dict[str, Tensor]]:
    """A network in canonical scale, without a certificate: the whole removal is certified."""
    if scale is None:
        return {}, as_given(state, state)
    form = canonicalize(graph, state, method=scale, normalizations="unit_norm", degenerate="unit_norm", certify=False)
    return form.log_scale, form.state


def _ordering(graph: SymmetryGraph, state: dict[str, Tensor], target: Mapping[str, Tensor] | None) -> Permutation:
    """What brings the units of a network into canonical order, or into that of a target."""
    if target is not None:
        return weight_matching(graph, target, state).permutation
    identity = whole = identity_permutation(graph)
    for group in _inner_first(graph):
        order = {group.name: _order(graph, group, state)}
        state = permute_tensors(graph, order, state)
        whole = compose(identity | order, whole)
    return whole


def incoming_member(graph: SymmetryGraph, group: PermutationGroup) -> PermutationMember:
    """What makes the units of a group: of the parameters that have them on their leading axis (or any) the first."""
    order = {name: k for k, name in enumerate(graph.shapes)}
    members = [m for m in group.members if m.parameter not in graph.buffers and m.within_axis is None]
    return min(members or group.members, key=lambda m: (m.axis != 0, order[m.parameter]))


def unit_rows(
    graph: SymmetryGraph, group: PermutationGroup, member: PermutationMember, state: Mapping[str, Tensor]
) -> Tensor:
    """The entries of one member's tensor that belong to each unit: float64 ``[*samples, *group.shape, entries]``."""
    tensor = state[member.parameter].detach().to("cpu", torch.float64)
    shape = graph.shapes[member.parameter]
    rows = torch.stack([units_first(member, sample) for sample in tensor.reshape(-1, *shape)])
    return rows.reshape(*tensor.shape[: tensor.ndim - len(shape)], *group.shape, -1)


def _inner_first(graph: SymmetryGraph) -> list[PermutationGroup]:
    """Groups front to back, those nested in a group before it."""

    def family(group: PermutationGroup) -> list[PermutationGroup]:
        return [g for child in graph.children(group.name) for g in family(child)] + [group]

    roots = [g for g in graph.permutations if g.parent is None]
    shapes = list(graph.shapes)
    roots.sort(key=lambda g: shapes.index(incoming_member(graph, g).parameter))
    return [g for root in roots for g in family(root)]


def _order(graph: SymmetryGraph, group: PermutationGroup, state: Mapping[str, Tensor]) -> Tensor:
    """The permutation that sorts one group, descending."""
    incoming = incoming_member(graph, group)
    rows = unit_rows(graph, group, incoming, state)
    key = rows.amax(-1, keepdim=True)
    order, tied = _sorted(key)
    if tied:
        others = (unit_rows(graph, group, m, state) for m in group.members if m is not incoming)
        columns = [key, *(r.sort(dim=-1, descending=True).values[..., :_TIE_BREAKERS] for r in (rows, *others))]
        order, _ = _sorted(torch.cat(columns, dim=-1))
    return order


def _sorted(keys: Tensor) -> tuple[Tensor, bool]:
    """Descending lexicographic order of ``keys[..., size, columns]``, and whether any are equal."""
    order = torch.arange(keys.shape[-2], device="cpu").expand(keys.shape[:-1]).clone()
    for column in reversed(range(keys.shape[-1])):  # stable sorts, the first column last
        gathered = torch.gather(keys[..., column], -1, order)
        order = torch.gather(order, -1, gathered.argsort(dim=-1, descending=True, stable=True))
    ordered = torch.take_along_dim(keys, order.unsqueeze(-1), dim=-2)
    return order, bool((ordered[..., 1:, :] == ordered[..., :-1, :]).all(-1).any())
