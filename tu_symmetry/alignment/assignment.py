"""Linear assignment over a family of nested groups: the exact optimum over a wreath product.

For each pair of blocks the inner assignments' values are the outer cost; the outer assignment then chooses the blocks
and the inner permutations with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tu_symmetry.alignment.gram import Family
from tu_symmetry.symmetry.elements import Permutation, block_origin
from tu_symmetry.symmetry.groups import PermutationGroup

_ENUMERATED = 3  # blocks of so few units are solved all at once by trying every order
_PRICED = 256  # from this size on prices pay
_COLD = ((0.15, 4), (0.03, 5))  # Sinkhorn passes at temperatures, in standard deviations of the similarities
_WARM = ((0.05, 4),)
_LOWEST = -40.0  # exponents below are raised to it: no zeros, and no denormal numbers, which are slow


def flat_source(group: PermutationGroup, permutation: Mapping[str, Tensor]) -> Tensor:
    """For each unit of a group, blocks flattened, the unit that it comes from: ``[blocks * size]``."""
    blocks = math.prod(group.blocks)
    numbers = torch.arange(blocks, device="cpu").reshape(group.blocks)
    origin = numbers[block_origin(group.name, permutation)].reshape(blocks, 1)
    return (origin * group.size + permutation[group.name].reshape(blocks, group.size)).reshape(-1)


def family_value(family: Family, grams: Mapping[str, Tensor], permutation: Mapping[str, Tensor]) -> tuple[float, float]:
    """Sum of the similarities that a permutation pairs, and the sum of their magnitudes (the scale of rounding)."""
    value = scale = 0.0
    for group in family.groups:
        source = flat_source(group, permutation)
        picked = grams[group.name][torch.arange(len(source), device="cpu"), source]
        value += float(picked.sum(dtype=torch.float64))
        scale += float(picked.abs().sum(dtype=torch.float64))
    return value, scale


def assign_family(family: Family, grams: Mapping[str, Tensor], prices: dict[str, Tensor] | None = None) -> Permutation:
    """The permutation of a family that pairs units with the largest sum of similarities.

    ``grams`` holds ``[blocks * size, blocks * size]`` on the host for each group, rows for the reference; for
    ``prices`` see :func:`assign`.
    """
    values: dict[str, np.ndarray] = {}
    choices: dict[str, np.ndarray] = {}
    for group in reversed(family.groups):  # deepest first
        cost = grams[group.name].numpy()
        inner = [values[c.name] for c in family.groups if c.parent == group.name]
        if inner:
            cost = cost + sum(inner)
        blocks = math.prod(group.blocks)
        pairs = cost.reshape(blocks, group.size, blocks, group.size).transpose(0, 2, 1, 3)
        if group is family.root and prices is not None and blocks == 1:  # blocks of a root stay put
            columns = assign(pairs[0, 0], prices, group.name)
            choices[group.name] = columns[None, None]
        else:
            values[group.name], choices[group.name] = assign_pairs(pairs)
    permutation: Permutation = {}
    for group in family.groups:  # parents first: they say which block comes from where
        blocks = math.prod(group.blocks)
        numbers = torch.arange(blocks, device="cpu").reshape(group.blocks)
        placeholder = torch.arange(group.size, device="cpu").expand(group.shape)
        origin = numbers[block_origin(group.name, {**permutation, group.name: placeholder})].reshape(-1)
        picked = choices[group.name][np.arange(blocks), origin.numpy()]
        permutation[group.name] = torch.from_numpy(picked).reshape(group.shape)
    return permutation


def assign_pairs(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Best values ``[B, B]`` and assignments ``[B, B, n]`` for costs ``[B, B, n, n]``."""
    blocks, size = pairs.shape[0], pairs.shape[-1]
    if blocks > 1 and size <= _ENUMERATED:
        orders = np.array(list(itertools.permutations(range(size))), dtype=np.int64)
        sums = np.stack([pairs[:, :, np.arange(size), order].sum(-1, dtype=np.float64) for order in orders])
        best = sums.argmax(0)
        return np.take_along_axis(sums, best[None], 0)[0], orders[best]
    values = np.empty((blocks, blocks))
    choices = np.empty((blocks, blocks, size), dtype=np.int64)
    rows = np.arange(size)
    for b in range(blocks):
        for c in range(blocks):
            columns = assign(pairs[b, c])
            choices[b, c] = columns
            values[b, c] = pairs[b, c, rows, columns].sum(dtype=np.float64)
    return values, choices


def assign(similarities: np.ndarray, prices: dict[str, Tensor] | None = None, name: str = "") -> np.ndarray:
    """The columns ``[n]`` of the assignment with the largest sum of similarities ``[n, n]``.

    Where the rows' largest entries lie in different columns, they are it (the rule once a planted permutation shows).
    Otherwise SciPy's solver decides, on large matrices with prices: taking a price off each row and each column does
    not change which assignment is the best, and with prices near the dual solution most rows find a free column at
    once. Column prices of earlier calls with similar matrices are found under ``name``, and left there.
    """
    largest = similarities.argmax(1)
    if np.bincount(largest).max() == 1:
        return largest
    if len(similarities) < _PRICED:
        return linear_sum_assignment(similarities, maximize=True)[1]
    found = _prices(torch.from_numpy(similarities).float(), None if prices is None else prices.get(name))
    if prices is not None:
        prices[name] = found[1]
    rows, columns = (price.double().numpy() for price in found)
    costs = rows[:, None] - similarities  # float64, so that equal totals stay equal
    costs += columns
    return linear_sum_assignment(costs)[1]


def _prices(scores: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prices of rows and columns, from Sinkhorn passes at low temperature; zeros if they fail."""
    columns = scores.mean(0) if start is None else start
    left = scores - columns
    rows = left.amax(1)
    left -= rows[:, None]
    spread = float(left[::8].std())  # of some rows: it only sets the temperature
    kernel = torch.empty_like(left)
    for temperature, passes in () if spread == 0 else _COLD if start is None else _WARM:
        torch.mul(left, 1 / (temperature * spread), out=kernel).clamp_(min=_LOWEST).exp_()
        by_column = torch.ones_like(columns)
        for _ in range(passes):
            by_row = 1 / (kernel @ by_column)
            by_column = 1 / (by_row @ kernel)
        off_rows, off_columns = (temperature * spread * by.log() for by in (by_row, by_column))
        rows, columns = rows - off_rows, columns - off_columns
        left += off_rows[:, None]
        left += off_columns
    if torch.isfinite(rows).all() and torch.isfinite(columns).all():
        return rows, columns
    return torch.zeros_like(rows), torch.zeros_like(columns)
