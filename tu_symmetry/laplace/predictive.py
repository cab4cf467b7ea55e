"""Prediction with a :class:`~tu_symmetry.laplace.fitted.FittedLaplace`: which way, which link, in which shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.function_posterior import (
    function_covariance,
    function_samples,
    function_variance,
    gaussian_samples,
    in_closed_form,
    within_positions,
)
from tu_symmetry.laplace.likelihood import LinkApprox
from tu_symmetry.laplace.tangent import evaluating

Covariance = Literal["auto", "exact", "samples"]

_EXACT_OUTPUTS = 128  # up to as many outputs, covariances are cheaper than 100 samples
_EXACT_ENTRIES = 1 << 26  # of the Jacobian of one sample


def _exact_is_cheap(fitted: FittedLaplace, sampled: bool) -> bool:
    """Few outputs; apart from Kronecker factors, not too large a Jacobian of one sample."""
    outputs = fitted.summary.outputs
    if not sampled and in_closed_form(fitted):
        return True
    if outputs > _EXACT_OUTPUTS:
        return False
    return fitted.layers is not None or outputs * fitted.tangent.size <= _EXACT_ENTRIES


def in_own_shape(fitted: FittedLaplace, inputs: Any, found: Any) -> Any:
    """Predictions of several positions, in the shape that the network gives its outputs."""
    if isinstance(found, tuple):
        return type(found)(*(in_own_shape(fitted, inputs, own) for own in found))
    return found if fitted.summary.positions == 1 else fitted.tangent.in_own_shape(inputs, found)


def tempered_predictives(
    fitted: FittedLaplace,
    inputs: Any,
    temperatures: Sequence[float],
    *,
    num_samples: int,
    link_approx: LinkApprox,
    covariance: Covariance,
    seed: int,
) -> list[Any]:
    """The predictive of one batch at several temperatures, from the same covariances or samples."""
    likelihood = fitted.likelihood
    deviations: Tensor | None = None
    sampled = not likelihood.noisy and link_approx == "mc"
    if not any(temperatures):
        with evaluating(fitted.model):
            mean = fitted.tangent.outputs(inputs)
        variance = torch.zeros_like(mean)
    elif covariance == "exact" or (covariance == "auto" and _exact_is_cheap(fitted, sampled)):
        if sampled:
            mean, matrix = function_covariance(fitted, inputs)
            matrix = within_positions(mean, matrix)
            variance = matrix.diagonal(dim1=-2, dim2=-1)
            deviations = gaussian_samples(matrix, num_samples, seed)
        else:
            mean, variance = function_variance(fitted, inputs)
    else:
        mean, changes = function_samples(fitted, inputs, num_samples, seed)
        variance = changes.square().mean(0)
        deviations = changes if sampled else None
    return [
        likelihood.predict(mean, variance, deviations, temperature=t, noise=fitted.noise_variance) for t in temperatures
    ]
