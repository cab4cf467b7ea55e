"""Samplers on posteriors known in closed form, and against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling_oracles import (
    HMCChunk,
    deep_ensemble,
    effective_sample_size,
    hmc_samples,
    mean_field_vi,
)
from scipy.signal import lfilter
from torch import Tensor, nn

from tu_symmetry.posterior.network import categorical_nll, derived_seed, gaussian_kl, initialized


@pytest.fixture(autouse=True)
def global_random_state_is_untouched() -> Any:
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(torch.random.get_rng_state(), before)


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Noise of variance 1."""
    return (outputs.squeeze(-1) - targets).square().sum() / 2


def linear_problem(n: int = 12) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """A linear model with bias, data, and the exact posterior's mean and covariance for prior precision 2."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64) @ torch.tensor([[1.0, 0.6], [0.0, 0.8]]).double()
    y = x @ torch.tensor([1.0, -2.0]).double() + 0.5 + torch.randn(n, generator=g, dtype=torch.float64)
    design = torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], dim=1)
    covariance = torch.linalg.inv(design.T @ design + 2 * torch.eye(3, dtype=torch.float64))
    with torch.random.fork_rng():
        model = nn.Linear(2, 1, dtype=torch.float64)
    return model, x, y, covariance @ design.T @ y, covariance


def flat(states: dict[str, Tensor], prefix: str = "") -> Tensor:
    return torch.cat([states[f"{prefix}{name}"].flatten(1) for name in ("weight", "bias")], dim=1)


def classification(n: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, x, y


def built(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        return make()


def run_hmc(model: nn.Module, x: Tensor, y: Tensor, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "num_samples": 6, "burn_in": 3, "step_size": 0.03, "leapfrog_steps": 5, "seed": 5, "chunk_size": 2
    }  # fmt: skip
    return hmc_samples(model, x, y, **(arguments | changes))


def test_hmc_samples_a_known_gaussian() -> None:
    model, x, y, mean, covariance = linear_problem()
    chain = hmc_samples(
        model, x, y, num_samples=1000, burn_in=20, step_size=0.12, leapfrog_steps=5, prior_precision=2.0,
        nll=gaussian_nll, seed=1, chunk_size=500,
    )  # fmt: skip
    samples = flat(chain.states)
    sd = covariance.diagonal().sqrt()
    assert 0.85 < chain.acceptance_rate < 1
    assert ((samples.mean(0) - mean).abs() < 4 * sd / 700**0.5).all()
    torch.testing.assert_close(samples.T.cov() / sd.outer(sd), covariance / sd.outer(sd), atol=0.12, rtol=0)
    expected = [-float(gaussian_nll(s[:2] @ x.T + s[2], y)) / len(x) for s in samples[:5]]
    torch.testing.assert_close(chain.log_likelihood[:5], torch.tensor(expected).double())
    assert 350 < chain.effective_sample_size["parameters, minimum"] <= 1000 * 3


def test_hmc_takes_the_number_of_leapfrog_steps_asked_for() -> None:
    model, x, y = classification()
    calls = 0

    def counting(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return categorical_nll(outputs, targets)

    def count(steps: int) -> int:
        nonlocal calls
        calls = 0
        run_hmc(model, x, y, num_samples=1, burn_in=0, leapfrog_steps=steps, step_size=1e-3, nll=counting)
        return calls

    assert [count(steps) - count(1) for steps in (2, 23, 100)] == [1, 22, 99]  # int(23e-3 / 1e-3) is 22


def test_hmc_resumes_and_does_not_depend_on_chunks() -> None:
    model, x, y = classification()
    chunks: list[HMCChunk] = []
    whole = run_hmc(model, x, y, on_chunk=chunks.append)
    assert [c.transitions for c in chunks] == [2, 3, 5, 7, 9]
    assert [len(c.log_likelihood) for c in chunks] == [0, 0, 2, 2, 2]
    assert all(t.shape == (6, *model.state_dict()[name].shape) for name, t in whole.states.items())
    for keep in (1, 2, 4, 5):
        later: list[HMCChunk] = []
        resumed = run_hmc(model, x, y, resume=chunks[:keep], on_chunk=later.append, chunk_size=3)
        assert all(torch.equal(resumed.states[name], whole.states[name]) for name in whole.states)
        assert torch.equal(resumed.log_likelihood, whole.log_likelihood)
        assert resumed.acceptance_rate == pytest.approx(whole.acceptance_rate)
        assert resumed.effective_sample_size == whole.effective_sample_size
        assert sum(len(c.log_likelihood) for c in later) == 6 - sum(len(c.log_likelihood) for c in chunks[:keep])
    other = run_hmc(model, x, y, seed=6)
    assert not torch.equal(other.states["0.weight"], whole.states["0.weight"])


def test_hmc_says_what_is_wrong() -> None:
    model, x, y = classification()
    chunks: list[HMCChunk] = []
    run_hmc(model, x, y, on_chunk=chunks.append)
    with pytest.raises(ValueError, match="does not pass there"):
        run_hmc(model, x, y, resume=chunks[3:4])
    with pytest.raises(ValueError, match="does not pass there"):
        run_hmc(model, x, y, resume=chunks, num_samples=2)
    with pytest.raises(ValueError, match="another network"):
        run_hmc(model, x, y, initial_state={"0.weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match="no proposal was accepted"):
        run_hmc(model, x, y, step_size=30.0)
    with pytest.raises(ValueError, match="density is zero"):
        run_hmc(model, x, y, initial_state={n: t * torch.inf for n, t in model.state_dict().items()})
    with pytest.raises(ValueError, match="step_size must be positive"):
        run_hmc(model, x, y, step_size=0.0)
    with pytest.raises(ValueError, match="NaN"):
        run_hmc(model, x * torch.nan, y)
    with pytest.raises(ValueError, match="running statistics"):
        run_hmc(built(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))), x, y)
    with pytest.raises(ValueError, match="60 inputs and 59 targets"):
        run_hmc(model, x, y[1:])


def test_effective_sample_size_of_a_known_process() -> None:
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(10_000, 3, generator=g, dtype=torch.float64)
    chain = torch.from_numpy(lfilter([1.0], [1.0, -0.8], noise.numpy(), axis=0))  # chain[t] = 0.8 chain[t-1] + noise[t]
    sizes = effective_sample_size({"w": chain, "dead": torch.zeros(10_000, 1)}, noise[:, 0])
    expected = 10_000 * (1 - 0.8) / (1 + 0.8)  # of an AR(1) process
    assert sizes["parameters, median"] == pytest.approx(expected, rel=0.15)
    assert sizes["parameters, minimum"] <= sizes["parameters, median"]
    assert sizes["log-likelihood"] == pytest.approx(10_000, rel=0.1)


@pytest.mark.parametrize("members", [1, 3])
def test_ensemble_equals_plain_training_loops(members: int) -> None:
    model, x, y = classification()
    settings: dict[str, Any] = {"epochs": 4, "batch_size": 25, "learning_rate": 5e-3, "prior_precision": 2.0, "seed": 7}
    ensemble = deep_ensemble(model.double(), x.double(), y, members=members, **settings)
    for m in range(members):
        net = initialized(model, derived_seed(7, 1, m))
        order = torch.Generator().manual_seed(derived_seed(7, 2, m))
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
        for _ in range(4):
            for batch in torch.randperm(60, generator=order).split(25):
                penalty = sum(p.square().sum() for p in net.parameters())
                loss = F.cross_entropy(net(x[batch].double()), y[batch]) + 2.0 / (2 * 60) * penalty
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for name, expected in net.state_dict().items():
            torch.testing.assert_close(ensemble.states[name][m], expected, atol=1e-10, rtol=1e-8)
    assert ensemble.loss.shape == (4, members) and (ensemble.loss[-1] < ensemble.loss[0]).all()


def test_ensemble_members_differ_and_do_not_depend_on_their_number() -> None:
    model, x, y = classification()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    seen: list[dict[str, Any]] = []
    two = deep_ensemble(model, x, y, members=2, epochs=2, seed=1, progress=seen.append).states
    three = deep_ensemble(model, x, y, members=3, epochs=2, seed=1).states
    assert (two["0.weight"][0] - two["0.weight"][1]).abs().max() > 0.05
    torch.testing.assert_close(two["0.weight"], three["0.weight"][:2], atol=1e-6, rtol=0)
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
    assert [(s["done"], s["total"]) for s in seen] == [(1, 2), (2, 2)]


def test_layers_that_cannot_be_initialized_are_named() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4))

    with pytest.raises(ValueError, match="layer 1 of type Shift"):
        initialized(built(lambda: nn.Sequential(nn.Linear(4, 4), Shift())), 0)


def test_vi_reaches_the_mean_field_optimum() -> None:
    model, x, y, mean, covariance = linear_problem()
    fit = mean_field_vi(
        model, x, y, epochs=3000, batch_size=len(x), learning_rate=5e-3, prior_precision=2.0, nll=gaussian_nll, seed=2
    )
    precision = torch.linalg.inv(covariance)
    optimum = precision.diagonal().rsqrt()  # Bishop, PRML, section 10.1.2: exact means, inverse diagonal precision
    means, stds = (torch.cat([s["weight"].flatten(), s["bias"]]) for s in (fit.mean, fit.std))
    torch.testing.assert_close(means / optimum, mean / optimum, atol=0.25, rtol=0)
    torch.testing.assert_close(stds, optimum, atol=0, rtol=0.12)
    assert ((covariance.diagonal().sqrt() / optimum) > 1.05).any()  # the optimum is not the marginals
    n = len(x)
    cov_y = x @ x.T / 2 + 0.5 + torch.eye(n, dtype=torch.float64)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(n, dtype=torch.float64), cov_y).log_prob(y)
    evidence = evidence + n / 2 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))  # nll has no constant
    gap = (precision.diagonal().log().sum() - torch.logdet(precision)) / 2  # KL of the optimum to the posterior
    assert float(fit.elbo[-300:].mean()) == pytest.approx(float(evidence - gap), abs=0.25)


def test_vi_starts_where_it_should_and_is_reproducible() -> None:
    model, x, y = classification()
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 25, "initial_std": 0.03, "seed": 4}
    still = mean_field_vi(model, x, y, **(settings | {"learning_rate": 1e-12}))
    start = initialized(model, derived_seed(4, 1, 0)).state_dict()
    for name, mean in still.mean.items():
        torch.testing.assert_close(mean, start[name], atol=1e-7, rtol=0)
        torch.testing.assert_close(still.std[name], torch.full_like(mean, 0.03), atol=1e-6, rtol=0)
    first, second = (mean_field_vi(model, x, y, **settings) for _ in range(2))
    assert all(torch.equal(first.mean[n], second.mean[n]) and torch.equal(first.std[n], second.std[n]) for n in start)
    assert torch.equal(first.elbo, second.elbo)


def test_kl_is_that_of_torch() -> None:
    g = torch.Generator().manual_seed(0)
    mean = {"a": torch.randn(3, 2, generator=g).double(), "b": torch.randn(4, generator=g).double()}
    std = {name: torch.rand(m.shape, generator=g).double() + 0.1 for name, m in mean.items()}
    prior = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1 / 3**0.5).double())
    expected = sum(
        torch.distributions.kl_divergence(torch.distributions.Normal(mean[n], std[n]), prior).sum() for n in mean
    )
    torch.testing.assert_close(gaussian_kl(mean, std, 3.0), expected)


def test_tied_weights_and_buffers_come_back_in_the_states() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.register_buffer("offset", torch.arange(4.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu()) + self.offset

    model, (_, x, y) = initialized(built(Tied), 0), classification()
    states = run_hmc(model, x, y, step_size=0.01).states
    assert states.keys() == model.state_dict().keys()
    assert torch.equal(states["first.weight"], states["second.weight"])
    assert torch.equal(states["offset"], torch.arange(4.0).expand(6, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    model, x, y = classification()
    before = torch.cuda.get_rng_state()
    chain = run_hmc(model, x, y, device="cuda")
    ensemble = deep_ensemble(model, x, y, members=2, epochs=2, device="cuda")
    fit = mean_field_vi(model, x, y, epochs=2, device="cuda")
    for tensor in (chain.states["0.weight"], ensemble.states["0.weight"], fit.mean["0.weight"]):
        assert tensor.is_cuda and tensor.isfinite().all()
    host = deep_ensemble(model, x, y, members=2, epochs=2)
    torch.testing.assert_close(ensemble.states["0.weight"].cpu(), host.states["0.weight"], atol=1e-4, rtol=0)
    assert torch.equal(torch.cuda.get_rng_state(), before)
