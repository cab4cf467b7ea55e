"""The evidence and the weights that maximize it, against closed forms and dense oracles, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from laplace_oracles import data, dense_covariance, dense_curvature, jacobian, losses, mlp, randomize, split
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import vmap

from tu_symmetry.laplace.blocks import CoupledBlock, DenseBlock, DiagonalBlock
from tu_symmetry.laplace.determinants import FLAT, CoupledDeterminants, Hyperprior, Noise, Spectrum
from tu_symmetry.laplace.groups import PriorGroups, centers, prior_groups
from tu_symmetry.laplace.joint.optimum import at_mode
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import PrunedGroupWarning
from tu_symmetry.laplace.tangent import Slot


def problem(kind: str = "classification") -> tuple[nn.Module, Tensor, Tensor]:
    """A network with weights of its own kind, on data of another network that it could have learned."""
    model, teacher = mlp(), mlp(seed=1, scale=2.0)
    x, noise = data(4, outputs=3, kind="regression", samples=20)
    y = teacher(x).detach() + 0.3 * noise
    return model, x, y if kind == "regression" else y.argmax(-1)


def fitted(model: nn.Module, x: Tensor, y: Tensor, kind: str, **options: Any) -> LinearizedLaplace:
    return LinearizedLaplace(model, kind, **options).fit([(x[:10], y[:10]), (x[10:], y[10:])])  # type: ignore[arg-type]


def tangent_problem(la: LinearizedLaplace, x: Tensor) -> tuple[Tensor, Tensor]:
    """Jacobian ``[samples * outputs, size]`` and offset ``f - J theta~`` ``[samples * outputs]``."""
    jac = jacobian(la.model, la.tangent.names, x).flatten(0, 1)
    point, function = split(la.model, la.tangent.names)
    return jac, function(point, x).detach().flatten() - jac @ point


def spread(la: LinearizedLaplace) -> Tensor:
    return la.prior_groups.spread(la.log_precision.exp())


@pytest.mark.parametrize("prior", ["single", "per_layer", "per_tensor"])
def test_evidence_of_a_network_is_that_of_its_tangent_model(prior: str) -> None:
    """A Gaussian process: y - (f - J theta~) ~ N(0, v I + J Lambda^-1 J^T)."""
    model, x, y = problem("regression")
    la = fitted(model, x, y, "regression", prior=prior, curvature="full", noise_variance=0.2)
    la.set_precision(3.0)
    if prior == "per_layer":
        la.set_precision({"0": 0.4, "2": 5.0})
    if prior == "per_tensor":
        la.set_precision(torch.tensor([0.4, 5.0, 0.7, 2.0]))
        assert la.prior_groups.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    jac, offset = tangent_problem(la, x)
    covariance = 0.2 * torch.eye(60, dtype=torch.float64) + (jac / spread(la)) @ jac.T
    exact = torch.distributions.MultivariateNormal(offset, covariance).log_prob(y.flatten())
    assert la.log_marginal_likelihood() == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("curvature", ["full", "kfac", "diag"])
@pytest.mark.parametrize("prior", ["single", "per_layer"])
def test_weights_are_the_ridge_solution(prior: str, curvature: str) -> None:
    """Whatever the curvature, which is only a preconditioner here."""
    model, x, y = problem("regression")
    la = fitted(model, x, y, "regression", prior=prior, curvature=curvature, noise_variance=0.2)
    la.set_precision(0.7)
    jac, offset = tangent_problem(la, x)
    exact = torch.linalg.solve(jac.T @ jac / 0.2 + torch.diag(spread(la)), jac.T @ (y.flatten() - offset) / 0.2)
    mode = at_mode(la.fitted, la.train_loader or [], tolerance=1e-9).solution
    assert mode.converged and mode.gradient_norm <= 1e-9
    torch.testing.assert_close(mode.theta, exact, rtol=1e-7, atol=1e-8)
    residual = y.flatten() - offset - jac @ exact
    assert mode.loss == pytest.approx(0.5 * float(residual.square().sum()), rel=1e-9)


@pytest.mark.parametrize("hyperprior", [None, Hyperprior(std=0.5)])
@pytest.mark.parametrize("prior", ["single", "per_layer"])
def test_precisions_and_noise_maximize_the_evidence(prior: str, hyperprior: Hyperprior | None) -> None:
    """Against scipy on the exact evidence, in which the weights are integrated out."""
    model, x, y = problem("regression")
    la = fitted(model, x, y, "regression", prior=prior, curvature="full")
    jac, offset = tangent_problem(la, x)

    def negative(logs: Any) -> float:
        rho, tau = torch.as_tensor(logs[:-1]), float(logs[-1])
        covariance = math.exp(tau) * torch.eye(60, dtype=torch.float64) + (
            (jac / la.prior_groups.spread(rho.exp())) @ jac.T
        )
        normal = torch.distributions.MultivariateNormal(offset, covariance)
        energy = 0.0 if hyperprior is None else hyperprior.energy(rho, la.fitted.center.log())
        return energy - float(normal.log_prob(y.flatten()))

    start = [*la.fitted.center.log().tolist(), 0.0]
    exact = minimize(negative, start, method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-11, "maxiter": 5000})
    found = la.optimize_evidence(hyperprior=hyperprior, tolerance=1e-5)
    assert found.converged
    assert [*la.log_precision.tolist(), math.log(la.noise_variance)] == pytest.approx(exact.x.tolist(), abs=2e-4)
    own = hyperprior.energy(la.log_precision, la.fitted.center.log()) if hyperprior else 0.0
    assert found.log_marginal_likelihood - own == pytest.approx(-exact.fun, abs=1e-8)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("units", [0, 4, 1e5])
def test_noise_of_a_perfect_fit_is_refused_whatever_its_rounding(units: float, scale: float) -> None:
    model, x = randomize(nn.Linear(4, 1, bias=False)), data(4, outputs=1, samples=30)[0]
    model.load_state_dict({name: scale * t for name, t in model.state_dict().items()})
    y = model(x).detach()
    sign = torch.where(torch.arange(y.numel()).view(y.shape) % 3 == 0, -1, 1)
    error = units * torch.finfo(torch.float64).eps * y.square().mean().sqrt()
    la = fitted(model, x, y + sign * error, "regression", prior="single", evaluate_at="map")
    if units > 100:
        la.optimize_evidence()
        assert error**2 / 2 < la.noise_variance < 2 * error**2
        return
    with pytest.raises(ValueError, match="noise_variance"):
        la.optimize_evidence()


@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
@pytest.mark.parametrize(
    ("curvature", "prior"),
    [("last_layer", "single"), *((c, p) for c in ("full", "kfac", "diag") for p in ("single", "per_layer"))],
)
def test_laplace_evidence_by_its_definition(prior: str, curvature: str, evaluate_at: str) -> None:
    model, x, y = problem()
    la = fitted(model, x, y, "classification", prior=prior, curvature=curvature, evaluate_at=evaluate_at)
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(len(la.prior_groups), generator=generator, dtype=torch.float64)
    la.set_precision(dict(zip(la.prior_groups.names, (4 * noise).exp().tolist(), strict=True)))
    found = la.log_marginal_likelihood()
    jac, offset = tangent_problem(la, x)
    point, _ = split(model, la.tangent.names)
    assert torch.equal(la.theta, point) == (evaluate_at == "map")
    loss = vmap(losses("classification"))((offset + jac @ la.theta).view(20, 3), y).sum()
    prior_diagonal = spread(la)
    ratio = torch.logdet(dense_curvature(la) + torch.diag(prior_diagonal)) - prior_diagonal.log().sum()
    exact = -loss - 0.5 * (prior_diagonal * la.theta.square()).sum() - 0.5 * ratio
    assert found == pytest.approx(float(exact), rel=1e-10)
    sizes = [int(s) for s in la.prior_groups.sizes]  # groups of this test are contiguous
    for row, diagonal in zip(la.report(), dense_covariance(la).diagonal().split(sizes), strict=True):
        assert row.gamma == pytest.approx(float(row.size - row.precision * diagonal.sum()), rel=1e-8)


@pytest.mark.parametrize("curvature", ["kfac", "full", "diag", "last_layer"])
def test_batches_and_their_order_do_not_matter(curvature: str) -> None:
    model, x, y = problem()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    loaders = [
        [(x, y)],
        [(x[i : i + 3], y[i : i + 3]) for i in range(0, 20, 3)],
        [(x[order][i : i + 7], y[order][i : i + 7]) for i in (14, 0, 7)],
    ]
    found, predicted = [], []
    for loader in loaders:
        la = LinearizedLaplace(model, prior="single", curvature=curvature, evaluate_at="map")  # type: ignore[arg-type]
        la.fit(loader)
        found.append((la.log_marginal_likelihood(), la.optimize_evidence(hyperprior=None).log_marginal_likelihood))
        predicted.append(la.function_covariance(x[:4])[1])
    for other, values in zip(found[1:], predicted[1:], strict=True):
        assert other == pytest.approx(found[0], rel=1e-11)
        torch.testing.assert_close(values, predicted[0], rtol=1e-9, atol=1e-12)


class DeadBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alive, self.dead = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.alive(x) + self.dead(1e-9 * x)


@pytest.mark.parametrize("hyperprior", ["default", None])
def test_a_group_that_the_data_do_not_determine_is_pruned_with_a_warning(hyperprior: Any) -> None:
    """Its precision goes to the cap, or stays at the hyperprior's center; it adds no uncertainty all the same."""
    model, (x, y) = randomize(DeadBranch()), data(4, outputs=3, samples=20)
    la = fitted(model, x, y, "classification", prior="per_layer")
    with pytest.warns(PrunedGroupWarning, match="dead"):
        la.optimize_evidence(hyperprior=hyperprior)
    rows = {row.name: row for row in la.report()}
    assert rows["dead"].pruned and rows["dead"].at_cap == (hyperprior is None)
    assert not rows["alive"].pruned and not rows["alive"].at_cap
    factor = FLAT.cap if hyperprior is None else 1.0
    assert rows["dead"].precision == pytest.approx(rows["dead"].center * factor, rel=1e-6)


def test_a_narrow_hyperprior_wins_and_a_wide_one_is_none() -> None:
    model, x, y = problem()
    la = fitted(model, x, y, "classification", prior="per_layer", evaluate_at="map")
    la.optimize_evidence(hyperprior=Hyperprior(std=1e-4))
    torch.testing.assert_close(la.log_precision, la.fitted.center.log(), rtol=0, atol=1e-5)
    la.optimize_evidence(hyperprior=Hyperprior(std=1e4))
    wide = la.log_precision
    la.optimize_evidence(hyperprior=None)
    torch.testing.assert_close(la.log_precision, wide, rtol=0, atol=1e-5)
    la.optimize_evidence(hyperprior=Hyperprior(std=1e4, cap=1.01))
    assert float((la.log_precision - la.fitted.center.log()).abs().max()) <= math.log(1.01) + 1e-12


@pytest.mark.parametrize("options", [{"std": 0.0}, {"std": -1.0}, {"std": math.nan}, {"cap": 1.0}])
def test_hyperpriors_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="std > 0 and cap > 1"):
        Hyperprior(**options)


def test_centers_move_with_the_scale_of_the_weights() -> None:
    """Groups of zeros have the center 1."""
    slots = {"a": Slot(0, 4, (4,)), "b": Slot(4, 6, (2,)), "zero": Slot(6, 9, (3,))}
    point = torch.tensor([1.0, -1, 1, 1, 3, 4, 0, 0, 0], dtype=torch.float64)
    scaled = point * torch.tensor([10.0] * 4 + [1.0] * 5, dtype=torch.float64)
    groups = prior_groups(slots, "per_tensor")
    assert centers(groups, point).tolist() == pytest.approx([1.0, 2 / 25, 1.0])
    assert centers(groups, scaled).tolist() == pytest.approx([0.01, 2 / 25, 1.0])


def one_group(size: int) -> PriorGroups:
    return PriorGroups({"w": Slot(0, size, (size,))}, {"w": "all"})


def test_binned_eigenvalues_are_as_good_as_all_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    values = (6 * torch.randn(200_000, generator=generator, dtype=torch.float64)).exp()
    values[:1000] = 0
    block = DiagonalBlock("w", 0, torch.tensor(0), values)
    spectrum = Spectrum.of([block], one_group(len(values)))
    assert len(spectrum.counts) < 4096
    for rho in (-8.0, 0.0, 5.0):
        point, lam = torch.tensor([rho], dtype=torch.float64), math.exp(rho)
        assert spectrum.log_det_ratio(point, 0.3) == pytest.approx(
            float((values / math.exp(0.3) / lam).log1p().sum()), rel=1e-5
        )
        exact = (values / (values + math.exp(0.3) * lam)).sum()
        assert float(spectrum.gamma(point, 0.3)) == pytest.approx(float(exact), rel=1e-5)


@pytest.mark.parametrize("hyperprior", [Hyperprior(), FLAT, Hyperprior(std=0.1), Hyperprior(std=100.0, cap=1e12)])
def test_precisions_are_the_root_that_bisection_finds_from_wherever_they_start(hyperprior: Hyperprior) -> None:
    """Also at an end of the range, and for groups without weights or without eigenvalues."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for case in range(12):
        logs, counts = 8 * normal(6, 40), torch.randint(0, 3, (6, 40), generator=generator).double()
        norms, center = (6 * normal(6)).exp(), 6 * normal(6)
        norms[0] *= 1 - case % 2
        counts[:2] *= torch.tensor([case % 2, 0]).unsqueeze(1)
        low, high = center - math.log(hyperprior.cap), center + math.log(hyperprior.cap)
        for _ in range(80):
            middle = (low + high) / 2
            gamma = (counts * torch.sigmoid(logs - 0.3 - middle.unsqueeze(1))).sum(1)
            slope = middle.exp() * norms - gamma + 2 * (middle - center) / hyperprior.std**2
            low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
        for start in (low, low + 1e-3, center, 30 * normal(6)):
            spectrum = Spectrum(logs.flatten(), counts.flatten(), torch.arange(6).repeat_interleave(40), 6)
            found, _ = spectrum.step(norms, start, 0.3, center, hyperprior, None)
            torch.testing.assert_close(found, low, rtol=0, atol=1e-10)


@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_rounding_errors_of_single_precision_are_no_directions(curvature: str) -> None:
    """Far more features than samples: all but 12 eigenvalues are zero, whatever the prior precision."""
    x, y = data(200, outputs=2, samples=12)
    ratios = []
    for dtype in (torch.float32, torch.float64):
        model = randomize(nn.Linear(200, 2, bias=False)).to(dtype)
        la = LinearizedLaplace(model, prior="single", evaluate_at="map", curvature=curvature)  # type: ignore[arg-type]
        la.fit([(x.to(dtype), y)])
        la.set_precision(1e-9)
        (row,) = la.report()
        assert row.gamma == pytest.approx(12, rel=1e-3)
        ratios.append(la.fitted.curvature.determinants.log_det_ratio(la.log_precision, 0.0))
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-4)


@pytest.mark.parametrize("noise", [None, Noise(40, 3.0)])
@pytest.mark.parametrize("hyperprior", [FLAT, Hyperprior()])
def test_coupled_and_separate_determinants_agree_where_both_apply(hyperprior: Hyperprior, noise: Noise | None) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (5, 7))
    first, second = first @ first.T, 30 * second @ second.T
    slots = {"a": Slot(0, 5, (5,)), "b": Slot(5, 12, (7,))}
    groups = prior_groups(slots, "per_layer")
    separate = []
    for start, number, matrix in ((0, 0, first), (5, 1, second)):
        values, vectors = torch.linalg.eigh(matrix)
        separate.append(DenseBlock("w", start, torch.tensor(number), values, vectors))
    both = torch.block_diag(first, second)
    coupled = CoupledDeterminants(CoupledBlock("all", 0, groups.spread(torch.arange(2)), both), 2)
    spectrum = Spectrum.of(separate, groups)
    rho, tau = torch.tensor([0.3, -1.0], dtype=torch.float64), (0.2 if noise is None else 0.0)
    assert coupled.log_det_ratio(rho, tau) == pytest.approx(spectrum.log_det_ratio(rho, tau), rel=1e-10)
    torch.testing.assert_close(coupled.gamma(rho, tau), spectrum.gamma(rho, tau))
    norms, center = torch.tensor([2.0, 0.5], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    found = coupled.step(norms, rho, tau, center, hyperprior, noise)
    expected = spectrum.step(norms, rho, tau, center, hyperprior, noise)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)
    assert found[1] == pytest.approx(expected[1], abs=1e-6)


def test_the_mode_is_found_from_saturated_probabilities() -> None:
    """Of a network whose probabilities are 0 and 1 almost to rounding error, one of them wrong: steps are too long."""
    x, _ = data(6, outputs=3, samples=60)
    model = randomize(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), scale=10.0)
    y = model(x).argmax(-1)
    y[0] = (y[0] + 1) % 3
    la = LinearizedLaplace(model, curvature="full", prior="single").fit([(x, y)])
    la.set_precision(0.01)
    found = at_mode(la.fitted, [(x, y)]).solution
    assert found.converged and found.gradient_norm < 1e-6
    jac, offset = tangent_problem(la, x)
    residual = (jac @ found.theta + offset).view(-1, 3).softmax(-1) - nn.functional.one_hot(y, 3)
    gradient = jac.T @ residual.flatten() + 0.01 * found.theta
    norm = gradient @ torch.linalg.solve(dense_curvature(la) + 0.01 * torch.eye(len(gradient)), gradient)
    assert float(norm.sqrt()) < 1e-4  # it differs between processors, from 9e-6 to 1.1e-5
