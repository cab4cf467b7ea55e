"""What Lightning's CSVLogger has written: the last value of every column."""

from __future__ import annotations

import csv
from pathlib import Path


def last_values(run: Path) -> dict[str, float]:
    """The last logged value of every metric of a run, resumed parts included.

    Args:
        run: folder that holds one or more ``metrics.csv``, at any depth; a later file goes over an earlier one.

    Raises:
        FileNotFoundError: no such file: the run has no CSVLogger, or logs elsewhere.
    """
    files = sorted(run.rglob("metrics.csv"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"{run} holds no metrics.csv: give the run a CSVLogger whose save_dir is that folder (or its default)"
        )
    values: dict[str, float] = {}
    for file in files:
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                values |= {name: float(text) for name, text in row.items() if text not in ("", None)}
    return values
