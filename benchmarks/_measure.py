"""Timing candidates in turn, so that a slow minute of the machine meets all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks._report import describe_error


@dataclass
class Outcome:
    """What a candidate did.

    Attributes:
        seconds: wall time of each repeat.
        value: what its last call returned.
        error: why it failed, if it did; a candidate that fails is not called again.
    """

    seconds: list[float] = field(default_factory=list)
    value: Any = None
    error: str | None = None

    @property
    def median(self) -> float | None:
        """Median wall time in seconds, or None if it failed."""
        return statistics.median(self.seconds) if self.seconds and self.error is None else None

    def cell(self, digits: int = 3) -> str:
        """The median as a table shows it, or the error."""
        return self.error or figure(self.median, digits)


def interleave(
    candidates: Mapping[str, Callable[[], Callable[[], Any]]],
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Outcome]:
    """Time candidates in turn, ``repeats`` times each.

    Args:
        candidates: name to a function that prepares one call (not timed) and returns it (timed).
        repeats: rounds over all candidates.
        say: takes a line of progress after each call.

    Returns:
        Name to outcome. A candidate's exception is kept as its error.
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
                start = time.perf_counter()
                outcome.value = call()
                outcome.seconds.append(time.perf_counter() - start)
                say(f"{name}: {outcome.seconds[-1]:.3g} s ({repeat + 1}/{repeats})")
            except Exception as error:  # whatever a peer raises is its result
                outcome.error = describe_error(error)
                say(f"{name}: {outcome.error}")
    return outcomes


def figure(value: float | None, digits: int = 3) -> str:
    """A number with some significant digits; a dash for None."""
    if value is None:
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 10**digits:
        return f"{float(f'{value:.{digits}g}'):g}"
    return f"{value:.0f}" if abs(value) >= 10**digits and abs(value) < 1e6 else f"{value:.1e}"


def times(slow: float | None, fast: float | None) -> str:
    """How many times slower one is than the other, as a table shows it."""
    return "–" if slow is None or fast is None or fast == 0 else f"{figure(slow / fast)}×"
