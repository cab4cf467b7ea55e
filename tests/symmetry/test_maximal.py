"""Brute force on small networks: which permutations of hidden units are symmetries, and which of them were claimed.

Networks by hand come with the axes that the units of each layer index in the parameters: every transposition of two
units of a layer, and every product of such in up to four layers, is tried out. In random chains two neighboring units
are swapped in every subset of all places where units could lie; those that leave the function unchanged, and hold no
smaller one that does, are what there is to find. What the graph claims must be among the symmetries, always; on these
networks it must be all of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from random_modules import Module, Node
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Net

import tu_symmetry as tus
from tu_symmetry.symmetry.action import permute_tensors

relu = torch.relu

State = dict[str, Tensor]
Place = tuple[str, int, int, int]  # parameter, axis, start, step


@dataclass(frozen=True)
class Layer:
    """``width`` units; unit k lies at ``start + k * step`` along an axis, for each (parameter, axis, start, step)."""

    width: int
    places: tuple[Place, ...]

    def exchange(self, i: int, j: int, state: State) -> State:
        """The state with two units exchanged."""
        state = dict(state)
        for name, axis, start, step in self.places:
            order = torch.arange(state[name].shape[axis])
            order[[start + i * step, start + j * step]] = order[[start + j * step, start + i * step]]
            state[name] = state[name].index_select(axis, order)
        return state


def rows(width: int, name: str, *columns: str, start: int = 0) -> Layer:
    """The output units of a linear layer: its rows, its bias, and the columns of others (``"c+4"``: from column 4)."""
    places = [(f"{name}.weight", 0, start, 1), (f"{name}.bias", 0, start, 1)]
    for column in columns:
        other, _, offset = column.partition("+")
        places.append((f"{other}.weight", 1, int(offset or 0), 1))
    return Layer(width, tuple(places))


NETWORKS: dict[str, tuple[Callable[[], Net], list[Layer], tuple[int, ...]]] = {}


def network(
    name: str, layers: list[Layer], forward: Callable[..., Any], inputs: tuple[int, ...] = (40, 5), **parts: Any
) -> None:
    """Add a network with all layers whose units could change places; pairs are linear layers."""
    NETWORKS[name] = lambda: Net(forward, **parts), layers, inputs


def columns(width: int, name: str, axis: int = 1) -> Layer:
    return Layer(width, ((name, axis, 0, 1),))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def residual(m: Any, x: Tensor) -> Tensor:
    h = relu(m.a(x))
    return m.c(relu(h + m.b(h)))


def dense(m: Any, x: Tensor) -> Tensor:
    h = relu(m.a(x))
    return m.c(torch.cat([relu(m.b(h)), h], -1))


def twice(m: Any, x: Tensor) -> Tensor:
    h = relu(m.a(x))
    return m.c(torch.cat([h, h.sin()], -1))


def every_other_unit_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, ::2].relu_()
    return m.c(h)


def unused_sum(m: Any, x: Tensor) -> Tensor:
    h, g = relu(m.a(x)), relu(m.b(x))
    _ = (h + g).cumsum(-1)
    return m.c(h) * m.d(g)


def products(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("bi,bj->bij", relu(m.a(x)), torch.tanh(m.b(x)))


def traces(m: Any, x: Tensor) -> Tensor:
    g, h = relu(m.a(x)), torch.tanh(m.b(x))
    return m.c(g) + torch.trace(g.T @ g) + torch.trace(h.T @ m.d @ m.d.T @ h)


def convolution_over_tokens(m: Any, x: Tensor) -> Tensor:
    """gMLP: the channels of the convolution are tokens, its positions hidden units."""
    u, v = F.gelu(m.a(x)).chunk(2, -1)
    return m.c(u * m.b(v))


network("chain", [rows(3, "a", "b"), rows(2, "b", "c")], lambda m, x: m.c(relu(m.b(relu(m.a(x))))), a=(5, 3), b=(3, 2),
        c=(2, 2))  # fmt: skip
network("deep chain", [rows(3, "a", "b"), rows(3, "b", "c"), rows(3, "c", "d")],
        lambda m, x: m.d(torch.tanh(m.c(F.gelu(m.b(relu(m.a(x))))))), a=(5, 3), b=(3, 3), c=(3, 3),
        d=(3, 2))  # fmt: skip
network("residual", [rows(3, "a", "b"), rows(3, "b"), columns(3, "c.weight")], residual, a=(5, 3), b=(3, 3), c=(3, 2))
network("concatenated", [rows(2, "a", "c"), rows(3, "b", "c+2"), columns(5, "c.weight")],
        lambda m, x: m.c(torch.cat([relu(m.a(x)), torch.tanh(m.b(x))], -1)), a=(5, 2), b=(5, 3), c=(5, 2))  # fmt: skip
network("dense", [rows(2, "a", "b", "c+3"), rows(3, "b", "c")], dense, a=(5, 2), b=(2, 3), c=(5, 2))
# zeros beside the units of ``a``: the first and the last unit of ``b`` are alike, the others follow ``a``
network("padded", [rows(2, "a"), rows(4, "b", "c"), columns(4, "c.weight"), rows(2, "b", "c+1", start=1)],
        lambda m, x: m.c(relu(F.pad(relu(m.a(x)), (1, 1)) + m.b(x))), a=(5, 2), b=(5, 4), c=(4, 2))  # fmt: skip
network("twice", [rows(3, "a", "c", "c+3"), rows(3, "a"), columns(6, "c.weight")], twice, a=(5, 3), c=(6, 2))
network("gated", [rows(3, "a", "c"), rows(3, "b"), rows(3, "a"), columns(3, "c.weight")],
        lambda m, x: m.c(m.a(x) * torch.sigmoid(m.b(x))), a=(5, 3), b=(5, 3), c=(3, 2))  # fmt: skip
# rows and columns of W change places together in ``h (W + 1)``
network("beside identity", [rows(3, "a"), columns(3, "w", 0), columns(3, "w"), columns(3, "c.weight")],
        lambda m, x: m.c(relu(relu(m.a(x)) @ (m.w + torch.eye(3, dtype=x.dtype)))), a=(5, 3), w=weight(3, 3),
        c=(3, 2))  # fmt: skip
network("convolutions", [rows(2, "a", "b"), rows(3, "b", "c")],
        lambda m, x: m.c(relu(m.b(relu(m.a(x)))).mean((2, 3))), (2, 5, 4, 4), a=nn.Conv2d(5, 2, 3, padding=1),
        b=nn.Conv2d(2, 3, 3), c=(3, 2))  # fmt: skip
network("every other unit written", [
            rows(4, "a"), Layer(2, (("a.weight", 0, 0, 2), ("a.bias", 0, 0, 2), ("c.weight", 1, 0, 2))),
            columns(4, "c.weight"), rows(4, "a", "c"),
        ], every_other_unit_written, a=(5, 4), c=(4, 2))  # fmt: skip
network("unused sum", [rows(3, "a", "c"), rows(3, "b", "d")], unused_sum, a=(5, 3), b=(5, 3), c=(3, 2), d=(3, 2))
network("diagonal of products", [rows(3, "a"), rows(3, "b"), columns(3, "c.weight")],
        lambda m, x: m.c(products(m, x).diagonal(dim1=1, dim2=2)), a=(5, 3), b=(5, 3), c=(3, 2))  # fmt: skip
# entries ``g_i h_(i+1)``: the last unit of ``g`` and the first one of ``h`` are not read
network("diagonal beside the main one",
        [rows(3, "a"), rows(3, "a", start=1), rows(3, "b"), rows(3, "b", start=1), columns(3, "c.weight")],
        lambda m, x: m.c(products(m, x).diagonal(1, 1, 2)), a=(5, 4), b=(5, 4), c=(3, 2))  # fmt: skip
network("traces", [rows(3, "a", "c"), rows(3, "b")], traces, a=(5, 3), b=(5, 3), c=(3, 2), d=weight(40, 2))
network("convolution over tokens", [rows(3, "a"), rows(3, "a", start=3), columns(3, "c.weight")],
        convolution_over_tokens, (6, 4, 5), a=(5, 6), b=nn.Conv1d(4, 4, 1), c=(3, 2))  # fmt: skip


def candidates(layers: list[Layer], state: State) -> Iterator[State]:
    """The state after one transposition in one to four of the layers."""
    pairs = [[(layer, i, j) for i, j in itertools.combinations(range(layer.width), 2)] for layer in layers]
    for count in (1, 2, 3, 4):
        for chosen in itertools.combinations(pairs, count):
            for moves in itertools.product(*chosen):
                moved = state
                for layer, i, j in moves:
                    moved = layer.exchange(i, j, moved)
                yield moved


def elements(graph: tus.SymmetryGraph) -> Iterator[dict[str, Tensor]]:
    """All elements of all groups."""
    each = []
    for group in graph.permutations:
        assert len(group.shape) == 1
        each.append([(group.name, torch.tensor(p)) for p in itertools.permutations(range(group.size))])
    for chosen in itertools.product(*each):
        yield dict(chosen)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_symmetries_are_claimed_and_nothing_else(name: str) -> None:
    build, layers, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    graph = tus.discover_symmetries(model, x)
    generator = torch.Generator().manual_seed(1)
    state = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in model.state_dict().items()}

    def run(weights: State) -> Tensor:
        with torch.no_grad():
            return torch.func.functional_call(model, {n: t.clone() for n, t in weights.items()}, (x,))

    def key(weights: State) -> bytes:
        return b"".join(weights[n].numpy().tobytes() for n in state)

    before = run(state)
    found = set()
    for element in elements(graph):
        moved = permute_tensors(graph, element, state)
        torch.testing.assert_close(run(moved), before, rtol=1e-9, atol=1e-9)
        found.add(key(moved))
    symmetries = 0
    for moved in candidates(layers, state):
        holds = torch.allclose(run(moved), before, rtol=1e-9, atol=1e-9)
        symmetries += holds
        claimed = key(moved) in found
        assert holds == claimed
    assert symmetries > 0 and len(found) > 1


def test_units_that_a_wider_kernel_mixes_are_not_claimed() -> None:
    """gMLP with a kernel of three over the hidden units: neighbors are told apart, and none may move."""
    torch.manual_seed(0)
    model = Net(lambda m, x: m.c(m.b(relu(m.a(x)))), a=(5, 3), b=nn.Conv1d(4, 4, 3, padding=1), c=(3, 2)).double()
    assert tus.discover_symmetries(model, torch.randn(6, 4, 5, dtype=torch.float64)).permutations == ()


# -- random chains ----------------------------------------------------------------------------------------------------

UNITS = 3  # of a hidden layer; two pairs of neighbors generate all of its permutations
MOST_PLACES = 11  # so that 2 * 2^11 runs are the most that one chain takes

# what follows a hidden layer h of three units: its part, and the line that makes the next h
STEPS = [
    ("", "h = torch.relu(h)"),
    ("", "h = torch.tanh(h)"),
    ("", "h = torch.sigmoid(h) * h"),
    ("nn.Linear(3, 3)", "h = self.{n}(h)"),
    ("nn.Linear(3, 3, bias=False)", "h = torch.relu(self.{n}(h))"),
    ("nn.Linear(3, 3, bias=False)", "h = h + torch.tanh(self.{n}(h))"),
    ("nn.Linear(3, 3, bias=False)", "h = F.linear(h, self.{n}.weight + torch.eye(3))"),
    ("nn.Linear(3, 3, bias=False)", "h = torch.tanh(h @ self.{n}.weight) @ self.{n}.weight.T"),
    ("nn.Parameter(torch.randn(3))", "h = h * self.{n}"),
    ("nn.Parameter(torch.randn(3))", "h = torch.relu(h + self.{n})"),
    ("nn.Parameter(torch.randn(()))", "h = h * self.{n}"),
    ("nn.LayerNorm(3)", "h = self.{n}(h)"),
    ("", "h = h.softmax(-1)"),
    ("", "h = h - h.mean(-1, keepdim=True)"),
    ("", "h = h * h.sum(-1, keepdim=True)"),
    ("", "h = h / (h.std(-1, keepdim=True) + 1e-5)"),
    ("", "h = h * torch.tensor([1.0, 1.0, 0.5])"),
    ("", "h = h.flip(-1) + h"),
    ("", "h = h.index_select(-1, torch.tensor([2, 0, 1]))"),
    ("", "h = h.clone()\n        h[:, 0] = 1"),
    ("", "h.cumsum(-1)"),
    ("", "h + torch.arange(3)"),
    ("", "h = h.sort(-1)[0]"),
    ("nn.Linear(4, 3, bias=False)", "h = self.{n}(F.pad(h, (0, 1)))"),
    ("nn.Linear(4, 3, bias=False)", "h = self.{n}(torch.cat([torch.ones(16, 1), h], 1))"),
    ("nn.Linear(6, 3, bias=False)", "h = self.{n}(torch.cat([h, torch.tanh(h)], 1))"),
    ("nn.Linear(3, 6, bias=False)", "a, c = self.{n}(h).chunk(2, 1)\n        h = a * torch.sigmoid(c)"),
]


def random_chain(seed: int) -> Module:
    """Two inputs, one to three random steps on three hidden units, two outputs."""
    draw = random.Random(seed)
    nodes = [Node(("x",), ("h",), ("h = self.first(x)",), ("self.first = nn.Linear(2, 3)",))]
    for k in range(draw.randint(1, 3)):
        part, line = draw.choice(STEPS)
        lines = tuple(each.strip() for each in line.replace("{n}", f"p{k}").split("\n"))
        nodes.append(Node(("h",), ("h",), lines, (f"self.p{k} = {part}",) if part else ()))
    nodes.append(Node(("h",), ("y",), ("y = self.last(torch.atan(h))",), ("self.last = nn.Linear(3, 2)",)))
    inputs = {"x": "torch.randn(16, 2, generator=torch.Generator().manual_seed(0))"}
    return Module(inputs, tuple(nodes), ("y",))


def places(state: State) -> list[Place]:
    return [
        (name, axis, offset, 1)
        for name, tensor in state.items()
        for axis, size in enumerate(tensor.shape)
        for offset in range(size - UNITS + 1)
    ]


def transpositions(model: nn.Module, inputs: tuple[Tensor, ...], states: list[State]) -> list[State]:
    """The first state, moved by all minimal swaps that leave the function unchanged.

    A swap counts if it does so with the other weights too: with some, a unit is off for all inputs by accident.
    """
    found = []
    where = places(states[0])

    def kept(swap: Layer, first: int) -> bool:
        return all(gap(model, inputs, state, swap.exchange(first, first + 1, state)) < 1e-10 for state in states)

    for first in range(UNITS - 1):
        minimal: list[int] = []
        for bits in sorted(range(1, 2 ** len(where)), key=lambda b: (b.bit_count(), b)):
            if any(bits & m == m for m in minimal):
                continue
            swap = Layer(UNITS, tuple(p for k, p in enumerate(where) if bits >> k & 1))
            if kept(swap, first):
                minimal.append(bits)
                found.append(swap.exchange(first, first + 1, states[0]))
    return found


def gap(model: nn.Module, inputs: tuple[Tensor, ...], one: State, other: State) -> float:
    """Largest difference of the outputs for two states."""
    with torch.no_grad():
        a, b = (torch.func.functional_call(model, state, inputs) for state in (one, other))
    return float((a - b).abs().max())


def claimed(graph: tus.SymmetryGraph, state: State) -> list[State]:
    """The moved states of all transpositions in the groups that discovery found."""
    moved = []
    for group in graph.permutations:
        for block in range(torch.Size(group.blocks).numel()):
            for i in range(group.size):
                for j in range(i):
                    element = torch.arange(group.size).expand(group.shape).clone().reshape(-1, group.size)
                    element[block, i], element[block, j] = j, i
                    moved.append(tus.apply_permutation(graph, {group.name: element.reshape(group.shape)}, state))
    return moved


def compare(seed: int) -> tuple[int, int, str]:
    """How many transpositions there are, how many of them were claimed, and the source of the chain."""
    module = random_chain(seed)
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model, inputs = module.build()
        inputs = tuple(i.double() for i in inputs)
        graph = tus.discover_symmetries(model, inputs)
        generator = torch.Generator().manual_seed(seed)
        shapes = {k: v.shape for k, v in model.state_dict().items()}
        states = [{k: torch.randn(s, generator=generator) for k, s in shapes.items()} for _ in range(2)]
        if len(places(states[0])) > MOST_PLACES:
            return 0, 0, module.source
        there = transpositions(model, inputs, states)
        mine = claimed(graph, states[0])
    finally:
        torch.set_default_dtype(old)

    def same(a: State, b: State) -> bool:
        return all(torch.equal(a[k], b[k]) for k in a)

    for moved in mine:
        assert gap(model, inputs, states[0], moved) < 1e-10, f"claimed, and no symmetry\n{module.source}"
    return len(there), sum(any(same(moved, m) for m in mine) for moved in there), module.source


def check(seeds: range) -> None:
    there = found = 0
    missed = []
    for seed in seeds:
        n, m, source = compare(seed)
        there, found = there + n, found + m
        if m < n:
            missed.append(source)
    assert there > len(seeds)
    assert found == there, (
        f"{found} of {there} transpositions were claimed; missed in {len(missed)} chains:\n" + "\n".join(missed[:3])
    )


def test_every_transposition_of_a_small_chain_is_claimed() -> None:
    check(range(40))


@pytest.mark.slow
def test_every_transposition_of_many_small_chains_is_claimed() -> None:
    check(range(1000, 1600))
