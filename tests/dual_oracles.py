"""A small image network with a linear observation, and dense formulas in weight space to compare with, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from tu_symmetry.laplace import DualLaplace, IsotropicPrior, KernelPrior
from tu_symmetry.laplace.dual.priors import StructuredPrior

SHAPE = (5, 4)
PHI = torch.tensor([-0.4, 0.3, 0.2, -1.1], dtype=torch.float64)  # log variance, log length scale; log variance; noise
NOISE = math.exp(-1.1)
PRIORS: tuple[StructuredPrior, ...] = (
    KernelPrior(("a.weight", "b.weight"), name="ab", variance=0.7, lengthscale=0.8),
    IsotropicPrior(("c.weight",), name="c", variance=1.3),
)


class Image(nn.Module):
    """Three convolutions, one without a kernel; images of 5 x 4 pixels, the first ``still`` of them the input's."""

    def __init__(self, still: int = 0) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 3, 3, padding=1)
        self.b = nn.Conv2d(3, 2, 3, padding=1)
        self.c = nn.Conv2d(2, 1, 1)
        self.still = (torch.arange(20) < still).view(SHAPE)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return torch.where(self.still, x, torch.sigmoid(self.c(h)))


@dataclass
class Case:
    model: nn.Module
    x: Tensor
    y: Tensor
    matrix: Tensor
    observation: Tensor | None
    jacobian: Tensor  # [d, size], of the priors' parameters in the model's order
    theta: Tensor
    outputs: Tensor
    names: tuple[str, ...] = ("a.weight", "b.weight", "c.weight")
    priors: tuple[StructuredPrior, ...] = PRIORS

    def fitted(self, evaluate_at: Any = "map") -> DualLaplace:
        la = DualLaplace(self.model, structured=self.priors, observation=self.observation, evaluate_at=evaluate_at)
        la.fit([(self.x, self.y.view(1, -1))])
        la.phi = PHI.clone()
        return la

    def prior_matrix(self) -> Tensor:
        """``S`` at ``PHI`` in the order of the flat weights, entry by entry from the definition."""
        variance, length, other, _ = PHI.exp().tolist()
        count, size = len(self.theta) - 2, len(self.theta)
        found = torch.diag(torch.full((size,), other, dtype=torch.float64))
        for i in range(count):
            for j in range(count):
                distance = math.dist(divmod(i % 9, 3), divmod(j % 9, 3))
                one = variance * (math.exp(-distance / length) + 1e-6 * (i == j))
                found[i, j] = one if i // 9 == j // 9 else 0.0
        return found

    def dense(self) -> tuple[Tensor, Tensor]:
        """``S``, and ``A J``."""
        return self.prior_matrix(), self.matrix @ self.jacobian


def misses(drawn: Tensor, expected: Tensor) -> float:
    """The largest difference between the covariance of samples and the expected one, in standard errors."""
    flat, diagonal = drawn.flatten(1), expected.diagonal()
    error = ((diagonal.unsqueeze(0) * diagonal.unsqueeze(1) + expected.square()) / len(drawn)).sqrt()
    return float(((flat.mT @ flat / len(drawn) - expected).abs() / (error + 1e-12)).max())


def case(values: int | None = 7, still: int = 0) -> Case:
    """``values`` measurements of the 20 pixels; None for the pixels themselves."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    model = Image(still).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.7 * normal(*p.shape))
    x, own = normal(1, 1, *SHAPE), {n: p.detach() for n, p in model.named_parameters()}
    weights = {n: own[n] for n in Case.names}
    found = jacrev(lambda w: functional_call(model, {**own, **w}, (x,)).reshape(-1))(weights)
    matrix = torch.eye(20, dtype=torch.float64) if values is None else normal(values, 20)
    y = matrix @ torch.rand(20, generator=generator, dtype=torch.float64) + 0.3 * normal(len(matrix))
    return Case(
        model, x, y, matrix, None if values is None else matrix,
        torch.cat([t.reshape(20, -1) for t in found.values()], dim=1).detach(),
        torch.cat([t.reshape(-1) for t in weights.values()]), model(x).detach().reshape(-1),
    )  # fmt: skip
