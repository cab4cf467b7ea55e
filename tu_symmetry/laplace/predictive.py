"""Prediction with a :class:`~tu_symmetry.laplace.fitted.FittedLaplace`: which way, which link, on which device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace import function_posterior
from tu_symmetry.laplace.blocks import Posterior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.function_posterior import WeightSamples
from tu_symmetry.laplace.inputs import batch_size, follows, mapped, ordinary
from tu_symmetry.laplace.likelihood import LinkApprox
from tu_symmetry.laplace.tangent import evaluating

Covariance = Literal["auto", "exact", "samples"]

_EXACT_OUTPUTS = 128  # up to as many outputs, covariances are cheaper than 100 samples
_EXACT_ENTRIES = 1 << 26  # of the Jacobian of one sample


class Drawer:
    """Samples of the weights, kept as long as the same ones are asked for."""

    def __init__(self) -> None:
        self._kept: WeightSamples | None = None

    def samples(self, fitted: FittedLaplace, count: int, seed: int) -> WeightSamples:
        """``count`` samples of the posterior, a function of it and of the seed alone, whatever the temperature."""
        kept = self._kept
        if kept is None or (kept.count, kept.seed) != (count, seed) or not _same(kept.posterior, fitted.posterior):
            kept = self._kept = WeightSamples(fitted.posterior, count, seed, fitted.tangent.point()[:1])
        return kept


def _same(one: Posterior, other: Posterior) -> bool:
    """The same Gaussian, of the very same blocks."""
    alike = len(one.blocks) == len(other.blocks) and all(a is b for a, b in zip(one.blocks, other.blocks, strict=True))
    return alike and one.noise == other.noise and torch.equal(one.log_precision, other.log_precision)


def on_device(fitted: FittedLaplace, inputs: Any) -> Any:
    """A batch of inputs on the network's device, with the gradient history that it has."""
    device = next(fitted.model.parameters()).device
    with torch.inference_mode(False):
        found = mapped(lambda own: own.to(device), ordinary(inputs, history=True))
    if batch_size(found) == 0:
        raise ValueError("the batch holds no samples, so that there is nothing to predict")
    return found


def function_covariance(fitted: FittedLaplace, inputs: Any, *, joint: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs and their exact covariances, joint over positions: :func:`.function_posterior.function_covariance`."""
    outputs, matrix = function_posterior.function_covariance(
        fitted.tangent, fitted.posterior, fitted.layers, inputs, whole=fitted.curvature.whole, joint=joint
    )
    return outputs, matrix if fitted.temperature == 1 else fitted.temperature * matrix


def function_samples(
    fitted: FittedLaplace, drawer: Drawer, inputs: Any, num_samples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Outputs, and samples of their deviations ``[samples, *outputs.shape]``, joint over all inputs."""
    samples = drawer.samples(fitted, num_samples, seed)
    outputs, changes = function_posterior.function_samples(fitted.tangent, samples, inputs)
    return outputs, changes if fitted.temperature == 1 else fitted.temperature**0.5 * changes


def _exact_is_cheap(fitted: FittedLaplace, inputs: Any, sampled: bool) -> bool:
    """Few outputs; apart from Kronecker factors, not too large a Jacobian of one sample; with gradients, of all."""
    outputs = fitted.summary.outputs
    if not sampled and function_posterior.in_closed_form(fitted.tangent, fitted.posterior):
        return True
    if outputs > _EXACT_OUTPUTS:
        return False
    if follows(inputs):
        outputs *= batch_size(inputs)
    elif fitted.layers is not None:
        return True
    return outputs * fitted.tangent.size <= _EXACT_ENTRIES


def in_own_shape(fitted: FittedLaplace, inputs: Any, found: Any) -> Any:
    """Predictions of several positions, in the shape that the network gives its outputs."""
    if isinstance(found, tuple):
        return type(found)(*(in_own_shape(fitted, inputs, own) for own in found))
    return found if fitted.summary.positions == 1 else fitted.tangent.in_own_shape(inputs, found)


def tempered_predictives(
    fitted: FittedLaplace,
    drawer: Drawer,
    inputs: Any,
    temperatures: Sequence[float],
    *,
    num_samples: int,
    link_approx: LinkApprox,
    covariance: Covariance,
    seed: int,
) -> list[Any]:
    """The predictive of one batch at several temperatures, from the same covariances or samples."""
    fitted, likelihood = replace(fitted, temperature=1.0), fitted.likelihood
    deviations: Tensor | None = None
    sampled = likelihood.labels and link_approx == "mc"
    if not any(temperatures):
        with evaluating(fitted.model):
            mean = fitted.tangent.outputs(inputs)
        variance = torch.zeros_like(mean)
    elif covariance == "exact" or (covariance == "auto" and _exact_is_cheap(fitted, inputs, sampled)):
        if sampled:
            mean, matrix = function_covariance(fitted, inputs)
            matrix = function_posterior.within_positions(mean, matrix)
            variance = matrix.diagonal(dim1=-2, dim2=-1)
            deviations = function_posterior.gaussian_samples(matrix, num_samples, seed)
        else:
            mean, variance = function_posterior.function_variance(
                fitted.tangent, fitted.posterior, fitted.layers, inputs, fitted.curvature.whole
            )
    else:
        mean, changes = function_samples(fitted, drawer, inputs, num_samples, seed)
        variance = changes.square().mean(0)
        deviations = changes if sampled else None
    return [
        likelihood.predict(mean, variance, deviations, temperature=t, noise=fitted.noise_variance) for t in temperatures
    ]
