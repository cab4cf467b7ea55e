"""Progress of long computations: rate and time left, in a terminal and outside of one."""

from __future__ import annotations

import io
import time

import pytest
import torch
from laplace_oracles import data, randomize
from rich.console import Console
from torch import nn

import tu_symmetry as tus
from tu_symmetry.reporting import progress
from tu_symmetry.reporting.progress import StageProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_known_number_of_steps() -> None:
    clock = Clock()
    stages = StageProgress("Laplace", clock=clock)
    assert stages.line({"stage": "curvature", "batch": 1, "batches": 21, "samples": 64}) == (
        "Laplace: curvature batch 1/21  samples 64"
    )
    clock.now = 20.0
    shown = stages.line({"stage": "curvature", "batch": 11, "batches": 21, "samples": 704})
    assert shown == "Laplace: curvature batch 11/21, 2.0 s each, 20 s left  samples 704"
    clock.now = 21.0  # another stage starts anew
    assert stages.line({"stage": "calibration", "batch": 1, "batches": None}) == "Laplace: calibration batch 1"
    clock.now = 22.0
    assert stages.line({"stage": "calibration", "batch": 5, "batches": None}) == "Laplace: calibration batch 5, 4.0/s"


def test_what_an_earlier_run_kept_is_no_forecast() -> None:
    clock = Clock()
    stages = StageProgress(clock=clock)
    for done in range(4):  # three rows of six are read, in no time
        clock.now += 0.1
        assert stages.line({"stage": "rows", "done": done, "batches": 6}) == f"rows done {done}/6"
    clock.now = 3600.4  # the fourth row is at work
    assert stages.line({"stage": "rows", "done": 3, "batches": 6}) == "rows done 3/6"
    assert stages.line({"stage": "rows", "done": 4, "batches": 6}) == "rows done 4/6, 3600.0 s each, 2.0 h left"


@pytest.mark.filterwarnings("ignore")
def test_all_stages_of_laplace_outside_of_a_terminal() -> None:
    out = io.StringIO()
    model = randomize(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    x, y = data(4, outputs=3, samples=15)
    batches = [(x[i], y[i]) for i in torch.arange(15).split(5)]
    with tus.show_progress("mine", console=Console(file=out, width=40), every=0.0) as show:
        la = tus.LinearizedLaplace(model, prior="single").fit(batches, progress=show)
        la.optimize_evidence(progress=show)
    lines = out.getvalue().splitlines()
    assert all(line.startswith("mine: ") for line in lines)
    for text in ("curvature batch 3/3", "evidence iteration 2"):
        assert any(text in line for line in lines), text


def test_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of a stage, and in those of a loop with figures of any name."""
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    with tus.show_progress(console=Console(file=out), every=10.0) as show:
        for second in range(35):
            clock.now = float(second)
            show({"stage": "curvature", "batch": second + 1, "batches": 100})
    assert [line.split()[3] for line in out.getvalue().splitlines()] == ["11/100,", "21/100,", "31/100,"]
    out = io.StringIO()
    with progress.Display(Console(file=out)).track("matching", 4) as tracker:
        for done in range(1, 4):
            clock.now += 10.0
            tracker.update(done, step="the first")
    assert out.getvalue() == "matching done 2/4, 10.0 s each, 20 s left  step the first\n"


def test_in_a_terminal_one_line_changes() -> None:
    out = io.StringIO()
    with tus.show_progress(console=Console(file=out, force_terminal=True, width=120)) as show:
        show({"stage": "curvature", "batch": 1, "batches": 2})
        time.sleep(0.2)
    assert "curvature batch 1/2" in out.getvalue()
