"""Modules as a skeptical outsider would write them, for the oracle; none of them was looked at when rules were written.

``finds`` names parameters of which it is plain that the first axis holds interchangeable units, so that pinning them is
noticed. Where nothing is named, nothing is demanded but that what is claimed holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cases import Made
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune


@dataclass(frozen=True)
class Handwritten:
    """A module, its inputs, and the parameters whose units have to be found."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Any, ...]
    finds: tuple[str, ...] = ()


HANDWRITTEN: list[Handwritten] = []
Sizes = tuple[tuple[int, int], ...]
LAYERS: Sizes = ((5, 8), (8, 8), (8, 3))


def module(
    *inputs: Any, finds: str = "", sizes: Sizes | None = None, parts: Callable[[], dict[str, Any]] | None = None
) -> Callable[[Any], Any]:
    """Register a module class, a function that builds one, or a forward pass; shapes become random inputs.

    A forward pass comes with the ``sizes`` of its linear layers ``a``, ``b``, ``c``, ..., and with its other ``parts``,
    of which plain tensors are buffers.
    """
    generator = torch.Generator().manual_seed(len(HANDWRITTEN))
    made = tuple(torch.randn(i, generator=generator) if isinstance(i, tuple) else i for i in inputs)

    def add(build: Any) -> Any:
        if sizes is not None or parts is not None:
            own = {"forward": build, "sizes": sizes or (), "parts": staticmethod(parts or dict)}
            build = type(build.__name__, (Base,), own)
        HANDWRITTEN.append(Handwritten(build.__name__, build, made, tuple(finds.split())))
        return build

    return add


class Base(Made):
    """Linear layers named ``a``, ``b``, ``c``, ... for modules that need no other constructor."""

    sizes: Sizes = LAYERS

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.hold(dict(zip("abcdefgh", self.sizes, strict=False)))
        self.hold(self.parts())
        self.more()

    def more(self) -> None:
        """What else the module has."""


# -- residual networks and their shortcuts ----------------------------------------------------------------------------


class _OptionA(nn.Module):
    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.n1, self.n2, self.head, self.swapped = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 3), swapped

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        out = self.n2(self.two(F.relu(self.n1(self.one(x)))))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), "constant", 0)
        out = shortcut + out if self.swapped else out + shortcut
        return self.head(F.relu(out).mean((2, 3)))


@module((2, 3, 4, 4), finds="stem.weight one.weight")
def option_a() -> nn.Module:
    return _OptionA(False)


@module((2, 3, 4, 4), finds="stem.weight one.weight")
def option_a_shortcut_first() -> nn.Module:
    return _OptionA(True)


@module((3, 5), finds="a.weight", sizes=LAYERS,
        parts=lambda: dict(alpha=nn.Parameter(torch.zeros(())), beta=nn.Parameter(torch.tensor(0.0))))  # fmt: skip
def ReZero(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    h = h + self.alpha * torch.tanh(self.b(h))
    return self.c(h * self.beta)


@module((3, 5), finds="a.weight b.weight", sizes=((5, 6), (6, 9), (9, 6), (6, 3)),
        parts=lambda: dict(gamma=nn.Parameter(1e-5 * torch.ones(6)), norm=nn.LayerNorm(6)))  # fmt: skip
def LayerScale(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h = h + self.gamma * self.c(F.gelu(self.b(self.norm(h))))
    return self.d(h)


@module((3, 5), finds="a.weight", sizes=((5, 6), (6, 6), (6, 6), (6, 3)))
def Highway(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    t = torch.sigmoid(self.c(h))
    return self.d(t * torch.relu(self.b(h)) + (1 - t) * h)


@module((2, 3, 4, 4), finds="inner.weight")
class ZeroInitResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 2)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.norm(self.outer(F.relu(self.inner(x))))).mean((2, 3)))


@module((3, 5), sizes=((5, 4), (6, 4), (10, 3)))
def DenseWithConstants(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    h = torch.cat([h, torch.zeros(3, 1), torch.ones(3, 1)], 1)
    h = torch.cat([h, torch.relu(self.b(h))], 1)
    return self.c(h)


@module((3, 5), sizes=((5, 8), (5, 10), (10, 3)))
def PadThenAdd(self: Any, x: Tensor) -> Tensor:
    h = F.pad(torch.relu(self.a(x)), (1, 1))
    return self.c(torch.relu(h + self.b(x)))


@module((3, 5), sizes=((5, 4), (5, 8), (8, 3)))
def ZerosThenAdd(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.c(torch.cat([h, torch.zeros_like(h)], -1) + self.b(x))


@module((3, 5), finds="a.weight", sizes=((5, 6), (5, 6), (5, 6), (5, 6), (6, 3)))
def FourBranches(self: Any, x: Tensor) -> Tensor:
    parts = [torch.relu(layer(x)) for layer in (self.a, self.b, self.c, self.d)]
    return self.e(sum(parts) / len(parts))


@module((3, 5), finds="a.weight", sizes=LAYERS)
def StochasticDepthInEval(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if self.training and torch.rand(()) < 0.5:
        return self.c(h)
    return self.c(h + F.dropout(torch.relu(self.b(h)), 0.5, self.training))


# -- convolutional blocks ---------------------------------------------------------------------------------------------


@module((2, 3, 4, 4), finds="a.weight down.weight",
        parts=lambda: dict(a=nn.Conv2d(3, 6, 1), down=nn.Linear(6, 2), up=nn.Linear(2, 6), b=nn.Conv2d(6, 2, 1)))  # fmt: skip
def SqueezeExcite(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    s = torch.sigmoid(self.up(F.relu(self.down(h.mean((2, 3))))))
    return self.b(h * s[:, :, None, None])


@module((2, 4, 4, 4),
        parts=lambda: dict(stem=nn.Conv2d(4, 8, 1), a=nn.Conv2d(4, 4, 1), dw=nn.Conv2d(4, 4, 3, 1, 1, groups=4),
            b=nn.Conv2d(4, 4, 1), head=nn.Linear(8, 2)))  # fmt: skip
def ShuffleUnit(self: Any, x: Tensor) -> Tensor:
    for _ in range(1):
        left, right = F.relu(self.stem(x)).chunk(2, 1)
        x = torch.cat([left, F.relu(self.b(self.dw(F.relu(self.a(right)))))], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
    return self.head(x.mean((2, 3)))


@module((2, 4, 4, 4),
        parts=lambda: dict(a=nn.Conv2d(4, 8, 1), b=nn.Conv2d(8, 8, 1, groups=2), head=nn.Conv2d(4, 2, 1)))  # fmt: skip
def GroupedThenChunk(self: Any, x: Tensor) -> Tensor:
    p, q = self.b(F.relu(self.a(x))).chunk(2, 1)
    return self.head(F.relu(p + q))


@module((2, 4, 4, 4), finds="a.weight expand.weight",
        parts=lambda: dict(a=nn.Conv2d(4, 5, 1), expand=nn.Conv2d(5, 10, 1, bias=False),
            dw=nn.Conv2d(10, 10, 3, 1, 1, groups=10, bias=False), project=nn.Conv2d(10, 5, 1, bias=False),
            n1=nn.BatchNorm2d(10), n2=nn.BatchNorm2d(10), n3=nn.BatchNorm2d(5), head=nn.Linear(5, 2)))  # fmt: skip
def InvertedBottleneck(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    y = F.relu6(self.n1(self.expand(x)))
    y = self.n3(self.project(F.relu6(self.n2(self.dw(y)))))
    return self.head((x + y).mean((2, 3)))


@module((2, 3, 4, 4),
        parts=lambda: dict(a=nn.Conv2d(3, 4, 1), dw=nn.Conv2d(4, 12, 3, 1, 1, groups=4), b=nn.Conv2d(12, 2, 1)))  # fmt: skip
def DepthMultiplier(self: Any, x: Tensor) -> Tensor:
    return self.b(F.relu(self.dw(F.relu(self.a(x)))))


@module((2, 3, 4, 4), parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(2, 2, 1)))
def TwicePixelShuffle(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    return self.b(F.pixel_shuffle(torch.cat([h, h], 1), 2))


@module((2, 3, 4, 4), parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Linear(128, 2)))
def TwiceFlatten(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    return self.b(torch.cat([h, h], 1).flatten(1))


@module((2, 3, 4, 4), finds="a.weight", parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(16, 2, 1)))
def PixelUnshuffle(self: Any, x: Tensor) -> Tensor:
    return self.b(F.pixel_unshuffle(F.relu(self.a(x)), 2))


class DropBlock(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = (torch.rand_like(x[:, :1]) < 0.1).float()
        return x * (1 - F.max_pool2d(mask, 3, 1, 1))


@module((2, 3, 4, 4), finds="0.weight")
def drop_block() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), DropBlock(), nn.Conv2d(4, 2, 1))


@module((2, 3, 4, 4), finds="a.weight",
        parts=lambda: dict(a=nn.Conv2d(3, 6, 1),
            mlp=nn.Sequential(nn.Conv2d(6, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 1)),
            spatial=nn.Conv2d(2, 1, 3, padding=1), b=nn.Conv2d(6, 2, 1)))  # fmt: skip
def ConvBlockAttention(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    w = torch.sigmoid(self.mlp(F.adaptive_avg_pool2d(h, 1)) + self.mlp(F.adaptive_max_pool2d(h, 1)))
    h = h * w
    s = torch.cat([h.max(1, keepdim=True)[0], h.mean(1, keepdim=True)], 1)
    return self.b(h * torch.sigmoid(self.spatial(s)))


@module((2, 3, 6, 6), finds="a.weight b.weight",
        parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 2, 1), c=nn.Conv2d(2, 3, 3, padding=1),
            d=nn.Conv2d(10, 2, 1)))  # fmt: skip
def Inception(self: Any, x: Tensor) -> Tensor:
    return self.d(torch.cat([F.relu(self.a(x)), F.relu(self.c(F.relu(self.b(x)))), F.max_pool2d(x, 3, 1, 1)], 1))


@module((2, 3, 8, 8), finds="down.weight mid.weight",
        parts=lambda: dict(down=nn.Conv2d(3, 4, 3, padding=1), mid=nn.Conv2d(4, 6, 3, padding=1),
            up=nn.ConvTranspose2d(6, 4, 2, 2), out=nn.Conv2d(8, 2, 1)))  # fmt: skip
def UNet(self: Any, x: Tensor) -> Tensor:
    s = F.relu(self.down(x))
    return self.out(torch.cat([s, F.relu(self.up(F.relu(self.mid(F.max_pool2d(s, 2)))))], 1))


@module((2, 3, 8, 8), parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 3, 1)))
def UnpooledAutoencoder(self: Any, x: Tensor) -> Tensor:
    h, where = F.max_pool2d(F.relu(self.a(x)), 2, return_indices=True)
    return self.b(F.max_unpool2d(h, where, 2))


@module((2, 3, 8, 8), finds="lateral1.weight c1.weight",
        parts=lambda: dict(c1=nn.Conv2d(3, 4, 3, 2, 1), c2=nn.Conv2d(4, 6, 3, 2, 1), lateral1=nn.Conv2d(4, 5, 1),
            lateral2=nn.Conv2d(6, 5, 1), out=nn.Conv2d(5, 3, 1)))  # fmt: skip
def FeaturePyramid(self: Any, x: Tensor) -> dict[str, Tensor]:
    one = F.relu(self.c1(x))
    two = F.relu(self.c2(one))
    top = self.lateral2(two)
    low = self.lateral1(one) + F.interpolate(top, size=one.shape[-2:], mode="nearest")
    return {"low": self.out(low), "top": self.out(top)}


@module((2, 3, 4, 4), finds="a.weight", parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(8, 2, 1)))
def CReLU(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.cat([F.relu(h), F.relu(-h)], 1))


@module((3, 5), sizes=((5, 12), (4, 3)))
def Maxout(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).view(-1, 4, 3).amax(-1))


@module((3, 5), sizes=((5, 12), (4, 3)))
def MaxoutStrided(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.maximum(torch.maximum(h[:, :4], h[:, 4:8]), h[:, 8:]))


@module((2, 3, 4, 4), finds="a.weight",
        parts=lambda: dict(a=nn.Conv2d(3, 4, 1), cheap=nn.Conv2d(4, 4, 3, 1, 1, groups=4), b=nn.Conv2d(8, 2, 1)))  # fmt: skip
def GhostModule(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    return self.b(torch.cat([h, F.relu(self.cheap(h))], 1)[:, :8])


@module((2, 4, 4, 4),
        parts=lambda: dict(a=nn.Conv2d(4, 6, 1), eca=nn.Conv1d(1, 1, 3, padding=1), b=nn.Conv2d(6, 2, 1)))  # fmt: skip
def EfficientChannelAttention(self: Any, x: Tensor) -> Tensor:
    """A one-dimensional convolution over channels: the order of the channels counts."""
    h = F.relu(self.a(x))
    w = torch.sigmoid(self.eca(h.mean((2, 3)).unsqueeze(1))).squeeze(1)
    return self.b(h * w[..., None, None])


@module((2, 3, 4, 4), finds="a.weight",
        parts=lambda: dict(a=nn.Conv2d(3, 4, 1), kernel=nn.Conv2d(4, 9, 1), b=nn.Conv2d(4, 2, 1)))  # fmt: skip
def Involution(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    n, c, height, width = h.shape
    patches = F.unfold(h, 3, padding=1).view(n, c, 9, height, width)
    return self.b((patches * self.kernel(h).unsqueeze(1)).sum(2))


@module((2, 3, 4, 4), parts=lambda: dict(a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 2, 1)))
def LocalResponse(self: Any, x: Tensor) -> Tensor:
    return self.b(F.local_response_norm(F.relu(self.a(x)), 3))


@module((2, 3, 4, 4), parts=lambda: dict(a=nn.Conv2d(5, 6, 1), b=nn.Conv2d(6, 2, 1)))
def CoordConv(self: Any, x: Tensor) -> Tensor:
    ramp = torch.linspace(-1, 1, 4)
    grid = torch.stack(torch.meshgrid(ramp, ramp, indexing="ij")).expand(x.shape[0], -1, -1, -1)
    return self.b(F.relu(self.a(torch.cat([x, grid], 1))))


@module((2, 3, 4, 4), finds="a.weight",
        parts=lambda: dict(a=nn.Conv2d(3, 4, 1), where=nn.Linear(4, 6), b=nn.Conv2d(4, 2, 1)))  # fmt: skip
def SpatialTransformer(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    theta = self.where(h.mean((2, 3))).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(h.shape), align_corners=False)
    return self.b(F.grid_sample(h, grid, align_corners=False))


@module((2, 3, 4, 4), finds="a.weight",
        parts=lambda: dict(a=nn.Linear(3, 6), b=nn.Linear(6, 2), gamma=nn.Parameter(torch.zeros(6)),
            beta=nn.Parameter(torch.zeros(6))))  # fmt: skip
def GlobalResponse(self: Any, x: Tensor) -> Tensor:
    """ConvNeXt V2's normalization, epsilon and all."""
    h = F.gelu(self.a(x.permute(0, 2, 3, 1)))
    g = torch.norm(h, p=2, dim=(1, 2), keepdim=True)
    n = g / (g.mean(dim=-1, keepdim=True) + 1e-6)
    return self.b(self.gamma * (h * n) + self.beta + h)


# -- normalizations ---------------------------------------------------------------------------------------------------


@module((3, 5), finds="a.weight", sizes=LAYERS)
def StandardizedByHand(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-5)
    return self.c(torch.relu(self.b(h)))


@module((3, 5), finds="a.weight", sizes=LAYERS)
def ClampedNorm(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h = h / h.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return self.c(torch.relu(self.b(h)))


@module((3, 5), finds="a.weight", sizes=LAYERS, parts=lambda: dict(g=nn.Parameter(torch.ones(8))))
def RootMeanSquareByHand(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g
    return self.c(torch.relu(h))


@module((3, 5), finds="a.weight", sizes=LAYERS)
def FunctionalNorms(self: Any, x: Tensor) -> Tensor:
    h = F.layer_norm(self.a(x), (8,))
    h = F.rms_norm(self.b(torch.relu(h)), (8,))
    return self.c(torch.relu(h))


@module((3, 5), finds="a.weight", sizes=LAYERS)
def DividedByMaximum(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.c(h / (h.abs().amax(1, keepdim=True) + 1e-8))


@module((2, 3, 4, 4), finds="a.weight")
class FilterResponse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.eps = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), 1e-6
        self.tau, self.beta, self.gamma = (nn.Parameter(torch.zeros(1, 4, 1, 1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h * torch.rsqrt(h.pow(2).mean((2, 3), keepdim=True) + self.eps)
        return self.b(torch.max(self.gamma * h + self.beta, self.tau))


class WeightStandardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=self.padding)


@module((2, 3, 4, 4), finds="0.weight")
def weight_standardized() -> nn.Module:
    return nn.Sequential(WeightStandardized(3, 6, 3, padding=1), nn.GroupNorm(1, 6), nn.ReLU(), nn.Conv2d(6, 2, 1))


@module((2, 3, 4, 4))
def group_norm_three() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(3, 6), nn.SiLU(), nn.Conv2d(6, 2, 1))


@module((2, 3, 4, 4), finds="0.weight")
def instance_norm_tracked() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.ReLU(), nn.Conv2d(6, 2, 1)
    )


@module((3, 5), finds="0.parametrizations.weight.original1")
def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3))


@module((3, 5))
def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3))


@module((3, 5))
def orthogonal() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), parametrizations.orthogonal(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3)
    )


@module((3, 5), sizes=((5, 6), (5, 12), (6, 3)))
def AdaptiveNorm(self: Any, x: Tensor) -> Tensor:
    """Scale and shift come from another branch (AdaLN, FiLM)."""
    gain, shift = self.b(x).chunk(2, -1)
    return self.c(torch.relu(F.layer_norm(self.a(x), (6,)) * (1 + gain) + shift))


@module((2, 3, 4, 4), (2, 5))
class FiLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.film, self.b = nn.Conv2d(3, 6, 1), nn.Linear(5, 12), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        g, b = self.film(z).view(-1, 2, 6).unbind(1)
        return self.b(F.relu(self.a(x) * g[..., None, None] + b[..., None, None]))


# -- attention --------------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Projections, and what differs from layout to layout in ``mix``."""

    heads, size = 2, 3

    def __init__(self) -> None:
        super().__init__()
        width = self.heads * self.size
        self.qkv, self.out, self.head = nn.Linear(5, 3 * width), nn.Linear(width, 4), nn.Linear(4, 2)
        self.more()

    def more(self) -> None:
        """What else the module has."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.out(self.mix(x, *x.shape[:2]))))

    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        raise NotImplementedError


@module((2, 4, 5))
class HeadsFirst(_Attention):
    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5))
class HeadsLast(_Attention):
    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.size, self.heads).permute(2, 0, 4, 1, 3)
        return F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).reshape(b, t, -1)


@module((2, 4, 5))
class ChunkedHeadsLast(_Attention):
    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = (z.view(b, t, self.size, self.heads) for z in self.qkv(x).chunk(3, -1))
        a = torch.einsum("bidh,bjdh->bijh", q, k).softmax(2)
        return torch.einsum("bijh,bjdh->bidh", a, v).reshape(b, t, -1)


@module((2, 4, 5))
class NormalizedQueries(_Attention):
    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, k = F.layer_norm(q, (self.size,)), F.layer_norm(k, (self.size,))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5))
class RootMeanSquareQueries(_Attention):
    def more(self) -> None:
        self.qn, self.kn = nn.RMSNorm(self.size), nn.RMSNorm(self.size)

    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(self.qn(q), self.kn(k), v).transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5))
class CosineAttention(_Attention):
    def more(self) -> None:
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(self.heads, 1, 1)))

    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        a = a * self.logit_scale.clamp(max=math.log(100.0)).exp()
        return (a.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5))
class TalkingHeads(_Attention):
    def more(self) -> None:
        self.before, self.after = nn.Linear(2, 2), nn.Linear(2, 2)

    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        a = self.before((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).softmax(2)
        a = self.after(a).permute(0, 3, 1, 2)
        return (a @ v).transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5))
class RelativeBias(_Attention):
    def more(self) -> None:
        self.table = nn.Parameter(torch.zeros(7, self.heads))
        index = torch.arange(4)[:, None] - torch.arange(4)[None] + 3
        self.register_buffer("index", index)

    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(t, t, -1).permute(2, 0, 1)
        a = (q @ k.transpose(-2, -1) + bias).softmax(-1)
        return (a @ v).transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5))
class Alibi(_Attention):
    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        slopes = torch.tensor([0.5, 0.25]).view(-1, 1, 1)
        distance = (torch.arange(t)[:, None] - torch.arange(t)[None]).abs()
        mask = torch.full((t, t), float("-inf")).triu(1)
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask - slopes * distance)
            .transpose(1, 2)
            .reshape(b, t, -1)
        )


@module((2, 4, 5))
class Rotary(_Attention):
    size = 4

    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        angle = torch.arange(t)[:, None] * torch.tensor([1.0, 0.1])
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        q, k = (z * cos + torch.cat([-z[..., 2:], z[..., :2]], -1) * sin for z in (q, k))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5))
class ComplexRotary(_Attention):
    size = 4

    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        turn = torch.polar(torch.ones(t, 2), torch.arange(t)[:, None] * torch.tensor([1.0, 0.1]))

        def rotated(z: Tensor) -> Tensor:
            return torch.view_as_real(
                torch.view_as_complex(z.reshape(*z.shape[:-1], 2, 2).contiguous()) * turn
            ).flatten(3)

        return F.scaled_dot_product_attention(rotated(q), rotated(k), v).transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5), parts=lambda: dict(q=nn.Linear(5, 12), k=nn.Linear(5, 6), v=nn.Linear(5, 6), o=nn.Linear(12, 2)))
def GroupedQueries(self: Any, x: Tensor) -> Tensor:
    b, t, _ = x.shape
    q = self.q(x).view(b, t, 4, 3).transpose(1, 2)
    k = self.k(x).view(b, t, 2, 3).transpose(1, 2).repeat_interleave(2, 1)
    v = self.v(x).view(b, t, 2, 3).transpose(1, 2).repeat_interleave(2, 1)
    return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 12))


@module((2, 4, 5), parts=lambda: dict(q=nn.Linear(5, 6), kv=nn.Linear(5, 6), o=nn.Linear(6, 2)))
def MultiQuery(self: Any, x: Tensor) -> Tensor:
    b, t, _ = x.shape
    q = self.q(x).view(b, t, 2, 3).transpose(1, 2)
    k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
    return self.o(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))


@module((2, 4, 6), finds="linear1.weight")
def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)


@module((2, 4, 6), (2, 3, 6), finds="linear1.weight")
def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(6, 2, 7, batch_first=True, norm_first=True)


@module((1, 4, 8, 8), parts=lambda: dict(a=nn.Conv2d(4, 6, 1), qkv=nn.Linear(6, 18), o=nn.Linear(6, 2)))
def WindowWithShift(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).permute(0, 2, 3, 1)
    h = torch.roll(h, (-2, -2), (1, 2))
    b, height, width, c = h.shape
    h = h.view(b, height // 4, 4, width // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
    q, k, v = self.qkv(h).view(-1, 16, 3, 2, 3).permute(2, 0, 3, 1, 4)
    h = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c)
    h = h.view(b, height // 4, width // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, height, width, c)
    return self.o(torch.roll(h, (2, 2), (1, 2)))


@module((1, 3, 8, 8), parts=lambda: dict(q=nn.Conv2d(3, 6, 1), kv=nn.Conv2d(3, 12, 1), o=nn.Conv2d(6, 2, 1)))
def Halo(self: Any, x: Tensor) -> Tensor:
    b, _, height, width = x.shape
    q = self.q(x).view(b * 2, 3, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(b * 2, 4, 16, 3)
    kv = F.unfold(self.kv(x), 6, stride=4, padding=1).view(b * 2, 6, 36, 4).permute(0, 3, 2, 1)
    k, v = kv.split([3, 3], -1)
    y = (q @ k.transpose(-2, -1) * 3**-0.5).softmax(-1) @ v
    y = y.view(b * 2, 2, 2, 4, 4, 3).permute(0, 5, 1, 3, 2, 4).reshape(b, 6, height, width)
    return self.o(y)


@module((2, 3, 4, 5))
class Axial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = (nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2))
        self.a, self.o = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        b, r, c, d = h.shape
        z = h.reshape(b * r, c, d)
        h = h + self.rows(z, z, z, need_weights=False)[0].view(b, r, c, d)
        z = h.transpose(1, 2).reshape(b * c, r, d)
        h = h + self.columns(z, z, z, need_weights=False)[0].view(b, c, r, d).transpose(1, 2)
        return self.o(h)


@module((2, 4, 5), finds="token.weight channel.weight a.weight",
        parts=lambda: dict(a=nn.Linear(5, 6), n1=nn.LayerNorm(6), n2=nn.LayerNorm(6), token=nn.Linear(4, 7),
            token2=nn.Linear(7, 4), channel=nn.Linear(6, 9), channel2=nn.Linear(9, 6), head=nn.Linear(6, 2)))  # fmt: skip
def Mixer(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h = h + self.token2(F.gelu(self.token(self.n1(h).transpose(1, 2)))).transpose(1, 2)
    h = h + self.channel2(F.gelu(self.channel(self.n2(h))))
    return self.head(h.mean(1))


@module((2, 4, 5))
class Performer(_Attention):
    def more(self) -> None:
        self.register_buffer("projection", torch.randn(self.size, 6))

    def mix(self, x: Tensor, b: int, t: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, k = torch.relu(q @ self.projection) + 1e-3, torch.relu(k @ self.projection) + 1e-3
        y = q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(2, keepdim=True).transpose(-2, -1))
        return y.transpose(1, 2).reshape(b, t, -1)


@module((2, 4, 5), finds="embed.weight",
        parts=lambda: dict(embed=nn.Linear(5, 6), attention=nn.MultiheadAttention(6, 2, batch_first=True),
            head=nn.Linear(6, 2), token=nn.Parameter(torch.zeros(1, 1, 6)),
            position=nn.Parameter(torch.randn(1, 5, 6)), norm=nn.LayerNorm(6)))  # fmt: skip
def ClassToken(self: Any, x: Tensor) -> Tensor:
    h = torch.cat([self.token.expand(x.shape[0], -1, -1), self.embed(x)], 1) + self.position
    z = self.norm(h)
    h = h + self.attention(z, z, z)[0]
    return self.head(self.norm(h)[:, 0])


@module((2, 4, 5))
class SinusoidalPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 2)
        angle = torch.arange(4)[:, None] / 100 ** (torch.arange(0, 6, 2) / 6)
        table = torch.zeros(4, 6)
        table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x) + self.table[: x.shape[1]]))


@module((2, 4, 5), finds="q.weight",
        parts=lambda: dict(seeds=nn.Parameter(torch.randn(3, 5)), q=nn.Linear(5, 6), k=nn.Linear(5, 6),
            v=nn.Linear(5, 4), o=nn.Linear(4, 2)))  # fmt: skip
def PooledByQueries(self: Any, x: Tensor) -> Tensor:
    """A set transformer's pooling: the seeds are parameters, and keep their order in the output."""
    a = (self.q(self.seeds) @ self.k(x).transpose(1, 2)).softmax(-1)
    return self.o(a @ self.v(x))


@module((2, 4, 5), finds="slots_mu k.weight v.weight",
        parts=lambda: dict(slots_mu=nn.Parameter(torch.randn(3, 6)), q=nn.Linear(6, 6), k=nn.Linear(5, 6),
            v=nn.Linear(5, 6), gru=nn.GRUCell(6, 6), o=nn.Linear(6, 2)))  # fmt: skip
def SlotAttention(self: Any, x: Tensor) -> Tensor:
    """Slots that are pooled at the end: they are interchangeable, like hidden units."""
    b = x.shape[0]
    slots = self.slots_mu.expand(b, -1, -1)
    for _ in range(2):
        a = (self.k(x) @ self.q(slots).transpose(1, 2)).softmax(-1) + 1e-8
        a = a / a.sum(1, keepdim=True)
        updates = a.transpose(1, 2) @ self.v(x)
        slots = self.gru(updates.reshape(-1, 6), slots.reshape(-1, 6)).view(b, -1, 6)
    return self.o(slots.amax(1))


@module((2, 4, 6), finds="up.weight",
        parts=lambda: dict(gate=nn.Linear(6, 8, bias=False), up=nn.Linear(6, 8, bias=False),
            down=nn.Linear(8, 6, bias=False)))  # fmt: skip
def SwiGLU(self: Any, x: Tensor) -> Tensor:
    return x + self.down(F.silu(self.gate(x)) * self.up(x))


@module((2, 4, 6), sizes=((6, 16), (8, 6)))
def FusedGLU(self: Any, x: Tensor) -> Tensor:
    return self.b(F.glu(self.a(x), -1))


@module((2, 4, 6), sizes=((6, 16), (8, 6)))
def InterleavedGLU(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(h[..., ::2] * torch.sigmoid(h[..., 1::2]))


@module((2, 4, 5), finds="a.weight",
        parts=lambda: dict(a=nn.Linear(5, 8), norm=nn.LayerNorm(4), spatial=nn.Conv1d(4, 4, 1), b=nn.Linear(4, 2)))  # fmt: skip
def GatedMLP(self: Any, x: Tensor) -> Tensor:
    """gMLP's spatial gating unit."""
    u, v = F.gelu(self.a(x)).chunk(2, -1)
    return self.b(u * self.spatial(self.norm(v)))


# -- shared, tied and generated weights -------------------------------------------------------------------------------


@module((3, 5), finds="a.weight", parts=lambda: dict(a=nn.Linear(5, 8), bias=nn.Parameter(torch.zeros(5))))
def TiedAutoencoder(self: Any, x: Tensor) -> Tensor:
    return F.linear(torch.sigmoid(self.a(x)), self.a.weight.t(), self.bias)


@module((3, 5), finds="a.weight b.weight", sizes=((5, 8), (8, 4)))
def DeepTiedAutoencoder(self: Any, x: Tensor) -> Tensor:
    z = torch.tanh(self.b(torch.relu(self.a(x))))
    return torch.relu(z @ self.b.weight) @ self.a.weight


@module((3, 5), finds="a.weight b.weight", sizes=LAYERS)
def CalledThreeTimes(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    for _ in range(3):
        h = torch.relu(self.b(h))
    return self.c(h)


@module((3, 5), (3, 5), finds="a.weight b.weight", sizes=LAYERS)
def Siamese(self: Any, x: Tensor, y: Tensor) -> Tensor:
    u, v = (torch.relu(self.b(torch.relu(self.a(z)))) for z in (x, y))
    return self.c((u - v).abs())


@module((3, 5), (3, 5), finds="a.weight", sizes=LAYERS)
def SiameseCosine(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(self.b(torch.relu(self.a(x))), self.b(torch.relu(self.a(y))))


@module(torch.tensor([[1, 4, 2], [6, 0, 4]]))
class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.a(self.embed(words))))


@module((3, 5), (3, 4), parts=lambda: dict(make_w=nn.Linear(4, 30), make_b=nn.Linear(4, 6), out=nn.Linear(6, 2)))
def HyperNetwork(self: Any, x: Tensor, z: Tensor) -> Tensor:
    w, b = self.make_w(z).view(-1, 6, 5), self.make_b(z)
    return self.out(torch.relu(torch.einsum("bi,boi->bo", x, w) + b))


@module((3, 5), finds="a.weight", sizes=LAYERS,
        parts=lambda: dict(down=nn.Linear(8, 2, bias=False), up=nn.Linear(2, 8, bias=False)))  # fmt: skip
def LowRankAdapter(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.c(torch.relu(self.b(h) + 2.0 * self.up(self.down(h))))


@module((3, 5), sizes=LAYERS,
        parts=lambda: dict(left=nn.Parameter(torch.randn(8, 2)), right=nn.Parameter(torch.randn(2, 8))))  # fmt: skip
def LowRankWrittenOut(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.c(torch.relu(F.linear(h, self.b.weight + self.left @ self.right, self.b.bias)))


@module((3, 5), finds="a.weight", sizes=LAYERS)
def PlusIdentity(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.c(torch.relu(F.linear(h, self.b.weight + torch.eye(8))))


@module((3, 5), sizes=LAYERS)
def SymmetricWeight(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.c(torch.relu(h @ (self.b.weight + self.b.weight.T)))


@module((3, 5), sizes=LAYERS)
def TriangularWeight(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.c(torch.relu(h @ self.b.weight.tril()))


@module((3, 5),
        parts=lambda: dict(mu=nn.Parameter(torch.randn(6, 5)), rho=nn.Parameter(torch.randn(6, 5)),
            out=nn.Linear(6, 2)))  # fmt: skip
def Bayesian(self: Any, x: Tensor) -> Tensor:
    """Weights by their mean and the logarithm of their deviation, at the mean in evaluation."""
    w = self.mu + F.softplus(self.rho) * torch.randn_like(self.rho)
    return self.out(torch.relu(F.linear(x, w)))


@module((3, 5),
        parts=lambda: dict(w=nn.Linear(5, 6, bias=False), v=nn.Linear(6, 2, bias=False),
            r=nn.Parameter(torch.randn(2, 5)), s=nn.Parameter(torch.randn(2, 6))))  # fmt: skip
def BatchEnsembled(self: Any, x: Tensor) -> Tensor:
    z = x.repeat(2, 1) * self.r.repeat_interleave(3, 0)
    return self.v(torch.relu(self.w(z) * self.s.repeat_interleave(3, 0)))


@module((3, 5),
        parts=lambda: dict(a=nn.Linear(5, 8), l=nn.Parameter(torch.randn(4, 2, 2)),
            r=nn.Parameter(torch.randn(2, 4, 4)), b=nn.Linear(8, 2)))  # fmt: skip
def Monarch(self: Any, x: Tensor) -> Tensor:
    """Block-diagonal matrices with a transposition between them."""
    h = torch.relu(self.a(x)).view(-1, 4, 2)
    h = torch.einsum("bki,kij->bkj", h, self.l).transpose(1, 2)
    h = torch.einsum("bki,kij->bkj", h, self.r)
    return self.b(torch.relu(h.flatten(1)))


@module((3, 5),
        parts=lambda: dict(a=nn.Linear(5, 6), p=nn.Parameter(torch.randn(2, 2)),
            q=nn.Parameter(torch.randn(3, 3)), b=nn.Linear(6, 2)))  # fmt: skip
def KroneckerLayer(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.relu(torch.relu(self.a(x)) @ torch.kron(self.p, self.q)))


# -- masks, pruning, buffers ------------------------------------------------------------------------------------------


@module((3, 5))
def pruned_unstructured() -> nn.Module:
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    prune.l1_unstructured(network[0], "weight", 0.5)
    return network


@module((3, 5))
def pruned_structured() -> nn.Module:
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    prune.ln_structured(network[2], "weight", 0.25, n=2, dim=0)
    return network


@module((3, 5), sizes=LAYERS, parts=lambda: dict(mask=torch.tensor([True, False] * 4)))
def BooleanMask(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.relu(self.a(x)) * self.mask)


@module((3, 5), sizes=LAYERS, parts=lambda: dict(mask=torch.tensor([1, 1, 1, 0, 0, 1, 2, 2])))
def IntegerMask(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.relu(self.b(torch.relu(self.a(x)) * self.mask)))


@module((3, 5))
class MaskedWeights(Base):
    """As in MADE: who sees whom is a boolean buffer."""

    def more(self) -> None:
        degree = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
        self.register_buffer("first", degree[:, None] >= torch.arange(5)[None])
        self.register_buffer("second", torch.arange(3)[:, None] > degree[None])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(F.linear(x, self.a.weight * self.first, self.a.bias))
        return F.linear(h, self.c.weight.masked_fill(~self.second, 0), self.c.bias)


@module((3, 5), sizes=LAYERS, parts=lambda: dict(order=torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])))
def PermutedByBuffer(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.relu(self.b(torch.relu(self.a(x))[:, self.order])))


@module((3, 5), finds="a.weight", sizes=LAYERS, parts=lambda: dict(calls=torch.zeros((), dtype=torch.long)))
def CountsItsCalls(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.c(torch.relu(self.a(x)))


@module((3, 5), sizes=LAYERS, parts=lambda: dict(mean=torch.zeros(8)))
def MovingAverage(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    self.mean.mul_(0.9).add_(0.1 * h.mean(0))
    return self.c(torch.relu(h - self.mean))


@module((3, 5), sizes=LAYERS,
        parts=lambda: dict(gain=nn.Parameter(torch.ones(8)), shift=nn.Parameter(torch.zeros(8)),
            done=torch.tensor(True)))  # fmt: skip
def DataDependentInit(self: Any, x: Tensor) -> Tensor:
    """ActNorm: its buffer says that it was initialized."""
    return self.c(torch.relu((self.a(x) + self.shift) * self.gain.exp()))


@module((3, 5), finds="a.weight", sizes=LAYERS, parts=lambda: dict(mean=torch.randn(5), std=torch.rand(5) + 0.5))
def WhitenedInput(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.relu(self.a((x - self.mean) / self.std)))


@module((3, 5), sizes=LAYERS, parts=lambda: dict(gain=nn.Parameter(torch.randn(8, dtype=torch.complex64))))
def ComplexGain(self: Any, x: Tensor) -> Tensor:
    return self.c((torch.tanh(self.a(x)) * self.gain).abs())


@module((3, 5), parts=lambda: dict(a=nn.Linear(5, 6).to(torch.complex64), b=nn.Linear(6, 2).to(torch.complex64)))
def ComplexLayers(self: Any, x: Tensor) -> Tensor:
    h = self.a(torch.complex(x, 0.5 * x))
    h = torch.complex(torch.relu(h.real), torch.relu(h.imag))
    return self.b(h).abs()


@module((2, 8),
        parts=lambda: dict(log_a=nn.Parameter(-torch.rand(5)), theta=nn.Parameter(torch.rand(5)),
            b=nn.Parameter(torch.randn(5, 2)), c=nn.Parameter(torch.randn(5, 2))))  # fmt: skip
def DiagonalStateSpace(self: Any, u: Tensor) -> Tensor:
    a = torch.exp(torch.complex(self.log_a, self.theta))
    kernel = (
        (
            torch.view_as_complex(self.c)[:, None]
            * torch.view_as_complex(self.b)[:, None]
            * a[:, None] ** torch.arange(8)
        )
        .sum(0)
        .real
    )
    f = torch.fft.rfft(kernel, 16) * torch.fft.rfft(u, 16)
    return torch.fft.irfft(f, 16)[:, :8]


# -- products of units ------------------------------------------------------------------------------------------------


@module((2, 3, 4, 4), parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Linear(16, 2)))
def BilinearPooling(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x)).flatten(2)
    g = (h @ h.transpose(1, 2) / 16).flatten(1)
    g = g.sign() * (g.abs() + 1e-10).sqrt()
    return self.b(F.normalize(g))


@module((2, 3, 4, 4), parts=lambda: dict(a=nn.Conv2d(3, 4, 1)))
def GramOutput(self: Any, x: Tensor) -> Tensor:
    """A Gram matrix as the output: the channels keep their order."""
    h = F.relu(self.a(x)).flatten(2)
    return h @ h.transpose(1, 2)


@module((2, 3, 4, 4), (2, 3, 4, 4), finds="a.weight", parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 5, 1)))
def StyleLoss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    grams = [(h @ h.transpose(1, 2)) / h.shape[-1] for h in (self.b(F.relu(self.a(z))).flatten(2) for z in (x, y))]
    return ((grams[0] - grams[1]) ** 2).sum()


@module((3, 5), sizes=((5, 4), (5, 3), (12, 2)))
def OuterFlattened(self: Any, x: Tensor) -> Tensor:
    u, v = torch.relu(self.a(x)), torch.tanh(self.b(x))
    return self.c((u[:, :, None] * v[:, None, :]).flatten(1))


@module((3, 5), sizes=((5, 6),), parts=lambda: dict(m=nn.Parameter(torch.randn(6, 6))))
def QuadraticForm(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return torch.einsum("bi,ij,bj->b", h, self.m, h)


@module((3, 5))
def bilinear_head() -> nn.Module:
    class Both(Base):
        sizes = ((5, 4), (5, 6))

        def more(self) -> None:
            self.pair = nn.Bilinear(4, 6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(torch.relu(self.a(x)), torch.tanh(self.b(x)))

    return Both()


@module((3, 4, 5), finds="embed.weight", parts=lambda: dict(embed=nn.Linear(5, 6), out=nn.Linear(6, 2)))
def FactorizationMachine(self: Any, x: Tensor) -> Tensor:
    e = self.embed(x)
    return self.out(0.5 * (e.sum(1) ** 2 - (e**2).sum(1)))


@module((3, 5), sizes=((5, 6), (6, 6), (6, 2)))
def DeepAndCross(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.c(h * self.b(h) + h)


@module((3, 5), finds="a.weight",
        parts=lambda: dict(a=nn.Linear(5, 4), w=nn.Parameter(torch.randn(6, 4, 4)), u=nn.Linear(6, 2)))  # fmt: skip
def NeuralTensor(self: Any, x: Tensor) -> Tensor:
    h = torch.tanh(self.a(x))
    return self.u(torch.tanh(torch.einsum("bi,kij,bj->bk", h, self.w, h)))


@module((2, 3, 5), parts=lambda: dict(a=nn.Linear(5, 4), w=nn.Parameter(0.3 * torch.randn(3, 2, 4, 6))))
def CapsuleRouting(self: Any, x: Tensor) -> Tensor:
    u = torch.einsum("bid,ijdo->bijo", torch.relu(self.a(x)), self.w)
    logits = torch.zeros(x.shape[0], 3, 2)
    for _ in range(2):
        s = (logits.softmax(2)[..., None] * u).sum(1)
        n = (s**2).sum(-1, keepdim=True)
        v = n / (1 + n) * s / (n.sqrt() + 1e-8)
        logits = logits + (u * v[:, None]).sum(-1)
    return v.norm(dim=-1)


# -- indices, sorting, gathering --------------------------------------------------------------------------------------


@module((2, 4, 5), finds="expert_a gate_hidden.weight",
        parts=lambda: dict(gate_hidden=nn.Linear(5, 6), gate=nn.Linear(6, 3),
            expert_a=nn.Parameter(torch.randn(3, 5, 7)), expert_b=nn.Parameter(torch.randn(3, 7, 2))))  # fmt: skip
def SoftMixture(self: Any, x: Tensor) -> Tensor:
    g = self.gate(torch.relu(self.gate_hidden(x))).softmax(-1)
    y = torch.einsum("bteh,eho->bteo", torch.relu(torch.einsum("bti,eih->bteh", x, self.expert_a)), self.expert_b)
    return (g.unsqueeze(-1) * y).sum(2)


@module((6, 5),
        parts=lambda: dict(gate=nn.Linear(5, 4),
            experts=nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(4))))  # fmt: skip
def TopTwoMixture(self: Any, x: Tensor) -> Tensor:
    value, index = self.gate(x).topk(2, -1)
    weight = torch.zeros(x.shape[0], 4).scatter(1, index, value.softmax(-1))
    y = torch.stack([expert(x) for expert in self.experts], 1)
    return (weight.unsqueeze(-1) * y).sum(1)


@module((5, 5), finds="a.weight b.weight", sizes=LAYERS)
def GraphConvolution(self: Any, x: Tensor) -> Tensor:
    source, target = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]])
    h = torch.relu(self.a(x))
    h = torch.zeros_like(h).index_add_(0, target, h[source])
    return self.c(torch.relu(self.b(h)))


@module((5, 5), torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]]), finds="a.weight b.weight",
        parts=lambda: dict(a=nn.Linear(5, 6), b=nn.Linear(6, 6), score=nn.Linear(12, 1), c=nn.Linear(6, 2)))  # fmt: skip
def GraphAttention(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    source, target = edges
    h = self.b(torch.relu(self.a(x)))
    e = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)), 0.2).exp()
    total = torch.zeros(5, 1).index_add(0, target, e)
    return self.c(torch.zeros(5, 6).index_add(0, target, h[source] * e) / (total + 1e-16))


@module((5, 5), finds="a.weight", sizes=LAYERS)
def ScatterMean(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    index = torch.tensor([0, 0, 1, 1, 1])
    total = torch.zeros(2, 8).scatter_add(0, index[:, None].expand(-1, 8), h)
    count = torch.zeros(2).scatter_add(0, index, torch.ones(5))
    return self.c(total / count[:, None])


@module((5, 5), finds="a.weight", sizes=LAYERS)
def ScatterReduce(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    index = torch.tensor([0, 0, 1, 1, 1])[:, None].expand(-1, 8)
    return self.c(torch.zeros(2, 8).scatter_reduce(0, index, h, "amax", include_self=False))


@module((5, 5), finds="a.weight", sizes=LAYERS,
        parts=lambda: dict(adjacency=(torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.5).float()))  # fmt: skip
def DenseAdjacency(self: Any, x: Tensor) -> Tensor:
    d = self.adjacency.sum(1).clamp(min=1).rsqrt()
    return self.c(torch.relu((d[:, None] * self.adjacency * d) @ self.a(x)))


@module((4, 5), finds="a.weight")
class SparseAdjacency(Base):
    def more(self) -> None:
        self.adjacency = torch.tensor([[0.0, 1, 0, 2], [1, 0, 0, 0], [0, 0, 1, 0], [0, 3, 0, 0]]).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(torch.sparse.mm(self.adjacency, self.a(x))))


@module((3, 5))
class CodebookQuantizer(Base):
    sizes = ((5, 4), (4, 3))

    def more(self) -> None:
        self.codes = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.relu(self.a(x))
        index = torch.cdist(z, self.codes.weight).argmin(-1)
        q = z + (self.codes(index) - z).detach()
        return self.b(q), index


@module((3, 5), finds="codes.weight a.weight")
class CodebookHidden(CodebookQuantizer):
    """As before, but nobody sees the indices: the codes are interchangeable too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


@module((3, 5), finds="a.weight", sizes=((5, 6),), parts=lambda: dict(prototypes=nn.Parameter(torch.randn(3, 6))))
def Prototypes(self: Any, x: Tensor) -> Tensor:
    return -(torch.cdist(torch.relu(self.a(x)), self.prototypes) ** 2)


@module((3, 5),
        parts=lambda: dict(centers=nn.Parameter(torch.randn(6, 5)), log_width=nn.Parameter(torch.zeros(6)),
            out=nn.Linear(6, 2)))  # fmt: skip
def RadialBasis(self: Any, x: Tensor) -> Tensor:
    d = (x[:, None] - self.centers).pow(2).sum(-1)
    return self.out(torch.exp(-d * self.log_width.exp()))


@module((3, 5), finds="a.weight", sizes=((5, 6),),
        parts=lambda: dict(classes=nn.Parameter(torch.randn(3, 6)), temperature=nn.Parameter(torch.tensor(10.0))))  # fmt: skip
def CosineHead(self: Any, x: Tensor) -> Tensor:
    return self.temperature * F.linear(F.normalize(torch.relu(self.a(x))), F.normalize(self.classes))


@module((3, 5), sizes=LAYERS)
def OneHotOfMaximum(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.c(F.one_hot(h.argmax(-1), 8).float() * h)


@module((3, 5), sizes=LAYERS)
def StraightThroughBinary(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    hard = (h > 0).float()
    return self.c(h + (hard - h).detach())


@module((3, 5), sizes=LAYERS)
def GumbelHard(self: Any, x: Tensor) -> Tensor:
    p = self.a(x).softmax(-1)
    hard = torch.zeros_like(p).scatter_(-1, p.max(-1, keepdim=True)[1], 1.0)
    return self.c(hard - p.detach() + p)


@module((2, 6, 5), finds="a.weight", parts=lambda: dict(a=nn.Linear(5, 6), b=nn.Linear(18, 2)))
def SortPooling(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.b(h.sort(1, descending=True)[0][:, :3].flatten(1))


@module((2, 6, 5), parts=lambda: dict(a=nn.Linear(5, 6), b=nn.Linear(18, 2)))
def SortByLastChannel(self: Any, x: Tensor) -> Tensor:
    """DGCNN's pooling: nodes are sorted by their last channel, which stands apart."""
    h = torch.tanh(self.a(x))
    order = h[..., -1].argsort(1, descending=True)[:, :3]
    return self.b(h.gather(1, order[..., None].expand(-1, -1, 6)).flatten(1))


@module((3, 5), sizes=LAYERS)
def SortedUnits(self: Any, x: Tensor) -> Tensor:
    """Values of sorted hidden units: any order of the units gives the same."""
    return self.c(self.a(x).sort(-1)[0])


@module((3, 5), sizes=((5, 8), (3, 2)))
def TopUnits(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.relu(self.a(x)).topk(3, -1)[0])


@module((3, 5), sizes=LAYERS)
def KWinners(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    threshold = h.kthvalue(5, -1, keepdim=True)[0]
    return self.c(h * (h >= threshold))


@module((3, 5), sizes=LAYERS)
def GroupSort(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).view(-1, 4, 2)
    return self.c(torch.stack([h.amin(-1), h.amax(-1)], -1).flatten(1))


@module((3, 5), sizes=LAYERS)
def ClassPrediction(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = self.c(torch.relu(self.a(x)))
    return logits.max(-1)


@module((3, 5), finds="a.weight", sizes=LAYERS)
def OnlyTheClass(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.relu(self.a(x))).min(-1)[1]


@module((3, 5), sizes=LAYERS)
def MedianIndex(self: Any, x: Tensor) -> Tensor:
    return torch.relu(self.a(x)).median(-1)[1]


@module((1, 3, 6, 6), finds="a.weight",
        parts=lambda: dict(a=nn.Conv2d(3, 5, 3, padding=1), score=nn.Conv2d(5, 2, 1), box=nn.Conv2d(5, 8, 1)))  # fmt: skip
def DetectionHead(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = F.relu(self.a(x))
    s = self.score(h).permute(0, 2, 3, 1).flatten(1).sigmoid()
    boxes = self.box(h).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
    best, index = s.topk(5, 1)
    return best, boxes.gather(1, index[..., None].expand(-1, -1, 4)), index


@module((1, 3, 6, 6), finds="a.weight", parts=lambda: dict(a=nn.Conv2d(3, 5, 1), heat=nn.Conv2d(5, 2, 1)))
def CenterPeaks(self: Any, x: Tensor) -> Tensor:
    heat = self.heat(F.relu(self.a(x))).sigmoid()
    peaks = F.max_pool2d(heat, 3, 1, 1)
    return heat * (heat == peaks)


@module((3, 5), finds="a.weight", sizes=LAYERS)
def MaskedLogits(self: Any, x: Tensor) -> Tensor:
    logits = self.c(torch.relu(self.a(x)))
    return logits.masked_fill(torch.tensor([False, True, False]), -1e9)


@module((3, 5), finds="a.weight", sizes=LAYERS)
def InfiniteLogits(self: Any, x: Tensor) -> Tensor:
    logits = self.c(torch.relu(self.a(x)))
    return torch.where(torch.tensor([False, True, False]), float("-inf"), logits)


@module((3, 5), finds="a.weight", sizes=LAYERS)
def ZeroByConstruction(self: Any, x: Tensor) -> Tensor:
    h = self.c(torch.relu(self.a(x)))
    return torch.cat([h, torch.zeros(3, 2), h - h.detach()], -1)


# -- recurrent --------------------------------------------------------------------------------------------------------


@module((2, 4, 5), finds="cell.weight_ih", parts=lambda: dict(cell=nn.RNNCell(5, 6), out=nn.Linear(6, 2)))
def UnrolledCell(self: Any, x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], 6)
    for t in range(x.shape[1]):
        h = self.cell(x[:, t], h)
    return self.out(h)


@module((2, 4, 5), finds="start",
        parts=lambda: dict(start=nn.Parameter(torch.zeros(6)), gru=nn.GRU(5, 6, batch_first=True),
            out=nn.Linear(6, 2)))  # fmt: skip
def LearnedStart(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y, last = self.gru(x, self.start.expand(1, x.shape[0], -1).contiguous())
    return self.out(y), self.out(last[0])


@module((2, 4, 5),
        parts=lambda: dict(lstm=nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True), out=nn.Linear(8, 2)))  # fmt: skip
def BidirectionalLSTM(self: Any, x: Tensor) -> Tensor:
    return self.out(self.lstm(x)[0].amax(1))


@module((2, 4, 5), parts=lambda: dict(f=nn.Linear(11, 6), h=nn.Linear(11, 6), out=nn.Linear(6, 2)))
def MinimalGatedUnit(self: Any, x: Tensor) -> Tensor:
    s = x.new_zeros(x.shape[0], 6)
    for z in x.unbind(1):
        f = torch.sigmoid(self.f(torch.cat([z, s], -1)))
        s = (1 - f) * s + f * torch.tanh(self.h(torch.cat([z, f * s], -1)))
    return self.out(s)


@module((2, 4, 5), finds="embed.weight",
        parts=lambda: dict(embed=nn.Linear(5, 6), cell=nn.LSTMCell(6, 6), query=nn.Linear(6, 6),
            out=nn.Linear(12, 2)))  # fmt: skip
def AttentionDecoder(self: Any, x: Tensor) -> Tensor:
    keys = torch.tanh(self.embed(x))
    h, c = x.new_zeros(x.shape[0], 6), x.new_zeros(x.shape[0], 6)
    steps = []
    for _ in range(2):
        a = (keys @ self.query(h).unsqueeze(-1)).softmax(1)
        read = (a * keys).sum(1)
        h, c = self.cell(read, (h, c))
        steps.append(self.out(torch.cat([h, read], -1)))
    return torch.stack(steps, 1)


@module((2, 6, 5), finds="inp.weight",
        parts=lambda: dict(inp=nn.Conv1d(5, 4, 1), f=nn.Conv1d(4, 4, 2, dilation=2),
            g=nn.Conv1d(4, 4, 2, dilation=2), skip=nn.Conv1d(4, 3, 1)))  # fmt: skip
def CausalConvolution(self: Any, x: Tensor) -> Tensor:
    h = self.inp(x.transpose(1, 2))
    z = F.pad(h, (2, 0))
    return self.skip(h + torch.tanh(self.f(z)) * torch.sigmoid(self.g(z)))


@module((2, 6, 5), parts=lambda: dict(a=nn.Linear(5, 6), decay=nn.Parameter(torch.randn(6)), out=nn.Linear(6, 2)))
def LinearRecurrence(self: Any, x: Tensor) -> Tensor:
    """A gated linear recurrence, computed with cumulative sums over time."""
    t = torch.arange(x.shape[1])[:, None]
    lam = -F.softplus(self.decay)
    h = (torch.relu(self.a(x)) * torch.exp(-lam * t)).cumsum(1) * torch.exp(lam * t)
    return self.out(h)


# -- in-place writes, constants, dead code ----------------------------------------------------------------------------


@module((3, 5), sizes=LAYERS)
def FirstIsOne(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    h[:, 0] = 1
    return self.c(torch.relu(self.b(h)))


@module((3, 5), sizes=LAYERS)
def EveryOtherHalved(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    h[:, ::2] *= 0.5
    return self.c(h)


@module((3, 5), sizes=LAYERS)
def WrittenThroughChunks(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).clone()
    low, high = h.chunk(2, 1)
    low.relu_()
    high.mul_(torch.sigmoid(low))
    return self.c(h)


@module((3, 5), sizes=LAYERS)
def WrittenThroughUnbind(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).view(-1, 2, 4).clone()
    first, second = h.unbind(1)
    first.add_(second)
    return self.c(h.flatten(1))


@module((3, 5), sizes=LAYERS)
def WrittenThroughSplit(self: Any, x: Tensor) -> Tensor:
    h = torch.tanh(self.a(x))
    for part in h.split([2, 3, 3], 1):
        part /= part.norm(dim=1, keepdim=True) + 1e-6
    return self.c(h)


@module((3, 5), sizes=LAYERS)
def FilledBuffer(self: Any, x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], 8)
    out[:, :4] = torch.relu(self.a(x))[:, :4]
    out[:, 4:] = self.b(torch.relu(self.a(x)))[:, 4:]
    return self.c(out)


@module((3, 5), finds="a.weight", sizes=LAYERS)
def DeadBranches(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    _ = h.cumsum(-1)
    g = torch.relu(self.b(h))
    _ = h + g
    _ = h.argmax(-1)
    return self.c(g)


@module((3, 5), finds="a.weight", sizes=LAYERS)
def HalfPrecisionInside(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x)).to(torch.bfloat16).float()
    return self.c(h)


@module((3, 5), finds="a.weight", sizes=LAYERS)
def Autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = torch.relu(self.a(x))
    return self.c(h.float())


@module((3, 5), finds="a.weight", sizes=LAYERS)
def CountsNonzero(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.c(h) / (torch.linalg.vector_norm(h, ord=0, dim=-1, keepdim=True) + 1)


@module((3, 5), sizes=LAYERS)
def RoundedUnits(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.c(h.long().to(h.dtype) + 0.1 * h)


@module((2, 3, 6, 6), parts=lambda: dict(a=nn.Conv2d(3, 4, 1), b=nn.Linear(4, 2)))
def PooledPlaces(self: Any, x: Tensor) -> Tensor:
    """Where the maxima are, as numbers."""
    value, place = F.max_pool2d(F.relu(self.a(x)), 6, return_indices=True)
    return self.b((value * place.float() / 36).flatten(1))


@module((3, 5), sizes=((5, 2), (8, 3)))
def RepeatedOneChannel(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.relu(self.a(x)).repeat_interleave(4, 1))


@module((3, 5), sizes=((5, 4), (5, 8), (8, 3)))
def Tiled(self: Any, x: Tensor) -> Tensor:
    return self.c(self.b(x) * torch.relu(self.a(x)).repeat(1, 2))


# -- assorted ---------------------------------------------------------------------------------------------------------


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30.0 * x)


@module((6, 2), finds="0.weight 2.weight")
def siren() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), Sine(), nn.Linear(8, 8), Sine(), nn.Linear(8, 3))


@module((6, 2), finds="frequencies",
        parts=lambda: dict(frequencies=nn.Parameter(torch.randn(4, 2)), a=nn.Linear(8, 6), b=nn.Linear(6, 2)))  # fmt: skip
def FourierFeatures(self: Any, x: Tensor) -> Tensor:
    z = 2 * math.pi * x @ self.frequencies.T
    return self.b(torch.relu(self.a(torch.cat([z.sin(), z.cos()], -1))))


@module((4, 5), (4, 3), sizes=((5, 8), (13, 8), (8, 1), (11, 4), (4, 3)))
def NeuralRadiance(self: Any, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """A skip of the input into the middle, and a second input at the end."""
    h = torch.relu(self.a(x))
    h = torch.relu(self.b(torch.cat([x, h], -1)))
    return F.softplus(self.c(h)), torch.sigmoid(self.e(torch.relu(self.d(torch.cat([h, d], -1)))))


@module((3, 5), finds="a.weight", sizes=((5, 8), (8, 6), (3, 8), (8, 5)))
def VariationalEncoder(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, log_var = self.b(torch.relu(self.a(x))).chunk(2, -1)
    z = mean + torch.exp(0.5 * log_var) * 0.3
    return self.d(torch.relu(self.c(z))), mean, log_var


@module((3, 6),
        parts=lambda: dict(s=nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2)),
            t=nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))))  # fmt: skip
def RealNVP(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    log_det = x.new_zeros(x.shape[0])
    for s, t in zip(self.s, self.t, strict=True):
        a, b = x.chunk(2, -1)
        scale = s(a)
        x = torch.cat([b * scale.exp() + t(a), a], -1)
        log_det = log_det + scale.sum(-1)
    return x, log_det


@module((3, 5), sizes=((5, 4), (4, 3)), parts=lambda: dict(w=nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))))
def InvertibleLinear(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(self.a(x)) @ self.w
    return self.b(h), torch.linalg.slogdet(self.w)[1]


@module((4, 3, 2), finds="a.weight b.weight",
        parts=lambda: dict(a=nn.Conv1d(3, 6, 1), b=nn.Conv1d(6, 8, 1), c=nn.Linear(8, 2)))  # fmt: skip
def PointNet(self: Any, x: Tensor) -> Tensor:
    return self.c(F.relu(self.b(F.relu(self.a(x)))).max(-1)[0])


@module((2, 5, 3), parts=lambda: dict(a=nn.Linear(6, 7), b=nn.Linear(7, 2)))
def EdgeConvolution(self: Any, x: Tensor) -> Tensor:
    """Neighbors by distance in the input, features of differences."""
    near = torch.cdist(x, x).topk(3, largest=False)[1]
    g = torch.stack([x[k][near[k]] for k in range(x.shape[0])])
    c = x.unsqueeze(2).expand_as(g)
    return self.b(torch.relu(self.a(torch.cat([c, g - c], -1))).amax(2))


@module((2, 4, 5), torch.tensor([4, 2]), finds="a.weight", sizes=LAYERS)
def MaskedMean(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(x.shape[1])[None] < lengths[:, None]
    h = torch.relu(self.a(x)) * mask[..., None]
    return self.c(h.sum(1) / lengths[:, None])


@module(torch.tensor([1, 4, 2, 6, 0]), torch.tensor([0, 2]), finds="bag.weight",
        parts=lambda: dict(bag=nn.EmbeddingBag(7, 5, mode="sum"), out=nn.Linear(5, 2)))  # fmt: skip
def Bags(self: Any, words: Tensor, offsets: Tensor) -> Tensor:
    return self.out(self.bag(words, offsets))


@module((3, 4), torch.tensor([[0, 1], [2, 0], [1, 1]]), finds="hidden.weight",
        parts=lambda: dict(tables=nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(2, 3)]),
            norm=nn.BatchNorm1d(4), hidden=nn.Linear(9, 6), out=nn.Linear(6, 2)))  # fmt: skip
def TabularEmbeddings(self: Any, x: Tensor, categories: Tensor) -> Tensor:
    z = [table(categories[:, k]) for k, table in enumerate(self.tables)]
    return self.out(torch.relu(self.hidden(torch.cat([self.norm(x), *z], 1))))


@module((3, 5), finds="a.weight", sizes=((5, 6), (6, 2), (6, 3), (6, 1)))
def MultiTask(self: Any, x: Tensor) -> dict[str, Any]:
    h = torch.relu(self.a(x))
    return {"logits": self.b(h), "more": [self.c(h), (self.d(h).squeeze(-1), h.norm())]}


@module((3, 5), finds="a.weight", sizes=LAYERS)
def EvidentialRegression(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    mu, v, alpha = self.c(torch.relu(self.a(x))).unbind(-1)
    return mu, F.softplus(v) + 1e-6, F.softplus(alpha) + 1.0


@module((3, 5), parts=lambda: dict(nodes=nn.Linear(5, 3), leaves=nn.Parameter(torch.randn(4, 2))))
def SoftDecisionTree(self: Any, x: Tensor) -> Tensor:
    p = torch.sigmoid(self.nodes(x))
    q = 1 - p
    path = torch.stack([p[:, 0] * p[:, 1], p[:, 0] * q[:, 1], q[:, 0] * p[:, 2], q[:, 0] * q[:, 2]], 1)
    return path @ self.leaves


@module((3, 5),
        parts=lambda: dict(first=nn.Parameter(torch.randn(6, 5, 4)), second=nn.Parameter(torch.randn(2, 6, 4))))  # fmt: skip
def Kolmogorov(self: Any, x: Tensor) -> Tensor:
    """Learned functions on the edges, from shared bumps."""
    grid = torch.linspace(-1, 1, 4)
    h = torch.einsum("big,oig->bo", torch.exp(-((x[..., None] - grid) ** 2)), self.first)
    return torch.einsum("big,oig->bo", torch.exp(-((h[..., None] - grid) ** 2)), self.second)


@module((3, 5), sizes=LAYERS)
def DeepEquilibrium(self: Any, x: Tensor) -> Tensor:
    z = torch.zeros(x.shape[0], 8)
    for _ in range(5):
        z = torch.tanh(0.3 * self.b(z) + self.a(x))
    return self.c(z)


@module((3, 5), finds="a.weight", sizes=LAYERS)
def NeuralODE(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    for _ in range(2):
        k1 = torch.tanh(self.b(h))
        k2 = torch.tanh(self.b(h + 0.25 * k1))
        h = h + 0.5 * k2
    return self.c(h)


@module((3, 4), finds="a",
        parts=lambda: dict(a=nn.Parameter(torch.randn(6, 4)), beta=nn.Parameter(torch.tensor(2.0))))  # fmt: skip
def Hopfield(self: Any, x: Tensor) -> Tensor:
    """Stored patterns are interchangeable."""
    for _ in range(2):
        x = (self.beta * x @ self.a.T).softmax(-1) @ self.a
    return x


@module((3, 5))
class PartlyFrozen(Base):
    def more(self) -> None:
        for p in self.a.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(h)))


@module((3, 5), sizes=((5, 8), (12, 3)))
def ConstantFeatures(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    extra = torch.stack([h.mean(-1), h.amax(-1), h.std(-1), torch.ones(3)], -1)
    return self.b(torch.cat([h, extra], -1))


@module((3, 5), finds="a.weight", sizes=LAYERS)
def GradientReversal(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.relu(self.a(x))
    return self.c(h), self.c(torch.relu(self.b(2 * h.detach() - h)))


@module((3, 5))
class UnusedParameters(Base):
    def more(self) -> None:
        self.spare, self.unused = nn.Linear(8, 8), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x)))


@module((3, 5), sizes=((5, 4),), parts=lambda: dict(means=torch.randn(3, 4), precision=torch.eye(4) + 0.1))
def MahalanobisHead(self: Any, x: Tensor) -> Tensor:
    d = torch.relu(self.a(x))[:, None] - self.means
    return -torch.einsum("bki,ij,bkj->bk", d, self.precision, d)


@module((3, 5), sizes=((5, 6), (8, 3)),
        parts=lambda: dict(w=torch.randn(8, 6), b0=torch.rand(8), precision=torch.eye(8)))  # fmt: skip
def RandomFeatureGP(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    phi = (2 / 8) ** 0.5 * torch.cos(torch.relu(self.a(x)) @ self.w.T + self.b0)
    cov = phi @ torch.linalg.inv(self.precision + torch.eye(8)) @ phi.T
    return self.b(phi), cov.diagonal()


@module((3, 5),
        parts=lambda: dict(members=nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(3))))  # fmt: skip
def Ensemble(self: Any, x: Tensor) -> Tensor:
    return torch.stack([member(x).softmax(-1) for member in self.members]).mean(0)


@module((2, 4, 5), parts=lambda: dict(a=nn.Linear(5, 6), score=nn.Linear(6, 1), b=nn.Linear(6, 2)))
def TokenMerging(self: Any, x: Tensor) -> Tensor:
    """Tokens weighted by a score that they compute; the best are kept in order."""
    h = torch.relu(self.a(x))
    s = self.score(h).squeeze(-1)
    keep = s.topk(2, 1)[1].sort(1)[0]
    return self.b(h.gather(1, keep[..., None].expand(-1, -1, 6)))
