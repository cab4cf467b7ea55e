"""Sums of log-scales: what is solved makes them vanish, and sums that are alike are solved as each would be alone."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.scale_solver import ScaleSystem

SEEDS, COPIES, VARIABLES, SUMS = 40, 3, 5, 3
Sum = dict[int, float]


def sums_of(seed: int, fewest: int = 3) -> list[Sum]:
    """A few sums of up to four variables each, which share some; four seeds have the same with other factors."""
    generator, factors = np.random.default_rng(seed // 4), np.random.default_rng(seed)
    found = []
    for _ in range(SUMS):
        held = generator.choice(VARIABLES, generator.integers(fewest, 5), replace=False).tolist()
        found.append(dict(zip(held, factors.choice([-1.0, 1.0, 2.0], len(held)).tolist(), strict=True)))
    return found


def solved(copies: list[tuple[int, tuple[int, ...]]], kind: str, fewest: int = 3, times: int = 1) -> list[Sum]:
    """Each variable in free ones; the k-th column of a copy's sums, by their seed, has the number that it gives it.

    With ``times`` each sum stands so often along another axis.
    """
    ledger = Ledger(kind)  # type: ignore[arg-type]
    ledger.fresh_variables((max(max(numbers) for _, numbers in copies),))
    for seed in dict.fromkeys(seed for seed, _ in copies):
        columns = np.array([numbers for own, numbers in copies if own == seed]).T
        columns = columns if times == 1 else columns[..., None].repeat(times, axis=-1)
        ledger.constraints += [tuple((c, columns[k]) for k, c in own.items()) for own in sums_of(seed, fewest)]
    system = ScaleSystem(ledger)
    found = []
    for variable in range(ledger.variables):
        free: Sum = defaultdict(float)
        for coefficient, roots in system.expand(((1.0, np.array([variable])),), 1):
            free[int(roots[0])] += coefficient
        found.append({root: c for root, c in free.items() if root and c})
    return found


@pytest.mark.parametrize("kind", ["scales", "signs"])
def test_sums_that_are_alike_are_solved_as_each_alone(kind: str) -> None:
    first = tuple(range(1, 1 + VARIABLES))
    copies = [(n % SEEDS, tuple(VARIABLES * n + k for k in first)) for n in range(COPIES * SEEDS)]
    together = solved(copies, kind)
    for n, (seed, numbers) in enumerate(copies):
        alone = solved([(seed, first)], kind)
        for k, number in enumerate(numbers):
            assert together[number] == {VARIABLES * n + root: c for root, c in alone[1 + k].items()}
        for own in sums_of(seed):
            total: Sum = defaultdict(float)
            for k, c in own.items():
                for root, factor in together[numbers[k]].items():
                    total[root] += c * factor
            assert all((c % 2 if kind == "signs" else c) == 0 for c in total.values())


@pytest.mark.parametrize("kind", ["scales", "signs"])
def test_short_sums_are_used_until_they_say_no_more(kind: str) -> None:
    copies = [(n % SEEDS, tuple(VARIABLES * n + k for k in range(1, 1 + VARIABLES))) for n in range(COPIES * SEEDS)]
    found = solved(copies, kind, fewest=1)
    assert found == solved(copies, kind, fewest=1, times=2)  # which are not written out position by position
    assert any(found)
    for seed, numbers in copies:
        for own in sums_of(seed, fewest=1):
            total: Sum = defaultdict(float)
            for k, c in own.items():
                for root, factor in found[numbers[k]].items():
                    total[root] += c * factor
            assert all((c % 2 if kind == "signs" else c) == 0 for c in total.values())
