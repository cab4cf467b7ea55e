"""``report.md`` of a recipe: title, source and note, tables, claims, figures, and the machine that found them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from tu_symmetry.configs import ConfigError
from tu_symmetry.files import write_text
from tu_symmetry.reporting.environment import describe_environment
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.library import find_recipe
from tu_symmetry.tables.outcome import Outcome

T = TypeVar("T")
Found = Mapping[str, Any]


class Answer(NamedTuple):
    """What was found of one claim: a verdict (``holds``, ``fails`` or ``undecided``), and the numbers in a sentence."""

    verdict: str
    evidence: str


def answered(claims: Mapping[str, str], answers: Mapping[str, Callable[..., Answer]], *found: Any) -> dict[str, Answer]:
    """What results say to each claim of a recipe."""
    unknown = [name for name in claims if name not in answers]
    if unknown:
        raise ConfigError(f"claims: there is no answer to {unknown[0]!r}, only to {', '.join(answers)}")
    return {name: answers[name](*found) for name in claims}


def table(
    title: str, rows: Mapping[str, T], columns: Mapping[str, Callable[[T], str]], caption: str = "", corner: str = ""
) -> Grid:
    """A grid with a row for each entry and a column for each function of an entry."""
    body = [[label, *(cell(row) for cell in columns.values())] for label, row in rows.items()]
    return Grid(title, [corner, *columns], body, caption)


class Report:
    """A report in the making: sections in the order in which they are added.

    ``table`` is the recipe's ``table.yaml``, which holds title, note, claims and the paper's numbers.
    """

    def __init__(self, out: Path, recipe: str) -> None:
        self.out, self.table = out, load_table(find_recipe(recipe))
        self._sections: list[str] = []
        self.grids: list[Grid] = []
        out.mkdir(parents=True, exist_ok=True)

    def add(self, *sections: str | Grid, heading: bool = True) -> None:
        """Add Markdown, or tables, with their titles as headings."""
        for section in sections:
            if isinstance(section, Grid):
                self.grids.append(section)
                section = f"## {section.title}\n\n{section.markdown()}" if heading else section.markdown()
            self._sections.append(section)

    def figure(
        self, name: str, draw: Callable[..., object], *drawn: Any, title: str = "", alt: str = "", after: str = ""
    ) -> None:
        """Draw ``NAME.png`` by ``draw(path, *drawn)``, and show it below a title and above a text."""
        draw(self.out / f"{name}.png", *drawn)
        parts = [f"## {title}" if title else "", f"![{alt or name}]({name}.png)", after]
        self._sections.append("\n\n".join(part for part in parts if part))

    def list(self, title: str, lines: Sequence[str]) -> None:
        """Add a section of bullet points."""
        self._sections.append("\n".join([f"## {title}", "", *(f"- {line}" for line in lines)]))

    def done(self, results: Found | None = None) -> Outcome:
        """Write ``report.md``, whole or not at all; its path, and all tables."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        environment = ", ".join(f"{k} {v}" for k, v in describe_environment(device).items())
        head = [f"# {self.table.title}", f"Reproduces: {self.table.source}.", self.table.note]
        parts = [*head, *self._sections, f"## Hardware and versions\n\n{environment}"]
        path = self.out / "report.md"
        write_text(path, "\n\n".join(p for p in parts if p) + "\n")
        return Outcome(results or {}, str(path), self.grids)
