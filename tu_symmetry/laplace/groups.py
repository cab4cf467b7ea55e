"""Which weights share a prior precision.

The prior is a zero-mean Gaussian with one precision for each group: by Recommendation 2 of arXiv 2206.08900 for each
set of weights that a normalization makes scale-invariant, and for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from tu_symmetry.laplace.tangent import Slot
from tu_symmetry.symmetry.groups import NormalizationGroup

Prior = Literal["per_group", "per_layer", "per_tensor", "single"]
REST = "rest"


class PriorGroups:
    """A partition of the parameters: ``of`` has the number of each one's group, ``sizes`` the parameters of a group."""

    def __init__(self, slots: Mapping[str, Slot], labels: Mapping[str, str]) -> None:
        self.slots = dict(slots)
        order: dict[str, int] = {}
        numbers = [order.setdefault(labels[name], len(order)) for name in slots]
        self.of = {name: torch.tensor(number, device="cpu") for name, number in zip(slots, numbers, strict=True)}
        self._number = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.names = tuple(order)
        size = max((slot.stop for slot in slots.values()), default=0)
        self.sizes = self.total(torch.ones(size, dtype=torch.float64, device="cpu"))

    def __len__(self) -> int:
        return len(self.names)

    def spread(self, values: Tensor) -> Tensor:
        """One value for each group to one for each parameter entry, ``[size]``, on the values' device."""
        numbers = zip(self._number.tolist(), self.slots.values(), strict=True)
        return torch.cat([values[number].expand(slot.stop - slot.start) for number, slot in numbers])

    def total(self, vector: Tensor) -> Tensor:
        """Sum of the entries of a flat vector over each group, float64 ``[groups]`` on the CPU."""
        parts = [vector[slot.start : slot.stop].sum(dtype=torch.float64) for slot in self.slots.values()]
        sums = torch.stack(parts).cpu() if parts else torch.zeros(0, dtype=torch.float64, device="cpu")
        return torch.zeros(len(self), dtype=torch.float64, device="cpu").index_add_(0, self._number, sums)

    def inner(self, rows: Tensor, vector: Tensor) -> Tensor:
        """Inner products of vectors ``[rows, size]`` with another, group by group: float64 ``[groups, rows]``, CPU."""
        found = torch.zeros(len(self), len(rows), dtype=torch.float64, device=rows.device)
        for number, slot in zip(self._number.tolist(), self.slots.values(), strict=True):
            found[number] += (rows[:, slot.start : slot.stop] @ vector[slot.start : slot.stop]).double()
        return found.cpu()

    def given(self, precision: float | Tensor | Mapping[str, float], present: Tensor) -> Tensor:
        """Log precisions ``[groups]``: one for all, a tensor ``[groups]``, or by name of group; ``present`` for others.

        Raises:
            ValueError: an unknown name, another shape, or a precision that is not positive and finite.
        """
        found, places = present.clone(), list(range(len(self)))
        if isinstance(precision, Mapping):
            unknown = [name for name in precision if name not in self.names]
            if unknown:
                raise ValueError(f"no prior group {unknown}; there are {self.names[:6]}")
            places = [self.names.index(name) for name in precision]
            precision = torch.tensor([float(value) for value in precision.values()], dtype=torch.float64, device="cpu")
        value = torch.as_tensor(precision, dtype=torch.float64, device="cpu").detach()
        if value.ndim and value.shape != (len(places),):
            raise ValueError(f"{len(self)} prior groups take one precision, or so many; found {tuple(value.shape)}")
        if not bool(((value > 0) & value.isfinite()).all()):
            raise ValueError(f"the prior precision is {value.tolist()}; it has to be positive and finite")
        found[places] = value.log()
        return found


def prior_groups(
    slots: Mapping[str, Slot], prior: Prior, normalizations: Sequence[NormalizationGroup] = ()
) -> PriorGroups:
    """Partition the parameters for a kind of prior; ``per_group`` by the normalization groups."""
    if prior == "per_group":
        return PriorGroups(slots, dict.fromkeys(slots, REST) | _joined(slots, normalizations))
    if prior == "single":
        return PriorGroups(slots, dict.fromkeys(slots, "all"))
    if prior == "per_tensor":
        return PriorGroups(slots, {name: name for name in slots})
    return PriorGroups(slots, {name: name.rpartition(".")[0] or name for name in slots})


def _joined(slots: Mapping[str, Slot], normalizations: Iterable[NormalizationGroup]) -> dict[str, str]:
    """One label for all parameters of a normalization group that scale alike; groups that share one are merged."""
    labels: dict[str, str] = {}
    for group in normalizations:
        for exponent in sorted({m.exponent for m in group.members if not m.buffer}, reverse=True):
            names = [m.parameter for m in group.members if m.exponent == exponent and m.parameter in slots]
            label = group.name if exponent == 1 else f"{group.name}^{exponent:g}"
            merged = {labels[n] for n in names if n in labels}
            labels.update({n: label for n in names} | {n: label for n, old in labels.items() if old in merged})
    return labels


def centers(groups: PriorGroups, point: Tensor) -> Tensor:
    """The precision at which a group's weights have their expected size: ``sizes / ||theta||^2`` (float64).

    ``k theta`` has the center divided by ``k^2``. Groups of zeros have the center 1; weights that are all zero are
    refused.
    """
    squares = groups.total(point.double().square())
    overall = float(squares.sum())
    if overall == 0 or not math.isfinite(overall):
        raise ValueError("the weights are all zero or not finite: an untrained or damaged network")
    return torch.where(squares > 0, groups.sizes / squares.clamp(min=1e-300), 1.0)
