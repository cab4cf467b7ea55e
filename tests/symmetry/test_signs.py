"""Signs of hidden units: which there are by brute force, that they keep the function, and what operators do to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from written import Entry, entries
from zoo import discovered, every_case, named, weights

import tu_symmetry as tus
from tu_symmetry.metrics.functional import network_discrepancy
from tu_symmetry.metrics.functional.discrepancy import removal
from tu_symmetry.symmetry import rules
from tu_symmetry.symmetry.action import sign_tensors, signed_tensors

State = dict[str, Tensor]

# Two inputs, two hidden units, one or two outputs: few places, of which all subsets are tried.
TINY = """
tanh(x=(9, 2))
    a=(2, 2), b=(2, 1)
    return self.b(torch.tanh(self.a(x)))
sums(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 2, False), c=nn.Linear(2, 1, False)
    h = self.a(x)
    return self.c(h + torch.sin(self.b(h)))
relu(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 1, False)
    return self.b(torch.relu(self.a(x)) + self.a(x))
cubes(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 1)
    return self.b(self.a(x) ** 3 + F.hardtanh(self.a(x)))
squares(x=(9, 2))
    a=(2, 2), b=nn.Linear(2, 1, False)
    return self.b(self.a(x).square())
magnitudes(x=(9, 2))
    a=(2, 2), p=[2], b=nn.Linear(2, 1, False)
    return self.b(self.a(x).abs() * self.p)
roots(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 1, False)
    return self.b((self.a(x) ** 2).sqrt() + self.a(x) ** 3)
deviation(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 1, False)
    return self.b(self.a(x)) * self.a(x).std(-1, keepdim=True)
gate(x=(9, 2))
    a=nn.Linear(2, 2, False), g=nn.Linear(2, 2, False), b=nn.Linear(2, 1, False)
    return self.b(self.a(x) * F.silu(self.g(x)))
rms(x=(9, 2))
    a=nn.Linear(2, 2, False), n=nn.RMSNorm(2), b=nn.Linear(2, 1, False)
    return self.b(F.relu(self.n(self.a(x))))
stream(x=(9, 2))
    a=nn.Linear(2, 2, False), n=nn.RMSNorm(2), b=nn.Linear(2, 2, False), c=nn.Linear(2, 1, False)
    h = self.a(x)
    return self.c(h + self.b(self.n(h)))
layer_norm(x=(9, 2))
    a=nn.Linear(2, 2, False), n=nn.LayerNorm(2), b=nn.Linear(2, 1, False)
    return self.b(self.n(self.a(x)))
batch_norm(x=(9, 1))
    a=nn.Linear(1, 2, False), n=nn.BatchNorm1d(2), b=nn.Linear(2, 1, False)
    return self.b(F.relu(self.n(self.a(x))))
tied(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 2)
    return torch.tanh(self.b(x @ self.a.weight)) @ self.a.weight.T
clipped(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 1, False)
    return self.b(self.a(x).clamp(-0.5, 0.5) + self.a(x).clamp(-0.5, 0.6))
masked(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 1, False)
    return self.b(self.a(x).masked_fill(x > 0, 0.0)) + self.a(x).masked_fill(x > 0, -torch.inf).logsumexp(-1, True)
cosine(x=(9, 2))
    a=nn.Linear(2, 2, False), b=nn.Linear(2, 2, False)
    return F.cosine_similarity(self.a(x), self.b(x), dim=1)
recurrent(x=(2, 3, 1))
    r=nn.RNN(1, 2, bias=False, batch_first=True), b=nn.Linear(2, 1, False)
    return self.b(self.r(x)[0])
"""
NETWORKS = list(entries(TINY, {"nn": nn, "torch": torch, "F": nn.functional}))


def signs_of(patterns: Iterator[Tensor]) -> set[int]:
    """A basis of what patterns of 0 and 1 span modulo 2, as integers with leading bits of their own."""
    basis: dict[int, int] = {}
    for pattern in patterns:
        vector = int("".join(map(str, pattern.tolist())), 2)
        while vector and vector.bit_length() in basis:
            vector ^= basis[vector.bit_length()]
        if vector:
            basis[vector.bit_length()] = vector
    return set(basis.values())


def turned(graph: tus.SymmetryGraph, state: State) -> Iterator[Tensor]:
    """For each sign of a graph the entries that it turns."""
    ones = {n: torch.ones_like(t) for n, t in state.items() if t.is_floating_point()}
    for group in graph.signs:
        for unit in range(group.size):
            element = torch.ones(group.size, dtype=torch.int64)
            element[unit] = -1
            moved = sign_tensors(graph, {group.name: element}, ones)
            yield torch.cat([(t < 0).long().flatten() for t in moved.values()])


@pytest.mark.parametrize("entry", NETWORKS, ids=lambda e: e.name)
def test_all_signs_are_found(entry: Entry) -> None:
    torch.manual_seed(0)
    model = entry.build().double().eval()
    inputs = entry.inputs(0, torch.float64)
    graph = tus.discover_symmetries(model, inputs)
    tus.verify_symmetries(graph, model, inputs, on_failure="raise")
    states = [{n: torch.randn_like(t) for n, t in model.state_dict().items() if t.is_floating_point()} for _ in "ab"]
    for state in states:
        state |= {n: t.abs() for n, t in state.items() if n.endswith("running_var")}
    places = [(n, axis, k) for n, t in states[0].items() for axis, size in enumerate(t.shape) for k in range(size)]
    places = [place for place in places if not place[0].endswith("running_var")]
    subsets = torch.tensor(list(itertools.product((1.0, -1.0), repeat=len(places))), dtype=torch.float64)
    factors = {n: torch.ones(len(subsets), *t.shape, dtype=torch.float64) for n, t in states[0].items()}
    for (name, axis, k), column in zip(places, subsets.T, strict=True):
        factors[name].select(axis + 1, k).mul_(column.reshape(-1, *[1] * (states[0][name].ndim - 1)))
    holds = torch.ones(len(subsets), dtype=torch.bool)
    for state in states:
        each = [{n: t * factors[n][k] for n, t in state.items()} for k in range(len(subsets))]
        with torch.no_grad():
            found = torch.stack([torch.func.functional_call(model, given, inputs).flatten() for given in each])
        same = torch.isclose(found, found[0], rtol=1e-9, atol=1e-12) | (found == found[0])
        holds &= same.all(1)
    every = signs_of(
        (torch.cat([(f[k] < 0).long().flatten() for f in factors.values()])) for k in holds.nonzero()[:, 0]
    )
    assert len(signs_of(turned(graph, states[0]))) == len(every)


@every_case
def test_no_sign_is_made_of_others(case: Case) -> None:
    model, graph = discovered(case)
    patterns = list(turned(graph, model.state_dict()))
    assert len(signs_of(iter(patterns))) == len(patterns) == case.signs


@every_case
def test_signs_and_permutations_form_a_group(case: Case) -> None:
    _, graph, state = weights(case)
    generator = torch.Generator().manual_seed(4)
    p, q = (
        tus.symmetry.SignedPermutation(
            tus.random_permutation(graph, generator=generator), tus.random_signs(graph, generator=generator)
        )
        for _ in range(2)
    )
    moved = tus.symmetry.apply_signed(graph, q, state)
    both = tus.symmetry.apply_signed(graph, p, moved)
    for element, expected in (
        (tus.symmetry.compose_signed(graph, p, q), both),
        (tus.symmetry.compose_signed(graph, tus.symmetry.invert_signed(graph, q), q), state),
    ):
        found = tus.symmetry.apply_signed(graph, element, state)
        assert all(torch.equal(found[n], expected[n]) for n in expected)
    twice = tus.apply_signs(graph, p.signs, tus.apply_signs(graph, p.signs, state))
    assert all(torch.equal(twice[n], state[n]) for n in state)


@pytest.mark.parametrize("parity", ["odd", "even"])
def test_operators_are_as_odd_and_as_even_as_they_are_said_to_be(parity: str) -> None:
    tried = 0
    x = torch.linspace(-0.9, 0.93, 31, dtype=torch.float64)
    for name, said in rules.PARITIES.items():
        function = getattr(torch.ops.aten, name.removeprefix("aten."), None)
        if said != parity or function is None:
            continue
        try:
            here, there = function(x), function(-x)
        except (RuntimeError, TypeError):  # it takes more than one tensor
            continue
        if "empty" not in name and torch.equal(here, function(x)):  # neither memory as it is nor random
            expected = -here if parity == "odd" else here
            torch.testing.assert_close(there, expected, rtol=1e-12, atol=1e-14, msg=name)
            tried += 1
    assert tried >= {"odd": 18, "even": 8}[parity]


def test_a_rule_of_ones_own_says_what_becomes_of_signs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    kept = rules.PARITIES["aten.tanh"]
    sizes = []
    for said in ("odd", "pin", "even", lambda call: "odd" if call.shape[-1] == 4 else "pin"):
        rules.register_rule("tanh", signs=said)(rules.RULES["aten.tanh"])
        sizes.append([g.size for g in tus.discover_symmetries(model, torch.randn(2, 3)).signs])
    rules.register_rule("tanh", signs=kept)(rules.RULES["aten.tanh"])
    assert sizes == [[4], [], [4], [4]]


def test_a_wrong_claim_is_taken_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2))
    kept = rules.PARITIES["aten.softplus"]
    rules.PARITIES["aten.softplus"] = "odd"
    graph = tus.discover_symmetries(model, torch.randn(2, 3))
    rules.PARITIES["aten.softplus"] = kept
    assert [g.size for g in graph.signs] == [4]
    with pytest.warns(tus.SymmetryWarning, match="sign group '0'"):
        graph.require_verified()
    assert graph.signs == () and graph.sign_terms == {} and len(graph.permutations) == 1


def test_mistakes_are_named() -> None:
    _, graph, state = named("layernorm_mlp")
    with pytest.raises(tus.SymmetryError, match="each 1 or -1"):
        tus.apply_signs(graph, {"0": torch.tensor([0])}, state)
    with pytest.raises(tus.SymmetryError, match=r"must be \(1,\)"):
        tus.apply_signs(graph, {"0": torch.ones(3)}, state)
    with pytest.raises(tus.SymmetryError, match="no group 'nine'"):
        tus.apply_signs(graph, {"nine": torch.ones(1)}, state)


def test_a_stack_turns_alike_and_a_graph_tells_its_signs() -> None:
    _, graph, state = named("TinyLlama")
    stack = {n: torch.stack([t, 2 * t]) for n, t in state.items()}
    element = tus.random_signs(graph, generator=torch.Generator().manual_seed(1))
    moved, one = tus.apply_signs(graph, element, stack), tus.apply_signs(graph, element, state)
    assert all(torch.equal(moved[n][1], 2 * one[n]) for n in one)
    assert "6 groups, 42 signs" in str(graph) and "Sign groups" in str(graph)
    assert [g.name for g in graph.without("up").signs if g.name == "up"] == []


@every_case
def test_canonical_signs_are_those_of_the_orbit(case: Case) -> None:
    """Networks that differ by a signed permutation have the same canonical form, up to the permutation."""
    _, graph, state = weights(case)
    generator = torch.Generator().manual_seed(7)
    permutation = tus.random_permutation(graph, generator=generator)
    moved = tus.symmetry.apply_signed(
        graph, tus.symmetry.SignedPermutation(permutation, tus.random_signs(graph, generator=generator)), state
    )
    one, other = (tus.apply_signs(graph, tus.scaling.canonical_signs(graph, s), s) for s in (state, moved))
    expected = tus.apply_permutation(graph, permutation, one)
    assert all(torch.equal(other[n], expected[n]) for n in expected)


@pytest.mark.parametrize("reference", [False, True])
def test_removal_over_signs(reference: bool) -> None:
    _, graph, state = named("mlp_mixed")
    generator = torch.Generator().manual_seed(3)
    element = tus.symmetry.SignedPermutation(
        tus.random_permutation(graph, generator=generator), tus.random_signs(graph, generator=generator)
    )
    moved = tus.apply_scale(
        graph, tus.random_scale(graph, generator=generator), tus.symmetry.apply_signed(graph, element, state)
    )
    anchor = {n: t + 0.1 for n, t in state.items()} if reference else None
    one, other = (tus.remove_symmetries(graph, s, signs=True, reference=anchor) for s in (state, moved))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-8, atol=1e-8)
    without = tus.remove_symmetries(graph, moved)
    assert any(not torch.allclose(without[n], one[n]) for n in one)
    if not reference:
        entries = torch.cat([one["0.weight"], one["0.bias"][:, None], one["2.weight"].T], 1)
        assert bool((entries.gather(1, entries.abs().argmax(1, keepdim=True)) > 0).all())


def test_discrepancies_and_posteriors_without_signs() -> None:
    """Networks of one orbit are one network to the discrepancy, and to a Gaussian that is aligned over signs."""
    _, graph, state = named("mlp_mixed")
    generator = torch.Generator().manual_seed(3)

    def drawn(count: int) -> list[State]:
        return [
            {n: t + 0.05 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in state.items()}
            for _ in range(count)
        ]

    def moved(states: list[State]) -> list[State]:
        signs = [tus.random_signs(graph, generator=generator) for _ in states]
        return [tus.apply_signs(graph, s, one) for s, one in zip(signs, states, strict=True)]

    x, y = drawn(6), drawn(6)
    one, other = (network_discrepancy(x, given, graph=graph, removed="signed") for given in (y, moved(y)))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert network_discrepancy(x, moved(y), graph=graph) > other + 1e-3
    with pytest.raises(ValueError, match="over signs"):
        removal("signed").element(graph, state)
    over = ("permutations", "signs")
    signed, plain = (tus.CompactPosterior.from_states(moved(x), graph, over=o) for o in (over, over[:1]))
    assert signed.rms() < 0.1 < plain.rms()


def test_the_zoo_has_signs() -> None:
    assert sum(case.signs > 0 for case in CASES) > 20
    assert signed_tensors(named("mlp_relu")[1], tus.symmetry.SignedPermutation({}, {}), {}) == {}
