"""Hyperpriors of structured priors, as callables on their coefficients and the sufficient statistics.

A hyperprior returns a negative log density (nats, up to a constant) that :class:`~.evidence.DualEvidence`
adds to the negative log evidence. It may read the kernels ``M`` of the outputs, so that one can state what *functions*
should look like, which is what a predictive complexity prior (PredCP) does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp

from tu_symmetry._extras import load_forward_mode
from tu_symmetry.laplace.dual.evidence import HyperpriorContext

_ROUNDING = 1e-13


def expected_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """``E |x|`` of ``x ~ N(mean, variance)`` in closed form; ``|mean|`` where the variance is zero.

    ``sqrt(2 v / pi) exp(-m^2 / 2 v) + m erf(m / sqrt(2 v))``. Its derivative in ``v`` is the density of ``x`` at 0.
    """
    positive = variance > 0
    safe = torch.where(positive, variance, 1.0)
    spread = (2 * safe / math.pi).sqrt() * (-mean.square() / (2 * safe)).exp()
    found = spread + mean * torch.erf(mean / (2 * safe).sqrt())
    return torch.where(positive, found, mean.abs())


def differences(shape: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """The pairs of neighbouring pixels of images stored one after the other, along every space axis.

    Args:
        shape: ``[height, width]``, or ``[channels, height, width]`` whose channels are separate.
        count: number of values of all images.

    Returns:
        Two index vectors ``[pairs]``: a pair's difference is ``x[second] - x[first]``.

    Raises:
        ValueError: a shape that does not divide the values.
    """
    size = math.prod(shape)
    if len(shape) not in (2, 3) or size == 0 or count % size:
        raise ValueError(
            f"image_shape={tuple(shape)} does not fit the network's {count} outputs; it has to be [height, width] or "
            "[channels, height, width]"
        )
    index = torch.arange(count, device="cpu").view(-1, *shape[-2:])
    first = torch.cat([index[:, :-1].reshape(-1), index[:, :, :-1].reshape(-1)])
    second = torch.cat([index[:, 1:].reshape(-1), index[:, :, 1:].reshape(-1)])
    return first, second


@dataclass(frozen=True, eq=False)
class TotalVariation:
    """The total-variation PredCP: samples of the prior should have little total variation.

    For every block ``d`` with a length scale, ``kappa_d = E TV(x^ + J_d theta_d)`` under ``theta_d ~ N(0, S_d)``, in
    closed form, is exponentially distributed, and the change of variables to ``log lengthscale`` follows::

        -log p = sum_d weight * kappa_d - jacobian_weight * log |d kappa_d / d log lengthscale_d|

    Total variation is anisotropic: the sum of the absolute differences of horizontal and vertical neighbours. Pixels
    that a block does not move (a saturated output) have variance 0 and contribute ``|difference|``, exactly.

    Args:
        image_shape: shape of the outputs, ``[height, width]`` or ``[channels, height, width]``.
        weight: rate of the exponential distribution (``scale * measurements * gamma`` in arXiv 2203.00479's code).
        jacobian_weight: 1 is the density of the formula above; the authors' code uses ``weight`` here as well.
        blocks: names of the blocks; None for all with a length scale.

    Raises:
        ValueError: negative weights.
    """

    image_shape: tuple[int, ...]
    weight: float
    jacobian_weight: float = 1.0
    blocks: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not (self.weight >= 0 and self.jacobian_weight >= 0):
            raise ValueError(f"weights of a hyperprior are at least 0, got {self.weight} and {self.jacobian_weight}")
        object.__setattr__(self, "image_shape", tuple(self.image_shape))

    def __call__(self, coefficients: Mapping[str, Tensor], context: HyperpriorContext) -> Tensor:
        """Negative log density (nats, up to a constant).

        Raises:
            ValueError: an image shape that does not fit, blocks that do not exist or have no length scale.
        """
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for name in self._blocks(context):
            kappa, slope = self.expectation(name, coefficients[name], context)
            total = total + self.weight * kappa
            if float(slope.detach()) != 0:  # a block that moves no pixel says nothing about its length scale
                total = total - self.jacobian_weight * slope.abs().log()
        return total

    def expectation(self, name: str, coefficients: Tensor, context: HyperpriorContext) -> tuple[Tensor, Tensor]:
        """``kappa`` of a block, and its derivative in the log length scale."""
        mean, variances, scale = self._moments(name, context)
        prior, phi = context.priors[name], context.phi[name]
        variance = coefficients @ variances
        # a variance below the rounding of M_ii + M_jj - 2 M_ij is zero
        variance = torch.where(variance > _ROUNDING * (coefficients.detach().abs() @ scale), variance, 0.0)
        kappa = expected_absolute(mean, variance).sum()
        direction = torch.zeros_like(phi.detach())
        direction[prior.hyperparameters.index("lengthscale")] = 1
        load_forward_mode()
        change = jvp(prior.coefficients, (phi,), (direction,))[1] @ variances
        positive = variance > 0
        safe = torch.where(positive, variance, 1.0)
        density = (-mean.square() / (2 * safe)).exp() / (2 * math.pi * safe).sqrt()
        return kappa, torch.where(positive, density * change, 0.0).sum()

    def _blocks(self, context: HyperpriorContext) -> tuple[str, ...]:
        able = tuple(n for n, prior in context.priors.items() if "lengthscale" in prior.hyperparameters)
        wrong = [name for name in self.blocks or () if name not in able]
        if wrong or not able:
            raise ValueError(f"{wrong or 'none'} of the prior's blocks have a length scale for TotalVariation: {able}")
        return able if self.blocks is None else self.blocks

    def _moments(self, name: str, context: HyperpriorContext) -> tuple[Tensor, Tensor, Tensor]:
        """Differences of the image, their variances for unit coefficients ``[R, pairs]``, and the scale of these."""
        key = (self.image_shape, name)
        if key in context.kept:
            return context.kept[key]
        outputs = context.statistics.outputs.detach().double()
        first, second = (i.to(outputs.device) for i in differences(self.image_shape, outputs.numel()))
        variances, scale = context.statistics.difference_variances(name, first, second)
        context.kept[key] = (outputs[second] - outputs[first]).cpu(), variances.cpu(), scale.cpu()
        return context.kept[key]
