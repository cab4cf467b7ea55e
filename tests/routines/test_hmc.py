"""HMC as a training run: the chain of the core, bit for bit, also after a kill; bounded memory; diagnostics; YAML."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from pyro.ops.stats import split_gelman_rubin
from scipy.signal import lfilter
from torch import Tensor, nn
from trainings import Kill, Killed, digits, digits_network, same, steps_of

from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.posterior.hamiltonian import (
    HamiltonianChain,
    SignedSums,
    chain_diagnostics,
)
from tu_symmetry.posterior.network import BayesianNetwork, categorical_nll
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import HMCRoutine
from tu_symmetry.states import stack_states

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS: dict[str, Any] = {"step_size": 0.02, "leapfrog_steps": 5, "burn_in": 3, "seed": 4}


def data() -> DigitsDataModule:
    return digits(batch_size="full", train_size=100, test_size=50)


def run(folder: Path, steps: int, ckpt: str | None = None, *callbacks: Callback, **options: Any) -> HMCRoutine:
    options = OPTIONS | {"samples": folder / "samples", "model": digits_network()} | options
    routine = HMCRoutine(**options)
    steps_of(folder, steps, *callbacks).fit(routine, datamodule=data(), ckpt_path=ckpt)
    return routine


def posterior() -> BayesianNetwork:
    module = data()
    module.setup("fit")
    return BayesianNetwork(digits_network(), module.train.x, module.train.y, 1.0, categorical_nll, "cpu")


@pytest.mark.cpu
def test_the_chain_is_that_of_the_core(tmp_path: Path) -> None:
    routine = run(tmp_path, 11)
    chain = HamiltonianChain(posterior(), step_size=0.02, leapfrog_steps=5, seed=4)
    positions = []
    for _ in range(11):
        chain.step()
        positions.append(chain.position)
    expected = stack_states(positions[3:])
    store = SampleStore.open(tmp_path / "samples")
    assert store.steps == list(range(4, 12)) and store.metadata["method"] == "hmc"
    assert same(store.load(), expected)
    assert same({n: t[-1] for n, t in expected.items()}, dict(routine.model.state_dict()))


ADAPTING = {"adapt_step_size": True, "burn_in": 30, "step_size": 0.001}


@pytest.mark.parametrize(
    "options, cut, steps",
    [
        ({}, 2, 12),  # in the burn-in
        (ADAPTING, 20, 36),  # while the step size adapts
        (ADAPTING, 32, 36),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, options: dict[str, Any], cut: int, steps: int) -> None:
    whole = run(tmp_path / "whole", steps, **options)
    saving = ModelCheckpoint(tmp_path / "cut", filename="cut", every_n_train_steps=3)
    with pytest.raises(Killed):
        run(tmp_path / "cut", steps, None, saving, Kill(cut + 1), **options)
    rest = run(tmp_path / "cut", steps, saving.best_model_path or None, **options)
    assert same(dict(whole.model.state_dict()), dict(rest.model.state_dict()))
    a, b = (SampleStore.open(tmp_path / name / "samples") for name in ("whole", "cut"))
    assert a.steps == b.steps and same(a.load(), b.load())
    assert torch.equal(torch.stack(whole._series), torch.stack(rest._series))
    assert whole.chain is not None and rest.chain is not None
    assert whole.chain._kernel.step_size == rest.chain._kernel.step_size


def test_the_stored_samples_are_the_ones_that_are_asked_for(tmp_path: Path) -> None:
    burn_in = run(tmp_path / "all", 13).burn_in
    run(tmp_path / "some", 13, stored=(2, 8, 3))
    whole, some = (SampleStore.open(tmp_path / name / "samples") for name in ("all", "some"))
    assert some.steps == [burn_in + 1 + k for k in (2, 5, 8)]  # linspace(2, 8, 3), counted from 0 after the burn-in
    assert all(same(some[i], whole[k]) for i, k in enumerate((2, 5, 8)))
    for wrong in ((3, 3, 1), (0, 3, 9), (-1, 4, 2)):
        with pytest.raises(ValueError, match="stored is"):
            run(tmp_path / "wrong", 2, stored=wrong)


def test_tied_weights_buffers_and_two_chains_in_one_store(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64, bias=False)
            self.b = nn.Linear(64, 64, bias=False)
            self.b.weight = self.a.weight
            self.head = nn.Linear(64, 10)
            self.register_buffer("shift", torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(self.a(x.flatten(1) - self.shift).tanh()))

    torch.manual_seed(0)
    network = Tied()
    for chain in (0, 1):
        routine = HMCRoutine(network, **(OPTIONS | {"seed": chain}), chain=chain, samples=tmp_path / "samples")
        steps_of(tmp_path, 8).fit(routine, datamodule=data())
    store = SampleStore.open(tmp_path / "samples")
    assert list(zip(store.chains, store.steps, strict=True)) == list(itertools.product((0, 1), range(4, 9)))
    for state in store:
        assert state.keys() == network.state_dict().keys()
        assert torch.equal(state["a.weight"], state["b.weight"]) and torch.equal(state["shift"], torch.ones(64))
    assert not torch.equal(store[4]["a.weight"], store[9]["a.weight"])
    with pytest.raises(FileExistsError, match=r"chain 1 of another run.*--ckpt_path"):
        run(tmp_path, 4, chain=1, model=network)


def test_adaptation_reaches_the_acceptance_asked_for() -> None:
    chain = HamiltonianChain(posterior(), step_size=1e-3, leapfrog_steps=10, warmup=60, adapt_step_size=True, seed=1)
    made = [chain.step() for _ in range(120)][60:]
    assert made[0].step_size > 5e-3 and len({t.step_size for t in made}) == 1
    assert 0.6 < sum(t.acceptance for t in made) / 60 < 0.97


def test_projections_are_orthonormal() -> None:
    project = SignedSums({"w": torch.zeros(7, 3), "b": torch.zeros(4)}, 5, seed=0)
    basis = torch.stack([project({"w": e[:21].view(7, 3), "b": e[21:]}) for e in torch.eye(25)], dim=1)
    assert torch.allclose(basis @ basis.T, torch.eye(5), atol=1e-6)
    assert SignedSums({"b": torch.zeros(4)}, 16, seed=0)({"b": torch.ones(4)}).abs().tolist() == [1.0] * 4


def test_diagnostics_of_a_known_process(generator: torch.Generator) -> None:
    noise = torch.randn(20_000, 3, generator=generator, dtype=torch.float64).numpy()
    series = torch.from_numpy(lfilter([1.0], [1.0, -0.8], noise, axis=0))
    parts = {"projections": series[:, None], "potential": series[:, :1], "still": torch.ones(100, 1)}
    found = chain_diagnostics(parts)
    for name in ("ess/projections", "ess/projections_median", "ess/potential"):
        assert found[name] == pytest.approx(20_000 / 9, rel=0.15)  # (1 + 0.8) / (1 - 0.8)
    assert abs(found["rhat/projections"] - 1) < 0.01
    assert found["ess/still"] != found["ess/still"]
    drifting = series[:, 0] + torch.linspace(0, 20, 20_000)
    assert chain_diagnostics({"potential": drifting[:, None]})["rhat/potential"] > 1.5
    several = series[:600].unflatten(1, (3, 1))  # as three chains: sample sizes are within them, R-hat is over them
    together, each = chain_diagnostics({"a": several}), [chain_diagnostics({"a": several[:, k]}) for k in range(3)]
    assert together["ess/a"] == pytest.approx(min(one["ess/a"] for one in each))
    theirs = split_gelman_rubin(several, chain_dim=1, sample_dim=0)
    assert together["rhat/a"] == pytest.approx(float(theirs))


def test_test_measures_the_stored_samples(tmp_path: Path) -> None:
    routine = run(tmp_path, 11)
    (found,) = steps_of(tmp_path, 1).test(routine, datamodule=data(), verbose=False)
    store, module = SampleStore.open(tmp_path / "samples"), data()
    module.setup("test")
    probs = torch.stack([torch.func.functional_call(routine.model, s, (module.test.x,)).softmax(-1) for s in store])
    right = (probs.mean(0).argmax(-1) == module.test.y).double().mean()
    assert found["test/cls/Acc"] == pytest.approx(float(right), abs=1e-6)
    nll = -probs.mean(0).gather(1, module.test.y[:, None]).log().mean()
    assert found["test/cls/NLL"] == pytest.approx(float(nll), rel=1e-5)
    assert routine.member_scores["NLL"].shape == (8,)


def test_says_what_is_wrong(tmp_path: Path) -> None:
    routine = HMCRoutine(digits_network(), **OPTIONS)
    with pytest.raises(ValueError, match=r"comes in 2 batches.*batch_size: full"):
        steps_of(tmp_path, 2).fit(routine, datamodule=DigitsDataModule(batch_size=50, train_size=100))
    with pytest.raises(ValueError, match="reduction='sum'"):
        HMCRoutine(digits_network(), nll=nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="adapts during the warm-up"):
        steps_of(tmp_path, 2).fit(HMCRoutine(digits_network(), burn_in=0, adapt_step_size=True), datamodule=data())

    with pytest.raises(ValueError, match="acceptances mean nothing"):
        steps_of(tmp_path, 2, precision="bf16-mixed").fit(routine, datamodule=data())
