"""A network as a Bayesian model, and chains over it: on posteriors known in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import generator, normal
from torch import Tensor, nn

from tu_symmetry.posterior.hamiltonian import HamiltonianChain
from tu_symmetry.posterior.network import BayesianNetwork, categorical_nll, gaussian_kl, initialized


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Noise of variance 1."""
    return (outputs.squeeze(-1) - targets).square().sum() / 2


def classification() -> tuple[nn.Module, Tensor, Tensor]:
    x = normal(60, 4, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def chain(model: nn.Module, x: Tensor, y: Tensor, nll: Any = categorical_nll, **options: Any) -> HamiltonianChain:
    network = BayesianNetwork(model, x, y, 2.0, nll, "cpu")
    return HamiltonianChain(network, **({"step_size": 0.03, "leapfrog_steps": 5} | options))


def test_a_chain_samples_a_known_gaussian_and_leaves_the_global_random_state() -> None:
    x = normal(12, 2, seed=3) @ torch.tensor([[1.0, 0.6], [0.0, 0.8]]).double()
    y = x @ torch.tensor([1.0, -2.0]).double() + 0.5 + normal(12, seed=4)
    design = torch.cat([x, torch.ones(12, 1, dtype=torch.float64)], dim=1)
    covariance = torch.linalg.inv(design.T @ design + 2 * torch.eye(3, dtype=torch.float64))
    model = nn.Linear(2, 1, dtype=torch.float64)
    before = torch.random.get_rng_state()
    made = chain(model, x, y, gaussian_nll, step_size=0.12, seed=1)
    transitions, rows = [], []
    for _ in range(820):
        transitions.append(made.step())
        rows.append(torch.cat([made.position[name].flatten() for name in ("weight", "bias")]))
    assert torch.equal(torch.random.get_rng_state(), before)
    samples, sd = torch.stack(rows[20:]), covariance.diagonal().sqrt()
    assert 0.85 < sum(t.accepted for t in transitions) / 820 < 1
    assert ((samples.mean(0) - covariance @ design.T @ y).abs() < 4 * sd / 560**0.5).all()
    torch.testing.assert_close(samples.T.cov() / sd.outer(sd), covariance / sd.outer(sd), atol=0.14, rtol=0)
    expected = gaussian_nll(samples[-1, :2] @ x.T + samples[-1, 2], y) + samples[-1].square().sum()
    assert transitions[-1].potential == pytest.approx(float(expected))


def test_a_transition_takes_the_number_of_leapfrog_steps_asked_for() -> None:
    model, x, y = classification()
    calls = 0

    def counting(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return categorical_nll(outputs, targets)

    def count(steps: int) -> int:
        nonlocal calls
        made = chain(model, x, y, counting, leapfrog_steps=steps, step_size=1e-3)
        calls = 0
        made.step()
        return calls

    assert [count(steps) - count(1) for steps in (2, 23, 100)] == [1, 22, 99]  # int(23e-3 / 1e-3) is 22


def test_what_is_no_posterior_is_said() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4))

    model, x, y = classification()
    broken = nn.Linear(4, 3)
    nn.init.constant_(broken.weight, torch.inf)
    for make, message in (
        (lambda: chain(broken, x, y), "density is zero"),
        (lambda: chain(model, x, y, step_size=0.0), "step_size must be positive"),
        (lambda: chain(model, x, y, adapt_step_size=True), "adapts during the warm-up"),
        (lambda: chain(model, x * torch.nan, y), "NaN"),
        (lambda: chain(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), x, y), "running statistics"),
        (lambda: chain(model, x, y[1:]), "60 inputs and 59 targets"),
        (lambda: initialized(nn.Sequential(nn.Linear(4, 4), Shift()), 0), "layer 1 of type Shift"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_kl_is_that_of_torch() -> None:
    from torch.distributions import Normal, kl_divergence

    mean = {"a": normal(3, 2), "b": normal(4, seed=1)}
    std = {name: torch.rand(m.shape, generator=generator(2)).double() + 0.1 for name, m in mean.items()}
    prior = Normal(torch.tensor(0.0).double(), torch.tensor(1 / 3**0.5).double())
    expected = sum(kl_divergence(Normal(mean[n], std[n]), prior).sum() for n in mean)
    torch.testing.assert_close(gaussian_kl(mean, std, 3.0), expected)
