"""The dual evidence and posterior against dense formulas in weight space, float64."""

import math
from itertools import combinations

import pytest
import torch
from dual_oracles import case, misses
from torch.distributions import MultivariateNormal

from tu_symmetry.laplace.dual.evidence import (
    BoundReachedWarning,
    DualEvidence,
    optimize,
    pattern_kernels,
    statistics,
)
from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.dual.priors import IsotropicPrior, KernelPrior

PHI = torch.tensor([-0.4, 0.3, 0.2, -1.1], dtype=torch.float64)  # log variance, log length scale; log variance; noise
SIZES = [7, 20, 31, None]  # fewer measurements than outputs, as many, more; the outputs themselves


def dense(own, evidence, phi=PHI):
    s = own.prior_matrix(phi, evidence)
    noise = math.exp(float(phi[-1]))
    return s, noise, own.matrix @ own.jacobian


@pytest.mark.parametrize("values", SIZES)
def test_statistics_give_the_dense_kernel(values):
    own = case(values)
    evidence = own.evidence()
    s, _, _ = dense(own, evidence)
    expected = own.jacobian @ s @ own.jacobian.mT
    assert torch.allclose(evidence.prior_covariance(PHI), expected, rtol=1e-12, atol=1e-13 * float(expected.max()))
    assert torch.allclose(evidence.statistics.linear, own.jacobian @ own.theta, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("k", [(3,), (3, 3), (2, 3), (5, 5), (2, 2, 2)])
def test_pattern_kernels_of_any_grid(k):
    shape = (2, 3, *k)
    prior = KernelPrior(("w",)).resolve({"w": shape})
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(4, 6, prior.pattern, generator=generator, dtype=torch.float64)
    expected = torch.einsum("anp,rpq,bnq->rab", patterns, prior.basis, patterns)
    found = pattern_kernels(patterns, prior.basis)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("values", SIZES)
def test_map_evidence_is_the_formula(values):
    own = case(values)
    evidence = own.evidence("map")
    s, noise, aj = dense(own, evidence)
    m = len(own.y)
    k = aj @ s @ aj.mT + noise * torch.eye(m, dtype=torch.float64)
    residual = own.y - own.matrix @ own.outputs
    expected = 0.5 * (
        torch.logdet(k) + residual @ residual / noise + own.theta @ torch.linalg.solve(s, own.theta)
        + m * math.log(2 * math.pi)
    )  # fmt: skip
    assert evidence.value(PHI) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("values", SIZES)
def test_tangent_evidence_is_the_marginal_density(values):
    own = case(values)
    evidence = own.evidence("tangent_mode")
    s, noise, aj = dense(own, evidence)
    m = len(own.y)
    k = aj @ s @ aj.mT + noise * torch.eye(m, dtype=torch.float64)
    shifted = own.y - own.matrix @ (own.outputs - own.jacobian @ own.theta)
    expected = -MultivariateNormal(torch.zeros(m, dtype=torch.float64), (k + k.mT) / 2).log_prob(shifted)
    assert evidence.value(PHI) == pytest.approx(float(expected), rel=1e-9)
    # and in weight space: -log p(y, theta*) - log of the posterior's normalizer
    h = torch.linalg.inv(s) + aj.mT @ aj / noise
    mode = torch.linalg.solve(h, aj.mT @ shifted / noise)
    error = shifted - aj @ mode
    weights = 0.5 * (
        error @ error / noise + mode @ torch.linalg.solve(s, mode) + torch.logdet(s) + torch.logdet(h)
        + m * math.log(2 * math.pi * noise)
    )  # fmt: skip
    assert evidence.value(PHI) == pytest.approx(float(weights), rel=1e-8)


@pytest.mark.parametrize("values", SIZES)
@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
def test_gradients_against_central_differences(values, evaluate_at):
    evidence = case(values).evidence(evaluate_at)
    _, gradient = evidence.value_and_gradient(PHI)
    for i in range(len(PHI)):
        step = torch.zeros_like(PHI)
        step[i] = 1e-5
        slope = (evidence.value(PHI + step) - evidence.value(PHI - step)) / 2e-5
        assert float(gradient[i]) == pytest.approx(slope, rel=1e-6, abs=1e-6), evidence.names[i]


@pytest.mark.parametrize("values", SIZES)
def test_predictive_covariance_equals_that_of_weight_space(values):
    own = case(values)
    evidence = own.evidence()
    s, noise, aj = dense(own, evidence)
    h = torch.linalg.inv(s) + aj.mT @ aj / noise
    expected = own.jacobian @ torch.linalg.solve(h, own.jacobian.mT)
    assert torch.allclose(evidence.posterior_covariance(PHI), expected, rtol=0, atol=1e-8 * float(expected.max()))


def test_samples_have_the_covariances():
    evidence = case(7).evidence()
    for prior, expected in ((True, evidence.prior_covariance(PHI)), (False, evidence.posterior_covariance(PHI))):
        drawn = evidence.deviations(PHI, 20_000, torch.Generator().manual_seed(3), prior=prior)
        assert 0.5 < misses(drawn, expected) <= 4.5


def test_lbfgs_is_no_worse_than_adam():
    evidence = case(7).evidence()
    start = evidence.initial()
    found = optimize(evidence, start)
    adam = optimize(evidence, start, optimizer="adam", num_steps=1500)
    assert found.converged and found.objective <= adam.objective + 1e-3
    assert len(found.history) < 200
    gradient = evidence.value_and_gradient(found.phi)[1]
    limits = torch.tensor(evidence.bounds(), dtype=torch.float64)
    inside = ((found.phi - limits[:, 0]) > 1e-6) & ((limits[:, 1] - found.phi) > 1e-6)
    assert float(gradient[inside].abs().max()) < 1e-3


def test_a_bound_is_named():
    own = case(7)
    shapes = {n: tuple(p.shape) for n, p in own.model.named_parameters()}
    narrow = KernelPrior(("a.weight", "b.weight"), name="ab", variance=5.0, variance_bounds=(4.0, 6.0)).resolve(shapes)
    own.priors = (narrow, own.priors[1])
    with pytest.warns(BoundReachedWarning, match=r"ab\.log_variance"):
        optimize(own.evidence(), own.evidence().initial())


@pytest.mark.parametrize("prior", [
    KernelPrior(("w",), lengthscale=0.7).resolve({"w": (2, 3, 3, 3)}),
    IsotropicPrior(("w",), variance=0.3).resolve({"w": (54,)}),
])  # fmt: skip
def test_products_and_roots(prior):
    phi = prior.initial() + 0.1
    blocks = torch.block_diag(*[prior.covariance(phi)] * (54 // prior.pattern))
    v = torch.randn(2, 54, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(prior.product(phi, v), v @ blocks)
    root = prior.root_product(phi, torch.eye(54, dtype=torch.float64))
    assert torch.allclose(root.mT @ root, blocks)


def test_singular_measurements_are_named():
    for kept, repeated in combinations(range(7), 2):  # each is singular, however its products are rounded
        own = case(7)
        own.matrix[repeated] = own.matrix[kept]
        own.observation = LinearObservation(own.matrix)
        evidence = own.evidence()
        for phi in ([9.0, 0.0, 9.0, -60.0], [0.0, 0.0, 0.0, -60.0], [3.0, 1.0, -2.0, -50.0]):
            with pytest.raises(ValueError, match="noise variance"):
                evidence.value(torch.tensor(phi, dtype=torch.float64))
        assert math.isfinite(evidence.value(torch.tensor([0.0, 0.0, 0.0, -20.0], dtype=torch.float64)))
    with pytest.raises(ValueError, match="finite numbers"):
        evidence.value(torch.full((4,), math.nan, dtype=torch.float64))


def test_bad_measurements_operators_and_blocks():
    own = case(7)
    values = own.evidence().statistics
    with pytest.raises(ValueError, match="NaN"):
        DualEvidence(values, own.priors, torch.where(torch.arange(7) == 2, math.nan, own.y), own.observation)
    with pytest.raises(ValueError, match="takes 19 outputs, the network gives 20"):
        DualEvidence(values, own.priors, own.y, LinearObservation(own.matrix[:, :19]))
    with pytest.raises(ValueError, match="7 values, but there are 6"):
        DualEvidence(values, own.priors, own.y[:6], own.observation)
    weights = {n: p.detach() for n, p in own.model.named_parameters()}
    parts = {n: torch.zeros(20, *weights[n].shape, dtype=torch.float64) for n in own.names}
    with pytest.raises(ValueError, match=r"says nothing about \['c.weight'\]"):
        statistics(parts, weights, own.outputs, own.priors[:1])
    with pytest.raises(ValueError, match="two blocks"):
        statistics(parts, weights, own.outputs, (*own.priors, IsotropicPrior(("c.weight",), name="again")))
    parts["c.weight"][0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        statistics(parts, weights, own.outputs, own.priors)
    with pytest.raises(ValueError, match="kernel shape"):
        KernelPrior(("a",)).resolve({"a.weight": (2, 3, 3, 3), "a.bias": (2,)})
    with pytest.raises(ValueError, match="matches no parameter"):
        KernelPrior(("z",)).resolve({"a.weight": (2, 3, 3, 3)})
    with pytest.raises(ValueError, match="bounds"):
        IsotropicPrior(("a",), variance=2.0, variance_bounds=(3.0, 4.0))


def test_observations():
    a = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pseudo = torch.linalg.pinv(a)
    found = LinearObservation(a).pseudo_inverse_variance(6, 10)
    assert found == pytest.approx(float((pseudo @ pseudo.mT).trace() / 6))
    with pytest.raises(ValueError, match="NaN"):
        LinearObservation(torch.full((2, 2), math.nan))
    with pytest.raises(ValueError, match=r"\[values, outputs\]"):
        LinearObservation(torch.ones(3))
