"""Small networks, data and trainings that tests of callbacks and routines share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from drawn import generator
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.models import MLP

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(*callbacks: Callback, folder: Path | None = None, **options: Any) -> Trainer:
    """A trainer that says nothing and writes checkpoints only for a callback that does."""
    saves = any(isinstance(c, Checkpoint) for c in callbacks)
    defaults = {**QUIET, "default_root_dir": folder, "enable_checkpointing": saves}
    return Trainer(callbacks=list(callbacks), **(defaults | options))


def epochs(folder: Path, count: int | None = 3, *callbacks: Callback, **options: Any) -> Trainer:
    """A trainer of so many epochs, without validation."""
    return trainer(*callbacks, folder=folder, **({"limit_val_batches": 0, "max_epochs": count} | options))


def steps_of(folder: Path, steps: int, *callbacks: Callback, **options: Any) -> Trainer:
    """A trainer of so many steps, without validation."""
    return epochs(folder, None, *callbacks, max_steps=steps, **options)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are the same to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


class Killed(Exception):
    """What ends a run as a signal would."""


class Kill(Callback):
    """Ends a run before the batch behind an optimizer step: between a step and its checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


def run_cli(
    folder: Path, text: str, *words: str, commands: Sequence[str] = ("fit",), uncertainty: bool = False
) -> Iterator[Any]:
    """Commands of LightningCLI, or of TorchUncertainty's, with a configuration; one after the other."""
    made: Any = LightningCLI
    if uncertainty:
        from torch_uncertainty.utils.cli import TULightningCLI as made
    (folder / "config.yaml").write_text(text)
    common = {"subclass_mode_model": True, "subclass_mode_data": True, "save_config_callback": None}
    for command in commands:
        args = [command, "--config", str(folder / "config.yaml"), *words]
        yield made(LightningModule, LightningDataModule, args=args, **common)


# --- five inputs or images of 6 x 6, three classes, float64


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))


def normalized() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)),
    )


@functools.cache
def mlp_graph() -> SymmetryGraph:
    """Known beforehand in most tests, to save discovering it anew."""
    with torch.random.fork_rng():
        graph = discover_symmetries(mlp().double(), torch.randn(2, 5, dtype=torch.float64, generator=generator()))
    graph.require_verified()
    return graph


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3, amsgrad=True)


class Ensemble(nn.Module):
    """As TorchUncertainty's: members in ``core_models``, outputs ``[members * batch, classes]``."""

    def __init__(self, members: list[nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.core_models = nn.ModuleList(members)
        self.noise = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.noise(x)
        return torch.cat([m(x) for m in self.core_models])


class Routine(LightningModule):
    """Trains one network, or the members of an ensemble jointly, and keeps the loss of every step."""

    def __init__(self, model: nn.Module, optimizer: Any = sgd) -> None:
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()
        self.make_optimizer = optimizer
        self.losses: list[float] = []

    def batch_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        outputs = self.model(x)
        return self.loss(outputs, y.repeat(len(outputs) // len(y)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.batch_loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.batch_loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def routine(
    make: Callable[[], nn.Module] = mlp, members: int | None = None, optimizer: Any = sgd, dropout: float = 0.0
) -> Routine:
    """The same weights on every call; without ``members`` of one network."""
    torch.manual_seed(0)
    model = make() if members is None else Ensemble([make() for _ in range(members)], dropout)
    return Routine(model, optimizer).double()


def loader(image: bool = False, n: int = 48, batch_size: int = 8, shuffle: bool = True) -> DataLoader[Any]:
    source = generator(3)
    x = torch.randn((n, 1, 6, 6) if image else (n, 5), generator=source, dtype=torch.float64)
    y = torch.randint(3, (n,), generator=source)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def fit(
    module: LightningModule,
    *callbacks: Callback,
    image: bool = False,
    n: int = 48,
    shuffle: bool = True,
    ckpt: Path | None = None,
    **options: Any,
) -> Trainer:
    """Three epochs of ``n / 8`` steps, with a validation after each."""
    seed_everything(11, verbose=False)
    made = trainer(*callbacks, **({"max_epochs": 3, "num_sanity_val_steps": 0} | options))
    made.fit(module, loader(image, n, shuffle=shuffle), loader(image, n=16, shuffle=False), ckpt_path=ckpt)
    return made


# --- scikit-learn's digits


def digits_network(hidden: int = 6) -> nn.Module:
    """The same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MLP(64, 10, (hidden,))


def digits(**options: Any) -> DigitsDataModule:
    return DigitsDataModule(**({"batch_size": 50, "train_size": 200, "test_size": 61, "eval_batch_size": 20} | options))
