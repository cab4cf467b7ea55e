"""Linear assignment over a family of nested groups: the exact optimum over a wreath product.

The similarities of a family are one matrix for each of its groups, between all units of the one network and all units
of the other, over the positions that no deeper group moves. For each pair of blocks the inner assignments' values are
the outer cost; the outer assignment then chooses the blocks and the inner elements with them.
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
from tu_symmetry.symmetry.graph import PermutationGroup

_ENUMERATED = 3  # blocks of so few units are solved all at once by trying every order
_PRICED = 256  # from this size on prices pay


def flat_source(group: PermutationGroup, element: Mapping[str, Tensor]) -> Tensor:
    """For each unit of a group, blocks flattened, the unit that it comes from: ``[blocks * size]``."""
    blocks = math.prod(group.blocks)
    numbers = torch.arange(blocks).reshape(group.blocks)
    origin = numbers[block_origin(group.name, element)].reshape(blocks, 1)
    return (origin * group.size + element[group.name].reshape(blocks, group.size)).reshape(-1)


def family_value(family: Family, grams: Mapping[str, Tensor], element: Mapping[str, Tensor]) -> tuple[float, float]:
    """Sum of the similarities that an element pairs, and the sum of their magnitudes (the scale of rounding)."""
    value = scale = 0.0
    for group in family.groups:
        source = flat_source(group, element)
        picked = grams[group.name][torch.arange(len(source)), source]
        value += float(picked.sum())
        scale += float(picked.abs().sum())
    return value, scale


def assign_family(family: Family, grams: Mapping[str, Tensor]) -> Permutation:
    """The element of a family that pairs units with the largest sum of similarities.

    Args:
        family: a root group and all groups nested in it.
        grams: for each group ``[blocks * size, blocks * size]`` float64 on the host, rows for the reference.

    Returns:
        Group name to LongTensor ``[*blocks, size]``, for the groups of this family.
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
        values[group.name], choices[group.name] = _assign_pairs(pairs)
    element: Permutation = {}
    for group in family.groups:  # parents first: they say which block comes from where
        blocks = math.prod(group.blocks)
        numbers = torch.arange(blocks).reshape(group.blocks)
        placeholder = torch.arange(group.size).expand(group.shape)
        origin = numbers[block_origin(group.name, {**element, group.name: placeholder})].reshape(-1)
        picked = choices[group.name][np.arange(blocks), origin.numpy()]
        element[group.name] = torch.from_numpy(picked).reshape(group.shape)
    return element


def _assign_pairs(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Best values ``[B, B]`` and assignments ``[B, B, n]`` for costs ``[B, B, n, n]``."""
    blocks, size = pairs.shape[0], pairs.shape[-1]
    if blocks > 1 and size <= _ENUMERATED:
        orders = np.array(list(itertools.permutations(range(size))), dtype=np.int64)
        sums = np.stack([pairs[:, :, np.arange(size), order].sum(-1) for order in orders])
        best = sums.argmax(0)
        return np.take_along_axis(sums, best[None], 0)[0], orders[best]
    values = np.empty((blocks, blocks))
    choices = np.empty((blocks, blocks, size), dtype=np.int64)
    rows = np.arange(size)
    for b in range(blocks):
        for c in range(blocks):
            columns = assign(pairs[b, c])
            choices[b, c] = columns
            values[b, c] = pairs[b, c, rows, columns].sum()
    return values, choices


def assign(similarities: np.ndarray) -> np.ndarray:
    """The columns of the assignment with the largest sum of similarities.

    Where the rows' largest entries lie in different columns, they are it (the rule once a planted permutation shows).
    Otherwise SciPy's solver decides, on large matrices with prices: taking a price off each row and each column does
    not change which assignment is the best, and with prices near the dual solution most rows find a free column at
    once. The solver then takes about half the time on Gram matrices of independent networks, and a third to a sixth on
    matrices of low rank (as at a barycenter), which are its hard case. The prices come from two Sinkhorn passes at
    falling temperature.

    Args:
        similarities: ``[n, n]``, float64.

    Returns:
        int64 ``[n]``.
    """
    largest = similarities.argmax(1)
    if np.bincount(largest).max() == 1:
        return largest
    if len(similarities) >= _PRICED:
        scores = torch.from_numpy(similarities).float()
        columns = scores.mean(0)
        temperature = 0.3 * float((scores - columns - (scores.mean(1) - columns.mean()).unsqueeze(1)).std())
        if temperature > 1e-6 * float(scores.abs().max()):
            for _ in range(2):
                rows = temperature * torch.logsumexp((scores - columns) / temperature, 1)
                columns = temperature * torch.logsumexp((scores - rows.unsqueeze(1)) / temperature, 0)
                temperature /= 2
            similarities = similarities - rows.double().numpy()[:, None]
            similarities -= columns.double().numpy()
    return linear_sum_assignment(similarities, maximize=True)[1]
