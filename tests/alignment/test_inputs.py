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
from tu_symmetry.alignment.barrier import interpolate, loss_barrier, mean_loss
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
    with_gradients = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in cast(moved, second).items()}
    found = tus.weight_matching(graph, cast(state, first), with_gradients, solver=solver)
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


@pytest.mark.parametrize("reference", ["first", "universe"])
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


MODEL = Normed()
A, B, C = states(3)
X = [x for x, _ in batches()]
STACK = {n: torch.stack([t, t]) for n, t in A.items()}
SHAPES = {**B, "5.bias": torch.zeros(4)}
NAN = {**B, "5.bias": B["5.bias"] * math.nan}
REPEATED = {"0": torch.zeros(8, dtype=torch.long)}
WRONG: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda g: tus.align(g, [MODEL, MODEL]), TypeError, r"states\[0\] is a Normed, .* module.state_dict\(\)"),
    (lambda g: tus.weight_matching(g, A, MODEL), TypeError, r"state is a Normed, not a state dict"),
    (lambda g: tus.align(g, [A]), ValueError, "at least two networks"),
    (lambda g: tus.weight_matching(g, A, STACK), tus.SymmetryError, "stack of states"),
    (lambda g: tus.activation_matching(g, MODEL, A, STACK, X), tus.SymmetryError, "stack of states"),
    (lambda g: tus.align(g, {**STACK, "5.bias": A["5.bias"]}), ValueError, "leading sample axis"),
    (lambda g: tus.align(g, [A, NAN]), tus.SymmetryError, r"states\[1\]"),
    (lambda g: tus.align(g, [A, B], match_on="loss"), ValueError, "unknown match_on 'loss'"),
    (lambda g: tus.align(g, [A, B], reference="last"), ValueError, "unknown reference"),
    (lambda g: tus.weight_matching(g, A, B, solver="best"), ValueError, "unknown solver 'best'"),
    (lambda g: tus.weight_matching(g, A, B, init={"0": torch.arange(8)}), ValueError, "barycenter"),
    (lambda g: tus.weight_matching(g, A, B, solver="descent", init=REPEATED), tus.SymmetryError, "missing or repeated"),
    (lambda g: tus.align(g, [A, B], similarity="correlation"), ValueError, "of activation matching"),
    (lambda g: tus.activation_matching(g, MODEL, A, B, X, similarity="cosine"), ValueError, "unknown similarity"),
    (lambda g: tus.align(g, [A, B], match_on="activations"), ValueError, "needs model= and dataloader="),
    (lambda g: tus.align(g, [A, B], match_on="activations", reference="universe"), ValueError, "averages weights"),
    (lambda g: tus.activation_matching(g, MODEL, A, B, []), ValueError, "gave no batch"),
    (lambda g: tus.activation_matching(g, MODEL, A, B, [x * 1e38 for x in X]), ValueError, "activations at"),
    (lambda g: mean_state([]), ValueError, "no network to take a mean of"),
    (lambda g: loss_barrier(MODEL, A, B, [], F.cross_entropy), ValueError, "no batch"),
    (lambda g: loss_barrier(MODEL, A, B, X, F.cross_entropy), ValueError, "batches \\(inputs, targets\\)"),
    (lambda g: loss_barrier(MODEL, A, B, batches(), F.cross_entropy, points=2), ValueError, "at least three points"),
    (
        lambda g: mean_loss(MODEL, A, batches(), each),
        ValueError,
        r"has shape \(8,\), .* the mean over the batch",
    ),
    (lambda g: interpolate(A, SHAPES, 0.5), ValueError, "another architecture"),
    (lambda g: interpolate(A, {}, 0.5), ValueError, "another architecture"),
]


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_cannot_be_used_is_named(case: int, graph: tus.SymmetryGraph) -> None:
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call(graph)
