"""A small image network with a linear observation, and dense formulas in weight space to compare with, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from tu_symmetry.laplace.dual.evidence import DualEvidence, statistics
from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.dual.priors import IsotropicPrior, KernelPrior, StructuredPrior


class Image(nn.Module):
    """Three convolutions, one without a kernel; images of 5 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 3, 3, padding=1)
        self.b = nn.Conv2d(3, 2, 3, padding=1)
        self.c = nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return torch.sigmoid(self.c(h))


SHAPE = (5, 4)
PRIORS: tuple[StructuredPrior, ...] = (
    KernelPrior(("a.weight", "b.weight"), name="ab", variance=0.7, lengthscale=0.8),
    IsotropicPrior(("c.weight",), name="c", variance=1.3),
)


@dataclass
class Case:
    model: nn.Module
    x: Tensor
    y: Tensor
    observation: LinearObservation
    matrix: Tensor
    priors: tuple[StructuredPrior, ...]
    jacobian: Tensor  # [d, size], of the priors' parameters in the model's order
    theta: Tensor
    outputs: Tensor
    names: tuple[str, ...]

    def evidence(self, evaluate_at: str = "map", **options: object) -> DualEvidence:
        parts, start = {}, 0
        own = dict(self.model.named_parameters())
        for name in self.names:
            size = own[name].numel()
            parts[name] = self.jacobian[:, start : start + size].reshape(-1, *own[name].shape)
            start += size
        values = statistics(parts, {n: own[n].detach() for n in self.names}, self.outputs, self.priors)
        return DualEvidence(values, self.priors, self.y, self.observation, evaluate_at=evaluate_at, **options)

    def prior_matrix(self, phi: Tensor, evidence: DualEvidence) -> Tensor:
        """``S`` in the order of the flat weights, entry by entry from the definition."""
        size = self.theta.numel()
        found = torch.zeros(size, size, dtype=torch.float64)
        blocks, _ = evidence.split(phi)
        own, start = dict(self.model.named_parameters()), 0
        for name in self.names:
            (prior,) = (p for p in self.priors if name in p.parameters)
            values = blocks[prior.name].exp().tolist()
            count = own[name].numel()
            for i in range(count):
                for j in range(count):
                    if isinstance(prior, IsotropicPrior):
                        found[start + i, start + j] = values[0] * (i == j)
                    elif i // 9 == j // 9:
                        p, q = divmod(i % 9, 3), divmod(j % 9, 3)
                        distance = math.dist(p, q)
                        found[start + i, start + j] = values[0] * (math.exp(-distance / values[1]) + 1e-6 * (i == j))
            start += count
        return found


def misses(drawn: Tensor, expected: Tensor) -> float:
    """The largest difference between the covariance of samples and the expected one, in standard errors."""
    flat, diagonal = drawn.flatten(1), expected.diagonal()
    error = ((diagonal.unsqueeze(0) * diagonal.unsqueeze(1) + expected.square()) / len(drawn)).sqrt()
    return float(((flat.mT @ flat / len(drawn) - expected).abs() / (error + 1e-12)).max())


def case(values: int | None = 7, seed: int = 0, noise: float = 0.3) -> Case:
    """``values`` measurements of the 20 pixels; None for the pixels themselves."""
    generator = torch.Generator().manual_seed(seed)
    model = Image().double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(1, 1, *SHAPE, generator=generator, dtype=torch.float64)
    names = ("a.weight", "b.weight", "c.weight")
    own = {n: p.detach() for n, p in model.named_parameters()}
    found = jacrev(lambda w: functional_call(model, {**own, **w}, (x,)).reshape(-1))({n: own[n] for n in names})
    jacobian = torch.cat([found[n].reshape(20, -1) for n in names], dim=1).detach()
    theta = torch.cat([own[n].reshape(-1) for n in names])
    outputs = model(x).detach().reshape(-1)
    eye = torch.eye(20, dtype=torch.float64)
    matrix = eye if values is None else torch.randn(values, 20, generator=generator, dtype=torch.float64)
    truth = torch.rand(20, generator=generator, dtype=torch.float64)
    y = matrix @ truth + noise * torch.randn(len(matrix), generator=generator, dtype=torch.float64)
    observation = LinearObservation() if values is None else LinearObservation(matrix)
    shapes = {n: tuple(p.shape) for n, p in own.items()}
    priors = tuple(p.resolve(shapes) for p in PRIORS)
    return Case(model, x, y, observation, matrix, priors, jacobian, theta, outputs, names)
