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
    gaussian_samples,
    within_positions,
)
from tu_symmetry.laplace.likelihood import LinkApprox
from tu_symmetry.laplace.outputs import class_axis_of
from tu_symmetry.laplace.tangent import evaluating

Covariance = Literal["auto", "exact", "samples"]

_EXACT_OUTPUTS = 128  # up to as many outputs, covariances are cheaper than 100 samples
_EXACT_ENTRIES = 1 << 26  # of the Jacobian of one sample


def _exact_is_cheap(fitted: FittedLaplace) -> bool:
    """Few outputs; apart from Kronecker factors, not too large a Jacobian of one sample."""
    outputs = fitted.summary.outputs
    return outputs <= _EXACT_OUTPUTS and (fitted.layers is not None or outputs * fitted.tangent.size <= _EXACT_ENTRIES)


def in_own_shape(fitted: FittedLaplace, inputs: Any, found: Any) -> Any:
    """Predictions ``[..., batch, positions, outputs]`` of several positions in the shape of the network's outputs."""
    if isinstance(found, tuple):
        return type(found)(*(in_own_shape(fitted, inputs, own) for own in found))
    if fitted.summary.positions == 1:
        return found
    shape = fitted.tangent.own_shape(inputs)
    axis = class_axis_of(len(shape), fitted.tangent.class_axis)
    places = [n for i, n in enumerate(shape) if i not in (0, axis)]
    return found.unflatten(-2, places).movedim(-1, axis - len(shape))


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
    elif covariance == "exact" or (covariance == "auto" and _exact_is_cheap(fitted)):
        mean, joint = function_covariance(fitted, inputs)
        matrix = within_positions(mean, joint)
        variance = matrix.diagonal(dim1=-2, dim2=-1)
        deviations = gaussian_samples(matrix, num_samples, seed) if sampled else None
    else:
        mean, changes = function_samples(fitted, inputs, num_samples, seed)
        variance = changes.square().mean(0)
        deviations = changes if sampled else None
    return [
        likelihood.predict(mean, variance, deviations, temperature=t, noise=fitted.noise_variance) for t in temperatures
    ]
