"""Functions that the tests of command tables run, which load nothing heavy."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tu_symmetry.tables.outcome import Outcome, Parts

CALLS: list[str] = []


def walk(out: Path, steps: int = 4, seed: int = 0) -> Outcome:
    """A walk whose steps are kept one by one; ``TOY_KILL_AT`` kills the process in front of a step.

    Args:
        out: folder of the results and of the steps.
        steps: number of steps.
        seed: of the steps.
    """
    parts, place = Parts(out / "parts", {"steps": steps, "seed": seed}), 0
    found = sum(parts.path(str(number)).exists() for number in range(steps))
    for number in range(steps):
        if str(number) == os.environ.get("TOY_KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)

        def step(number: int = number) -> dict[str, int]:
            CALLS.append(f"step {number}")
            return {"step": (number + 1) * (seed + 3) % 7 - 3}

        place += parts.take(str(number), step)["step"]
        (out / "place.txt").write_text(str(place))
    return Outcome({"place": place, "found": found}, f"at {place}")


def doubled(out: Path, walk: Path) -> Outcome:
    """Twice the place of a walk.

    Args:
        out: folder of the results.
        walk: folder of the walk.
    """
    CALLS.append("doubled")
    place = 2 * int((walk / "place.txt").read_text())
    return Outcome({"place": place}, f"at {place}")


def wait(out: Path, seconds: float) -> Outcome:
    """Sleep.

    Args:
        out: folder of the results.
        seconds: how long.
    """
    time.sleep(seconds)
    return Outcome({})
