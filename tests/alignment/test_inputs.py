"""What users hand in: networks in several dtypes, as lists and stacks, modules for state dicts, losses that are NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from toy_networks import Normed

import tu_symmetry as tus
from tu_symmetry.alignment.barrier import barrier_matrix, interpolate, loss_barrier, mean_loss
from tu_symmetry.alignment.matching import inner_product
from tu_symmetry.states import mean_state

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def graph() -> tus.SymmetryGraph:
    return tus.discover_symmetries(Normed(), torch.zeros(2, 4))


def cast(state: State, dtype: torch.dtype) -> State:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}


def states(count: int) -> list[State]:
    generator = torch.Generator().manual_seed(0)
    like = Normed().state_dict()
    return [
        {n: torch.randn(t.shape, generator=generator).abs() if t.ndim else t for n, t in like.items()}
        for _ in range(count)
    ]


def batches(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(2)]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("solver", ["frank_wolfe", "descent"])
def test_networks_of_different_dtypes_are_matched(
    graph: tus.SymmetryGraph, solver: Any, first: torch.dtype, second: torch.dtype
) -> None:
    """A planted permutation is found whatever the two dtypes are, and nothing is rounded further than they are."""
    (state,) = states(1)
    element = tus.random_permutation(graph, generator=torch.Generator().manual_seed(1))
    moved = tus.apply_permutation(graph, element, state)
    found = tus.weight_matching(graph, cast(state, first), cast(moved, second), solver=solver)
    if solver == "frank_wolfe":
        assert all(torch.equal(found.permutation[n], p) for n, p in tus.invert(element).items())
        norm = math.sqrt(sum(float(t.square().sum()) for t in state.values() if t.is_floating_point()))
        coarsest = max(torch.finfo(first).eps, torch.finfo(second).eps)
        assert found.distance_after <= coarsest * norm
    again = tus.apply_permutation(graph, found.permutation, cast(moved, second))
    wanted = sum(
        float((cast(state, first)[n].double() * t.double()).sum()) for n, t in again.items() if n not in graph.buffers
    )
    assert found.objective == pytest.approx(wanted, rel=1e-5)
    assert inner_product(graph, cast(state, first), again) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("reference", ["first", "medoid", "mean", "universe"])
def test_an_ensemble_of_mixed_dtypes_is_aligned(graph: tus.SymmetryGraph, reference: Any) -> None:
    (state,) = states(1)
    generator = torch.Generator().manual_seed(2)
    members = [
        cast(tus.apply_permutation(graph, tus.random_permutation(graph, generator=generator), state), dtype)
        for dtype in DTYPES
    ]
    result = tus.align(graph, members, reference=reference)
    assert [s["0.weight"].dtype for s in result.states] == list(DTYPES)
    assert max(result.distances_after) < 0.02 * max(result.distances_before)


def test_states_of_different_dtypes_are_interpolated_and_activations_matched(graph: tus.SymmetryGraph) -> None:
    a, b = states(2)
    middle = interpolate(a, cast(b, torch.float64), 0.25)
    assert all(torch.equal(middle[n], t) for n, t in interpolate(a, b, 0.25).items())
    found = tus.activation_matching(graph, Normed(), a, cast(b, torch.float64), batches())
    assert all(
        torch.equal(p, found.permutation[n])
        for n, p in tus.activation_matching(graph, Normed(), a, b, batches()).permutation.items()
    )


def test_stacks_serve_where_lists_do() -> None:
    members = states(3)
    stack = {n: torch.stack([s[n] for s in members]) for n in members[0]}
    mean = mean_state(stack)
    assert all(torch.equal(t, mean[n]) for n, t in mean_state(members).items())
    one, other = (barrier_matrix(Normed(), s, batches(), F.cross_entropy, points=3) for s in (members, stack))
    torch.testing.assert_close(one, other)
    assert one.shape == (3, 3)


def test_losses_that_are_not_finite_make_no_barrier_of_zero() -> None:
    """``max(0, nan)`` is 0: a network that overflows would look as if it were well connected."""
    a, b = states(2)
    broken = {**b, "5.bias": torch.full_like(b["5.bias"], torch.nan)}
    for first, second in ((a, broken), (broken, a)):
        with pytest.raises(ValueError, match="ends of the path"):
            loss_barrier(Normed(), first, second, batches(), F.cross_entropy, points=3)

    def merge(state: State, ratio: float) -> State:
        return {**state, "5.bias": state["5.bias"] * torch.nan} if ratio == 0.5 else state

    found = loss_barrier(Normed(), a, b, batches(), F.cross_entropy, points=5, merge=merge)
    assert found.barrier == math.inf and found.losses[2] == math.inf
    assert math.isfinite(found.losses[1])


def _wrong(name: str, graph: tus.SymmetryGraph, members: list[State]) -> Callable[[], Any]:
    model, (a, b, _) = Normed(), members
    return {
        "models": lambda: tus.align(graph, [model, Normed()]),
        "a model": lambda: tus.weight_matching(graph, a, model),
        "match_on": lambda: tus.align(graph, members, match_on="straight_through"),
        "option": lambda: tus.align(graph, members, similarity="correlation"),
        "no mean": lambda: mean_state([]),
        "each sample": lambda: mean_loss(model, a, batches(), lambda o, t: F.cross_entropy(o, t, reduction="none")),
        "shapes": lambda: interpolate(a, {**b, "5.bias": torch.zeros(4)}, 0.5),
    }[name]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("models", TypeError, r"states\[0\] is a Normed, not a state dict; .* module.state_dict\(\)"),
        ("a model", TypeError, r"state is a Normed, not a state dict"),
        ("match_on", ValueError, "unknown match_on 'straight_through'"),
        ("option", ValueError, "similarity= is of activation matching"),
        ("no mean", ValueError, "no network to take a mean of"),
        ("each sample", ValueError, r"has shape \(8,\), but it has to be the mean over the batch"),
        ("shapes", ValueError, r"'5.bias', \(3,\), \(4,\)"),
    ],
)
def test_what_cannot_be_used_is_named(
    name: str, error: type[Exception], message: str, graph: tus.SymmetryGraph
) -> None:
    with pytest.raises(error, match=message):
        _wrong(name, graph, states(3))()
