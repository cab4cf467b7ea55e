"""Brute force on random chains: which permutations of hidden units are symmetries, and which of them were claimed.

Two neighboring units are swapped in every subset of all places where units could lie; swaps that leave the function
unchanged, and hold no smaller one that does, are what there is to find. What the graph claims must be among the
symmetries, always; on these networks it must be all of them.
"""

from __future__ import annotations

import random

import pytest
import torch
from random_modules import Module, Node
from torch import Tensor, nn

import tu_symmetry as tus

State = dict[str, Tensor]
Place = tuple[str, int, int]  # parameter, axis, and the position of the first unit

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
        (name, axis, offset)
        for name, tensor in state.items()
        for axis, size in enumerate(tensor.shape)
        for offset in range(size - UNITS + 1)
    ]


def swapped(state: State, where: list[Place], first: int) -> State:
    """The state with a unit and the next one exchanged in some places."""
    state = dict(state)
    for name, axis, offset in where:
        order = torch.arange(state[name].shape[axis])
        order[[offset + first, offset + first + 1]] = order[[offset + first + 1, offset + first]]
        state[name] = state[name].index_select(axis, order)
    return state


def transpositions(model: nn.Module, inputs: tuple[Tensor, ...], states: list[State]) -> list[State]:
    """The first state, moved by all minimal swaps that leave the function unchanged.

    A swap counts if it does so with the other weights too: with some, a unit is off for all inputs by accident.
    """
    found = []
    everywhere = places(states[0])
    for first in range(UNITS - 1):
        minimal: list[int] = []
        for bits in sorted(range(1, 2 ** len(everywhere)), key=lambda b: (b.bit_count(), b)):
            if any(bits & m == m for m in minimal):
                continue
            where = [p for k, p in enumerate(everywhere) if bits >> k & 1]
            if all(gap(model, inputs, state, swapped(state, where, first)) < 1e-10 for state in states):
                minimal.append(bits)
                found.append(swapped(states[0], where, first))
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
