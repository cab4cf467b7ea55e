"""Rows and cells that several reports share: means with their errors, and what had not converged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tu_symmetry.experiments.linearized_laplace.choices import NETWORK, Choice
from tu_symmetry.reporting import plots

ITSELF = "network itself"
OPEN = "†"  # stands beside every number from an optimum that had not converged
MOVING = "‡"
OPEN_CAPTION = f"{OPEN}: the evidence of at least one network had not converged, so that the number is no result"
COLORS = {"map": plots.ORANGE, "tangent_mode": plots.BLUE, "full": plots.GREEN}  # of where the evidence is evaluated
Runs = Sequence[Mapping[str, Any]]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, None for a single value."""
    found = torch.tensor(values, dtype=torch.float64, device="cpu")
    return float(found.mean()), float(found.std()) / len(found) ** 0.5 if len(found) > 1 else None


def cell(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean and standard error as a table shows them."""
    mean, error = mean_and_error(values)
    return f"{mean:{sign}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def marks(runs: Runs) -> str:
    """What stands beside a number: whether its optimizations had all converged."""
    open_end = OPEN if any(not run.get("converged", True) for run in runs) else ""
    return open_end + (MOVING if any(not run.get("settled", True) for run in runs) else "")


def title_of(key: str) -> str:
    """What a report calls a row."""
    return ITSELF if key == NETWORK else Choice.parse(key, ("map", "tangent_mode", "full")).title
