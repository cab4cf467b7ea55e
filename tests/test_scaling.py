"""Laws of canonical scales, in float64 over the zoo."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import Case
from test_symmetry_laws import discovered, every_case, outputs, relative
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.scaling.masses import MassTables
from tu_symmetry.symmetry.verification import random_state


def weights(case: Case, seed: int = 3) -> tuple[nn.Module, tus.SymmetryGraph, dict[str, Tensor]]:
    model, graph = discovered(case)
    return model, graph, random_state(model, torch.Generator().manual_seed(seed))


def scale_only(graph: tus.SymmetryGraph, seed: int) -> dict[str, Tensor]:
    draw = tus.random_scale(graph, generator=torch.Generator().manual_seed(seed), std=0.4)
    return {g.name: draw[g.name] for g in graph.scales}


def mass(graph: tus.SymmetryGraph, state: dict[str, Tensor]) -> float:
    return sum(float(state[n].square().sum()) for n in graph.shapes if n not in graph.buffers and n in state)


@every_case
def test_minimal_mass_keeps_the_function_and_is_constant_on_orbits(case: Case) -> None:
    model, graph, state = weights(case)
    form = tus.canonicalize(graph, state)
    inexact = any(not g.exact for g in graph.scales)
    assert relative(outputs(model, state, case.inputs()), outputs(model, form.state, case.inputs())) < (
        1e-3 if inexact else 1e-9
    )
    assert form.mass_after <= form.mass_before * (1 + 1e-12)
    assert form.mass_before == pytest.approx(mass(graph, state), rel=1e-12)
    assert form.mass_after == pytest.approx(mass(graph, form.state), rel=1e-12)
    again = tus.canonicalize(graph, form.state)
    moved = tus.canonicalize(graph, tus.apply_scale(graph, scale_only(graph, 1), state))
    for name, tensor in form.state.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(again.state[name], tensor, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(moved.state[name], tensor, rtol=1e-7, atol=1e-9)
    assert tus.representation_cost(graph, state) == pytest.approx(form.mass_after, rel=1e-12)


@every_case
def test_gradient_and_curvature_match_autograd(case: Case) -> None:
    _, graph, state = weights(case)
    tables = MassTables(graph, state, normalizations=True)
    if tables.count == 0:
        pytest.skip("no scale symmetries")
    point = 0.3 * torch.randn(tables.count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction = torch.randn(tables.count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def total(s: Tensor) -> Tensor:
        """The definition, on scaled weights."""
        padded = torch.cat([s, s.new_zeros(1)])
        mass = torch.zeros((), dtype=torch.float64)
        for name in graph.shapes:
            if name not in graph.buffers and state[name].is_floating_point():
                log_factor = sum((t.exponent * padded[t.index] for t in graph.scale_terms.get(name, ())), 0 * padded[0])
                mass = mass + (state[name] * log_factor.exp()).square().sum()
        return mass

    at = tables.at(point)
    assert at.value == pytest.approx(float(total(point)), rel=1e-12)
    product = torch.autograd.functional.vhp(total, point, direction)[1]
    torch.testing.assert_close(at.gradient(), torch.func.grad(total)(point), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(at.curvature_product(direction), product, rtol=1e-10, atol=1e-11)
    assert bool((at.curvature_diagonal() >= 0).all())


def test_a_hidden_unit_balances_its_sides() -> None:
    """For one hidden layer: lambda = (out / in)^(1/2), so that both sides carry equal mass."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 4, dtype=torch.float64))
    state = random_state(model, torch.Generator().manual_seed(0))
    form = tus.canonicalize(graph, state)
    inside = state["0.weight"].square().sum(1) + state["0.bias"].square()
    outside = state["2.weight"].square().sum(0)
    torch.testing.assert_close(form.log_scale["0"], 0.25 * (outside / inside).log())
    expected = float((2 * (inside * outside).sqrt()).sum() + state["2.bias"].square().sum())
    assert form.mass_after == pytest.approx(expected, rel=1e-12)


def test_a_general_convex_solver_agrees() -> None:
    cvxpy = pytest.importorskip("cvxpy")
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 4, dtype=torch.float64))
    state = random_state(model, torch.Generator().manual_seed(0))
    s = cvxpy.Variable(sum(g.size for g in graph.scales))
    numbers = {"0": range(6), "2": range(6, 11)}
    terms = []
    for row in range(6):
        inside = float(state["0.weight"][row].square().sum() + state["0.bias"][row].square())
        terms.append(inside * cvxpy.exp(2 * s[numbers["0"][row]]))
    for row, column in itertools.product(range(5), range(6)):
        power = s[numbers["2"][row]] - s[numbers["0"][column]]
        terms.append(float(state["2.weight"][row, column].square()) * cvxpy.exp(2 * power))
    for row in range(5):
        terms.append(float(state["2.bias"][row].square()) * cvxpy.exp(2 * s[numbers["2"][row]]))
        terms.append(float(state["4.weight"][:, row].square().sum()) * cvxpy.exp(-2 * s[numbers["2"][row]]))
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(cvxpy.hstack(terms))))
    problem.solve()
    least = problem.value + float(state["4.bias"].square().sum())
    assert tus.representation_cost(graph, state) == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("name", ["mlp_relu", "cnn_flatten", "batchnorm_cnn"])
def test_unit_norm_makes_filters_unit(name: str) -> None:
    from cases import CASES

    case = next(c for c in CASES if c.name == name)
    model, graph, state = weights(case)
    form = tus.canonicalize(graph, state, "unit_norm")
    assert relative(outputs(model, state, case.inputs()), outputs(model, form.state, case.inputs())) < 1e-9
    first = {"mlp_relu": "0.weight", "cnn_flatten": "0.weight", "batchnorm_cnn": "1.weight"}[name]
    norms = form.state[first].flatten(1).norm(dim=1) if form.state[first].ndim > 1 else form.state[first].abs()
    torch.testing.assert_close(norms, torch.ones_like(norms))
    moved = tus.canonicalize(graph, tus.apply_scale(graph, scale_only(graph, 2), state), "unit_norm")
    for key, tensor in form.state.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(moved.state[key], tensor, rtol=1e-9, atol=1e-12)
    if name == "batchnorm_cnn":  # a negative gain stays negative
        assert torch.equal(form.state["1.weight"].sign(), state["1.weight"].sign())


def test_dead_units_are_named_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 4, dtype=torch.float64))
    state = random_state(model, torch.Generator().manual_seed(0))
    state["2.weight"][:, 3] = 0.0
    form = tus.canonicalize(graph, state)
    assert form.degenerate["0"].tolist() == [3]
    assert torch.equal(form.state["0.weight"][3], state["0.weight"][3])
    assert all(torch.isfinite(t).all() for t in form.state.values())


def test_only_the_counted_parameters_are_weighed() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 4, dtype=torch.float64))
    state = random_state(model, torch.Generator().manual_seed(0))
    form = tus.canonicalize(graph, state, parameters=["0.weight", "2.weight"])
    inside, outside = state["0.weight"].square().sum(1), state["2.weight"].square().sum(0)
    torch.testing.assert_close(form.log_scale["0"], 0.25 * (outside / inside).log())
    torch.testing.assert_close(form.state["0.bias"], state["0.bias"] * form.log_scale["0"].exp())
    with pytest.raises(ValueError, match="no parameters"):
        tus.canonicalize(graph, state, parameters=["nope"])


@every_case
def test_networks_that_differ_by_a_symmetry_become_equal(case: Case) -> None:
    model, graph, state = weights(case)
    if any(g.blocks or g.name in {x.parent for x in graph.permutations} for g in graph.permutations):
        pytest.skip("nested groups: sorting blocks is checked on their own below")
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(4))
    twin = tus.apply_scale(graph, scale_only(graph, 5), tus.apply_permutation(graph, p, state))
    one, two = tus.remove_symmetries(graph, state), tus.remove_symmetries(graph, twin)
    for name, tensor in one.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(two[name], tensor, rtol=1e-6, atol=1e-8)
    inexact = any(not g.exact for g in graph.scales)
    change = relative(outputs(model, state, case.inputs()), outputs(model, one, case.inputs()))
    assert change < (1e-3 if inexact else 1e-9)


@pytest.mark.parametrize("name", ["GroupNormNet", "transformer_separate", "transformer_fused"])
def test_heads_and_groups_are_sorted_too(name: str) -> None:
    from cases import CASES

    case = next(c for c in CASES if c.name == name)
    _, graph, state = weights(case)
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(4))
    one = tus.remove_symmetries(graph, state, scale=None)
    two = tus.remove_symmetries(graph, tus.apply_permutation(graph, p, state), scale=None)
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor)


def test_aligning_to_a_reference_instead_of_sorting() -> None:
    from cases import CASES

    case = next(c for c in CASES if c.name == "resnet_batchnorm")
    _, graph, state = weights(case)
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(4))
    moved = tus.apply_scale(graph, scale_only(graph, 5), tus.apply_permutation(graph, p, state))
    found = tus.remove_symmetries(graph, moved, reference=state)
    expected = tus.canonicalize(graph, state).state
    for key, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-8)


def test_profiles_have_their_minimum_at_the_canonical_form() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 4, dtype=torch.float64))
    state = random_state(model, torch.Generator().manual_seed(0))
    factors = torch.linspace(-1, 1, 9, dtype=torch.float64)
    profile = tus.mass_profile(graph, tus.canonicalize(graph, state).state, factors)
    assert int(profile.masses["0"].argmin()) == 4
    raw = tus.mass_profile(graph, state, factors)
    inside = state["0.weight"].square().sum() + state["0.bias"].square().sum()
    outside = state["2.weight"].square().sum()
    expected = inside * (2 * factors).exp() + outside * (-2 * factors).exp() + state["2.bias"].square().sum()
    torch.testing.assert_close(raw.masses["0"], expected)
