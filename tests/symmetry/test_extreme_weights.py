"""Weights far from one: right where the dtype holds the result, refused with a clear error where it does not.

A rescaling by powers of two is exact, so that all of an orbit's members have one canonical form, mass and matching;
and weights that are multiplied by one number have the same form times that number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.alignment.barrier import interpolate
from tu_symmetry.metrics.functional import representation_costs
from tu_symmetry.metrics.functional.discrepancy import maximum_mean_discrepancy
from tu_symmetry.states import mean_state

State = dict[str, Tensor]
SIZES = (1e30, 1e-30, 1e38, 1e-38, 1e-40, 1e-45)


class Branch(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 6, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), *(Branch() for _ in range(3)), nn.Linear(6, 3))


def deep(layers: int) -> nn.Module:
    hidden = [m for _ in range(layers) for m in (nn.Linear(6, 6, bias=False), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(6, 3))


def convolutions() -> nn.Module:
    pooled = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU())
    return nn.Sequential(pooled, nn.Flatten(), nn.Linear(8 * 9, 3))


NETWORKS = {
    "chain": (lambda: deep(3), (2, 6)),
    "deep": (lambda: deep(12), (2, 6)),
    "convolutions": (convolutions, (2, 3, 12, 12)),
    "residual": (residual, (2, 5)),
}


@functools.cache
def network(name: str) -> tuple[nn.Module, tus.SymmetryGraph]:
    build, shape = NETWORKS[name]
    model = build()
    graph = tus.discover_symmetries(model, torch.randn(shape, generator=torch.Generator().manual_seed(9)))
    graph.require_verified()
    return model, graph


def made(name: str, seed: int = 0) -> tuple[tus.SymmetryGraph, State]:
    """A verified graph and weights that float32 holds, in float64."""
    model, graph = network(name)
    generator = torch.Generator().manual_seed(seed)
    state = {
        n: torch.randn(t.shape, generator=generator).double() * (0.1 if t.ndim == 1 else t[0].numel() ** -0.5)
        for n, t in model.state_dict().items()
    }
    return graph, {n: t.float().double() for n, t in state.items()}


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float) -> None:
    for name, t in wanted.items():
        assert float((found[name].double() - t).norm()) <= rtol * float(t.norm()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_canonical_form_is_that_of_the_orbit_however_far_the_weights_lie(name: str, dtype: torch.dtype) -> None:
    graph, state = made(name)
    state = {n: t.to(dtype).double() for n, t in state.items()}
    generator, log_scale = torch.Generator().manual_seed(1), {}
    for k, g in enumerate(graph.scales):
        powers = torch.randint(-50, 51, (g.size,), generator=generator).double()
        powers = torch.full_like(powers, 110.0 if k % 2 else 0.0) if name == "deep" else powers
        log_scale[g.name] = math.log(2) * powers
    far = {n: t.to(dtype) for n, t in tus.apply_scale(graph, log_scale, state).items()}
    sizes = torch.cat([t.double().abs().flatten() for t in far.values()])
    assert float(sizes.max()) > 1e14 and float(sizes.min()) < 1e-14
    rounding = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-11
    methods: tuple[Any, ...] = ("min_mass", "unit_norm")
    for method in methods:
        wanted, found = tus.canonicalize(graph, state, method=method), tus.canonicalize(graph, far, method=method)
        assert_close(found.state, wanted.state, rounding)
        assert found.mass_after == pytest.approx(wanted.mass_after, rel=1e-9)
        assert {n: t.dtype for n, t in found.state.items()} == dict.fromkeys(state, dtype)
    assert tus.representation_cost(graph, far) == pytest.approx(tus.representation_cost(graph, state), rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["chain", "residual"])
def test_masses_of_extreme_weights_are_those_of_ordinary_ones(name: str, size: float) -> None:
    graph, state = made(name)
    far = {n: (t * size).float() for n, t in state.items()}
    exact = {n: t.double() / size for n, t in far.items()}  # what rounding left of them
    cost = tus.representation_cost(graph, far)
    assert cost / size == pytest.approx(tus.representation_cost(graph, exact) * size, rel=1e-9)
    costs = representation_costs(graph, far)
    assert bool(torch.isfinite(costs.ratio).all()) and float(costs.minimal_mass[0]) == cost
    profile = tus.scaling.mass_profile(graph, far, [-1.0, 0.0, 1.0])
    assert all(float(m[1]) == pytest.approx(profile.mass, rel=1e-9) for m in profile.masses.values())
    assert size == 1e-45 or all(math.isfinite(value) for value in profile.minima.values())  # else all may be zero
    zeros = {n: torch.zeros_like(t) for n, t in state.items()}
    assert representation_costs(graph, zeros).ratio.tolist() == [1.0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", ["min_mass", "unit_norm"])
def test_what_the_dtype_does_not_hold_is_refused_and_never_infinite(method: Any, size: float) -> None:
    graph, state = made("chain")
    far = {n: (t * size).float() for n, t in state.items()}
    wide = tus.canonicalize(graph, {n: t.double() for n, t in far.items()}, method=method)  # float64 holds all of them
    largest = max(float(t.abs().max()) for t in wide.state.values())
    least = min(float(t.abs().max()) for t in wide.state.values() if t.any())
    if largest < 1e38 and least > 1e-37:
        assert_close(tus.canonicalize(graph, far, method=method).state, wide.state, 1e-6)
    elif largest > 3.5e38 or least < 1e-46:
        with pytest.raises(tus.SymmetryError, match=r"range of torch.float32 .* wider dtype"):
            tus.canonicalize(graph, far, method=method)


def test_rescaling_rounds_once_and_refuses_what_it_cannot_hold() -> None:
    """Against exact fractions: factors of powers of two, whose own float32 value overflows."""
    graph, state = made("chain")
    (group, *_) = graph.scales
    state = {n: t.float() for n, t in state.items()}
    for power in (100, -100, 140, -140):  # 2 ** 140 is no float32
        element = {group.name: torch.full((group.size,), power * math.log(2), dtype=torch.float64)}
        half = 2.0 ** (power // 2)
        back = {**state, "0.weight": state["0.weight"] / half, "2.weight": state["2.weight"] * half}
        moved = tus.apply_scale(graph, element, back)
        for name, sign in (("0.weight", 1), ("2.weight", -1)):
            wanted = Fraction(float(back[name][0, 0])) * Fraction(2) ** (sign * power)
            assert float(moved[name][0, 0]) == pytest.approx(float(wanted), rel=2e-7)
        with pytest.raises(tus.SymmetryError, match=r"'(0|2).weight' would (leave|fall below) the range"):
            tus.apply_scale(graph, {group.name: 2 * element[group.name]}, state)
    assert tus.apply_scale(graph, {group.name: torch.full((group.size,), 30.0).double()}, state)


def test_squares_that_double_precision_does_not_hold_are_refused() -> None:
    graph, state = made("chain")
    for size in (1e200, 1e-200):
        far = {n: t * size for n, t in state.items()}
        for call in (tus.canonicalize, tus.remove_symmetries):
            with pytest.raises(tus.SymmetryError, match="squares leave the range of float64"):
                call(graph, far)
    costs = [tus.representation_cost(graph, {**state, "6.bias": state["6.bias"] * c}) for c in (0, 1e-200)]
    assert costs[0] == pytest.approx(costs[1])  # weight decay on what nothing trains


@pytest.mark.parametrize("sizes", [(1e30, 1e30), (1e-40, 1e-40), (1e30, 1e-40), (1e37, 1.0)])
def test_a_planted_permutation_is_found_whatever_the_size_of_the_weights(sizes: tuple[float, float]) -> None:
    graph, state = made("chain")
    element = tus.random_permutation(graph, generator=torch.Generator().manual_seed(2))
    moved = tus.apply_permutation(graph, tus.invert(element), state)
    first, second = ({n: (t * c).float() for n, t in s.items()} for s, c in zip((state, moved), sizes, strict=True))
    for solver in ("frank_wolfe", "descent"):
        found = tus.weight_matching(graph, first, second, solver=solver)  # type: ignore[arg-type]
        ordinary = tus.weight_matching(graph, state, moved, solver=solver)  # type: ignore[arg-type]
        assert all(torch.equal(p, ordinary.permutation[n]) for n, p in found.permutation.items())
        assert found.objective / sizes[0] == pytest.approx(ordinary.objective * sizes[1], rel=1e-4)
        if sizes[0] == sizes[1]:
            assert found.distance_before / sizes[0] == pytest.approx(ordinary.distance_before, rel=1e-4)


@pytest.mark.parametrize("reference", ["first", "medoid", "mean", "universe"])
@pytest.mark.parametrize("size", [3e37, 1e-40])
def test_ensembles_of_extreme_weights_are_aligned_as_ordinary_ones(reference: Any, size: float) -> None:
    graph, state = made("chain")
    generator = torch.Generator().manual_seed(4)
    elements = [tus.random_permutation(graph, generator=generator) for _ in range(3)]
    members = [tus.apply_permutation(graph, p, state) for p in elements]
    far = [{n: (t * size).float() for n, t in m.items()} for m in members]
    result = tus.align(graph, far, reference=reference)
    wanted = tus.align(graph, members, reference=reference)
    assert [d / size for d in result.distances_before] == pytest.approx(wanted.distances_before, rel=1e-3, abs=1e-5)
    assert max(result.distances_after) < 1e-3 * max(result.distances_before)
    assert all(bool(torch.isfinite(t).all()) for s in result.states for t in s.values())


@pytest.mark.parametrize("size", [1e30, 3e37])
def test_discrepancies_do_not_depend_on_the_scale(size: float) -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(12, 7, generator=generator) * 100 + shift for shift in (0, 200))  # above the floors
    wanted = maximum_mean_discrepancy(x.double(), y.double())
    far = [(samples.double() * (size / 100)).float() for samples in (x, y)]
    found = maximum_mean_discrepancy(*far)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert float(wanted) > 0.01
    tiny = [(samples.double() * 1e-42).float() for samples in (x, y)]
    assert float(maximum_mean_discrepancy(*tiny)) == 0  # below the floors


def test_means_and_paths_of_extreme_weights_stay_in_range() -> None:
    a = {"w": torch.tensor([3e38, -3e38, 1.0])}
    b = {"w": torch.tensor([-3e38, -3e38, 3.0])}
    assert interpolate(a, b, 0.25)["w"].tolist() == pytest.approx([1.5e38, -3e38, 1.5], rel=1e-6)
    assert interpolate(a, b, 0.75)["w"].tolist() == pytest.approx([-1.5e38, -3e38, 2.5], rel=1e-6)
    assert mean_state([a, a, b])["w"].tolist() == pytest.approx([1e38, -3e38, 5 / 3], rel=1e-6)
    c, d = {"w": torch.tensor([1 + 2j])}, {"w": torch.tensor([3 - 2j])}
    assert interpolate(c, d, 0.5)["w"].tolist() == mean_state([c, d])["w"].tolist() == [2 + 0j]
