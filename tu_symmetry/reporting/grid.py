"""A small table of strings that can be printed in a terminal, written as Markdown and kept as JSON."""

from __future__ import annotations

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
            table.add_row(*(self._rich(c) for c in row))
        console.print(table)

    @staticmethod
    def _rich(text: str) -> Text:
        first, *more = text.split("\n")
        rich = Text(first)
        for line in more:
            rich.append("\n" + line, style="dim")
        return rich
