"""Straight-through matching over signs and rotations: never worse than its start, and the same function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tu_symmetry as tus
from tu_symmetry.alignment import rotation_matching, signed_matching, straight_through_matching
from tu_symmetry.alignment.barrier import mean_loss
from tu_symmetry.alignment.matching import Matching, inner_product, weight_distance
from tu_symmetry.alignment.straight_through import _Orbit
from tu_symmetry.experiments.rebasin import GPT
from tu_symmetry.symmetry.action import linear_tensors, signed_tensors
from tu_symmetry.symmetry.elements import SignedPermutation, random_linear, random_permutation, random_signs
from tu_symmetry.symmetry.graph import SymmetryGraph

KINDS: dict[str, tuple[Any, ...]] = {
    "permuted": ("permutations",),
    "signed": ("permutations", "signs"),
    "rotated": ("permutations", "rotations"),
    "all": ("permutations", "signs", "rotations"),
}


def tokens(count: int = 8) -> Tensor:
    return torch.randint(7, (count, 5), generator=torch.Generator().manual_seed(0))


def network(seed: int) -> GPT:
    torch.manual_seed(seed)
    made = GPT(7, context=5, width=8, layers=1, heads=2).double()
    for tensor in made.parameters():
        torch.nn.init.normal_(tensor)
    return made.eval()


@cache
def case() -> tuple[SymmetryGraph, GPT, tuple[dict[str, Tensor], ...]]:
    """A small language model with the weights of two networks, whose norms are folded."""
    model = network(0)
    graph = tus.discover_symmetries(model, tokens(2))
    graph.require_verified()
    return graph, model, tuple(tus.fold_norms(graph, network(seed).state_dict()) for seed in (0, 1))


def outputs(state: dict[str, Tensor]) -> Tensor:
    return torch.func.functional_call(case()[1], state, (tokens(),))


def moved(found: Matching, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return linear_tensors(case()[0], found.maps, signed_tensors(case()[0], found.element, state))


def by_weights(over: Sequence[str]) -> Matching:
    graph, _, states = case()
    if "rotations" in over:
        return rotation_matching(graph, *states, signs="signs" in over)
    return signed_matching(graph, *states) if "signs" in over else tus.weight_matching(graph, *states)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_no_worse_than_its_start_and_the_function_stays(kind: str) -> None:
    """With these weights the loss falls; what is found computes the same as before it was moved."""
    graph, model, (a, b) = case()
    loader = [(tokens(), tokens().roll(1, 1))]

    def midpoint(found: Matching) -> float:
        return mean_loss(model, tus.mean_state([a, moved(found, b)]), loader, F.cross_entropy)

    kept = [{n: t.clone() for n, t in state.items()} for state in (a, b)]
    options: dict[str, Any] = {"epochs": 8 if "rotations" in KINDS[kind] else 30, "learning_rate": 0.1}
    found = straight_through_matching(graph, model, a, b, loader, F.cross_entropy, over=KINDS[kind], **options)
    start = by_weights(KINDS[kind])
    assert midpoint(found) < midpoint(start) - 0.01
    assert (outputs(moved(found, b)) - outputs(b)).abs().max() < 1e-9
    assert found.distance_after == pytest.approx(weight_distance(graph, a, moved(found, b)))
    assert set(found.permutation) == {g.name for g in graph.permutations}
    assert bool(found.maps) == ("rotations" in KINDS[kind])
    assert all(torch.equal(s[n], k[n]) for s, k in zip((a, b), kept, strict=True) for n in s)


@pytest.mark.parametrize("kind", KINDS)
def test_planted_elements_stay_found(kind: str) -> None:
    """The start is exact; targets are the network's own, so that no step leads away from it."""
    graph, model, (a, _) = case()
    generator = torch.Generator().manual_seed(3)
    signs = random_signs(graph, generator=generator) if "signs" in KINDS[kind] else {}
    planted = signed_tensors(graph, SignedPermutation(random_permutation(graph, generator=generator), signs), a)
    if "rotations" in KINDS[kind]:
        planted = tus.fold_norms(graph, planted)  # of which signs have turned gains
        planted = linear_tensors(graph, random_linear(graph, generator=generator, std=0.0, folded=True), planted)
    loader = [(tokens(), outputs(a).detach())]
    found = straight_through_matching(graph, model, a, planted, loader, F.mse_loss, over=KINDS[kind], epochs=3)
    assert found.distance_before > 1 and found.distance_after < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_projections_follow_the_free_weights(kind: str) -> None:
    """Each brings the moved network no farther from what the free weights are now, and reads them anew."""
    graph, _, (a, b) = case()
    free = {n: t.clone() for n, t in a.items()}
    orbit = _Orbit(graph, KINDS[kind], free, b, by_weights(KINDS[kind]))
    generator = torch.Generator().manual_seed(4)
    gained = []
    for _ in range(4):
        for tensor in free.values():
            tensor += torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        before = inner_product(graph, free, orbit.moved(b))
        orbit.project()
        gained.append(inner_product(graph, free, orbit.moved(b)) - before)
        assert (outputs(orbit.moved(b)) - outputs(b)).abs().max() < 1e-9
    assert min(gained) > -1e-6 and max(gained) > 0.1


def test_scales_are_refused() -> None:
    graph, model, (a, b) = case()
    with pytest.raises(ValueError, match="scales"):
        straight_through_matching(graph, model, a, b, [], F.cross_entropy, over=("permutations", "scales"))  # type: ignore[arg-type, list-item]
