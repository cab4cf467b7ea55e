"""Which weights share a prior precision.

The prior is a zero-mean Gaussian with one precision for each group: by Recommendation 2 of arXiv 2206.08900 for each
set of weights that a normalization makes scale-invariant, and for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from tu_symmetry.laplace.tangent import Slot
from tu_symmetry.symmetry.groups import NormalizationGroup

Prior = Literal["per_group", "per_layer", "per_tensor", "single", "diagonal"]
REST = "rest"


class PriorGroups:
    """A partition of the parameters: ``of`` has the number of each one's group, ``sizes`` the parameters of a group.

    With ``weights`` every weight is a group (:class:`SingleWeights`), and ``of`` has one number for each.
    """

    names: tuple[str, ...]
    weights = False

    def __init__(self, slots: Mapping[str, Slot], labels: Mapping[str, str]) -> None:
        self.slots = dict(slots)
        order: dict[str, int] = {}
        numbers = [order.setdefault(labels[name], len(order)) for name in slots]
        self.of = {name: torch.tensor(number, device="cpu") for name, number in zip(slots, numbers, strict=True)}
        self._number = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.names = tuple(order)
        self.sizes = self.total(torch.ones(_size(slots), dtype=torch.float64, device="cpu"))

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

    def given(self, precision: float | Tensor | Mapping[str, float | Tensor], present: Tensor) -> Tensor:
        """Log precisions ``[groups]``: one for all, a tensor ``[groups]``, or by name; ``present`` for all others.

        A name is that of a group or, of single weights, of a parameter, with a number or a tensor of its shape.

        Raises:
            ValueError: an unknown name, another shape, or a precision that is not positive and finite.
        """
        found = present.clone()
        by_name = precision if isinstance(precision, Mapping) else {"": precision}
        for name, own in by_name.items():
            place, shape = (slice(None), tuple(found.shape)) if by_name is not precision else self._place(name)
            value = torch.as_tensor(own, dtype=torch.float64, device="cpu").detach()
            what = f"the precision of {name!r}" if name else f"the prior precision (of {len(self)} prior groups)"
            if value.ndim and value.shape != shape:
                raise ValueError(f"{what} has shape {tuple(value.shape)}; it has to be one number, or of shape {shape}")
            if not bool(((value > 0) & value.isfinite()).all()):
                raise ValueError(f"{what} is {value.tolist()}; it has to be positive and finite")
            found[place] = value.log().reshape(-1)
        return found

    def _place(self, name: str) -> tuple[slice, tuple[int, ...]]:
        """The groups that a name stands for, and the shape in which their precisions may be given."""
        if name not in self._numbers:
            raise ValueError(f"no prior group {name!r}; there are {[*self.names[:6], *list(self.slots)[:6]]}")
        return slice(self._numbers[name], self._numbers[name] + 1), ()

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


class SingleWeights(PriorGroups):
    """Every weight a group of its own, whose number is its place in the flat vector: ``0.weight[2,3]``."""

    weights = True

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self.slots = dict(slots)
        self.of = {name: torch.arange(slot.start, slot.stop, device="cpu") for name, slot in slots.items()}
        self.sizes = torch.ones(_size(slots), dtype=torch.float64, device="cpu")

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Parameter and place of every weight."""
        found = []
        for name, slot in self.slots.items():
            places = product(*(range(n) for n in slot.shape))
            found += [f"{name}[{','.join(map(str, place))}]" for place in places] if slot.shape else [name]
        return tuple(found)

    def spread(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def total(self, vector: Tensor) -> Tensor:
        """The vector itself, float64 on the CPU."""
        return vector.double().cpu()

    def inner(self, rows: Tensor, vector: Tensor) -> Tensor:
        """Products of the entries: float64 ``[size, rows]``, CPU."""
        return rows.double().cpu().mT * vector.double().cpu().unsqueeze(-1)

    def _place(self, name: str) -> tuple[slice, tuple[int, ...]]:
        if name not in self.slots:
            return super()._place(name)
        return slice(*self.slots[name][:2]), self.slots[name].shape


def _size(slots: Mapping[str, Slot]) -> int:
    return max((slot.stop for slot in slots.values()), default=0)


def prior_groups(
    slots: Mapping[str, Slot],
    prior: Prior,
    *,
    normalizations: Sequence[NormalizationGroup] = (),
    groups: Mapping[str, Sequence[str]] | None = None,
) -> PriorGroups:
    """Partition the parameters for a kind of prior, by normalization groups or those given by hand.

    Raises:
        ValueError: parameters that ``groups`` names twice or that do not exist, ``groups`` with another prior.
    """
    require_own_groups(prior, groups)
    if prior == "diagonal":
        return SingleWeights(slots)
    if prior == "per_group":
        own = _joined(slots, normalizations) if groups is None else _from_mapping(slots, groups)
        return PriorGroups(slots, dict.fromkeys(slots, REST) | own)
    labels = {
        "single": dict.fromkeys(slots, "all"),
        "per_layer": {name: name.rpartition(".")[0] or name for name in slots},
        "per_tensor": {name: name for name in slots},
    }
    if prior not in labels:
        raise ValueError(
            f"prior={prior!r} is not known; choose 'per_group', {', '.join(map(repr, labels))}, 'diagonal'"
        )
    return PriorGroups(slots, labels[prior])


def require_own_groups(prior: Prior, groups: Mapping[str, Sequence[str]] | None) -> None:
    """Refuse groups that a prior would not look at: a ``ValueError``."""
    if groups is not None and prior != "per_group":
        raise ValueError(f"prior={prior!r} has groups of its own; groups=... goes with 'per_group'")


def _from_mapping(slots: Mapping[str, Slot], groups: Mapping[str, Sequence[str]]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for group, members in groups.items():
        if isinstance(members, str):
            raise ValueError(f"groups[{group!r}] is a string; give a list of parameter names")
        for name in members:
            if name not in slots:
                raise ValueError(f"groups[{group!r}] names {name!r}, which is none of the posterior's parameters")
            if name in labels:
                raise ValueError(f"groups names {name!r} twice, in {labels[name]!r} and {group!r}")
            labels[name] = group
    return labels


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

    ``k theta`` has the center divided by ``k^2``. Groups of zeros have the center 1; a single weight says too little of
    its own scale, and has that of its parameter. Weights that are all zero are refused.
    """
    squares = groups.total(point.double().square())
    overall = float(squares.sum())
    if overall == 0 or not math.isfinite(overall):
        raise ValueError("the weights are all zero or not finite: an untrained or damaged network")
    if groups.weights:
        whole = PriorGroups(groups.slots, {name: name for name in groups.slots})
        return whole.spread(centers(whole, point))
    return torch.where(squares > 0, groups.sizes / squares.clamp(min=1e-300), 1.0)
