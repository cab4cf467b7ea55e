"""Laws of canonical scales, in float64 over the zoo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from zoo import Net, assert_equal_states, named, outputs, relative, scale_only, small, some_cases, weights

import tu_symmetry as tus
from tu_symmetry.symmetry.running.weights import random_state


def mass(graph: tus.SymmetryGraph, state: Mapping[str, Tensor]) -> float:
    return sum(float(state[n].square().sum()) for n in graph.shapes if n not in graph.buffers and n in state)


def change(case: Case, model: nn.Module, state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return relative(*(outputs(model, s, case.inputs()) for s in (state, other)))


@some_cases
def test_minimal_mass_keeps_the_function_and_is_constant_on_orbits(case: Case) -> None:
    model, graph, state = weights(case)
    form = tus.canonicalize(graph, state)
    assert change(case, model, state, form.state) < (1e-9 if all(g.exact for g in graph.scales) else 1e-3)
    assert form.mass_after <= form.mass_before * (1 + 1e-12)
    assert form.mass_before == pytest.approx(mass(graph, state), rel=1e-12)
    assert form.mass_after == pytest.approx(mass(graph, form.state), rel=1e-12)
    assert 0 <= form.relative_gap <= 1e-12 and not form.degenerate
    assert_equal_states(form.state, tus.apply_scale(graph, form.log_scale, state))
    assert_equal_states(form.state, tus.canonicalize(graph, form.state).state)
    assert_equal_states(form.state, tus.canonicalize(graph, tus.apply_scale(graph, scale_only(graph, 1), state)).state)
    assert tus.representation_cost(graph, state) == pytest.approx(form.mass_after, rel=1e-12)


@some_cases
def test_canonical_scale_commutes_with_permutations(case: Case) -> None:
    _, graph, state = weights(case)
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(5))
    choices: tuple[Any, ...] = ({}, {"normalizations": "unit_norm"}, {"method": "unit_norm"})
    for options in choices:
        one = tus.canonicalize(graph, tus.apply_permutation(graph, p, state), **options).state
        other = tus.apply_permutation(graph, p, tus.canonicalize(graph, state, **options).state)
        assert_equal_states(one, other)


@some_cases
def test_unit_norm_keeps_the_function_and_is_constant_on_orbits(case: Case) -> None:
    model, graph, state = weights(case)
    form = tus.canonicalize(graph, state, method="unit_norm")
    assert change(case, model, state, form.state) < (1e-9 if all(g.exact for g in graph.scales) else 1e-3)
    assert math.isnan(form.relative_gap) and not form.degenerate
    for moved in (form.state, tus.apply_scale(graph, scale_only(graph, 2), state)):
        assert_equal_states(form.state, tus.canonicalize(graph, moved, method="unit_norm").state, rtol=1e-9)


def factors_of(graph: tus.SymmetryGraph, group: tus.symmetry.NormalizationGroup) -> dict[str, Tensor]:
    """For each parameter of a group the number of the factor of every entry, -1 for none."""
    start = sum(g.size for g in (*graph.scales, *graph.normalizations[: graph.normalizations.index(group)]))
    found = {}
    for name in group.parameters:
        found[name] = torch.full(graph.shapes[name], -1)
        for term in graph.scale_terms[name]:
            own = (term.index >= start) & (term.index < start + group.size)
            found[name] = torch.where(own, term.index - start, found[name])
    return found


def filters_of(graph: tus.SymmetryGraph, group: tus.symmetry.NormalizationGroup) -> float:
    """Filters that each factor of a group multiplies, or entries where it multiplies vectors alone."""
    first = [number == 0 for number in factors_of(graph, group).values()]
    filters = sum(int(own.flatten(1).any(1).sum()) for own in first if own.ndim > 1)
    return float(filters or sum(int(own.sum()) for own in first))


@pytest.mark.parametrize("case", [c for c in CASES if c.normalizations], ids=lambda c: c.name)
@pytest.mark.parametrize("method", ["min_mass", "unit_norm"])
def test_fixed_normalizations_make_the_form_constant_on_whole_orbits(case: Case, method: Any) -> None:
    model, graph, state = weights(case)
    form = tus.canonicalize(graph, state, method=method, normalizations="unit_norm")
    assert not form.degenerate
    exact = all(g.exact for g in (*graph.scales, *graph.normalizations))
    assert change(case, model, state, form.state) < (1e-9 if exact else 1e-3)
    draw = tus.random_scale(graph, generator=torch.Generator().manual_seed(8), std=0.4)
    moved = tus.apply_scale(graph, draw, state)
    again = tus.canonicalize(graph, moved, method=method, normalizations="unit_norm")
    assert_equal_states(form.state, again.state)
    for group in graph.normalizations:
        total = torch.zeros(group.size, dtype=torch.float64)
        for name, number in factors_of(graph, group).items():
            if method == "min_mass" or number.ndim > 1:
                held = number >= 0
                total.index_add_(0, number[held], form.state[name].square()[held])
        if method == "min_mass" or all(m.axis == 0 for m in group.members):
            torch.testing.assert_close(total, torch.full_like(total, filters_of(graph, group)))


def test_a_hidden_unit_balances_its_sides() -> None:
    """For one hidden layer: lambda = (out / in)^(1/2), so that both sides carry equal mass."""
    graph, state = small(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    form = tus.canonicalize(graph, state)
    inside = state["0.weight"].square().sum(1) + state["0.bias"].square()
    outside = state["2.weight"].square().sum(0)
    torch.testing.assert_close(form.log_scale["0"], 0.25 * (outside / inside).log())
    expected = float((2 * (inside * outside).sqrt()).sum() + state["2.bias"].square().sum())
    assert form.mass_after == pytest.approx(expected, rel=1e-12)


def with_cvxpy(graph: tus.SymmetryGraph, state: Mapping[str, Tensor], linear: Tensor | None = None) -> float:
    """The least of the mass minus ``2 linear . s``, straight from the definition, by a general convex solver."""
    cvxpy = pytest.importorskip("cvxpy")
    count = sum(g.size for g in graph.scales) if linear is None else len(linear)
    s = cvxpy.Variable(count)
    masses: dict[tuple[tuple[int, float], ...], float] = {}
    for name in graph.shapes:
        if name in graph.buffers:
            continue
        flat = state[name].square().flatten().tolist()
        powers: list[dict[int, float]] = [{} for _ in flat]
        for term in graph.scale_terms.get(name, ()):
            for power, i in zip(powers, term.index.expand(state[name].shape).flatten().tolist(), strict=True):
                if 0 <= i < count:
                    power[i] = power.get(i, 0.0) + term.exponent
        for m, power in zip(flat, powers, strict=True):
            key = tuple(sorted(power.items()))
            masses[key] = masses.get(key, 0.0) + m
    terms = [m * cvxpy.exp(2 * sum(c * s[i] for i, c in key)) for key, m in masses.items() if key]
    objective = cvxpy.sum(cvxpy.hstack(terms)) + masses.get((), 0.0)
    if linear is not None:
        objective = objective - 2 * (linear.numpy() @ s)
    return float(cvxpy.Problem(cvxpy.Minimize(objective)).solve())


@pytest.mark.parametrize("name", ["mlp_relu", "resnet_batchnorm", "GroupedConv", "BilinearGate", "CalledTwice"])
def test_a_general_convex_solver_agrees(name: str) -> None:
    _, graph, state = named(name)
    assert tus.representation_cost(graph, state) == pytest.approx(with_cvxpy(graph, state), rel=1e-6)


def test_a_general_convex_solver_agrees_on_fixed_normalizations() -> None:
    _, graph, state = named("batchnorm_cnn")
    linear = torch.tensor([0.0] * 9 + [1.0] * 9, dtype=torch.float64)
    form = tus.canonicalize(graph, state, normalizations="unit_norm")
    s = torch.cat([form.log_scale[g.name] for g in (*graph.scales, *graph.normalizations)])
    assert form.mass_after - 2 * float(linear @ s) == pytest.approx(with_cvxpy(graph, state, linear), rel=1e-6)


@pytest.mark.parametrize("name", ["mlp_relu", "resnet_frn", "transformer_separate", "unet_concat"])
def test_the_gap_bounds_the_distance_to_the_minimum(name: str) -> None:
    _, graph, state = named(name)
    least = tus.representation_cost(graph, state)
    rough = tus.canonicalize(graph, state, tolerance=3e-2)
    assert 0 < (rough.mass_after - least) / rough.mass_after <= rough.relative_gap < 0.1


@pytest.mark.parametrize("name", ["mlp_relu", "cnn_flatten"])
def test_unit_norm_by_hand(name: str) -> None:
    _, graph, state = named(name)
    rows = tus.canonicalize(graph, state, method="unit_norm").state["0.weight"].flatten(1)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)).double())


def dead_units() -> tuple[tus.SymmetryGraph, dict[str, Tensor]]:
    """Unit 3 is read by nothing, unit 1 hears nothing, unit 4 neither."""
    graph, state = small(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    state["2.weight"][:, [3, 4]] = 0.0
    state["0.weight"][[1, 4]] = 0.0
    state["0.bias"][[1, 4]] = 0.0
    return graph, state


def test_dead_units_are_named_and_left_alone_or_fixed_by_unit_norm() -> None:
    graph, state = dead_units()
    form = tus.canonicalize(graph, state)
    assert {n: d.tolist() for n, d in form.degenerate.items()} == {"0": [1, 3, 4]}
    assert torch.equal(form.log_scale["0"][[1, 3, 4]], torch.zeros(3).double()) and form.mass_after < form.mass_before
    assert all(bool(torch.isfinite(t).all()) for t in form.state.values())
    form = tus.canonicalize(graph, state, degenerate="unit_norm")
    assert form.degenerate["0"].tolist() == [1, 3, 4]
    incoming = form.state["0.weight"][3].square().sum() + form.state["0.bias"][3].square()
    assert float(incoming) == pytest.approx(1.0)
    assert float(form.state["2.weight"][:, 1].square().sum()) == pytest.approx(1.0)
    assert form.log_scale["0"][4] == 0.0
    moved = tus.apply_scale(graph, scale_only(graph, 2), state)
    assert_equal_states(form.state, tus.canonicalize(graph, moved, degenerate="unit_norm").state)
    unit = tus.canonicalize(graph, state, method="unit_norm")  # nothing makes unit 1 and 4
    assert unit.degenerate["0"].tolist() == [1, 4]


def test_a_unit_that_feeds_only_dead_units_keeps_its_balance() -> None:
    graph, state = small(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3))
    state["2.weight"][0, 1], state["4.weight"][:, 1] = 0.0, 0.0  # 1 -> 1 -> nothing
    form = tus.canonicalize(graph, state)
    assert {n: d.tolist() for n, d in form.degenerate.items()} == {"2": [1]}
    row = form.state["0.weight"][1].square().sum() + form.state["0.bias"][1].square()
    torch.testing.assert_close(row, form.state["2.weight"][1, 1].square())


def test_dead_cycles_are_found() -> None:
    """Each of the two factors has mass on both sides, yet together they scale the head's weights away.

    Unit 0 of the stream hears nothing from outside of unit 0 of the branch.
    """

    def stream(self: Any, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(x + self.down(torch.relu(self.up(x))))

    layers = {"stem": nn.Linear(3, 2, bias=False), "head": nn.Linear(2, 3)}
    branch = {name: nn.Linear(2, 2, bias=False) for name in ("up", "down")}
    model = Net(stream, **layers, **branch).double().eval()
    graph = tus.discover_symmetries(model, torch.randn(2, 3, dtype=torch.float64))
    state = random_state(model, torch.Generator().manual_seed(0))
    state["stem.weight"][0] = 0.0
    state["up.weight"] *= torch.eye(2).double()
    state["down.weight"] *= torch.eye(2).double()
    for convention in ("leave", "unit_norm"):
        form = tus.canonicalize(graph, state, degenerate=convention)
        assert sorted((n, d.tolist()) for n, d in form.degenerate.items()) == [("stem", [0]), ("up", [0])]
        assert (form.state["head.weight"] == state["head.weight"]).all(0).tolist() == [True, False]


def test_nothing_but_zeros() -> None:
    graph, state = dead_units()
    zeros = {n: torch.zeros_like(t) for n, t in state.items()}
    for method in ("min_mass", "unit_norm"):
        form = tus.canonicalize(graph, zeros, method=method, degenerate="unit_norm", normalizations="unit_norm")
        assert form.mass_after == 0.0 and all(len(d) == graph[n].size for n, d in form.degenerate.items())
        assert len(form.degenerate) == 2 and all(bool(torch.isfinite(t).all()) for t in form.state.values())


def test_only_the_counted_parameters_are_weighed() -> None:
    graph, state = small(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    form = tus.canonicalize(graph, state, parameters=["0.weight", "2.weight"])
    inside, outside = state["0.weight"].square().sum(1), state["2.weight"].square().sum(0)
    torch.testing.assert_close(form.log_scale["0"], 0.25 * (outside / inside).log())
    torch.testing.assert_close(form.state["0.bias"], state["0.bias"] * form.log_scale["0"].exp())
    assert form.mass_before == pytest.approx(float(inside.sum() + outside.sum()))
    for same in ("*.weight", ["0.w*", "2.weight"]):
        assert_equal_states(form.state, tus.canonicalize(graph, state, parameters=same).state)
    with pytest.raises(ValueError, match="no parameters 'nope'"):
        tus.canonicalize(graph, state, parameters=["nope"])
    _, tied, shared = named("TinyLlama")  # counts once under either of its names
    masses = [tus.canonicalize(tied, shared, parameters=[n]).mass_before for n in ("head.weight", "embed.weight")]
    assert masses == pytest.approx(2 * [float(shared["embed.weight"].square().sum())])


def test_wrong_arguments() -> None:
    graph, state = small(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"method": "least"}, "method must be 'min_mass' or 'unit_norm'"),
        ({"normalizations": "fold"}, "normalizations must be 'leave' or 'unit_norm'"),
        ({"state": {n: t.unsqueeze(0) for n, t in state.items()}}, "one state"),
    )
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            tus.canonicalize(graph, **{"state": state, **options})
    with pytest.raises(tus.SymmetryError, match="NaN"):
        tus.canonicalize(graph, state | {"0.bias": state["0.bias"] * math.nan})
    with pytest.raises(RuntimeError, match="did not reach its minimum"):
        tus.canonicalize(graph, state, tolerance=1e-30)
