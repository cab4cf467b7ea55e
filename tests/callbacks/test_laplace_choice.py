"""Which approximation FitLaplace buys with its budget."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine
from trainings import trainer

from tu_symmetry.callbacks import FitLaplace
from tu_symmetry.callbacks.laplace_choice import (
    JOINT,
    KFAC,
    LAST_LAYER,
    Clock,
    Fit,
    OverBudgetError,
    Watched,
    choose,
    duration,
    seconds_of,
)
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import Calibration, Quality

pytestmark = pytest.mark.filterwarnings("ignore")


def data(seed: int, count: int = 60) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()), 20)


def fitted(validation: bool = True, model: nn.Module | None = None, **options: Any) -> FitLaplace:
    callback = FitLaplace(**options)
    with isolate_rng():
        torch.manual_seed(0)
        model = model or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        routine = ClassificationRoutine(model, 3, nn.CrossEntropyLoss(), eval_ood=False)
        routine.configure_optimizers = lambda: torch.optim.Adam(model.parameters(), 0.05)  # type: ignore[assignment]
        trainer(callback, max_epochs=2).fit(routine, data(0), data(1) if validation else None)
    return callback


def calibration(nll: float, error: float, temperature: float = 1.0) -> Calibration:
    own = Quality(nll)
    return Calibration(temperature, 1.0, 100, Quality(1.0), Quality(1.0), own, own, standard_error=error)


def test_without_a_limit_all_are_fitted_as_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        callback = fitted(budget=None, max_iterations=None)
    (fits,) = callback.fits
    assert [fit.name for fit in fits] == [LAST_LAYER, KFAC, JOINT]
    network, chosen = fits[0].laplace.model, choose(fits, 2.0)  # type: ignore[union-attr]
    assert [fit.laplace is not None for fit in fits] == [fit in (chosen, fits[0]) for fit in fits], "others take memory"
    alike: list[dict[str, Any]] = [
        {"curvature": "last_layer", "evaluate_at": "map", "prior": "single"},
        {"evaluate_at": "map"},
        {},
    ]
    for fit, options in zip(fits, alike, strict=True):
        expected = LinearizedLaplace(network, **options).fit(data(0))
        expected.optimize_evidence()
        assert fit.calibration is not None
        if fit.laplace is not None:
            torch.testing.assert_close(fit.laplace.log_precision, expected.log_precision, rtol=1e-2, atol=3e-2)
        own = expected.calibrate(data(1), standard_errors=2.0)
        assert fit.calibration.calibrated.nll == pytest.approx(own.calibrated.nll, abs=1e-3)
    assert callback.laplace is chosen.laplace
    (said,) = [m for m in caplog.messages if "Chosen" in m]
    assert said.count("\n") == 3 and "NLL" in said


def test_what_has_no_time_is_not_begun_and_the_cheapest_always_is() -> None:
    (fits,) = fitted(budget="0s").fits
    assert [fit.name for fit in fits] == [LAST_LAYER, KFAC]
    assert fits[0].laplace is not None and fits[1].laplace is None and "takes about" in fits[1].missing


@pytest.mark.parametrize("options", [{"validation": False}, {"calibrate": False}])
def test_without_data_to_choose_on_there_is_the_cheapest(options: dict[str, Any]) -> None:
    (fits,) = fitted(budget=None, **options).fits
    assert [fit.name for fit in fits] == [LAST_LAYER]


def test_a_network_without_a_last_layer_gets_the_next() -> None:
    model = nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1), nn.Flatten())
    callback = fitted(model=model)
    assert [fit.name for fit in callback.fits[0]][:2] == [LAST_LAYER, KFAC]
    assert "Linear" in callback.fits[0][0].missing and callback.laplace is not None
    assert callback.laplace.options.curvature == "kfac"


def test_options_that_decide_leave_no_choice() -> None:
    callback = fitted(curvature="diag", evaluate_at="map", budget="0s")
    assert len(callback.fits[0]) == 1 and callback.laplace is not None
    assert callback.laplace.options.curvature == "diag"


def test_the_choice() -> None:
    """The first that none surely beats: by the standard errors of both gains."""
    some: Any = object()
    first, second, third = (Fit(name, 1.0, some, None, None) for name in "abc")

    def made(*found: Calibration | None) -> list[Fit]:
        return [Fit(name, 1.0, some, None, own) for name, own in zip("abc", found, strict=False)]

    assert choose([first, second, third], 2.0) is first
    for nll, error, expected in ((0.5, 0.1, "b"), (0.5, 0.3, "a"), (0.9, 0.0, "b"), (1.0, 0.0, "a")):
        assert choose(made(calibration(1.0, 0.0, 0.0), calibration(nll, error)), 2.0).name == expected
    assert choose(made(calibration(0.9, 0.03), calibration(0.8, 0.03), calibration(0.7, 0.05)), 2.0).name == "b"
    missing = Fit("a", 1.0, missing="no linear layer")
    assert choose([missing, second], 2.0) is second


def test_batches_come_as_long_as_the_rest_will(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def read(seconds: float | None) -> int:
        nonlocal now
        count = 0
        for _ in Watched(range(10), Clock(seconds)):
            count, now = count + 1, now + 1.0
        return count

    assert read(None) == read(10.5) == 10
    with pytest.raises(OverBudgetError, match="about 10s"):
        read(9.5)


@pytest.mark.parametrize(
    ("budget", "seconds"), [("30s", 30), ("10min", 600), ("1.5 h", 5400), (0.25, 20), (0.0, 0), (2, 160)]
)
def test_budgets(budget: float | str, seconds: float) -> None:
    assert seconds_of(budget, 80.0) == seconds
    assert seconds_of(0.25, None) == 60


def test_durations_are_budgets() -> None:
    for seconds in (0.0123, 4.0, 99.0, 250.0, 5400.0, 30000.0):
        assert seconds_of(duration(seconds), None) == pytest.approx(seconds, rel=0.2)
    for wrong in ("10 minutes", "", -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="budget="):
            FitLaplace(budget=wrong)
