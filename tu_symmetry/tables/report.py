"""``report.md`` of a table: title, source and note, what was found, and the machine that found it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tu_symmetry.files import write_text
from tu_symmetry.reporting.environment import describe_environment
from tu_symmetry.tables.commands import CommandTable

REPORT = "report.md"


def write_report(out: Path, table: CommandTable, sections: Sequence[str]) -> Path:
    """Write the report of a table into ``out``, whole or not at all, and return its path.

    Args:
        out: folder of the report and its plots; made if there is none.
        table: of the recipe.
        sections: Markdown between the head and the machine.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = ", ".join(f"{k} {v}" for k, v in describe_environment(device).items())
    head = [f"# {table.title}", f"Reproduces: {table.source}.", table.note]
    parts = [*head, *sections, f"## Hardware and versions\n\n{environment}"]
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / REPORT, "\n\n".join(p for p in parts if p) + "\n")
    return out / REPORT
