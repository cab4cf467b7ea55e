"""Matching over signed permutations: planted elements are found again, and nothing ends farther away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from zoo import llama, named, vit, weights

import tu_symmetry as tus
from tu_symmetry.symmetry.running.weights import random_state

State = dict[str, Tensor]

# A GroupNorm's signs are those of whole blocks, which are turned after these have found their places; in a linear
# attention with ReLU hardly anything speaks for a unit; the others tell their units apart.
PLANTED = [
    case
    for case in CASES
    if case.signs and case.name not in ("GroupNormNet", "BlocksInBlocks", "MultiScaleLinearAttention")
]


def drawn(graph: tus.SymmetryGraph, generator: torch.Generator) -> tus.symmetry.SignedPermutation:
    draws = (tus.random_permutation, tus.random_signs)
    return tus.symmetry.SignedPermutation(*(draw(graph, generator=generator) for draw in draws))


def found_again(graph: tus.SymmetryGraph, model: nn.Module, seed: int, noise: float) -> bool:
    """Whether the network of standard normal weights that was moved comes back from its reference, with noise."""
    generator = torch.Generator().manual_seed(seed)
    reference = {n: standard(t, generator) for n, t in model.state_dict().items()}
    state = {n: t + noise * standard(t, generator) if t.is_floating_point() else t for n, t in reference.items()}
    tied = {n: names[0] for names in graph.aliases.values() for n in names}
    reference, state = ({n: s[tied[n]] for n in s} for s in (reference, state))
    moved = tus.symmetry.apply_signed(graph, drawn(graph, generator), state)
    matching = tus.alignment.signed_matching(graph, reference, moved)
    there = tus.symmetry.apply_signed(graph, matching.element, moved)
    return all(torch.equal(there[n], state[n]) for n in there if n not in graph.buffers)


def standard(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", PLANTED, ids=lambda c: c.name)
def test_planted_elements_are_found(case: Case) -> None:
    model, graph, _ = weights(case)
    found = [found_again(graph, model, seed, noise) for seed in range(3) for noise in (0.0, 0.5)]
    assert sum(found[::2]) == 3 and sum(found[1::2]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("build", [llama, vit])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_planted_elements_of_transformers_are_found(
    build: Callable[[], tuple[nn.Module, Tensor]], noise: float
) -> None:
    model, inputs = build()
    graph = tus.discover_symmetries(model.eval(), inputs)
    assert sum(found_again(graph, model, seed, noise) for seed in range(50)) == 50


def test_signs_bring_networks_closer_than_permutations_do() -> None:
    for name in ("mlp_mixed", "resnet_batchnorm", "TinyLlama", "Recurrent"):
        model, graph, _ = named(name)
        generator = torch.Generator().manual_seed(2)
        a, b = (random_state(model, generator) for _ in range(2))
        plain, signed = tus.weight_matching(graph, a, b), tus.alignment.signed_matching(graph, a, b)
        assert signed.distance_after < plain.distance_after < plain.distance_before
        moved = tus.symmetry.apply_signed(graph, signed.element, b)
        assert signed.objective == pytest.approx(sum(float((a[n] * moved[n]).sum()) for n in trained(graph)))
        again = tus.alignment.signed_matching(graph, a, b, init=plain.element)
        assert again.distance_after <= plain.distance_after


def trained(graph: tus.SymmetryGraph) -> list[str]:
    return [n for n in graph.shapes if n not in graph.buffers]


@pytest.mark.parametrize("reference", ["first", "medoid", "mean", "universe"])
def test_networks_are_aligned_over_signs(reference: str) -> None:
    _, graph, state = named("mlp_mixed")
    generator = torch.Generator().manual_seed(5)
    noisy = [{n: t + 0.05 * standard(t, generator) for n, t in state.items()} for _ in range(4)]
    moved = [tus.symmetry.apply_signed(graph, drawn(graph, generator), one) for one in noisy]
    plain = tus.align(graph, moved, reference=reference)  # type: ignore[arg-type]
    both = tus.align(graph, moved, reference=reference, over=("permutations", "signs"))  # type: ignore[arg-type]
    assert sum(both.distances_after) < 0.5 * sum(plain.distances_after)
    assert len(both.certificates) == 4 and max(both.sign_changes) > 0 and plain.sign_changes == [0] * 4
    for state, aligned, permutation, signs in zip(moved, both.states, both.permutations, both.signs, strict=True):
        again = tus.symmetry.apply_signed(graph, tus.symmetry.SignedPermutation(permutation, signs), state)
        assert all(torch.equal(again[n], aligned[n]) for n in again)


def test_mistakes_are_named() -> None:
    _, graph, state = named("mlp_mixed")
    for over in (("signs",), ("permutations", "scales"), (), "permutations"):
        with pytest.raises(ValueError, match=r"'signs' or 'rotations'"):
            tus.align(graph, [state, state], over=over)
    with pytest.raises(ValueError, match="are matched by weights"):
        tus.align(graph, [state, state], over=("permutations", "signs"), match_on="activations")
