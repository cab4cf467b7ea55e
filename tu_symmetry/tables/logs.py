"""What a fit has written: the columns of Lightning's CSVLogger, and its weights."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from tu_symmetry.states import load_state


def last_values(run: Path) -> dict[str, float]:
    """The last logged value of every metric in all ``metrics.csv`` of a run, resumed parts included."""
    values: dict[str, float] = {}
    for row in _rows(run):
        values |= {name: float(text) for name, text in row.items() if text not in ("", None)}
    return values


def logged_curve(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps, ascending, and values of one metric; where two parts of a run have the same step, the later stands."""
    found = {int(row["step"]): float(row[name]) for row in _rows(run) if row.get(name) not in ("", None)}
    if not found:
        raise KeyError(f"no metrics.csv in {run} has a value of {name!r}")
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def last_weights(run: Path) -> dict[str, Tensor]:
    """The network of a run's newest ``last.ckpt``, of a routine that holds it as ``model``."""
    found = sorted(run.rglob("last*.ckpt"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"{run} holds no last.ckpt: fit with the callback LastCheckpoint")
    return load_state(found[-1], prefix="model.")


def _rows(run: Path) -> Iterator[dict[str, str]]:
    files = sorted(run.rglob("metrics.csv"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{run} holds no metrics.csv: give the run a CSVLogger whose save_dir is that folder")
    for file in files:
        with file.open(newline="", encoding="utf-8") as lines:
            yield from csv.DictReader(lines)
