"""Activation matching: units of two networks are paired by what they compute on data.

For every hidden layer of any graph the units are observed where layers read them (the inputs of linear and
convolution layers: values after the nonlinearity), or, where no layer does, where they are produced. With the inner
product as similarity this is the matching of arXiv 2401.00611, section 2: maximize ``sum A_1^T A_2`` over the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.gram import Family, WeightVotes, families, own_member
from tu_symmetry.alignment.matching import Matching, Progress, descend, solve_family, weight_distance
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import block_origin, identity_permutation
from tu_symmetry.symmetry.graph import PermutationGroup, PermutationMember, SymmetryGraph

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)


@dataclass(frozen=True)
class _Place:
    """Where units show up: the input (or output) of a module, along one of its axes."""

    module: str
    side: Literal["input", "output"]
    axis: int
    member: PermutationMember


def activation_matching(
    graph: SymmetryGraph,
    model: nn.Module,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    *,
    similarity: Literal["product", "correlation"] = "product",
    progress: Progress | None = None,
) -> Matching:
    """Find the permutation of ``state`` whose hidden units behave most like those of ``reference_state`` on data.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        model: the module; run in evaluation mode with either state, otherwise left as it is.
        reference_state: state dict that stays as it is.
        state: state dict to be permuted.
        dataloader: batches, tensors or tuples whose first element is the input. Read once, in bounded memory.
        similarity: inner product of activations over the data, or their correlation.
        progress: called after each batch with ``{"batch", "samples"}``.

    Returns:
        The matching; ``objective`` is the sum of matched similarities over all places. A group that no module shows
        (its layers are called as functions) is matched by its weights, given all the others.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: an empty loader.
    """
    graph.require_verified()
    graph.check_state(reference_state, name="reference_state")
    graph.check_state(state)
    before = weight_distance(graph, reference_state, state)
    family_list = families(graph)
    places = {g.name: _places(graph, model, g) for g in graph.permutations}
    votes = _observe(graph, model, reference_state, state, dataloader, places, similarity, progress)
    permutation = identity_permutation(graph)
    seen = [f for f in family_list if votes.shows(f)]
    sweeps = 0
    for family in seen:
        for _ in range(10 if family.children else 1):
            sweeps += 1
            if not solve_family(votes, family, permutation):
                break
    unseen = [f for f in family_list if f not in seen]
    converged = True
    if unseen:
        weights = WeightVotes(graph, reference_state, state)
        permutation, more, converged = descend(graph, weights, unseen, permutation, 100)
        sweeps += more
    objective = sum(votes.value(f, permutation) for f in seen)
    after = weight_distance(graph, reference_state, permute_tensors(graph, permutation, state))
    return Matching(permutation, objective, sweeps, converged, before, after)


def _places(graph: SymmetryGraph, model: nn.Module, group: PermutationGroup) -> list[_Place]:
    """Inputs of the layers that read the group's units; failing these, outputs of the layers that make them."""
    modules = dict(model.named_modules())
    readers: list[_Place] = []
    makers: list[_Place] = []
    for member in group.members:
        if member.within_axis is not None:
            continue
        for alias in graph.aliases[member.parameter]:
            path, _, leaf = alias.rpartition(".")
            module = modules.get(path)
            if module is None or leaf != "weight":
                continue
            if isinstance(module, nn.Linear):
                (readers if member.axis == 1 else makers).append(
                    _Place(path, "input" if member.axis == 1 else "output", -1, member)
                )
            elif isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
                reads = member.axis == (0 if isinstance(module, _TRANSPOSED) else 1)
                if module.groups > 1 and (reads or isinstance(module, _TRANSPOSED)):
                    continue
                spatial = -module.weight.ndim + 1
                (readers if reads else makers).append(_Place(path, "input" if reads else "output", spatial, member))
            elif isinstance(module, _NORMS):
                axis = member.axis - len(graph.shapes[member.parameter]) if isinstance(module, nn.LayerNorm) else 1
                makers.append(_Place(path, "output", axis, member))
    return readers or makers


class _ActivationVotes:
    """Similarities of activations in the form that the solver of families reads."""

    def __init__(self, graph: SymmetryGraph, found: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        self.graph, self.found, self.own = graph, found, own

    def shows(self, family: Family) -> bool:
        """Whether the data showed the family's units (those of its nested groups, where it has some)."""
        groups = [c.name for c in family.children] or [family.root.name]
        return all(name in self.found for name in groups)

    def is_self_coupled(self, family: Family) -> bool:
        return False

    def plain(self, family: Family, permutation: Mapping[str, Tensor]) -> Tensor:
        return self.found[family.root.name]

    def blocks(self, family: Family, permutation: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        inner = {}
        for child in family.children:
            if child.parent == family.root.name:
                heads, size = child.blocks[0], child.size
                inner[child.name] = self.found[child.name].reshape(heads, size, heads, size)
        return self.own[family.root.name], inner

    def inside(self, family: Family, group: PermutationGroup, permutation: Mapping[str, Tensor]) -> Tensor:
        blocks = math.prod(group.blocks)
        pairs = self.found[group.name].reshape(blocks, group.size, blocks, group.size)
        numbers = torch.arange(blocks).reshape(group.blocks)
        source = numbers[block_origin(group.name, permutation)].reshape(-1)
        return torch.stack([pairs[b, :, k] for b, k in enumerate(source.tolist())])

    def value(self, family: Family, permutation: Mapping[str, Tensor]) -> float:
        outer = permutation[family.root.name]
        if not family.children:
            return float(self.found[family.root.name][torch.arange(len(outer)), outer].sum())
        own, inner = self.blocks(family, permutation)
        total = float(own[torch.arange(len(outer)), outer].sum())
        for name, gram in inner.items():
            for h, k in enumerate(outer.tolist()):
                total += float(gram[h, torch.arange(gram.shape[1]), k, permutation[name][h]].sum())
        return total


class _Accumulator:
    """Streaming inner products, and the moments that correlations need."""

    def __init__(self) -> None:
        self.product: Tensor | None = None
        self.moments: list[Tensor] = []
        self.count = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        new = [a @ b.T, a.sum(1), b.sum(1), a.square().sum(1), b.square().sum(1)]
        self.count += a.shape[1]
        if self.product is None:
            self.product, *self.moments = new
        else:
            self.product = self.product + new[0]
            self.moments = [m + n for m, n in zip(self.moments, new[1:], strict=True)]

    def result(self, similarity: str) -> Tensor:
        assert self.product is not None
        product = self.product.to("cpu", torch.float64)
        if similarity == "product":
            return product
        sum_a, sum_b, square_a, square_b = (m.to("cpu", torch.float64) for m in self.moments)
        covariance = product / self.count - torch.outer(sum_a, sum_b) / self.count**2
        deviation_a = (square_a / self.count - (sum_a / self.count).square()).clamp_min(0).sqrt()
        deviation_b = (square_b / self.count - (sum_b / self.count).square()).clamp_min(0).sqrt()
        scale = torch.outer(deviation_a, deviation_b)
        return torch.where(scale > 0, covariance / scale.clamp_min(1e-300), torch.zeros_like(covariance))


def _units(activation: Tensor, axis: int, index: Tensor) -> Tensor:
    """Activations as ``[units, copies * samples]``."""
    moved = activation.movedim(axis, 0)
    picked = moved.index_select(0, index.reshape(-1).to(moved.device))
    return picked.reshape(index.reshape(-1, index.shape[-1]).shape[0], -1)


def _observe(
    graph: SymmetryGraph,
    model: nn.Module,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    places: Mapping[str, list[_Place]],
    similarity: str,
    progress: Callable[[dict[str, Any]], None] | None,
) -> _ActivationVotes:
    """Run both networks over the data and accumulate the similarities of their units."""
    children = {g.name: graph.children(g.name) for g in graph.permutations}
    sums: dict[tuple[str, str], _Accumulator] = {}
    wanted = {(p.module, p.side) for found in places.values() for p in found}
    captured: dict[tuple[str, str], Tensor] = {}
    modules = dict(model.named_modules())
    handles = []

    def capture(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if (path, "input") in wanted:
                captured[path, "input"] = args[0]
            if (path, "output") in wanted and isinstance(output, Tensor):
                captured[path, "output"] = output

        return hook

    was_training = {m: m.training for m in model.modules()}
    samples = batches = 0
    try:
        handles = [modules[path].register_forward_hook(capture(path)) for path in {path for path, _ in wanted}]
        model.eval()
        with torch.no_grad():
            for batch in dataloader:
                inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
                device = next(iter(reference_state.values())).device
                inputs = inputs.to(device)
                seen = []
                for one in (reference_state, state):
                    captured.clear()
                    torch.func.functional_call(model, dict(one), (inputs,), tie_weights=False)
                    seen.append(dict(captured))
                for name, found in places.items():
                    for place in found:
                        key = (place.module, place.side)
                        if key not in seen[0]:
                            continue
                        a, b = seen[0][key], seen[1][key]
                        targets = [(name, place.member.index)]
                        if children[name]:
                            own = own_member(place.member, children[name])
                            targets = [(name + "/", own.index)] if own is not None else []
                        for target, index in targets:
                            accumulator = sums.setdefault((target, place.module), _Accumulator())
                            accumulator.add(_units(a, place.axis, index), _units(b, place.axis, index))
                samples += len(inputs)
                batches += 1
                if progress is not None:
                    progress({"batch": batches, "samples": samples})
    finally:
        for handle in handles:
            handle.remove()
        for module, training in was_training.items():
            module.training = training
    if batches == 0:
        raise ValueError(
            "the dataloader gave no batch, and without data there are no activations to match; an iterator that was "
            "used up before looks like this: pass a DataLoader, or a list of batches"
        )
    totals: dict[str, Tensor] = {}
    for (target, _), accumulator in sums.items():
        result = accumulator.result(similarity)
        totals[target] = totals[target] + result if target in totals else result
    similarities = {name: total for name, total in totals.items() if not name.endswith("/")}
    own_parts = {
        g.name: totals.get(g.name + "/", torch.zeros(g.size, g.size, dtype=torch.float64)) for g in graph.permutations
    }
    return _ActivationVotes(graph, similarities, own_parts)
