"""Modules as a skeptical outsider would write them, for the oracle; none of them was looked at when rules were written.

Each is written as ``Name(inputs) finds ...``, the parts of the module (a line of keywords; pairs are linear layers, plain
tensors buffers), and the lines of ``forward``, or as an expression. Inputs that are given by their shapes are random.
``layers`` stands for three linear layers, ``hidden`` for these and the units ``h`` of the first, ``attends`` for the
projections around an attention that makes ``y``. What follows ``finds`` are parameters of which it is plain that the
first axis holds interchangeable units, so that pinning them is noticed. Where nothing is named, nothing is demanded but
that what is claimed holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cases import Made
from random_modules import executed
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


class DropBlock(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = (torch.rand_like(x[:, :1]) < 0.1).float()
        return x * (1 - F.max_pool2d(mask, 3, 1, 1))


class WeightStandardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=self.padding)


class Sinusoids(nn.Module):
    """Positions, in a table that is no part of the state."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.arange(4)[:, None] / 100 ** (torch.arange(0, 6, 2) / 6)
        table = torch.zeros(4, 6)
        table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class TiedWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.a(self.embed(words))))


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30.0 * x)


def zeroed(norm: nn.Module) -> nn.Module:
    nn.init.zeros_(norm.weight)
    return norm


DEGREE = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
SPACE = {"math": math, "torch": torch, "nn": nn, "F": F, "parametrizations": parametrizations, "prune": prune,
         "DropBlock": DropBlock, "WeightStandardized": WeightStandardized, "Sinusoids": Sinusoids, "Sine": Sine,
         "TiedWords": TiedWords, "zeroed": zeroed, "DEGREE": DEGREE}  # fmt: skip
LAYERS = "a=(5, 8), b=(8, 8), c=(8, 3)"
KINDS = {None: "", "layers": LAYERS, "hidden": LAYERS, "attends": "qkv=(5, 18), out=(6, 4), head=(4, 2)"}
SOURCE = """
# residual networks and their shortcuts
option_a(x=(2, 3, 4, 4)) finds stem.weight one.weight
    stem=nn.Conv2d(3, 4, 1), one=nn.Conv2d(4, 8, 3, 2, 1), two=nn.Conv2d(8, 8, 3, 1, 1), n1=nn.BatchNorm2d(8),
    n2=nn.BatchNorm2d(8), head=(8, 3)
    x = F.relu(self.stem(x))
    out = self.n2(self.two(F.relu(self.n1(self.one(x)))))
    return self.head(F.relu(out + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), "constant", 0)).mean((2, 3)))
option_a_shortcut_first(x=(2, 3, 4, 4)) finds stem.weight one.weight
    stem=nn.Conv2d(3, 4, 1), one=nn.Conv2d(4, 8, 3, 2, 1), two=nn.Conv2d(8, 8, 3, 1, 1), n1=nn.BatchNorm2d(8),
    n2=nn.BatchNorm2d(8), head=(8, 3)
    x = F.relu(self.stem(x))
    out = self.n2(self.two(F.relu(self.n1(self.one(x)))))
    return self.head(F.relu(F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), "constant", 0) + out).mean((2, 3)))
ReZero(x=(3, 5)) hidden finds a.weight
    alpha=nn.Parameter(torch.zeros(())), beta=nn.Parameter(torch.tensor(0.0))
    h = h + self.alpha * torch.tanh(self.b(h))
    return self.c(h * self.beta)
LayerScale(x=(3, 5)) finds a.weight b.weight
    a=(5, 6), b=(6, 9), c=(9, 6), d=(6, 3), gamma=nn.Parameter(1e-5 * torch.ones(6)), norm=nn.LayerNorm(6)
    h = self.a(x)
    h = h + self.gamma * self.c(F.gelu(self.b(self.norm(h))))
    return self.d(h)
Highway(x=(3, 5)) finds a.weight
    a=(5, 6), b=(6, 6), c=(6, 6), d=(6, 3)
    h = self.a(x)
    t = torch.sigmoid(self.c(h))
    return self.d(t * torch.relu(self.b(h)) + (1 - t) * h)
ZeroInitResidual(x=(2, 3, 4, 4)) finds inner.weight
    stem=nn.Conv2d(3, 4, 1), inner=nn.Conv2d(4, 6, 1), outer=nn.Conv2d(6, 4, 1), norm=zeroed(nn.BatchNorm2d(4)), head=(4, 2)
    x = self.stem(x)
    return self.head((x + self.norm(self.outer(F.relu(self.inner(x))))).mean((2, 3)))
DenseWithConstants(x=(3, 5))
    a=(5, 4), b=(6, 4), c=(10, 3)
    h = torch.relu(self.a(x))
    h = torch.cat([h, torch.zeros(3, 1), torch.ones(3, 1)], 1)
    h = torch.cat([h, torch.relu(self.b(h))], 1)
    return self.c(h)
PadThenAdd(x=(3, 5))
    a=(5, 8), b=(5, 10), c=(10, 3)
    h = F.pad(torch.relu(self.a(x)), (1, 1))
    return self.c(torch.relu(h + self.b(x)))
ZerosThenAdd(x=(3, 5))
    a=(5, 4), b=(5, 8), c=(8, 3)
    h = torch.relu(self.a(x))
    return self.c(torch.cat([h, torch.zeros_like(h)], -1) + self.b(x))
FourBranches(x=(3, 5)) finds a.weight
    a=(5, 6), b=(5, 6), c=(5, 6), d=(5, 6), e=(6, 3)
    parts = [torch.relu(layer(x)) for layer in (self.a, self.b, self.c, self.d)]
    return self.e(sum(parts) / len(parts))
StochasticDepthInEval(x=(3, 5)) layers finds a.weight
    h = self.a(x)
    if self.training and torch.rand(()) < 0.5:
        return self.c(h)
    return self.c(h + F.dropout(torch.relu(self.b(h)), 0.5, self.training))

# convolutional blocks
SqueezeExcite(x=(2, 3, 4, 4)) finds a.weight down.weight
    a=nn.Conv2d(3, 6, 1), down=(6, 2), up=(2, 6), b=nn.Conv2d(6, 2, 1)
    h = F.relu(self.a(x))
    s = torch.sigmoid(self.up(F.relu(self.down(h.mean((2, 3))))))
    return self.b(h * s[:, :, None, None])
ShuffleUnit(x=(2, 4, 4, 4))
    stem=nn.Conv2d(4, 8, 1), a=nn.Conv2d(4, 4, 1), dw=nn.Conv2d(4, 4, 3, 1, 1, groups=4), b=nn.Conv2d(4, 4, 1),
    head=(8, 2)
    for _ in range(1):
        left, right = F.relu(self.stem(x)).chunk(2, 1)
        x = torch.cat([left, F.relu(self.b(self.dw(F.relu(self.a(right)))))], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
    return self.head(x.mean((2, 3)))
GroupedThenChunk(x=(2, 4, 4, 4))
    a=nn.Conv2d(4, 8, 1), b=nn.Conv2d(8, 8, 1, groups=2), head=nn.Conv2d(4, 2, 1)
    p, q = self.b(F.relu(self.a(x))).chunk(2, 1)
    return self.head(F.relu(p + q))
InvertedBottleneck(x=(2, 4, 4, 4)) finds a.weight expand.weight
    a=nn.Conv2d(4, 5, 1), expand=nn.Conv2d(5, 10, 1, bias=False),
    dw=nn.Conv2d(10, 10, 3, 1, 1, groups=10, bias=False), project=nn.Conv2d(10, 5, 1, bias=False),
    n1=nn.BatchNorm2d(10), n2=nn.BatchNorm2d(10), n3=nn.BatchNorm2d(5), head=(5, 2)
    x = self.a(x)
    y = F.relu6(self.n1(self.expand(x)))
    y = self.n3(self.project(F.relu6(self.n2(self.dw(y)))))
    return self.head((x + y).mean((2, 3)))
DepthMultiplier(x=(2, 3, 4, 4))
    a=nn.Conv2d(3, 4, 1), dw=nn.Conv2d(4, 12, 3, 1, 1, groups=4), b=nn.Conv2d(12, 2, 1)
    return self.b(F.relu(self.dw(F.relu(self.a(x)))))
TwicePixelShuffle(x=(2, 3, 4, 4))
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(2, 2, 1)
    h = F.relu(self.a(x))
    return self.b(F.pixel_shuffle(torch.cat([h, h], 1), 2))
TwiceFlatten(x=(2, 3, 4, 4))
    a=nn.Conv2d(3, 4, 1), b=(128, 2)
    h = F.relu(self.a(x))
    return self.b(torch.cat([h, h], 1).flatten(1))
PixelUnshuffle(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(16, 2, 1)
    return self.b(F.pixel_unshuffle(F.relu(self.a(x)), 2))
drop_block(x=(2, 3, 4, 4)) finds 0.weight
    nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), DropBlock(), nn.Conv2d(4, 2, 1))
ConvBlockAttention(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 6, 1), mlp=nn.Sequential(nn.Conv2d(6, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 1)),
    spatial=nn.Conv2d(2, 1, 3, padding=1), b=nn.Conv2d(6, 2, 1)
    h = F.relu(self.a(x))
    w = torch.sigmoid(self.mlp(F.adaptive_avg_pool2d(h, 1)) + self.mlp(F.adaptive_max_pool2d(h, 1)))
    h = h * w
    s = torch.cat([h.max(1, keepdim=True)[0], h.mean(1, keepdim=True)], 1)
    return self.b(h * torch.sigmoid(self.spatial(s)))
Inception(x=(2, 3, 6, 6)) finds a.weight b.weight
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 2, 1), c=nn.Conv2d(2, 3, 3, padding=1), d=nn.Conv2d(10, 2, 1)
    return self.d(torch.cat([F.relu(self.a(x)), F.relu(self.c(F.relu(self.b(x)))), F.max_pool2d(x, 3, 1, 1)], 1))
UNet(x=(2, 3, 8, 8)) finds down.weight mid.weight
    down=nn.Conv2d(3, 4, 3, padding=1), mid=nn.Conv2d(4, 6, 3, padding=1), up=nn.ConvTranspose2d(6, 4, 2, 2),
    out=nn.Conv2d(8, 2, 1)
    s = F.relu(self.down(x))
    return self.out(torch.cat([s, F.relu(self.up(F.relu(self.mid(F.max_pool2d(s, 2)))))], 1))
UnpooledAutoencoder(x=(2, 3, 8, 8))
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 3, 1)
    h, where = F.max_pool2d(F.relu(self.a(x)), 2, return_indices=True)
    return self.b(F.max_unpool2d(h, where, 2))
FeaturePyramid(x=(2, 3, 8, 8)) finds lateral1.weight c1.weight
    c1=nn.Conv2d(3, 4, 3, 2, 1), c2=nn.Conv2d(4, 6, 3, 2, 1), lateral1=nn.Conv2d(4, 5, 1),
    lateral2=nn.Conv2d(6, 5, 1), out=nn.Conv2d(5, 3, 1)
    one = F.relu(self.c1(x))
    two = F.relu(self.c2(one))
    top = self.lateral2(two)
    low = self.lateral1(one) + F.interpolate(top, size=one.shape[-2:], mode="nearest")
    return {"low": self.out(low), "top": self.out(top)}
CReLU(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(8, 2, 1)
    h = self.a(x)
    return self.b(torch.cat([F.relu(h), F.relu(-h)], 1))
Maxout(x=(3, 5))
    a=(5, 12), b=(4, 3)
    return self.b(self.a(x).view(-1, 4, 3).amax(-1))
MaxoutStrided(x=(3, 5))
    a=(5, 12), b=(4, 3)
    h = self.a(x)
    return self.b(torch.maximum(torch.maximum(h[:, :4], h[:, 4:8]), h[:, 8:]))
GhostModule(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), cheap=nn.Conv2d(4, 4, 3, 1, 1, groups=4), b=nn.Conv2d(8, 2, 1)
    h = F.relu(self.a(x))
    return self.b(torch.cat([h, F.relu(self.cheap(h))], 1)[:, :8])
EfficientChannelAttention(x=(2, 4, 4, 4)) # A one-dimensional convolution over channels: the order of the channels counts.
    a=nn.Conv2d(4, 6, 1), eca=nn.Conv1d(1, 1, 3, padding=1), b=nn.Conv2d(6, 2, 1)
    h = F.relu(self.a(x))
    w = torch.sigmoid(self.eca(h.mean((2, 3)).unsqueeze(1))).squeeze(1)
    return self.b(h * w[..., None, None])
Involution(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), kernel=nn.Conv2d(4, 9, 1), b=nn.Conv2d(4, 2, 1)
    h = F.relu(self.a(x))
    n, c, height, width = h.shape
    patches = F.unfold(h, 3, padding=1).view(n, c, 9, height, width)
    return self.b((patches * self.kernel(h).unsqueeze(1)).sum(2))
LocalResponse(x=(2, 3, 4, 4))
    a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 2, 1)
    return self.b(F.local_response_norm(F.relu(self.a(x)), 3))
CoordConv(x=(2, 3, 4, 4))
    a=nn.Conv2d(5, 6, 1), b=nn.Conv2d(6, 2, 1)
    ramp = torch.linspace(-1, 1, 4)
    grid = torch.stack(torch.meshgrid(ramp, ramp, indexing="ij")).expand(x.shape[0], -1, -1, -1)
    return self.b(F.relu(self.a(torch.cat([x, grid], 1))))
SpatialTransformer(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), where=(4, 6), b=nn.Conv2d(4, 2, 1)
    h = F.relu(self.a(x))
    theta = self.where(h.mean((2, 3))).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(h.shape), align_corners=False)
    return self.b(F.grid_sample(h, grid, align_corners=False))
GlobalResponse(x=(2, 3, 4, 4)) finds a.weight # ConvNeXt V2's normalization, epsilon and all.
    a=(3, 6), b=(6, 2), gamma=nn.Parameter(torch.zeros(6)), beta=nn.Parameter(torch.zeros(6))
    h = F.gelu(self.a(x.permute(0, 2, 3, 1)))
    g = torch.norm(h, p=2, dim=(1, 2), keepdim=True)
    n = g / (g.mean(dim=-1, keepdim=True) + 1e-6)
    return self.b(self.gamma * (h * n) + self.beta + h)

# normalizations
StandardizedByHand(x=(3, 5)) layers finds a.weight
    h = self.a(x)
    h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-5)
    return self.c(torch.relu(self.b(h)))
ClampedNorm(x=(3, 5)) layers finds a.weight
    h = self.a(x)
    h = h / h.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return self.c(torch.relu(self.b(h)))
RootMeanSquareByHand(x=(3, 5)) layers finds a.weight
    g=nn.Parameter(torch.ones(8))
    h = self.a(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g
    return self.c(torch.relu(h))
FunctionalNorms(x=(3, 5)) layers finds a.weight
    h = F.layer_norm(self.a(x), (8,))
    h = F.rms_norm(self.b(torch.relu(h)), (8,))
    return self.c(torch.relu(h))
DividedByMaximum(x=(3, 5)) layers finds a.weight
    h = self.a(x)
    return self.c(h / (h.abs().amax(1, keepdim=True) + 1e-8))
FilterResponse(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 2, 1), tau=nn.Parameter(torch.zeros(1, 4, 1, 1)),
    beta=nn.Parameter(torch.zeros(1, 4, 1, 1)), gamma=nn.Parameter(torch.zeros(1, 4, 1, 1)), eps=1e-6
    h = self.a(x)
    h = h * torch.rsqrt(h.pow(2).mean((2, 3), keepdim=True) + self.eps)
    return self.b(torch.max(self.gamma * h + self.beta, self.tau))
weight_standardized(x=(2, 3, 4, 4)) finds 0.weight
    nn.Sequential(WeightStandardized(3, 6, 3, padding=1), nn.GroupNorm(1, 6), nn.ReLU(), nn.Conv2d(6, 2, 1))
group_norm_three(x=(2, 3, 4, 4))
    nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(3, 6), nn.SiLU(), nn.Conv2d(6, 2, 1))
instance_norm_tracked(x=(2, 3, 4, 4)) finds 0.weight
    nn.Sequential(nn.Conv2d(3, 6, 1), nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.ReLU(), nn.Conv2d(6, 2, 1))
weight_norm(x=(3, 5)) finds 0.parametrizations.weight.original1
    nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3))
spectral_norm(x=(3, 5))
    nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3))
orthogonal(x=(3, 5))
    nn.Sequential(nn.Linear(5, 6), nn.Tanh(), parametrizations.orthogonal(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3))
AdaptiveNorm(x=(3, 5)) # Scale and shift come from another branch (AdaLN, FiLM).
    a=(5, 6), b=(5, 12), c=(6, 3)
    gain, shift = self.b(x).chunk(2, -1)
    return self.c(torch.relu(F.layer_norm(self.a(x), (6,)) * (1 + gain) + shift))
FiLM(x=(2, 3, 4, 4), z=(2, 5))
    a=nn.Conv2d(3, 6, 1), film=(5, 12), b=nn.Conv2d(6, 2, 1)
    g, b = self.film(z).view(-1, 2, 6).unbind(1)
    return self.b(F.relu(self.a(x) * g[..., None, None] + b[..., None, None]))

# attention
HeadsFirst(x=(2, 4, 5)) attends
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
HeadsLast(x=(2, 4, 5)) attends
    q, k, v = self.qkv(x).view(b, t, 3, 3, 2).permute(2, 0, 4, 1, 3)
    y = F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1)
ChunkedHeadsLast(x=(2, 4, 5)) attends
    q, k, v = (z.view(b, t, 3, 2) for z in self.qkv(x).chunk(3, -1))
    a = torch.einsum("bidh,bjdh->bijh", q, k).softmax(2)
    y = torch.einsum("bijh,bjdh->bidh", a, v)
NormalizedQueries(x=(2, 4, 5)) attends
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(F.layer_norm(q, (3,)), F.layer_norm(k, (3,)), v).transpose(1, 2)
RootMeanSquareQueries(x=(2, 4, 5)) attends
    qn=nn.RMSNorm(3), kn=nn.RMSNorm(3)
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(self.qn(q), self.kn(k), v).transpose(1, 2)
CosineAttention(x=(2, 4, 5)) attends
    logit_scale=nn.Parameter(torch.log(10 * torch.ones(2, 1, 1)))
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    a = a * self.logit_scale.clamp(max=math.log(100.0)).exp()
    y = (a.softmax(-1) @ v).transpose(1, 2)
TalkingHeads(x=(2, 4, 5)) attends
    before=(2, 2), after=(2, 2)
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    a = self.before((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).softmax(2)
    y = (self.after(a).permute(0, 3, 1, 2) @ v).transpose(1, 2)
RelativeBias(x=(2, 4, 5)) attends
    table=nn.Parameter(torch.zeros(7, 2)), index=torch.arange(4)[:, None] - torch.arange(4)[None] + 3
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    bias = self.table[self.index.view(-1)].view(t, t, -1).permute(2, 0, 1)
    y = ((q @ k.transpose(-2, -1) + bias).softmax(-1) @ v).transpose(1, 2)
Alibi(x=(2, 4, 5)) attends
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    slopes = torch.tensor([0.5, 0.25]).view(-1, 1, 1)
    distance = (torch.arange(t)[:, None] - torch.arange(t)[None]).abs()
    mask = torch.full((t, t), float("-inf")).triu(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask - slopes * distance).transpose(1, 2)
Rotary(x=(2, 4, 5)) attends
    qkv=(5, 24), out=(8, 4)
    q, k, v = self.qkv(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
    angle = torch.arange(t)[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    q, k = (z * cos + torch.cat([-z[..., 2:], z[..., :2]], -1) * sin for z in (q, k))
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
ComplexRotary(x=(2, 4, 5)) attends
    qkv=(5, 24), out=(8, 4)
    q, k, v = self.qkv(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
    turn = torch.polar(torch.ones(t, 2), torch.arange(t)[:, None] * torch.tensor([1.0, 0.1]))
    pairs = (torch.view_as_complex(z.reshape(*z.shape[:-1], 2, 2).contiguous()) * turn for z in (q, k))
    q, k = (torch.view_as_real(z).flatten(3) for z in pairs)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
GroupedQueries(x=(2, 4, 5))
    q=(5, 12), k=(5, 6), v=(5, 6), o=(12, 2)
    b, t, _ = x.shape
    q = self.q(x).view(b, t, 4, 3).transpose(1, 2)
    k = self.k(x).view(b, t, 2, 3).transpose(1, 2).repeat_interleave(2, 1)
    v = self.v(x).view(b, t, 2, 3).transpose(1, 2).repeat_interleave(2, 1)
    return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 12))
MultiQuery(x=(2, 4, 5))
    q=(5, 6), kv=(5, 6), o=(6, 2)
    b, t, _ = x.shape
    q = self.q(x).view(b, t, 2, 3).transpose(1, 2)
    k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
    return self.o(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))
encoder_layer(x=(2, 4, 6)) finds linear1.weight
    nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)
decoder_layer(x=(2, 4, 6), y=(2, 3, 6)) finds linear1.weight
    nn.TransformerDecoderLayer(6, 2, 7, batch_first=True, norm_first=True)
WindowWithShift(x=(1, 4, 8, 8))
    a=nn.Conv2d(4, 6, 1), qkv=(6, 18), o=(6, 2)
    h = self.a(x).permute(0, 2, 3, 1)
    h = torch.roll(h, (-2, -2), (1, 2))
    b, height, width, c = h.shape
    h = h.view(b, height // 4, 4, width // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
    q, k, v = self.qkv(h).view(-1, 16, 3, 2, 3).permute(2, 0, 3, 1, 4)
    h = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c)
    h = h.view(b, height // 4, width // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, height, width, c)
    return self.o(torch.roll(h, (2, 2), (1, 2)))
Halo(x=(1, 3, 8, 8))
    q=nn.Conv2d(3, 6, 1), kv=nn.Conv2d(3, 12, 1), o=nn.Conv2d(6, 2, 1)
    b, _, height, width = x.shape
    q = self.q(x).view(b * 2, 3, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(b * 2, 4, 16, 3)
    kv = F.unfold(self.kv(x), 6, stride=4, padding=1).view(b * 2, 6, 36, 4).permute(0, 3, 2, 1)
    k, v = kv.split([3, 3], -1)
    y = (q @ k.transpose(-2, -1) * 3**-0.5).softmax(-1) @ v
    y = y.view(b * 2, 2, 2, 4, 4, 3).permute(0, 5, 1, 3, 2, 4).reshape(b, 6, height, width)
    return self.o(y)
Axial(x=(2, 3, 4, 5))
    rows=nn.MultiheadAttention(6, 2, batch_first=True), columns=nn.MultiheadAttention(6, 2, batch_first=True), a=(5, 6), o=(6, 2)
    h = self.a(x)
    b, r, c, d = h.shape
    z = h.reshape(b * r, c, d)
    h = h + self.rows(z, z, z, need_weights=False)[0].view(b, r, c, d)
    z = h.transpose(1, 2).reshape(b * c, r, d)
    h = h + self.columns(z, z, z, need_weights=False)[0].view(b, c, r, d).transpose(1, 2)
    return self.o(h)
Mixer(x=(2, 4, 5)) finds token.weight channel.weight a.weight
    a=(5, 6), n1=nn.LayerNorm(6), n2=nn.LayerNorm(6), token=(4, 7), token2=(7, 4), channel=(6, 9),
    channel2=(9, 6), head=(6, 2)
    h = self.a(x)
    h = h + self.token2(F.gelu(self.token(self.n1(h).transpose(1, 2)))).transpose(1, 2)
    h = h + self.channel2(F.gelu(self.channel(self.n2(h))))
    return self.head(h.mean(1))
Performer(x=(2, 4, 5)) attends
    projection=torch.randn(3, 6)
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    q, k = torch.relu(q @ self.projection) + 1e-3, torch.relu(k @ self.projection) + 1e-3
    y = q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(2, keepdim=True).transpose(-2, -1))
    y = y.transpose(1, 2)
ClassToken(x=(2, 4, 5)) finds embed.weight
    embed=(5, 6), attention=nn.MultiheadAttention(6, 2, batch_first=True), head=(6, 2),
    token=nn.Parameter(torch.zeros(1, 1, 6)), position=nn.Parameter(torch.randn(1, 5, 6)), norm=nn.LayerNorm(6)
    h = torch.cat([self.token.expand(x.shape[0], -1, -1), self.embed(x)], 1) + self.position
    z = self.norm(h)
    h = h + self.attention(z, z, z)[0]
    return self.head(self.norm(h)[:, 0])
SinusoidalPositions(x=(2, 4, 5))
    nn.Sequential(nn.Linear(5, 6), Sinusoids(), nn.ReLU(), nn.Linear(6, 2))
PooledByQueries(x=(2, 4, 5)) finds q.weight # A set transformer's pooling: the seeds are parameters, and keep their order in the output.
    seeds=nn.Parameter(torch.randn(3, 5)), q=(5, 6), k=(5, 6), v=(5, 4), o=(4, 2)
    a = (self.q(self.seeds) @ self.k(x).transpose(1, 2)).softmax(-1)
    return self.o(a @ self.v(x))
SlotAttention(x=(2, 4, 5)) finds slots_mu k.weight v.weight # Slots that are pooled at the end: they are interchangeable, like hidden units.
    slots_mu=nn.Parameter(torch.randn(3, 6)), q=(6, 6), k=(5, 6), v=(5, 6), gru=nn.GRUCell(6, 6), o=(6, 2)
    b = x.shape[0]
    slots = self.slots_mu.expand(b, -1, -1)
    for _ in range(2):
        a = (self.k(x) @ self.q(slots).transpose(1, 2)).softmax(-1) + 1e-8
        a = a / a.sum(1, keepdim=True)
        updates = a.transpose(1, 2) @ self.v(x)
        slots = self.gru(updates.reshape(-1, 6), slots.reshape(-1, 6)).view(b, -1, 6)
    return self.o(slots.amax(1))
SwiGLU(x=(2, 4, 6)) finds up.weight
    gate=nn.Linear(6, 8, bias=False), up=nn.Linear(6, 8, bias=False), down=nn.Linear(8, 6, bias=False)
    return x + self.down(F.silu(self.gate(x)) * self.up(x))
FusedGLU(x=(2, 4, 6))
    a=(6, 16), b=(8, 6)
    return self.b(F.glu(self.a(x), -1))
InterleavedGLU(x=(2, 4, 6))
    a=(6, 16), b=(8, 6)
    h = self.a(x)
    return self.b(h[..., ::2] * torch.sigmoid(h[..., 1::2]))
GatedMLP(x=(2, 4, 5)) finds a.weight # gMLP's spatial gating unit.
    a=(5, 8), norm=nn.LayerNorm(4), spatial=nn.Conv1d(4, 4, 1), b=(4, 2)
    u, v = F.gelu(self.a(x)).chunk(2, -1)
    return self.b(u * self.spatial(self.norm(v)))

# shared, tied and generated weights
TiedAutoencoder(x=(3, 5)) finds a.weight
    a=(5, 8), bias=nn.Parameter(torch.zeros(5))
    return F.linear(torch.sigmoid(self.a(x)), self.a.weight.t(), self.bias)
DeepTiedAutoencoder(x=(3, 5)) finds a.weight b.weight
    a=(5, 8), b=(8, 4)
    z = torch.tanh(self.b(torch.relu(self.a(x))))
    return torch.relu(z @ self.b.weight) @ self.a.weight
CalledThreeTimes(x=(3, 5)) hidden finds a.weight b.weight
    for _ in range(3):
        h = torch.relu(self.b(h))
    return self.c(h)
Siamese(x=(3, 5), y=(3, 5)) layers finds a.weight b.weight
    u, v = (torch.relu(self.b(torch.relu(self.a(z)))) for z in (x, y))
    return self.c((u - v).abs())
SiameseCosine(x=(3, 5), y=(3, 5)) layers finds a.weight
    return F.cosine_similarity(self.b(torch.relu(self.a(x))), self.b(torch.relu(self.a(y))))
TiedLanguageModel(words=torch.tensor([[1, 4, 2], [6, 0, 4]]))
    TiedWords()
HyperNetwork(x=(3, 5), z=(3, 4))
    make_w=(4, 30), make_b=(4, 6), out=(6, 2)
    w, b = self.make_w(z).view(-1, 6, 5), self.make_b(z)
    return self.out(torch.relu(torch.einsum("bi,boi->bo", x, w) + b))
LowRankAdapter(x=(3, 5)) hidden finds a.weight
    down=nn.Linear(8, 2, bias=False), up=nn.Linear(2, 8, bias=False)
    return self.c(torch.relu(self.b(h) + 2.0 * self.up(self.down(h))))
LowRankWrittenOut(x=(3, 5)) hidden
    left=nn.Parameter(torch.randn(8, 2)), right=nn.Parameter(torch.randn(2, 8))
    return self.c(torch.relu(F.linear(h, self.b.weight + self.left @ self.right, self.b.bias)))
PlusIdentity(x=(3, 5)) hidden finds a.weight
    return self.c(torch.relu(F.linear(h, self.b.weight + torch.eye(8))))
SymmetricWeight(x=(3, 5)) hidden
    return self.c(torch.relu(h @ (self.b.weight + self.b.weight.T)))
TriangularWeight(x=(3, 5)) hidden
    return self.c(torch.relu(h @ self.b.weight.tril()))
Bayesian(x=(3, 5)) # Weights by their mean and the logarithm of their deviation, at the mean in evaluation.
    mu=nn.Parameter(torch.randn(6, 5)), rho=nn.Parameter(torch.randn(6, 5)), out=(6, 2)
    w = self.mu + F.softplus(self.rho) * torch.randn_like(self.rho)
    return self.out(torch.relu(F.linear(x, w)))
BatchEnsembled(x=(3, 5))
    w=nn.Linear(5, 6, bias=False), v=nn.Linear(6, 2, bias=False), r=nn.Parameter(torch.randn(2, 5)),
    s=nn.Parameter(torch.randn(2, 6))
    z = x.repeat(2, 1) * self.r.repeat_interleave(3, 0)
    return self.v(torch.relu(self.w(z) * self.s.repeat_interleave(3, 0)))
Monarch(x=(3, 5)) # Block-diagonal matrices with a transposition between them.
    a=(5, 8), l=nn.Parameter(torch.randn(4, 2, 2)), r=nn.Parameter(torch.randn(2, 4, 4)), b=(8, 2)
    h = torch.relu(self.a(x)).view(-1, 4, 2)
    h = torch.einsum("bki,kij->bkj", h, self.l).transpose(1, 2)
    h = torch.einsum("bki,kij->bkj", h, self.r)
    return self.b(torch.relu(h.flatten(1)))
KroneckerLayer(x=(3, 5))
    a=(5, 6), p=nn.Parameter(torch.randn(2, 2)), q=nn.Parameter(torch.randn(3, 3)), b=(6, 2)
    return self.b(torch.relu(torch.relu(self.a(x)) @ torch.kron(self.p, self.q)))

# masks, pruning, buffers
pruned_unstructured(x=(3, 5))
    nn.Sequential(prune.l1_unstructured(nn.Linear(5, 8), "weight", 0.5), nn.ReLU(), nn.Linear(8, 3))
pruned_structured(x=(3, 5))
    nn.Sequential(nn.Linear(5, 8), nn.ReLU(), prune.ln_structured(nn.Linear(8, 8), "weight", 0.25, n=2, dim=0), nn.ReLU(), nn.Linear(8, 3))
BooleanMask(x=(3, 5)) layers
    mask=torch.tensor([True, False] * 4)
    return self.c(torch.relu(self.a(x)) * self.mask)
IntegerMask(x=(3, 5)) layers
    mask=torch.tensor([1, 1, 1, 0, 0, 1, 2, 2])
    return self.c(torch.relu(self.b(torch.relu(self.a(x)) * self.mask)))
MaskedWeights(x=(3, 5)) layers # as in MADE: who sees whom is a boolean buffer
    first=DEGREE[:, None] >= torch.arange(5)[None], second=torch.arange(3)[:, None] > DEGREE[None]
    h = torch.relu(F.linear(x, self.a.weight * self.first, self.a.bias))
    return F.linear(h, self.c.weight.masked_fill(~self.second, 0), self.c.bias)
PermutedByBuffer(x=(3, 5)) layers
    order=torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    return self.c(torch.relu(self.b(torch.relu(self.a(x))[:, self.order])))
CountsItsCalls(x=(3, 5)) layers finds a.weight
    calls=torch.zeros((), dtype=torch.long)
    self.calls += 1
    return self.c(torch.relu(self.a(x)))
MovingAverage(x=(3, 5)) layers
    mean=torch.zeros(8)
    h = self.a(x)
    self.mean.mul_(0.9).add_(0.1 * h.mean(0))
    return self.c(torch.relu(h - self.mean))
DataDependentInit(x=(3, 5)) layers # ActNorm: its buffer says that it was initialized.
    gain=nn.Parameter(torch.ones(8)), shift=nn.Parameter(torch.zeros(8)), done=torch.tensor(True)
    return self.c(torch.relu((self.a(x) + self.shift) * self.gain.exp()))
WhitenedInput(x=(3, 5)) layers finds a.weight
    mean=torch.randn(5), std=torch.rand(5) + 0.5
    return self.c(torch.relu(self.a((x - self.mean) / self.std)))
ComplexGain(x=(3, 5)) layers
    gain=nn.Parameter(torch.randn(8, dtype=torch.complex64))
    return self.c((torch.tanh(self.a(x)) * self.gain).abs())
ComplexLayers(x=(3, 5))
    a=nn.Linear(5, 6).to(torch.complex64), b=nn.Linear(6, 2).to(torch.complex64)
    h = self.a(torch.complex(x, 0.5 * x))
    h = torch.complex(torch.relu(h.real), torch.relu(h.imag))
    return self.b(h).abs()
DiagonalStateSpace(u=(2, 8))
    log_a=nn.Parameter(-torch.rand(5)), theta=nn.Parameter(torch.rand(5)), b=nn.Parameter(torch.randn(5, 2)),
    c=nn.Parameter(torch.randn(5, 2))
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

# products of units
BilinearPooling(x=(2, 3, 4, 4))
    a=nn.Conv2d(3, 4, 1), b=(16, 2)
    h = F.relu(self.a(x)).flatten(2)
    g = (h @ h.transpose(1, 2) / 16).flatten(1)
    g = g.sign() * (g.abs() + 1e-10).sqrt()
    return self.b(F.normalize(g))
GramOutput(x=(2, 3, 4, 4)) # A Gram matrix as the output: the channels keep their order.
    a=nn.Conv2d(3, 4, 1)
    h = F.relu(self.a(x)).flatten(2)
    return h @ h.transpose(1, 2)
StyleLoss(x=(2, 3, 4, 4), y=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 5, 1)
    grams = [(h @ h.transpose(1, 2)) / h.shape[-1] for h in (self.b(F.relu(self.a(z))).flatten(2) for z in (x, y))]
    return ((grams[0] - grams[1]) ** 2).sum()
OuterFlattened(x=(3, 5))
    a=(5, 4), b=(5, 3), c=(12, 2)
    u, v = torch.relu(self.a(x)), torch.tanh(self.b(x))
    return self.c((u[:, :, None] * v[:, None, :]).flatten(1))
QuadraticForm(x=(3, 5))
    a=(5, 6), m=nn.Parameter(torch.randn(6, 6))
    h = torch.relu(self.a(x))
    return torch.einsum("bi,ij,bj->b", h, self.m, h)
bilinear_head(x=(3, 5))
    a=(5, 4), b=(5, 6), pair=nn.Bilinear(4, 6, 3)
    return self.pair(torch.relu(self.a(x)), torch.tanh(self.b(x)))
FactorizationMachine(x=(3, 4, 5)) finds embed.weight
    embed=(5, 6), out=(6, 2)
    e = self.embed(x)
    return self.out(0.5 * (e.sum(1) ** 2 - (e**2).sum(1)))
DeepAndCross(x=(3, 5))
    a=(5, 6), b=(6, 6), c=(6, 2)
    h = self.a(x)
    return self.c(h * self.b(h) + h)
NeuralTensor(x=(3, 5)) finds a.weight
    a=(5, 4), w=nn.Parameter(torch.randn(6, 4, 4)), u=(6, 2)
    h = torch.tanh(self.a(x))
    return self.u(torch.tanh(torch.einsum("bi,kij,bj->bk", h, self.w, h)))
CapsuleRouting(x=(2, 3, 5))
    a=(5, 4), w=nn.Parameter(0.3 * torch.randn(3, 2, 4, 6))
    u = torch.einsum("bid,ijdo->bijo", torch.relu(self.a(x)), self.w)
    logits = torch.zeros(x.shape[0], 3, 2)
    for _ in range(2):
        s = (logits.softmax(2)[..., None] * u).sum(1)
        n = (s**2).sum(-1, keepdim=True)
        v = n / (1 + n) * s / (n.sqrt() + 1e-8)
        logits = logits + (u * v[:, None]).sum(-1)
    return v.norm(dim=-1)

# indices, sorting, gathering
SoftMixture(x=(2, 4, 5)) finds expert_a gate_hidden.weight
    gate_hidden=(5, 6), gate=(6, 3), expert_a=nn.Parameter(torch.randn(3, 5, 7)),
    expert_b=nn.Parameter(torch.randn(3, 7, 2))
    g = self.gate(torch.relu(self.gate_hidden(x))).softmax(-1)
    y = torch.einsum("bteh,eho->bteo", torch.relu(torch.einsum("bti,eih->bteh", x, self.expert_a)), self.expert_b)
    return (g.unsqueeze(-1) * y).sum(2)
TopTwoMixture(x=(6, 5))
    gate=(5, 4),
    experts=nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(4))
    value, index = self.gate(x).topk(2, -1)
    weight = torch.zeros(x.shape[0], 4).scatter(1, index, value.softmax(-1))
    y = torch.stack([expert(x) for expert in self.experts], 1)
    return (weight.unsqueeze(-1) * y).sum(1)
GraphConvolution(x=(5, 5)) layers finds a.weight b.weight
    source, target = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]])
    h = torch.relu(self.a(x))
    h = torch.zeros_like(h).index_add_(0, target, h[source])
    return self.c(torch.relu(self.b(h)))
GraphAttention(x=(5, 5), edges=torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]])) finds a.weight b.weight
    a=(5, 6), b=(6, 6), score=(12, 1), c=(6, 2)
    source, target = edges
    h = self.b(torch.relu(self.a(x)))
    e = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)), 0.2).exp()
    total = torch.zeros(5, 1).index_add(0, target, e)
    return self.c(torch.zeros(5, 6).index_add(0, target, h[source] * e) / (total + 1e-16))
ScatterMean(x=(5, 5)) hidden finds a.weight
    index = torch.tensor([0, 0, 1, 1, 1])
    total = torch.zeros(2, 8).scatter_add(0, index[:, None].expand(-1, 8), h)
    count = torch.zeros(2).scatter_add(0, index, torch.ones(5))
    return self.c(total / count[:, None])
ScatterReduce(x=(5, 5)) hidden finds a.weight
    index = torch.tensor([0, 0, 1, 1, 1])[:, None].expand(-1, 8)
    return self.c(torch.zeros(2, 8).scatter_reduce(0, index, h, "amax", include_self=False))
DenseAdjacency(x=(5, 5)) layers finds a.weight
    adjacency=(torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    d = self.adjacency.sum(1).clamp(min=1).rsqrt()
    return self.c(torch.relu((d[:, None] * self.adjacency * d) @ self.a(x)))
SparseAdjacency(x=(4, 5)) layers finds a.weight
    adjacency=[torch.tensor([[0.0, 1, 0, 2], [1, 0, 0, 0], [0, 0, 1, 0], [0, 3, 0, 0]]).to_sparse()]
    return self.c(torch.relu(torch.sparse.mm(self.adjacency[0], self.a(x))))
CodebookQuantizer(x=(3, 5))
    a=(5, 4), b=(4, 3), codes=nn.Embedding(6, 4)
    z = torch.relu(self.a(x))
    index = torch.cdist(z, self.codes.weight).argmin(-1)
    return self.b(z + (self.codes(index) - z).detach()), index
CodebookHidden(x=(3, 5)) finds codes.weight a.weight # as before, but nobody sees the indices: the codes are interchangeable too
    a=(5, 4), b=(4, 3), codes=nn.Embedding(6, 4)
    z = torch.relu(self.a(x))
    index = torch.cdist(z, self.codes.weight).argmin(-1)
    return self.b(z + (self.codes(index) - z).detach())
Prototypes(x=(3, 5)) finds a.weight
    a=(5, 6), prototypes=nn.Parameter(torch.randn(3, 6))
    return -(torch.cdist(torch.relu(self.a(x)), self.prototypes) ** 2)
RadialBasis(x=(3, 5))
    centers=nn.Parameter(torch.randn(6, 5)), log_width=nn.Parameter(torch.zeros(6)), out=(6, 2)
    d = (x[:, None] - self.centers).pow(2).sum(-1)
    return self.out(torch.exp(-d * self.log_width.exp()))
CosineHead(x=(3, 5)) finds a.weight
    a=(5, 6), classes=nn.Parameter(torch.randn(3, 6)), temperature=nn.Parameter(torch.tensor(10.0))
    return self.temperature * F.linear(F.normalize(torch.relu(self.a(x))), F.normalize(self.classes))
OneHotOfMaximum(x=(3, 5)) layers
    h = self.a(x)
    return self.c(F.one_hot(h.argmax(-1), 8).float() * h)
StraightThroughBinary(x=(3, 5)) layers
    h = self.a(x)
    hard = (h > 0).float()
    return self.c(h + (hard - h).detach())
GumbelHard(x=(3, 5)) layers
    p = self.a(x).softmax(-1)
    hard = torch.zeros_like(p).scatter_(-1, p.max(-1, keepdim=True)[1], 1.0)
    return self.c(hard - p.detach() + p)
SortPooling(x=(2, 6, 5)) finds a.weight
    a=(5, 6), b=(18, 2)
    h = torch.relu(self.a(x))
    return self.b(h.sort(1, descending=True)[0][:, :3].flatten(1))
SortByLastChannel(x=(2, 6, 5)) # DGCNN's pooling: nodes are sorted by their last channel, which stands apart.
    a=(5, 6), b=(18, 2)
    h = torch.tanh(self.a(x))
    order = h[..., -1].argsort(1, descending=True)[:, :3]
    return self.b(h.gather(1, order[..., None].expand(-1, -1, 6)).flatten(1))
SortedUnits(x=(3, 5)) layers # Values of sorted hidden units: any order of the units gives the same.
    return self.c(self.a(x).sort(-1)[0])
TopUnits(x=(3, 5))
    a=(5, 8), b=(3, 2)
    return self.b(torch.relu(self.a(x)).topk(3, -1)[0])
KWinners(x=(3, 5)) layers
    h = self.a(x)
    threshold = h.kthvalue(5, -1, keepdim=True)[0]
    return self.c(h * (h >= threshold))
GroupSort(x=(3, 5)) layers
    h = self.a(x).view(-1, 4, 2)
    return self.c(torch.stack([h.amin(-1), h.amax(-1)], -1).flatten(1))
ClassPrediction(x=(3, 5)) layers
    logits = self.c(torch.relu(self.a(x)))
    return logits.max(-1)
OnlyTheClass(x=(3, 5)) layers finds a.weight
    return self.c(torch.relu(self.a(x))).min(-1)[1]
MedianIndex(x=(3, 5)) layers
    return torch.relu(self.a(x)).median(-1)[1]
DetectionHead(x=(1, 3, 6, 6)) finds a.weight
    a=nn.Conv2d(3, 5, 3, padding=1), score=nn.Conv2d(5, 2, 1), box=nn.Conv2d(5, 8, 1)
    h = F.relu(self.a(x))
    s = self.score(h).permute(0, 2, 3, 1).flatten(1).sigmoid()
    boxes = self.box(h).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
    best, index = s.topk(5, 1)
    return best, boxes.gather(1, index[..., None].expand(-1, -1, 4)), index
CenterPeaks(x=(1, 3, 6, 6)) finds a.weight
    a=nn.Conv2d(3, 5, 1), heat=nn.Conv2d(5, 2, 1)
    heat = self.heat(F.relu(self.a(x))).sigmoid()
    peaks = F.max_pool2d(heat, 3, 1, 1)
    return heat * (heat == peaks)
MaskedLogits(x=(3, 5)) layers finds a.weight
    logits = self.c(torch.relu(self.a(x)))
    return logits.masked_fill(torch.tensor([False, True, False]), -1e9)
InfiniteLogits(x=(3, 5)) layers finds a.weight
    logits = self.c(torch.relu(self.a(x)))
    return torch.where(torch.tensor([False, True, False]), float("-inf"), logits)
ZeroByConstruction(x=(3, 5)) layers finds a.weight
    h = self.c(torch.relu(self.a(x)))
    return torch.cat([h, torch.zeros(3, 2), h - h.detach()], -1)

# recurrent
UnrolledCell(x=(2, 4, 5)) finds cell.weight_ih
    cell=nn.RNNCell(5, 6), out=(6, 2)
    h = torch.zeros(x.shape[0], 6)
    for t in range(x.shape[1]):
        h = self.cell(x[:, t], h)
    return self.out(h)
LearnedStart(x=(2, 4, 5)) finds start
    start=nn.Parameter(torch.zeros(6)), gru=nn.GRU(5, 6, batch_first=True), out=(6, 2)
    y, last = self.gru(x, self.start.expand(1, x.shape[0], -1).contiguous())
    return self.out(y), self.out(last[0])
BidirectionalLSTM(x=(2, 4, 5))
    lstm=nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True), out=(8, 2)
    return self.out(self.lstm(x)[0].amax(1))
MinimalGatedUnit(x=(2, 4, 5))
    f=(11, 6), h=(11, 6), out=(6, 2)
    s = x.new_zeros(x.shape[0], 6)
    for z in x.unbind(1):
        f = torch.sigmoid(self.f(torch.cat([z, s], -1)))
        s = (1 - f) * s + f * torch.tanh(self.h(torch.cat([z, f * s], -1)))
    return self.out(s)
AttentionDecoder(x=(2, 4, 5)) finds embed.weight
    embed=(5, 6), cell=nn.LSTMCell(6, 6), query=(6, 6), out=(12, 2)
    keys = torch.tanh(self.embed(x))
    h, c = x.new_zeros(x.shape[0], 6), x.new_zeros(x.shape[0], 6)
    steps = []
    for _ in range(2):
        a = (keys @ self.query(h).unsqueeze(-1)).softmax(1)
        read = (a * keys).sum(1)
        h, c = self.cell(read, (h, c))
        steps.append(self.out(torch.cat([h, read], -1)))
    return torch.stack(steps, 1)
CausalConvolution(x=(2, 6, 5)) finds inp.weight
    inp=nn.Conv1d(5, 4, 1), f=nn.Conv1d(4, 4, 2, dilation=2), g=nn.Conv1d(4, 4, 2, dilation=2),
    skip=nn.Conv1d(4, 3, 1)
    h = self.inp(x.transpose(1, 2))
    z = F.pad(h, (2, 0))
    return self.skip(h + torch.tanh(self.f(z)) * torch.sigmoid(self.g(z)))
LinearRecurrence(x=(2, 6, 5)) # A gated linear recurrence, computed with cumulative sums over time.
    a=(5, 6), decay=nn.Parameter(torch.randn(6)), out=(6, 2)
    t = torch.arange(x.shape[1])[:, None]
    lam = -F.softplus(self.decay)
    h = (torch.relu(self.a(x)) * torch.exp(-lam * t)).cumsum(1) * torch.exp(lam * t)
    return self.out(h)

# in-place writes, constants, dead code
FirstIsOne(x=(3, 5)) hidden
    h[:, 0] = 1
    return self.c(torch.relu(self.b(h)))
EveryOtherHalved(x=(3, 5)) hidden
    h[:, ::2] *= 0.5
    return self.c(h)
WrittenThroughChunks(x=(3, 5)) layers
    h = self.a(x).clone()
    low, high = h.chunk(2, 1)
    low.relu_()
    high.mul_(torch.sigmoid(low))
    return self.c(h)
WrittenThroughUnbind(x=(3, 5)) layers
    h = self.a(x).view(-1, 2, 4).clone()
    first, second = h.unbind(1)
    first.add_(second)
    return self.c(h.flatten(1))
WrittenThroughSplit(x=(3, 5)) layers
    h = torch.tanh(self.a(x))
    for part in h.split([2, 3, 3], 1):
        part /= part.norm(dim=1, keepdim=True) + 1e-6
    return self.c(h)
FilledBuffer(x=(3, 5)) layers
    out = torch.empty(x.shape[0], 8)
    out[:, :4] = torch.relu(self.a(x))[:, :4]
    out[:, 4:] = self.b(torch.relu(self.a(x)))[:, 4:]
    return self.c(out)
DeadBranches(x=(3, 5)) hidden finds a.weight
    _ = h.cumsum(-1)
    g = torch.relu(self.b(h))
    _ = h + g
    _ = h.argmax(-1)
    return self.c(g)
HalfPrecisionInside(x=(3, 5)) layers finds a.weight
    h = torch.relu(self.a(x)).to(torch.bfloat16).float()
    return self.c(h)
Autocast(x=(3, 5)) layers finds a.weight
    with torch.autocast("cpu", torch.bfloat16):
        h = torch.relu(self.a(x))
    return self.c(h.float())
CountsNonzero(x=(3, 5)) hidden finds a.weight
    return self.c(h) / (torch.linalg.vector_norm(h, ord=0, dim=-1, keepdim=True) + 1)
RoundedUnits(x=(3, 5)) hidden
    return self.c(h.long().to(h.dtype) + 0.1 * h)
PooledPlaces(x=(2, 3, 6, 6)) # Where the maxima are, as numbers.
    a=nn.Conv2d(3, 4, 1), b=(4, 2)
    value, place = F.max_pool2d(F.relu(self.a(x)), 6, return_indices=True)
    return self.b((value * place.float() / 36).flatten(1))
RepeatedOneChannel(x=(3, 5))
    a=(5, 2), b=(8, 3)
    return self.b(torch.relu(self.a(x)).repeat_interleave(4, 1))
Tiled(x=(3, 5))
    a=(5, 4), b=(5, 8), c=(8, 3)
    return self.c(self.b(x) * torch.relu(self.a(x)).repeat(1, 2))

# assorted
siren(x=(6, 2)) finds 0.weight 2.weight
    nn.Sequential(nn.Linear(2, 8), Sine(), nn.Linear(8, 8), Sine(), nn.Linear(8, 3))
FourierFeatures(x=(6, 2)) finds frequencies
    frequencies=nn.Parameter(torch.randn(4, 2)), a=(8, 6), b=(6, 2)
    z = 2 * math.pi * x @ self.frequencies.T
    return self.b(torch.relu(self.a(torch.cat([z.sin(), z.cos()], -1))))
NeuralRadiance(x=(4, 5), d=(4, 3)) # A skip of the input into the middle, and a second input at the end.
    a=(5, 8), b=(13, 8), c=(8, 1), d=(11, 4), e=(4, 3)
    h = torch.relu(self.a(x))
    h = torch.relu(self.b(torch.cat([x, h], -1)))
    return F.softplus(self.c(h)), torch.sigmoid(self.e(torch.relu(self.d(torch.cat([h, d], -1)))))
VariationalEncoder(x=(3, 5)) finds a.weight
    a=(5, 8), b=(8, 6), c=(3, 8), d=(8, 5)
    mean, log_var = self.b(torch.relu(self.a(x))).chunk(2, -1)
    z = mean + torch.exp(0.5 * log_var) * 0.3
    return self.d(torch.relu(self.c(z))), mean, log_var
RealNVP(x=(3, 6))
    s=nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2)),
    t=nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))
    log_det = x.new_zeros(x.shape[0])
    for s, t in zip(self.s, self.t, strict=True):
        a, b = x.chunk(2, -1)
        scale = s(a)
        x = torch.cat([b * scale.exp() + t(a), a], -1)
        log_det = log_det + scale.sum(-1)
    return x, log_det
InvertibleLinear(x=(3, 5))
    a=(5, 4), b=(4, 3), w=nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))
    h = torch.tanh(self.a(x)) @ self.w
    return self.b(h), torch.linalg.slogdet(self.w)[1]
PointNet(x=(4, 3, 2)) finds a.weight b.weight
    a=nn.Conv1d(3, 6, 1), b=nn.Conv1d(6, 8, 1), c=(8, 2)
    return self.c(F.relu(self.b(F.relu(self.a(x)))).max(-1)[0])
EdgeConvolution(x=(2, 5, 3)) # Neighbors by distance in the input, features of differences.
    a=(6, 7), b=(7, 2)
    near = torch.cdist(x, x).topk(3, largest=False)[1]
    g = torch.stack([x[k][near[k]] for k in range(x.shape[0])])
    c = x.unsqueeze(2).expand_as(g)
    return self.b(torch.relu(self.a(torch.cat([c, g - c], -1))).amax(2))
MaskedMean(x=(2, 4, 5), lengths=torch.tensor([4, 2])) layers finds a.weight
    mask = torch.arange(x.shape[1])[None] < lengths[:, None]
    h = torch.relu(self.a(x)) * mask[..., None]
    return self.c(h.sum(1) / lengths[:, None])
Bags(words=torch.tensor([1, 4, 2, 6, 0]), offsets=torch.tensor([0, 2])) finds bag.weight
    bag=nn.EmbeddingBag(7, 5, mode="sum"), out=(5, 2)
    return self.out(self.bag(words, offsets))
TabularEmbeddings(x=(3, 4), categories=torch.tensor([[0, 1], [2, 0], [1, 1]])) finds hidden.weight
    tables=nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(2, 3)]), norm=nn.BatchNorm1d(4), hidden=(9, 6),
    out=(6, 2)
    z = [table(categories[:, k]) for k, table in enumerate(self.tables)]
    return self.out(torch.relu(self.hidden(torch.cat([self.norm(x), *z], 1))))
MultiTask(x=(3, 5)) finds a.weight
    a=(5, 6), b=(6, 2), c=(6, 3), d=(6, 1)
    h = torch.relu(self.a(x))
    return {"logits": self.b(h), "more": [self.c(h), (self.d(h).squeeze(-1), h.norm())]}
EvidentialRegression(x=(3, 5)) layers finds a.weight
    mu, v, alpha = self.c(torch.relu(self.a(x))).unbind(-1)
    return mu, F.softplus(v) + 1e-6, F.softplus(alpha) + 1.0
SoftDecisionTree(x=(3, 5))
    nodes=(5, 3), leaves=nn.Parameter(torch.randn(4, 2))
    p = torch.sigmoid(self.nodes(x))
    q = 1 - p
    path = torch.stack([p[:, 0] * p[:, 1], p[:, 0] * q[:, 1], q[:, 0] * p[:, 2], q[:, 0] * q[:, 2]], 1)
    return path @ self.leaves
Kolmogorov(x=(3, 5)) # Learned functions on the edges, from shared bumps.
    first=nn.Parameter(torch.randn(6, 5, 4)), second=nn.Parameter(torch.randn(2, 6, 4))
    grid = torch.linspace(-1, 1, 4)
    h = torch.einsum("big,oig->bo", torch.exp(-((x[..., None] - grid) ** 2)), self.first)
    return torch.einsum("big,oig->bo", torch.exp(-((h[..., None] - grid) ** 2)), self.second)
DeepEquilibrium(x=(3, 5)) layers
    z = torch.zeros(x.shape[0], 8)
    for _ in range(5):
        z = torch.tanh(0.3 * self.b(z) + self.a(x))
    return self.c(z)
NeuralODE(x=(3, 5)) layers finds a.weight
    h = self.a(x)
    for _ in range(2):
        k1 = torch.tanh(self.b(h))
        k2 = torch.tanh(self.b(h + 0.25 * k1))
        h = h + 0.5 * k2
    return self.c(h)
Hopfield(x=(3, 4)) finds a # Stored patterns are interchangeable.
    a=nn.Parameter(torch.randn(6, 4)), beta=nn.Parameter(torch.tensor(2.0))
    for _ in range(2):
        x = (self.beta * x @ self.a.T).softmax(-1) @ self.a
    return x
PartlyFrozen(x=(3, 5))
    a=nn.Linear(5, 8).requires_grad_(False), b=(8, 8), c=(8, 3)
    with torch.no_grad():
        h = torch.relu(self.a(x))
    return self.c(torch.relu(self.b(h)))
ConstantFeatures(x=(3, 5))
    a=(5, 8), b=(12, 3)
    h = torch.relu(self.a(x))
    extra = torch.stack([h.mean(-1), h.amax(-1), h.std(-1), torch.ones(3)], -1)
    return self.b(torch.cat([h, extra], -1))
GradientReversal(x=(3, 5)) hidden finds a.weight
    return self.c(h), self.c(torch.relu(self.b(2 * h.detach() - h)))
UnusedParameters(x=(3, 5)) layers
    spare=(8, 8), unused=nn.Parameter(torch.randn(3))
    if x is None:
        return self.spare(self.unused)
    return self.c(torch.relu(self.a(x)))
MahalanobisHead(x=(3, 5))
    a=(5, 4), means=torch.randn(3, 4), precision=torch.eye(4) + 0.1
    d = torch.relu(self.a(x))[:, None] - self.means
    return -torch.einsum("bki,ij,bkj->bk", d, self.precision, d)
RandomFeatureGP(x=(3, 5))
    a=(5, 6), b=(8, 3), w=torch.randn(8, 6), b0=torch.rand(8), precision=torch.eye(8)
    phi = (2 / 8) ** 0.5 * torch.cos(torch.relu(self.a(x)) @ self.w.T + self.b0)
    cov = phi @ torch.linalg.inv(self.precision + torch.eye(8)) @ phi.T
    return self.b(phi), cov.diagonal()
Ensemble(x=(3, 5))
    members=nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(3))
    return torch.stack([member(x).softmax(-1) for member in self.members]).mean(0)
TokenMerging(x=(2, 4, 5)) # Tokens weighted by a score that they compute; the best are kept in order.
    a=(5, 6), score=(6, 1), b=(6, 2)
    h = torch.relu(self.a(x))
    s = self.score(h).squeeze(-1)
    keep = s.topk(2, 1)[1].sort(1)[0]
    return self.b(h.gather(1, keep[..., None].expand(-1, -1, 6)))
"""


def handwritten(source: str, number: int) -> Handwritten:
    head, *lines = source.splitlines()
    match = re.fullmatch(r"(\w+)\((.*)\)(?: (layers|hidden|attends))?(?: finds ([\w. ]+?))?(?: *#.*)?", head)
    assert match, head
    name, arguments, kind, finds = match.groups()
    generator = torch.Generator().manual_seed(number)
    given = {n: torch.randn(i, generator=generator) if isinstance(i, tuple) else i for n, i in made(arguments).items()}
    parts = [line for line in lines if re.match(r" {4}\w+=[^=]", line)]
    forward = lines[len(parts) :]
    if kind == "hidden":
        forward = ["    h = torch.relu(self.a(x))", *forward]
    if kind == "attends":
        forward = ["    b, t, _ = x.shape", *forward, "    return self.head(torch.relu(self.out(y.reshape(b, t, -1))))"]
    if any("return" in line for line in forward):
        space = executed("\n".join([f"def forward(self, {', '.join(given)}):", *forward]), name, SPACE)
        own = {"forward": space["forward"], "parts": staticmethod(lambda: made(KINDS[kind]) | made(" ".join(parts)))}
        build: Callable[[], nn.Module] = type(name, (Made,), own)
    else:
        build = lambda: eval("".join(forward), SPACE)  # noqa: E731
    return Handwritten(name, build, tuple(given.values()), tuple((finds or "").split()))


def made(keywords: str) -> dict[str, Any]:
    return eval(f"dict({keywords})", SPACE)


ENTRIES = re.split(r"\n(?=\w)", re.sub(r"(?m)^(#.*)?\n", "", SOURCE))
HANDWRITTEN = [handwritten(source, k) for k, source in enumerate(ENTRIES)]
