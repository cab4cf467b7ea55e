"""Conjugate gradients, the preconditioner, and the sampling-based evidence against dense formulas, float64."""

import math

import pytest
import torch
from dual_oracles import SHAPE, case, misses

from tu_symmetry.laplace.dual.evidence import optimize
from tu_symmetry.laplace.dual.hyperpriors import TotalVariation, differences
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, ObservedTangent
from tu_symmetry.laplace.dual.sampled import (
    SampledEvidence,
    SampledStatistics,
    SolverWarning,
    conjugate_gradients,
    nystrom_preconditioner,
)

PHI = torch.tensor([-0.4, 0.3, 0.2, -1.1], dtype=torch.float64)
NOISE = math.exp(-1.1)


def sampled(own, *, matrix_free=False, **options):
    operator = ObservedTangent(FlatTangentModel(own.model, own.names), [own.x], own.observation)
    if not matrix_free:  # many thousand products: by the dense matrix, to which the first test compares the operator
        aj = own.matrix @ own.jacobian
        operator.forward, operator.adjoint = lambda v: v @ aj.mT, lambda u: u @ aj
    options = {"tolerance": 1e-12, "max_iterations": 200, "rank": 5, **options}
    return SampledEvidence(operator, own.priors, own.y, **options)


def blocks(own):
    return own.evidence().split(PHI)[0]


def spd(n, seed=0, decay=0.7):
    q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    return (q * (100 * decay ** torch.arange(n, dtype=torch.float64))) @ q.mT


def test_operator_and_its_transpose():
    own = case(7)
    operator = sampled(own, matrix_free=True).operator
    v = torch.randn(3, operator.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    aj = own.matrix @ own.jacobian
    assert torch.allclose(operator.forward(v), v @ aj.mT) and torch.allclose(operator.adjoint(u), u @ aj)


def test_conjugate_gradients_solve_and_the_preconditioner_saves_products():
    kernel, noise = spd(60), 1e-3
    right = torch.randn(4, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    right[2] = 0

    def product(u):
        return u @ kernel + noise * u

    plain = conjugate_gradients(product, right, tolerance=1e-10, max_iterations=500)
    exact = torch.linalg.solve(kernel + noise * torch.eye(60, dtype=torch.float64), right.mT).mT
    assert plain.residual <= 1e-10 and torch.allclose(plain.solution, exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(plain.solution[2], torch.zeros(60, dtype=torch.float64))
    low = nystrom_preconditioner(lambda u: u @ kernel, 60, 25, noise, torch.Generator().manual_seed(2), right)
    fast = conjugate_gradients(product, right, preconditioner=low, tolerance=1e-10, max_iterations=500)
    assert fast.residual <= 1e-10 and fast.iterations < plain.iterations / 2
    assert torch.allclose(fast.solution, exact, rtol=1e-5, atol=1e-5)
    full = nystrom_preconditioner(lambda u: u @ kernel, 60, 60, noise, torch.Generator().manual_seed(2), right)
    assert conjugate_gradients(product, right, preconditioner=full, tolerance=1e-6).iterations <= 5
    with pytest.raises(ValueError, match="not positive definite"):
        conjugate_gradients(lambda u: -u, right)
    with pytest.raises(ValueError, match="not positive definite"):
        conjugate_gradients(lambda u: u * math.nan, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 3, 10])
def test_a_preconditioner_of_an_operator_without_inverse_hangs_on_no_rounding(rank, dtype):
    """Products off by a hundred units in the last place, either way, leave it one of the identity off the range."""
    noise, eps = 0.1, torch.finfo(dtype).eps
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(40, rank, generator=generator).to(dtype)
        error = torch.randn(40, 40, generator=generator).to(dtype)
        kernel = root @ root.mT
        kernel = kernel + 100 * eps * float(kernel.norm()) / 40 * (error + error.mT)
        low = nystrom_preconditioner(lambda u, k=kernel: u @ k, 40, 15, noise, generator, root)
        product = low(kernel + noise * torch.eye(40, dtype=dtype))
        assert torch.linalg.eigvals(product).real.sub(noise).abs().max() < 1e5 * eps
    for wrong in (-torch.eye(40, dtype=dtype), torch.zeros(40, 40, dtype=dtype), math.nan * kernel):
        with pytest.raises(ValueError, match="not positive"):
            nystrom_preconditioner(lambda u, k=wrong: u @ k, 40, 15, noise, generator, root)


@pytest.mark.parametrize("values", [7, 31, None])
def test_samples_are_those_of_the_weight_posterior(values):
    own = case(values)
    found = sampled(own)
    evidence = own.evidence()
    s = own.prior_matrix(PHI, evidence)
    aj = own.matrix @ own.jacobian
    h = torch.linalg.inv(s) + aj.mT @ aj / NOISE
    zeta, theta = found.samples(blocks(own), NOISE, count=20_000)
    shifted = own.y - own.matrix @ (own.outputs - own.jacobian @ own.theta)
    assert torch.allclose(theta, torch.linalg.solve(h, aj.mT @ shifted / NOISE), atol=1e-6)
    assert misses(zeta, torch.linalg.inv(h)) < 5.5  # some 7,000 different entries


def test_gradient_is_unbiased():
    own = case(7)
    found = sampled(own, num_samples=8000)
    _, exact = own.evidence("tangent_mode").value_and_gradient(PHI)
    slopes, noise = found.gradient(blocks(own), NOISE)
    joined = torch.cat([*slopes.values(), torch.tensor([noise])])
    each = torch.stack([
        torch.cat([*s.values(), torch.tensor([n])])
        for s, n in (sampled(own, num_samples=400).gradient(blocks(own), NOISE, seed=i) for i in range(8))
    ])  # fmt: skip
    error = each.std(0) / math.sqrt(20)
    assert bool(((joined - exact).abs() < 5 * error + 1e-9).all())


def test_adam_on_stochastic_gradients_reaches_the_dense_optimum():
    own = case(7)
    dense = own.evidence("tangent_mode")
    best = optimize(dense, dense.initial(0.5))
    found = sampled(own, num_samples=20, tolerance=1e-6, matrix_free=True)
    result = found.adam(noise_variance=0.5, num_steps=25, lr=0.2, decay_every=15, refresh_every=10)
    phi = torch.cat([*result.phi.values(), torch.tensor([math.log(result.noise_variance)], dtype=torch.float64)])
    assert dense.value(phi) < dense.value(dense.initial(0.5)) - 0.5 * (dense.value(dense.initial(0.5)) - best.objective)


def test_unfinished_solves_and_bad_input_are_told():
    own = case(20)
    with pytest.warns(SolverWarning, match="max_iterations or rank"):
        sampled(own, max_iterations=1, rank=0).samples(blocks(own), 1e-6, count=2)
    with pytest.raises(ValueError, match="NaN"):
        own.y[3] = math.nan
        sampled(own)
    with pytest.raises(ValueError, match="says nothing"):
        broken = case(20)
        broken.priors = broken.priors[:1]
        sampled(broken)


def estimated(own, num_probes):
    evidence = sampled(own)
    evidence.operator.unobserved = lambda v: v @ own.jacobian.mT  # the dense Jacobian, many products
    return SampledStatistics(evidence, num_probes)


@pytest.mark.parametrize("name", ["ab", "c"])
def test_variances_of_differences_are_estimated_without_bias(name):
    own, count = case(7), 800
    first, second = differences(SHAPE, own.outputs.numel())
    exact, _ = own.evidence().statistics.difference_variances(name, first, second)
    prior = next(p for p in own.priors if p.name == name)
    one, all_ = (estimated(own, n).difference_variances(name, first, second)[0] for n in (1, count))
    for scale in (0.2, 3.0):  # whatever the hyperparameters, from the same estimates
        coefficients = prior.coefficients(scale * torch.ones(len(prior.hyperparameters), dtype=torch.float64))
        wanted = coefficients @ exact
        few, many = coefficients @ one, coefficients @ all_
        assert bool((few >= 0).all()), "an estimate of a variance is one"
        assert bool(((many - wanted).abs() <= 4.5 * math.sqrt(2 / count) * wanted).all())
    torch.testing.assert_close(own.outputs.reshape(-1), estimated(own, 1).outputs.reshape(-1))
    with pytest.raises(ValueError, match="at least 1"):
        estimated(own, 0)


@pytest.mark.parametrize("jacobian_weight", [1.0, 0.3])
def test_slopes_of_total_variation_are_those_of_the_dense_evidence(jacobian_weight):
    """With exact variances in the place of estimates, so that nothing but rounding differs."""
    own = case(7)
    hyperprior = TotalVariation(SHAPE, 0.3, jacobian_weight)
    dense, plain = (own.evidence(hyperprior=h).value_and_gradient(PHI)[1] for h in (hyperprior, None))
    exact = own.evidence().split(dense - plain)[0]
    kept = {}
    found = sampled(own)._hyperprior_slopes(hyperprior, own.evidence().statistics, blocks(own), kept)
    assert set(found) == {"ab"} and len(kept) == 1, "read once"
    assert torch.allclose(found["ab"], exact["ab"], rtol=1e-9) and float(exact["ab"].abs().min()) > 1e-3
    assert torch.equal(exact["c"], torch.zeros_like(exact["c"]))


def test_adam_with_total_variation_goes_to_the_optimum_of_the_dense_evidence():
    own = case(7)
    hyperprior = TotalVariation(SHAPE, 2.0)
    options = {"noise_variance": NOISE, "num_steps": 40, "lr": 0.1, "decay_every": 20}
    evidence = sampled(own, num_samples=16, rank=0)
    evidence.operator.unobserved = lambda v: v @ own.jacobian.mT
    ways = {h: evidence.adam(hyperprior=h, hyperprior_probes=200, **options) for h in (None, hyperprior)}
    total = own.evidence("tangent_mode", hyperprior=hyperprior)

    def objective(result):
        noise = torch.tensor([math.log(result.noise_variance)], dtype=torch.float64)
        return total.value(torch.cat([*(result.phi[p.name] for p in own.priors), noise]))

    assert objective(ways[hyperprior]) < objective(ways[None]) - 0.05
    assert objective(ways[hyperprior]) < total.value(PHI)
