"""Compact posteriors at the end of a fit: written, and tested as an ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import generator
from torch import nn
from trainings import digits, digits_network, epochs, run_cli

import tu_symmetry as tus
from tu_symmetry.callbacks import FitCompactPosterior, Rebasin, compact
from tu_symmetry.posterior.assessment import TEMPERATURES
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import HMCRoutine, VariationalRoutine

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("match_on", ["weights", "activations"])
def test_planted_permutations_are_removed(tmp_path: Path, match_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store that holds permuted copies of one network."""
    smooth = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))  # no units that are dead alike
    graph, first = tus.discover_symmetries(smooth, torch.rand(2, 1, 8, 8)), smooth.state_dict()
    permutations = [tus.random_permutation(graph, generator=generator(m)) for m in range(3)]
    states = [first, *(tus.apply_permutation(graph, p, first) for p in permutations)]
    SampleStore.create(tmp_path / "s", architecture="net", method="planted").append(states, step=range(4))
    files = {name: tmp_path / "a" / name for name in ("q_r", "q_d")}
    fitting = FitCompactPosterior(tmp_path / "s", **files, match_on=match_on)
    said: list[str] = []
    monkeypatch.setattr(compact, "rank_zero_info", lambda text, *values: said.append(text % values))
    epochs(tmp_path, 1, fitting).fit(VariationalRoutine(smooth), datamodule=digits())
    assert sum("posterior of 4 networks: sigma_q_d " in line for line in said) == 1 and "FitLaplace" not in str(said)
    assert "q_r: " not in str(said)
    q_r, q_d = (CompactPosterior.load(path) for path in files.values())
    assert float(q_r.sigma().max()) < 1e-6 and float(q_d.sigma().max()) > 0.05
    assert all(torch.allclose(t, first[name], atol=1e-6) for name, t in q_r.mean.items())
    expected = torch.stack([s["1.weight"].double() for s in states])
    assert torch.allclose(q_d.mean["1.weight"].double(), expected.mean(0), atol=1e-6)
    assert torch.allclose(q_d.std["1.weight"].double(), expected.std(0), atol=1e-6)
    assert "verdict" not in q_r.metadata  # these validation data are the test data
    assert q_r.metadata["match_on"] == match_on and q_r.metadata["aligned"] is True
    assert q_r.metadata["transpositions"] == [0, *map(tus.transposition_count, permutations)]


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("in_place", [None, False, True])
def test_q_d_of_aligned_networks_is_said_to_be_q_r(
    in_place: bool | None, moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the permutations are, and by a callback that has aligned the networks before they were stored."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))
    graph, first = tus.discover_symmetries(net, torch.rand(2, 1, 8, 8)), net.state_dict()
    copy = tus.apply_permutation(graph, tus.random_permutation(graph, generator=generator(1)), first)
    second = copy if moves else {n: t + 1e-3 for n, t in first.items()}
    SampleStore.create(tmp_path / "s", architecture="net", method="planted").append([first, second], step=range(2))
    fitting = FitCompactPosterior(tmp_path / "s", q_r=tmp_path / "q_r", q_d=tmp_path / "q_d")
    said: list[str] = []
    monkeypatch.setattr(compact, "rank_zero_info", lambda text, *values: said.append(text % values))
    model = nn.Module()
    model.core_models = nn.ModuleList([net, net])
    rebasins = [Rebasin(lambda _: model.core_models, in_place=bool(in_place), every_n_epochs=99, at_end=False)]
    epochs(tmp_path, 0, *rebasins[: in_place is not None], fitting).fit(VariationalRoutine(net), datamodule=digits())
    expected = "is near" if moves else "equals"
    found = [line for line in said if line.startswith(f"q_d {expected} q_r: ")]
    assert len(found) == (not moves or in_place is True) == str(said).count(" q_r: ")
    assert ("Rebasin" in "".join(found)) == (in_place is True)


def test_both_posteriors_are_written_where_nothing_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 1))  # one logit, of ten classes
    states = [net.state_dict(), {n: t + 1e-3 for n, t in net.state_dict().items()}]
    SampleStore.create(tmp_path / "s", architecture="net", method="planted").append(states, step=range(2))
    fitting = FitCompactPosterior(tmp_path / "s", q_r=tmp_path / "q_r", q_d=tmp_path / "q_d")
    said: list[str] = []
    monkeypatch.setattr(compact, "rank_zero_info", lambda text, *values: said.append(text % values))
    data = digits(val_size=40)
    epochs(tmp_path, 0, fitting).fit(VariationalRoutine(net), datamodule=data)
    assert any("only classifiers are assessed" in line and "sigma_q_r" in line for line in said)
    assert all(CompactPosterior.load(tmp_path / name).std for name in ("q_d", "q_r"))


def test_samples_of_the_same_run(tmp_path: Path) -> None:
    routine = HMCRoutine(digits_network(), 0.02, leapfrog_steps=3, burn_in=2, samples=tmp_path / "s")
    fitting = FitCompactPosterior(tmp_path / "s", q_r=tmp_path / "q_r", q_d=tmp_path / "q_d", num_samples=3)
    held_out = digits(batch_size="full", val_size=40)
    epochs(tmp_path, None, fitting, max_steps=9).fit(routine, datamodule=held_out)
    expected = SampleStore.open(tmp_path / "s").stack([0, 3, 6])["layers.1.bias"].double()
    q = CompactPosterior.load(tmp_path / "q_d")
    assert torch.allclose(q.mean["layers.1.bias"].double(), expected.mean(0), atol=1e-6)
    assert torch.allclose(q.std["layers.1.bias"].double(), expected.std(0), atol=1e-6)
    states = SampleStore.open(tmp_path / "s").stack([0, 3, 6])
    for name in ("q_d", "q_r"):
        q = CompactPosterior.load(tmp_path / name)
        judged = q.assess(digits_network(), states, held_out.val_dataloader(), generator=generator(0))
        assert q.metadata["scores"]["one member"]["nll"] == pytest.approx(judged.scores["one member"]["nll"], rel=1e-4)
        assert q.metadata["temperature"] in TEMPERATURES and "one member" in q.metadata["verdict"]
    with pytest.raises(FileExistsError, match="is there already"):
        epochs(tmp_path, 2, fitting).fit(VariationalRoutine(digits_network()), datamodule=digits())


YAML = """
seed_everything: 0
trainer: {{accelerator: cpu, devices: 1, max_epochs: 2, limit_val_batches: 0, enable_progress_bar: false,
          logger: false, enable_checkpointing: false,
          callbacks: [{{class_path: tu_symmetry.callbacks.FitCompactPosterior,
                        init_args: {{samples: {folder}/samples, q_r: {folder}/q_r.safetensors,
                                    q_d: {folder}/q_d.safetensors, match_on: activations}}}}]}}
model:
  class_path: tu_symmetry.routines.MembersRoutine
  init_args:
    num_members: 3
    samples: {folder}/samples
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
