"""Activation matching: units of two networks are paired by what they compute on data.

Units are observed where layers read them (the inputs of linear and convolution layers) or, where none does, where they
are made. A residual stream shows up in several places, whose similarities add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.assignment import assign_family, family_value, flat_source
from tu_symmetry.alignment.gram import Family, descendants, own_member
from tu_symmetry.alignment.matching import Matching, check_pair, descend, weight_distance
from tu_symmetry.alignment.products import WeightSimilarities
from tu_symmetry.evaluation import Moments, evaluating, forward, input_batches, on_device
from tu_symmetry.symmetry.action import largest_entry, permute_tensors
from tu_symmetry.symmetry.elements import identity_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember
from tu_symmetry.symmetry.randomness import leaves_randomness

Similarity = Literal["product", "correlation"]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)
_ORDINARY = 1e12
_CONSTANT = 1e-12  # a variance below this part of the squared mean is rounding
_SAME = 0.02  # relative difference of activations in half precision


@dataclass(frozen=True)
class _Place:
    """Where units show up: the input (or output) of a module, along one of its axes."""

    module: str
    side: Literal["input", "output"]
    axis: int
    member: PermutationMember


_Wanted = tuple[str, _Place, Tensor]  # a group, a place, and the positions of the units there
_Calls = dict[tuple[str, str], list[Tensor]]  # inputs and outputs of modules, one tensor for each call


@leaves_randomness
def activation_matching(
    graph: SymmetryGraph,
    model: nn.Module,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    *,
    similarity: Similarity = "product",
) -> Matching:
    """Find the permutation of ``state`` whose hidden units behave most like those of ``reference_state`` on data.

    It maximizes the sum over all places of ``A_1^T A_2`` (``product``; arXiv 2401.00611, section 2) or of correlations.
    Groups that no module shows (their layers are called as functions, or other groups move the copies of their units in
    every place) are matched by their weights, given all the others: ``by_weights`` names them. The batches, tensors or
    tuples whose first element is the input, are read once, in bounded memory.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: an empty loader, or activations that are not finite.
    """
    check_pair(graph, reference_state, state)
    if similarity not in get_args(Similarity):
        raise ValueError(f"unknown similarity {similarity!r}: 'product' or 'correlation'")
    before = weight_distance(graph, reference_state, state)
    places = all_places(graph, model)
    grams: dict[str, Tensor] = {}
    for (name, _), gram in observe(graph, model, reference_state, state, dataloader, places, similarity).items():
        grams[name] = grams[name] + gram if name in grams else gram
    weights = WeightSimilarities.of(graph, reference_state, state)
    permutation = identity_permutation(graph)
    objective = 0.0
    unseen: list[Family] = []
    for family in weights.plan.families:
        parents = {c.parent for c in family.children}
        if any(g.name not in grams for g in family.groups if g.name not in parents):
            unseen.append(family)
            continue
        own = {}
        for g in family.groups:
            units = weights.plan.sizes[g.name]
            own[g.name] = grams.get(g.name, torch.zeros(units, units, device="cpu").double())
        permutation.update(assign_family(family, own))
        objective += family_value(family, own, permutation)[0]
    sweeps, converged = 1, True
    if unseen:
        permutation, more, converged = descend(weights, unseen, permutation)
        sweeps += more
    after = weight_distance(graph, reference_state, permute_tensors(graph, permutation, state))
    by_weights = tuple(name for family in unseen for name in sorted(family.names))
    return Matching(permutation, objective, sweeps, converged, before, after, by_weights)


def all_places(graph: SymmetryGraph, model: nn.Module) -> dict[str, list[_Place]]:
    """Where the units of each group show up."""
    return {group.name: _places(graph, model, group) for group in graph.permutations}


def _places(graph: SymmetryGraph, model: nn.Module, group: PermutationGroup) -> list[_Place]:
    """Inputs of the layers that read the group's units, and outputs of the layers that make them."""
    modules = dict(model.named_modules())
    found: list[_Place] = []
    for member in (m for m in group.members if m.within_axis is None):
        for alias in graph.aliases[member.parameter]:
            path, _, leaf = alias.rpartition(".")
            module = modules.get(path)
            if module is None or leaf != "weight":
                continue
            if isinstance(module, nn.Linear):
                found.append(_Place(path, "input" if member.axis == 1 else "output", -1, member))
            elif isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
                reads = member.axis == (0 if isinstance(module, _TRANSPOSED) else 1)
                if module.groups == 1 or not (reads or isinstance(module, _TRANSPOSED)):
                    found.append(_Place(path, "input" if reads else "output", 1 - module.weight.ndim, member))
            elif isinstance(module, _NORMS):
                axis = member.axis - len(graph.shapes[member.parameter]) if isinstance(module, nn.LayerNorm) else 1
                found.append(_Place(path, "output", axis, member))
    return found


def _similarities(moments: Moments, similarity: Similarity) -> Tensor:
    """Similarities ``[units, units]`` on the host; a unit that is constant correlates with nothing."""
    *squares, scatter = (s.cpu() for s in moments.sums)
    means = [m.cpu() for m in moments.means]
    if similarity == "product":
        return scatter + moments.count * torch.outer(*means)
    inverse = [
        torch.where(s > _CONSTANT * moments.count * m.square(), s, torch.inf).rsqrt()
        for s, m in zip(squares, means, strict=True)
    ]
    return scatter * torch.outer(*inverse)


def _units(activation: Tensor, axis: int, index: Tensor) -> Tensor:
    """Activations as ``[units, copies * samples]``."""
    moved = activation.movedim(axis, 0)
    return moved.index_select(0, index.reshape(-1).to(moved.device)).reshape(index.shape[0], -1)


def _showing(wanted: list[_Wanted], plain: _Calls, moved: _Calls, sources: Mapping[str, Tensor]) -> list[_Wanted]:
    """The places that show their group: inputs of layers, or failing these, outputs."""

    def shows(name: str, place: _Place, index: Tensor) -> bool:
        pairs = zip(*(run.get((place.module, place.side), []) for run in (plain, moved)), strict=True)
        units = [[_units(t, place.axis, index).double() for t in pair] for pair in pairs]
        return not any(bool((b - a[sources[name].to(a.device)]).norm() > _SAME * a.norm()) for a, b in units)

    found = [one for one in wanted if shows(*one)]
    read = {name for name, place, _ in found if place.side == "input"}
    return [one for one in found if one[1].side == "input" or one[0] not in read]


def observe(
    graph: SymmetryGraph,
    model: nn.Module,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    places: Mapping[str, list[_Place]],
    similarity: Similarity,
) -> dict[tuple[str, str], Tensor]:
    """Similarities that the data show: a group and a module to ``[units, units]``, blocks flattened, on the host.

    A place shows a group if a permutation of all groups changes nothing there but the order of this group's units: the
    first batch tells. Elsewhere other groups move the copies of its units, or the samples. Inputs come before outputs.
    """
    wanted: list[_Wanted] = []
    for group in graph.permutations:
        below = descendants(graph, group)
        for place in places[group.name]:
            part = own_member(place.member, below)
            if part is not None:
                wanted.append((group.name, place, part.index.reshape(-1, part.index.shape[-1])))
    needed = {(place.module, place.side) for _, place, _ in wanted}
    calls: _Calls = {}

    def capture(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for side, value in (("input", args[0] if args else None), ("output", output)):
                if (path, side) in needed and isinstance(value, Tensor):
                    calls.setdefault((path, side), []).append(value)

        return hook

    moments: dict[tuple[str, str], Moments] = {}
    weights, device = on_device(reference_state)
    states = [weights, {n: t.to(weights[n]) for n, t in state.items()}]
    rolled = {g.name: torch.arange(g.size, device="cpu").roll(1).expand(g.shape) for g in graph.permutations}

    def run(one: Mapping[str, Tensor], inputs: Any) -> _Calls:
        calls.clear()
        forward(model, one, inputs)
        return dict(calls)

    with evaluating(model, {path: capture(path) for path, _ in needed}):
        for first, inputs in enumerate(input_batches(dataloader, device)):
            seen = [run(one, inputs) for one in states]
            if not first:
                moved = run(permute_tensors(graph, rolled, weights), inputs)
                sources = {g.name: flat_source(g, rolled) for g in graph.permutations}
                wanted = _showing(wanted, seen[0], moved, sources)
                needed &= {(place.module, place.side) for _, place, _ in wanted}  # what hooks keep of other batches
            for name, place, index in wanted:
                for a, b in zip(*(run.get((place.module, place.side), []) for run in seen), strict=True):
                    pair = [_units(t, place.axis, index) for t in (a, b)]
                    if not all(1 / _ORDINARY < size < _ORDINARY for size in map(largest_entry, pair) if size > 0):
                        pair = [t.double() for t in pair]  # single precision does not hold their products
                    moments.setdefault((name, place.module), Moments()).add(*pair)
    shown: dict[tuple[str, str], Tensor] = {}
    for (name, module), found in moments.items():
        result = shown[name, module] = _similarities(found, similarity)
        if not torch.isfinite(result).all():
            raise ValueError(
                f"activations at {module!r} are NaN or infinite; the weights are finite, so look at the inputs, or at "
                "running variances that are zero or negative"
            )
    return shown
