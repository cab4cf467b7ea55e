"""Timing candidates in turn, so that a slow minute of the machine meets all of them.

Wall-clock time is what one waits; CPU time (of the process, all threads) is what the work costs, whoever else uses the
machine. With one thread on an idle machine they are the same. Ratios and goals are taken from CPU time.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._report import describe_error


@dataclass
class Outcome:
    """What a candidate did.

    Attributes:
        seconds: wall time of each repeat.
        cpu: CPU time of each repeat, in seconds.
        value: what its last call returned.
        error: why it failed, if it did; a candidate that fails is not called again.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    value: Any = None
    error: str | None = None

    @property
    def median(self) -> float | None:
        """Median wall time in seconds, or None if it failed."""
        return statistics.median(self.seconds) if self.seconds and self.error is None else None

    @property
    def median_cpu(self) -> float | None:
        """Median CPU time in seconds, or None if it failed."""
        return statistics.median(self.cpu) if self.cpu and self.error is None else None


class Stopwatch:
    """Measures the wall-clock and the CPU seconds of a ``with`` block."""

    wall = cpu = 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def interleave(
    candidates: Mapping[str, Callable[[], Callable[[], Any]]],
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Outcome]:
    """Time candidates in turn, ``repeats`` times each; an exception is kept as its candidate's error.

    A candidate is a function that prepares one call (not timed) and returns it (timed).
    """
    outcomes = {name: Outcome() for name in candidates}
    for repeat in range(repeats):
        for name, prepare in candidates.items():
            outcome = outcomes[name]
            if outcome.error is not None:
                continue
            gc.collect()
            try:
                call = prepare()
                with Stopwatch() as watch:
                    outcome.value = call()
                outcome.seconds.append(watch.wall)
                outcome.cpu.append(watch.cpu)
                say(f"{name}: {watch.wall:.3g} s, CPU {watch.cpu:.3g} s ({repeat + 1}/{repeats})")
            except Exception as error:  # whatever a peer raises is its result
                outcome.error = describe_error(error)
                say(f"{name}: {outcome.error}")
    return outcomes


def in_own_process(module: str, *arguments: str) -> Any:
    """Run ``python -m module arguments`` and return the JSON of its last line.

    Raises:
        RuntimeError: with the last line of its errors, if it failed.
    """
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(lines[-1])
    return json.loads(done.stdout.splitlines()[-1])


def peak_memory() -> int:
    """The largest resident memory of this process (bytes, Linux).

    Not ``getrusage``: what that gives starts at the peak of the process that has started this one.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def figure(value: float | None, digits: int = 3) -> str:
    """A number with some significant digits; a dash for None."""
    if value is None:
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 10**digits:
        return f"{float(f'{value:.{digits}g}'):g}"
    return f"{value:.0f}" if abs(value) >= 10**digits and abs(value) < 1e6 else f"{value:.1e}"


def both(wall: float | None, cpu: float | None) -> str:
    """Wall-clock seconds, and CPU seconds as what is secondary."""
    return "–" if wall is None else f"{figure(wall)}\ncpu {figure(cpu)}"


def times(slow: float | None, fast: float | None) -> str:
    """How many times slower one is than the other, as a table shows it."""
    return "–" if slow is None or fast is None or fast == 0 else f"{figure(slow / fast)}×"
