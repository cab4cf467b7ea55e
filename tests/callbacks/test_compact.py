"""Compact posteriors at the end of a fit, and stored predictives: written, and compared with in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchmetrics import MeanSquaredError
from trainings import digits, digits_network, run_cli, trainer

import tu_symmetry as tus
from tu_symmetry.callbacks import FitCompactPosterior, PosteriorSnapshots, PredictiveWriter, ReferencePredictive
from tu_symmetry.callbacks.reference import AgainstReference, load_predictive
from tu_symmetry.metrics import PredictiveTotalVariation
from tu_symmetry.metrics.functional import predictive_agreement, predictive_total_variation
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


def predicted(routine: MembersRoutine) -> Tensor:
    module = digits()
    module.setup("test")
    return routine.member_outputs(module.test.x).softmax(-1).mean(0).detach()


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_written_predictive_is_the_reference_of_another_test(tmp_path: Path, kind: str) -> None:
    first, second = MembersRoutine(digits_network(), 2), MembersRoutine(digits_network(), 3, seed=1)
    epochs(tmp_path).fit(second, datamodule=digits(orders=3))
    path = tmp_path / "p" / f"reference.{kind}"
    epochs(tmp_path, PredictiveWriter(path)).predict(first, datamodule=digits())
    assert torch.allclose(load_predictive(path), predicted(first), atol=1e-6)
    comparing = ReferencePredictive(path, metrics={"MSE": MeanSquaredError()})
    before = second.test_cls_metrics
    (found,) = epochs(tmp_path, comparing).test(second, datamodule=digits(), verbose=False)
    mine, theirs = predicted(second), predicted(first)
    assert found["test/cls/Agreement"] == pytest.approx(float(predictive_agreement(mine, theirs)), abs=1e-6)
    assert found["test/cls/TV"] == pytest.approx(float(predictive_total_variation(mine, theirs)), abs=1e-6)
    assert found["test/cls/MSE"] == pytest.approx(float((mine - theirs).square().mean()), rel=1e-4)
    assert 0 < found["test/cls/TV"] < 1 and second.test_cls_metrics is before
    (itself,) = epochs(tmp_path, ReferencePredictive(path)).test(first, datamodule=digits(), verbose=False)
    assert itself["test/cls/Agreement"] == 1 and itself["test/cls/TV"] < 1e-6
    with pytest.raises(ValueError, match=r"the test set has 60 points.*holds 61"):
        epochs(tmp_path, ReferencePredictive(path)).test(first, datamodule=digits(test_size=60), verbose=False)
    with pytest.raises(FileExistsError, match="is there already"):
        epochs(tmp_path, PredictiveWriter(path)).predict(first, datamodule=digits())


def test_processes_look_up_their_own_points(generator: torch.Generator) -> None:
    a, b = (torch.rand(11, 3, generator=generator).softmax(-1) for _ in range(2))
    whole = AgainstReference(PredictiveTotalVariation(), b)
    whole.update(a[:4], torch.zeros(4))
    whole.update(a[4:], torch.zeros(7))
    total = torch.zeros(())
    for rank in range(3):
        share = torch.arange(rank, 12, 3) % 11  # the last one is filled up with the first point
        part = AgainstReference(PredictiveTotalVariation(), b, rank, 3)
        part.update(a[share[:2]], torch.zeros(2))
        part.update(a[share[2:]], torch.zeros(len(share) - 2))
        total = total + part.metric.total
    assert float(total / 11) == pytest.approx(float(whole.compute()), abs=1e-6)
    whole.reset()
    whole.update(a, torch.zeros(11))
    assert float(whole.compute()) == pytest.approx(float(predictive_total_variation(a, b)), abs=1e-6)


def test_files_that_are_no_predictives(tmp_path: Path) -> None:
    uniform = torch.full((5, 4), 0.25)
    np.savez(tmp_path / "a.npz", other=uniform.numpy())
    save_file({"probs": uniform * 2}, tmp_path / "b.safetensors")
    save_file({"probs": uniform[0]}, tmp_path / "c.safetensors")
    (tmp_path / "d.safetensors").write_bytes(b"\x00" * 40)
    (tmp_path / "e.npz").write_bytes(b"PK\x03\x04 cut")
    (tmp_path / "f.csv").write_text("1")
    for name, match in (
        ("a.npz", r"holds \['other'\], and no 'probs'"),
        ("b.safetensors", "sum to 1"),
        ("c.safetensors", r"shape \(4,\)"),
        ("d.safetensors", "cannot be read"),
        ("e.npz", "cannot be read"),
        ("f.csv", "is a .npz or .safetensors"),
    ):
        with pytest.raises(ValueError, match=match):
            ReferencePredictive(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        ReferencePredictive(tmp_path / "nowhere.npz")


def test_real_reference(data_root: Path) -> None:
    assert load_predictive(data_root / "hmc-cifar10-test-probs.npz").shape == (10_000, 10)


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
  init_args: {{batch_size: 100, orders: 3, test_size: 60, eval_ood: {ood}}}
"""
TEST_YAML = """
trainer: {{accelerator: cpu, devices: 1, enable_progress_bar: false, logger: false,
          callbacks: [{{class_path: tu_symmetry.callbacks.ReferencePredictive,
                        init_args: {{reference: {folder}/p.safetensors,
                                     metrics: {{MSE: {{class_path: torchmetrics.MeanSquaredError}}}}}}}}]}}
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


def test_from_yaml_up_to_a_test_in_torch_uncertainty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = YAML.format(folder=tmp_path, ood="false")
    list(run_cli(tmp_path, text))
    writer = "--trainer.callbacks+=PredictiveWriter", f"--trainer.callbacks.path={tmp_path}/p.safetensors"
    list(run_cli(tmp_path, text, *writer, commands=("predict",)))
    assert load_file(tmp_path / "p.safetensors")["probs"].shape == (60, 10)
    capsys.readouterr()
    (cli,) = run_cli(tmp_path, TEST_YAML.format(folder=tmp_path), commands=("test",), uncertainty=True)
    found = cli.trainer.callback_metrics
    assert 0 <= found["test/cls/Agreement"] <= 1 and 0 < found["test/cls/TV"] < 1 and "test/cls/MSE" in found
    assert "ood/AUROC" in found and "test/cls/Acc" in found and "test/ens_MI" in found
    printed = capsys.readouterr().out
    assert "Agreement" in printed and "TV" in printed and "MSE" in printed
