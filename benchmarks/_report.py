"""What a subject hands back, and the two files that hold what all subjects found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tu_symmetry.files import write_text
from tu_symmetry.reporting.environment import describe_environment
from tu_symmetry.reporting.grid import Grid

JSON, MARKDOWN = "results.json", "RESULTS.md"
_INTRODUCTION = """# Benchmarks

Made by `python -m benchmarks`; a subject's section is replaced when the subject is run again. What is compared runs in
turn, and times are medians: wall-clock seconds, and beside them (*cpu*) the CPU seconds of the process. With one thread
on an idle machine these are the same; where others use the machine too, CPU time is what the work itself costs, and
ratios and goals are taken from it. What failed stays in the tables, and a goal that was missed says so.
"""


@dataclass(frozen=True)
class Settings:
    """How a subject is to run: ``quick`` in tiny sizes, to see that everything works; ``console`` takes progress."""

    quick: bool
    console: Console

    def say(self, text: str) -> None:
        """Print one line of progress."""
        self.console.print(f"    {text}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Goal:
    """A figure that was promised, whether it held, and what was measured."""

    promise: str
    held: bool
    found: str


@dataclass(frozen=True)
class Section:
    """What one subject found.

    Attributes:
        title: heading.
        text: what was measured, and how; Markdown.
        grids: tables.
        goals: promises, held or not.
        data: the numbers behind the tables, as JSON holds them.
        packages: distributions whose versions matter, beside those that every section names.
    """

    title: str
    text: str
    grids: list[Grid]
    goals: list[Goal] = field(default_factory=list)
    data: Any = None
    packages: tuple[str, ...] = ()


def record(section: Section, *, seconds: float, quick: bool) -> dict[str, Any]:
    """A section as :data:`JSON` holds it, with the machine, the versions and the date."""
    environment = describe_environment(torch.device("cpu"))
    environment["load"] = f"{os.getloadavg()[0]:.1f}"
    for package in section.packages:
        try:
            environment[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            environment[package] = "not installed"
    kept = asdict(section)
    return {
        **kept,
        "environment": environment,
        "finished": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(seconds, 1),
        "quick": quick,
    }


def failure(subject: str, error: BaseException, *, seconds: float, quick: bool) -> dict[str, Any]:
    """What is kept of a subject that ended with an error."""
    text = f"**This subject failed:** `{describe_error(error)}`"
    return record(Section(subject, text, []), seconds=seconds, quick=quick)


def describe_error(error: BaseException) -> str:
    """An error in one short line, as a table's cell can hold it."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}".rstrip(": ")


def save(folder: Path, subject: str, found: Mapping[str, Any]) -> None:
    """Replace one subject's entry in both files of a folder; each file is renamed into place."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JSON
    everything = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    everything[subject] = dict(found)
    everything = dict(sorted(everything.items()))
    write_text(path, json.dumps(everything, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / MARKDOWN, render(everything))


def render(everything: Mapping[str, Mapping[str, Any]]) -> str:
    """All sections as one Markdown page."""
    return "\n".join([_INTRODUCTION, *(_render_section(name, found) for name, found in everything.items())])


def _render_section(subject: str, found: Mapping[str, Any]) -> str:
    lines = [
        f"## {found['title']}",
        "",
        f"`python -m benchmarks {subject}`, {found['finished']}, {found['seconds']} s.",
    ]
    if found["quick"]:
        lines += ["", "**Quick run: the sizes are too small for the numbers to mean anything.**"]
    lines += ["", found["text"].strip(), ""]
    for grid in (Grid(**g) for g in found["grids"]):
        lines += [f"**{grid.title}**", "", grid.markdown(), ""]
    if found["goals"]:
        lines += ["| goal | held | measured |", "|---|---|---|"]
        lines += [f"| {g['promise']} | {'yes' if g['held'] else '**no**'} | {g['found']} |" for g in found["goals"]]
        lines.append("")
    environment = dict(found["environment"])
    machine = [f"{environment.pop(k)}" for k in ("processor", "system")]
    machine.append(f"{environment.pop('cores')} cores, {environment.pop('threads')} thread(s)")
    machine.append(f"device {environment.pop('device')}; load average at the end {environment.pop('load')}")
    versions = ", ".join(f"{name} {version}" for name, version in environment.items())
    lines += [f"Machine: {'; '.join(machine)}. Versions: {versions}.", ""]
    return "\n".join(lines)


Run = Callable[[Settings], Section]
