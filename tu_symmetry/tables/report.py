"""``report.md`` of a recipe: title, source and note, what was found, and the machine that found it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tu_symmetry.files import write_text
from tu_symmetry.reporting.environment import describe_environment
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.library import find_recipe
from tu_symmetry.tables.outcome import Outcome

REPORT = "report.md"


class Report:
    """A report in the making: sections in the order in which they are added.

    Args:
        out: folder of the report and its figures; made if there is none.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title, note, claims and the paper's numbers.

    Attributes:
        table: the table of the recipe.
    """

    def __init__(self, out: Path, recipe: str) -> None:
        self.out, self.table = out, load_table(find_recipe(recipe))
        self._sections: list[str] = []
        self._grids: list[Grid] = []
        out.mkdir(parents=True, exist_ok=True)

    def add(self, *sections: str | Grid, heading: bool = True) -> None:
        """Add Markdown, or tables, with their titles as headings."""
        for section in sections:
            if isinstance(section, Grid):
                self._grids.append(section)
                section = f"## {section.title}\n\n{section.markdown()}" if heading else section.markdown()
            self._sections.append(section)

    def figure(self, name: str, draw: Callable[..., object], *drawn: Any, alt: str = "", **text: str) -> None:
        """Draw ``NAME.png`` by ``draw(path, *drawn)`` and show it.

        Args:
            name: the name of the file.
            draw: draws it.
            drawn: what ``draw`` takes after the path.
            alt: what stands for the figure where it is not seen; its name by default.
            **text: ``before`` and ``after`` the figure.
        """
        draw(self.out / f"{name}.png", *drawn)
        shown = f"![{alt or name}]({name}.png)"
        self._sections.append("\n\n".join(part for part in (text.get("before"), shown, text.get("after")) if part))

    def done(self, results: Mapping[str, Any] | None = None) -> Outcome:
        """Write ``report.md``, whole or not at all; its path, and all tables."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        environment = ", ".join(f"{k} {v}" for k, v in describe_environment(device).items())
        head = [f"# {self.table.title}", f"Reproduces: {self.table.source}.", self.table.note]
        parts = [*head, *self._sections, f"## Hardware and versions\n\n{environment}"]
        write_text(self.out / REPORT, "\n\n".join(p for p in parts if p) + "\n")
        return Outcome(results or {}, str(self.out / REPORT), self._grids)
