"""What a run shows: which commands there are, a bar for the one at work or lines in a log file, and what comes next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from tu_symmetry.reporting.grid import Grid


class Tracker(Protocol):
    """What shows the progress of one loop."""

    def update(self, done: int, **info: float | str) -> None:
        """Show that ``done`` steps are done, with some figures beside the bar."""


Progress = Callable[[dict[str, Any]], None]
"""What the argument ``progress`` of a long computation takes: it is called with ``{"stage": ..., ...}``."""
Track = Callable[[str, int], AbstractContextManager[Tracker]]
_COUNTERS = ("done", "batch", "iteration", "step")  # what a stage counts its steps by


class StageProgress:
    """One line of what a computation says of itself: its stage, how far, how fast, how long still."""

    def __init__(self, title: str = "", *, clock: Callable[[], float] | None = None) -> None:
        self.title, self._clock = title, clock or time.monotonic
        self._stage: str | None = None
        self._first = self._started = 0.0

    def line(self, info: Mapping[str, Any]) -> str:
        """What to show after a call with ``{"stage", "step", "batches", ...}``, the last one their number if known."""
        now, stage, total = self._clock(), str(info.get("stage", "")), info.get("batches")
        counter = next((name for name in _COUNTERS if name in info), "")
        done = float(info.get(counter, 0.0))
        if stage != self._stage or done < self._first:
            self._stage, self._started, self._first = stage, now, done
        steps, seconds = done - self._first, now - self._started
        rate = steps / seconds if steps > 0 and seconds > 0 else 0.0
        shown = f" {counter} {done:g}{f'/{total}' if total else ''}" if counter else ""
        if rate > 0:
            shown += f", {rate:.1f}/s" if rate >= 1 else f", {1 / rate:.1f} s each"
        if rate > 0 and total:
            shown += f", {_duration(max(0.0, total - done) / rate)} left"
        hidden = {"stage", "batches", "wanted", counter}
        figures = {k: v for k, v in info.items() if k not in hidden and isinstance(v, (int, float, str))}
        title = f"{self.title}: " if self.title else ""
        return f"{title}{stage}{shown}  {_figures(figures)}".rstrip()


class _Lines:
    """Where there is no terminal: a line now and then."""

    def __init__(self, title: str, console: Console, every: float) -> None:
        self._stages, self._console, self._every = StageProgress(title), console, every
        self._last = time.monotonic()

    def show(self, info: dict[str, Any]) -> None:
        line = self._stages.line(info)
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Tracker:
    def __init__(self, show: Callable[[int, dict[str, Any]], None]) -> None:
        self._show = show

    def update(self, done: int, **info: float | str) -> None:
        self._show(done, info)


class _Status:
    headline = memory = ""

    def done(self, results: Mapping[str, Any]) -> None:
        """Take what a finished stage says in one line (its result ``headline``), and its peak of a GPU's memory."""
        self.headline = str(results.get("headline", ""))
        if peak := results.get("gpu_allocated"):
            self.memory = f", {peak / 2**30:.2f} GiB on the GPU"


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

    def skipped(self, name: str) -> None:
        """Say that a command had been done before."""
        self.console.print(f"[green]✓[/green] {name} [dim](done before)[/dim]", highlight=False)

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
        self.console.print(f"[green]✓[/green] {name} [cyan]{seconds:.1f} s{status.memory}[/cyan]", highlight=False)
        if status.headline:
            self.console.print(f"    {status.headline}", highlight=False, soft_wrap=True)

    def tables(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the tables that commands have among their results."""
        for found in results.values():
            for grid in found.get("tables", ()):
                Grid(**grid).print(self.console)

    @contextmanager
    def track(self, description: str, total: int) -> Iterator[Tracker]:
        """A bar for one loop of ``total`` steps, or a line every 15 seconds."""
        if not self.console.is_terminal:
            lines = _Lines("", self.console, 15.0)
            yield _Tracker(lambda done, info: lines.show({"stage": description, "done": done, "batches": total} | info))
            return
        bars = Bars(
            SpinnerColumn(),
            TextColumn("  {task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("[dim]{task.fields[info]}"),
            console=self.console,
            transient=True,
        )
        with bars:
            task = bars.add_task(description, total=total, info="")
            yield _Tracker(lambda done, info: bars.update(task, completed=done, info=_figures(info)))


@contextmanager
def show_progress(title: str = "Laplace", *, console: Console | None = None, every: float = 10.0) -> Iterator[Progress]:
    """What the argument ``progress`` of long computations takes, to see them work.

    In a terminal it is one line that changes, elsewhere (a log file, a batch job, a notebook's text) a line every
    ``every`` seconds; what takes less time prints nothing. It goes to the standard error without a console.

    Example:
        >>> with tus.show_progress() as progress:                                            # doctest: +SKIP
        ...     la.fit(loader, progress=progress)
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, console, every).show
        return
    stages = StageProgress(title)
    with console.status(title) as status:
        yield lambda info: status.update(stages.line(info))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _figures(info: Mapping[str, float | str]) -> str:
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in info.items())
