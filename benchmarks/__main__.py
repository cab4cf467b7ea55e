"""Run benchmarks one after another: ``python -m benchmarks [--quick] [--out FOLDER] [subject ...]``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import benchmarks
from benchmarks._report import MARKDOWN, Run, Settings, failure, record, save
from tu_symmetry.reporting.grid import Grid


def subjects() -> list[str]:
    """Names of all subjects: the modules of this folder without a leading underscore."""
    return sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subjects that are asked for, all by default; returns 1 if one of them failed."""
    known = subjects()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("subjects", nargs="*", metavar="subject", help=f"any of: {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--out", type=Path, help=f"folder of {MARKDOWN} (default: benchmarks, or runs/ for --quick)")
    parser.add_argument("--threads", type=int, default=1, help="threads that PyTorch may use (default: 1)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.subjects) - set(known))
    if unknown:
        parser.error(f"no such subject: {', '.join(unknown)}; there are {', '.join(known)}")
    folder: Path = options.out or (Path("runs/benchmarks") if options.quick else Path(__file__).parent)

    import torch

    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    settings = Settings(options.quick, console)
    failed = []
    chosen = options.subjects or known
    for k, subject in enumerate(chosen, 1):
        console.print(f"[bold blue]▸[/bold blue] {subject} ({k} of {len(chosen)})")
        start = time.perf_counter()
        try:
            run: Run = importlib.import_module(f"benchmarks.{subject}").run
            found = record(run(settings), seconds=time.perf_counter() - start, quick=options.quick)
        except Exception as error:  # the others still run, and the page says what happened
            console.print_exception()
            failed.append(subject)
            found = failure(subject, error, seconds=time.perf_counter() - start, quick=options.quick)
        save(folder, subject, found)
        for grid in found["grids"]:
            Grid(**grid).print(console)
        for goal in found["goals"]:
            mark = "[green]✓[/green]" if goal["held"] else "[red]✗[/red]"
            console.print(f"  {mark} {goal['promise']}: {goal['found']}", highlight=False)
    console.print(f"written: {folder / MARKDOWN}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
