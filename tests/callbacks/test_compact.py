"""Compact posteriors at the end of a fit: written, and tested as an ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from trainings import digits, digits_network, run_cli, trainer

import tu_symmetry as tus
from tu_symmetry.callbacks import FitCompactPosterior, PosteriorSnapshots
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import HMCRoutine, MembersRoutine, VariationalRoutine

pytestmark = pytest.mark.filterwarnings("ignore")


def epochs(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return trainer(*callbacks, folder=folder, **({"limit_val_batches": 0, "max_epochs": 2} | options))


class Permute(Callback):
    """Makes all members permuted copies of the first one, as they are at the end."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        graph = tus.discover_symmetries(pl_module.member(0), torch.rand(2, 1, 8, 8, device=pl_module.device))
        first = pl_module.member(0).state_dict()
        generator = torch.Generator().manual_seed(0)
        for m in range(1, pl_module.num_members):
            permutation = tus.random_permutation(graph, generator=generator)
            for name, t in tus.apply_permutation(graph, permutation, first).items():
                pl_module.members.state_dict()[name][m] = t


@pytest.mark.parametrize("match_on", ["weights", "activations"])
def test_planted_permutations_are_removed(tmp_path: Path, match_on: Any) -> None:
    smooth = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))  # no units that are dead alike
    routine = MembersRoutine(smooth, 4)
    fitting = FitCompactPosterior(tmp_path / "a" / "q_r.safetensors", tmp_path / "q_d.safetensors", match_on=match_on)
    epochs(tmp_path, Permute(), fitting).fit(routine, datamodule=digits(orders=4))
    q_r, q_d = (
        CompactPosterior.load(path) for path in (tmp_path / "a" / "q_r.safetensors", tmp_path / "q_d.safetensors")
    )
    first = routine.member(0).state_dict()
    assert float(q_r.sigma().max()) < 1e-6 and float(q_d.sigma().max()) > 0.05
    assert all(torch.allclose(t, first[name], atol=1e-6) for name, t in q_r.mean.items())
    states = [routine.member(m).state_dict() for m in range(4)]
    expected = torch.stack([s["1.weight"].double() for s in states])
    assert torch.allclose(q_d.mean["1.weight"].double(), expected.mean(0), atol=1e-6)
    assert torch.allclose(q_d.std["1.weight"].double(), expected.std(0), atol=1e-6)
    assert q_r.metadata["match_on"] == match_on and q_r.metadata["aligned"] is True
    assert fitting.alignment is not None and max(fitting.alignment.transpositions) > 0


def test_samples_of_the_same_run(tmp_path: Path) -> None:
    routine = HMCRoutine(digits_network(), 0.02, leapfrog_steps=3, burn_in=2, samples=tmp_path / "s")
    fitting = FitCompactPosterior(q_d=tmp_path / "q_d.safetensors", samples=tmp_path / "s", num_samples=3)
    epochs(tmp_path, fitting, max_epochs=None, max_steps=9).fit(routine, datamodule=digits(batch_size="full"))
    store = SampleStore.open(tmp_path / "s")
    expected = store.stack([0, 3, 6])["layers.1.bias"].double()
    q = CompactPosterior.load(tmp_path / "q_d.safetensors")
    assert torch.allclose(q.mean["layers.1.bias"].double(), expected.mean(0), atol=1e-6)
    assert torch.allclose(q.std["layers.1.bias"].double(), expected.std(0), atol=1e-6)


def test_refusals_come_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to write"):
        FitCompactPosterior()
    single = VariationalRoutine(digits_network())
    with pytest.raises(ValueError, match="single network"):
        epochs(tmp_path, FitCompactPosterior(tmp_path / "q")).fit(single, datamodule=digits())
    (tmp_path / "q").touch()
    with pytest.raises(FileExistsError, match="is there already"):
        epochs(tmp_path, FitCompactPosterior(tmp_path / "q")).fit(
            MembersRoutine(digits_network(), 2), datamodule=digits(orders=2)
        )


def test_snapshots_of_members_are_chains_after_the_burn_in(tmp_path: Path) -> None:
    routine = MembersRoutine(digits_network(), 3)
    snapshots = PosteriorSnapshots(tmp_path / "s", every_n_steps=2, burn_in=3, chain=5)
    epochs(tmp_path, snapshots).fit(routine, datamodule=digits(orders=3))
    store = SampleStore.open(tmp_path / "s")
    assert list(zip(store.chains, store.steps, strict=True)) == [(c, s) for s in (5, 7) for c in (5, 6, 7)]
    assert not torch.equal(store[0]["layers.1.bias"], store[1]["layers.1.bias"])


YAML = """
seed_everything: 0
trainer: {{accelerator: cpu, devices: 1, max_epochs: 2, limit_val_batches: 0, enable_progress_bar: false,
          logger: false, enable_checkpointing: false,
          callbacks: [{{class_path: tu_symmetry.callbacks.FitCompactPosterior,
                        init_args: {{q_r: {folder}/q_r.safetensors, match_on: activations}}}}]}}
model:
  class_path: tu_symmetry.routines.MembersRoutine
  init_args:
    num_members: 3
    model: {{class_path: tu_symmetry.tables.models.MLP, init_args: {{in_features: 64, num_classes: 10, hidden: [8]}}}}
data:
  class_path: tu_symmetry.datamodules.DigitsDataModule
  init_args: {{batch_size: 100, orders: 3, test_size: 60}}
"""
TEST_YAML = """
trainer: {{accelerator: cpu, devices: 1, enable_progress_bar: false, logger: false}}
routine:
  class_path: torch_uncertainty.routines.ClassificationRoutine
  init_args:
    num_classes: 10
    is_ensemble: true
    eval_ood: true
    model:
      class_path: tu_symmetry.routines.posterior_ensemble
      init_args:
        posterior: {folder}/q_r.safetensors
        num_samples: 5
        model:
          class_path: tu_symmetry.tables.models.MLP
          init_args: {{in_features: 64, num_classes: 10, hidden: [8]}}
data:
  class_path: tu_symmetry.datamodules.DigitsDataModule
  init_args: {{test_size: 60, eval_batch_size: 25, eval_ood: true}}
"""


def test_from_yaml_up_to_a_test_in_torch_uncertainty(tmp_path: Path) -> None:
    list(run_cli(tmp_path, YAML.format(folder=tmp_path)))
    (cli,) = run_cli(tmp_path, TEST_YAML.format(folder=tmp_path), commands=("test",), uncertainty=True)
    assert {"ood/AUROC", "test/cls/Acc", "test/ens_MI"} <= cli.trainer.callback_metrics.keys()
