"""What a callback, a routine or an approximation cannot use is said in one line, before there is something to lose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import trainer

import tu_symmetry as tus
from tu_symmetry.callbacks import LastCheckpoint, PosteriorDraws, TrueTemperature

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS: list[tuple[str, Callable[[], Any]]] = [
    ("num_samples", lambda: PosteriorDraws("5")),  # type: ignore[arg-type]
    ("every_n_epochs", lambda: tus.PosteriorSnapshots("x", every_n_epochs="2")),  # type: ignore[arg-type]
    ("at_epochs", lambda: tus.PosteriorSnapshots("x", at_epochs=["1", "2"])),  # type: ignore[list-item]
    ("every_n_steps", lambda: tus.ScaleCanonicalization(every_n_steps="2")),  # type: ignore[arg-type]
    ("every_n_epochs", lambda: tus.Rebasin(every_n_epochs="2")),  # type: ignore[arg-type]
    ("every_seconds", lambda: LastCheckpoint(every_seconds="3")),  # type: ignore[arg-type]
    ("prior_precision", lambda: TrueTemperature("1")),  # type: ignore[arg-type]
    ("num_samples", lambda: tus.callbacks.FitCompactPosterior("x", q_r="r", q_d="d", num_samples="3")),  # type: ignore[arg-type]
    ("standard_errors", lambda: tus.FitLaplace(standard_errors="2")),  # type: ignore[arg-type]
    ("burn_in", lambda: tus.routines.HMCRoutine(nn.Linear(2, 2), burn_in="2")),  # type: ignore[arg-type]
    ("num_members", lambda: tus.routines.MembersRoutine(nn.Linear(2, 2), "2")),  # type: ignore[arg-type]
    ("prior_precision", lambda: tus.routines.VariationalRoutine(nn.Linear(2, 2), "1")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "make"), TEXTS)
def test_a_number_in_quotes_is_named(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(
        TypeError, match=rf"^{name} must be a (whole )?number, got '\d' \(str\): write it without quotes$"
    ):
        make()


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.model(batch[0].to(self.model[0].weight.dtype)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.01)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(12, 4, generator=generator), torch.arange(12) % 3), batch_size=6)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_weights_in_half_precision_are_refused_with_what_to_train_with(precision: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"precision='{precision}' makes .*: train with 'bf16-mixed' or '32-true'"):
        trainer(tus.FitLaplace(), folder=tmp_path, max_epochs=1, precision=precision).fit(Plain(), loader())


def test_draws_need_a_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this one has no batch"):
        trainer(PosteriorDraws(2), folder=tmp_path, max_epochs=1, limit_train_batches=0).fit(Plain(), loader())
