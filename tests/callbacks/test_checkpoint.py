"""LastCheckpoint: a run that was killed or cut anywhere resumes to the numbers of one that was not, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import Killed, digits_network, epochs, trainer

from tu_symmetry.callbacks import LastCheckpoint
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.routines import HMCRoutine, MembersRoutine, VariationalRoutine
from tu_symmetry.tables.logs import logged_curve

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = 4  # of an epoch
KINDS = ["members", "vi", "hmc", "dropout"]


class Record(Callback):
    """Writes down what is trained and called, and may end the run before a batch (Killed) or after one (cut)."""

    def __init__(self, kill: int | None = None, cut: int | None = None) -> None:
        self.kill, self.cut = kill, cut
        self.batches: list[tuple[int, int]] = []
        self.epochs: list[int] = []
        self.validations: list[tuple[int, dict[str, Any]]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.kill:
            raise Killed
        self.batches.append((trainer.current_epoch, batch_idx))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.cut:
            trainer.should_stop = True  # as Lightning's Timer does for max_time

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            found = {name: value.item() for name, value in trainer.callback_metrics.items() if "val/" in name}
            self.validations.append((trainer.current_epoch, found))


class Dropping(LightningModule):
    """Draws from the global random state in every step."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def made(kind: str) -> tuple[LightningModule, DigitsDataModule]:
    common: dict[str, Any] = {"train_size": 150, "test_size": 60, "batch_size": 40}
    if kind == "members":
        return MembersRoutine(digits_network(), 3), DigitsDataModule(orders=3, **common)
    if kind == "vi":
        return VariationalRoutine(digits_network()), DigitsDataModule(**common)
    if kind == "hmc":
        routine = HMCRoutine(digits_network(), step_size=0.02, leapfrog_steps=3, burn_in=1)
        return routine, DigitsDataModule(**common | {"batch_size": "full"})
    return Dropping(), DigitsDataModule(**common)


def fit(folder: Path, kind: str, *callbacks: Callback, resume: bool = False, **more: Any) -> tuple[Any, Trainer]:
    """A run of three epochs (seven transitions), with a validation after every second epoch."""
    torch.manual_seed(100 + resume)  # a process that resumes has drawn other random numbers
    routine, data = made(kind)
    length = {"max_epochs": 7 if kind == "hmc" else 3, "log_every_n_steps": 1, "check_val_every_n_epoch": 2}
    made_by = trainer(*callbacks, folder=folder, **({"logger": CSVLogger(folder)} | length | more))
    made_by.fit(routine, datamodule=data, ckpt_path="last" if resume else None)
    return routine, made_by


def same(one: Any, other: Any) -> None:
    """Equal weights, bit for bit."""
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    different = [name for name, t in one.items() if not torch.equal(t, other[name])]
    assert not different


def curves(folder: Path) -> dict[str, str]:
    """Whatever was logged, all parts of a run together, written out: NaN, of too few draws, is like NaN."""
    names = set().union(*(path.read_text().splitlines()[0].split(",") for path in folder.rglob("metrics.csv")))
    return {name: repr(logged_curve(folder, name)) for name in names - {"step"}}


# within an epoch, at an epoch's end, and before a validation; or before any batch
SOME, ALL = (3, 4, 6), tuple(range(1, 3 * BATCHES))
PLACES = [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_anywhere(tmp_path: Path, kind: str, places: tuple[int, ...]) -> None:
    record, precision = Record(), "32-true" if kind == "dropout" else "64-true"
    whole, _ = fit(tmp_path / "whole", kind, record, LastCheckpoint(), precision=precision)
    for at in [at for at in places if at < len(record.batches)]:
        folder = tmp_path / str(at)
        before, after = Record(kill=at), Record()
        with pytest.raises(Killed):
            fit(folder, kind, before, LastCheckpoint(every_seconds=0), precision=precision)
        resumed, _ = fit(folder, kind, LastCheckpoint(), after, resume=True, precision=precision)
        same(resumed, whole)
        for what in ("batches", "epochs", "validations"):
            assert getattr(before, what) + getattr(after, what) == getattr(record, what), (at, what)
        assert curves(folder) == curves(tmp_path / "whole")


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_cut_by_time_anywhere(tmp_path: Path, kind: str, places: tuple[int, ...]) -> None:
    """Lightning ends the epoch that it cuts; what is left of it is trained all the same when the run is resumed."""
    record = Record()
    whole, _ = fit(tmp_path / "whole", kind, record, LastCheckpoint())
    for at in [at for at in places if at < len(record.batches)]:
        before, after = Record(cut=at), Record()
        fit(tmp_path / str(at), kind, before, LastCheckpoint())
        same(fit(tmp_path / str(at), kind, LastCheckpoint(), after, resume=True)[0], whole)
        assert before.batches + after.batches == record.batches and len(before.batches) == at


@pytest.mark.parametrize("kind", ["members", "vi", "dropout"])
def test_ended_by_steps_and_continued(tmp_path: Path, kind: str) -> None:
    record = Record()
    whole, _ = fit(tmp_path / "whole", kind, record, LastCheckpoint(), max_steps=10)
    assert len(record.batches) == 10
    for at in (3, 5):
        before, after = Record(), Record()
        fit(tmp_path / str(at), kind, before, LastCheckpoint(), max_steps=at)
        same(fit(tmp_path / str(at), kind, after, LastCheckpoint(), resume=True, max_steps=10)[0], whole)
        assert before.batches + after.batches == record.batches


class Ordinary(DigitsDataModule):
    """Shuffled by the global random state, as TorchUncertainty's loaders are."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.train.x, self.train.y), batch_size=40, shuffle=True)


def test_a_loader_that_does_not_keep_its_place_is_saved_after_epochs(tmp_path: Path) -> None:
    def run(folder: Path, *callbacks: Callback, resume: bool = False) -> Any:
        torch.manual_seed(100 + resume)
        module, data = Dropping(), Ordinary(train_size=150)
        epochs(folder, 3, *callbacks).fit(module, datamodule=data, ckpt_path="last" if resume else None)
        return module

    record = Record()
    whole = run(tmp_path / "whole", record, LastCheckpoint())
    for at in (5, 8):
        before, after = Record(kill=at), Record()
        with pytest.raises(Killed):
            run(tmp_path / str(at), before, LastCheckpoint(every_seconds=0))
        same(run(tmp_path / str(at), after, LastCheckpoint(), resume=True), whole)
        assert after.batches == record.batches[at // BATCHES * BATCHES :]


def test_nothing_is_saved_while_gradients_are_accumulated(tmp_path: Path) -> None:
    record = Record()
    whole, _ = fit(tmp_path / "whole", "dropout", record, LastCheckpoint(), accumulate_grad_batches=2)
    saved: list[int] = []

    class Noted(LastCheckpoint):
        def save(self, trainer: Trainer) -> None:
            saved.append(len(before.batches))
            super().save(trainer)

    before = Record(kill=3)
    with pytest.raises(Killed):
        fit(tmp_path / "cut", "dropout", before, Noted(every_seconds=0), accumulate_grad_batches=2)
    assert saved and all(n % 2 == 0 for n in saved)
    same(fit(tmp_path / "cut", "dropout", LastCheckpoint(), resume=True, accumulate_grad_batches=2)[0], whole)


def test_it_is_written_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    saved_by = fit(tmp_path, "members", LastCheckpoint(every_seconds=1e6))[1]
    assert saved_by.checkpoint_callback.last_model_path == str(tmp_path / "checkpoints" / "last.ckpt")  # type: ignore[union-attr]
    content = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == 3 * BATCHES
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    with pytest.raises(ValueError, match="every_seconds"):
        LastCheckpoint(every_seconds=-1)
