"""MCLMC as a training run: the chains of the core, bit for bit, also after a kill; batches; warm starts; YAML."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.func import stack_module_state
from trainings import Kill, Killed, digits, digits_network, epochs, run_cli, same, steps_of

from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.posterior.microcanonical import MicrocanonicalChains
from tu_symmetry.posterior.network import BayesianNetwork, categorical_nll, derived_seed, initialized
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import MCLMCRoutine, MembersRoutine

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, Any] = {"num_chains": 3, "tuning": 50, "thinning": 5, "seed": 4}


def data(batch_size: Any = "full", **options: Any) -> DigitsDataModule:
    return digits(batch_size=batch_size, train_size=100, test_size=50, **options)


def run(
    folder: Path, steps: int, ckpt: str | None = None, *callbacks: Callback, batch_size: Any = "full", **options: Any
) -> MCLMCRoutine:
    options = OPTIONS | {"samples": folder / "samples", "model": digits_network()} | options
    routine = MCLMCRoutine(**options)
    steps_of(folder, steps, *callbacks).fit(routine, datamodule=data(batch_size), ckpt_path=ckpt)
    return routine


@pytest.mark.cpu
def test_the_chains_are_those_of_the_core(tmp_path: Path) -> None:
    run(tmp_path, 16, transitions_per_batch=5)  # 80 transitions, of which 50 tune
    module = data()
    module.setup("fit")
    network = BayesianNetwork(digits_network(), module.train.x, module.train.y, 1.0, categorical_nll, "cpu")
    fresh = [initialized(digits_network(), derived_seed(4, 1, k)) for k in range(3)]
    chain = MicrocanonicalChains(network, stack_module_state(fresh)[0], step_size=0.01, tuning=50, seed=4)
    expected = []
    for k in range(80):
        chain.step()
        if k >= 50 and (k + 1) % 5 == 0:
            expected.append(chain.position)
    store = SampleStore.open(tmp_path / "samples")
    places = list(itertools.product(range(55, 81, 5), range(3)))
    assert list(zip(store.steps, store.chains, strict=True)) == places and store.metadata["method"] == "mclmc"
    held = store.load()
    for name, t in held.items():
        assert torch.equal(t, torch.cat([position[name] for position in expected]))


@pytest.mark.parametrize(
    "options, cut, steps",
    [({"transitions_per_batch": 5}, 5, 16), ({"transitions_per_batch": 5}, 13, 16), ({"batch_size": 30}, 61, 70)],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, options: dict[str, Any], cut: int, steps: int) -> None:
    whole = run(tmp_path / "whole", steps, **options)
    saving = ModelCheckpoint(tmp_path / "cut", filename="cut", every_n_train_steps=3)
    with pytest.raises(Killed):
        run(tmp_path / "cut", steps, None, saving, Kill(cut + 1), **options)
    rest = run(tmp_path / "cut", steps, saving.best_model_path or None, **options)
    assert same(whole.chain.position, rest.chain.position) and torch.equal(whole.chain.length, rest.chain.length)
    a, b = (SampleStore.open(tmp_path / name / "samples") for name in ("whole", "cut"))
    assert a.steps == b.steps and a.chains == b.chains and same(a.load(), b.load())
    assert torch.equal(torch.stack(whole._series), torch.stack(rest._series))


def test_chains_start_from_a_trained_ensemble_and_are_measured(tmp_path: Path) -> None:
    members = MembersRoutine(digits_network(), 3, samples=tmp_path / "members", data_order="shared")
    epochs(tmp_path, 20).fit(members, datamodule=data())
    start = {"initial_states": tmp_path / "members", "tuning": 0, "step_size": 1e-3, "thinning": 1}
    still = run(tmp_path / "still", 1, **(start | {"step_size": 1e-12}))
    states = members.states()
    assert all(torch.allclose(t.cpu(), states[name].cpu(), atol=1e-6) for name, t in still.chain.position.items())
    routine = run(tmp_path, 12, **start)
    (found,) = steps_of(tmp_path, 1, limit_val_batches=1.0).validate(routine, datamodule=data(), verbose=False)
    assert routine.member_scores["NLL"].shape == (3,)  # of the positions
    (tested,) = steps_of(tmp_path, 1).test(routine, datamodule=data(), verbose=False)
    assert routine.member_scores["NLL"].shape == (36,)  # of the samples
    module = data()
    module.setup("test")
    store = SampleStore.open(tmp_path / "samples")
    outputs = [torch.func.functional_call(routine.model, state, (module.test.x,)) for state in store]
    nll = -torch.stack(outputs).softmax(-1).mean(0).gather(1, module.test.y[:, None]).log().mean()
    assert tested["test/cls/NLL"] == pytest.approx(float(nll), rel=1e-5) and found["val/cls/NLL"] < 2.3
    assert {"ess/projections", "rhat/projections", "ess/potential", "rhat/potential"} <= routine.diagnostics().keys()
    with pytest.raises(ValueError, match="holds 3 states, but num_chains is 4"):
        run(tmp_path / "four", 1, **start, num_chains=4)
    with pytest.raises(ValueError, match=r"SampleStore\.open"):
        routine.network_states()


def test_a_batch_stands_for_all_data(tmp_path: Path) -> None:
    routine = run(tmp_path, 3, batch_size=25)
    network, module = routine.chain.network, data()
    module.setup("fit")
    position = {name: t[0].cpu() for name, t in routine.chain.position.items()}
    parts = zip(module.train.x.split(25), module.train.y.split(25), strict=True)
    quarters = [network.potential(position, part) for part in parts]
    whole = network.potential(position, (module.train.x, module.train.y))
    torch.testing.assert_close(torch.stack(quarters).mean(), whole)
    with pytest.raises(ValueError, match=r"transitions_per_batch is 2.*25 of 100 points.*batch_size: full"):
        run(tmp_path / "wrong", 3, batch_size=25, transitions_per_batch=2)


def test_a_configuration_runs(tmp_path: Path) -> None:
    text = f"""
seed_everything: 0
trainer: {{max_steps: 3, accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false,
  enable_model_summary: false, limit_val_batches: 0, default_root_dir: {tmp_path}}}
model:
  class_path: tu_symmetry.routines.MCLMCRoutine
  init_args:
    num_chains: 2
    tuning: 50
    energy_variance: [0.4, 0.2]
    integrator: leapfrog
    transitions_per_batch: 20
    samples: {tmp_path}/samples
    model: {{class_path: tu_symmetry.tables.models.MLP, init_args: {{in_features: 64, num_classes: 10, hidden: [4]}}}}
data:
  class_path: tu_symmetry.datamodules.DigitsDataModule
  init_args: {{batch_size: full, train_size: 50}}
"""
    for _ in run_cli(tmp_path, text):
        assert SampleStore.open(tmp_path / "samples").steps == [60, 60]
