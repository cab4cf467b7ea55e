"""What the Laplace tests compare with: dense Jacobians and Hessians by ``torch.func``, in float64, of tiny networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap
from torch.nn import functional as F

from tu_symmetry.laplace.blocks import CoupledBlock
from tu_symmetry.laplace.linearized import LinearizedLaplace


def agree(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Two results (dataclasses of numbers) of the same computation, from tensors that may lie elsewhere in memory."""
    torch.testing.assert_close(asdict(found), asdict(expected), rtol=tolerance, atol=tolerance, equal_nan=True)


def data(
    *shape: int, outputs: int, kind: str = "classification", samples: int = 9, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Inputs ``[samples, *shape]``, and labels or real targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    if kind == "classification":
        return x, torch.randint(0, outputs, (samples,), generator=generator)
    return x, torch.randn(samples, outputs, generator=generator, dtype=torch.float64)


def randomize(model: nn.Module, seed: int = 0, scale: float = 0.6) -> nn.Module:
    """Float64, with random weights, affine parameters and running statistics; in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    model.double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator, dtype=torch.float64))
            if p.ndim == 1 and name.endswith("weight"):
                p.add_(1)
        for name, b in model.named_buffers():
            if b.is_floating_point():
                noise = torch.rand(b.shape, generator=generator, dtype=torch.float64)
                b.copy_(0.5 + noise if name.endswith("var") else 0.3 * noise)
    return model


def convolutional() -> nn.Module:
    return randomize(
        nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        )
    )  # fmt: skip


def mlp(outputs: int = 3, *, inputs: int = 4, hidden: int = 5, seed: int = 0, scale: float = 0.6) -> nn.Module:
    """The network of most tests."""
    return randomize(nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)), seed, scale)


def cnn() -> nn.Module:
    return randomize(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 2, groups=2, dilation=2, padding=1, padding_mode="circular"),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(36, 3),
        )
    )


class Tokens(nn.Module):
    """Embedding, normalizations and linear layers over tokens, mean-pooled or with outputs for each."""

    def __init__(self, pooled: bool = True) -> None:
        super().__init__()
        self.pooled = pooled
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 5)
        self.scale = nn.RMSNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.scale(self.mix(self.norm(self.table(tokens)))))
        return self.head(x.mean(1) if self.pooled else x)


class SelfAttention(nn.Module):
    def __init__(self, separate: bool, tokens: int = 3) -> None:
        super().__init__()
        sizes = {"kdim": 3, "vdim": 5} if separate else {}
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **sizes)
        self.separate = separate
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x[..., :4], x[..., :3], x[..., :5]) if self.separate else (x, x, x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.attention(q, k, v, attn_mask=mask, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    """Sequences ``[batch, steps, inputs]``, by an operator without forward-mode derivative."""

    def __init__(self, inputs: int = 4) -> None:
        super().__init__()
        self.memory, self.head = nn.LSTM(inputs, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.memory(x)[0][:, -1])
        return found


def fitted(model: nn.Module, x: Any, y: Tensor, kind: Any = "classification", **options: Any) -> LinearizedLaplace:
    """At the network's own weights, with one precision of one, from two batches; or as ``options`` say."""
    half = (len(x) + 1) // 2 if isinstance(x, Tensor) else 0
    batches = [(x[:half], y[:half]), (x[half:], y[half:])] if 0 < half < len(x) else [(x, y)]
    return LinearizedLaplace(model, kind, **({"prior": "single", "evaluate_at": "map"} | options)).fit(batches)


def split(model: nn.Module, names: Sequence[str]) -> tuple[Tensor, Callable[[Tensor, Any], Tensor]]:
    """The flat vector of the named parameters, and the network as a function of it and of a batch."""
    own = {n: p.detach() for n, p in model.named_parameters()}
    point = torch.cat([own[n].reshape(-1) for n in names])

    def function(theta: Tensor, inputs: Any) -> Tensor:
        pieces = theta.split([own[n].numel() for n in names])
        chosen = {n: piece.view(own[n].shape) for n, piece in zip(names, pieces, strict=True)}
        return functional_call(model, {**own, **chosen}, inputs if isinstance(inputs, tuple) else (inputs,))

    return point, function


def jacobian(model: nn.Module, names: Sequence[str], inputs: Any) -> Tensor:
    """``[batch, outputs, size]``."""
    point, function = split(model, names)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return jacrev(function)(point, inputs).detach()


def losses(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Loss of one sample (nats), for unit noise and without constants."""
    if kind == "classification":
        return lambda f, y: F.cross_entropy(f, y)
    return lambda f, y: 0.5 * (f - y).square().sum()


def output_matrices(kind: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Hessian of every sample's loss with respect to the outputs."""
    return vmap(hessian(losses(kind)))(outputs, targets)


def exact_ggn(model: nn.Module, names: Sequence[str], inputs: Any, targets: Tensor, kind: str) -> Tensor:
    """``sum_n J_n^T H_n J_n``, ``[size, size]``; over all positions of all samples where outputs have several."""
    jac = jacobian(model, names, inputs)
    jac = jac.reshape(-1, *jac.shape[-2:])
    point, function = split(model, names)
    outputs = function(point, inputs).flatten(0, -2)
    flat = targets.reshape(-1, *targets.shape[2:]) if len(outputs) > len(targets) else targets
    middle = output_matrices(kind, outputs, flat)
    return torch.einsum("nci,ncd,ndj->ij", jac, middle, jac)


def dense_curvature(la: LinearizedLaplace) -> Tensor:
    """The blocks of a fitted approximation as one matrix (unit noise)."""
    size = la.tangent.size
    found = torch.zeros(size, size, dtype=torch.float64)
    for block in la.posterior.blocks:
        own = slice(block.start, block.stop)
        if isinstance(block, CoupledBlock):
            found[own, own] = block.matrix
        else:
            eye = torch.eye(block.stop - block.start, dtype=torch.float64)
            found[own, own] = block.from_basis(block.to_basis(eye) * block.eigenvalues())
    return found


def dense_covariance(la: LinearizedLaplace) -> Tensor:
    """Posterior covariance from the definition: ``(H / v + Lambda)^-1``."""
    precision = la.prior_groups.spread(la.log_precision.exp())
    return torch.linalg.inv(dense_curvature(la) / la.fitted.predictive_noise + torch.diag(precision))


def slot(la: LinearizedLaplace, name: str) -> slice:
    """The place of a parameter in the flat vector."""
    return slice(la.tangent.slots[name].start, la.tangent.slots[name].stop)
