"""What a fit has written: by Lightning's CSVLogger the last value of every column and whole curves; its weights."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from tu_symmetry.states import load_state


def last_values(run: Path) -> dict[str, float]:
    """The last logged value of every metric of a run, resumed parts included.

    Args:
        run: folder that holds one or more ``metrics.csv``, at any depth; a later file goes over an earlier one.

    Raises:
        FileNotFoundError: no such file: the run has no CSVLogger, or logs elsewhere.
    """
    values: dict[str, float] = {}
    for row in _rows(run):
        values |= {name: float(text) for name, text in row.items() if text not in ("", None)}
    return values


def logged_curve(run: Path, name: str) -> tuple[list[int], list[float]]:
    """All logged values of one metric with their steps, in ascending order, resumed parts included.

    Args:
        run: folder that holds one or more ``metrics.csv``, at any depth; where two have the same
            step, the later file stands.
        name: column of the metric.

    Raises:
        FileNotFoundError: no such file.
        KeyError: no such column.
    """
    found: dict[int, float] = {}
    for row in _rows(run):
        if row.get(name) not in ("", None):
            found[int(row["step"])] = float(row[name])
    if not found:
        raise KeyError(f"no metrics.csv in {run} has a value of {name!r}")
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def last_weights(run: Path) -> dict[str, Tensor]:
    """The network of a run's newest ``last.ckpt``, of a routine that holds it as ``model``.

    Args:
        run: folder that holds the checkpoint, at any depth.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(run.rglob("last*.ckpt"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"{run} holds no last.ckpt: fit with the callback LastCheckpoint")
    return load_state(found[-1], prefix="model.")


def _rows(run: Path) -> Iterator[dict[str, str]]:
    files = sorted(run.rglob("metrics.csv"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"{run} holds no metrics.csv: give the run a CSVLogger whose save_dir is that folder (or its default)"
        )
    for file in files:
        with file.open(newline="", encoding="utf-8") as lines:
            yield from csv.DictReader(lines)
