"""PosteriorSnapshots: which weights are written when, across resumed runs, and for ensembles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from trainings import Routine, fit, normalized, routine

from tu_symmetry.callbacks import PosteriorSnapshots
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Trajectory(Callback):
    """Keeps the weights after every optimizer step."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.states[trainer.global_step] = {k: v.clone() for k, v in pl_module.model.state_dict().items()}  # type: ignore


def run(module: Routine, *callbacks: Callback, **options: Any) -> Trainer:
    return fit(module, *callbacks, n=32, shuffle=False, **options)  # four steps an epoch


def network(members: int | None = None) -> Routine:
    return routine(normalized, members)


def written(folder: Path) -> list[tuple[int, int]]:
    return sorted((r.chain, r.step) for r in SampleStore.open(folder).records)


def test_weights_and_buffers_are_written_after_the_burn_in(tmp_path: Path) -> None:
    trajectory = Trajectory()
    run(network(), trajectory, PosteriorSnapshots(tmp_path / "s", every_n_steps=2, burn_in=5, at_end=True))
    assert written(tmp_path / "s") == [(0, 7), (0, 9), (0, 11), (0, 12)]
    stack = SampleStore.open(tmp_path / "s").load()
    for i, step in enumerate((7, 9, 11, 12)):
        for name, tensor in trajectory.states[step].items():
            assert torch.equal(stack[name][i], tensor.cpu()), (step, name)


def test_named_epochs(tmp_path: Path) -> None:
    """Also across a run that is cut in the middle of one of them, which counts when it is whole."""
    run(network(), PosteriorSnapshots(tmp_path / "s", at_epochs=[5, 1, 4]), max_epochs=5)
    assert written(tmp_path / "s") == [(0, 4), (0, 16), (0, 20)]
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run(network(), PosteriorSnapshots(tmp_path / "t", at_epochs=[1, 2]), keep, max_epochs=5, max_steps=6)
    assert written(tmp_path / "t") == [(0, 4)]
    run(network(), PosteriorSnapshots(tmp_path / "t", at_epochs=[1, 2, 3]), ckpt=tmp_path / "epoch=0.ckpt")
    assert written(tmp_path / "t") == [(0, 4), (0, 8), (0, 12)]
    with pytest.raises(ValueError, match="at least 1"):
        PosteriorSnapshots(tmp_path, at_epochs=[0, 1])
    with pytest.raises(ValueError, match="nothing to wait for"):
        PosteriorSnapshots(tmp_path, at_epochs=[1], burn_in=2)


def test_an_ensemble_is_one_chain_for_each_member(tmp_path: Path) -> None:
    module = network(3)
    run(module, PosteriorSnapshots(tmp_path / "s", every_n_epochs=3, chain=4))
    assert written(tmp_path / "s") == [(4, 12), (5, 12), (6, 12)]
    stack = SampleStore.open(tmp_path / "s").load()
    for i, member in enumerate(module.model.core_models):  # type: ignore[arg-type]
        for name, tensor in member.state_dict().items():
            assert torch.equal(stack[name][i], tensor)


def test_a_resumed_run_appends_without_repeating(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    run(network(), PosteriorSnapshots(tmp_path / "whole", every_n_steps=3))
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run(network(), PosteriorSnapshots(folder, every_n_steps=3), keep, max_epochs=2)
    run(network(), PosteriorSnapshots(folder, every_n_steps=3), ckpt=tmp_path / "epoch=0.ckpt")  # repeats an epoch
    assert written(folder) == [(0, 3), (0, 6), (0, 9), (0, 12)]
    whole, parts = SampleStore.open(tmp_path / "whole").load(), SampleStore.open(folder).load()
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name])


def test_runs_of_one_architecture_share_a_store(tmp_path: Path) -> None:
    run(network(), PosteriorSnapshots(tmp_path / "s", every_n_epochs=1))
    run(network(), PosteriorSnapshots(tmp_path / "s", every_n_epochs=3, chain=1))
    assert written(tmp_path / "s") == [(0, 4), (0, 8), (0, 12), (1, 12)]
    before = {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}
    with pytest.raises(FileExistsError, match="samples of chain 0 of another run already"):
        run(network(), PosteriorSnapshots(tmp_path / "s", every_n_epochs=2))
    other = network()
    other.model = nn.Linear(5, 3).double()
    with pytest.raises(SampleFileError, match="another architecture"):
        run(other, PosteriorSnapshots(tmp_path / "s", every_n_epochs=1, chain=2))
    assert before == {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}
