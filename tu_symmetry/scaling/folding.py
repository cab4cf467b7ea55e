"""Folding the gains of normalizations into what reads them, so that matrices may mix the units that they multiply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError, as_given, unstack
from tu_symmetry.symmetry.action import scale_tensors, sign_tensors
from tu_symmetry.symmetry.elements import LogScale, Signs
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import ScaleGroup, ScaleTerm, SignGroup


def fold_norms(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring the gains of RMSNorm and LayerNorm to one: the tensors that read what they multiply take them over.

    A residual stream that is normalized may be rotated where all gains are equal: ``graph.linears`` holds its group,
    whose ``constant`` names these gains. Folding them is itself a symmetry (a scale and a sign for each unit), so that
    the function stays, up to rounding: ``W diag(g) = (W diag(g)) diag(1)``, and biases of LayerNorm are divided by the
    gain. A gain that no scale group moves, because other readers share the tensor that would take it (a head that is
    tied to the embedding), stays as it is.

    Laws: folding twice changes nothing more; gains that can be folded are one.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        state: state dict, or a stack of states with leading sample axes, each of which is folded by itself.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights, and gains that hold a zero.
    """
    graph.require_verified()
    if graph.check_state(state):
        folded = [fold_norms(graph, one) for one in unstack(state)]
        return as_given(state, {name: torch.stack([one[name] for one in folded]) for name in state})
    moved = dict(state)
    for name in dict.fromkeys(name for group in graph.linears for name in group.constant):
        gain = moved[name].detach().to("cpu", torch.float64)
        if bool((gain == 0).any()):
            raise SymmetryError(
                f"{name} holds {int((gain == 0).sum())} zeros: what reads these units is switched off, and no factor "
                "brings such a gain to one. Remove the units, or leave this norm as it is"
            )
        moved = scale_tensors(graph, _factors(graph, name, gain), moved)
        moved = sign_tensors(graph, _signs(graph, name, gain), moved)
    return as_given(state, moved)


def folding_element(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> tuple[LogScale, Signs]:
    """The log-factors and signs by which :func:`fold_norms` folds the norms of one state; both may be empty.

    Gains stay as they are that hold a zero, whose group has others that cannot be folded, or that general matrices meet
    with negative entries.
    """
    logs: LogScale = {}
    signs: Signs = {}
    groups = [g for g in graph.linears if all(foldable(graph, name) for name in g.constant)]
    for group, name in dict.fromkeys((g, name) for g in groups for name in g.constant):
        gain = state[name].detach().to("cpu", torch.float64)
        turned = _signs(graph, name, gain) if group.orthogonal else {}
        if bool((gain == 0).any()) or (bool((gain < 0).any()) and not turned):
            continue
        logs |= {n: logs[n] + own if n in logs else own for n, own in _factors(graph, name, gain).items()}
        signs |= {n: signs[n] * own if n in signs else own for n, own in turned.items()}
    return logs, signs


def foldable(graph: SymmetryGraph, gain: str) -> bool:
    """Whether each entry of a gain has a factor of its own, with which :func:`fold_norms` brings it to one."""
    return any(_own(term.index, graph.shapes[gain][-1]) for term in graph.scale_terms.get(gain, ()))


def _own(index: Tensor, size: int) -> bool:
    at = index.reshape(-1)
    return len(at) == len(at.unique()) == size and int(at.min()) >= 0


def _factors(graph: SymmetryGraph, name: str, gain: Tensor) -> LogScale:
    """The log-factors that bring a gain's entries to the size one; none where these have no factors of their own."""
    groups = (*graph.scales, *graph.normalizations)
    return _placed(groups, graph.scale_terms.get(name, ()), 0.0, len(gain), lambda e: -gain.abs().log() / e)


def _signs(graph: SymmetryGraph, name: str, gain: Tensor) -> Signs:
    """The signs that turn a gain's negative entries; none where there are none, or these have no signs of their own."""
    return _placed(graph.signs, graph.sign_terms.get(name, ()), 1, len(gain), lambda e: gain.sign().to(torch.int64))


def _placed(
    groups: Sequence[ScaleGroup | SignGroup],
    terms: Sequence[ScaleTerm],
    still: float,
    size: int,
    values: Callable[[float], Tensor],
) -> dict[str, Tensor]:
    """An element with a value for each of ``size`` entries, by the first term that numbers them apart."""
    term = next((term for term in terms if _own(term.index, size)), None)
    if term is None:
        return {}
    sizes, given = [g.size for g in groups], values(term.exponent)
    flat = torch.full((sum(sizes),), still, dtype=given.dtype, device="cpu")
    flat[term.index.reshape(-1)] = given
    parts = zip(groups, flat.split(sizes), strict=True)
    return {g.name: part for g, part in parts if bool((part != still).any())}
