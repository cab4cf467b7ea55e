"""The joint optimum of weights and precisions: products with all data, informative rows, search, certificate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from laplace_oracles import Recurrent, SelfAttention, data, exact_ggn, mlp, randomize
from torch import Tensor, nn

from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.joint.data import TrainingData
from tu_symmetry.laplace.joint.informative import Informative, choose
from tu_symmetry.laplace.joint.optimum import at_mode
from tu_symmetry.laplace.joint.search import _Search
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.mode import duality_gap
from tu_symmetry.laplace.report import NotConvergedWarning
from tu_symmetry.laplace.tangent import TangentModel, evaluating

ALL = 1 << 30


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(hidden=6), (4,)),
    "convolutional": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(4, 3),
        ),
        (2, 6, 6),
    ),
    "attention": (lambda: SelfAttention(False), (5, 4)),
    "recurrent": (Recurrent, (5, 4)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 3)), (6, 4)),
}  # fmt: skip


def problem(name: str, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape = NETWORKS[name]
    x, _ = data(*shape, outputs=3, samples=samples)
    labels = (samples, 6) if name == "positions" else (samples,)
    return randomize(make()), x, torch.randint(0, 3, labels, generator=torch.Generator().manual_seed(2))


def fit(kind: str = "classification", samples: int = 30, **options: Any) -> LinearizedLaplace:
    loader = [data(4, outputs=3, kind=kind, samples=samples)]
    return LinearizedLaplace(mlp(hidden=6), kind, **{"prior": "per_layer", **options}).fit(loader)  # type: ignore[arg-type]


def chunked(la: LinearizedLaplace) -> TrainingData:
    """Its data in two chunks, without linearizations."""
    ((x, y),) = la.train_loader or []
    half = len(x) // 2 + 1
    with evaluating(la.model):
        return TrainingData(la.tangent, la.likelihood, [(x[:half], y[:half]), (x[half:], y[half:])], budget=0)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_products_with_all_data_are_those_of_the_network(name: str, kept: bool) -> None:
    model, x, y = problem(name, 11)
    la = LinearizedLaplace(model)
    loader = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    tangent = TangentModel(model, la.tangent.names)
    with evaluating(model):
        found = TrainingData(tangent, la.likelihood, loader, budget=ALL if kept else 0)
        assert (len(found.outputs), found.kept) == ((1, 1) if kept else (3, 0))
        vector = torch.randn(tangent.size, dtype=torch.float64)
        outputs, expected = tangent.jvp(x, vector)
        cotangent = torch.randn_like(outputs)
        torch.testing.assert_close(torch.cat(found.outputs), outputs, rtol=1e-12, atol=1e-12)
        for _ in range(2):  # what is kept serves again
            torch.testing.assert_close(torch.cat(found.push(vector)), expected, rtol=1e-12, atol=1e-12)
            pieces = cotangent.split([len(o) for o in found.outputs])
            torch.testing.assert_close(found.pull(pieces), tangent.vjp(x, cotangent), rtol=1e-12, atol=1e-12)
    assert not any(p.grad is not None for p in model.parameters())


def test_the_longest_columns_are_chosen() -> None:
    la = fit()
    found = chunked(la)
    roots = [la.likelihood.hessian_root(o, t) for o, t in zip(found.outputs, found.targets, strict=True)]
    squares = torch.cat([root.square().sum(-1).flatten() for root in roots])
    chosen = choose(found, found.outputs, 7)
    taken = torch.cat([mask.flatten() for masks in chosen.masks for mask in masks])
    assert int(taken.sum()) == 7
    assert float(squares[taken].min()) >= float(squares[~taken].max())
    assert chosen.share == pytest.approx(float(squares[taken].sum() / squares.sum()), rel=1e-12)
    assert chosen.excess == pytest.approx(float(squares[taken].mean() / squares.mean()), rel=1e-12)
    every = choose(found, found.outputs, 1000)
    assert (every.share, every.excess) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("prior", ["single", "per_layer"])
def test_all_rows_make_the_whole_curvature(prior: str) -> None:
    la = fit(prior=prior, curvature="diag")
    found = chunked(la)
    own = Informative(found, la.prior_groups, found.outputs, choose(found, found.outputs, 1000))
    ((x, y),) = la.train_loader or []
    whole = exact_ggn(la.model, la.tangent.names, x, y, "classification")
    torch.testing.assert_close(own.rows.mT @ own.rows, whole, rtol=1e-10, atol=1e-12)
    number = la.prior_groups.spread(torch.arange(len(la.prior_groups)))
    for g, gram in enumerate(own.grams):
        rows = own.rows[:, number == g]
        torch.testing.assert_close(gram, rows @ rows.mT, rtol=1e-10, atol=1e-12)
    rho = torch.linspace(-1, 2, len(la.prior_groups), dtype=torch.float64)
    vector = torch.randn(la.tangent.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = torch.linalg.solve(whole / 0.3 + torch.diag(la.prior_groups.spread(rho.exp())), vector)
    torch.testing.assert_close(own.covariance_product(rho, 0.3, vector), expected, rtol=1e-8, atol=1e-10)
    lost = own.covariance_product(torch.full_like(rho, -45.0), 1.0, vector)  # the prior, in rounding
    assert bool(lost.isfinite().all()) and float(lost @ vector) > 0


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_optimum_of_their_model_is_stationary_in_weights_and_precisions(kind: str) -> None:
    """Against the model written out with dense matrices, its derivatives by autograd; bounds hold."""
    la = fit(kind)
    found, groups, fitted = chunked(la), la.prior_groups, replace(la.fitted, hyperprior=Hyperprior(std=0.5))
    search = _Search(fitted, found, ALL, False)
    point = search.start()
    variance = math.exp(point.tau)
    own = Informative(found, groups, found.outputs, choose(found, found.outputs, 1000))
    alone = search.gradient(point) - search.precision(point) * point.theta

    def model(theta: Tensor, rho: Tensor) -> Tensor:
        change = theta - point.theta
        energy = 0.5 * (rho.exp()[groups.spread(torch.arange(len(groups)))] * theta.square()).sum()
        spectrum = fitted.curvature.determinants
        logs, counts = spectrum.logs, spectrum.counts  # type: ignore[attr-defined]
        energy = energy + 0.5 * (counts * nn.functional.softplus(logs - point.tau - rho[spectrum.groups])).sum()
        energy = energy + (rho - search.center).square().sum() / (2 * search.hyperprior.std**2)
        return alone @ change + 0.5 * (own.rows @ change).square().sum() / variance + energy

    theta, rho = point.theta, point.rho
    values = [float(model(theta, rho))]
    for _ in range(30):  # each moves precisions by a factor of e^2 at most
        before = rho
        theta, rho = own.optimum(
            point.theta, alone, rho, variance, lambda r: search.energy(r, point.tau), (search.low, search.high)
        )
        assert float((rho - before).abs().max()) <= 2 + 1e-12
        values.append(float(model(theta, rho)))
    assert all(b <= a + 1e-9 for a, b in pairwise(values)) and values[-1] < values[0] - 0.1
    theta, rho = theta.requires_grad_(), rho.clone().requires_grad_()
    slopes = torch.autograd.grad(model(theta, rho), (theta, rho))
    assert bool(((rho > search.low + 1e-9) & (rho < search.high - 1e-9)).all())
    assert float(slopes[0].abs().max()) < 1e-8 and float(slopes[1].abs().max()) < 1e-3
    low, start = torch.stack([search.high[0], search.low[1]]), torch.stack([search.high[0], point.rho[1]])
    _, moved = own.optimum(point.theta, alone, start, 1.0, lambda r: search.energy(r, point.tau), (low, search.high))
    assert float(moved[0]) == float(search.high[0]) and float(moved[1]) != float(start[1])


def test_the_way_to_the_optimum_of_few_rows_is_as_steep_as_the_descent() -> None:
    """Or the descent itself: a way that mostly changes precisions leads nowhere, since these are the best already."""
    la = fit(samples=200)
    found, steep = chunked(la), []
    search = _Search(replace(la.fitted, hyperprior=Hyperprior(std=1.0)), found, ALL, False)
    point = search.start()
    for _ in range(12):
        own = Informative(found, la.prior_groups, point.linear, choose(found, point.linear, 40))
        gradient = search.gradient(point)
        direction, norm = search.modeled(own, point, gradient)
        steep.append(float(gradient @ direction) / norm**2)
        search.span.add(direction / norm)
        point = search.improve(point)
    assert min(steep) >= 1 - 1e-9 and max(steep) > 1.01, steep


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("classification", {}),
        ("classification", {"prior": "single", "curvature": "diag"}),
        ("classification", {"curvature": "full"}),
        ("classification", {"curvature": "last_layer", "prior": "single"}),
        ("regression", {}),
        ("regression", {"noise_variance": 0.3, "prior": "per_tensor"}),
    ],
)
def test_it_ends_at_one_stationary_point_with_rows_and_without(kind: str, options: dict[str, Any]) -> None:
    """The precisions are those of the weights; the gap says that the weights are the mode; falling all the way."""
    hyperprior, objectives, precisions = Hyperprior(std=0.5), [], []
    for memory in (None, 0):  # 0: no gradients of informative observations, no linearizations
        la, values = fit(kind, **options), list[float]()

        def note(info: dict[str, Any], values: list[float] = values) -> None:
            values.append(info["objective"])

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = la.optimize_evidence(hyperprior=hyperprior, memory=memory, progress=note)
        assert result.converged and result.gradient_norm <= 1e-6 and result.gap <= 1e-6
        norms = la.prior_groups.total(la.theta.square())
        slopes = la.log_precision.exp() * norms - la.fitted.gamma()
        slopes += 2 * (la.log_precision - la.fitted.center.log()) / hyperprior.std**2
        assert float(slopes.abs().max()) < 1e-4
        assert all(b <= a + 1e-9 for a, b in pairwise(values)) and values[0] > values[-1]
        assert la.fitted.objective() == pytest.approx(values[-1], abs=1e-9)
        assert la.log_marginal_likelihood() == pytest.approx(result.log_marginal_likelihood, rel=1e-12)
        objectives.append(la.fitted.objective())
        precisions.append(la.log_precision)
    assert objectives[0] == pytest.approx(objectives[1], abs=1e-7)
    torch.testing.assert_close(*precisions, rtol=0, atol=1e-4)


def test_many_groups_are_stretched_to_the_same_point() -> None:
    """Without informative observations each group's weights are directions of their own, or with all others."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = randomize(nn.Sequential(*layers, nn.Linear(4, 3)))
    loader = [data(4, outputs=3, samples=30)]
    found = []
    for memory in (None, 0):
        la = LinearizedLaplace(model, prior="per_layer").fit(loader)
        assert la.optimize_evidence(memory=memory).converged
        found.append(la.fitted.objective())
    assert found[0] == pytest.approx(found[1], abs=1e-7)


def test_a_flat_hyperprior_prunes_groups_that_the_evidence_sends_to_infinity() -> None:
    la = fit(samples=12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.optimize_evidence(hyperprior=None)
    for row in la.report():
        assert row.pruned == row.at_cap == (row.squared_norm < 1e-20)


def test_other_data_than_those_of_the_fit_are_refused() -> None:
    la = fit()
    ((x, y),) = la.train_loader or []
    with pytest.raises(ValueError, match="30 samples, and the loader now gives 20"):
        la.optimize_evidence([(x[:20], y[:20])])


@pytest.mark.parametrize("precision", [0.01, 30.0])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_certificate_bounds_the_distance_to_the_optimum(kind: str, precision: float) -> None:
    la = fit(kind, evaluate_at="tangent_mode", **({"noise_variance": 0.4} if kind == "regression" else {}))
    la.set_precision(precision)
    best = at_mode(la.fitted, la.train_loader or [], tolerance=1e-10)
    assert best.solution.gap < 1e-12
    noise, generator = la.noise_variance, torch.Generator().manual_seed(0)
    weights = la.fitted.groups.spread(la.log_precision.exp())
    ((x, y),) = la.train_loader or []
    for size in (1e-3, 0.1, 1.0, 10.0):
        theta = best.theta + size * torch.randn(len(best.theta), generator=generator, dtype=torch.float64)
        outputs, change = la.tangent.jvp(x, theta - la.tangent.point())
        targets = la.likelihood.targets(outputs, y)
        loss = float(la.likelihood.loss(outputs + change, targets).sum()) / noise
        gradient = la.tangent.vjp(x, la.likelihood.residual(outputs + change, targets)) / noise + weights * theta
        lowest_loss = best.solution.loss / noise
        distance = (loss + 0.5 * weights @ theta.square()) - (lowest_loss + 0.5 * weights @ best.theta.square())
        assert 0 < float(distance) <= duality_gap(gradient, weights) * (1 + 1e-9)


@pytest.mark.parametrize("iterations", [1, 3])
def test_the_result_of_a_search_that_stopped_early_is_certified(iterations: int) -> None:
    la = fit()
    with pytest.warns(NotConvergedWarning, match=f"{iterations} iterations"):
        result = la.optimize_evidence(max_iterations=iterations)
    assert result.iterations == iterations and not result.converged
    best = at_mode(la.fitted, la.train_loader or [], tolerance=1e-10)
    assert 0 <= best.log_evidence() - result.log_marginal_likelihood <= result.gap
    assert result.gap == la.solution.gap
