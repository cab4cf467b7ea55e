"""``DualLaplace`` against dense formulas in weight space, and the full curvature of ``LinearizedLaplace``; float64."""

import math
from itertools import combinations

import pytest
import torch
from dual_oracles import PHI, PRIORS, SHAPE, case, misses
from laplace_oracles import data, randomize
from torch import nn
from torch.distributions import MultivariateNormal

import tu_symmetry as tus
from tu_symmetry.laplace import DualLaplace, IsotropicPrior, KernelPrior
from tu_symmetry.laplace.dual.laplace import gaussian_log_density, pattern_kernels
from tu_symmetry.laplace.dual.optimize import BoundReachedWarning
from tu_symmetry.laplace.joint.optimum import at_mode

SIZES = [7, 20, 31, None]  # fewer measurements than outputs, as many, more; the outputs themselves
EYE = torch.eye(20, dtype=torch.float64)


def value(la, phi):
    return la.value_and_gradient(phi)[0]


def network():
    return randomize(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)))


def test_what_was_fitted_is_printed():
    model, (x, y) = network(), data(3, outputs=2, kind="regression", samples=7)
    la = DualLaplace(model, structured=[IsotropicPrior(["0.weight"], name="first")])
    assert repr(la) == "DualLaplace(of: Sequential, blocks: first, evaluate at: tangent_mode, fitted: not yet)"
    text = repr(la.fit([(x, y)]))
    assert "fitted: 18 weights, to 14 measurements of 14 outputs" in text and "noise_variance 1" in text


@pytest.mark.parametrize("k", [(3,), (3, 3), (2, 3), (5, 5), (2, 2, 2)])
def test_pattern_kernels_of_any_grid(k):
    prior = KernelPrior(("w",)).resolve({"w": (2, 3, *k)})
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(4, 6, prior.pattern, generator=generator, dtype=torch.float64)
    expected = torch.einsum("anp,rpq,bnq->rab", patterns, prior.basis, patterns)
    found = pattern_kernels(patterns, prior.basis)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("values", SIZES)
def test_evidence_and_covariances_are_those_of_weight_space(values):
    own = case(values)
    la = own.fitted("map")
    s, aj = own.dense()
    noise, m = math.exp(float(PHI[-1])), len(own.y)
    prior = own.jacobian @ s @ own.jacobian.mT
    assert torch.allclose(la.prior_covariance(PHI), prior, rtol=1e-12, atol=1e-13 * float(prior.max()))
    h = torch.linalg.inv(s) + aj.mT @ aj / noise
    posterior = own.jacobian @ torch.linalg.solve(h, own.jacobian.mT)
    mean, covariance = la.function_covariance()
    assert torch.allclose(covariance, posterior, rtol=0, atol=1e-8 * float(posterior.max()))
    assert mean.shape == (1, 1, *SHAPE) and torch.equal(mean.reshape(-1), own.outputs)
    k = aj @ s @ aj.mT + noise * torch.eye(m, dtype=torch.float64)
    residual = own.y - own.matrix @ own.outputs
    fit = residual @ residual / noise + own.theta @ torch.linalg.solve(s, own.theta)
    expected = 0.5 * (torch.logdet(k) + fit + m * math.log(2 * math.pi))
    assert la.log_marginal_likelihood() == pytest.approx(-float(expected), rel=1e-10)
    la.evaluate_at = "tangent_mode"
    shifted = residual + aj @ own.theta
    density = MultivariateNormal(torch.zeros(m, dtype=torch.float64), (k + k.mT) / 2).log_prob(shifted)
    assert la.log_marginal_likelihood() == pytest.approx(float(density), rel=1e-9)
    mode = torch.linalg.solve(h, aj.mT @ shifted / noise)  # log p(y, theta*) and the posterior's normalizer
    error = shifted - aj @ mode
    fit = error @ error / noise + mode @ torch.linalg.solve(s, mode)
    weights = 0.5 * (fit + torch.logdet(s) + torch.logdet(h) + m * math.log(2 * math.pi * noise))
    assert la.log_marginal_likelihood() == pytest.approx(-float(weights), rel=1e-8)
    la.evaluate_at = "mode"
    with pytest.raises(ValueError, match="is not known"):
        la.log_marginal_likelihood()


@pytest.mark.parametrize("values", SIZES)
@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
def test_gradients_against_central_differences(values, evaluate_at):
    la = case(values).fitted(evaluate_at)
    gradient = la.value_and_gradient(PHI)[1]
    for i, step in enumerate(1e-5 * torch.eye(4, dtype=torch.float64)):
        slope = (value(la, PHI + step) - value(la, PHI - step)) / 2e-5
        assert float(gradient[i]) == pytest.approx(slope, rel=1e-6, abs=1e-6), la.names[i]


def test_samples_have_the_covariances():
    la = case(7).fitted()
    mean, posterior = la.function_covariance()
    for prior, expected in ((True, la.prior_covariance(PHI)), (False, posterior)):
        drawn = la.function_samples(20_000, seed=3, prior=prior)
        assert drawn.shape == (20_000, 1, 1, *SHAPE)
        assert 0.5 < misses(drawn - mean, expected) <= 4.5


def test_lbfgs_is_no_worse_than_adam():
    found, adam = case(7).fitted(), case(7).fitted()
    found.phi = adam.phi = found.initial()
    best = found.optimize_evidence()
    assert best.converged and best.objective <= adam.optimize_evidence(optimizer="adam").objective + 1e-3
    assert len(best.history) == len(best.points) < 200
    for k in (0, best.history.index(min(best.history))):
        assert found.value_and_gradient(best.points[k])[0] == pytest.approx(best.history[k])
    assert torch.equal(best.points[0], adam.initial()) and torch.equal(best.points[k], best.phi)
    limits = torch.tensor(found.bounds(), dtype=torch.float64)
    inside = ((best.phi - limits[:, 0]) > 1e-6) & ((limits[:, 1] - best.phi) > 1e-6)
    assert float(found.value_and_gradient(best.phi)[1][inside].abs().max()) < 1e-3


def test_a_bound_is_named():
    own = case(7)
    narrow = KernelPrior(("a.weight", "b.weight"), name="ab", variance=5.0, variance_bounds=(4.0, 6.0))
    own.priors = (narrow, PRIORS[1])
    with pytest.warns(BoundReachedWarning, match=r"ab\.log_variance"):
        own.fitted().optimize_evidence()


@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
@pytest.mark.parametrize("prior", ["per_layer", "single"])
def test_equals_the_full_curvature_with_isotropic_priors(evaluate_at, prior):
    x, y = data(3, outputs=2, kind="regression", samples=6)
    model = network()
    full = tus.LinearizedLaplace(
        model, "regression", curvature="full", prior=prior, evaluate_at=evaluate_at, noise_variance=0.3
    ).fit([(x, y)])
    precision = {name: 0.5 + i for i, name in enumerate(full.prior_groups.names)}
    full.set_precision(precision)
    if evaluate_at == "tangent_mode":
        full._fitted = at_mode(full.fitted, [(x, y)], tolerance=1e-12)
    blocks = [["0", "2", "4"]] if prior == "single" else [["0"], ["2"], ["4"]]
    dual = DualLaplace(model, structured=[IsotropicPrior(own) for own in blocks], evaluate_at=evaluate_at)
    variances = [*(1 / value for value in precision.values()), 0.3]
    dual.fit([(x, y)]).phi = torch.tensor(variances, dtype=torch.float64).log()
    assert [*dual.hyperparameters] == [*(f"{own[0]}.variance" for own in blocks), "noise_variance"]
    assert dual.log_marginal_likelihood() == pytest.approx(full.log_marginal_likelihood(), rel=1e-8)
    found, expected = dual.function_covariance()[1].view(6, 2, 6, 2), full.function_covariance(x)
    torch.testing.assert_close(dual.function_covariance()[0], expected[0])
    torch.testing.assert_close(found.diagonal(dim1=0, dim2=2).movedim(-1, 0), expected[1])


def test_saturated_outputs_stay_without_variance():
    own = case(7)
    with torch.no_grad():
        own.model.c.bias.fill_(800.0)  # the sigmoid is 1 everywhere, its slope 0
    la = own.fitted()
    la.optimize_evidence()
    covariance = la.function_covariance()[1]
    assert torch.equal(covariance.diagonal(), torch.zeros(20, dtype=torch.float64))
    with pytest.raises(ValueError, match="variance 0"):
        gaussian_log_density(torch.zeros(20).double(), covariance)
    error = torch.rand(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own = case(7).fitted().function_covariance()[1]
    expected = MultivariateNormal(torch.zeros_like(error), own + 0.05 * EYE).log_prob(error)
    assert gaussian_log_density(error, own, 0.05) == pytest.approx(float(expected), rel=1e-9)


def test_singular_measurements_are_named():
    for kept, repeated in combinations(range(7), 2):  # each is singular, however its products are rounded
        own = case(7)
        own.matrix[repeated] = own.matrix[kept]
        la = own.fitted()
        for phi in ([9.0, 0.0, 9.0, -60.0], [0.0, 0.0, 0.0, -60.0], [3.0, 1.0, -2.0, -50.0]):
            with pytest.raises(ValueError, match="noise variance"):
                value(la, torch.tensor(phi, dtype=torch.float64))
        assert math.isfinite(value(la, torch.tensor([0.0, 0.0, 0.0, -20.0], dtype=torch.float64)))
    with pytest.raises(ValueError, match="finite numbers"):
        value(la, torch.full((4,), math.nan, dtype=torch.float64))


def of(own, y=None, blocks=PRIORS, batches=1, matrix=None):
    y = own.y.view(1, -1) if y is None else y
    la = DualLaplace(own.model, structured=blocks, observation=own.matrix if matrix is None else matrix)
    return la.fit([(own.x, y)] * batches)


def changed(own):
    la = own.fitted()
    with torch.no_grad():
        own.model.a.weight.add_(1)
    return la.function_covariance()


REFUSED = [
    ("are NaN", lambda own: of(own, y=torch.full((1, 7), math.nan).double())),
    (r"\[values, 20 outputs\], got .* \(7, 19\)", lambda own: of(own, matrix=own.matrix[:, :19])),
    ("finite real numbers", lambda own: of(own, matrix=own.matrix * math.nan)),
    ("7 measurements", lambda own: of(own, y=own.y[:6].view(1, -1))),
    ("one batch", lambda own: of(own, batches=2)),
    ("20 measurements", lambda own: DualLaplace(own.model, structured=PRIORS).fit([(own.x, own.y.view(1, 7))])),
    ("two blocks", lambda own: of(own, blocks=(*PRIORS, IsotropicPrior(("c",), name="again")))),
    ("same name", lambda own: of(own, blocks=(PRIORS[1], IsotropicPrior(("a.weight",), name="c")))),
    ("nothing would be uncertain", lambda own: of(own, blocks=())),
    ("kernel shape", lambda own: of(own, blocks=[KernelPrior(("a",))])),
    ("matches no parameter", lambda own: of(own, blocks=[KernelPrior(("z",))])),
    ("bounds", lambda own: IsotropicPrior(("a",), variance=2.0, variance_bounds=(3.0, 4.0))),
    ("not been fitted", lambda own: DualLaplace(own.model, structured=PRIORS).log_marginal_likelihood()),
    ("have changed", changed),
]


@pytest.mark.parametrize(("match", "call"), REFUSED, ids=[match for match, _ in REFUSED])
def test_what_cannot_work_is_refused(match, call):
    with pytest.raises((ValueError, RuntimeError), match=match):
        call(case(7))
