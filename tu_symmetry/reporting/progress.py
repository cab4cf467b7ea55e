"""What a run shows: which commands there are, bars with rates for the one at work, and what comes next.

Long computations of the functional core print nothing; they call ``progress`` with ``{"stage": ..., ...}``, which
:func:`show_progress` turns into lines with rate and time left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from tu_symmetry.reporting.grid import Grid


class Tracker(Protocol):
    """What shows the progress of one loop."""

    def update(self, done: int, **info: float | str) -> None:
        """Show that ``done`` steps are done, with some figures beside the bar."""


Progress = Callable[[dict[str, Any]], None]
"""What the argument ``progress`` of a long computation takes: it is called with ``{"stage": ..., ...}``."""
Track = Callable[[str, int], AbstractContextManager[Tracker]]


class _Rate(ProgressColumn):
    """Steps in a second, or seconds a step where a step takes longer."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each", style="cyan")


class _BarTracker:
    def __init__(self, progress: Bars, task: Any) -> None:
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
        self.headline = self.memory = ""

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
    def track(self, description: str, total: int) -> Iterator[_BarTracker | _LineTracker]:
        """A bar for one loop of ``total`` steps."""
        if not self.console.is_terminal:
            yield _LineTracker(self.console, description, total)
            return
        progress = Bars(
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


_COUNTERS = ("batch", "iteration", "step")  # what a stage counts its steps by
_WINDOW = 8  # steps that a rate of convergence is taken from


class StageProgress:
    """One line of what a computation says of itself: its stage, how far, how fast, how long still.

    A stage that knows its number of steps (``batches``) is done after these. One that has converged when
    ``gradient_norm`` is down to ``wanted`` is taken to go on as fast, in logarithms, as in its last few steps, which
    is called ``about``.

    Args:
        title: in front of every line.
        clock: seconds.
    """

    def __init__(self, title: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self._clock = title, clock
        self._stage: str | None = None
        self._norms: list[tuple[float, float]] = []
        self._first = self._started = 0.0

    def line(self, info: Mapping[str, Any]) -> str:
        """What to show after a call with ``info``."""
        now = self._clock()
        counter = next((name for name in _COUNTERS if name in info), None)
        done = float(info[counter]) if counter is not None else 0.0
        stage = str(info.get("stage", ""))
        if stage != self._stage or done < self._first:
            self._stage, self._started, self._first, self._norms = stage, now, done, []
        total = info.get("batches")
        steps, seconds = done - self._first, now - self._started
        rate = steps / seconds if steps > 0 and seconds > 0 else 0.0
        shown = "" if counter is None else f" {counter} {done:g}{f'/{total}' if total else ''}"
        if rate > 0:
            shown += f", {rate:.1f}/s" if rate >= 1 else f", {1 / rate:.1f} s each"
        left = self._left(info, total, done, rate, now)
        hidden = {"stage", "batches", "wanted", counter}
        figures = {k: v for k, v in info.items() if k not in hidden and isinstance(v, (int, float, str))}
        return f"{self.title}: {stage}{shown}{left}  {_figures(figures)}".rstrip()

    def _left(self, info: Mapping[str, Any], total: Any, done: float, rate: float, now: float) -> str:
        if total and rate > 0:
            return f", {_duration(max(0.0, total - done) / rate)} left"
        norm, wanted = info.get("gradient_norm"), info.get("wanted")
        if not norm or not wanted or not math.isfinite(norm):
            return ""
        self._norms.append((now, math.log(norm / wanted)))
        (before, high), (_, low) = self._norms[-min(len(self._norms), _WINDOW)], self._norms[-1]
        if low <= 0 or high <= low or now <= before:
            return ""
        return f", about {_duration(low * (now - before) / (high - low))} left"


@contextmanager
def show_progress(title: str = "Laplace", *, console: Console | None = None, every: float = 10.0) -> Iterator[Progress]:
    """What the argument ``progress`` of long computations takes, to see them work.

    In a terminal it is one line that changes, elsewhere (a log file, a batch job, a notebook's text) a line every
    ``every`` seconds; what takes less time prints nothing.

    Example:
        >>> with tus.show_progress() as progress:                                            # doctest: +SKIP
        ...     la.fit(loader, progress=progress)
        ...     la.optimize_evidence(progress=progress)

    Args:
        title: in front of every line.
        console: where to; None for the standard error.
        every: seconds between lines where there is no terminal.
    """
    console = console or Console(stderr=True)
    stages = StageProgress(title)
    if console.is_terminal:
        with console.status(title) as status:
            yield lambda info: status.update(stages.line(info))
        return
    last = time.monotonic()

    def show(info: dict[str, Any]) -> None:
        nonlocal last
        line = stages.line(info)
        if time.monotonic() - last >= every:
            last = time.monotonic()
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    yield show


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _figures(info: Mapping[str, float | str]) -> str:
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in info.items())
