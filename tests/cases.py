"""The zoo of architectures on which laws are tested: small modules, inputs, and the groups that they have.

What follows ``has`` in their text are the shapes of all permutation groups (``(blocks..., size)``), and the total
numbers of positive factors, of signs, and of entries of matrices. They are counted by hand from the architecture, so
that claiming too little fails as claiming too much does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from written import Entry, entries


@dataclass(frozen=True)
class Case:
    """One architecture: how to build it, an input, and what it holds."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    permutations: list[tuple[int, ...]] = field(default_factory=list)
    scales: int = 0
    normalizations: int = 0
    signs: int = 0
    linears: int = 0  # entries of all matrices: of streams once norms are folded, and of pairs under rotary positions


class BasicBlock(nn.Module):
    """A residual block with a projection where shapes change."""

    def __init__(self, c: int, d: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, d, 3, padding=1, bias=False), norm(d)
        self.conv2, self.norm2 = nn.Conv2d(d, d, 3, padding=1, bias=False), norm(d)
        self.short = nn.Conv2d(c, d, 1) if c != d else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.short(x)
        return F.relu(y)


class FilterResponseNorm(nn.Module):
    """Singh and Krishnan's FRN with its thresholded linear unit."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.eps = 1e-6
        self.gamma, self.beta, self.tau = (nn.Parameter(torch.randn(1, c, 1, 1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        nu2 = torch.mean(x**2, dim=(2, 3), keepdim=True)
        x = x * torch.rsqrt(nu2 + self.eps)
        return torch.max(self.gamma * x + self.beta, self.tau)


class Attention(nn.Module):
    """Self-attention by hand: separate or fused projections, grouped queries, rotary positions."""

    def __init__(
        self, width: int, heads: int, kv: int | None = None, fused: bool = False, rotary: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv, self.size, self.rotary = heads, kv or heads, width // heads, rotary
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q = nn.Linear(width, width)
            self.k, self.v = (nn.Linear(width, self.kv * self.size) for _ in range(2))
        self.out, self.fused = nn.Linear(width, width), fused

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        if self.fused:
            q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (
                layer(x).view(b, t, n, self.size).transpose(1, 2)
                for layer, n in ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv))
            )
            k, v = (z.repeat_interleave(self.heads // self.kv, 1) for z in (k, v))
        if self.rotary:
            q, k = self.rotate(q), self.rotate(k)
        a = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.size), -1)
        return self.out((a @ v).transpose(1, 2).reshape(b, t, w))

    @staticmethod
    def rotate(x: Tensor) -> Tensor:
        t, d = x.shape[-2:]
        angle = torch.arange(t)[:, None] * 0.3 ** torch.arange(d // 2)[None]
        angle = torch.cat([angle, angle], -1)
        half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * angle.cos() + half * angle.sin()


class Transformer(nn.Module):
    """A pre-norm block between an embedding and a head."""

    def __init__(self, attention: nn.Module, width: int = 12, inputs: int = 5) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(inputs, width), nn.Parameter(torch.randn(1, 4, width))
        self.norm1, self.attention = nn.LayerNorm(width), attention
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 10), nn.Linear(10, width)
        self.norm3, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x).mean(1))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class UNet(nn.Module):
    """One level down and up; the skip is concatenated or added."""

    def __init__(self, concat: bool) -> None:
        super().__init__()
        self.concat = concat
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.c, self.out = nn.Conv2d(8 if concat else 4, 5, 3, padding=1), nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = self.up(F.relu(self.b(F.max_pool2d(a, 2))))
        joined = torch.cat([a, b], 1) if self.concat else a + b
        return self.out(F.relu(self.c(F.interpolate(joined, scale_factor=2.0, mode="bilinear"))))


def turned(z: Tensor) -> Tensor:
    return torch.stack([-z[..., 1::2], z[..., ::2]], -1).reshape(z.shape)


class TinyLlama(nn.Module):
    """Token embedding, RMSNorm, rotary attention, SwiGLU; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.norm1, self.attention, self.norm2 = RMSNorm(8), Attention(8, 2, rotary=True), RMSNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 6, False), nn.Linear(8, 6, False), nn.Linear(6, 8, False)
        self.norm3, self.head = RMSNorm(8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norm3(x))


wrapped = nn.utils.parametrizations.weight_norm
SOURCE = """
mlp_relu(x=(3, 5)) has [8, 6], scales=14
    nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.LeakyReLU(), nn.Linear(6, 3))
mlp_mixed(x=(3, 5)) has [8, 6], scales=6, signs=8
    nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
mlp_wide_blocks(x=(3, 5)) has [7], scales=7
    nn.Sequential(nn.Linear(5, 7, bias=False), nn.Dropout(0.5), nn.ReLU(), nn.Identity(), nn.Linear(7, 2))
cnn_flatten(x=(2, 2, 10, 10)) has [4, 5, 6], scales=15
    nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3)
    )
batchnorm_cnn(x=(2, 2, 8, 8)) has [4, 5], scales=9, normalizations=9, signs=9
    nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)
    )
resnet_batchnorm(x=(2, 2, 6, 6)) has [4, 4, 6, 6], scales=20, normalizations=24, signs=24
    nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), BasicBlock(4, 4), BasicBlock(4, 6),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )
resnet_frn(x=(2, 2, 6, 6)) has [4, 4, 6, 6], scales=20, normalizations=24, signs=24
    nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), FilterResponseNorm(4), BasicBlock(4, 4, FilterResponseNorm),
        BasicBlock(4, 6, FilterResponseNorm), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )
# Features are concatenated, and later layers read all of them
DenseConcat(x=(2, 2, 6, 6)) has [4, 3, 5], scales=12
    a=nn.Conv2d(2, 4, 3, padding=1), b=nn.Conv2d(4, 3, 3, padding=1), c=nn.Conv2d(7, 5, 1), head=(12, 3)
    a = F.relu(self.a(x))
    b = torch.cat([a, F.relu(self.b(a))], 1)
    c = torch.cat([b, F.relu(self.c(b))], 1)
    return self.head(c.mean((2, 3)))
# Two groups of channels: channels permute inside a group, and groups permute whole
GroupedConv(x=(2, 2, 6, 6)) has [2, (2, 3), (2, 4)], scales=14
    stem=nn.Conv2d(2, 8, 1), group=nn.Conv2d(8, 6, 3, groups=2), out=(6, 3)
    return self.out(F.relu(self.group(F.relu(self.stem(x)))).mean((2, 3)))
# GroupNorm over groups of two channels, which a depthwise convolution then multiplies by three: blocks in blocks
BlocksInBlocks(x=(2, 2, 6, 6)) has [2, (2, 2), (2, 2, 3)], scales=12, normalizations=2, signs=6
    a=nn.Conv2d(2, 4, 1), norm=nn.GroupNorm(2, 4), depth=nn.Conv2d(4, 12, 3, groups=4), head=(12, 3)
    return self.head(F.relu(self.depth(torch.tanh(self.norm(self.a(x))))).mean((2, 3)))
# MobileNet's block: expansion, depthwise, squeeze-excitation, projection
InvertedResidual(x=(2, 2, 6, 6)) has [6, 2, 4], scales=6, normalizations=16, signs=20
    stem=nn.Conv2d(2, 4, 1), expand=nn.Conv2d(4, 6, 1, bias=False), norm1=nn.BatchNorm2d(6),
    depth=nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), norm2=nn.BatchNorm2d(6), squeeze=nn.Conv2d(6, 2, 1),
    excite=nn.Conv2d(2, 6, 1), project=nn.Conv2d(6, 4, 1, bias=False), norm3=nn.BatchNorm2d(4), head=(4, 3)
    x = self.stem(x)
    y = F.relu6(self.norm1(self.expand(x)))
    y = F.silu(self.norm2(self.depth(y)))
    y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
    return self.head((x + self.norm3(self.project(y))).mean((2, 3)))
# GroupNorm with two groups of four channels
GroupNormNet(x=(2, 2, 6, 6)) has [2, (2, 4)], scales=8, normalizations=2, signs=2
    conv=nn.Conv2d(2, 8, 3), norm=nn.GroupNorm(2, 8), head=(8, 3)
    return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
InstanceNormNet(x=(2, 2, 6, 6)) has [5], scales=5, normalizations=5, signs=5
    conv=nn.Conv2d(2, 5, 3), norm=nn.InstanceNorm2d(5, affine=True), head=(5, 3)
    return self.head(F.relu(self.norm(self.conv(x))).amax((2, 3)))
layernorm_mlp(x=(3, 5)) has [6, 7], scales=13, normalizations=2, signs=2
    nn.Sequential(
        nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3)
    )
# stream 12, MLP 10, 3 heads of 4 query-key and 4 value-output units; scales: norm1, norm2, norm3 affines (36),
# query-key and value-output (24); the whole stream feeds normalizations only (1)
transformer_separate(x=(2, 4, 5)) has [12, 10, 3, (3, 4), (3, 4)], scales=60, normalizations=1, signs=61, linears=240
    Transformer(Attention(12, 3))
transformer_fused(x=(2, 4, 5)) has [12, 10, 3, (3, 4), (3, 4)], scales=60, normalizations=1, signs=61, linears=240
    Transformer(Attention(12, 3, fused=True))
# 2 key-value heads, each read by 2 query heads
grouped_query(x=(2, 4, 5)) has [12, 10, 2, (2, 2), (2, 3), (2, 3)], scales=48, normalizations=1, signs=49, linears=180
    Transformer(Attention(12, 4, kv=2))
# torch's own layer (post-norm) behind a linear embedding
EncoderLayer(x=(2, 4, 5)) has [8, 6, 2, (2, 4), (2, 4)], scales=31, normalizations=1, signs=26, linears=128
    embed=(5, 8), layer=nn.TransformerEncoderLayer(8, 2, 6, batch_first=True), head=(8, 3)
    return self.head(self.layer(self.embed(x)).mean(1))
TinyLlama(x=torch.tensor([[1, 4, 2, 0]])) has [8, 6, 2, (2, 4)], scales=35, signs=42, linears=112
    TinyLlama()
# A product of two positively homogeneous branches: two factors for each unit
BilinearGate(x=(3, 5)) has [6], scales=12, signs=6
    a=(5, 6), b=(5, 6), out=(6, 2)
    return self.out(F.relu(self.a(x)) * self.b(x))
# A two-layer LSTM and a GRU
Recurrent(x=(2, 4, 5)) has [6, 7, 3], signs=16
    lstm=nn.LSTM(5, 6, batch_first=True), gru=nn.GRU(6, 7, batch_first=True), mix=(7, 3), head=(3, 2)
    return self.head(torch.tanh(self.mix(self.gru(self.lstm(x)[0])[0][:, -1])))
BidirectionalLSTM(x=(2, 4, 5)) has [6, 6, 6, 6], signs=24
    lstm=nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True), head=(12, 2)
    return self.head(self.lstm(x)[0].mean(1))
conv1d_transposed(x=(2, 3, 12)) has [4, 6, 5], scales=15
    nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.ReLU(), nn.ConvTranspose1d(4, 6, 3, stride=2), nn.ReLU(), nn.Conv1d(6, 5, 3),
        nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(10, 2)
    )
conv3d(x=(2, 2, 5, 6, 6)) has [4, 5], scales=5, normalizations=4, signs=4
    nn.Sequential(
        nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.SiLU(), nn.Conv3d(4, 5, 3), nn.ReLU(), nn.AdaptiveMaxPool3d(1),
        nn.Flatten(), nn.Linear(5, 2)
    )
unet_concat(x=(1, 2, 8, 8)) has [4, 6, 4, 5], scales=19, signs=4
    UNet(True)
unet_add(x=(1, 2, 8, 8)) has [4, 6, 5], scales=15
    UNet(False)
weight_norm(x=(3, 5)) has [6, 4], scales=5, normalizations=10, signs=10
    nn.Sequential(wrapped(nn.Linear(5, 6)), nn.ReLU(), wrapped(nn.Linear(6, 4)), nn.ReLU(), nn.Linear(4, 2))
# Parameters that forward uses without a layer, one of them transposed
DirectParameters(x=(3, 5)) has [6], scales=6
    w=[5, 6], b=[6], v=[2, 6], unused=[4, 4]
    return torch.relu(x @ self.w + self.b) @ self.v.t()
# the shared layer maps the hidden units to themselves: its rows and columns move together
CalledTwice(x=(3, 5)) has [6], scales=7
    a=(5, 6), shared=nn.Linear(6, 6, bias=False), out=(6, 2)
    x = F.relu(self.a(x))
    return self.out(F.relu(self.shared(F.relu(self.shared(x)))))
# The decoder's weight is the encoder's, transposed
TiedAutoencoder(x=(3, 5)) has [6]
    encoder=nn.Linear(5, 6, bias=False), bias=[5], head=(6, 2)
    hidden = self.encoder(x)
    return torch.softmax(hidden, -1) @ self.encoder.weight + self.bias, self.head(F.softmax(hidden, -1))
# three members of a batched ensemble: each has its own hidden units, and members stay in place
BatchedEnsemble(x=(3, 5)) has [4, 4, 4], scales=12
    w=[3, 5, 4], b=[3, 1, 4], v=[3, 4, 2]
    hidden = torch.relu(torch.baddbmm(self.b, x.expand(3, -1, -1), self.w))
    return torch.bmm(hidden, self.v).flatten(0, 1)
# Two packed members in grouped convolutions; the output keeps them apart
PackedConv(x=(2, 8, 6, 6)) has [3, 3, 2, 2], scales=10
    a=nn.Conv2d(8, 6, 3, groups=2), b=nn.Conv2d(6, 4, 3, groups=2), head=nn.Conv2d(4, 6, 1, groups=2)
    y = self.head(F.relu(self.b(F.relu(self.a(x)))).mean((2, 3), keepdim=True)).flatten(1)
    return y.reshape(y.shape[0] * 2, 3)
# A sub-pixel convolution: each channel is a bundle of four
PixelShuffleNet(x=(2, 2, 4, 4)) has [3, 4], scales=7
    a=nn.Conv2d(2, 4, 3, padding=1), up=nn.Conv2d(4, 12, 1), b=nn.Conv2d(3, 2, 1)
    return self.b(F.relu(F.pixel_shuffle(self.up(F.relu(self.a(x))), 2)))
# Airy's function has no rule: what it touches is pinned and named; the rest stays free
UnknownOperator(x=(3, 5)) has [4], scales=4
    a=(5, 4), b=(4, 6), c=[3, 6]
    return torch.special.airy_ai(self.b(F.relu(self.a(x)))) @ self.c.T
# 12 values, 6 rotated pairs, 6 units
# Attention whose queries and keys are rotated in pairs (even, odd): heads move whole, and values inside them
InterleavedRotary(x=(2, 4, 5)) has [3, (3, 4), 6], scales=24, signs=18, linears=72
    qkv=(5, 36), out=(12, 6), head=(6, 2)
    batch, tokens, _ = x.shape
    q, k, v = self.qkv(x).reshape(batch, tokens, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    angle = torch.arange(tokens, dtype=x.dtype)[:, None] * torch.tensor([1.0, 1.0, 0.1, 0.1], dtype=x.dtype)
    q, k = (z * angle.cos() + turned(z) * angle.sin() for z in (q, k))
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, 12)
    return self.head(torch.relu(self.out(y)))
# A mobile vision transformer's way of cutting patches: channels are merged with rows, and split again
PatchesOfPixels(x=(2, 2, 4, 4)) has [6], scales=6, normalizations=1, signs=7, linears=36
    a=nn.Conv2d(2, 6, 1), norm=nn.LayerNorm(6), b=nn.Conv2d(6, 2, 1)
    x = self.a(x)
    batch, channels, height, width = x.shape
    rows, columns = height // 2, width // 2
    x = x.reshape(batch * channels * rows, 2, columns, 2).transpose(1, 2)
    x = x.reshape(batch, channels, rows * columns, 4).transpose(1, 3).reshape(batch * 4, rows * columns, channels)
    x = self.norm(x).view(batch, 4, rows * columns, channels).transpose(1, 3)
    x = x.reshape(batch * channels * rows, columns, 2, 2).transpose(1, 2)
    return self.b(x.reshape(batch, channels, rows * 2, columns * 2))
# heads; in each of them the units that queries and keys share, and those of the values, of both scales
# Linear attention over heads of fused queries, keys and values, and over grouped convolutions of the same
MultiScaleLinearAttention(x=(1, 3, 4, 4)) has [3, (3, 2), (3, 2), (3, 2), (3, 2)], scales=18, signs=30
    qkv=nn.Conv2d(3, 18, 1, bias=False), out=nn.Conv2d(12, 2, 1),
    depthwise=nn.Conv2d(18, 18, 3, padding=1, groups=18, bias=False), grouped=nn.Conv2d(18, 18, 1, groups=9, bias=False)
    batch, _, height, width = x.shape
    first = self.qkv(x)
    z = torch.cat([first, self.grouped(self.depthwise(first))], 1)
    q, k, v = z.reshape(batch, -1, 6, height * width).transpose(-1, -2).chunk(3, -1)
    y = torch.sigmoid(q) @ (torch.sigmoid(k).transpose(-1, -2) @ torch.tanh(v))
    return self.out(y.transpose(-1, -2).reshape(batch, -1, height, width))
# scales: scalar against norm, both against the next layer, and the next layer's five units
# Scalars that multiply and shift a whole activation (as in HGNetV2): one factor for all of its units
AffineAfterActivation(x=(3, 4)) has [6, 5], scales=7, normalizations=6, signs=7
    a=(4, 6), norm=nn.BatchNorm1d(6), b=(6, 5), c=(5, 2), scale=nn.Parameter(torch.ones(1)),
    shift=nn.Parameter(torch.zeros(1))
    x = self.scale * torch.relu(self.norm(self.a(x))) + self.shift
    return self.c(torch.relu(self.b(x)))
# Windows are cut out, and summed back into an image
FoldedWindows(x=(2, 3, 6, 6)) has [5], scales=5
    a=nn.Conv2d(3, 5, 1), b=nn.Conv2d(5, 2, 1)
    return self.b(F.fold(F.unfold(torch.relu(self.a(x)), 3, padding=1), (6, 6), 3, padding=1))
# An LSTM cell and a GRU cell that are called at every step
CellLoop(x=(2, 3, 5)) has [4, 6, 7], scales=4, signs=13
    read=(5, 4), lstm=nn.LSTMCell(4, 6), gru=nn.GRUCell(6, 7), head=(7, 2)
    h, c, g = x.new_zeros(len(x), 6), x.new_zeros(len(x), 6), x.new_zeros(len(x), 7)
    for t in range(x.shape[1]):
        h, c = self.lstm(torch.relu(self.read(x[:, t])), (h, c))
        g = self.gru(h, g)
    return self.head(g)
BagOfWords(words=torch.tensor([[1, 4, 2], [8, 0, 4]])) has [5], scales=5
    table=nn.EmbeddingBag(9, 5), head=(5, 2)
    return self.head(torch.relu(self.table(words)))
# scales: before the filter against it, and the filter against the head
# A filter in the Fourier domain of an image, with complex weights
GlobalFilter(x=(2, 4, 4, 3)) has [5], scales=10, signs=5
    a=(3, 5), head=(5, 2), weight=[4, 3, 5, 2]
    y = torch.fft.rfft2(self.a(x), dim=(1, 2)) * torch.view_as_complex(self.weight)
    return self.head(torch.relu(torch.fft.irfft2(y, s=(4, 4), dim=(1, 2))))
# Heads (h) in axes of the weights themselves, behind those of their units (d)
EinsumAttention(x=(2, 4, 5)) has [6, 6, 4, (4, 3), (4, 3)], scales=36, signs=36, linears=144
    embed=(5, 6), head=(6, 2), bias=[3, 4], q=[6, 3, 4], k=[6, 3, 4], v=[6, 3, 4], out=[3, 4, 6]
    x = self.embed(x)
    q, k, v = (torch.einsum("bti,idh->btdh", x, w) for w in (self.q, self.k, self.v))
    scores = torch.einsum("btdh,bsdh->bhts", q + self.bias, k)
    mixed = torch.einsum("bhts,bsdh->btdh", scores.softmax(-1), v)
    return self.head(torch.einsum("btdh,dhu->btu", mixed, self.out))
# A linear layer whose outputs are viewed as ``[units, heads]``
HeadsLast(x=(2, 4, 5)) has [6, 6, 4, (4, 3), (4, 3)], scales=36, signs=36, linears=144
    embed=(5, 6), qkv=(6, 36), out=(12, 6), head=(6, 2)
    b, t, _ = x.shape
    q, k, v = self.qkv(self.embed(x)).view(b, t, 3, 4, 3).permute(4, 0, 3, 1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v)
    return self.head(self.out(mixed.permute(0, 2, 3, 1).reshape(b, t, 12)))
# stream 6, experts' outputs 6, experts 4, 7 units in each; scales: 6 and 6, 28 linear halves against the way down
# Gated experts in stacked weights, all of them computed on copies of the tokens, of which the best two count
StackedExperts(x=(2, 3, 5)) has [6, 6, 4, (4, 7)], scales=40, signs=40, linears=72
    embed=(5, 6), router=(6, 4), head=(6, 2), up=[4, 6, 14], bias=[4, 14], down=[4, 7, 6]
    tokens = self.embed(x).flatten(0, 1)
    gates = self.router(tokens).softmax(-1)
    values, chosen = gates.topk(2, -1)
    gates = torch.zeros_like(gates).scatter(1, chosen, values)
    up = torch.bmm(tokens.repeat(4, 1).view(4, -1, 6), self.up) + self.bias[:, None]
    gate, up = up[..., ::2], up[..., 1::2]
    y = torch.bmm(up * F.silu(gate), self.down)
    return self.head((y * gates.t()[..., None]).sum(0)).unflatten(0, x.shape[:2])
# scales: 12 of the values; 4 between queries and pooling, and 4 between pooling and keys, all heads alike
# Queries are pooled by a depthwise convolution over samples and heads that are one axis (as in MViT)
PooledHeads(x=(2, 4, 5)) has [3, 4, (3, 4)], scales=20, signs=20, linears=48
    qkv=(5, 36), pool=nn.Conv2d(4, 4, 3, padding=1, groups=4), out=(12, 2)
    b, t, _ = x.shape
    q, k, v = self.qkv(x).reshape(b, t, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    q = self.pool(q.reshape(b * 3, 2, 2, 4).permute(0, 3, 1, 2)).reshape(b, 3, 4, t).transpose(2, 3)
    return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 12))
# Cosine attention, whose keys' bias is overwritten with zeros (as in Swin V2)
OverwrittenBias(x=(2, 4, 5)) has [3, (3, 4), (3, 4)], scales=12, normalizations=6, signs=24, linears=48
    qkv=(5, 36), out=(12, 2)
    b, t, _ = x.shape
    bias = self.qkv.bias.clone()
    bias[12:24].zero_()
    q, k, v = F.linear(x, self.qkv.weight, bias).reshape(b, t, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
    return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, 12))
"""


def case(entry: Entry) -> Case:
    def counted(permutations: list[Any], scales: int = 0, normalizations: int = 0, **more: int) -> Case:
        shapes = [(p,) if isinstance(p, int) else p for p in permutations]
        inputs = partial(entry.inputs, 7, torch.float64)
        return Case(entry.name, entry.build, inputs, shapes, scales, normalizations, **more)

    return eval(f"counted({entry.words.removeprefix('has ')})")


CASES = [case(entry) for entry in entries(SOURCE, globals())]
