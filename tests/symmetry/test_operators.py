"""A table of small networks, one for each operator and use, with the groups that they have, counted by hand.

Each is discovered, verified, and checked once more by an oracle that knows of the library nothing but the action: on
other random weights in float64, every group acts alone, and outputs are compared entry by entry, integers exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
from oracle import judge
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Net, refused_by_torch

import tu_symmetry as tus


@dataclass(frozen=True)
class Row:
    name: str
    build: Callable[[], Net]
    inputs: tuple[tuple[int, ...], ...]
    permutations: list[tuple[int, ...]]
    scales: int
    normalizations: int


ROWS: list[Row] = []
layers: dict[str, Any] = {"a": (5, 8), "b": (8, 8), "c": (8, 3)}
IMAGE = ((2, 2, 8, 8),)


def row(
    name: str,
    forward: Callable[..., Any],
    permutations: Iterable[Any],
    scales: int,
    normalizations: int = 0,
    inputs: tuple[tuple[int, ...], ...] = ((3, 5),),
    **parts: Any,
) -> None:
    """Add a row; beside other parts there are layers a: 5 -> 8, b: 8 -> 8 and c: 8 -> 3."""
    shapes = [(p,) if isinstance(p, int) else tuple(p) for p in permutations]

    def build() -> Net:
        torch.manual_seed(0)
        given = {k: p for k, p in (layers | parts).items() if p is not None}
        made = {k: p() if callable(p) and not isinstance(p, nn.Module) else p for k, p in given.items()}
        return Net(forward, **made)

    ROWS.append(Row(name, build, inputs, shapes, scales, normalizations))


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape))


def like(value: Tensor, x: Tensor) -> Tensor:
    return value.to(x.dtype)


relu = torch.relu

# -- integers that depend on the order of units ---------------------------------------------------------------------

row("classes: smallest and where", lambda m, x: m.c(relu(m.a(x))).min(-1), [8], 8)
row("classes: smallest alone", lambda m, x: m.c(relu(m.a(x))).min(-1).values, [8, 3], 8, 0)
for name in ("max", "min", "median", "nanmedian", "mode"):
    row(f"{name}: both", lambda m, x, n=name: getattr(m.a(x), n)(-1), [], 0)
    row(f"{name}: values", lambda m, x, n=name: getattr(m.a(x), n)(-1)[0], [8], 0, b=None, c=None)
row("kthvalue: values", lambda m, x: m.c(relu(m.a(x))) + m.a(x).kthvalue(2, -1)[0][:, None], [8], 0)
row("sort: values", lambda m, x: m.c(relu(m.a(x)).sort(-1).values), [8], 1)
row("sort along the batch", lambda m, x: m.c(relu(m.a(x)).sort(0).values), [8], 8)
row("sort along the batch: where", lambda m, x: m.c(like(relu(m.a(x)).sort(0)[1], x)), [8], 0, 8)
row("topk: values", lambda m, x: m.c(relu(m.a(x)).topk(4).values), [8], 1, c=(4, 3))
row("topk: where", lambda m, x: m.a(x).topk(4)[1], [], 0, 1)
row("argmax over units", lambda m, x: m.a(x).argmax(-1), [], 0, 1)
row("argmax over all", lambda m, x: m.a(x).argmax(), [], 0)
row("argmax over the batch, summed", lambda m, x: m.c(relu(m.a(x))) + like(m.a(x).argmax(0), x).mean(), [8], 8)
row("nonzero", lambda m, x: (m.a(x) > 0).nonzero(), [], 0, 8)
row("cummax along units", lambda m, x: m.a(x).cummax(-1), [], 0)

# -- integers that name units, and are read by what moves along -----------------------------------------------------

row("one-hot of an argmax", lambda m, x: m.c(like(F.one_hot(m.a(x).argmax(-1), 8), x)), [8], 0, 1)
row("one-hot, where zeros tie", lambda m, x: m.c(like(F.one_hot(relu(m.a(x)).argmax(-1), 8), x)), [], 0, 1)
row("one-hot of more classes", lambda m, x: m.c(like(F.one_hot(m.a(x).argmax(-1), 9), x)), [], 0, 1, c=(9, 3))
row("vector quantization", lambda m, x: m.c(m.codes[torch.cdist(m.a(x), m.codes).argmin(-1)]), [8, 6], 1,
    codes=weight(6, 8))  # fmt: skip
row("gather in order", lambda m, x: m.c(m.a(x).gather(-1, m.a(x).argsort(-1))), [8], 1)
row("gather along the batch", lambda m, x: m.c(relu(m.a(x)).gather(0, relu(m.a(x)).argsort(0))), [8], 8)
row("gather from others", lambda m, x: m.c(relu(m.b(relu(m.a(x)))).gather(-1, m.a(x).argsort(-1))), [8], 2)


# six maps in one weight: a permutation may differ along one more axis of a weight, a factor along all of them
row("maps along two axes",
    lambda m, x: torch.einsum("abno,aboz->abnz", relu(torch.einsum("abni,abio->abno", x, m.first)), m.second),
    [7, 7, 7], 42, 0, ((2, 3, 4, 5),), first=weight(2, 3, 5, 7), second=weight(2, 3, 7, 4))  # fmt: skip

# -- what positive factors do not pass, and what none of them changes -----------------------------------------------

row("cut to integers", lambda m, x: m.c(like(m.a(x).long(), x)), [8], 0)
row("a norm that counts", lambda m, x: m.c(relu(m.a(x))) + torch.linalg.vector_norm(relu(m.a(x)), ord=0), [8], 8)
row("count_nonzero", lambda m, x: relu(m.a(x)).count_nonzero(-1), [8], 0, 8)
row("compared with zero", lambda m, x: m.c(like(m.a(x) > 0, x)), [8], 0, 8)
row("compared with a number", lambda m, x: m.c(like(m.a(x) > 0.1, x)), [8], 0)
row("positions of a maximum in an image",
    lambda m, x: m.c(like(F.max_pool2d(relu(m.a(x)), 2, return_indices=True)[1], x)), [4], 0, 4, IMAGE,
    a=nn.Conv2d(2, 4, 3), c=nn.Conv2d(4, 3, 1))  # fmt: skip
row("max_unpool2d", lambda m, x: m.c(F.max_unpool2d(*F.max_pool2d(relu(m.a(x)), 2, return_indices=True), 2)), [4], 4,
    0, IMAGE, a=nn.Conv2d(2, 4, 3), c=nn.Conv2d(4, 3, 1))  # fmt: skip

# -- epsilons that are written as literals, and those of functions --------------------------------------------------


def hidden(m: Any, x: Tensor) -> Tensor:
    return relu(m.a(x))


row("by a deviation", lambda m, x: m.c(hidden(m, x) / (hidden(m, x).std(-1, keepdim=True) + 1e-5)), [8], 0, 1)
row("by a norm", lambda m, x: m.c(hidden(m, x) / (hidden(m, x).norm(dim=-1, keepdim=True) + 1e-4)), [8], 0, 1)
row("by a clamped norm", lambda m, x: m.c(hidden(m, x) / hidden(m, x).norm(dim=-1)[:, None].clamp(min=1e-6)), [8], 0, 1)
row("by more than an epsilon", lambda m, x: m.c(hidden(m, x) / (hidden(m, x).std(-1)[:, None] + 0.1)), [8], 0)
row("standardized", lambda m, x: m.c((m.a(x) - m.a(x).mean(1, True)) / (m.a(x).var(1, keepdim=True) + 1e-5).sqrt()),
    [8], 0, 1)  # fmt: skip
row("units that are clamped", lambda m, x: m.c(hidden(m, x).clamp(min=1e-6)), [8], 0)
row("logarithm of clamped units", lambda m, x: m.c(hidden(m, x).clamp(min=1e-6).log()), [8], 0)
row("an epsilon on units", lambda m, x: m.c(hidden(m, x) + 1e-4), [8], 0)
row("normalize", lambda m, x: m.c(F.normalize(hidden(m, x), dim=-1)), [8], 0, 1)
row("layer_norm", lambda m, x: m.c(F.layer_norm(hidden(m, x), (8,))), [8], 0, 1)
row("rms_norm", lambda m, x: m.c(F.rms_norm(hidden(m, x), (8,), eps=1e-3)), [8], 0, 1)
row("cosine_similarity", lambda m, x: F.cosine_similarity(hidden(m, x), relu(m.b(x)), dim=-1), [8], 0, 2, b=(5, 8))

# -- complex parameters, masks and integers of the state dict -------------------------------------------------------

mask = torch.tensor([True, False, True, True, False, True, True, False])
order = torch.tensor([4, 0, 7, 3, 2, 5, 1, 6])


def gain() -> nn.Parameter:
    return nn.Parameter(torch.randn(8, dtype=torch.complex64))


row("a complex gain", lambda m, x: m.c((hidden(m, x) * m.g).abs()), [8], 16, g=gain)
row("times a mask", lambda m, x: m.c(hidden(m, x) * m.g), [8], 8, g=mask)
row("filled where a mask is", lambda m, x: m.c(hidden(m, x).masked_fill(m.g, 0.0)), [8], 8, g=mask)
row("times integers", lambda m, x: m.c(hidden(m, x) * m.g), [8], 8, g=torch.arange(1, 9))
row("pruned weights", lambda m, x: m.c(relu(F.linear(x, m.a.weight * m.g, m.a.bias))), [8], 8,
    g=(torch.arange(40) % 3 > 0).reshape(8, 5))  # fmt: skip
row("a table of zeros and ones", lambda m, x: m.c(hidden(m, x) @ like(m.g, x)), [8, 8], 1, g=torch.eye(8).long())
row("in another order", lambda m, x: m.c(hidden(m, x)[:, m.g]), [8], 8, g=order)
row("some of the units", lambda m, x: m.c(hidden(m, x)[:, m.g]), [], 1, 0, c=(4, 3), g=order[:4])
row("gains by kind", lambda m, x: m.c(hidden(m, x) * m.e(m.g)[:, 0]), [2, 3, 3], 9, e=nn.Embedding(3, 1),
    g=torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]))  # fmt: skip

# -- message passing on graphs: nodes are fixed, features are not ---------------------------------------------------

NODES = ((4, 5),)
EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
MEMBERSHIP = torch.tensor([0, 0, 1, 1])


def sampled(m: Any, x: Tensor, reduce: str) -> Tensor:
    """SAGE: the neighbors' mean or maximum beside the node itself."""
    h = hidden(m, x)
    index = EDGES[1][:, None].expand(-1, 8)
    met = torch.zeros_like(h).scatter_reduce(0, index, h[EDGES[0]], reduce, include_self=False)
    return m.c(relu(m.b(met) + m.d(h)))


row("SAGE, mean", lambda m, x: sampled(m, x, "mean"), [8, 8], 16, 0, NODES, d=(8, 8))
row("SAGE, maximum", lambda m, x: sampled(m, x, "amax"), [8, 8], 16, 0, NODES, d=(8, 8))
row("pooled by index_put",
    lambda m, x: m.c(torch.zeros(2, 8).to(x).index_put((MEMBERSHIP,), hidden(m, x), accumulate=True)), [8], 8, 0,
    NODES)  # fmt: skip

# -- joining and reordering -----------------------------------------------------------------------------------------

two = {"a": (5, 8), "b": (5, 4), "c": (12, 3)}


def both(m: Any, x: Tensor) -> list[Tensor]:
    return [relu(m.a(x)), relu(m.b(x))]


row("vstack", lambda m, x: m.c(torch.vstack([hidden(m, x), relu(m.a(x + 1))])), [8], 8)
row("kron", lambda m, x: m.c(torch.kron(relu(m.a(x[0])), relu(m.b(x[0])))), [4, 2], 6, a=(5, 4), b=(5, 2))
row("rot90, a quarter", lambda m, x: m.c(torch.rot90(hidden(m, x), 1, (0, 1))), [], 0, c=(3, 3))
row("flipped and as it is", lambda m, x: m.c(hidden(m, x).flip(-1) + hidden(m, x)), [4], 4)
row("beside a constant for each sample", lambda m, x: m.c(torch.cat([hidden(m, x), x.new_ones(len(x), 4)], 1)),
    [8, 4], 8, c=(12, 3))  # fmt: skip
row("stacked with a constant for each sample",
    lambda m, x: m.c(torch.stack([hidden(m, x), x.new_ones(len(x), 8)], 1).flatten(1)), [8], 8,
    c=(16, 3))  # fmt: skip
row("behind nothing, and beside a constant for each sample",
    lambda m, x: m.c(torch.cat([x.new_empty(0), hidden(m, x), x.new_ones(len(x), 4)], -1)), [8, 4], 8,
    c=(12, 3))  # fmt: skip
row("rolled", lambda m, x: m.c(hidden(m, x).roll(1, -1)), [8], 8)
row("complex parts", lambda m, x: m.c(torch.complex(m.a(x), m.b(x)).abs()), [8], 8, b=(5, 8))
row("polar", lambda m, x: m.c(torch.polar(hidden(m, x), m.b(x)).real), [8], 8, b=(5, 8))
row("viewed as complex", lambda m, x: m.c(torch.view_as_complex(m.a(x).view(-1, 8, 2)).abs()), [8], 8, a=(5, 16))
row("viewed as real", lambda m, x: m.c(torch.view_as_real(torch.complex(m.a(x), m.b(x))).flatten(1)), [8], 8,
    b=(5, 8), c=(16, 3))  # fmt: skip
row("mapped over the batch", lambda m, x: torch.vmap(lambda r: m.c(relu(m.a(r))))(x), [8], 8)

# diagonals, traces, and a convolution of which the channels are tokens
row("diagonal of products",
    lambda m, x: m.c((hidden(m, x)[:, :, None] * m.b(x)[:, None].tanh()).diagonal(0, 1, 2)), [8], 8,
    b=(5, 8))  # fmt: skip
row("trace", lambda m, x: m.c(hidden(m, x)) + torch.trace(hidden(m, x).T @ hidden(m, x)), [8], 0)


def over_tokens(m: Any, x: Tensor) -> Tensor:
    """gMLP: the channels of the convolution are tokens, its positions hidden units."""
    u, v = m.a(x).chunk(2, -1)
    return m.c(u * m.v(v))


row("convolution over tokens", over_tokens, [4], 4, 0, ((2, 3, 5),), v=nn.Conv1d(3, 3, 1), c=(4, 3))

# -- writes in place ------------------------------------------------------------------------------------------------


def written(
    name: str,
    write: Callable[[Any, Tensor, Tensor], Any],
    permutations: list[int],
    scales: int,
    dead: int = 0,
    **more: Any,
) -> None:
    """A row whose units are written to before they are read; ``write`` returns what is read, or None for the units.

    Units that are overwritten with zeros scale as before, others are ``dead``: nothing reads them.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        h = hidden(m, x)
        result = write(m, x, h)
        return m.c(h if result is None else result)

    row("written: " + name, forward, permutations, scales, dead, **more)


def assign(key: Any, value: Any) -> Callable[[Any, Tensor, Tensor], None]:
    return lambda m, x, h: h.__setitem__(key, value(x) if callable(value) else value)


def into(m: Any, x: Tensor, h: Tensor) -> Tensor:
    out = torch.zeros(3, 16).to(x)
    out[:, ::2], out[:, 1::2] = h, -h
    return out


def void(_: Any) -> None:
    """The result of a write is the units themselves."""


every = slice(None)
written("one unit", assign((every, 0), 1.0), [7], 7, 1)
written("every other unit", assign((every, slice(None, None, 2)), 0.0), [4, 4], 8)
written("a slice, by inputs", assign((every, slice(1, 3)), lambda x: x[:, :2]), [6, 2], 6, 2)
written("units at an index", assign((every, [0, 2]), lambda x: x[:, :2]), [6, 2], 6, 2)
written("a row", assign(0, 0.0), [8], 8)
written("a row that is not zero", assign(0, 1.0), [8], 0)
written("where they are large", lambda m, x, h: h.__setitem__(h > 1, 1.0), [8], 0)
written("where they are large, by index_put", lambda m, x, h: h.index_put((h > 1,), torch.ones(())), [8], 0)
written("zero where a row is marked", lambda m, x, h: h.index_put((x[:, 0] > 0,), torch.zeros(())), [8], 8)
written("a row, by a tensor", lambda m, x, h: void(h[0].fill_(torch.zeros(()))), [8], 8)
written("a row that is not zero, by a tensor", lambda m, x, h: void(h[0].fill_(torch.ones(()))), [8], 0)
written("one half", lambda m, x, h: void(h.chunk(2, -1)[0].zero_()), [4, 4], 8)
written("a part, doubled", lambda m, x, h: void(h.split([3, 5], -1)[0].mul_(2)), [3, 5], 8)
written("one of all", lambda m, x, h: void(h.unbind(1)[2].zero_()), [7], 8)
written("a part of a part", lambda m, x, h: void(h[:, 2:6][:, 1:3].fill_(0.5)), [2, 2, 4], 6, 2)
written("by addition", lambda m, x, h: void(h[:, :5].add_(x)), [3], 3)
written("into zeros", into, [8], 8, c=(16, 3))

# -- functions of matrices ------------------------------------------------------------------------------------------


square = {**layers, "w": weight(8, 8)}
TOKENS = ((2, 4, 5),)

row("solve", lambda m, x: m.c(torch.linalg.solve(m.w, hidden(m, x), left=False)), [8, 8], 0, 16, **square)
row("solve for a vector", lambda m, x: m.c(torch.linalg.solve(m.w, hidden(m, x)[0])), [8, 8], 0, 16, **square)
row("inverse", lambda m, x: m.c(hidden(m, x) @ torch.linalg.inv(m.w)), [8, 8], 0, 16, **square)
row("logarithm alone", lambda m, x: m.c(hidden(m, x)) + torch.linalg.slogdet(m.w)[1], [8, 8, 8], 8, **square)
row("determinant", lambda m, x: m.c(hidden(m, x)) * torch.linalg.det(m.w), [8, 8], 8, **square)
row("matrix exponential", lambda m, x: m.c(hidden(m, x) @ torch.matrix_exp(m.w)), [8], 1, **square)
row("triangle of a weight", lambda m, x: m.c(m.a(x) @ m.w.tril()), [], 16, **square)
row("triangle of tokens", lambda m, x: m.c((m.a(x) @ m.a(x).mT).triu() @ hidden(m, x)), [8], 0, 0, TOKENS)
for name, norm in {
    "linalg.norm": lambda h: torch.linalg.norm(h, dim=-1, keepdim=True),
    "spectral norm": lambda h: torch.linalg.matrix_norm(h, 2),
    "sums of columns": lambda h: torch.linalg.norm(h, 1),
}.items():
    row(f"by a {name}", lambda m, x, norm=norm: m.c(hidden(m, x) / norm(hidden(m, x))), [8], 0, 1)
# rows of a matrix that are permuted in one of its columns alone leave its Frobenius norm, not its nuclear norm
row("nuclear norm of heads",
    lambda m, x: m.c(hidden(m, x) / torch.linalg.norm(hidden(m, x).view(-1, 4, 2), "nuc", (1, 2))[:, None]),
    [(4,), (2,)], 0, 1)  # fmt: skip


# -- what else entries meet -----------------------------------------------------------------------------------------

LENGTHS = torch.tensor([1, 2])


def in_groups(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    found, *statistics = torch.native_group_norm(hidden(m, x), m.w, m.b, 3, 8, 1, 2, 1e-5)
    return m.c(found), *statistics


row("fftshift", lambda m, x: m.c(torch.fft.fftshift(hidden(m, x), -1)), [8], 8)
row("renorm", lambda m, x: m.c(torch.renorm(hidden(m, x), 2, 1, 1.0)), [8], 0)
row("segment_reduce", lambda m, x: m.c(torch.segment_reduce(hidden(m, x), "sum", lengths=LENGTHS)), [8], 8)
row("fake quantization", lambda m, x: m.c(torch.fake_quantize_per_tensor_affine(hidden(m, x), 0.1, 0, -9, 9)), [8], 0)
row("channel_shuffle", lambda m, x: m.c(m.s(relu(m.a(x)))), [(2,), (2, 4)], 8, 0, IMAGE, a=nn.Conv2d(2, 8, 3),
    c=nn.Conv2d(8, 3, 1), s=nn.ChannelShuffle(2))  # fmt: skip
row("LSTM with projections", lambda m, x: m.c(m.r(hidden(m, x))[0]), [8, 6, 4], 8, 0, ((3, 4, 5),),
    r=lambda: nn.LSTM(8, 6, proj_size=4), c=(4, 3))  # fmt: skip
row("native_group_norm: its statistics", in_groups, [], 8, 0, w=weight(8), b=weight(8))
row("histc", lambda m, x: m.c(hidden(m, x)).mean() + torch.histc(m.a(x), 4, -1, 1), [8, 3], 0)


for dim, normalizations in ((None, 1), (0, 8), (1, 5)):
    row(f"weight_norm along {dim}", lambda m, x: m.c(relu(m.w(x))), [8], 8 if dim == 0 else 1, normalizations,
        w=lambda dim=dim: nn.utils.parametrizations.weight_norm(nn.Linear(5, 8), dim=dim))  # fmt: skip
row("dropout, then argmax", lambda m, x: m.c(like(F.one_hot(m.d(m.a(x)).argmax(-1), 8), x)), [], 0, 1,
    d=nn.Dropout(0.5))  # what training drops is equal  # fmt: skip

# -- experts, tokens and kernels that hold units --------------------------------------------------------------------


def one_by_one(m: Any, x: Tensor) -> Tensor:
    """Experts in a loop over their weights."""
    gates = m.router(x).softmax(-1).unbind(-1)
    return sum(g[:, None] * (relu(x @ up + b) @ down) for up, b, down, g in zip(m.up, m.b, m.down, gates, strict=True))


row("experts in a loop", one_by_one, [8, 8, 8], 24, 0, router=(5, 3), up=weight(3, 5, 8), b=weight(3, 8),
    down=weight(3, 8, 2))  # fmt: skip
row("experts in a loop, one output", lambda m, x: sum(m.c(relu(x @ w)) for w in m.w), [8], 8, w=weight(3, 5, 8))


def by_number(m: Any, x: Tensor) -> Tensor:
    """Experts whose weights are selected by a number."""
    gates = m.router(x).softmax(-1)
    return sum(gates[:, k, None] * (relu(x @ m.up[k] + m.b[k]) @ m.down[k]) for k in range(3))


row("experts by number", by_number, [8, 8, 8], 24, 0, router=(5, 3), up=weight(3, 5, 8), b=weight(3, 8),
    down=weight(3, 8, 2))  # fmt: skip
row("experts by number, one of them twice", lambda m, x: m.c(relu(x @ m.w[0]) + relu(x @ m.w[1]) * relu(x @ m.w[-2])),
    [8], 8, w=weight(2, 5, 8))  # fmt: skip
row("one of several tables", lambda m, x: m.c(relu(m.a(x) + m.t.unbind(0)[1])), [8], 8, t=weight(3, 8))


if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # Hugging Face's, where it is not installed

    @torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
    def grouped_mm_fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        starts = [0, *offs.tolist()[:-1]]
        return torch.cat([input[a:b] @ w for a, b, w in zip(starts, offs.tolist(), weight, strict=True)])

    grouped_mm_fallback.register_fake(lambda input, weight, offs: input.new_empty(len(input), weight.shape[2]))


def dealt_out(m: Any, x: Tensor) -> Tensor:
    """Mixtral: tokens in the order of their experts, which are counted by a histogram."""
    values, chosen = m.router(x).topk(2, -1)
    experts, order = chosen.reshape(-1).sort()
    offsets = torch.histc(experts.float(), bins=3, min=0, max=2).cumsum(0, dtype=torch.int32)
    deal = torch.ops.transformers.grouped_mm_fallback
    gate, up = deal(m.a(x)[order // 2], m.up.mT, offsets).chunk(2, -1)
    down = deal(F.silu(gate) * up, m.down.mT, offsets) * values.reshape(-1)[order, None]
    return m.c(torch.zeros(*x.shape[:-1], 4).to(x).index_add(0, order // 2, down))


row("experts by offsets", dealt_out, [8, 3, (3, 6), 4], 31, 0, ((9, 5),), router=(5, 3), up=weight(3, 12, 8),
    down=weight(3, 4, 6), c=(4, 3))  # fmt: skip


def words(m: Any, x: Tensor) -> Tensor:
    """TextCNN: kernels as wide as the embedding."""
    images = (x @ m.e).unsqueeze(1)
    return m.c(torch.cat([relu(conv(images)).squeeze(3).amax(-1) for conv in (m.v, m.u)], 1))


row("TextCNN", words, [6, 4, 8], 18, 0, ((2, 7, 5),), e=weight(5, 6), c=(12, 3),
    v=nn.Conv2d(1, 8, (3, 6), padding=(1, 0)), u=nn.Conv2d(1, 4, (2, 6)))  # fmt: skip
row("a kernel over padded units", lambda m, x: m.c(relu(m.v(hidden(m, x))).amax(2)), [4], 5, 0, ((2, 7, 5),),
    v=nn.Conv1d(7, 4, 8, padding=1), c=(4, 3))  # fmt: skip
row("one hidden unit", lambda m, x: m.c(relu(m.b(hidden(m, x)))), [8], 9, b=(8, 1), c=(1, 3))
row("one hidden channel", lambda m, x: m.c(relu(m.b(relu(m.a(x))))), [4], 5, 0, IMAGE, a=nn.Conv2d(2, 4, 3),
    b=nn.Conv2d(4, 1, 3), c=nn.Conv2d(1, 3, 1))  # fmt: skip
for option in ("add_zero_attn", "add_bias_kv", "bias"):
    row(f"attention with {option}", lambda m, x: m.a(x, x, x)[0], [(2,), (2, 4), (2, 4)], 16, 0, ((2, 3, 8),),
        a=lambda option=option: nn.MultiheadAttention(8, 2, batch_first=True, **{option: True}))  # fmt: skip


def heads(z: Tensor, units: int) -> Tensor:
    return z.unflatten(-1, (-1, units)).transpose(1, 2)


def turned(z: Tensor) -> Tensor:
    """Rotary positions: each half of the units meets an angle of its own."""
    angles = torch.arange(z.shape[2])[:, None] * torch.tensor([1.0, 0.1]).to(z)
    first, second = z.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def latent(m: Any, x: Tensor) -> Tensor:
    """DeepSeek's attention: heads of 3 query units of their own and 4 whose keys all heads share, 2 value units."""
    plain, rotary = heads(m.q(x), 7).split([3, 4], -1)
    key, value = heads(m.kv(x), 5).split([3, 2], -1)
    shared = m.turn(heads(m.k(x), 4)).expand_as(rotary)
    scores = torch.cat([plain, m.turn(rotary)], -1) @ torch.cat([key, shared], -1).mT
    return m.o((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


projections: dict[str, Any] = {"q": (5, 14), "kv": (5, 10), "k": (5, 4), "o": (4, 3)}
row("latent attention", latent, [(2,), (2, 3), (2, 2)], 12, 0, ((2, 6, 5),), **projections, turn=lambda: turned)


def sinks(m: Any, x: Tensor) -> Tensor:
    """gpt-oss: beside the positions each head may look at nothing; two heads share their keys and values."""
    query, key, value = heads(m.q(x), 4), *(heads(m.k(x), 4).repeat_interleave(2, 1), heads(m.v(x), 3))
    value = value.repeat_interleave(2, 1)
    nothing = m.s.reshape(1, -1, 1, 1).expand(len(x), -1, x.shape[1], -1)
    scores = torch.cat([query @ key.mT, nothing], -1)
    return m.o((scores.softmax(-1)[..., :-1] @ value).transpose(1, 2).flatten(2))


row("attention with sinks", sinks, [(2,), (2, 2), (2, 4), (2, 3)], 14, 0, ((2, 6, 5),), q=(5, 16), k=(5, 8), v=(5, 6),
    s=weight(4), o=(12, 3))  # fmt: skip


def state_space(m: Any, x: Tensor) -> Tensor:
    """Mamba 2: six heads of 4 channels, in two groups that share 3 states, and are normalized each for itself."""
    inner, write, read, gate = m.a(x).split([24, 6, 6, 6], -1)
    inner = inner.unflatten(-1, (6, 4)) * F.softplus(gate)[..., None]
    write, read = (z.unflatten(-1, (2, 3)).repeat_interleave(3, 2) for z in (write, read))
    states = torch.einsum("blhn,blhp->bhpn", write, inner)
    found = torch.einsum("blhn,bhpn->blhp", read, states).flatten(2).unflatten(-1, (2, 12))
    normed = found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + 1e-5)
    return m.c(m.w * normed.flatten(2))


row("a state space in groups", state_space, [(2,), (2, 3), (2, 3), (2, 3, 4)], 30, 4, ((2, 6, 5),), a=(5, 42),
    w=weight(24), c=(24, 3))  # fmt: skip


def test_a_complex_gain_is_moved_and_scaled_and_its_network_can_be_aligned() -> None:
    model = Net(lambda m, x: m.c((hidden(m, x) * m.g).abs()), **layers, g=gain())
    graph = tus.discover_symmetries(model, torch.randn(3, 5))
    assert {m.parameter for g in graph.permutations for m in g.members} == {"g", "a.weight", "a.bias", "c.weight"}
    state = model.state_dict()
    planted = {graph.permutations[0].name: torch.randperm(8, generator=torch.Generator().manual_seed(0))}
    found = tus.weight_matching(graph, state, tus.apply_permutation(graph, planted, state))
    assert all(torch.equal(p, tus.invert(planted)[n]) for n, p in found.permutation.items())


def test_indices_are_part_of_the_architecture_and_masks_are_not() -> None:
    model = Net(lambda m, x: m.c(hidden(m, x)[:, m.order] * m.mask), **layers, order=order, mask=mask)
    graph = tus.discover_symmetries(model, torch.randn(3, 5))
    assert set(graph.constants) == {"order"}
    assert {m.parameter for g in graph.permutations for m in g.members} == {"mask", "a.weight", "a.bias", "c.weight"}
    state = model.state_dict()
    permutation = tus.random_permutation(graph, generator=torch.Generator().manual_seed(0))
    tus.apply_permutation(graph, permutation, state | {"mask": ~mask})  # the mask moves, whatever it is
    with pytest.raises(tus.SymmetryError, match="reads its values"):
        tus.apply_permutation(graph, permutation, state | {"order": torch.arange(8)})


def test_fake_quantization_of_channels_is_verified_in_single_precision() -> None:  # which the oracle does not try
    step, zero = torch.rand(8) + 0.1, torch.zeros(8, dtype=torch.int32)
    model = Net(lambda m, x: m.c(torch.fake_quantize_per_channel_affine(m.a(x), m.s, m.z, 1, -9, 9)), **layers, s=step,
                z=zero)  # fmt: skip
    graph = tus.discover_symmetries(model, torch.randn(3, 5))
    assert {m.parameter for g in graph.groups() for m in g.members} == {"s", "z", "a.weight", "a.bias", "c.weight"}
    tus.verify_symmetries(graph, model, torch.randn(3, 5), on_failure="raise")


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_operators_have_the_groups_counted_by_hand(row: Row) -> None:
    model = row.build().eval()
    generator = torch.Generator().manual_seed(1)
    inputs = tuple(torch.randn(shape, generator=generator) for shape in row.inputs)
    try:
        graph = tus.discover_symmetries(model, inputs)
    except tus.SymmetryError as error:
        assert "cannot trace" in str(error) and refused_by_torch(model, inputs)
        return
    assert graph.unknown_operators == ()
    assert sorted(g.shape for g in graph.permutations) == sorted(row.permutations)
    assert sum(g.size for g in graph.scales) == row.scales
    assert sum(g.size for g in graph.normalizations) == row.normalizations
    tus.verify_symmetries(graph, model, inputs)
    loose = [g.name for g in (*graph.scales, *graph.normalizations) if not g.exact]  # epsilons may be literals
    assert not judge(graph.without(*loose), model, inputs).wrong


@pytest.mark.parametrize(
    "write",
    [
        lambda out, x: out[0, :, 1:].copy_(x[0, :, 1:]),
        lambda out, x: out.reshape(6, 64).chunk(2)[0].copy_(x[0].flatten(1)),
        lambda out, x: out.contiguous().to(out.dtype).unbind(0)[0].copy_(x[0]),
    ],
)
def test_a_recorded_network_that_writes_its_input_through_a_view_reads_it_in_order(
    write: Callable[[Tensor, Tensor], Any],
) -> None:
    """As detection models do, which lay images of different sizes into one tensor of zeros."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(2, 3, 8, 8)
        write(out, 2 * x if x.sum() > 0 else x)
        return m.c(relu(m.a(out)))

    model, x = Net(forward, a=nn.Conv2d(3, 4, 3), c=nn.Conv2d(4, 2, 1)), torch.randn(2, 3, 8, 8)
    graph = tus.discover_symmetries(model, x, branches="record")
    assert [g.shape for g in graph.permutations] == [(4,)]
    tus.verify_symmetries(graph, model, x, on_failure="raise")


@pytest.mark.slow
def test_a_detection_model_is_recorded() -> None:
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3
    ).eval()
    images = ([torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))],)
    try:  # newer releases of torch export it
        tus.discover_symmetries(model, images)
    except tus.SymmetryError as error:
        assert re.search(r"branches on the values of a tensor, at \w+\.py:\d+ in \w+: ", str(error))
    graph = tus.discover_symmetries(model, images, branches="record")
    assert graph.unknown_operators == () and len(graph.permutations) > 30
