"""Runs typed one by one, without a table: what a store takes back, and what it refuses to lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import generator
from lightning.pytorch import Callback, Trainer
from trainings import Kill, Killed, digits_network, trainer

from tu_symmetry.callbacks import LastCheckpoint, PosteriorDraws, PosteriorSnapshots
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import HMCRoutine, MembersRoutine, VariationalRoutine

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("hmc", "snapshots")


def run(kind: str, folder: Path, *callbacks: Callback, ckpt: Any = None, epochs: int = 6, **options: Any) -> Any:
    data = DigitsDataModule(batch_size="full" if kind in KINDS else 20, train_size=40, test_size=10)
    samples = folder / "samples"
    if kind == "hmc":
        options = {"burn_in": 1, "step_size": 0.02, "leapfrog_steps": 2} | options
        routine: Any = HMCRoutine(digits_network(4), samples=samples, **options)
    elif kind == "variational":
        routine = VariationalRoutine(digits_network(4))
        callbacks = (PosteriorDraws(2), *callbacks)
    else:
        routine = MembersRoutine(digits_network(4), 2, data_order="shared", **options)
        if kind == "snapshots":
            callbacks = (*callbacks, PosteriorSnapshots(samples, every_n_steps=1))
        else:
            routine.samples = samples
    made = trainer(*callbacks, folder=folder, max_epochs=epochs, limit_val_batches=0)
    made.fit(routine, datamodule=data, ckpt_path=ckpt)
    return routine


def content(folder: Path) -> dict[Any, Any]:
    store = SampleStore.open(folder / "samples")
    return dict(zip(zip(store.chains, store.steps, strict=True), store, strict=True))


def assert_same(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(t, other[key][name]) for key, state in one.items() for name, t in state.items())


@pytest.mark.parametrize("kind", KINDS)
def test_cut_before_a_checkpoint_the_same_run_starts_anew_and_another_is_refused(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path / "whole")
    for _ in range(2):
        with pytest.raises(Killed):
            run(kind, tmp_path / "cut", Kill(4))
    assert content(tmp_path / "cut")
    with pytest.raises(FileExistsError, match="of another run already"):
        run(kind, tmp_path / "cut", seed=5)
    run(kind, tmp_path / "cut")
    with pytest.raises(FileExistsError, match="which has come to its end"):
        run(kind, tmp_path / "cut")
    assert_same(content(tmp_path / "whole"), content(tmp_path / "cut"))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_beyond_the_checkpoint_are_taken_back(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path / "whole")

    class Once(LastCheckpoint):
        """Saves after the second step only."""

        def consider(self, trainer: Trainer, *, ends: bool) -> None:
            if trainer.global_step == 2:
                self.save(trainer)

    with pytest.raises(Killed):
        run(kind, tmp_path / "cut", Once(), Kill(5))
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    with pytest.raises(FileExistsError, match=r"which was cut: resume it with --ckpt_path .*last\.ckpt"):
        run(kind, tmp_path / "cut", Once())
    before = content(tmp_path / "cut")
    with pytest.raises(Killed):
        run(kind, tmp_path / "cut", Once(), Kill(2), ckpt=last)
    after = content(tmp_path / "cut")
    assert 0 < len(after) < len(before) and max(step for _, step in after) == 2
    run(kind, tmp_path / "cut", Once(), ckpt=last)
    assert_same(content(tmp_path / "whole"), content(tmp_path / "cut"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_counts_on_samples_that_are_gone_is_refused(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path, LastCheckpoint(every_seconds=0), epochs=4)
    last = tmp_path / "checkpoints" / "last.ckpt"
    SampleStore.open(tmp_path / "samples").discard([0, 1], after=2)
    with pytest.raises(FileExistsError, match="that the run had stored by this checkpoint"):
        run(kind, tmp_path, LastCheckpoint(every_seconds=0), ckpt=last)


@pytest.mark.parametrize("kind", ["members", "variational"])
def test_what_is_stored_at_the_end_follows_a_run_that_goes_on(kind: str, tmp_path: Path) -> None:
    """Once, as of a run that was longer from the start; a store of others is left alone, and a cut end is made up."""

    class Cut(Callback):
        def on_train_end(self, *_: Any) -> None:
            raise Killed

    def fit(epochs: int, *callbacks: Callback, ckpt: Any = None) -> Any:
        return run(kind, tmp_path, *callbacks, LastCheckpoint(), epochs=epochs, ckpt=ckpt)

    with pytest.raises(Killed):
        fit(1, Cut())
    assert not (tmp_path / "samples").exists()
    last = tmp_path / "checkpoints" / "last.ckpt"
    fit(1, ckpt=last)
    first, files = SampleStore.open(tmp_path / "samples").load(), sorted((tmp_path / "samples").iterdir())
    with pytest.raises(FileExistsError, match="--ckpt_path"):
        fit(1)
    fit(1, ckpt=last)  # which had ended
    assert sorted((tmp_path / "samples").iterdir()) == files
    routine = fit(3, ckpt=last)
    expected = routine.states() if kind == "members" else routine.posterior().to("cpu").sample(2, generator=generator())
    found = SampleStore.open(tmp_path / "samples").load()
    assert all(torch.allclose(t, expected[n].cpu(), rtol=1e-5, atol=1e-7) for n, t in found.items())
    assert any(not torch.equal(t, first[n]) for n, t in found.items())

    for file in (tmp_path / "samples").iterdir():
        file.unlink()
    stranger = SampleStore.create(tmp_path / "samples", architecture="Plain", method="hmc", seed=0)
    stranger.append(found, chain=range(2), step=[1, 2])
    with pytest.raises(FileExistsError, match="other samples"):
        fit(4, ckpt=last)
    assert len(SampleStore.open(tmp_path / "samples")) == 2
