"""A small table of strings: printed in a terminal, written as Markdown and CSV, kept as JSON."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tu_symmetry.files import write_text

_NUMBER = r"[-−+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_MEASURED = re.compile(rf"({_NUMBER})(?: ± ({_NUMBER}))?")  # a number, or one with its standard error or deviation
_NOTHING = ("", "-", "–", "—")


@dataclass(frozen=True)
class Grid:
    """A table with one header row.

    Attributes:
        title: above the table.
        header: a name for each column; a line break separates a group from the column's own name.
        rows: cells; what follows a line break in a cell is secondary (the paper's value).
        caption: below the table.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    caption: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; ``Grid(**grid.to_dict())`` is the same again."""
        return asdict(self)

    def markdown(self) -> str:
        """A GitHub table, secondary values in italics."""

        def cell(text: str) -> str:
            first, *more = text.split("\n")
            return " ".join([first, *(f"*{m}*" for m in more if m)]).strip()

        lines = [
            "| " + " | ".join(h.replace("\n", " ") for h in self.header) + " |",
            "|" + "|".join(["---", *["---:"] * (len(self.header) - 1)]) + "|",
            *("| " + " | ".join(cell(c) for c in row) + " |" for row in self.rows),
        ]
        return "\n".join([*lines, "", self.caption] if self.caption else lines)

    def csv(self) -> str:
        """Comma-separated values: one number in a cell, without separators of thousands; no number as an empty cell.

        A number with ``±`` takes two columns, ``NAME`` and ``NAME ±``. Secondary values take columns of their own:
        ``NAME (paper)`` where the first cell of every row says so below its name, else ``NAME (2)``.
        """
        seconds = {tuple(row[0].split("\n")[1:]) for row in self.rows if row}
        named = len(seconds) == 1 and len(next(iter(seconds))) > 0
        columns: list[list[str]] = []
        for j, header in enumerate(self.header):
            cells = [row[j].split("\n") for row in self.rows]
            for k in range(1 if j == 0 and named else max((len(cell) for cell in cells), default=1)):
                said = next(iter(seconds)) if named else ()
                name = " ".join(header.split()) + (f" ({said[k - 1] if k <= len(said) else k + 1})" if k else "")
                parts = [_parts(cell[k]) if k < len(cell) else ("", "") for cell in cells]
                columns.append([name, *(value for value, _ in parts)])
                if any(error for _, error in parts):
                    columns.append([f"{name} ±", *(error for _, error in parts)])
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows(zip(*columns, strict=True))
        return written.getvalue()

    def print(self, console: Console) -> None:
        """Print with rich, secondary values dimmed."""
        table = Table(
            title=self.title, caption=self.caption or None, title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
        for row in self.rows:
            cells = [text.partition("\n") for text in row]
            table.add_row(*(Text.assemble(first, (end + more, "dim")) for first, end, more in cells))
        console.print(table)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, from the deviation that divides by n - 1; no error of a single value."""
    mean = math.fsum(values) / len(values)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def measured(values: Sequence[float], form: str, *, error: bool = True) -> str:
    """``mean ± standard error`` of some values as a table shows them, or ``mean ± standard deviation``."""
    mean, spread = mean_and_error(values)
    if spread is None:
        return format(mean, form)
    return f"{format(mean, form)} ± {format(spread if error else statistics.stdev(values), form.lstrip('+'))}"


def verdict(excess: Sequence[float]) -> str:
    """Whether a mean is above 0 by more than its standard error."""
    mean, error = mean_and_error(excess)
    if abs(mean) <= (error or 0.0):
        return "not resolved (within one standard error)"
    return "held" if mean > 0 else "did not hold"


def write_grids(folder: Path, grids: Sequence[Grid]) -> list[Path]:
    """Write every table as CSV, whole or not at all, into a file with the table's title as name."""
    written: list[Path] = []
    for grid in grids:
        name = re.sub(r"[^a-z0-9]+", "-", grid.title.lower()).strip("-")[:80].strip("-") or "table"
        taken = {path.stem for path in written}
        stem = next(n for n in (name, *(f"{name}-{k}" for k in range(2, len(grids) + 1))) if n not in taken)
        written.append(folder / f"{stem}.csv")
        write_text(written[-1], grid.csv())
    return written


def _parts(text: str) -> tuple[str, str]:
    """Value and spread of a cell as a program reads them."""
    text = text.strip()
    if text in _NOTHING:
        return "", ""
    measured = _MEASURED.fullmatch(text)
    if measured is None:
        return text, ""
    value, error = (part.replace(",", "").replace("−", "-") if part else "" for part in measured.groups())
    return value, error
