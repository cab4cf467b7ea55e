"""As ``test_axes.py``, for operators on four axes: units in blocks as samples, channels, rows or columns of images."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tu_symmetry as tus

SAMPLES = 2
Forward = Callable[[Any, Tensor, Tensor], Tensor]
View = Callable[[Tensor], Tensor]
OPERATORS: dict[str, tuple[Forward, Callable[..., dict[str, Any]]]] = {}

# how ``[samples, 12, 2, 3]`` is laid out before the operator, and back so that samples are first
LAYOUTS: dict[str, tuple[View, View]] = {
    name: (view, back)
    for name, view, back in (
        ("as it is", lambda z: z, lambda y: y),
        ("blocks as samples", lambda z: z.view(-1, 3, 4, 2, 3).flatten(0, 1), lambda y: y),
        ("units as samples", lambda z: z.view(-1, 3, 4, 2, 3).transpose(1, 2).flatten(0, 1), lambda y: y),
        ("rows as samples", lambda z: z.view(-1, 3, 4, 2, 3).permute(0, 3, 1, 2, 4).flatten(0, 1), lambda y: y),
        ("rows in channels", lambda z: z.view(-1, 3, 4, 2, 3).permute(0, 1, 3, 2, 4).flatten(1, 2), lambda y: y),
        ("blocks in rows", lambda z: z.view(-1, 3, 4, 2, 3).permute(0, 2, 3, 1, 4).flatten(1, 2), lambda y: y),
        ("b u p", lambda z: z.view(-1, 3, 4, 6), lambda y: y),
        ("u b p", lambda z: z.view(-1, 3, 4, 6).transpose(1, 2), lambda y: y),
        ("p b u", lambda z: z.view(-1, 3, 4, 6).permute(0, 3, 1, 2), lambda y: y),
        ("p u b", lambda z: z.view(-1, 3, 4, 6).permute(0, 3, 2, 1), lambda y: y),
        ("b p u", lambda z: z.view(-1, 3, 4, 6).permute(0, 1, 3, 2), lambda y: y),
        ("blocks first", lambda z: z.view(-1, 3, 4, 6).permute(1, 0, 2, 3), lambda y: y.transpose(0, 1)),
        ("units first", lambda z: z.view(-1, 3, 4, 6).permute(2, 0, 1, 3), lambda y: y.transpose(0, 1)),
    )
}


def operator(name: str, forward: Forward, parts: Callable[..., Any] | None = None) -> None:
    """Add an operator on ``h`` and ``g``, which have one shape; ``parts`` makes ``m.n`` for the four sizes."""
    OPERATORS[name] = forward, lambda *s: {} if parts is None else {"n": parts(*s)}


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def two(n: int) -> int:
    """The smallest number above one of equal groups of n, or n."""
    return next(k for k in (2, 3, n) if n % k == 0)


operator("conv", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, 5, 3, padding=1))
operator("conv, pointwise", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, 5, 1))
operator("conv, depthwise", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, b, 3, padding=1, groups=b))
operator("conv, grouped", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, b, 3, padding=1, groups=two(b)))
operator("conv, transposed", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.ConvTranspose2d(b, 5, 2))
operator("patches", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, 5, 2, stride=2))
operator("batch_norm", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.BatchNorm2d(b))
operator("group_norm", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.GroupNorm(math.gcd(2, b), b))
operator("instance_norm", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.InstanceNorm2d(b))
operator("layer_norm", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.LayerNorm(d))
operator("layer_norm of an image", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.LayerNorm((b, c, d)))
operator("softmax of channels", lambda m, h, g: h.softmax(1))
operator("softmax of rows", lambda m, h, g: h.softmax(2))
operator("softmax of positions", lambda m, h, g: h.flatten(2).softmax(-1).view(h.shape))
operator("max_pool", lambda m, h, g: F.max_pool2d(h, 2, 1))
operator("mean of positions", lambda m, h, g: h.mean((2, 3)))
operator("mean of channels", lambda m, h, g: h.mean(1))
operator("largest of samples", lambda m, h, g: h * h.amax(0, keepdim=True))
operator("joined and summed samples", lambda m, h, g: torch.cat([h, g], 0).sum(0))
operator(
    "squeeze and excite",
    lambda m, h, g: h * m.n(h.mean((2, 3)))[:, :, None, None],
    lambda a, b, c, d: nn.Sequential(nn.Linear(b, 4), nn.ReLU(), nn.Linear(4, b), nn.Sigmoid()),
)
operator("linear of columns", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Linear(d, 5))
operator("linear of channels", lambda m, h, g: m.n(h.permute(0, 2, 3, 1)), lambda a, b, c, d: nn.Linear(b, 5))
operator("linear of positions", lambda m, h, g: m.n(h.flatten(2)), lambda a, b, c, d: nn.Linear(c * d, 5))
operator("attention", lambda m, h, g: F.scaled_dot_product_attention(h, g, h))
operator(
    "attention of channels",
    lambda m, h, g: (F.normalize(h.flatten(2), dim=-1) @ g.flatten(2).transpose(1, 2)).softmax(-1) @ h.flatten(2),
)
operator(
    "attention of positions",
    lambda m, h, g: h.flatten(2) @ (h.flatten(2).transpose(1, 2) @ g.flatten(2)).softmax(-1),
)
operator("pixel_shuffle", lambda m, h, g: F.pixel_shuffle(h, 2))
operator("pixel_unshuffle", lambda m, h, g: F.pixel_unshuffle(h, 2))
operator("channel_shuffle", lambda m, h, g: F.channel_shuffle(h, two(h.shape[1])))
operator("unfold", lambda m, h, g: F.unfold(h, 2))
operator("interpolate", lambda m, h, g: F.interpolate(h, size=(3, 3), mode="bilinear"))
operator(
    "grid_sample",
    lambda m, h, g: F.grid_sample(h, torch.stack([g[:, 0], g[:, 1]], -1).tanh(), align_corners=False),
)
operator("prelu", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.PReLU(b))
operator("shifts of positions", lambda m, h, g: torch.relu(h + m.n), lambda a, b, c, d: weight(c, d))
operator("shifts of an image", lambda m, h, g: torch.relu(h + m.n), lambda a, b, c, d: weight(1, b, c, d))
operator("weights of channels", lambda m, h, g: h @ m.n, lambda a, b, c, d: weight(b, d, 5))
operator("weights of channels, in a view", lambda m, h, g: h @ m.n.transpose(1, 2), lambda a, b, c, d: weight(b, 5, d))
operator("weights of samples and channels", lambda m, h, g: h @ m.n, lambda a, b, c, d: weight(a, b, d, 5))
operator("sum over two axes", lambda m, h, g: torch.einsum("abcd,dce->abe", h, m.n), lambda a, b, c, d: weight(d, c, 5))
operator(
    "several maps",
    lambda m, h, g: torch.relu(torch.einsum("abcd,def->abcef", h, m.n)).amax(-1),
    lambda a, b, c, d: weight(d, 3, 4),
)
operator("norms", lambda m, h, g: h * g.norm(dim=(1, 3), keepdim=True))
operator("windows", lambda m, h, g: h.unfold(3, 2, 1).amax(-1))
operator("local_response_norm", lambda m, h, g: F.local_response_norm(h, 2))


class Net(nn.Module):
    """Twelve channels of two by three pixels, laid out, through an operator, and read by a linear layer."""

    def __init__(self, name: str, layout: str) -> None:
        super().__init__()
        self.run, parts = OPERATORS[name]
        self.view, self.back = LAYOUTS[layout]
        self.a, self.b = nn.Conv2d(2, 12, 1), nn.Conv2d(2, 12, 1)
        x = torch.randn(SAMPLES, 2, 2, 3)
        for key, part in parts(*self.view(self.a(x)).shape).items():
            setattr(self, key, part)
        self.c = nn.Linear(self.read(x).shape[1], 2)

    def read(self, x: Tensor) -> Tensor:
        return self.back(self.run(self, self.view(self.a(x)), self.view(self.b(x)))).reshape(SAMPLES, -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.read(x))


def made(name: str, layout: str) -> tuple[nn.Module, Tensor] | None:
    """Network and inputs; none where the operator does not take these sizes."""
    torch.manual_seed(0)
    try:
        model, x = Net(name, layout).eval(), torch.randn(SAMPLES, 2, 2, 3)
        model(x)
    except (RuntimeError, ValueError):
        return None
    return model, x


@pytest.mark.sampled(12)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_claimed_holds_in_every_layout(name: str, layout: str) -> None:
    if (network := made(name, layout)) is not None:
        graph = tus.discover_symmetries(*network)
        tus.verify_symmetries(graph, *network, on_failure="raise")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_most_operators_take_every_layout(layout: str) -> None:
    assert sum(made(name, layout) is not None for name in OPERATORS) > 0.8 * len(OPERATORS)
