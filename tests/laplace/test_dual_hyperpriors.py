"""The closed-form total-variation hyperprior against samples and finite differences, float64."""

import math

import pytest
import torch
from dual_oracles import PHI, SHAPE, case

from tu_symmetry.laplace import TotalVariation
from tu_symmetry.laplace.dual.hyperpriors import differences, expected_absolute
from tu_symmetry.routines.deep_image_prior import total_variation


def kappa(la, phi):
    return float(la.energy(TotalVariation(SHAPE, 1.0, 0.0))(la.split(phi)[0]))


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
    assert torch.allclose((images[second] - images[first]).abs().sum(), total_variation(images.view(2, 2, 3)).sum())


def test_the_energy_is_that_of_the_expected_total_variation():
    own = case(7)
    la = own.fitted()
    la.phi[2] = -60.0  # the block without a length scale stands still
    samples = total_variation(la.function_samples(40_000, seed=1, prior=True))
    assert abs(kappa(la, PHI) - float(samples.mean())) < 4.5 * float(samples.std()) / 200
    step = torch.tensor([0, 1e-5, 0, 0], dtype=torch.float64)
    slope = (kappa(la, PHI + step) - kappa(la, PHI - step)) / 2e-5
    for weight, jacobian_weight in ((2.5, 1.0), (2.5, 2.5), (0.0, 1.0), (2.5, 0.0)):
        energy = la.energy(TotalVariation(SHAPE, weight, jacobian_weight))
        value, gradient = la.value_and_gradient(PHI, energy)
        expected = la.value_and_gradient(PHI)[0] + weight * kappa(la, PHI) - jacobian_weight * math.log(abs(slope))
        assert value == pytest.approx(expected, rel=1e-8)
        for i, move in enumerate(1e-5 * torch.eye(4, dtype=torch.float64)):
            high, low = (la.value_and_gradient(PHI + sign * move, energy)[0] for sign in (1, -1))
            assert float(gradient[i]) == pytest.approx((high - low) / 2e-5, rel=1e-6, abs=1e-6)


def test_saturated_pixels_have_no_variance_and_give_no_nan():
    own = case(7, still=12)  # three rows of pixels
    la = own.fitted()
    first, second = differences(SHAPE, 20)
    still = (second < 12) & (first < 12)
    assert kappa(la, PHI) >= float((own.outputs[second] - own.outputs[first])[still].abs().sum())
    assert torch.isfinite(la.value_and_gradient(PHI, la.energy(TotalVariation(SHAPE, 3.0)))[1]).all()
    assert math.isfinite(la.optimize_evidence(hyperprior=TotalVariation(SHAPE, 3.0)).objective)
    dead = case(7, still=20).fitted()
    value, gradient = dead.value_and_gradient(PHI, dead.energy(TotalVariation(SHAPE, 3.0)))
    assert math.isfinite(value) and torch.isfinite(gradient).all()
    assert kappa(dead, PHI) == pytest.approx(float(total_variation(dead.outputs.view(SHAPE))))


def test_the_hyperprior_pulls_to_smoother_samples():
    la = case(7).fitted()
    plain = la.optimize_evidence()
    smooth = la.optimize_evidence(hyperprior=TotalVariation(SHAPE, 50.0))
    assert kappa(la, smooth.phi) < kappa(la, plain.phi)


def test_what_cannot_work_is_refused():
    own = case(7)
    own.priors = own.priors[1:]
    own.observation = case(7).observation
    for match, call in (
        ("have none", lambda: own.fitted().energy(TotalVariation(SHAPE, 1.0))),
        ("at least 0", lambda: TotalVariation(SHAPE, -1.0)),
        ("image_shape", lambda: case(7).fitted().energy(TotalVariation((5, 5), 1.0))),
    ):
        with pytest.raises(ValueError, match=match):
            call()
