"""What a run shows: which commands there are, bars with rates for the one at work, and what comes next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tu_symmetry.reporting.grid import Grid


class Tracker(Protocol):
    """What shows the progress of one loop."""

    def update(self, done: int, **info: float | str) -> None:
        """Show that ``done`` steps are done, with some figures beside the bar."""


Track = Callable[[str, int], AbstractContextManager[Tracker]]


class _Rate(ProgressColumn):
    """Steps in a second, or seconds a step where a step takes longer."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each", style="cyan")


class _BarTracker:
    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task

    def update(self, done: int, **info: float | str) -> None:
        self._progress.update(self._task, completed=done, info=_figures(info))


class _LineTracker:
    """Where there is no terminal: a line now and then."""

    def __init__(self, console: Console, description: str, total: int, every: float = 15.0) -> None:
        self._console, self._description, self._total, self._every = console, description, total, every
        self._started = self._last = time.monotonic()
        self._first: int | None = None

    def update(self, done: int, **info: float | str) -> None:
        now = time.monotonic()
        self._first = done if self._first is None else self._first
        if now - self._last < self._every:
            return
        self._last = now
        rate = (done - self._first) / (now - self._started)
        left = f", {rate:.2g}/s, {(self._total - done) / rate:.0f} s left" if rate > 0 else ""
        self._console.print(f"    {self._description}: {done}/{self._total}{left}  {_figures(info)}", highlight=False)


class _Status:
    def __init__(self) -> None:
        self.headline = ""

    def done(self, results: Mapping[str, Any]) -> None:
        """Take what a finished stage says in one line (its result ``headline``)."""
        self.headline = str(results.get("headline", ""))


class Display:
    """Shows a run on a console: live bars in a terminal, lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def plan(self, title: str, commands: Sequence[str], done: Sequence[str]) -> None:
        """Announce the table and its commands."""
        self.console.print(f"[bold]{title}[/bold]")
        if len(done) < len(commands):
            names = " → ".join(f"[dim]{s}[/dim]" if s in done else s for s in commands)
            self.console.print(f"commands: {names}", soft_wrap=True)

    def skipped(self, name: str, by: str = "") -> None:
        """Say that a stage had been done before, and by which other versions."""
        self.console.print(f"[green]✓[/green] {name} [dim](done before{f' {by}' if by else ''})[/dim]", highlight=False)

    def note(self, text: str) -> None:
        """Say something that the reader should know."""
        self.console.print(f"    {text}", style="yellow", highlight=False, soft_wrap=True, markup=False)

    @contextmanager
    def stage(self, name: str, *, resumed: bool, following: str | None) -> Iterator[_Status]:
        """Frame one stage: that it starts and what follows, then how long it took and what came out."""
        after = f" [dim](next: {following})[/dim]" if following else ""
        self.console.print(f"[bold blue]▸[/bold blue] {name}{' [yellow](resuming)[/yellow]' if resumed else ''}{after}")
        status, started = _Status(), time.perf_counter()
        yield status
        seconds = time.perf_counter() - started
        self.console.print(f"[green]✓[/green] {name} [cyan]{seconds:.1f} s[/cyan]", highlight=False)
        if status.headline:
            self.console.print(f"    {status.headline}", highlight=False, soft_wrap=True)

    def tables(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the tables that commands have among their results."""
        for found in results.values():
            for grid in found.get("tables", ()):
                Grid(**grid).print(self.console)

    @contextmanager
    def track(self, description: str, total: int) -> Iterator[_BarTracker | _LineTracker]:
        """A bar for one loop of ``total`` steps."""
        if not self.console.is_terminal:
            yield _LineTracker(self.console, description, total)
            return
        progress = Progress(
            SpinnerColumn(),
            TextColumn("  {task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("[dim]{task.fields[info]}"),
            console=self.console,
            transient=True,
        )
        with progress:
            yield _BarTracker(progress, progress.add_task(description, total=total, info=""))


def _figures(info: Mapping[str, float | str]) -> str:
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in info.items())
