"""Units that matrices may mix: which there are, that the function stays, and that planted rotations are found again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F
from written import Entry, entries
from zoo import discovered, named, outputs, relative, weights

import tu_symmetry as tus
from tu_symmetry.alignment import rotation_matching
from tu_symmetry.symmetry import SignedPermutation, apply_linear, apply_signed, random_linear
from tu_symmetry.symmetry.action import linear_tensors

State = dict[str, Tensor]

# What is said are the sizes of general linear groups, and of orthogonal ones with a minus.
WRITTEN = """
deep_linear(x=(3, 5)) has [4, 6]
    a=(5, 4), b=(4, 6), c=(6, 2)
    return self.c(self.b(self.a(x)))
low_rank(x=(3, 5)) has [2]
    w=(5, 6), a=nn.Linear(5, 2, False), b=nn.Linear(2, 6), head=(6, 2)
    return self.head(torch.relu(self.w(x) + 0.5 * self.b(self.a(x))))
tied(x=(3, 5)) has [-4]
    a=nn.Linear(5, 4, False)
    return self.a(x) @ self.a.weight
residual(x=(3, 5)) has [4]
    a=(5, 4), b=(4, 4), c=(4, 2)
    h = self.a(x)
    return self.c(h - 0.5 * self.b(h))
two_parts(x=(3, 5)) has [3, 3]
    a=(5, 6), c=(6, 2)
    one, two = self.a(x).chunk(2, 1)
    return self.c(torch.cat([two, one], 1))
picture(x=(2, 3, 6, 6)) has [4]
    a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 1)
    return F.relu(self.b(F.pad(self.a(x), (1, 1, 1, 1))))
tokens(x=torch.tensor([[1, 4, 2]])) has [4]
    a=nn.Embedding(6, 4), b=(4, 3)
    return F.gelu(self.b(self.a(x)))
scaled(x=(3, 5)) has [4]
    a=(5, 4), s=[1], c=(4, 2)
    return self.c(self.a(x) * self.s * x.sum(1, keepdim=True).exp())
gains(x=(3, 5)) has []
    a=(5, 4), s=[4], c=(4, 2)
    return self.c(self.a(x) * self.s)
shifted(x=(3, 5)) has []
    a=(5, 4), s=[1], c=(4, 2)
    return self.c(self.a(x) + self.s)
constants(x=(3, 5)) has []
    a=(5, 4), c=(4, 2)
    return self.c(self.a(x) + 1.0) + self.a(x).sum(1, keepdim=True)
activation(x=(3, 5)) has []
    a=(5, 4), c=(4, 2)
    return self.c(torch.relu(self.a(x)) + self.a(x))
normalized(x=(3, 5)) has []
    a=(5, 4), n=nn.RMSNorm(4), c=(4, 2)
    return self.c(self.n(self.a(x)))
table_with_bias(x=(3, 5)) has [5]
    p=[4, 5], a=(5, 6), b=nn.Linear(4, 2, False)
    return self.b(F.linear(x, self.a(self.p)[:, :5]))
"""
ENTRIES = list(entries(WRITTEN, {"nn": nn, "torch": torch, "F": F}))
MIXED = [case for case in CASES if case.linears]
# here the stream itself may be rotated, and the search ends in an optimum that depends on its start
STREAMS = ("EinsumAttention", "HeadsLast", "StackedExperts")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_groups_are_those_counted_by_hand(entry: Entry) -> None:
    torch.manual_seed(0)
    model, inputs = entry.build().double().eval(), entry.inputs(0, torch.float64)
    graph = tus.discover_symmetries(model, inputs)
    tus.verify_symmetries(graph, model, inputs, on_failure="raise")
    found = sorted(-g.size if g.orthogonal else g.size for g in graph.linears for _ in range(math.prod(g.blocks)))
    assert found == sorted(eval(entry.words.removeprefix("has ")))
    state = model.state_dict()
    moved = apply_linear(graph, random_linear(graph, generator=torch.Generator().manual_seed(1)), state)
    assert relative(outputs(model, state, inputs), outputs(model, moved, inputs)) < 1e-9
    for group in graph.linears:
        assert any(not torch.equal(moved[m.parameter], state[m.parameter]) for m in group.members)


@pytest.mark.parametrize("case", MIXED, ids=lambda c: c.name)
def test_matrices_act_as_a_group(case: Case) -> None:
    _, graph, state = weights(case)
    generator = torch.Generator().manual_seed(1)
    a, b = (random_linear(graph, generator=generator) for _ in range(2))
    both = apply_linear(graph, {n: a[n] @ b[n] for n in a}, state)
    one = apply_linear(graph, a, apply_linear(graph, b, state))
    back = apply_linear(graph, {n: torch.linalg.inv(m) for n, m in a.items()}, apply_linear(graph, a, state))
    stack = apply_linear(graph, a, {n: torch.stack([t, 2 * t]) for n, t in state.items()})
    single = apply_linear(graph, a, state)
    for name in state:
        torch.testing.assert_close(one[name], both[name], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(back[name], state[name], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(stack[name][1], 2 * single[name], rtol=1e-12, atol=1e-12)


def test_values_and_queries_of_each_head_are_mixed_by_a_matrix_of_its_own() -> None:
    _, graph = discovered(next(c for c in CASES if c.name == "transformer_separate"))
    queries, values = graph.linears
    assert (queries.blocks, queries.size, queries.orthogonal) == ((3,), 4, False)
    told = [{(m.parameter.split(".")[-2], m.axis): m.exponent for m in g.members} for g in (queries, values)]
    assert told == [{("q", 0): 1.0, ("k", 0): -1.0}, {("v", 0): 1.0, ("out", 1): -1.0}]
    assert "Linear groups" in str(graph) and "2 groups, 96 dimensions" in str(graph)
    rotary = discovered(next(c for c in CASES if c.name == "TinyLlama"))[1]
    assert [m.parameter.split(".")[-2] for g in rotary.linears for m in g.members] == ["v", "v", "out"]


@pytest.mark.parametrize("case", [c for c in MIXED if c.name not in STREAMS], ids=lambda c: c.name)
@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_planted_rotations_are_found(case: Case, signs: bool, noise: float) -> None:
    """Heads in another order, and rotated: the network comes as near as it was before it was moved."""
    model, graph = discovered(case)
    found = [planted(graph, model.state_dict(), seed, noise, signs=signs) for seed in range(2)]
    assert all(after <= before * (1 + 1e-6) + 1e-6 for before, after in found), found


def planted(graph: tus.SymmetryGraph, like: State, seed: int, noise: float, *, signs: bool) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(seed)
    first = {n: names[0] for names in graph.aliases.values() for n in names}

    def normal() -> State:
        drawn = {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in like.items()}
        return {n: drawn[first[n]] for n in like}

    reference, other = normal(), normal()
    near = {n: t + noise * other[n] for n, t in reference.items()}
    element = SignedPermutation(tus.random_permutation(graph, generator=generator), {})
    if signs:
        element = element._replace(signs=tus.random_signs(graph, generator=generator))
    rotations = random_linear(graph, generator=generator, std=0.0)
    moved = apply_linear(graph, rotations, apply_signed(graph, element, near))
    matching = rotation_matching(graph, reference, moved, signs=signs)
    back = linear_tensors(graph, matching.maps, apply_signed(graph, matching.element, moved))
    assert matching.distance_after == pytest.approx(distance(graph, reference, back), abs=1e-6)
    return distance(graph, reference, near), distance(graph, reference, back)


def distance(graph: tus.SymmetryGraph, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return float(sum((a[n] - b[n]).double().square().sum() for n in graph.shapes if n not in graph.buffers)) ** 0.5


@pytest.mark.parametrize("reference", ["first", "medoid", "mean", "universe"])
def test_networks_are_aligned_over_rotations(reference: Any) -> None:
    _, graph, state = named("transformer_separate")
    generator = torch.Generator().manual_seed(5)
    near = [
        {n: t + 0.01 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in state.items()}
        for _ in "abc"
    ]
    moved = [apply_linear(graph, random_linear(graph, generator=generator, std=0.0), one) for one in near]
    plain = tus.align(graph, moved, reference=reference)
    turned = tus.align(graph, moved, reference=reference, over=("permutations", "signs", "rotations"))
    assert sum(turned.distances_after) < 0.2 * sum(plain.distances_after)
    assert len(turned.certificates) == 3 and sum(bool(m) for m in turned.maps) == 2


def test_rotations_never_take_networks_farther_apart() -> None:
    for name in ("transformer_fused", "HeadsLast"):
        _, graph, a = named(name)
        b = weights(next(c for c in CASES if c.name == name), seed=9)[2]
        plain, rotated = tus.weight_matching(graph, a, b), rotation_matching(graph, a, b)
        assert rotated.distance_after <= plain.distance_after + 1e-9


def test_mistakes_are_named() -> None:
    _, graph, state = named("transformer_separate")
    group = graph.linears[0]
    for message, value in {"singular": torch.zeros(group.shape), "has shape": torch.eye(4)}.items():
        with pytest.raises(tus.SymmetryError, match=message):
            apply_linear(graph, {group.name: value}, state)
    with pytest.raises(tus.SymmetryError, match="no group 'nine'"):
        apply_linear(graph, {"nine": torch.eye(4)}, state)
    torch.manual_seed(0)
    tied = next(e for e in ENTRIES if e.name == "tied").build().double()
    only = tus.discover_symmetries(tied, torch.randn(3, 5, dtype=torch.float64))
    with pytest.raises(tus.SymmetryError, match="must be orthogonal"):
        apply_linear(only, {only.linears[0].name: 2 * torch.eye(4)}, tied.state_dict())
