"""Functions and a routine that the tests of command tables run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.tables.outcome import Outcome, digest_tensors

CALLS: list[str] = []


class Line(LightningModule):
    """Fits a line by SGD; writes its weight when training ends."""

    def __init__(self, out: str, lr: float = 0.1) -> None:
        super().__init__()
        self.layer, self.out, self.lr = nn.Linear(1, 1), Path(out), lr

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.layer(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_end(self) -> None:
        CALLS.append(f"fit {self.trainer.current_epoch}")
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "weight.txt").write_text(repr(float(self.layer.weight.detach())))


class Points(LightningDataModule):
    """Sixteen points on y = 2 x."""

    def __init__(self, root: str = "data") -> None:
        super().__init__()
        self.root = root

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        x = torch.linspace(-1, 1, 16).unsqueeze(1)
        return DataLoader(TensorDataset(x, 2 * x), batch_size=4)


def double(out: Path, line: Path, factor: float = 2.0) -> Outcome:
    """Multiply what ``Line`` has written.

    Args:
        out: folder of the results.
        line: folder of the fit.
        factor: to multiply with.
    """
    CALLS.append("double")
    value = factor * float((line / "weight.txt").read_text())
    return Outcome({"value": value}, f"value {value:.3f}")


def fragile(out: Path, first: Path) -> Outcome:
    """Kill the process that comes here first, in a run of several.

    Args:
        out: folder of the results.
        first: a file that says that one was here.
    """
    if not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome({"alive": True}, "alive")


def digests(out: Path, root: Path) -> Outcome:
    """The digests of what other commands have stored.

    Args:
        out: folder of the results.
        root: folder of the run.
    """
    stores = [SampleStore.open(path / "samples") for path in root.iterdir() if (path / "samples").is_dir()]
    found = {store.folder.parent.name: digest_tensors(*store.load().values()) for store in stores}
    return Outcome(dict(sorted(found.items())), f"{len(found)} stores")


def not_a_command(out: str) -> str:
    """Returns something else."""
    CALLS.append("not_a_command")
    return out
