"""Which approximation FitLaplace buys: the cheapest that held-out data cannot tell from the best of the affordable."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import Calibration, EvidenceResult

LAST_LAYER, KFAC, JOINT = "last layer", "KFAC at the weights", "KFAC at the joint optimum"
METHODS: dict[str, dict[str, Any]] = {  # by their cost
    LAST_LAYER: {"curvature": "last_layer", "evaluate_at": "map", "prior": "single"},
    KFAC: {"curvature": "kfac", "evaluate_at": "map"},
    JOINT: {"curvature": "kfac", "evaluate_at": "tangent_mode"},
}
DECIDING = ("curvature", "evaluate_at", "parameters")  # options that say what is to be fitted
WITHOUT_TRAINING = 60.0  # seconds, where the budget is a share of a training that there was not
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class OverBudgetError(Exception):
    """What was begun would take ``seconds`` in all, more than are left."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"about {duration(seconds)}")
        self.seconds = seconds


def parse_budget(budget: float | str | None) -> float | str | None:
    """The same; a ValueError for what is no share of the training, no duration such as ``10min``, and not None."""
    if isinstance(budget, str):
        seconds_of(budget, 0.0)
    elif budget is not None and not 0 <= budget < math.inf:
        raise ValueError(f"budget={budget} is a share of the training's time: 0 or more, and finite")
    return budget


def seconds_of(budget: float | str, training: float | None) -> float:
    """Seconds of a duration, or of a share of the training."""
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(s|min|h)\s*", budget)
        if found is None:
            raise ValueError(f"budget={budget!r} is no duration; write '30s', '10min' or '2h'")
        return float(found[1]) * _SECONDS[found[2]]
    return WITHOUT_TRAINING if training is None else budget * training


def duration(seconds: float) -> str:
    """As one writes it for ``budget``: ``12s``, ``3min``, ``1.5h``."""
    if seconds < 100:
        return f"{seconds:.2g}s"
    return f"{seconds / 60:.0f}min" if seconds < 5400 else f"{seconds / 3600:.1f}h"


class Clock:
    """What is left of a number of seconds; without an end where that is None."""

    def __init__(self, seconds: float | None) -> None:
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.started = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def require(self, seconds: float) -> None:
        """An OverBudgetError where so many more are not left."""
        if seconds > self.left:
            raise OverBudgetError(self.spent + seconds)


class Watched:
    """Batches of a loader, as long as the rest of them, at the rate so far, will come within the time that is left."""

    def __init__(self, loader: Iterable[Any], clock: Clock) -> None:
        self.loader, self.clock = loader, clock

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        begun = 0.0
        for done, batch in enumerate(self.loader):
            if done == 1:  # the first batch has what is done once in its time
                begun = time.monotonic()
            elif done > 1:
                self.clock.require((time.monotonic() - begun) / (done - 1) * (len(self) - done))
            yield batch


@dataclass(frozen=True)
class Fit:
    """One method's result for one network, or why there is none; without the approximation once others are used."""

    name: str
    seconds: float
    laplace: LinearizedLaplace | None = None
    evidence: EvidenceResult | None = None
    calibration: Calibration | None = None
    missing: str = ""


def cheapest(fits: Sequence[Fit]) -> Fit:
    """The first that could be fitted."""
    return next(fit for fit in fits if fit.laplace is not None)


def relieved(fits: Sequence[Fit], chosen: Fit) -> list[Fit]:
    """The same without approximations that are neither the chosen one nor the cheapest, which take memory."""
    kept = (chosen, cheapest(fits))
    return [fit if any(fit is one for one in kept) else replace(fit, laplace=None) for fit in fits]


def choose(fits: Sequence[Fit], standard_errors: float) -> Fit:
    """The first that no later one surely beats on held-out data; the first of all where nothing was judged.

    One surely beats another where its calibrated NLL is lower by more than so many standard errors of the difference,
    which are taken as if the two gains over the scaled network were independent.
    """
    chosen = cheapest(fits)
    for other in fits[fits.index(chosen) + 1 :]:
        a, b = chosen.calibration, other.calibration
        if a is None or b is None:
            continue
        error = math.hypot(a.standard_error, b.standard_error)
        if b.calibrated.nll < a.calibrated.nll - standard_errors * error:
            chosen = other
    return chosen


def describe(fits: Sequence[Fit], chosen: Fit, standard_errors: float) -> str:
    """A line for each method, with its time and gain, and one that says what was chosen and why."""
    lines = []
    for fit in fits:
        found = fit.calibration
        if fit.laplace is None:
            text = f"not fitted: {fit.missing}"
        elif found is None:
            text = f"{duration(fit.seconds)}"
        elif found.temperature == 0:
            text = f"{duration(fit.seconds)}, NLL {found.scaled.nll:.4f}, without a posterior: none is surely better"
        else:
            gain = found.scaled.nll - found.calibrated.nll
            text = (
                f"{duration(fit.seconds)}, NLL {found.calibrated.nll:.4f}, "
                f"{gain:.4f} below the scaled network's (standard error {found.standard_error:.4f})"
            )
        lines.append(f"  {fit.name}: {text}")
    fitted = [fit for fit in fits if fit.laplace is not None]
    if len(fitted) == 1:
        why = "there was nothing to compare it with"
    elif chosen.calibration is None:
        why = "it is the cheapest, and there are no held-out data to compare on"
    elif chosen is fitted[-1]:
        why = f"it surely has the lowest NLL (by {standard_errors:g} standard errors)"
    else:
        why = f"no other one surely has a lower NLL (by {standard_errors:g} standard errors)"
    return "\n".join([*lines, f"  Chosen: {chosen.name}, since {why}."])
