"""Laws of discovery and action, in float64 over the whole zoo."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Net, discovered, every_case, named, outputs, relative, some_cases

import tu_symmetry as tus
from tu_symmetry.symmetry import action
from tu_symmetry.symmetry.action import permute_tensors, scale_tensors
from tu_symmetry.symmetry.operators.pointwise import elementwise
from tu_symmetry.symmetry.running.weights import random_state


@every_case
def test_groups_are_those_counted_by_hand(case: Case) -> None:
    _, graph = discovered(case)
    assert sorted(g.shape for g in graph.permutations) == sorted(case.permutations)
    assert sum(g.size for g in graph.scales) == case.scales
    assert sum(g.size for g in graph.normalizations) == case.normalizations


@every_case
def test_verification_passes(case: Case) -> None:
    model, graph = discovered(case)
    tus.verify_symmetries(graph, model, case.inputs())
    assert graph.verified


@every_case
def test_every_permutation_group_moves_something_and_keeps_the_function(case: Case) -> None:
    model, graph = discovered(case)
    generator = torch.Generator().manual_seed(3)
    state = random_state(model, generator)
    before = outputs(model, state, case.inputs())
    for group in graph.permutations:
        element = {group.name: torch.arange(group.size).roll(1).expand(group.shape).clone()}
        moved = tus.apply_permutation(graph, element, state)
        assert any(not torch.equal(moved[n], state[n]) for n in state), group.name
        assert relative(before, outputs(model, moved, case.inputs())) < 1e-9, group.name


@every_case
def test_actions_compose_and_invert(case: Case) -> None:
    model, graph = discovered(case)
    generator = torch.Generator().manual_seed(4)
    state = random_state(model, generator)
    p, q = (tus.random_permutation(graph, generator=generator) for _ in range(2))
    one = tus.apply_permutation(graph, p, tus.apply_permutation(graph, q, state))
    both = tus.apply_permutation(graph, tus.compose(p, q), state)
    back = tus.apply_permutation(graph, tus.invert(p), tus.apply_permutation(graph, p, state))
    for name in state:
        assert torch.equal(one[name], both[name]), name
        assert torch.equal(back[name], state[name]), name
    assert tus.transposition_count(p) == tus.transposition_count(tus.invert(p))


@every_case
def test_scales_compose_and_do_not_touch_what_no_group_names(case: Case) -> None:
    model, graph = discovered(case)
    generator = torch.Generator().manual_seed(5)
    state = random_state(model, generator)
    a, b = (tus.random_scale(graph, generator=generator, std=0.3) for _ in range(2))
    one = tus.apply_scale(graph, a, tus.apply_scale(graph, b, state))
    both = tus.apply_scale(graph, {n: a[n] + b[n] for n in a}, state)
    named = {
        alias for g in (*graph.scales, *graph.normalizations) for m in g.members for alias in graph.aliases[m.parameter]
    }
    for name in state:
        torch.testing.assert_close(one[name], both[name], rtol=1e-12, atol=0)
        assert (name in named) or torch.equal(one[name], state[name])


@every_case
def test_each_scale_group_keeps_the_function_and_changes_weights(case: Case) -> None:
    model, graph = discovered(case)
    generator = torch.Generator().manual_seed(6)
    state = random_state(model, generator)
    before = outputs(model, state, case.inputs())
    for group in (*graph.scales, *graph.normalizations):
        scaled = tus.apply_scale(graph, {group.name: torch.linspace(-0.5, 0.7, group.size, dtype=torch.float64)}, state)
        assert any(not torch.equal(scaled[n], state[n]) for n in state)
        error = relative(before, outputs(model, scaled, case.inputs()))
        assert error < (1e-9 if group.exact else 1e-3), group.name


@every_case
@pytest.mark.parametrize("piece", [1, 2**22])
def test_in_place_is_the_same_whatever_the_pieces(case: Case, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action, "_PIECE", piece)
    model, graph = discovered(case)
    generator = torch.Generator().manual_seed(5)
    state, moved = (random_state(model, torch.Generator().manual_seed(6)) for _ in range(2))
    permutation, log_scale = (draw(graph, generator=generator) for draw in (tus.random_permutation, tus.random_scale))
    held = dict(moved)
    action.permute_tensors_(graph, permutation, moved)
    action.scale_tensors_(graph, log_scale, moved)
    expected = scale_tensors(graph, log_scale, permute_tensors(graph, permutation, state))
    assert all(moved[n] is held[n] and torch.equal(moved[n], expected[n]) for n in held)


def test_scaling_can_be_differentiated() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 3, dtype=torch.float64))
    log_scale = {graph.scales[0].name: torch.full((4,), 0.5, dtype=torch.float64)}
    scaled = tus.apply_scale(graph, log_scale, dict(model.named_parameters()))
    (gradient,) = torch.autograd.grad(scaled["2.weight"].sum(), model[2].weight)
    torch.testing.assert_close(gradient, torch.full((2, 4), math.exp(-0.5), dtype=torch.float64))


@some_cases
def test_discovery_leaves_the_model_alone(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build().double().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    tus.discover_symmetries(model, case.inputs())
    assert all(m.training for m in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_stack_of_states_is_permuted_sample_by_sample() -> None:
    model, graph, _ = named("GroupedConv")
    generator = torch.Generator().manual_seed(8)
    states = [random_state(model, generator) for _ in range(3)]
    stack = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    p = tus.random_permutation(graph, generator=generator)
    moved = tus.apply_permutation(graph, p, stack)
    for k, state in enumerate(states):
        single = tus.apply_permutation(graph, p, state)
        assert all(torch.equal(moved[n][k], single[n]) for n in single)


def test_nothing_is_transformed_with_an_unverified_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    graph = tus.discover_symmetries(model, torch.randn(3, 4, dtype=torch.float64))
    assert not graph.verified
    graph.probe = None
    with pytest.raises(tus.SymmetryError, match="has not been verified"):
        tus.apply_permutation(graph, {}, model.state_dict())


@torch.library.custom_op("tus_test::swish2", mutates_args=())
def swish2(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * x)


@swish2.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def custom(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.ops.tus_test.swish2(self.a(x)))


def test_a_rule_of_ones_own_frees_what_was_pinned() -> None:
    model, x = Net(custom, a=nn.Linear(4, 6), b=nn.Linear(6, 2)), torch.randn(3, 4)
    pinned = tus.discover_symmetries(model, x)
    assert pinned.permutations == () and pinned.unknown_operators == ("tus_test.swish2",)
    assert "tus_test.swish2" in str(pinned) and any("swish2" in p.reason for p in pinned.pinned)
    tus.register_rule("tus_test.swish2")(elementwise)
    graph = tus.discover_symmetries(model, x)
    tus.verify_symmetries(graph, model, x)
    assert [g.size for g in graph.permutations] == [6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.bias"), "missing '0.bias'"),
        (lambda s: s.update(extra=torch.zeros(1)), "unexpected 'extra'"),
        (lambda s: s.update({"0.bias": torch.zeros(7)}), "has shape"),
        (lambda s: s.update({"0.bias": torch.full((6,), math.nan)}), "NaN or infinite"),
    ],
)
def test_foreign_states_are_refused(change, message) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    graph = tus.discover_symmetries(model, torch.randn(3, 4))
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(tus.SymmetryError, match=message):
        graph.check_state(state)


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.Adam(p, 0.01)]
)
def test_training_goes_on_unchanged_after_a_permutation(make) -> None:  # type: ignore[no-untyped-def]
    """The permuted run is the permutation of the plain run, step by step."""
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


def test_gradients_follow_scales_inversely() -> None:
    """d loss / d (c w) = (1 / c) d loss / d w, entry by entry: what rescaled optimizer statistics rely on."""
    model, graph, _ = named("mlp_relu")
    x = torch.randn(3, 5, dtype=torch.float64)

    def gradients(state: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {n: t.clone().requires_grad_() for n, t in state.items()}
        torch.func.functional_call(model, leaves, (x,)).square().sum().backward()
        return {n: t.grad for n, t in leaves.items() if t.grad is not None}

    state = dict(model.state_dict())
    s = tus.random_scale(graph, generator=torch.Generator().manual_seed(0), std=0.5)
    expected = scale_tensors(graph, s, gradients(state), power=-1.0)
    found = gradients(tus.apply_scale(graph, s, state))
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


def test_subsets_of_tensors_can_be_moved() -> None:
    _, graph, state = named("mlp_relu")
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(0))
    only = permute_tensors(graph, p, {"0.bias": state["0.bias"]})
    assert only.keys() == {"0.bias"} and torch.equal(only["0.bias"], state["0.bias"][p["0"]])
