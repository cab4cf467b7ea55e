"""Lines of progress outside of a terminal: every fit of the command line has them, with a rate and the time left."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tu_symmetry import cli
from tu_symmetry.callbacks import ProgressLines, progress


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, number: int) -> Tensor:
        Clock.now += 2.0
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        Clock.now += 1.0

    def test_step(self, batch: Any, number: int) -> None:
        Clock.now += 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)

    val_dataloader = test_dataloader = train_dataloader


class Clock:
    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in the steps alone: two seconds in one of training, one in others."""
    Clock.now = 0.0
    monkeypatch.setattr(progress, "time", Clock)
    real = progress.StageProgress
    monkeypatch.setattr(progress, "StageProgress", lambda title: real(title, clock=Clock.monotonic))


def run(method: str, every: float = 0.0, *, times: int = 1, **options: Any) -> list[str]:
    callbacks = [ProgressLines(every) for _ in range(times)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(callbacks=callbacks, enable_model_summary=False, **quiet, **options)  # type: ignore[arg-type]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        getattr(trainer, method)(Line(), datamodule=Rows())
    return [line for line in said.getvalue().splitlines() if " step " in line]


@pytest.mark.filterwarnings("ignore")
def test_a_fit_says_how_far_it_is_and_how_long_it_takes() -> None:
    lines = run("fit", max_epochs=3, limit_val_batches=0)
    assert len(lines) == 18
    assert re.fullmatch(r"fit: training step 7/18, 2\.0 s each, 22 s left  epoch 1  loss [0-9.e+-]+", lines[6])
    assert "step 18/18" in lines[-1] and "0 s left" in lines[-1]
    assert len(run("fit", every=10.0, max_epochs=3, limit_val_batches=0)) == 3  # at 10, 20 and 30 of 36 seconds
    assert run("fit", every=100.0, max_epochs=3) == []
    assert len(run("fit", times=2, max_epochs=1, limit_val_batches=0)) == 6  # of two the first one speaks


@pytest.mark.filterwarnings("ignore")
def test_what_ends_first_is_counted_to() -> None:
    assert "step 4/8" in run("fit", max_steps=8, max_epochs=-1, limit_val_batches=0)[3]
    assert "step 4/8" in run("fit", max_steps=8, max_epochs=20, limit_val_batches=0)[3]
    assert "step 4/6" in run("fit", max_steps=80, max_epochs=1, limit_val_batches=0)[3]
    endless = run("fit", max_epochs=-1, max_steps=-1, max_time={"seconds": 0}, limit_val_batches=0)
    assert not any("left" in line for line in endless)


@pytest.mark.filterwarnings("ignore")
def test_a_terminal_has_the_bar_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run("fit", max_epochs=1) == []


@pytest.mark.filterwarnings("ignore")
def test_fits_of_the_command_line_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ProgressLines, "EVERY_SECONDS", 0.0)
    (tmp_path / "fit.yaml").write_text(
        f"routine: {{class_path: {__name__}.Line}}\ndata: {{class_path: {__name__}.Rows}}\n"
        f"trainer: {{max_epochs: 2, accelerator: cpu, logger: false, enable_progress_bar: false, "
        f"limit_val_batches: 0, default_root_dir: {tmp_path}}}\n"
    )
    assert cli.main(["fit", "--config", str(tmp_path / "fit.yaml")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fit: training step ")]
    assert len(said) == 12
    assert "step 7/12" in said[6] and "epoch 1" in said[6] and "loss" in said[6]
