"""Sums of log-scales: what is solved makes them vanish, and sums that are alike are solved as each would be alone."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.scale_solver import ScaleSystem

COPIES, VARIABLES, SUMS = 5, 7, 3
Sum = dict[int, float]


def sums_of(seed: int) -> list[Sum]:
    """A few sums of three or four variables each, which share some."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(SUMS):
        held = generator.choice(VARIABLES, generator.integers(3, 5), replace=False).tolist()
        found.append(dict(zip(held, generator.choice([-1.0, 1.0, 2.0], len(held)).tolist(), strict=True)))
    return found


def solved(copies: list[tuple[int, ...]], seed: int, kind: str) -> list[Sum]:
    """Each variable in free ones; the k-th column of the sums of each copy has the number that the copy gives it."""
    ledger = Ledger(kind)  # type: ignore[arg-type]
    ledger.fresh_variables((max(map(max, copies)),))
    for own in sums_of(seed):
        terms = tuple((c, np.array([numbers[k] for numbers in copies])) for k, c in own.items())
        ledger.constraints.append(terms)
    system = ScaleSystem(ledger)
    found = []
    for variable in range(ledger.variables):
        free: Sum = defaultdict(float)
        for coefficient, roots in system.expand(((1.0, np.array([variable])),), 1):
            free[int(roots[0])] += coefficient
        found.append({root: c for root, c in free.items() if root and c})
    return found


@pytest.mark.parametrize("kind", ["scales", "signs"])
@pytest.mark.parametrize("seed", range(12))
def test_sums_that_are_alike_are_solved_as_each_alone(seed: int, kind: str) -> None:
    copies = [tuple(1 + VARIABLES * n + k for k in range(VARIABLES)) for n in range(COPIES)]
    together, alone = solved(copies, seed, kind), solved(copies[:1], seed, kind)
    for n, numbers in enumerate(copies):
        for k, number in enumerate(numbers):
            assert together[number] == {VARIABLES * n + root: c for root, c in alone[1 + k].items()}
        for own in sums_of(seed):
            total: Sum = defaultdict(float)
            for k, c in own.items():
                for root, factor in together[numbers[k]].items():
                    total[root] += c * factor
            assert all((c % 2 if kind == "signs" else c) == 0 for c in total.values())
