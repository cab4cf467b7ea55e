"""Microcanonical Langevin chains: integrators, moments in closed form, tuning, batches, and what is no posterior."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import normal
from torch import Tensor, nn

from tu_symmetry.posterior.microcanonical import MicrocanonicalChains, kick
from tu_symmetry.posterior.network import BayesianNetwork, gaussian_nll
from tu_symmetry.states import stack_states

DIMENSION = 8


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - targets).square().sum() / 2


def linear(points: int, condition: float = 1.0) -> tuple[BayesianNetwork, Tensor, Tensor]:
    """Linear regression with noise of variance 1: the posterior's mean and covariance, of that condition number."""
    basis = torch.linalg.qr(normal(DIMENSION, DIMENSION, seed=1)).Q
    spectrum = torch.logspace(0, torch.tensor(condition).log10().item(), DIMENSION, dtype=torch.float64)
    precision = basis @ spectrum.diag() @ basis.T
    rows = torch.linalg.qr(normal(points, DIMENSION, seed=2)).Q
    x = rows @ torch.linalg.cholesky(precision - 0.5 * torch.eye(DIMENSION, dtype=torch.float64)).T
    y = x @ torch.linspace(-1, 1, DIMENSION, dtype=torch.float64) + normal(points, seed=3)
    covariance = torch.linalg.inv(precision)
    model = nn.Linear(DIMENSION, 1, bias=False, dtype=torch.float64)
    return BayesianNetwork(model, x, y, 0.5, squares, "cpu"), covariance @ x.T @ y, covariance


def chains(network: BayesianNetwork, mean: Tensor, count: int = 32, **options: Any) -> MicrocanonicalChains:
    starts = {"weight": mean.expand(count, 1, DIMENSION)}
    return MicrocanonicalChains(network, starts, **({"step_size": 0.1, "seed": 1} | options))


def run(made: MicrocanonicalChains, steps: int) -> tuple[Tensor, Tensor]:
    """Positions ``[steps, chains, d]`` and energy errors."""
    positions, errors = [], []
    for _ in range(steps):
        errors.append(made.step().energy_error)
        positions.append(made.position["weight"].squeeze(1))
    return torch.stack(positions), torch.stack(errors)


def test_a_kick_solves_the_equation_of_motion() -> None:
    u = torch.nn.functional.normalize(normal(3, DIMENSION, seed=4), dim=1)
    g, time = 5 * normal(3, DIMENSION, seed=5), torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
    slow, gained = u.clone(), torch.zeros(3, dtype=torch.float64)
    for _ in range(4_000):  # the midpoint rule, in small steps
        half = time[:, None] / 4_000 / 2
        middle = slow + half * force(slow, g)
        gained -= time / 4_000 * (middle * g).sum(1)  # the kinetic energy grows as the potential falls
        slow = slow + 2 * half * force(middle, g)
    found, kinetic = kick(u, g, time)
    torch.testing.assert_close(found, slow, atol=1e-6, rtol=0)
    torch.testing.assert_close(kinetic, gained, atol=1e-5, rtol=0)
    still, nothing = kick(u, torch.zeros_like(u), time)
    torch.testing.assert_close(still, u)
    torch.testing.assert_close(nothing, torch.zeros_like(nothing))
    far, _ = kick(u, 1e30 * g, time)
    torch.testing.assert_close(far, -g / g.norm(dim=1, keepdim=True))


def force(u: Tensor, g: Tensor) -> Tensor:
    return (-g + u * (u * g).sum(1, keepdim=True)) / (DIMENSION - 1)


@pytest.mark.parametrize("integrator", ["leapfrog", "minimal_norm"])
def test_energy_errors_of_a_step_are_of_third_order(integrator: str) -> None:
    network, mean, _ = linear(20, condition=4)
    found = []
    for size in (0.04, 0.02, 0.01):
        starts = {"weight": mean + normal(64, 1, DIMENSION, seed=6)}
        made = MicrocanonicalChains(network, starts, step_size=size, integrator=integrator, seed=2)
        found.append(made.step().energy_error.square().mean().sqrt())
    for larger, smaller in ((found[0], found[1]), (found[1], found[2])):
        assert float((larger / smaller).log2()) == pytest.approx(3, abs=0.1)


def test_a_way_without_refreshments_is_reversible_and_keeps_energy_and_speed() -> None:
    network, mean, _ = linear(20, condition=10)
    made = chains(network, mean, 4, step_size=0.02, length=1e12)
    start = made.position["weight"]
    _, errors = run(made, 200)
    assert errors.sum(0).abs().max() < 0.05  # what each step gains the next ones lose
    made._state["velocity"] *= -1
    run(made, 200)
    torch.testing.assert_close(made.position["weight"], start, atol=1e-4, rtol=0)
    torch.testing.assert_close(made._state["velocity"].norm(dim=1), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("integrator", ["leapfrog", "minimal_norm"])
def test_moments_of_an_ill_conditioned_gaussian(integrator: str) -> None:
    network, mean, covariance = linear(20, condition=100)
    made = chains(network, mean, tuning=400, energy_variance=(0.01, 1e-3), integrator=integrator)
    before = torch.random.get_rng_state()
    run(made, 400)
    size, length = made.step_size.clone(), made.length.clone()
    positions, errors = run(made, 1200)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(size, made.step_size) and torch.equal(length, made.length)  # they are fixed after the tuning
    assert 2e-4 < float(errors.square().mean()) / DIMENSION < 5e-3  # 1e-3 was asked for
    assert (length < covariance.trace().sqrt() * 10).all()
    # whitened, the posterior is N(0, 1) in every direction; 32 chains give errors of the standard error of their means
    white = (positions - mean) @ torch.linalg.cholesky(torch.linalg.inv(covariance))
    for moment, wanted in ((white, 0.0), (white.square(), 1.0)):
        each = moment.mean(0)  # [chains, d]
        error = each.std(0) / len(each) ** 0.5
        assert ((each.mean(0) - wanted).abs() < 5 * error + 0.05).all(), (each.mean(0), error)


def test_chains_that_were_restored_equal_those_that_went_on() -> None:
    network, mean, _ = linear(20)
    whole, first, rest = (chains(network, mean, 3, tuning=100) for _ in range(3))
    expected, _ = run(whole, 150)
    for cut in (30, 85, 95, 120):  # in each phase, and behind them
        first = chains(network, mean, 3, tuning=100)
        run(first, cut)
        kept = first.state_dict()
        run(first, 2)  # which changes nothing of what was kept
        rest.load_state_dict(kept)
        found, _ = run(rest, 150 - cut)
        assert torch.equal(found, expected[cut:])


def test_bias_of_batches_falls_with_the_step_and_noise_shortens_it() -> None:
    points = 40
    network, mean, covariance = linear(points, condition=4)
    inverse = torch.linalg.inv(covariance)

    def excess(size: float, steps: int) -> float:
        made = chains(network, mean, 64, step_size=size, length=1.0)
        order = torch.Generator().manual_seed(0)
        total = 0.0
        for k in range(steps):
            rows = torch.randperm(points, generator=order)[:2]
            made.step((network.x[rows], network.y[rows]))
            if k >= steps // 4:
                away = made.position["weight"].squeeze(1) - mean
                total += float(((away @ inverse) * away).sum(1).mean())
        return total / (steps - steps // 4) / DIMENSION - 1

    coarse, fine = excess(0.4, 600), excess(0.05, 1600)
    assert coarse > 0.12 and abs(fine) < coarse / 2, (coarse, fine)

    def tuned(batched: bool) -> Tensor:
        made = chains(network, mean, 8, tuning=300, energy_variance=(0.01, 0.01))
        order = torch.Generator().manual_seed(0)
        for _ in range(300):
            rows = torch.randperm(points, generator=order)[:4]
            made.step((network.x[rows], network.y[rows]) if batched else None)
        return made.step_size

    assert (tuned(True) < tuned(False) / 2).all()


def test_a_step_that_leads_nowhere_leaves_the_chain_where_it_is() -> None:
    def barrier(outputs: Tensor, targets: Tensor) -> Tensor:
        far = outputs.square().sum() > 1
        return torch.where(far, torch.nan, outputs.square().sum())

    network = BayesianNetwork(nn.Linear(2, 2, bias=False), torch.eye(2), torch.zeros(2), 1.0, barrier, "cpu")
    made = MicrocanonicalChains(network, {"weight": torch.full((5, 2, 2), 0.1)}, step_size=3.0, tuning=100)
    first = made.step()
    assert not first.moved.all() and first.potential.isfinite().all()
    for _ in range(99):
        made.step()
    assert (made.step_size < 1).all() and made.position["weight"].square().sum((1, 2)).max() <= 1


def test_a_density_with_its_own_deviation_is_that_of_torch() -> None:
    outputs, y = normal(9, 2), normal(9, seed=1)
    deviation = nn.functional.softplus(outputs[:, 1]) + 1e-6
    expected = -torch.distributions.Normal(outputs[:, 0], deviation).log_prob(y).sum()
    torch.testing.assert_close(gaussian_nll(outputs, y), expected)


def test_what_cannot_be_sampled_is_said() -> None:
    network, mean, _ = linear(20)
    one = BayesianNetwork(nn.Linear(1, 1, bias=False), torch.ones(3, 1), torch.ones(3), 1.0, squares, "cpu")
    broken = stack_states([{"weight": torch.full((1, DIMENSION), torch.inf, dtype=torch.float64)}])
    for make, message in (
        (lambda: chains(network, mean, integrator="euler"), "leapfrog, minimal_norm"),
        (lambda: chains(network, mean, tuning=10), "at least 50"),
        (lambda: chains(network, mean, step_size=0.0), "step_size must be positive"),
        (lambda: chains(network, mean, energy_variance=(0.1, 0.0)), "energy_variance must be positive"),
        (lambda: MicrocanonicalChains(one, {"weight": torch.ones(2, 1, 1)}, step_size=0.1), "at least two parameters"),
        (lambda: MicrocanonicalChains(network, broken, step_size=0.1), "density is zero"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
