"""Runs typed one by one, without a table: what a store takes back, and what it refuses to lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from trainings import Kill, Killed, digits_network, trainer

from tu_symmetry.callbacks import LastCheckpoint, PosteriorDraws, PosteriorSnapshots
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.posterior.samples import RunMark, SampleStore
from tu_symmetry.routines import HMCRoutine, MembersRoutine, VariationalRoutine
from tu_symmetry.states import SampleFileError

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ("hmc", "snapshots")


def run(kind: str, folder: Path, *callbacks: Callback, ckpt: Any = None, epochs: int = 6, **options: Any) -> None:
    data = DigitsDataModule(batch_size="full", train_size=40, test_size=10)
    samples = folder / "samples"
    if kind == "hmc":
        options = {"burn_in": 1, "step_size": 0.02, "leapfrog_steps": 2, "samples_per_file": 1} | options
        routine: Any = HMCRoutine(digits_network(4), samples=samples, **options)
    else:
        routine = MembersRoutine(digits_network(4), 2, data_order="shared", **options)
        callbacks = (*callbacks, PosteriorSnapshots(samples, every_n_steps=1))
    made = trainer(*callbacks, folder=folder, max_epochs=epochs, limit_val_batches=0)
    made.fit(routine, datamodule=data, ckpt_path=ckpt)


def content(folder: Path) -> dict[Any, Any]:
    store = SampleStore.open(folder / "samples")
    return dict(zip(zip(store.chains, store.steps, strict=True), store, strict=True))


def assert_same(a: Path, b: Path) -> None:
    one, other = content(a), content(b)
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
    assert_same(tmp_path / "whole", tmp_path / "cut")
    with pytest.raises(FileExistsError, match="which has come to its end"):
        run(kind, tmp_path / "cut")
    assert_same(tmp_path / "whole", tmp_path / "cut")


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
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_counts_on_samples_that_are_gone_is_refused(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path, LastCheckpoint(every_seconds=0), epochs=4)
    last = tmp_path / "checkpoints" / "last.ckpt"
    SampleStore.open(tmp_path / "samples").discard([0, 1], after=2)
    with pytest.raises(FileExistsError, match="that the run had stored by this checkpoint"):
        run(kind, tmp_path, LastCheckpoint(every_seconds=0), ckpt=last)


def test_members_that_were_cut_between_the_last_checkpoint_and_their_store(tmp_path: Path) -> None:
    class Cut(Callback):
        def on_train_end(self, *_: Any) -> None:
            raise Killed

    options = {"num_members": 2, "data_order": "shared", "samples": tmp_path / "samples"}

    def fit(*callbacks: Callback, ckpt: Any = None) -> MembersRoutine:
        routine = MembersRoutine(digits_network(4), **options)
        made = trainer(*callbacks, folder=tmp_path, max_epochs=2, limit_val_batches=0)
        made.fit(routine, datamodule=DigitsDataModule(train_size=40, test_size=10, batch_size=20), ckpt_path=ckpt)
        return routine

    with pytest.raises(Killed):
        fit(Cut(), LastCheckpoint())
    assert not (tmp_path / "samples").exists()
    routine = fit(LastCheckpoint(), ckpt=tmp_path / "checkpoints" / "last.ckpt")
    store = SampleStore.open(tmp_path / "samples")
    assert store.steps == [4, 4]
    assert all(torch.equal(t, routine.states()[name]) for name, t in store.load().items())


def test_draws_follow_a_run_that_goes_on_after_its_end(tmp_path: Path) -> None:
    def fit(epochs: int, ckpt: Any = None) -> VariationalRoutine:
        routine = VariationalRoutine(digits_network(4))
        callbacks = [PosteriorDraws(2), LastCheckpoint()]
        made = trainer(*callbacks, folder=tmp_path, max_epochs=epochs, limit_val_batches=0)
        made.fit(routine, datamodule=DigitsDataModule(train_size=40, test_size=10), ckpt_path=ckpt)
        return routine

    fit(1)
    first, last = SampleStore.open(tmp_path / "samples").load(), tmp_path / "checkpoints" / "last.ckpt"
    fit(1, last)  # which had ended
    assert all(torch.equal(t, first[n]) for n, t in SampleStore.open(tmp_path / "samples").load().items())
    routine = fit(3, last)
    expected = routine.posterior().to("cpu").sample(2, generator=torch.Generator().manual_seed(0))
    found = SampleStore.open(tmp_path / "samples").load()
    assert all(torch.equal(t, expected[n]) for n, t in found.items())
    assert any(not torch.equal(t, first[n]) for n, t in found.items())


def test_a_store_takes_back_whole_files_and_a_kill_leaves_each_there_or_gone(tmp_path: Path) -> None:
    store = SampleStore.create(tmp_path / "s", architecture="net", method="test")
    state = {"w": torch.arange(3.0)}
    for step in (1, 2, 3):
        store.append(state, step=step)
    store.append([state, state], chain=[0, 1], step=[4, 4])
    with pytest.raises(ValueError, match="in one file with others"):
        store.discard([0], after=3)
    assert store.discard([0, 1], after=2) == 3 and store.steps == [1, 2]
    gone = store.records[1].shard
    (tmp_path / "copy").write_bytes(gone.read_bytes())
    assert store.discard([0], after=1) == 1
    (tmp_path / "copy").rename(gone)  # as a kill between the log and the file leaves it
    again = SampleStore.open(tmp_path / "s")
    assert again.steps == [1]
    again.append(state, step=2)
    again.discard([7])
    assert not gone.exists() and SampleStore.open(tmp_path / "s").steps == [1, 2]
    again.mark(0, RunMark("a", done=True, step=5))
    assert again.marked(0) == RunMark("a", done=True, step=5) and again.marked(1) is None
    (tmp_path / "s" / "run-0.json").write_text("{}")
    with pytest.raises(SampleFileError, match="counts as that of another run"):
        again.marked(0)
