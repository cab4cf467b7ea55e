"""One large assignment of units: how long, and what of it prices and their reuse save beside SciPy's solver alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks._measure import Stopwatch, figure
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.alignment.assignment import assign
from tu_symmetry.reporting.grid import Grid

# inputs of each unit, and the noise of the second network in standard deviations of the weights; None: independent
_PROBLEMS = {"permuted copy": (1024, 1.0), "noisy copy, few inputs": (64, 3.0), "independent": (1024, None)}


def run(settings: Settings) -> Section:
    """Assign 4,096 and 16,384 units."""
    sizes = (256, 300) if settings.quick else (4096, 16384)
    data: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for size in sizes:
        for problem, (inputs, noise) in _PROBLEMS.items():
            similarities = _similarities(size, inputs, noise)
            change = np.random.default_rng(0).standard_normal(similarities.shape, dtype=np.float32)
            later = similarities + 0.01 * similarities.std() * change  # of the next sweep
            del change
            prices: dict[str, torch.Tensor] = {}
            record: dict[str, Any] = {"units": size, "problem": problem}
            total: dict[str, float] = {}
            for what, given in (("first", similarities), ("again", later)):
                with Stopwatch() as watch:
                    columns = assign(given, prices, "units")
                record[what], total[what] = watch.cpu, _total(given, columns)
            with Stopwatch() as watch:
                columns = linear_sum_assignment(later, maximize=True)[1]
            record["scipy"], total["scipy"] = watch.cpu, _total(later, columns)
            record["gap"] = (total["scipy"] - total["again"]) / abs(total["scipy"])
            data.append(record)
            rows.append(
                [
                    f"{size:,}",
                    problem,
                    *(figure(record[w]) for w in ("first", "again", "scipy")),
                    figure(record["scipy"] / record["again"]),
                ]
            )
            settings.say(f"{size} units, {problem}: {figure(record['again'])} s, SciPy {figure(record['scipy'])} s")
    text = (
        "One assignment on the similarities (products of incoming weights, float32) of two layers of so many units, on "
        "the CPU: `assign` for the first time, and again on similarities changed by 1 % of their standard deviation, "
        "with the prices of the first time; `scipy.optimize.linear_sum_assignment` on the same as *again*. Seconds are "
        "those of the CPU, of one run each."
    )
    header = ["units", "second network", "first, s", "again, s", "SciPy, s", "SciPy / again"]
    worst = max(abs(d["gap"]) for d in data)
    goals = [Goal("the optimum that SciPy finds", worst < 1e-6, f"totals differ by {figure(worst)} at most")]
    return Section("One large assignment", text, [Grid("One layer", header, rows)], goals, data)


def _similarities(size: int, inputs: int, noise: float | None) -> NDArray[np.float32]:
    generator = torch.Generator().manual_seed(0)
    first, other = (torch.randn(size, inputs, generator=generator) for _ in range(2))
    second = other if noise is None else first + noise * other
    return (first @ second[torch.randperm(size, generator=generator)].T).numpy()


def _total(similarities: NDArray[np.float32], columns: NDArray[Any]) -> float:
    return float(similarities[np.arange(len(columns)), columns].sum(dtype=np.float64))
