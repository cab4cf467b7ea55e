"""``DualLaplace``: against the full curvature of ``LinearizedLaplace``, dense Gaussian processes, files, bad input."""

import math

import pytest
import torch
from dual_oracles import SHAPE, case, misses
from laplace_oracles import data, jacobian, randomize
from torch import nn

import tu_symmetry as tus
from tu_symmetry.laplace.dual.laplace import gaussian_log_density
from tu_symmetry.laplace.dual.priors import KernelPrior
from tu_symmetry.laplace.joint.optimum import at_mode


def network():
    return randomize(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)))


def fitted(own, **options):
    return tus.laplace.DualLaplace(
        own.model, structured=own.priors, prior=None, observation=own.observation, **options
    ).fit([(own.x, own.y.unsqueeze(0))])  # fmt: skip


@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
@pytest.mark.parametrize("prior", ["per_layer", "single"])
def test_equals_the_full_curvature_with_isotropic_priors(evaluate_at, prior):
    x, y = data(3, outputs=2, kind="regression", samples=6)
    model = network()
    full = tus.LinearizedLaplace(
        model, "regression", curvature="full", prior=prior, evaluate_at=evaluate_at, noise_variance=0.3
    ).fit([(x[:4], y[:4]), (x[4:], y[4:])])
    precision = {name: 0.5 + i for i, name in enumerate(full.prior_groups.names)}
    full.set_precision(precision)
    if evaluate_at == "tangent_mode":
        solved = at_mode(full.fitted, full.train_loader, tolerance=1e-12)
        full = tus.LinearizedLaplace.from_fitted(solved)
    dual = tus.laplace.DualLaplace(model, prior=prior, evaluate_at=evaluate_at)
    dual.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    dual.phi = torch.tensor([*(1 / value for value in precision.values()), 0.3], dtype=torch.float64).log()
    assert [*dual.hyperparameters] == [*(f"{name}.variance" for name in precision), "noise_variance"]
    assert dual.log_marginal_likelihood() == pytest.approx(full.log_marginal_likelihood(), rel=1e-8)
    new = torch.randn(5, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected = full.predictive(new, covariance="exact")
    found = dual.predictive(new)
    assert torch.allclose(found.mean, expected.mean) and torch.allclose(found.variance, expected.epistemic)


def test_evaluated_elsewhere_is_as_if_fitted_there():
    x, y = data(3, outputs=2, kind="regression", samples=6)
    model = network()
    there = tus.laplace.DualLaplace(model, evaluate_at="map").fit([(x, y)])
    there.phi = there.phi + 0.3
    here = there.evaluated_at("tangent_mode")
    expected = tus.laplace.DualLaplace(model, evaluate_at="tangent_mode").fit([(x, y)])
    assert there.evaluate_at == "map" and here.evaluate_at == "tangent_mode"
    assert torch.equal(here.phi, expected.phi) and not torch.equal(there.phi, here.phi)
    assert here.log_marginal_likelihood() == pytest.approx(expected.log_marginal_likelihood(), rel=1e-12)
    assert here.log_marginal_likelihood() != pytest.approx(there.log_marginal_likelihood())
    with pytest.raises(ValueError, match="is not known"):
        there.evaluated_at("mode")


def test_predictive_of_new_inputs_is_the_gaussian_process():
    x, y = data(3, outputs=2, kind="regression", samples=6)
    model = network()
    dual = tus.laplace.DualLaplace(model, prior="single").fit([(x, y)])
    dual.phi = torch.tensor([0.7, 0.2], dtype=torch.float64).log()
    names = [name for name, _ in model.named_parameters()]
    new = torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    train, test = (jacobian(model, names, t).flatten(0, 1) for t in (x, new))
    k = 0.7 * train @ train.mT + 0.2 * torch.eye(12, dtype=torch.float64)
    expected = 0.7 * test @ test.mT - 0.49 * test @ train.mT @ torch.linalg.solve(k, train @ test.mT)
    found = dual.predictive(new)
    assert found.mean.shape == (4, 2) and torch.allclose(found.covariance, expected, atol=1e-10)
    again = dual.predictive(x)
    assert torch.allclose(again.covariance, dual.predictive().covariance, atol=1e-9)
    assert misses(dual.function_samples(new, 20_000) - found.mean, expected) < 4.5


def test_images_keep_their_shape():
    own = case(7)
    dual = fitted(own, evaluate_at="map")
    assert dual.optimize_evidence().converged
    found = dual.predictive()
    matrix = found.covariance + 0.05 * torch.eye(20, dtype=torch.float64)
    error = torch.rand(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = torch.distributions.MultivariateNormal(torch.zeros_like(error), matrix).log_prob(error)
    assert gaussian_log_density(error, found.covariance, 0.05) == pytest.approx(float(expected), rel=1e-9)
    assert found.mean.shape == (1, 1, *SHAPE) and found.variance.shape == found.mean.shape
    assert dual.function_samples(None, 3).shape == (3, 1, 1, *SHAPE)


def test_blocks_beside_the_structured_ones():
    own = case(7)
    dual = tus.laplace.DualLaplace(
        own.model, structured=[KernelPrior(["a.weight"], name="a")], observation=own.observation
    ).fit([(own.x, own.y.unsqueeze(0))])
    assert [prior.name for prior in dual.priors] == ["a", "a (rest)", "b", "c"]
    assert dual.hyperparameters.keys() == {
        "a.variance", "a.lengthscale", "a (rest).variance", "b.variance", "c.variance", "noise_variance"
    }  # fmt: skip


def test_saturated_outputs_stay_without_variance():
    own = case(7)
    with torch.no_grad():
        own.model.c.bias.fill_(800.0)  # the sigmoid is 1 everywhere, its slope 0
    dual = fitted(own, evaluate_at="map")
    dual.optimize_evidence()
    found = dual.predictive()
    assert torch.equal(found.variance, torch.zeros(1, 1, *SHAPE, dtype=torch.float64))
    error = torch.zeros(20, dtype=torch.float64)
    assert math.isfinite(gaussian_log_density(error, found.covariance, 0.01))
    with pytest.raises(ValueError, match="variance 0"):
        gaussian_log_density(error, found.covariance)


def test_bad_input():
    own = case(7)
    with pytest.raises(ValueError, match="NaN"):
        fitted_with = tus.laplace.DualLaplace(own.model, structured=own.priors, prior=None, observation=own.observation)
        fitted_with.fit([(own.x, torch.full((1, 7), math.nan, dtype=torch.float64))])
    with pytest.raises(ValueError, match="takes 20 outputs, the network gives 24"):
        fitted_with.fit([(torch.zeros(1, 1, 6, 4, dtype=torch.float64), own.y.unsqueeze(0))])
    with pytest.raises(ValueError, match="one batch"):
        fitted_with.fit([(own.x, own.y.unsqueeze(0))] * 2)
    with pytest.raises(RuntimeError, match="not been fitted"):
        tus.laplace.DualLaplace(own.model).log_marginal_likelihood()
    with pytest.raises(ValueError, match="need to be equal"):
        tus.laplace.DualLaplace(network()).fit([(torch.zeros(2, 3).double(), torch.zeros(2, 1).double())])
    with pytest.raises(ValueError, match="nothing would be uncertain"):
        tus.laplace.DualLaplace(own.model, prior=None)
    dual = fitted(own)
    with torch.no_grad():
        own.model.a.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed"):
        dual.predictive()
