"""Conjugate gradients, the preconditioner, and the sampling-based evidence against dense formulas, float64."""

import math

import pytest
import torch
from dual_oracles import NOISE, PHI, SHAPE, case, misses

from tu_symmetry.files import FileError
from tu_symmetry.laplace import DualLaplace, SampledEvidence, TotalVariation
from tu_symmetry.laplace.dual import jacobian
from tu_symmetry.laplace.dual.hyperpriors import differences
from tu_symmetry.laplace.dual.jacobian import FlatTangentModel, ObservedTangent
from tu_symmetry.laplace.dual.sampled import (
    SolverWarning,
    conjugate_gradients,
    linearized_weights,
    nystrom_preconditioner,
    slopes_of,
)
from tu_symmetry.sparse import gram, sparse_rows, transposed_rows

BLOCKS = {"ab": PHI[:2], "c": PHI[2:3]}


def sampled(own, *, matrix_free=False, **options):
    operator = ObservedTangent(FlatTangentModel(own.model, own.names), own.x, own.observation)
    if not matrix_free:  # many thousand products: by the dense matrix, to which the first test compares the operator
        aj, j = own.matrix @ own.jacobian, own.jacobian
        operator.forward, operator.adjoint = lambda v: v @ aj.mT, lambda u: u @ aj
        operator.unobserved = lambda v: v @ j.mT
    shapes = {n: tuple(p.shape) for n, p in own.model.named_parameters()}
    options = {"tolerance": 1e-12, "max_iterations": 200, "rank": 5, **options}
    return SampledEvidence(operator, [prior.resolve(shapes) for prior in own.priors], own.y, **options)


def spd(n, seed=0, decay=0.7):
    q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    return (q * (100 * decay ** torch.arange(n, dtype=torch.float64))) @ q.mT


def test_operator_and_its_transpose_and_products_with_the_prior():
    own = case(7)
    found = sampled(own, matrix_free=True)
    operator = found.operator
    v = torch.randn(3, operator.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s, aj = own.dense()
    assert torch.allclose(operator.forward(v), v @ aj.mT) and torch.allclose(operator.adjoint(u), u @ aj)
    assert torch.allclose(found.blocks.times("covariance", BLOCKS, v), v @ s)
    root = found.blocks.times("root", BLOCKS, torch.eye(operator.size, dtype=torch.float64))
    assert torch.allclose(root.mT @ root, s)


def test_a_sparse_observation_is_the_dense_one_and_products_of_parts_are_those_of_all(monkeypatch):
    own = case(7)
    matrix = own.matrix * (torch.rand(own.matrix.shape, generator=torch.Generator().manual_seed(2)) < 0.5)
    tangent = FlatTangentModel(own.model, own.names)
    dense = ObservedTangent(tangent, own.x, matrix)
    compressed = sparse_rows(*matrix.nonzero(as_tuple=True), matrix[matrix != 0], tuple(matrix.shape))
    monkeypatch.setattr(jacobian, "_OUTPUTS", 2 * matrix.shape[1])
    sparse = ObservedTangent(tangent, own.x, compressed)
    assert sparse.at_once == 2 < dense.at_once
    v = torch.randn(5, sparse.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(sparse.forward(v), dense.forward(v))
    torch.testing.assert_close(sparse.adjoint(u), dense.adjoint(u))
    torch.testing.assert_close(transposed_rows(compressed).to_dense(), matrix.mT)
    torch.testing.assert_close(gram(compressed), matrix @ matrix.mT)
    exact = [
        DualLaplace(own.model, structured=own.priors, observation=a).fit([(own.x, own.y)]).log_marginal_likelihood()
        for a in (matrix, compressed)
    ]
    assert exact[0] == pytest.approx(exact[1], rel=1e-12)
    wrong = compressed.clone()
    wrong.values()[0] = math.nan
    with pytest.raises(ValueError, match="finite real numbers"):
        ObservedTangent(tangent, own.x, wrong)


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
    for factor in (-1.0, math.nan):
        with pytest.raises(ValueError, match="not positive definite"):
            conjugate_gradients(lambda u, factor=factor: u * factor, right)


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
    s, aj = own.dense()
    h = torch.linalg.inv(s) + aj.mT @ aj / NOISE
    zeta, theta = sampled(own).samples(BLOCKS, NOISE, count=20_000)
    shifted = own.y - own.matrix @ (own.outputs - own.jacobian @ own.theta)
    assert torch.allclose(theta, torch.linalg.solve(h, aj.mT @ shifted / NOISE), atol=1e-6)
    assert misses(zeta, torch.linalg.inv(h)) < 5.5  # some 7,000 different entries


@pytest.mark.parametrize("place", ["tangent_mode", "map"])
def test_gradient_is_unbiased(place):
    own = case(7)
    exact = own.fitted(place).value_and_gradient(PHI)[1]

    def gradient(count, seed=0):
        slopes, noise = sampled(own, num_samples=count, evaluate_at=place).gradient(BLOCKS, NOISE, seed=seed)
        return torch.cat([*slopes.values(), torch.tensor([noise])])

    error = torch.stack([gradient(400, seed) for seed in range(8)]).std(0) / math.sqrt(20)
    assert bool(((gradient(8000) - exact).abs() < 5 * error + 1e-9).all())


def test_at_the_map_only_the_prior_sees_other_weights():
    """The authors' objective: the network's residual, the linearized weights in the prior's term alone."""
    own = case(7)
    s, aj = own.dense()
    weights = torch.randn(len(s), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    plain, other = (sampled(own, evaluate_at="map", **w).gradient(BLOCKS, NOISE) for w in ({}, {"weights": weights}))
    assert plain[1] == other[1]
    k = aj @ s @ aj.mT + NOISE * torch.eye(7, dtype=torch.float64)
    residual = own.y - own.matrix @ own.outputs
    expected = 0.5 * (NOISE * torch.linalg.inv(k).trace() - residual.square().sum() / NOISE)
    seeds = [sampled(own, num_samples=400, evaluate_at="map").gradient(BLOCKS, NOISE, seed=n)[1] for n in range(20)]
    assert sum(seeds) / 20 == pytest.approx(float(expected), rel=0.02)

    def prior_term(phi, theta):
        blocks = sampled(own).blocks
        parts = [blocks.patterns(n, theta) for n in blocks]
        matrices = [torch.linalg.inv(prior.covariance(phi[n])) for n, prior in blocks.items()]
        return sum(0.5 * torch.einsum("nk,kl,nl->", p, m, p) for p, m in zip(parts, matrices, strict=True))

    for name in BLOCKS:
        leaf = BLOCKS[name].clone().requires_grad_()
        change = prior_term({**BLOCKS, name: leaf}, weights) - prior_term({**BLOCKS, name: leaf}, own.theta)
        (slope,) = torch.autograd.grad(change, leaf)
        assert torch.allclose(other[0][name] - plain[0][name], slope, rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="'tangent_mode' or 'map'"):
        sampled(own, evaluate_at="mean")


def test_an_assembled_kernel_gives_the_samples_of_conjugate_gradients():
    own = case(31)
    evidence = sampled(own)
    root = evidence.factor(BLOCKS, NOISE, count=7)
    s, aj = own.dense()
    assert torch.allclose(root @ root.mT, aj @ s @ aj.mT + NOISE * torch.eye(31, dtype=torch.float64))
    found = (evidence.samples(BLOCKS, NOISE, count=3, root=factor) for factor in (None, root))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match="raise jitter"):
        evidence.factor(BLOCKS, -1e6)


def test_linearized_weights_fit_the_measurements():
    own = case(7)
    operator = sampled(own).operator
    found = linearized_weights(operator, own.y, num_steps=400, lr=1e-2, weight_decay=0.0)
    aj, residual = own.matrix @ own.jacobian, own.y - own.matrix @ own.outputs
    before, after = residual.norm(), (residual - aj @ (found - own.theta)).norm()
    best = (residual - aj @ (torch.linalg.pinv(aj) @ residual)).norm()
    assert after < 0.05 * before + best


def joined(result):
    noise = torch.tensor([math.log(result.noise_variance)], dtype=torch.float64)
    return torch.cat([*result.phi.values(), noise])


def test_adam_on_stochastic_gradients_reaches_the_dense_optimum():
    own = case(7)
    dense = own.fitted("tangent_mode")
    start = dense.phi = dense.initial(0.5)
    best = dense.optimize_evidence().objective
    found = sampled(own, num_samples=20, tolerance=1e-6, matrix_free=True)
    result = found.adam(noise_variance=0.5, num_steps=25, lr=0.2, decay_every=15, refresh_every=10)
    first, last = (dense.value_and_gradient(phi)[0] for phi in (start, joined(result)))
    assert last < first - 0.5 * (first - best)


def test_adam_that_was_cut_goes_on_as_if_it_had_not_been(tmp_path):
    """Between two checkpoints; with more steps than the first call had; a damaged file is an error."""
    evidence, options = sampled(case(7), num_samples=4), {"lr": 0.2, "decay_every": 5, "refresh_every": 3}
    whole, told, file = evidence.adam(num_steps=11, **options), [], tmp_path / "new" / "steps.pt"

    def cut(info):
        told.append(info["step"])
        if len(told) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evidence.adam(num_steps=11, checkpoint=file, progress=cut, **options)
    again = evidence.adam(num_steps=11, checkpoint=file, progress=cut, **options)
    assert told == [*range(1, 9), *range(7, 12)]
    assert again.noise_variances == whole.noise_variances and torch.equal(joined(again), joined(whole))
    shifted, larger = case(7), case(20)
    shifted.y = shifted.y + 0.1
    for other in (shifted, larger):
        with pytest.raises(FileError, match="another problem"):
            sampled(other, num_samples=4).adam(num_steps=11, checkpoint=file, **options)
    with pytest.raises(FileError, match="other options"):
        evidence.adam(num_steps=11, checkpoint=file, **options | {"lr": 0.1})
    finished = evidence.adam(num_steps=11, checkpoint=file, progress=cut, **options)
    assert len(told) == 13 and torch.equal(joined(finished), joined(whole))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(FileError, match="truncated"):
        evidence.adam(num_steps=11, checkpoint=file, **options)


def test_unfinished_solves_and_bad_input_are_told():
    own = case(20)
    with pytest.warns(SolverWarning, match="max_iterations or rank"):
        sampled(own, max_iterations=1, rank=0).samples(BLOCKS, 1e-6, count=2)
    with pytest.raises(ValueError, match="says nothing about"):
        own.priors = own.priors[:1]
        sampled(own)
    own = case(20)
    own.y[3] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        sampled(own)


@pytest.mark.parametrize("name", ["ab", "c"])
def test_variances_of_differences_are_estimated_without_bias(name):
    own, count = case(7), 800
    places = differences(SHAPE, own.outputs.numel())
    exact, _ = own.fitted().difference_variances(name, *places)
    found = sampled(own)
    prior = found.blocks[name]
    one, all_ = (found.difference_variances(name, *places, num_probes=n)[0] for n in (1, count))
    for scale in (0.2, 3.0):  # whatever the hyperparameters, from the same estimates
        coefficients = prior.coefficients(scale * torch.ones(len(prior.hyperparameters), dtype=torch.float64))
        wanted = coefficients @ exact
        assert bool((coefficients @ one >= 0).all()), "an estimate of a variance is one"
        assert bool(((coefficients @ all_ - wanted).abs() <= 4.5 * math.sqrt(2 / count) * wanted).all())


@pytest.mark.parametrize("jacobian_weight", [1.0, 0.3])
def test_slopes_of_total_variation_are_those_of_the_dense_evidence(jacobian_weight):
    la = case(7).fitted()
    energy = la.energy(TotalVariation(SHAPE, 0.3, jacobian_weight))
    exact = la.value_and_gradient(PHI, energy)[1] - la.value_and_gradient(PHI)[1]
    found = slopes_of(energy, BLOCKS)
    assert set(found) == {"ab"} and torch.equal(exact[2], torch.zeros(()).double())
    assert torch.allclose(found["ab"], exact[:2], rtol=1e-9) and float(exact[:2].abs().min()) > 1e-3


def test_adam_with_total_variation_goes_to_the_optimum_of_the_dense_evidence():
    own, hyperprior = case(7), TotalVariation(SHAPE, 2.0)
    evidence = sampled(own, num_samples=16, rank=0)
    options = {"noise_variance": NOISE, "num_steps": 40, "lr": 0.1, "decay_every": 20, "hyperprior_probes": 200}
    dense = own.fitted("tangent_mode")
    energy = dense.energy(hyperprior)
    points = [joined(evidence.adam(hyperprior=own, **options)) for own in (None, hyperprior)]
    plain, with_it, start = (dense.value_and_gradient(phi, energy)[0] for phi in (*points, PHI))
    assert with_it < plain - 0.05 and with_it < start
