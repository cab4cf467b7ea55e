"""Laws of symmetry removal and of mass profiles."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Case
from torch import nn
from zoo import assert_equal_states, named, outputs, relative, scale_only, small, some_cases, weights

import tu_symmetry as tus
from tu_symmetry.alignment.removal import incoming_member, unit_rows
from tu_symmetry.symmetry.running.weights import random_state


@some_cases
def test_networks_that_differ_by_a_symmetry_become_equal(case: Case) -> None:
    """Permutations, scales and normalizations at once."""
    model, graph, state = weights(case)
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(4))
    draw = tus.random_scale(graph, generator=torch.Generator().manual_seed(5), std=0.4)
    copied = tus.apply_scale(graph, draw, tus.apply_permutation(graph, p, state))
    one, two = (tus.remove_symmetries(graph, s) for s in (state, copied))
    assert_equal_states(one, two, rtol=1e-6)
    change = relative(*(outputs(model, s, case.inputs()) for s in (state, one)))
    assert change < (1e-9 if all(g.exact for g in (*graph.scales, *graph.normalizations)) else 1e-3)


@pytest.mark.parametrize(
    "name", ["cnn_flatten", "resnet_batchnorm", "GroupNormNet", "transformer_fused", "DenseConcat"]
)
def test_units_are_sorted_by_their_largest_weight(name: str) -> None:
    _, graph, state = named(name)
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(4))
    one = tus.remove_symmetries(graph, state, scale=None)
    two = tus.remove_symmetries(graph, tus.apply_permutation(graph, p, state), scale=None)
    assert_equal_states(one, two)
    for group in graph.permutations:
        if group.parent is None and not graph.children(group.name):
            rows = unit_rows(graph, group, incoming_member(graph, group), one)
            key = rows.amax(-1)
            assert torch.equal(key, key.sort(descending=True).values), group.name


def test_ties_are_broken_by_all_other_weights() -> None:
    """Units with the same incoming weights differ in what reads them alone."""
    graph, state = small(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    state["0.weight"][:] = state["0.weight"][0]
    state["0.bias"][:] = 0.5
    one = tus.remove_symmetries(graph, state, scale=None)
    assert torch.equal(one["2.weight"].amax(0), one["2.weight"].amax(0).sort(descending=True).values)
    roll = {"0": torch.tensor([2, 0, 1, 4, 3])}
    assert_equal_states(one, tus.remove_symmetries(graph, tus.apply_permutation(graph, roll, state), scale=None))


def test_stacks_are_treated_sample_by_sample() -> None:
    model, graph, state = named("resnet_batchnorm")
    states = [random_state(model, torch.Generator().manual_seed(seed)) for seed in (3, 4, 5)]
    stack = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    for options in ({}, {"scale": "unit_norm"}, {"reference": states[0]}):
        found = tus.remove_symmetries(graph, stack, **options)  # type: ignore[arg-type]
        for i, state in enumerate(states):
            single = tus.remove_symmetries(graph, state, **options)  # type: ignore[arg-type]
            assert_equal_states({n: t[i] for n, t in found.items()}, single)
    with pytest.raises(ValueError, match="2 sample axes"):
        tus.remove_symmetries(graph, {n: t.unsqueeze(0) for n, t in stack.items()})


def test_aligning_to_a_reference_instead_of_sorting() -> None:
    _, graph, state = named("resnet_batchnorm")
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(4))
    moved = tus.apply_scale(graph, scale_only(graph, 5), tus.apply_permutation(graph, p, state))
    found = tus.remove_symmetries(graph, moved, reference=state)
    assert_equal_states(tus.canonicalize(graph, state, normalizations="unit_norm").state, found, rtol=1e-6)


@pytest.mark.parametrize("name", ["mlp_relu", "resnet_batchnorm", "transformer_fused", "BilinearGate", "CalledTwice"])
def test_profiles_are_the_mass_of_scaled_networks_and_least_at_the_canonical_form(name: str) -> None:
    _, graph, state = named(name)
    factors = [-1.0, -0.3, 0.0, 0.7]
    profile = tus.scaling.mass_profile(graph, state, factors)
    assert profile.masses.keys() == {g.name for g in graph.scales}
    for group in graph.scales:
        elements = [{group.name: torch.full((group.size,), f, dtype=torch.float64)} for f in factors]
        moved = [tus.apply_scale(graph, element, state) for element in elements]
        expected = [sum(float(s[n].square().sum()) for n in graph.shapes if n not in graph.buffers) for s in moved]
        assert profile.masses[group.name].tolist() == pytest.approx(expected, rel=1e-10)
        assert expected[2] == pytest.approx(profile.mass, rel=1e-12)
    least = tus.scaling.mass_profile(graph, tus.canonicalize(graph, state).state, torch.linspace(-1, 1, 9))
    assert all(int(m.argmin()) == 4 for m in least.masses.values())
    assert all(abs(s) < 1e-9 for s in least.minima.values())


def test_profile_of_one_hidden_layer() -> None:
    graph, state = small(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    profile = tus.scaling.mass_profile(graph, state, [0.0, 0.5])
    inside = float(state["0.weight"].square().sum() + state["0.bias"].square().sum())
    outside, rest = float(state["2.weight"].square().sum()), float(state["2.bias"].square().sum())
    expected = [inside * math.exp(2 * s) + outside * math.exp(-2 * s) + rest for s in (0.0, 0.5)]
    assert profile.masses["0"].tolist() == pytest.approx(expected) and profile.mass == pytest.approx(expected[0])
    assert profile.minima["0"] == pytest.approx(0.25 * torch.tensor(outside / inside).log().item(), abs=1e-6)
    dead = tus.scaling.mass_profile(graph, {n: t * (n[0] == "2") for n, t in state.items()}, [0.0])
    assert dead.minima["0"] == math.inf
    with pytest.raises(ValueError, match="one state"):
        tus.scaling.mass_profile(graph, {n: t.unsqueeze(0) for n, t in state.items()}, [0.0])
