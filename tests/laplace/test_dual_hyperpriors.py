"""The closed-form total-variation hyperprior against samples and finite differences, float64."""

import math

import pytest
import torch
from dual_oracles import SHAPE, case

from tu_symmetry.laplace.dual.evidence import HyperpriorContext, draw, optimize
from tu_symmetry.laplace.dual.hyperpriors import TotalVariation, differences, expected_absolute

PHI = torch.tensor([-0.4, 0.3, 0.2, -1.1], dtype=torch.float64)


def total_variation(images):
    rows = (images[..., 1:, :] - images[..., :-1, :]).abs().sum((-2, -1))
    return rows + (images[..., 1:] - images[..., :-1]).abs().sum((-2, -1))


def expectation(evidence, phi, prior=None):
    prior = TotalVariation(SHAPE, 1.0) if prior is None else prior
    blocks, _ = evidence.split(phi)
    context = HyperpriorContext(evidence.statistics, evidence.priors, blocks)
    return prior.expectation("ab", evidence.priors["ab"].coefficients(blocks["ab"]), context)


def test_expected_absolute_value():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400_000, generator=generator, dtype=torch.float64)
    for mean, variance in ((0.0, 1.0), (0.5, 0.2), (-2.0, 3.0)):
        samples = (mean + math.sqrt(variance) * noise).abs()
        found = expected_absolute(torch.tensor(mean).double(), torch.tensor(variance).double())
        assert abs(float(found - samples.mean())) < 4.5 * float(samples.std()) / len(noise) ** 0.5
    still = torch.tensor([0.7, -0.7, 0.0], dtype=torch.float64)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    found = expected_absolute(still, v)
    assert torch.equal(found.detach(), still.abs())
    assert torch.equal(torch.autograd.grad(found.sum(), v)[0], torch.zeros(3, dtype=torch.float64))


def test_differences_are_those_of_neighbors():
    first, second = differences((2, 3), 12)  # two images
    images = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = total_variation(images.view(2, 2, 3)).sum()
    assert torch.allclose((images[second] - images[first]).abs().sum(), expected)
    with pytest.raises(ValueError, match="image_shape"):
        differences((5, 5), 12)


def test_kappa_is_the_expected_total_variation():
    own = case(7)
    evidence = own.evidence()
    kappa, _ = expectation(evidence, PHI)
    own_kernel = torch.einsum("r,rij->ij", evidence.coefficients(PHI)["ab"], evidence.statistics.kernels["ab"])
    drawn = draw(own_kernel, 40_000, torch.Generator().manual_seed(1)) + own.outputs
    samples = total_variation(drawn.view(-1, *SHAPE))
    assert abs(float(kappa - samples.mean())) < 4.5 * float(samples.std()) / 200


def test_slope_and_gradients_against_central_differences():
    evidence = case(7).evidence()
    step = torch.tensor([0, 1e-5, 0, 0], dtype=torch.float64)
    _, slope = expectation(evidence, PHI)
    numeric = (expectation(evidence, PHI + step)[0] - expectation(evidence, PHI - step)[0]) / 2e-5
    assert float(slope) == pytest.approx(float(numeric), rel=1e-6)
    for weight, jacobian_weight in ((2.5, 1.0), (2.5, 2.5), (0.0, 1.0), (2.5, 0.0)):
        whole = case(7).evidence(hyperprior=TotalVariation(SHAPE, weight, jacobian_weight=jacobian_weight))
        value, gradient = whole.value_and_gradient(PHI)
        expected = evidence.value(PHI) + weight * float(expectation(evidence, PHI)[0])
        expected -= jacobian_weight * math.log(abs(float(slope)))
        assert value == pytest.approx(expected, rel=1e-12)
        for i in range(4):
            move = torch.zeros(4, dtype=torch.float64)
            move[i] = 1e-5
            numeric = (whole.value(PHI + move) - whole.value(PHI - move)) / 2e-5
            assert float(gradient[i]) == pytest.approx(numeric, rel=1e-6, abs=1e-6)


def test_saturated_pixels_have_no_variance_and_give_no_nan():
    own = case(7)
    own.jacobian[:12] = 0  # three rows of pixels stand still
    evidence = own.evidence(hyperprior=TotalVariation(SHAPE, 3.0))
    kappa, slope = expectation(evidence, PHI)
    assert torch.isfinite(kappa) and torch.isfinite(slope)
    first, second = differences(SHAPE, 20)
    still = (second < 12) & (first < 12)
    lower = float((own.outputs[second] - own.outputs[first])[still].abs().sum())
    assert float(kappa) >= lower
    assert torch.isfinite(evidence.value_and_gradient(PHI)[1]).all()
    found = optimize(evidence, evidence.initial(0.5))
    assert math.isfinite(found.objective)
    own.jacobian[:] = 0
    dead = own.evidence(hyperprior=TotalVariation(SHAPE, 3.0))
    value, gradient = dead.value_and_gradient(PHI)
    assert math.isfinite(value) and torch.isfinite(gradient).all()
    tv = float(total_variation(own.outputs.view(SHAPE)))
    assert float(expectation(dead, PHI)[0]) == pytest.approx(tv)


def test_the_hyperprior_pulls_to_smoother_samples():
    evidence = case(7).evidence()
    plain = optimize(evidence, evidence.initial())
    strong = case(7).evidence(hyperprior=TotalVariation(SHAPE, 50.0))
    smooth = optimize(strong, strong.initial())
    assert float(expectation(evidence, smooth.phi)[0]) < float(expectation(evidence, plain.phi)[0])


def test_blocks_without_a_length_scale_are_refused():
    own = case(7)
    context = HyperpriorContext(own.evidence().statistics, {"c": own.priors[1]}, {})
    with pytest.raises(ValueError, match="length scale"):
        TotalVariation(SHAPE, 1.0)({}, context)
    with pytest.raises(ValueError, match="at least 0"):
        TotalVariation(SHAPE, -1.0)
