"""Laws of discovery and action, in float64 over the whole zoo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import discovered, every_case, named, outputs, relative, small, weights

import tu_symmetry as tus
from tu_symmetry.symmetry import action
from tu_symmetry.symmetry.action import permute_tensors, scale_tensors
from tu_symmetry.symmetry.elements import random_matrices
from tu_symmetry.symmetry.groups import LinearGroup, PermutationGroup, SignGroup
from tu_symmetry.symmetry.running.weights import random_state


@every_case
def test_groups_are_those_counted_by_hand(case: Case) -> None:
    _, graph = discovered(case)
    graph.require_verified()  # what is guessed is counted then
    assert sorted(g.shape for g in graph.permutations) == sorted(case.permutations)
    assert sum(g.size for g in graph.scales) == case.scales
    assert sum(g.size for g in graph.normalizations) == case.normalizations
    assert sum(g.size for g in graph.signs) == case.signs
    assert sum(math.prod(g.shape) for g in graph.linears) == case.linears


@pytest.mark.sampled(6)
@every_case
@pytest.mark.parametrize("samples", [1, 3])
def test_groups_do_not_depend_on_the_number_of_samples(case: Case, samples: int) -> None:
    model, graph = discovered(case)
    other = tus.discover_symmetries(model, tuple(torch.cat([x] * 3)[:samples] for x in case.inputs()))
    for one in (graph, other):  # which takes guesses that hold in
        one.require_verified()
    assert [(g.name, g.size) for g in other.groups()] == [(g.name, g.size) for g in graph.groups()]


@every_case
def test_verification_passes(case: Case) -> None:
    model, graph = discovered(case)
    tus.verify_symmetries(graph, model, case.inputs(), on_failure="raise")
    assert graph.verified


@every_case
def test_every_group_moves_something_and_keeps_the_function(case: Case) -> None:
    model, graph, state = weights(case)
    given = state
    for group in graph.groups():
        state = given
        if isinstance(group, LinearGroup):
            state = given | {name: torch.full_like(given[name], 0.7) for name in group.constant}
        before = outputs(model, state, case.inputs())
        if isinstance(group, PermutationGroup):
            element = {group.name: torch.arange(group.size).roll(1).expand(group.shape).clone()}
            moved, allowed = tus.apply_permutation(graph, element, state), 1e-9
        elif isinstance(group, LinearGroup):
            element = {group.name: random_matrices(group, torch.Generator().manual_seed(2))}
            moved, allowed = tus.symmetry.apply_linear(graph, element, state), 1e-9
        elif isinstance(group, SignGroup):
            element = {group.name: torch.where(torch.arange(group.size) % 2 == 0, -1, 1)}
            moved, allowed = tus.apply_signs(graph, element, state), 1e-9
        else:
            element = {group.name: torch.linspace(-0.5, 0.7, group.size, dtype=torch.float64)}
            moved, allowed = tus.apply_scale(graph, element, state), 1e-9 if group.exact else 1e-3
        assert any(not torch.equal(moved[n], state[n]) for n in state), group.name
        assert relative(before, outputs(model, moved, case.inputs())) < allowed, group.name


@every_case
def test_actions_compose_and_invert(case: Case) -> None:
    _, graph, state = weights(case)
    generator = torch.Generator().manual_seed(4)
    p, q = (tus.random_permutation(graph, generator=generator) for _ in range(2))
    moved = tus.apply_permutation(graph, q, state)
    both = tus.apply_permutation(graph, tus.compose(p, q), state)
    assert_same(tus.apply_permutation(graph, p, moved), both)
    assert_same(tus.apply_permutation(graph, tus.invert(q), moved), state)
    assert tus.transposition_count(p) == tus.transposition_count(tus.invert(p))
    a, b = (tus.random_scale(graph, generator=generator, std=0.3) for _ in range(2))
    one = tus.apply_scale(graph, a, tus.apply_scale(graph, b, state))
    both = tus.apply_scale(graph, {n: a[n] + b[n] for n in a}, state)
    scaled = {m.parameter for g in (*graph.scales, *graph.normalizations) for m in g.members}
    for parameter, name in ((parameter, name) for parameter, names in graph.aliases.items() for name in names):
        torch.testing.assert_close(one[name], both[name], rtol=1e-12, atol=0)
        assert parameter in scaled or torch.equal(one[name], state[name])


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@every_case
@pytest.mark.parametrize("piece", [1, 2**22])
def test_in_place_is_the_same_whatever_the_pieces(case: Case, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action, "_PIECE", piece)
    (_, graph, state), (_, _, moved) = weights(case), weights(case)
    generator = torch.Generator().manual_seed(5)
    permutation, log_scale = (draw(graph, generator=generator) for draw in (tus.random_permutation, tus.random_scale))
    held = dict(moved)
    action.permute_tensors_(graph, permutation, moved)
    action.scale_tensors_(graph, log_scale, moved)
    expected = scale_tensors(graph, log_scale, permute_tensors(graph, permutation, state))
    assert all(moved[n] is held[n] and torch.equal(moved[n], expected[n]) for n in held)


@every_case
def test_discovery_leaves_the_model_alone(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build().double().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tus.discover_symmetries(model, case.inputs())
    assert all(m.training for m in model.modules())
    assert_same(before, model.state_dict())


def test_a_stack_of_states_is_permuted_sample_by_sample() -> None:
    model, graph, _ = named("GroupedConv")
    generator = torch.Generator().manual_seed(8)
    states = [random_state(model, generator) for _ in range(3)]
    stack = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    p = tus.random_permutation(graph, generator=generator)
    moved = tus.apply_permutation(graph, p, stack)
    for k, state in enumerate(states):
        assert_same({n: t[k] for n, t in moved.items()}, tus.apply_permutation(graph, p, state))


def test_foreign_states_are_refused() -> None:
    graph, state = small(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    less = {name: tensor for name, tensor in state.items() if name != "0.bias"}
    for other, message in (
        (less, "missing '0.bias'"),
        (state | {"extra": torch.zeros(1)}, "unexpected 'extra'"),
        (state | {"0.bias": torch.zeros(7)}, "has shape"),
        (state | {"0.bias": torch.full((6,), math.nan)}, "NaN or infinite"),
    ):
        with pytest.raises(tus.SymmetryError, match=message):
            graph.check_state(other)


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.Adam(p, 0.01)]
)
def test_training_goes_on_unchanged_after_a_permutation(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    case = next(c for c in CASES if c.name == "cnn_flatten")
    generator = torch.Generator().manual_seed(9)
    x, y = torch.randn(8, 2, 10, 10, generator=generator, dtype=torch.float64), torch.arange(8) % 3
    losses: list[list[float]] = []
    for permute in (False, True):
        torch.manual_seed(1)
        model = case.build().double()
        graph = tus.discover_symmetries(model, case.inputs())
        optimizer = make(model.parameters())
        seen = []
        for step in range(8):
            if permute and step == 4:
                p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(2))
                model.load_state_dict(tus.apply_permutation(graph, p, model.state_dict()))
                names = {id(t): n for n, t in model.named_parameters()}
                tus.move_optimizer_state(graph, optimizer, names, permutation=p)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses.append(seen)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-11, atol=0)
