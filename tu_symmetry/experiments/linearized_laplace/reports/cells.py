"""Rows and cells that several reports share: means with their errors, and what had not converged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tu_symmetry.experiments.linearized_laplace.choices import NETWORK, Choice
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import measured

ITSELF = "network itself"
OPEN = "†"  # stands beside every number from an optimum that had not converged
MOVING = "‡"
OPEN_CAPTION = f"{OPEN}: the evidence of at least one network had not converged, so that the number is no result"
COLORS = {"map": plots.ORANGE, "tangent_mode": plots.BLUE, "full": plots.GREEN}  # of where the evidence is evaluated
Runs = Sequence[Mapping[str, Any]]


def cell(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean and standard error as a table shows them."""
    return measured(values, f"{sign}.{digits}f")


def marks(runs: Runs) -> str:
    """What stands beside a number: whether its optimizations had all converged."""
    open_end = OPEN if any(not run.get("converged", True) for run in runs) else ""
    return open_end + (MOVING if any(not run.get("settled", True) for run in runs) else "")


def title_of(key: str) -> str:
    """What a report calls a row."""
    return ITSELF if key == NETWORK else Choice.parse(key, ("map", "tangent_mode", "full")).title
