"""Lines of progress outside of a terminal: every fit of the command line has them, with a rate and the time left."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import trainer

from tu_symmetry import cli
from tu_symmetry.callbacks import ProgressLines, progress

pytestmark = pytest.mark.filterwarnings("ignore")


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, number: int) -> Tensor:
        Clock.now += 2.0
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=2)


class Clock:
    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in the steps alone, two seconds in each."""
    Clock.now = 0.0
    monkeypatch.setattr(progress, "time", Clock)
    real = progress.StageProgress
    monkeypatch.setattr(progress, "StageProgress", lambda title: real(title, clock=Clock.monotonic))
    monkeypatch.setattr(ProgressLines, "EVERY_SECONDS", 0.0)


def lines(**options: Any) -> list[str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer(ProgressLines(), **options).fit(Line(), datamodule=Rows())
    return [line for line in said.getvalue().splitlines() if " step " in line]


def test_a_fit_says_how_far_it_is_and_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(max_epochs=3)
    assert len(found) == 18
    assert re.fullmatch(r"fit: training step 7/18, 2\.0 s each, 22 s left  epoch 1  loss [0-9.e+-]+", found[6])
    assert "step 18/18" in found[-1] and "0 s left" in found[-1]
    monkeypatch.setattr(ProgressLines, "EVERY_SECONDS", 10.0)
    assert len(lines(max_epochs=3)) == 3  # at 10, 20 and 30 of 36 seconds
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert lines(max_epochs=3) == []  # a terminal has the bar instead


def test_what_ends_first_is_counted_to() -> None:
    assert "step 4/8" in lines(max_steps=8, max_epochs=20)[3]
    assert "step 4/6" in lines(max_steps=80, max_epochs=1)[3]
    assert not any("left" in line for line in lines(max_epochs=-1, max_time={"seconds": 0}))


def test_fits_of_the_command_line_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fit.yaml").write_text(
        f"routine: {{class_path: {__name__}.Line}}\ndata: {{class_path: {__name__}.Rows}}\n"
        f"trainer: {{max_epochs: 2, accelerator: cpu, logger: false, enable_progress_bar: false, "
        f"limit_val_batches: 0, default_root_dir: {tmp_path}}}\n"
    )
    assert cli.main(["fit", "--config", str(tmp_path / "fit.yaml")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fit: training step ")]
    assert len(said) == 12 and "step 7/12" in said[6] and "loss" in said[6]
