"""What a run shows: which command is at work, how far it is, and what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rich.console import Console

from tu_symmetry.reporting.grid import Grid


class Tracker(Protocol):
    """What shows the progress of one loop."""

    def update(self, done: int, **info: float | str) -> None:
        """Show that ``done`` steps are done, with some figures beside them."""


Progress = Callable[[dict[str, Any]], None]
"""What the argument ``progress`` of a long computation takes: it is called with ``{"stage": ..., ...}``."""
Track = Callable[[str, int], AbstractContextManager[Tracker]]
_COUNTERS = ("done", "batch", "iteration", "step")  # what a stage counts its steps by


class StageProgress:
    """One line of what a computation says of itself: its stage, how far, how fast, how long still.

    What a stage has done within its first second counts as kept from an earlier run: no forecast rests on it.
    """

    def __init__(self, title: str = "", *, clock: Callable[[], float] | None = None) -> None:
        self.title, self._clock = title, clock or time.monotonic
        self._stage: str | None = None
        self._first = self._started = self._opened = 0.0

    def line(self, info: Mapping[str, Any]) -> str:
        """What to show after a call with ``{"stage", "step", "batches", ...}``, the last one their number if known."""
        now, stage, total = self._clock(), str(info.get("stage", "")), info.get("batches")
        counter = next((name for name in _COUNTERS if name in info), "")
        done = float(info.get(counter, 0.0))
        if stage != self._stage or done < self._first:
            self._stage, self._opened = stage, now
        if now - self._opened < 1.0:
            self._started, self._first = now, done
        steps, seconds = done - self._first, now - self._started
        rate = steps / seconds if steps > 0 and seconds > 0 else 0.0
        shown = f" {counter} {done:g}{f'/{total}' if total else ''}" if counter else ""
        if rate > 0:
            shown += f", {rate:.1f}/s" if rate >= 1 else f", {1 / rate:.1f} s each"
        if rate > 0 and total:
            shown += f", {duration_text(max(0.0, total - done) / rate)} left"
        hidden = {"stage", "batches", "wanted", counter}
        figures = {k: v for k, v in info.items() if k not in hidden and isinstance(v, (int, float, str))}
        words = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        return f"{self.title and f'{self.title}: '}{stage}{shown}  {words}".rstrip()


def duration_text(seconds: float) -> str:
    """``12 s``, ``34 min``, ``5.6 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def show_progress(title: str = "Laplace", *, console: Console | None = None, every: float = 10.0) -> Iterator[Progress]:
    """What the argument ``progress`` of long computations takes, to see them work.

    In a terminal it is one line that changes, elsewhere (a log file, a batch job, a notebook's text) a line every
    ``every`` seconds; what takes less time prints nothing. It goes to the standard error without a console.

    Example:
        >>> with tus.show_progress() as progress:                                            # doctest: +SKIP
        ...     la.fit(loader, progress=progress)
    """
    console, stages, last = console or Console(stderr=True), StageProgress(title), time.monotonic()
    if console.is_terminal:
        with console.status(title) as status:
            yield lambda info: status.update(stages.line(info))
        return

    def show(info: dict[str, Any]) -> None:
        nonlocal last
        line = stages.line(info)
        if time.monotonic() - last >= every:
            last = time.monotonic()
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    yield show


class _Loop:
    """The progress of one loop."""

    def __init__(self, description: str, total: int, show: Progress) -> None:
        self.fixed, self.show = {"stage": description, "batches": total}, show

    def update(self, done: int, **info: float | str) -> None:
        self.show({"done": done, **self.fixed, **info})


class Display:
    """Shows a run on a console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def note(self, text: str) -> None:
        """Say something that the reader should know."""
        self.console.print(f"    {text}", style="yellow", highlight=False, soft_wrap=True, markup=False)

    def started(self, name: str, place: str, *, resumed: bool) -> None:
        """Say that a command starts, and which one it is of how many."""
        how = " [yellow](resuming)[/yellow]" if resumed else ""
        self.console.print(f"[bold blue]▸[/bold blue] {name} [dim]({place})[/dim]{how}", highlight=False)

    def done(self, name: str, said: str, headline: str = "") -> None:
        """Say that a command is done."""
        self.console.print(f"[green]✓[/green] {name} [cyan]{said}[/cyan]", highlight=False)
        if headline:
            self.console.print(f"    {headline}", highlight=False, soft_wrap=True)

    def tables(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the tables that commands have among their results."""
        for found in results.values():
            for grid in found.get("tables", ()):
                Grid(**grid).print(self.console)

    @contextmanager
    def track(self, description: str, total: int) -> Iterator[Tracker]:
        """The progress of one loop of ``total`` steps: a line that changes, or one every 15 seconds."""
        with show_progress("", console=self.console, every=15.0) as show:
            yield _Loop(description, total, show)
