"""Every operator along every axis: units in blocks, laid along any of the axes, and what is claimed holds.

Two layers give ``[samples, 3, 4]``, or twelve channels of two by three pixels, laid out in many ways, so that units and
blocks stand where an operator expects samples, channels, positions or features. A rule that forgets an axis claims too
much here: a softmax over the blocks depends on all of them, and units in one block can no longer move on their own.
"""

from __future__ import annotations

import itertools
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
Part = Callable[..., "nn.Module | nn.Parameter"]
OPERATORS: dict[tuple[str, str], tuple[Forward, Part | None]] = {}
LAYOUTS: dict[str, dict[str, tuple[View, View]]] = {"vectors": {}, "images": {}}


def vector(name: str, forward: Forward, part: Part | None = None) -> None:
    """Add an operator on ``h`` and ``g``, which have one shape; ``part`` makes ``m.n`` for its sizes."""
    OPERATORS["vectors", name] = forward, part


def image(name: str, forward: Forward, part: Part | None = None) -> None:
    OPERATORS["images", name] = forward, part


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def two(n: int) -> int:
    """The smallest number above one of equal groups of n, or n."""
    return next(k for k in (2, 3, n) if n % k == 0)


# how ``[samples, 12]`` is laid out before the operator, and back
for order, axes in itertools.product(((3, 4), (4, 3)), itertools.permutations(range(3))):
    LAYOUTS["vectors"][f"{order} {axes}"] = (
        lambda z, order=order, axes=axes: z.view(-1, *order).permute(*axes),
        lambda y, axes=axes: y.permute(*(axes.index(k) for k in range(3))),
    )

# how ``[samples, 12, 2, 3]`` is laid out before the operator; the last two put samples second
for name, view in {
    "as it is": lambda z: z,
    "blocks as samples": lambda z: z.view(-1, 3, 4, 2, 3).flatten(0, 1),
    "units as samples": lambda z: z.view(-1, 3, 4, 2, 3).transpose(1, 2).flatten(0, 1),
    "rows as samples": lambda z: z.view(-1, 3, 4, 2, 3).permute(0, 3, 1, 2, 4).flatten(0, 1),
    "rows in channels": lambda z: z.view(-1, 3, 4, 2, 3).permute(0, 1, 3, 2, 4).flatten(1, 2),
    "blocks in rows": lambda z: z.view(-1, 3, 4, 2, 3).permute(0, 2, 3, 1, 4).flatten(1, 2),
    "b u p": lambda z: z.view(-1, 3, 4, 6),
    "u b p": lambda z: z.view(-1, 3, 4, 6).transpose(1, 2),
    "p b u": lambda z: z.view(-1, 3, 4, 6).permute(0, 3, 1, 2),
    "p u b": lambda z: z.view(-1, 3, 4, 6).permute(0, 3, 2, 1),
    "b p u": lambda z: z.view(-1, 3, 4, 6).permute(0, 1, 3, 2),
    "blocks first": lambda z: z.view(-1, 3, 4, 6).permute(1, 0, 2, 3),
    "units first": lambda z: z.view(-1, 3, 4, 6).permute(2, 0, 1, 3),
}.items():
    LAYOUTS["images"][name] = view, (lambda y: y.transpose(0, 1)) if "first" in name else (lambda y: y)

# normalizations
vector("layer_norm", lambda m, h, g: m.n(h), lambda a, b, c: nn.LayerNorm(c))
vector("layer_norm of two axes", lambda m, h, g: m.n(h), lambda a, b, c: nn.LayerNorm((b, c)))
vector("layer_norm, no weights", lambda m, h, g: F.layer_norm(h, h.shape[-1:]))
vector("rms_norm", lambda m, h, g: F.rms_norm(h, h.shape[-1:]))
vector("group_norm, one group", lambda m, h, g: m.n(h), lambda a, b, c: nn.GroupNorm(1, b))
vector("group_norm", lambda m, h, g: m.n(h), lambda a, b, c: nn.GroupNorm(math.gcd(2, b), b, affine=False))
vector("batch_norm", lambda m, h, g: m.n(h), lambda a, b, c: nn.BatchNorm1d(b))
vector("instance_norm", lambda m, h, g: m.n(h), lambda a, b, c: nn.InstanceNorm1d(b, affine=True))
vector("normalized", lambda m, h, g: F.normalize(h, dim=1))

# linear maps
vector("linear", lambda m, h, g: m.n(h), lambda a, b, c: nn.Linear(c, c))
vector("bilinear", lambda m, h, g: m.n(h.contiguous(), g.contiguous()), lambda a, b, c: nn.Bilinear(c, c, c))
vector("conv", lambda m, h, g: m.n(h), lambda a, b, c: nn.Conv1d(b, b, 3, padding=1))
vector("conv, pointwise", lambda m, h, g: m.n(h), lambda a, b, c: nn.Conv1d(b, b, 1))
vector("conv, depthwise", lambda m, h, g: m.n(h), lambda a, b, c: nn.Conv1d(b, b, 3, padding=1, groups=b))
vector("lstm", lambda m, h, g: m.n(h)[0], lambda a, b, c: nn.LSTM(c, c, batch_first=True))
vector("gru", lambda m, h, g: m.n(h)[0], lambda a, b, c: nn.GRU(c, c))
vector("gru, from a state", lambda m, h, g: m.n(h, g[:1].contiguous())[0], lambda a, b, c: nn.GRU(c, c))
vector("gru cell", lambda m, h, g: m.n(h.flatten(0, 1), g.flatten(0, 1)).view(h.shape),
       lambda a, b, c: nn.GRUCell(c, c))  # fmt: skip
vector("baddbmm", lambda m, h, g: torch.baddbmm(h, m.n, h), lambda a, b, c: weight(a, b, b))
vector("bmm with a weight", lambda m, h, g: torch.bmm(h, m.n), lambda a, b, c: weight(a, c, c))
vector("bmm with a view", lambda m, h, g: torch.bmm(h, m.n.transpose(1, 2)), lambda a, b, c: weight(a, c, c))
vector("einsum in blocks", lambda m, h, g: torch.einsum("abc,bcd->abd", h, m.n), lambda a, b, c: weight(b, c, c))
vector("einsum over both", lambda m, h, g: torch.einsum("abc,dbc->abd", h, m.n)[..., :1] * h,
       lambda a, b, c: weight(5, b, c))  # fmt: skip
vector("copies, one weight each",
       lambda m, h, g: torch.bmm(h.reshape(1, -1, h.shape[-1]).repeat(3, 1, 1), m.n).sum(0).view(h.shape),
       lambda a, b, c: weight(3, c, c))  # fmt: skip

# products and attention
vector("attention", lambda m, h, g: F.scaled_dot_product_attention(h, g, h))
vector("bmm", lambda m, h, g: torch.bmm(torch.bmm(h, g.transpose(1, 2)), h))
vector("distances", lambda m, h, g: torch.bmm(torch.cdist(h, g), h))

# entry by entry, and reductions
vector("sum", lambda m, h, g: h + g)
vector("gate, middle axis", lambda m, h, g: h * g.mean(1, keepdim=True))
vector("factors", lambda m, h, g: h * m.n, lambda a, b, c: weight(c))
vector("factors of rows", lambda m, h, g: h * m.n, lambda a, b, c: weight(b, 1))
vector("shifts", lambda m, h, g: torch.relu(h + m.n), lambda a, b, c: weight(b, c))
vector("shifts, in a view", lambda m, h, g: torch.relu(h + m.n.t()), lambda a, b, c: weight(c, b))
vector("lerp", lambda m, h, g: torch.lerp(h, g, m.n), lambda a, b, c: weight(b, c))
vector("prelu", lambda m, h, g: m.n(h), lambda a, b, c: nn.PReLU(b))
for dim in range(3):
    vector(f"softmax {dim}", lambda m, h, g, dim=dim: h.softmax(dim))
    vector(f"std {dim}", lambda m, h, g, dim=dim: h / (h.std(dim, keepdim=True) + 1))
vector("log-sum-exp", lambda m, h, g: h - h.logsumexp((1, 2), keepdim=True))

# positions
vector("argmax, last axis", lambda m, h, g: h * F.one_hot(h.argmax(-1), h.shape[-1]))
vector("argmax, middle axis", lambda m, h, g: h * F.one_hot(h.argmax(1), h.shape[1]).transpose(1, 2))
vector("sort, last axis", lambda m, h, g: h.sort(-1)[0])
vector("gather, last axis", lambda m, h, g: h.gather(-1, g.argsort(-1)))
vector("gather, middle axis", lambda m, h, g: h.gather(1, g.argsort(1)))
vector("scatter", lambda m, h, g: torch.zeros_like(h).scatter(-1, g.argsort(-1), h))
vector("cumsum", lambda m, h, g: h.cumsum(1))
vector("flip", lambda m, h, g: h + h.flip(1))
vector("first of the middle axis", lambda m, h, g: h * g[:, :1])
vector("pad", lambda m, h, g: F.pad(h, (1, 0))[..., :-1])
vector("max_pool", lambda m, h, g: F.max_pool1d(h, 3, 1, 1))
vector("interpolate", lambda m, h, g: F.interpolate(h, size=h.shape[-1], mode="linear"))
vector("fft", lambda m, h, g: torch.fft.fft(h, dim=1).real)
vector("tril", lambda m, h, g: h.tril())
vector("unfold", lambda m, h, g: h.unfold(1, 2, 1).sum(1).sum(-1)[:, None] * h)

# data movement
vector("glu, last axis", lambda m, h, g: F.glu(torch.cat([h, g], -1), -1))
vector("stacked", lambda m, h, g: torch.stack([h, g], -1).amax(-1))
vector("unbound", lambda m, h, g: torch.stack([torch.tanh(z) for z in h.unbind(1)], 1))
vector("unbound, told apart", lambda m, h, g: torch.stack([z * (k + 1) for k, z in enumerate(h.unbind(-1))], -1))
vector("interleaved", lambda m, h, g: h.repeat_interleave(2, 1)[:, ::2])
vector("shuffled", lambda m, h, g: h.reshape(h.shape[0], 2, -1).transpose(1, 2).reshape(h.shape))

# images
image("conv", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, 5, 3, padding=1))
image("conv, pointwise", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, 5, 1))
image("conv, depthwise", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, b, 3, padding=1, groups=b))
image("conv, grouped", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.Conv2d(b, b, 3, padding=1, groups=two(b)))
image("conv, transposed", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.ConvTranspose2d(b, 5, 2))
image("batch_norm", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.BatchNorm2d(b))
image("group_norm", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.GroupNorm(math.gcd(2, b), b))
image("instance_norm", lambda m, h, g: m.n(h), lambda a, b, c, d: nn.InstanceNorm2d(b))
image("softmax of positions", lambda m, h, g: h.flatten(2).softmax(-1).view(h.shape))
image("max_pool", lambda m, h, g: F.max_pool2d(h, 2, 1))
image("mean of positions", lambda m, h, g: h.mean((2, 3)))
image("mean of channels", lambda m, h, g: h.mean(1))
image("joined and summed samples", lambda m, h, g: torch.cat([h, g], 0).sum(0))
image("squeeze and excite", lambda m, h, g: h * m.n(h.mean((2, 3)))[:, :, None, None],
      lambda a, b, c, d: nn.Sequential(nn.Linear(b, 4), nn.ReLU(), nn.Linear(4, b), nn.Sigmoid()))  # fmt: skip
image("linear of channels", lambda m, h, g: m.n(h.permute(0, 2, 3, 1)), lambda a, b, c, d: nn.Linear(b, 5))
image(
    "attention of channels",
    lambda m, h, g: (F.normalize(h.flatten(2), dim=-1) @ g.flatten(2).transpose(1, 2)).softmax(-1) @ h.flatten(2),
)
image("pixel_shuffle", lambda m, h, g: F.pixel_shuffle(h, 2))
image("channel_shuffle", lambda m, h, g: F.channel_shuffle(h, two(h.shape[1])))
image("unfold", lambda m, h, g: F.unfold(h, 2))
image("interpolate", lambda m, h, g: F.interpolate(h, size=(3, 3), mode="bilinear"))
image("grid_sample", lambda m, h, g: F.grid_sample(h, torch.stack([g[:, 0], g[:, 1]], -1).tanh(), align_corners=False))
image("shifts of an image", lambda m, h, g: torch.relu(h + m.n), lambda a, b, c, d: weight(1, b, c, d))
image("weights of channels", lambda m, h, g: h @ m.n, lambda a, b, c, d: weight(b, d, 5))
image("sum over two axes", lambda m, h, g: torch.einsum("abcd,dce->abe", h, m.n), lambda a, b, c, d: weight(d, c, 5))
image("several maps", lambda m, h, g: torch.relu(torch.einsum("abcd,def->abcef", h, m.n)).amax(-1),
      lambda a, b, c, d: weight(d, 3, 4))  # fmt: skip
image("windows", lambda m, h, g: h.unfold(3, 2, 1).amax(-1))
image("local_response_norm", lambda m, h, g: F.local_response_norm(h, 2))


class Net(nn.Module):
    """A layer whose outputs are laid out, go through an operator, and are read by a linear layer."""

    def __init__(self, kind: str, name: str, layout: str) -> None:
        super().__init__()
        self.run, part = OPERATORS[kind, name]
        self.view, self.back = LAYOUTS[kind][layout]
        self.x = torch.randn((SAMPLES, 5) if kind == "vectors" else (SAMPLES, 2, 2, 3))
        self.a, self.b = (nn.Linear(5, 12) if kind == "vectors" else nn.Conv2d(2, 12, 1) for _ in range(2))
        if part is not None:
            self.n = part(*self.view(self.a(self.x)).shape)
        self.c = nn.Linear(self.read(self.x).shape[1], 2)

    def read(self, x: Tensor) -> Tensor:
        return self.back(self.run(self, self.view(self.a(x)), self.view(self.b(x)))).reshape(SAMPLES, -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.read(x))


def made(kind: str, name: str, layout: str) -> Net | None:
    """A network; none where the operator does not take these sizes."""
    torch.manual_seed(0)
    try:
        model = Net(kind, name, layout).eval()
        model(model.x)
    except (RuntimeError, ValueError):  # nothing to shuffle, a state of another size
        return None
    return model


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("kind", "name", "layout"), [(kind, name, layout) for kind, name in OPERATORS for layout in LAYOUTS[kind]]
)
def test_what_is_claimed_holds_along_every_axis(kind: str, name: str, layout: str) -> None:
    if (model := made(kind, name, layout)) is not None:
        graph = tus.discover_symmetries(model, model.x)
        tus.verify_symmetries(graph, model, model.x, on_failure="raise")


def test_most_operators_take_most_layouts() -> None:
    for (kind, name), _ in OPERATORS.items():
        assert sum(made(kind, name, layout) is not None for layout in LAYOUTS[kind]) > 2, name
    for layout in LAYOUTS["images"]:
        images = [name for kind, name in OPERATORS if kind == "images"]
        assert sum(made("images", name, layout) is not None for name in images) > 0.8 * len(images), layout


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
    model = made("vectors", name, f"{(3, 4)} {axes}")
    assert model is not None
    graph = tus.discover_symmetries(model, model.x)
    groups = [g.shape for g in graph.permutations if any(m.parameter.startswith("a.") for m in g.members)]
    assert sorted(groups) == sorted((n,) if isinstance(n, int) else n for n in expected)
