"""From demands on units to groups: distinct rows, and the order in which groups are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.symmetry.algebra import distinct_rows


@pytest.mark.parametrize("span", [2, 2**20, 2**40, 2**62])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_distinct_rows_stand_in_order(columns: int, span: int) -> None:
    """Also where rows are too far from each other for numbers of their own."""
    generator = np.random.default_rng(0)
    rows = generator.integers(-span, span, (50, columns))
    rows = np.concatenate([rows, rows[::3]])
    np.testing.assert_array_equal(distinct_rows(rows), sorted({*map(tuple, rows.tolist())}))
    assert distinct_rows(rows[:0]).shape == (0, columns)


class Parted(nn.Module):
    """Units of one layer, two of each kind."""

    ways = (torch.relu, torch.tanh, torch.sigmoid, torch.sin, torch.abs, torch.exp, torch.nn.functional.gelu)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2 * len(self.ways)), nn.Linear(2 * len(self.ways), 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.first(x).split(2, 1)
        return self.last(torch.cat([way(part) for way, part in zip(self.ways, parts, strict=True)], 1))


def test_groups_of_one_tensor_stand_in_the_order_of_their_units() -> None:
    graph = tus.discover_symmetries(Parted(), torch.zeros(4, 3))
    starts = [group.members[0].index.flatten().tolist() for group in graph.permutations]
    assert starts == [[2 * k, 2 * k + 1] for k in range(len(Parted.ways))]
    assert [group.name for group in graph.permutations] == ["first", *(f"first-{k}" for k in range(2, 8))]
