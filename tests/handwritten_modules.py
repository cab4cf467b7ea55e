"""Modules as a skeptical outsider would write them, for the oracle; none of them was looked at when rules were written.

In their text ``layers`` stands for three linear layers, ``hidden`` for these and the units ``h`` of the first,
``attends`` for the projections around an attention that makes ``y``. What follows ``finds`` are parameters of which it
is plain that the first axis holds interchangeable units, so that pinning them is noticed. Where nothing is named,
nothing is demanded but that what is claimed holds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from written import entries


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


DEGREE = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
SPACE = {
    "math": math, "torch": torch, "nn": nn, "F": F, "parametrizations": parametrizations, "prune": prune,
    "WeightStandardized": WeightStandardized, "Sinusoids": Sinusoids, "DEGREE": DEGREE,
}  # fmt: skip
LAYERS = "a=(5, 8), b=(8, 8), c=(8, 3)"
KINDS = {
    "layers": (LAYERS, [], []),
    "hidden": (LAYERS, ["    h = torch.relu(self.a(x))"], []),
    "attends": (
        "qkv=(5, 18), out=(6, 4), head=(4, 2)",
        ["    b, t, _ = x.shape"],
        ["    return self.head(torch.relu(self.out(y.reshape(b, t, -1))))"],
    ),
}
SOURCE = """
# residual networks and their shortcuts
StochasticDepthInEval(x=(3, 5)) layers finds a.weight
    h = self.a(x)
    if self.training and torch.rand(()) < 0.5:
        return self.c(h)
    return self.c(h + F.dropout(torch.relu(self.b(h)), 0.5, self.training))
option_a(x=(2, 3, 4, 4)) finds stem.weight one.weight
    stem=nn.Conv2d(3, 4, 1), one=nn.Conv2d(4, 8, 3, 2, 1), two=nn.Conv2d(8, 8, 3, 1, 1), n1=nn.BatchNorm2d(8),
    n2=nn.BatchNorm2d(8), head=(8, 3)
    x = F.relu(self.stem(x))
    out = self.n2(self.two(F.relu(self.n1(self.one(x)))))
    return self.head(F.relu(out + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), "constant", 0)).mean((2, 3)))
DenseWithConstants(x=(3, 5))
    a=(5, 4), b=(6, 4), c=(10, 3)
    h = torch.relu(self.a(x))
    h = torch.cat([h, torch.zeros(3, 1), torch.ones(3, 1)], 1)
    h = torch.cat([h, torch.relu(self.b(h))], 1)
    return self.c(h)
FourBranches(x=(3, 5)) finds a.weight
    a=(5, 6), b=(5, 6), c=(5, 6), d=(5, 6), e=(6, 3)
    parts = [torch.relu(layer(x)) for layer in (self.a, self.b, self.c, self.d)]
    return self.e(sum(parts) / len(parts))

# convolutional blocks
PixelUnshuffle(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(16, 2, 1)
    return self.b(F.pixel_unshuffle(F.relu(self.a(x)), 2))
GroupedThenChunk(x=(2, 4, 4, 4))
    a=nn.Conv2d(4, 8, 1), b=nn.Conv2d(8, 8, 1, groups=2), head=nn.Conv2d(4, 2, 1)
    p, q = self.b(F.relu(self.a(x))).chunk(2, 1)
    return self.head(F.relu(p + q))
ConvBlockAttention(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 6, 1), mlp=nn.Sequential(nn.Conv2d(6, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 1)),
    spatial=nn.Conv2d(2, 1, 3, padding=1), b=nn.Conv2d(6, 2, 1)
    h = F.relu(self.a(x))
    w = torch.sigmoid(self.mlp(F.adaptive_avg_pool2d(h, 1)) + self.mlp(F.adaptive_max_pool2d(h, 1)))
    h = h * w
    s = torch.cat([h.max(1, keepdim=True)[0], h.mean(1, keepdim=True)], 1)
    return self.b(h * torch.sigmoid(self.spatial(s)))
FeaturePyramid(x=(2, 3, 8, 8)) finds lateral1.weight c1.weight
    c1=nn.Conv2d(3, 4, 3, 2, 1), c2=nn.Conv2d(4, 6, 3, 2, 1), lateral1=nn.Conv2d(4, 5, 1), lateral2=nn.Conv2d(6, 5, 1),
    out=nn.Conv2d(5, 3, 1)
    one = F.relu(self.c1(x))
    two = F.relu(self.c2(one))
    top = self.lateral2(two)
    low = self.lateral1(one) + F.interpolate(top, size=one.shape[-2:], mode="nearest")
    return {"low": self.out(low), "top": self.out(top)}
Maxout(x=(3, 5))
    a=(5, 12), b=(4, 3)
    return self.b(self.a(x).view(-1, 4, 3).amax(-1))
Involution(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), kernel=nn.Conv2d(4, 9, 1), b=nn.Conv2d(4, 2, 1)
    h = F.relu(self.a(x))
    n, c, height, width = h.shape
    patches = F.unfold(h, 3, padding=1).view(n, c, 9, height, width)
    return self.b((patches * self.kernel(h).unsqueeze(1)).sum(2))
SpatialTransformer(x=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), where=(4, 6), b=nn.Conv2d(4, 2, 1)
    h = F.relu(self.a(x))
    theta = self.where(h.mean((2, 3))).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(h.shape), align_corners=False)
    return self.b(F.grid_sample(h, grid, align_corners=False))

# normalizations
weight_standardized(x=(2, 3, 4, 4)) finds 0.weight
    nn.Sequential(WeightStandardized(3, 6, 3, padding=1), nn.GroupNorm(1, 6), nn.ReLU(), nn.Conv2d(6, 2, 1))
orthogonal(x=(3, 5))
    nn.Sequential(nn.Linear(5, 6), nn.Tanh(), parametrizations.orthogonal(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3))
FiLM(x=(2, 3, 4, 4), z=(2, 5))
    a=nn.Conv2d(3, 6, 1), film=(5, 12), b=nn.Conv2d(6, 2, 1)
    g, b = self.film(z).view(-1, 2, 6).unbind(1)
    return self.b(F.relu(self.a(x) * g[..., None, None] + b[..., None, None]))

# attention
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
ComplexRotary(x=(2, 4, 5)) attends
    qkv=(5, 24), out=(8, 4)
    q, k, v = self.qkv(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
    turn = torch.polar(torch.ones(t, 2), torch.arange(t)[:, None] * torch.tensor([1.0, 0.1]))
    pairs = (torch.view_as_complex(z.reshape(*z.shape[:-1], 2, 2).contiguous()) * turn for z in (q, k))
    q, k = (torch.view_as_real(z).flatten(3) for z in pairs)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
MultiQuery(x=(2, 4, 5))
    q=(5, 6), kv=(5, 6), o=(6, 2)
    b, t, _ = x.shape
    q = self.q(x).view(b, t, 2, 3).transpose(1, 2)
    k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
    return self.o(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))
decoder_layer(x=(2, 4, 6), y=(2, 3, 6)) finds linear1.weight
    nn.TransformerDecoderLayer(6, 2, 7, batch_first=True, norm_first=True)
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
    rows=nn.MultiheadAttention(6, 2, batch_first=True), columns=nn.MultiheadAttention(6, 2, batch_first=True), a=(5, 6),
    o=(6, 2)
    h = self.a(x)
    b, r, c, d = h.shape
    z = h.reshape(b * r, c, d)
    h = h + self.rows(z, z, z, need_weights=False)[0].view(b, r, c, d)
    z = h.transpose(1, 2).reshape(b * c, r, d)
    h = h + self.columns(z, z, z, need_weights=False)[0].view(b, c, r, d).transpose(1, 2)
    return self.o(h)
Performer(x=(2, 4, 5)) attends
    projection=torch.randn(3, 6)
    q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
    q, k = torch.relu(q @ self.projection) + 1e-3, torch.relu(k @ self.projection) + 1e-3
    y = q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(2, keepdim=True).transpose(-2, -1))
    y = y.transpose(1, 2)
SinusoidalPositions(x=(2, 4, 5))
    nn.Sequential(nn.Linear(5, 6), Sinusoids(), nn.ReLU(), nn.Linear(6, 2))
PooledByQueries(x=(2, 4, 5)) finds q.weight # A set transformer's pooling: the seeds are parameters, and keep their order in the output.
    seeds=[3, 5], q=(5, 6), k=(5, 6), v=(5, 4), o=(4, 2)
    a = (self.q(self.seeds) @ self.k(x).transpose(1, 2)).softmax(-1)
    return self.o(a @ self.v(x))
SlotAttention(x=(2, 4, 5)) finds slots_mu k.weight v.weight # Slots that are pooled at the end: they are interchangeable, like hidden units.
    slots_mu=[3, 6], q=(6, 6), k=(5, 6), v=(5, 6), gru=nn.GRUCell(6, 6), o=(6, 2)
    b = x.shape[0]
    slots = self.slots_mu.expand(b, -1, -1)
    for _ in range(2):
        a = (self.k(x) @ self.q(slots).transpose(1, 2)).softmax(-1) + 1e-8
        a = a / a.sum(1, keepdim=True)
        updates = a.transpose(1, 2) @ self.v(x)
        slots = self.gru(updates.reshape(-1, 6), slots.reshape(-1, 6)).view(b, -1, 6)
    return self.o(slots.amax(1))

# shared, tied and generated weights
Bayesian(x=(3, 5)) # Weights by their mean and the logarithm of their deviation, at the mean in evaluation.
    mu=[6, 5], rho=[6, 5], out=(6, 2)
    w = self.mu + F.softplus(self.rho) * torch.randn_like(self.rho)
    return self.out(torch.relu(F.linear(x, w)))
Siamese(x=(3, 5), y=(3, 5)) layers finds a.weight b.weight
    u, v = (torch.relu(self.b(torch.relu(self.a(z)))) for z in (x, y))
    return self.c((u - v).abs())
HyperNetwork(x=(3, 5), z=(3, 4))
    make_w=(4, 30), make_b=(4, 6), out=(6, 2)
    w, b = self.make_w(z).view(-1, 6, 5), self.make_b(z)
    return self.out(torch.relu(torch.einsum("bi,boi->bo", x, w) + b))
LowRankWrittenOut(x=(3, 5)) hidden
    left=[8, 2], right=[2, 8]
    return self.c(torch.relu(F.linear(h, self.b.weight + self.left @ self.right, self.b.bias)))
BatchEnsembled(x=(3, 5))
    w=nn.Linear(5, 6, bias=False), v=nn.Linear(6, 2, bias=False), r=[2, 5], s=[2, 6]
    z = x.repeat(2, 1) * self.r.repeat_interleave(3, 0)
    return self.v(torch.relu(self.w(z) * self.s.repeat_interleave(3, 0)))
Monarch(x=(3, 5)) # Block-diagonal matrices with a transposition between them.
    a=(5, 8), l=[4, 2, 2], r=[2, 4, 4], b=(8, 2)
    h = torch.relu(self.a(x)).view(-1, 4, 2)
    h = torch.einsum("bki,kij->bkj", h, self.l).transpose(1, 2)
    h = torch.einsum("bki,kij->bkj", h, self.r)
    return self.b(torch.relu(h.flatten(1)))

# masks, pruning, buffers
pruned_unstructured(x=(3, 5))
    nn.Sequential(prune.l1_unstructured(nn.Linear(5, 8), "weight", 0.5), nn.ReLU(), nn.Linear(8, 3))
MaskedWeights(x=(3, 5)) layers # as in MADE: who sees whom is a boolean buffer
    first=DEGREE[:, None] >= torch.arange(5)[None], second=torch.arange(3)[:, None] > DEGREE[None]
    h = torch.relu(F.linear(x, self.a.weight * self.first, self.a.bias))
    return F.linear(h, self.c.weight.masked_fill(~self.second, 0), self.c.bias)
ComplexLayers(x=(3, 5))
    a=nn.Linear(5, 6).to(torch.complex64), b=nn.Linear(6, 2).to(torch.complex64)
    h = self.a(torch.complex(x, 0.5 * x))
    h = torch.complex(torch.relu(h.real), torch.relu(h.imag))
    return self.b(h).abs()
DiagonalStateSpace(u=(2, 8))
    log_a=nn.Parameter(-torch.rand(5)), theta=nn.Parameter(torch.rand(5)), b=[5, 2], c=[5, 2]
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
bilinear_head(x=(3, 5))
    a=(5, 4), b=(5, 6), pair=nn.Bilinear(4, 6, 3)
    return self.pair(torch.relu(self.a(x)), torch.tanh(self.b(x)))
BilinearPooling(x=(2, 3, 4, 4))
    a=nn.Conv2d(3, 4, 1), b=(16, 2)
    h = F.relu(self.a(x)).flatten(2)
    g = (h @ h.transpose(1, 2) / 16).flatten(1)
    g = g.sign() * (g.abs() + 1e-10).sqrt()
    return self.b(F.normalize(g))
StyleLoss(x=(2, 3, 4, 4), y=(2, 3, 4, 4)) finds a.weight
    a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 5, 1)
    grams = [(h @ h.transpose(1, 2)) / h.shape[-1] for h in (self.b(F.relu(self.a(z))).flatten(2) for z in (x, y))]
    return ((grams[0] - grams[1]) ** 2).sum()
FactorizationMachine(x=(3, 4, 5)) finds embed.weight
    embed=(5, 6), out=(6, 2)
    e = self.embed(x)
    return self.out(0.5 * (e.sum(1) ** 2 - (e**2).sum(1)))
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
DenseAdjacency(x=(5, 5)) layers finds a.weight
    adjacency=(torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    d = self.adjacency.sum(1).clamp(min=1).rsqrt()
    return self.c(torch.relu((d[:, None] * self.adjacency * d) @ self.a(x)))
SparseAdjacency(x=(4, 5)) layers finds a.weight
    adjacency=[torch.tensor([[0.0, 1, 0, 2], [1, 0, 0, 0], [0, 0, 1, 0], [0, 3, 0, 0]]).to_sparse()]
    return self.c(torch.relu(torch.sparse.mm(self.adjacency[0], self.a(x))))
CodebookHidden(x=(3, 5)) finds codes.weight a.weight # as before, but nobody sees the indices: the codes are interchangeable too
    a=(5, 4), b=(4, 3), codes=nn.Embedding(6, 4)
    z = torch.relu(self.a(x))
    index = torch.cdist(z, self.codes.weight).argmin(-1)
    return self.b(z + (self.codes(index) - z).detach())
SortByLastChannel(x=(2, 6, 5)) # DGCNN's pooling: nodes are sorted by their last channel, which stands apart.
    a=(5, 6), b=(18, 2)
    h = torch.tanh(self.a(x))
    order = h[..., -1].argsort(1, descending=True)[:, :3]
    return self.b(h.gather(1, order[..., None].expand(-1, -1, 6)).flatten(1))
KWinners(x=(3, 5)) layers
    h = self.a(x)
    threshold = h.kthvalue(5, -1, keepdim=True)[0]
    return self.c(h * (h >= threshold))
GroupSort(x=(3, 5)) layers
    h = self.a(x).view(-1, 4, 2)
    return self.c(torch.stack([h.amin(-1), h.amax(-1)], -1).flatten(1))
DetectionHead(x=(1, 3, 6, 6)) finds a.weight
    a=nn.Conv2d(3, 5, 3, padding=1), score=nn.Conv2d(5, 2, 1), box=nn.Conv2d(5, 8, 1)
    h = F.relu(self.a(x))
    s = self.score(h).permute(0, 2, 3, 1).flatten(1).sigmoid()
    boxes = self.box(h).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
    best, index = s.topk(5, 1)
    return best, boxes.gather(1, index[..., None].expand(-1, -1, 4)), index

# recurrent
LearnedStart(x=(2, 4, 5)) finds start
    start=nn.Parameter(torch.zeros(6)), gru=nn.GRU(5, 6, batch_first=True), out=(6, 2)
    y, last = self.gru(x, self.start.expand(1, x.shape[0], -1).contiguous())
    return self.out(y), self.out(last[0])
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
    inp=nn.Conv1d(5, 4, 1), f=nn.Conv1d(4, 4, 2, dilation=2), g=nn.Conv1d(4, 4, 2, dilation=2), skip=nn.Conv1d(4, 3, 1)
    h = self.inp(x.transpose(1, 2))
    z = F.pad(h, (2, 0))
    return self.skip(h + torch.tanh(self.f(z)) * torch.sigmoid(self.g(z)))
LinearRecurrence(x=(2, 6, 5)) # A gated linear recurrence, computed with cumulative sums over time.
    a=(5, 6), decay=[6], out=(6, 2)
    t = torch.arange(x.shape[1])[:, None]
    lam = -F.softplus(self.decay)
    h = (torch.relu(self.a(x)) * torch.exp(-lam * t)).cumsum(1) * torch.exp(lam * t)
    return self.out(h)

# in-place writes, constants, dead code
WrittenThroughUnbind(x=(3, 5)) layers
    h = self.a(x).view(-1, 2, 4).clone()
    first, second = h.unbind(1)
    first.add_(second)
    return self.c(h.flatten(1))
FilledBuffer(x=(3, 5)) layers
    out = torch.empty(x.shape[0], 8)
    out[:, :4] = torch.relu(self.a(x))[:, :4]
    out[:, 4:] = self.b(torch.relu(self.a(x)))[:, 4:]
    return self.c(out)
HalfPrecisionInside(x=(3, 5)) layers finds a.weight
    h = torch.relu(self.a(x)).to(torch.bfloat16).float()
    return self.c(h)
Autocast(x=(3, 5)) layers finds a.weight
    with torch.autocast("cpu", torch.bfloat16):
        h = torch.relu(self.a(x))
    return self.c(h.float())

# assorted
FourierFeatures(x=(6, 2)) finds frequencies
    frequencies=[4, 2], a=(8, 6), b=(6, 2)
    z = 2 * math.pi * x @ self.frequencies.T
    return self.b(torch.relu(self.a(torch.cat([z.sin(), z.cos()], -1))))
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
TabularEmbeddings(x=(3, 4), categories=torch.tensor([[0, 1], [2, 0], [1, 1]])) finds hidden.weight
    tables=nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(2, 3)]), norm=nn.BatchNorm1d(4), hidden=(9, 6), out=(6, 2)
    z = [table(categories[:, k]) for k, table in enumerate(self.tables)]
    return self.out(torch.relu(self.hidden(torch.cat([self.norm(x), *z], 1))))
MultiTask(x=(3, 5)) finds a.weight
    a=(5, 6), b=(6, 2), c=(6, 3), d=(6, 1)
    h = torch.relu(self.a(x))
    return {"logits": self.b(h), "more": [self.c(h), (self.d(h).squeeze(-1), h.norm())]}
SoftDecisionTree(x=(3, 5))
    nodes=(5, 3), leaves=[4, 2]
    p = torch.sigmoid(self.nodes(x))
    q = 1 - p
    path = torch.stack([p[:, 0] * p[:, 1], p[:, 0] * q[:, 1], q[:, 0] * p[:, 2], q[:, 0] * q[:, 2]], 1)
    return path @ self.leaves
Kolmogorov(x=(3, 5)) # Learned functions on the edges, from shared bumps.
    first=[6, 5, 4], second=[2, 6, 4]
    grid = torch.linspace(-1, 1, 4)
    h = torch.einsum("big,oig->bo", torch.exp(-((x[..., None] - grid) ** 2)), self.first)
    return torch.einsum("big,oig->bo", torch.exp(-((h[..., None] - grid) ** 2)), self.second)
NeuralODE(x=(3, 5)) layers finds a.weight
    h = self.a(x)
    for _ in range(2):
        k1 = torch.tanh(self.b(h))
        k2 = torch.tanh(self.b(h + 0.25 * k1))
        h = h + 0.5 * k2
    return self.c(h)
Hopfield(x=(3, 4)) finds a # Stored patterns are interchangeable.
    a=[6, 4], beta=nn.Parameter(torch.tensor(2.0))
    for _ in range(2):
        x = (self.beta * x @ self.a.T).softmax(-1) @ self.a
    return x
PartlyFrozen(x=(3, 5))
    a=nn.Linear(5, 8).requires_grad_(False), b=(8, 8), c=(8, 3)
    with torch.no_grad():
        h = torch.relu(self.a(x))
    return self.c(torch.relu(self.b(h)))
UnusedParameters(x=(3, 5)) layers
    spare=(8, 8), unused=[3]
    if x is None:
        return self.spare(self.unused)
    return self.c(torch.relu(self.a(x)))
RandomFeatureGP(x=(3, 5))
    a=(5, 6), b=(8, 3), w=torch.randn(8, 6), b0=torch.rand(8), precision=torch.eye(8)
    phi = (2 / 8) ** 0.5 * torch.cos(torch.relu(self.a(x)) @ self.w.T + self.b0)
    cov = phi @ torch.linalg.inv(self.precision + torch.eye(8)) @ phi.T
    return self.b(phi), cov.diagonal()
TokenMerging(x=(2, 4, 5)) # Tokens weighted by a score that they compute; the best are kept in order.
    a=(5, 6), score=(6, 1), b=(6, 2)
    h = torch.relu(self.a(x))
    s = self.score(h).squeeze(-1)
    keep = s.topk(2, 1)[1].sort(1)[0]
    return self.b(h.gather(1, keep[..., None].expand(-1, -1, 6)))
"""

HANDWRITTEN = list(entries(SOURCE, SPACE, KINDS))
