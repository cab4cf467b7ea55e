"""What callbacks and routines share: finding the network whatever it is called, notices once, mistakes in one line."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from trainings import Routine, loader, mlp, mlp_graph, routine, trainer

import tu_symmetry as tus
from tu_symmetry.callbacks import (
    FitLaplace,
    LastCheckpoint,
    PosteriorDraws,
    PosteriorSnapshots,
    Rebasin,
    ScaleCanonicalization,
    TrueTemperature,
)
from tu_symmetry.symmetry.certificate import UncertifiedWarning


class Plain(LightningModule):
    """As people write them: a loss, a network under any name, steps."""

    def __init__(self, **networks: nn.Module) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()
        for name, network in networks.items():
            setattr(self, name, network)
        self.order = list(networks)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Bare(Plain):
    """Its weights are its own, in no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(7, 5))
        self.second = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.first.T) @ self.second.T


def fit(module: LightningModule, *callbacks: Callback) -> None:
    trainer(*callbacks, max_epochs=2).fit(module.double(), loader(n=24, shuffle=False))


def two() -> Plain:
    return Plain(encoder=mlp(), head=nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("make", "members"),
    [
        (lambda: Plain(net=mlp()), None),
        (lambda: Plain(model=mlp(), extra=nn.Linear(3, 3)), None),
        (Bare, None),
        (two, "encoder"),
        (two, lambda module: module),
    ],
)
def test_the_network_is_found_whatever_it_is_called(make: Any, members: Any) -> None:
    scale = ScaleCanonicalization(members, every_n_epochs=1, in_place=True)
    fit(make(), scale)
    assert len(scale.history) == 2


def test_several_submodules_are_listed(tmp_path: Path) -> None:
    snapshots = PosteriorSnapshots(tmp_path / "samples", every_n_epochs=1)
    for callback, name in ((ScaleCanonicalization(), "members"), (snapshots, "members"), (FitLaplace(), "network")):
        with pytest.raises(ValueError, match=rf"'encoder' \(Sequential\), 'head' \(Linear\).*{name}='encoder'"):
            fit(two(), callback)
    with pytest.raises(ValueError, match="no weights yet"):
        ScaleCanonicalization().networks(Plain())
    mixed = Plain(encoder=mlp())
    mixed.shift = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"weights of its own \(shift\)"):
        ScaleCanonicalization().networks(mixed)


def test_notices_are_said_once_in_a_run() -> None:
    without_probe = pickle.loads(pickle.dumps(mlp_graph()))
    scale = ScaleCanonicalization("net", graph=without_probe, in_place=True, every_n_steps=1)
    rebasin = Rebasin(lambda module: [module.net, module.other], graph=without_probe, every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Plain(net=mlp())
        module.other = mlp()
        fit(module, scale, rebasin)
    said = [str(w.message).split(":")[0] for w in caught if issubclass(w.category, UncertifiedWarning)]
    assert sorted(said) == ["Rebasin is not certified", "ScaleCanonicalization is not certified"]
    assert len(scale.history) == 6


TEXTS: list[tuple[str, Callable[[], Any]]] = [
    ("num_samples", lambda: PosteriorDraws("5")),  # type: ignore[arg-type]
    ("every_n_epochs", lambda: PosteriorSnapshots("x", every_n_epochs="2")),  # type: ignore[arg-type]
    ("at_epochs", lambda: PosteriorSnapshots("x", at_epochs=["1", "2"])),  # type: ignore[list-item]
    ("every_n_steps", lambda: ScaleCanonicalization(every_n_steps="2")),
    ("every_seconds", lambda: LastCheckpoint(every_seconds="3")),  # type: ignore[arg-type]
    ("prior_precision", lambda: TrueTemperature("1")),  # type: ignore[arg-type]
    ("num_samples", lambda: tus.callbacks.FitCompactPosterior("x", q_r="r", q_d="d", num_samples="3")),  # type: ignore[arg-type]
    ("standard_errors", lambda: FitLaplace(standard_errors="2")),  # type: ignore[arg-type]
    ("burn_in", lambda: tus.routines.HMCRoutine(nn.Linear(2, 2), burn_in="2")),  # type: ignore[arg-type]
    ("num_members", lambda: tus.routines.MembersRoutine(nn.Linear(2, 2), "2")),  # type: ignore[arg-type]
    ("prior_precision", lambda: tus.routines.VariationalRoutine(nn.Linear(2, 2), "1")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "make"), TEXTS)
def test_a_number_in_quotes_is_named(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be a .*number, got '\d' \(str\): write it without quotes$"):
        make()


@pytest.mark.filterwarnings("ignore")
def test_what_a_run_cannot_be_is_said_before_there_is_something_to_lose(tmp_path: Path) -> None:
    half = Routine(mlp())
    with pytest.raises(TypeError, match=r"precision='bf16-true' makes .*: train with 'bf16-mixed' or '32-true'"):
        trainer(FitLaplace(), folder=tmp_path, max_epochs=1, precision="bf16-true").fit(half, loader())
    with pytest.raises(ValueError, match="this one has no batch"):
        trainer(PosteriorDraws(2), folder=tmp_path, max_epochs=1, limit_train_batches=0).fit(routine(), loader())
