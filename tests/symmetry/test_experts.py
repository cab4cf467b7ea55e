"""Experts in stacked weights: units of each, the experts themselves, and what must not be claimed of either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  registers its products of groups
from oracle import judge
from torch import Tensor, nn
from zoo import Net

import tu_symmetry as tus

X = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
WORDS = torch.tensor([[1, 2, 3, 4], [5, 3, 2, 1]])
Groups = list[tuple[int, ...]]
TOGETHER: Groups = [(3,), (3, 6)]  # three experts with six units in each
APART: Groups = [(6,), (6,), (6,)]
ALIKE: Groups = [(3,), (6,)]  # units that have to be in one order in all experts


def by_number(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """One expert for each row, whose weights are looked up."""
    up = torch.bmm(m.up[chosen], x[..., None]).squeeze(-1) + m.bias[chosen]
    return torch.bmm(m.down[chosen], F.silu(up)[..., None]).squeeze(-1)


def in_order(m: Any, x: Tensor, chosen: Tensor, inner: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Rows in the order of their experts."""
    experts, order = chosen.sort()
    ends = torch.histc(experts.float(), 3, 0, 2).cumsum(0, dtype=torch.int32)
    up = torch.ops.transformers.grouped_mm_fallback(x[order], m.up.mT, ends)
    up.add_(m.bias[experts])
    down = torch.ops.transformers.grouped_mm_fallback(inner(up), m.down.mT, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return down[back]


def first_in_order(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
    return in_order(m, x, chosen) + x[chosen.sort()[1]][:1].mean()


def beside_each_other(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
    rows = x[chosen.sort()[1]]
    return in_order(m, x, chosen) + (rows * rows.roll(1, 0)).mean()


def counted(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
    return in_order(m, x, chosen) + torch.histc(chosen.float(), 3, 0, 2).cumsum(0)[0]


def of_rows(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """Units of two experts are added."""
    up = F.silu(torch.bmm(m.up[chosen], x[..., None]).squeeze(-1) + m.bias[chosen])
    return F.linear(up + up.roll(1, 0), m.down[0])


def sorted_units(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
    return in_order(m, x, chosen, lambda up: up.sort(-1)[0])


def a_row(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """What one row was made with."""
    up = torch.bmm(m.up[chosen], x[..., None]).squeeze(-1)
    return F.linear(F.silu(up[:1] + m.bias[0]), m.down[0])


def routed(experts: Callable[..., Tensor], router: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    weights = {"up": nn.Parameter(torch.randn(3, 6, 5)), "bias": nn.Parameter(torch.randn(3, 6))}

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(experts(m, x, m.router(x).argmax(-1))))

    parts: dict[str, Any] = {"head": (5, 2), "down": nn.Parameter(torch.randn(3, 5, 6)), "router": router}
    return Net(forward, **weights, **parts), X


def of_words(stream: Callable[[Any, Tensor], Tensor], padding: int | None = None) -> tuple[nn.Module, Tensor]:
    """A router without bias, which reads a stream of words."""
    torch.manual_seed(0)
    table = nn.Embedding(7, 5, padding_idx=padding)
    weights = {"up": nn.Parameter(torch.randn(3, 6, 5)), "bias": nn.Parameter(torch.randn(3, 6))}

    def forward(m: Any, words: Tensor) -> Tensor:
        x = stream(m, words).flatten(0, 1)
        return m.head(torch.tanh(by_number(m, x, m.router(x).softmax(-1).argmax(-1))))

    parts: dict[str, Any] = {"head": (5, 2), "down": nn.Parameter(torch.randn(3, 5, 6)), "table": table}
    router, mix = nn.Linear(5, 3, bias=False), nn.Linear(5, 5, bias=False)
    return Net(forward, **weights, **parts, router=router, mix=mix), WORDS


def normalized(m: Any, words: Tensor) -> Tensor:
    x = m.table(words)
    x = x + m.mix(x.mean(1, keepdim=True).tanh())
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], Groups]] = {
    "weights looked up": (lambda: routed(by_number, nn.Linear(5, 3)), TOGETHER),
    "rows in order": (lambda: routed(in_order, nn.Linear(5, 3)), TOGETHER),
    "a router without bias": (lambda: routed(in_order, nn.Linear(5, 3, bias=False)), APART),  # blank rows are zero
    "the first row in order": (lambda: routed(first_in_order, nn.Linear(5, 3)), APART),
    "rows beside each other": (lambda: routed(beside_each_other, nn.Linear(5, 3)), APART),
    "counts of rows": (lambda: routed(counted, nn.Linear(5, 3)), APART),
    "rows that meet": (lambda: routed(of_rows, nn.Linear(5, 3)), ALIKE),
    "units in ascending order": (lambda: routed(sorted_units, nn.Linear(5, 3)), ALIKE),
    "a single row": (lambda: routed(a_row, nn.Linear(5, 3)), ALIKE),
    "words": (lambda: of_words(lambda m, words: m.table(words)), TOGETHER),
    "a stream of words": (lambda: of_words(normalized), TOGETHER),
    "padding": (lambda: of_words(normalized, padding=1), APART),
    "words that cancel": (lambda: of_words(lambda m, words: m.table(words) - m.table(words.flip(1))), APART),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_experts(name: str) -> None:
    make, expected = CASES[name]
    model, x = make()
    graph = tus.discover_symmetries(model.eval(), x)
    tus.verify_symmetries(graph, model, x, on_failure="raise")
    assert graph.unknown_operators == ()
    inside = [g.shape for g in graph.permutations if any(m.parameter in ("up", "down") for m in g.members)]
    assert sorted(s for s in inside if s != (5,)) == sorted(expected), graph
    assert not judge(graph, model, (x,)).wrong
