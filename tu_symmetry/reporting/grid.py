"""A small table of strings: printed in a terminal, written as Markdown, kept as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text


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
