"""Every operator along every axis: units in blocks, laid along any of the axes, and what is claimed holds.

Two linear layers give ``[samples, 3, 4]``: of the last two axes one is nested in the other, and which one is open. The
axes are permuted in all six ways, so that units and blocks stand where an operator expects samples, channels,
positions, features or time steps. A rule that forgets an axis claims too much here: a softmax over the blocks depends
on all of them, and units in one block can no longer move on their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tu_symmetry as tus

SAMPLES = 2
Forward = Callable[[Any, Tensor, Tensor], Tensor]
OPERATORS: dict[str, tuple[Forward, Callable[..., nn.Module | nn.Parameter] | None]] = {}


def operator(name: str, forward: Forward, part: Callable[..., Any] | None = None) -> None:
    """Add an operator on ``h`` and ``g``, which have one shape; ``part`` makes ``m.n`` for the three sizes."""
    OPERATORS[name] = forward, part


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


# normalizations
operator("layer_norm", lambda m, h, g: m.n(h), lambda a, b, c: nn.LayerNorm(c))
operator("layer_norm of two axes", lambda m, h, g: m.n(h), lambda a, b, c: nn.LayerNorm((b, c)))
operator("layer_norm, no weights", lambda m, h, g: F.layer_norm(h, h.shape[-1:]))
operator("layer_norm of two axes, no weights", lambda m, h, g: F.layer_norm(h, h.shape[1:]))
operator("rms_norm", lambda m, h, g: F.rms_norm(h, h.shape[-1:]))
operator("group_norm, one group", lambda m, h, g: m.n(h), lambda a, b, c: nn.GroupNorm(1, b))
operator("group_norm, a group each", lambda m, h, g: m.n(h), lambda a, b, c: nn.GroupNorm(b, b))
operator("group_norm", lambda m, h, g: m.n(h), lambda a, b, c: nn.GroupNorm(math.gcd(2, b), b, affine=False))
operator("batch_norm", lambda m, h, g: m.n(h), lambda a, b, c: nn.BatchNorm1d(b))
operator("instance_norm", lambda m, h, g: m.n(h), lambda a, b, c: nn.InstanceNorm1d(b, affine=True))
operator("normalized", lambda m, h, g: F.normalize(h, dim=1))
operator("norm of two axes", lambda m, h, g: h / h.norm(dim=(1, 2), keepdim=True))
operator("weight norm", lambda m, h, g: h * (g / g.norm(dim=1, keepdim=True)))

# linear maps
operator("linear", lambda m, h, g: m.n(h), lambda a, b, c: nn.Linear(c, c))
operator("linear, as a gate", lambda m, h, g: h * m.n(h).sum(-1, keepdim=True), lambda a, b, c: nn.Linear(c, 5))
operator("bilinear", lambda m, h, g: m.n(h.contiguous(), g.contiguous()), lambda a, b, c: nn.Bilinear(c, c, c))
operator("conv", lambda m, h, g: m.n(h), lambda a, b, c: nn.Conv1d(b, b, 3, padding=1))
operator("conv, pointwise", lambda m, h, g: m.n(h), lambda a, b, c: nn.Conv1d(b, b, 1))
operator("conv, depthwise", lambda m, h, g: m.n(h), lambda a, b, c: nn.Conv1d(b, b, 3, padding=1, groups=b))
operator("conv, depthwise and pointwise", lambda m, h, g: m.n(h), lambda a, b, c: nn.Conv1d(b, b, 1, groups=b))
operator("lstm", lambda m, h, g: m.n(h)[0], lambda a, b, c: nn.LSTM(c, c, batch_first=True))
operator("gru", lambda m, h, g: m.n(h)[0], lambda a, b, c: nn.GRU(c, c))
operator("gru, from a state", lambda m, h, g: m.n(h, g[:1].contiguous())[0], lambda a, b, c: nn.GRU(c, c))
operator("gru, last state", lambda m, h, g: h * m.n(h)[1][0][None], lambda a, b, c: nn.GRU(c, c))
operator(
    "gru cell",
    lambda m, h, g: m.n(h.flatten(0, 1), g.flatten(0, 1)).view(h.shape),
    lambda a, b, c: nn.GRUCell(c, c),
)
operator("multihead attention", lambda m, h, g: m.n(h, g, h)[0], lambda a, b, c: nn.MultiheadAttention(c, 1))
operator("baddbmm", lambda m, h, g: torch.baddbmm(h, m.n, h), lambda a, b, c: weight(a, b, b))
operator("bmm with a weight", lambda m, h, g: torch.bmm(h, m.n), lambda a, b, c: weight(a, c, c))
operator("bmm with a view", lambda m, h, g: torch.bmm(h, m.n.transpose(1, 2)), lambda a, b, c: weight(a, c, c))
operator("einsum in blocks", lambda m, h, g: torch.einsum("abc,bcd->abd", h, m.n), lambda a, b, c: weight(b, c, c))
operator(
    "einsum of three",
    lambda m, h, g: torch.einsum("abc,bde,ac->abc", h, m.n, g[:, 0]),
    lambda a, b, c: weight(b, 3, 2),
)
operator(
    "einsum over both",
    lambda m, h, g: torch.einsum("abc,dbc->abd", h, m.n)[..., :1] * h,
    lambda a, b, c: weight(5, b, c),
)
operator(
    "copies, one weight each",
    lambda m, h, g: torch.bmm(h.reshape(1, -1, h.shape[-1]).repeat(3, 1, 1), m.n).sum(0).view(h.shape),
    lambda a, b, c: weight(3, c, c),
)
operator(
    "copies along the first axis",
    lambda m, h, g: (h.repeat(2, 1, 1).view(2, *h.shape) * m.n).sum(0),
    lambda a, b, c: weight(2, 1, 1, 1),
)

# products and attention
operator("attention", lambda m, h, g: F.scaled_dot_product_attention(h, g, h))
operator("attention to another", lambda m, h, g: F.scaled_dot_product_attention(h, g, g))
operator("bmm", lambda m, h, g: torch.bmm(torch.bmm(h, g.transpose(1, 2)), h))
operator("attention by hand", lambda m, h, g: torch.bmm(torch.bmm(h, g.transpose(1, 2)).softmax(-1), h))
operator("attention by columns", lambda m, h, g: torch.bmm(torch.bmm(h, g.transpose(1, 2)).softmax(1), h))
operator("distances", lambda m, h, g: torch.bmm(torch.cdist(h, g), h))
operator("paired distances", lambda m, h, g: h * F.pairwise_distance(h, g)[..., None])
operator("cosines", lambda m, h, g: h * F.cosine_similarity(h, g, 1)[:, None])
operator("row products", lambda m, h, g: h * torch.einsum("abc,abc->ab", h, g)[..., None])

# entry by entry, and reductions
operator("sum", lambda m, h, g: h + g)
operator("gate, last axis", lambda m, h, g: h * g.mean(-1, keepdim=True))
operator("gate, middle axis", lambda m, h, g: h * g.mean(1, keepdim=True))
operator("gate, first axis", lambda m, h, g: h * g.mean(0, keepdim=True))
operator("factors", lambda m, h, g: h * m.n, lambda a, b, c: weight(c))
operator("factors of rows", lambda m, h, g: h * m.n, lambda a, b, c: weight(b, 1))
operator("factors of samples", lambda m, h, g: h * m.n, lambda a, b, c: weight(a, 1, 1))
operator("shifts", lambda m, h, g: torch.relu(h + m.n), lambda a, b, c: weight(b, c))
operator("shifts, in a view", lambda m, h, g: torch.relu(h + m.n.t()), lambda a, b, c: weight(c, b))
operator("shifts of all", lambda m, h, g: torch.relu(h + m.n), lambda a, b, c: weight(a, b, c))
operator("lerp", lambda m, h, g: torch.lerp(h, g, m.n), lambda a, b, c: weight(b, c))
operator("where", lambda m, h, g: torch.where(g > 0, h, m.n), lambda a, b, c: weight(b, c))
operator("addcmul", lambda m, h, g: torch.addcmul(h, g, m.n), lambda a, b, c: weight(b, c))
operator("prelu", lambda m, h, g: m.n(h), lambda a, b, c: nn.PReLU(b))
for dim in range(3):
    operator(f"softmax {dim}", lambda m, h, g, dim=dim: h.softmax(dim))
    operator(f"std {dim}", lambda m, h, g, dim=dim: h / (h.std(dim, keepdim=True) + 1))
operator("log-sum-exp", lambda m, h, g: h - h.logsumexp((1, 2), keepdim=True))
operator("product", lambda m, h, g: h * h.prod(1, keepdim=True))
operator("median", lambda m, h, g: h - h.median(1, keepdim=True)[0])

# positions
operator("argmax, last axis", lambda m, h, g: h * F.one_hot(h.argmax(-1), h.shape[-1]))
operator("argmax, middle axis", lambda m, h, g: h * F.one_hot(h.argmax(1), h.shape[1]).transpose(1, 2))
operator("topk", lambda m, h, g: h * (h >= h.topk(2, -1)[0][..., -1:]))
operator("sort, last axis", lambda m, h, g: h.sort(-1)[0])
operator("sort, middle axis", lambda m, h, g: h.sort(1)[0])
operator("gather, last axis", lambda m, h, g: h.gather(-1, g.argsort(-1)))
operator("gather, middle axis", lambda m, h, g: h.gather(1, g.argsort(1)))
operator("scatter", lambda m, h, g: torch.zeros_like(h).scatter(-1, g.argsort(-1), h))
operator("cumsum", lambda m, h, g: h.cumsum(1))
operator("flip", lambda m, h, g: h + h.flip(1))
operator("first of the middle axis", lambda m, h, g: h * g[:, :1])
operator("first of the last axis", lambda m, h, g: h * g[..., :1])
operator("first of the first axis", lambda m, h, g: h * g[:1])
operator("pad", lambda m, h, g: F.pad(h, (1, 0))[..., :-1])
operator("max_pool", lambda m, h, g: F.max_pool1d(h, 3, 1, 1))
operator("mean pool", lambda m, h, g: h * F.adaptive_avg_pool1d(h, 1))
operator("interpolate", lambda m, h, g: F.interpolate(h, size=h.shape[-1], mode="linear"))
operator("fft", lambda m, h, g: torch.fft.fft(h, dim=1).real)
operator("tril", lambda m, h, g: h.tril())
operator("unfold", lambda m, h, g: h.unfold(1, 2, 1).sum(1).sum(-1)[:, None] * h)

# data movement
operator("glu, last axis", lambda m, h, g: F.glu(torch.cat([h, g], -1), -1))
operator("glu, middle axis", lambda m, h, g: F.glu(torch.cat([h, g], 1), 1))
operator("stacked", lambda m, h, g: torch.stack([h, g], -1).amax(-1))
operator("unbound", lambda m, h, g: torch.stack([torch.tanh(z) for z in h.unbind(1)], 1))
operator("unbound, told apart", lambda m, h, g: torch.stack([z * (k + 1) for k, z in enumerate(h.unbind(-1))], -1))
operator("interleaved", lambda m, h, g: h.repeat_interleave(2, 1)[:, ::2])
operator("shuffled", lambda m, h, g: h.reshape(h.shape[0], 2, -1).transpose(1, 2).reshape(h.shape))


class Net(nn.Module):
    """``[samples, *order]`` with its axes permuted, through an operator, back, and read by a linear layer."""

    def __init__(self, name: str, order: Sequence[int], axes: Sequence[int]) -> None:
        super().__init__()
        self.order, self.axes = order, axes
        self.run, part = OPERATORS[name]
        self.a, self.b, self.c = nn.Linear(5, 12), nn.Linear(5, 12), nn.Linear(12, 2)
        if part is not None:
            self.n = part(*((SAMPLES, *order)[k] for k in axes))

    def forward(self, x: Tensor) -> Tensor:
        h, g = (layer(x).view(-1, *self.order).permute(*self.axes) for layer in (self.a, self.b))
        back = [self.axes.index(k) for k in range(3)]
        return self.c(self.run(self, h, g).permute(*back).reshape(-1, 12))


AXES = [*itertools.permutations(range(3))]
ORDERS = [(3, 4), (4, 3)]


def made(name: str, order: tuple[int, int], axes: tuple[int, ...]) -> tuple[nn.Module, Tensor] | None:
    """Network and inputs; none where the operator does not take these sizes."""
    torch.manual_seed(0)
    model, x = Net(name, order, axes).eval(), torch.randn(SAMPLES, 5)
    try:
        model(x)
    except RuntimeError:  # nothing to shuffle, a state of another size
        return None
    return model, x


@pytest.mark.sampled(12)
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_claimed_holds_along_every_axis(name: str, order: tuple[int, int], axes: tuple[int, ...]) -> None:
    if (network := made(name, order, axes)) is not None:
        graph = tus.discover_symmetries(*network)
        tus.verify_symmetries(graph, *network, on_failure="raise")


def test_every_operator_takes_several_orders() -> None:
    for name in OPERATORS:
        for order in ORDERS:
            assert sum(made(name, order, axes) is not None for axes in AXES) >= 2, (name, order)


@pytest.mark.parametrize(
    ("name", "axes", "expected"),
    [
        ("softmax 2", (0, 1, 2), [(3, 4), 3]),  # three rows of four
        ("softmax 1", (0, 1, 2), [(4, 3), 4]),  # four columns of three
        ("softmax 2", (0, 2, 1), [(4, 3), 4]),
        ("layer_norm", (0, 1, 2), [3, 4]),  # each row has the same four weights
        ("layer_norm, no weights", (0, 1, 2), [(3, 4), 3]),
        ("linear", (0, 1, 2), [3, 4]),  # each row is summed with the same four weights
        ("bmm with a weight", (1, 0, 2), [(3, 4), 3]),  # each row with weights of its own
        ("bmm with a view", (1, 0, 2), [(3, 4), 3]),
        ("shifts", (0, 1, 2), [(3, 4), 3]),
        ("shifts, in a view", (0, 1, 2), [(3, 4), 3]),
        ("einsum in blocks", (0, 1, 2), [(3, 4), 3]),
    ],
)
def test_groups_counted_by_hand(name: str, axes: tuple[int, int, int], expected: list[Any]) -> None:
    graph = tus.discover_symmetries(Net(name, (3, 4), axes).eval(), torch.randn(SAMPLES, 5))
    groups = [g.shape for g in graph.permutations if any(m.parameter.startswith("a.") for m in g.members)]
    assert sorted(groups) == sorted((n,) if isinstance(n, int) else n for n in expected)
