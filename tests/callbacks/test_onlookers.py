"""A training with a callback that only looks on is, bit for bit, the training without it; none draws from its state."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from randomness import seed_all, states
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import trainer

import tu_symmetry.callbacks
from tu_symmetry.callbacks import (
    FitCompactPosterior,
    FitLaplace,
    LastCheckpoint,
    PosteriorDraws,
    PosteriorSnapshots,
    ProgressLines,
    Rebasin,
    ScaleCanonicalization,
    TrueTemperature,
)
from tu_symmetry.posterior.samples import SampleStore

pytestmark = pytest.mark.filterwarnings("ignore")


class Drawing(LightningModule):
    """Draws from every global random state in every step, and in the dropout and the order of its data."""

    def __init__(self, members: int = 1) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()
        made = [
            nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
            for _ in range(members)
        ]
        self.model: Any = made[0]
        if members > 1:
            self.model = nn.Module()
            self.model.core_models = nn.ModuleList(made)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.1 * torch.randn_like(x) + 0.1 * np.random.standard_normal() + 0.1 * random.random()
        return sum(self.loss(net(x), y) for net in getattr(self.model, "core_models", [self.model]))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val", sum(self.loss(net(x), y) for net in getattr(self.model, "core_models", [self.model])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def loader(shuffle: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 4, generator=generator), torch.arange(48) % 3
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=shuffle)


def fit(
    folder: Path, members: int, make: Callable[[Path], Callback] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and random states after a training; as in a user's script the seeds are set before a callback is made."""
    seed_all(3)
    callbacks = [] if make is None else [make(folder)]
    module = Drawing(members)
    made = trainer(*callbacks, folder=folder, max_epochs=2, accelerator="auto")
    made.fit(module, loader(True), loader(False))
    return {n: t.detach().cpu().clone() for n, t in module.state_dict().items()}, states()


def stored(folder: Path) -> Path:
    """A store of networks as they start; the global random states stay."""
    with isolate_rng():
        states = [Drawing().model.state_dict() for _ in range(2)]
    SampleStore.create(folder, architecture="net", method="test").append(states, step=[0, 1])
    return folder


ONLOOKERS: dict[str, Callable[[Path], Callback]] = {
    "LastCheckpoint": lambda folder: LastCheckpoint(every_seconds=0),
    "ProgressLines": lambda folder: ProgressLines(),
    "PosteriorSnapshots": lambda folder: PosteriorSnapshots(folder / "samples", every_n_steps=2),
    "PosteriorDraws": lambda folder: PosteriorDraws(2),
    "FitLaplace": lambda folder: FitLaplace(path=folder / "laplace.safetensors"),
    "FitLaplace without validation": lambda folder: FitLaplace(loader(True), calibrate=False, curvature="diag"),
    "FitCompactPosterior": lambda folder: FitCompactPosterior(
        stored(folder / "samples"), q_r=folder / "q_r", q_d=folder / "q_d", match_on="activations"
    ),
}
ACTING: dict[str, Callable[[Path], Callback]] = {  # what they change is the weights, or what the optimizer does
    "Rebasin": lambda folder: Rebasin(every_n_steps=3),
    "Rebasin in place": lambda folder: Rebasin(in_place=True, every_n_epochs=1, barrier_loader="val"),
    "ScaleCanonicalization": lambda folder: ScaleCanonicalization(every_n_steps=3, at_start=True),
}
ELSEWHERE = {"TrueTemperature": TrueTemperature}  # no part of such a fit


def ensemble(name: str) -> int:
    """How many networks a callback is tried with."""
    return 2 if name in ("PosteriorSnapshots", "Rebasin", "Rebasin in place") else 1


def test_every_callback_is_among_them() -> None:
    named = {name.split()[0] for name in (*ONLOOKERS, *ACTING, *ELSEWHERE)}
    made = {n for n in tu_symmetry.callbacks.__all__ if isinstance(getattr(tu_symmetry.callbacks, n), type)}
    callbacks = {n for n in made if issubclass(getattr(tu_symmetry.callbacks, n), Callback)}
    assert callbacks == named


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return {members: fit(tmp_path_factory.mktemp("alone"), members, None) for members in (1, 2)}


@pytest.mark.parametrize("name", [*ONLOOKERS, *ACTING])
def test_a_callback_leaves_the_training_and_every_random_state_as_they_are(
    name: str, tmp_path: Path, alone: dict[int, Any]
) -> None:
    members = ensemble(name)
    weights, after = fit(tmp_path, members, (ONLOOKERS | ACTING)[name])
    expected, without = alone[members]
    assert [kind for kind in after if after[kind] != without[kind]] == []
    if name in ONLOOKERS:
        assert [n for n, t in weights.items() if not torch.equal(t, expected[n])] == []
