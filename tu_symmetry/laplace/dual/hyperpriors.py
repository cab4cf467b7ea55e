"""A hyperprior of structured priors: a negative log density (nats) of the hyperparameters, added to the evidence's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jvp

from tu_symmetry._extras import load_forward_mode
from tu_symmetry.laplace.dual.priors import StructuredPrior

_ROUNDING = 1e-13

Energy = Callable[[Mapping[str, Tensor]], Tensor]  # of the blocks' hyperparameters, nats, differentiable
# of a block, for differences ``f[second] - f[first]`` at unit coefficients: [R, pairs], and the size of what cancels
DifferenceVariances = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]


def expected_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """``E |x|`` of ``x ~ N(m, v)``: ``sqrt(2 v / pi) exp(-m^2 / 2 v) + m erf(m / sqrt(2 v))``; ``|m|`` at ``v = 0``."""
    positive = variance > 0
    safe = torch.where(positive, variance, 1.0)
    spread = (2 * safe / math.pi).sqrt() * (-mean.square() / (2 * safe)).exp()
    found = spread + mean * torch.erf(mean / (2 * safe).sqrt())
    return torch.where(positive, found, mean.abs())


def differences(shape: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Places of neighboring pixels, first and second ``[pairs]``, in ``count`` values of images ``[height, width]``."""
    if len(shape) != 2 or math.prod(shape) == 0 or count % math.prod(shape):
        raise ValueError(
            f"image_shape={tuple(shape)} does not fit the network's {count} outputs; it has to be [height, width]"
        )
    index = torch.arange(count, device="cpu").view(-1, *shape)
    first = torch.cat([index[:, :-1].reshape(-1), index[:, :, :-1].reshape(-1)])
    second = torch.cat([index[:, 1:].reshape(-1), index[:, :, 1:].reshape(-1)])
    return first, second


class _Differences(NamedTuple):
    """Of neighbors: the image's own, variances ``[R, pairs]`` for unit coefficients, and the size of what cancels."""

    mean: Tensor
    variances: Tensor
    scale: Tensor

    def expectation(self, prior: StructuredPrior, phi: Tensor) -> tuple[Tensor, Tensor]:
        """``kappa`` of a block, and its derivative in the log length scale."""
        coefficients = prior.coefficients(phi)
        variance = coefficients @ self.variances
        # a variance below the rounding of M_ii + M_jj - 2 M_ij is zero
        variance = torch.where(variance > _ROUNDING * (coefficients.detach().abs() @ self.scale), variance, 0.0)
        kappa = expected_absolute(self.mean, variance).sum()
        direction = torch.zeros_like(phi.detach())
        direction[prior.hyperparameters.index("lengthscale")] = 1
        load_forward_mode()
        change = jvp(prior.coefficients, (phi,), (direction,))[1] @ self.variances
        positive = variance > 0
        safe = torch.where(positive, variance, 1.0)
        density = (-self.mean.square() / (2 * safe)).exp() / (2 * math.pi * safe).sqrt()
        return kappa, torch.where(positive, density * change, 0.0).sum()


@dataclass(frozen=True)
class TotalVariation:
    """The total-variation PredCP (arXiv 2203.00479): samples of the prior should have little total variation.

    For every block ``d`` with a length scale, ``kappa_d = E TV(x^ + J_d theta_d)`` under ``theta_d ~ N(0, S_d)``, in
    closed form, is exponentially distributed, and the change of variables to ``log lengthscale`` follows::

        -log p = sum_d weight * kappa_d - jacobian_weight * log |d kappa_d / d log lengthscale_d|

    Total variation is the sum of the absolute differences of horizontal and vertical neighbors.

    Args:
        image_shape: shape of the outputs, ``[height, width]``.
        weight: rate of the exponential distribution (``scale * measurements * gamma`` in the authors' code).
        jacobian_weight: 1 is the density of the formula above; the authors' code uses ``weight`` here as well.
    """

    image_shape: tuple[int, ...]
    weight: float
    jacobian_weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.weight >= 0 and self.jacobian_weight >= 0):
            raise ValueError(f"weights of a hyperprior are at least 0, got {self.weight} and {self.jacobian_weight}")

    def energy(self, outputs: Tensor, variances: DifferenceVariances, priors: Mapping[str, StructuredPrior]) -> Energy:
        """The negative log density (nats, up to a constant) as a function of the blocks' hyperparameters."""
        blocks = {name: prior for name, prior in priors.items() if "lengthscale" in prior.hyperparameters}
        if not blocks:
            raise ValueError(f"TotalVariation is of length scales, and {list(priors)} have none")
        outputs = outputs.detach().double()
        first, second = (i.to(outputs.device) for i in differences(self.image_shape, outputs.numel()))
        mean = (outputs[second] - outputs[first]).cpu()
        found = {name: _Differences(mean, *(v.cpu() for v in variances(name, first, second))) for name in blocks}

        def energy(phi: Mapping[str, Tensor]) -> Tensor:
            total = torch.zeros((), dtype=torch.float64, device="cpu")
            for name, prior in blocks.items():
                kappa, slope = found[name].expectation(prior, phi[name])
                total = total + self.weight * kappa
                if float(slope.detach()) != 0:  # a block that moves no pixel says nothing about its length scale
                    total = total - self.jacobian_weight * slope.abs().log()
            return total

        return energy
