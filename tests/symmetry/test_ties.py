"""Ties between units and constants, and units on several axes: groups are counted by hand, and tried by the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import judge
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Net

import tu_symmetry as tus

relu = torch.relu
X = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
SEQUENCE = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(3))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Tie:
    name: str
    groups: list[Any]
    build: Callable[[], nn.Module]
    x: Tensor
    whole: bool = True  # whether these are all groups


TIES: list[Tie] = []


def tie(
    name: str, groups: Sequence[Any], forward: Callable[..., Any], x: Tensor = X, *, whole: bool = True, **parts: Any
) -> None:
    """A network; parts that are numbers are linear layers of five inputs, pairs linear layers."""
    made = {k: (5, p) if isinstance(p, int) else p for k, p in parts.items()}
    TIES.append(Tie(name, [(g,) if isinstance(g, int) else g for g in groups], lambda: Net(forward, **made), x, whole))


def claims(model: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    """The shapes of the groups of a module; fails if one of them changes an output."""
    model = model.eval()
    graph = tus.discover_symmetries(model, x)
    tus.verify_symmetries(graph, model, x, on_failure="raise")
    assert not judge(graph, model, (x,)).wrong
    return sorted(g.shape for g in graph.permutations)


# -- constants beside units ---------------------------------------------------------------------------------------


def written(h: Tensor, low: int, high: int) -> Tensor:
    whole = h.new_zeros(3, low + h.shape[1] + high)
    whole[:, low : low + h.shape[1]] = h
    return whole


BESIDE: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "pad": lambda h, low, high: F.pad(h, (low, high)),
    "pad_ones": lambda h, low, high: F.pad(h, (low, high), value=1.0),
    "cat_zeros": lambda h, low, high: torch.cat([h.new_zeros(3, low), h, h.new_zeros(3, high)], -1),
    "cat_full": lambda h, low, high: torch.cat([torch.full((3, low), 2.0).to(h), h, h.new_full((3, high), 2.0)], -1),
    "write": written,
}


def either(m: Any, one: Tensor, other: Tensor, swap: bool) -> Tensor:
    return m.c(relu(other + one if swap else one + other))


def constants(m: Any, x: Tensor, swap: bool) -> Tensor:
    """[1, 1, 2, 2, 2] + zeros_like(h), times [1, 2, 2, 3, 3]: units 3 and 4 have met the same."""
    first, second, h = torch.tensor([1, 1, 2, 2, 2]), torch.tensor([1, 2, 2, 3, 3]), relu(m.a(x))
    k = first + torch.zeros_like(h) if swap else torch.zeros_like(h) + first
    return m.c(h * (second * k if swap else k * second))


def slots(m: Any, x: Tensor, swap: bool) -> Tensor:
    """Two streams share their units; flattened, each unit stands in two slots, and zeros follow."""
    h = torch.stack([relu(m.a(x)), relu(m.b(x))], 1) + relu(m.d(x))[:, None]
    return either(m, torch.cat([h.flatten(1), x.new_zeros(3, 2)], -1), m.e(x), swap)


for swap in (False, True):
    for kind, (low, high) in itertools.product(BESIDE, ((1, 1), (0, 3), (2, 3))):
        tie(f"{kind} {low} {high} {swap}", [4, low + high],
            lambda m, x, k=kind, lo=low, hi=high, s=swap: either(m, BESIDE[k](relu(m.a(x)), lo, hi), m.b(x), s),
            a=4, b=4 + low + high, c=(4 + low + high, 3))  # fmt: skip
    tie(f"constants that differ tell apart what they meet {swap}", [2, 3, 4],
        lambda m, x, s=swap: either(m, torch.cat([x.new_zeros(3, 2), relu(m.a(x)), x.new_ones(3, 3)], -1), m.b(x), s),
        a=4, b=9, c=(9, 3))  # fmt: skip
    tie(f"constants that meet constants stay apart {swap}", [2], lambda m, x, s=swap: constants(m, x, s), a=5, c=(5, 3))
    tie(f"units in slots beside constants {swap}", [4], lambda m, x, s=swap: slots(m, x, s), whole=False, a=4, b=4, d=4,
        e=10, c=(10, 3))  # fmt: skip
# the mean, variance, factor and shift of a channel that is always zero move together
tie("statistics of zeros", [8, 2], lambda m, x: m.c(m.norm(torch.cat([relu(m.a(x)), x.new_zeros(3, 2)], 1))), a=8,
    norm=nn.BatchNorm1d(10), c=(10, 3))  # fmt: skip
# units 0 and 1 of ``a`` meet zeros, 2 to 7 the units 0 to 5 of ``b``, whose last two meet zeros
for one, other in (((0, 2), (2, 0)), ((2, 0), (0, 2))):
    tie(f"two paddings overlap {one}", [2, 2, 6],
        lambda m, x, i=one, j=other: m.c(relu(F.pad(m.a(x), i) + F.pad(m.b(x), j))), a=8, b=8, c=(10, 3))  # fmt: skip
# inputs beside units are no more alike for standing in two pieces
tie("two pieces", [8], lambda m, x: m.c(torch.cat([x[:, :2], relu(m.a(x)), x[:, 2:4]], -1)), a=8, c=(12, 3))
tie("single units", [8], lambda m, x: m.c(torch.cat([m.b(x), m.d(x), relu(m.a(x))], -1)), a=8, b=1, d=1, c=(10, 3))

# -- copies of a unit -----------------------------------------------------------------------------------------------


def rolled(m: Any, x: Tensor, shift: int) -> Tensor:
    """``h + g`` ties; in ``roll(cat([h, g]))`` each unit has a column for ``h`` and one for ``g``, in either order."""
    h, g = relu(m.a(x)), relu(m.b(x))
    return m.c(h + g) + m.out(relu(torch.roll(torch.cat([h, g], -1), shift, -1)))


def twice(m: Any, x: Tensor) -> Tensor:
    return torch.cat([relu(m.a(x))] * 2, -1)


for shift in (1, 3, 4, 5):
    tie(f"rolled by {shift}", [4], lambda m, x, s=shift: rolled(m, x, s), a=4, b=4, c=(4, 3), out=(8, 3))
tie("copies meet units", [4], lambda m, x: m.c(torch.roll(twice(m, x) + torch.cat([m.b(x), m.d(x)], -1), 1, -1)),
    a=4, b=4, d=4, c=(8, 3))  # fmt: skip
tie("copies meet a padding", [4], lambda m, x: m.c(torch.roll(twice(m, x) + F.pad(m.b(x), (0, 4)), 1, -1)), a=4, b=4,
    c=(8, 3))  # fmt: skip
for numbers, groups in (([1, 2, 2, 1], [2]), ([1, 1, 2, 2], [2]), ([1, 1, 2, 1], [])):
    tie(f"copies meet {numbers}", groups, lambda m, x, n=numbers: m.c(relu(twice(m, x) + torch.tensor(n))), a=2,
        c=(4, 3))  # fmt: skip

# -- units on several axes ------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "gram": (lambda h: h.transpose(1, 2) @ h, SEQUENCE),
    "outer": (lambda h: h[:, :, None] * h[:, None, :], X),
    "outer_sum": (lambda h: h.unsqueeze(2) + h.unsqueeze(1), X),
    "triple": (lambda h: h[:, :, None, None] * h[:, None, :, None] * h[:, None, None], X),
}
for kind, (pair, x) in PAIRS.items():
    for width in (2, 4):
        tie(f"{kind} of {width}", [width, 6], lambda m, x, p=pair: m.out(relu(m.c(p(relu(m.a(x))).flatten(1)))), x,
            a=width, c=(width ** (3 if kind == "triple" else 2), 6), out=(6, 3))  # fmt: skip
outer = PAIRS["outer"][0]
tie("a sum of pairs", [4], lambda m, x: m.c(relu(outer(relu(m.a(x))).flatten(1) + m.b(x))), a=4, b=16, c=(16, 3))


def of_heads(m: Any, x: Tensor) -> Tensor:
    h = relu(m.a(x)).view(2, 7, 2, 3)
    return m.c(torch.einsum("bthi,bthj->bhij", h, h).flatten(1))


tie("pairs in heads", [2, (2, 3)], of_heads, SEQUENCE, a=6, c=(18, 3))
for equation, shape in (("bi,ij,bj->bi", (4, 4)), ("bi,oij,bj->bo", (6, 4, 4)), ("bi,ij,bj->bj", (4, 4))):
    tie(f"a bilinear form {equation}", [4] if len(shape) == 2 else [4, 6],
        lambda m, x, e=equation: m.c(relu(torch.einsum(e, relu(m.a(x)), m.w, relu(m.a(x))))), a=4,
        w=nn.Parameter(torch.randn(shape)), c=(shape[0], 3))  # fmt: skip
# two matrices, of which each has rows and columns in an order of its own: P w P^T squared is P (w w) P^T
tie("a parameter that is read twice", [2, (2, 4)], lambda m, x: m.c(relu(torch.bmm(m.w, m.w)).flatten() + x.sum()),
    w=nn.Parameter(torch.randn(2, 4, 4)), c=(32, 3))  # fmt: skip


# -- channels of grouped convolutions ---------------------------------------------------------------------------------

for groups, multiplier, expected in (
    (2, 1, [4, 4, 4]),  # the channels of each group, and the sums of two outputs
    (4, 2, [2, (2, 2), (2, 2), (2, 4)]),  # the first two groups with the last two; inputs and outputs of each pair
    (8, 1, [4]),
    (8, 2, [4, (4, 2)]),
):
    for number, combine in enumerate(
        (lambda a, b: relu(a + b), lambda a, b: a * torch.sigmoid(b), lambda a, b: torch.maximum(b, a))
    ):
        tie(f"halves of {groups} groups, {multiplier}, {number}", expected,
            lambda m, x, f=combine: m.c(f(*m.g(relu(m.a(x))).chunk(2, 1)).mean((2, 3))), IMAGE, a=nn.Conv2d(3, 8, 3),
            g=nn.Conv2d(8, 8 * multiplier, 3, groups=groups), c=(4 * multiplier, 3))  # fmt: skip

# -- parameters without axes ------------------------------------------------------------------------------------------

SCALARS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rezero": lambda m, h: h + m.s * relu(m.b(h)),
    "added": lambda m, h: h + m.s + m.b(h),
    "product": lambda m, h: m.s * m.t * h + m.b(h),
    "expanded": lambda m, h: h * m.s.expand(4) + m.b(h),
}
for (kind, use), trained in itertools.product(SCALARS.items(), (True, False)):
    numbers = {n: nn.Parameter(torch.tensor(v)) if trained else torch.tensor(v) for n, v in (("s", 0.5), ("t", 0.7))}
    tie(f"a number, {kind}, {trained}", [4], lambda m, x, f=use: m.c(f(m, relu(m.a(x)))), a=4, b=(4, 4), c=(4, 3),
        **numbers)  # fmt: skip

# -- writes through views ---------------------------------------------------------------------------------------------


def written_in_blocks(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.view(3, 2, 4)[:, 0].relu_()
    return m.c(h)


def written_in_turn(m: Any, x: Tensor) -> Tensor:
    whole = x.new_zeros(3, 8)
    whole[:, ::2].copy_(relu(m.a(x)))
    whole[:, 1::2].sub_(relu(m.b(x)))
    return m.c(whole)


tie("written through a view", [4, 4], written_in_blocks, whole=False, a=8, c=(8, 3))
tie("parts written into an empty tensor", [4, 4], written_in_turn, a=4, b=4, c=(8, 3))


def seen_later(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    view = h.unsqueeze(-1)
    h.add_(m.b(x))
    return m.c(view.flatten(1))


def copied(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    copy = h.transpose(1, 2).reshape(2, -1)
    copy.relu_()
    return m.c(h).mean(1) + m.out(copy)


tie("views see what is written later", [8], seen_later, a=8, b=8, c=(8, 3))
tie("copies do not", [4], copied, SEQUENCE, a=4, c=(4, 3), out=(28, 3))

# -- what reaches no output -------------------------------------------------------------------------------------------

UNUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cumsum": lambda h, g: h.cumsum(-1),
    "sum": lambda h, g: h + g,
    "cat": lambda h, g: torch.cat([h, g], -1).sort(-1),
    "written copy": lambda h, g: h.clone().add_(g),
    "nothing": lambda h, g: None,
    "what is written": lambda h, g: h[:, :8].add_(g),
}


def two(m: Any, x: Tensor, use: Callable[[Tensor, Tensor], Any]) -> Tensor:
    h, g = relu(m.a(x)), relu(m.b(x))
    use(h, g)
    return m.c(h) + m.out(g)


def updated(m: Any, x: Tensor) -> Tensor:
    h = relu(m.a(x))
    m.mean.mul_(0.9).add_(0.1 * h.mean(0))
    return m.c(h - m.mean)


for kind, unused in UNUSED.items():
    tie(f"unused: {kind}", [8] if kind == "what is written" else [8, 8], lambda m, x, f=unused: two(m, x, f), a=8, b=8,
        c=(8, 3), out=(8, 3))  # fmt: skip
tie("kept in a buffer", [8], updated, a=8, mean=torch.zeros(8), c=(8, 3))

# -- constants with two axes ------------------------------------------------------------------------------------------

# the identity ties rows and columns: units of ``a`` are those of ``c``; a matrix of ones leaves them apart
SQUARES: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
    "W + I": (lambda w: w + torch.eye(4, dtype=w.dtype), [4]),
    "no diagonal": (lambda w: w * (1 - torch.eye(4, dtype=w.dtype)), [4]),
    "masked": (lambda w: w.masked_fill(torch.eye(4).bool(), 0.0), [4]),
    "I + J": (lambda w: w * (torch.eye(4, dtype=w.dtype) + 1), [4]),
    "diagonal": (lambda w: w + torch.diag(torch.tensor([1.0, 1, 2, 2], dtype=w.dtype)), [2, 2]),
    "all different": (lambda w: w + torch.arange(16, dtype=w.dtype).view(4, 4), []),
    "ones": (lambda w: w + torch.ones(4, 4, dtype=w.dtype), [4, 4]),
}
for kind, (change, groups) in SQUARES.items():
    tie(kind, groups, lambda m, x, f=change: m.c(relu(relu(m.a(x)) @ f(m.w))), a=4,
        w=nn.Parameter(torch.randn(4, 4)), c=(4, 3))  # fmt: skip
tie("a Gram matrix and the identity", [4],
    lambda m, x: m.c((PAIRS["gram"][0](relu(m.a(x))) - torch.eye(4, dtype=x.dtype)).flatten(1)), SEQUENCE, a=4,
    c=(16, 3))  # fmt: skip


@pytest.mark.parametrize("tied", TIES, ids=lambda t: t.name)
def test_groups_counted_by_hand(tied: Tie) -> None:
    torch.manual_seed(0)
    found = claims(tied.build(), tied.x)
    assert found == sorted(tied.groups) if tied.whole else not [g for g in tied.groups if g not in found]
