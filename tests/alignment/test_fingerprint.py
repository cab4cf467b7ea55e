"""Fingerprints: the same on an orbit, others beside it, and what they say that they do not tell apart."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from torch import Tensor, nn
from zoo import llama, named, small, some_cases, weights

import tu_symmetry as tus
from tu_symmetry.alignment.fingerprint import least_form
from tu_symmetry.symmetry.running.weights import random_state

State = dict[str, Tensor]


def moved(graph: tus.SymmetryGraph, state: State, seed: int = 5) -> State:
    """By random elements of all kinds, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    state = tus.symmetry.apply_linear(graph, tus.symmetry.random_linear(graph, generator=generator), state)
    state = tus.apply_scale(graph, tus.random_scale(graph, generator=generator, std=0.4), state)
    state = tus.apply_permutation(graph, tus.random_permutation(graph, generator=generator), state)
    return tus.apply_signs(graph, tus.random_signs(graph, generator=generator), state)


def perturbed(graph: tus.SymmetryGraph, state: State, seed: int, size: float = 1e-3) -> State:
    """With one weight changed, of a tensor of many entries: the sole one before a normalization is in the orbit."""
    generator = torch.Generator().manual_seed(seed)
    largest = sorted((n for n in graph.shapes if n not in graph.buffers), key=lambda n: state[n].numel())[-2:]
    name = largest[seed % len(largest)]
    other = {n: t.clone() for n, t in state.items()}
    at = int(torch.randint(other[name].numel(), (1,), generator=generator))
    for alias in graph.aliases[name]:
        other[alias] = other[name]
    other[name].view(-1)[at] += size
    return other


@some_cases
def test_an_orbit_has_one_fingerprint_and_other_weights_have_others(case: Case) -> None:
    _, graph, state = weights(case)
    own = tus.fingerprint(graph, state)
    same = own.distance(tus.fingerprint(graph, moved(graph, state)))
    other = own.distance(tus.fingerprint(graph, perturbed(graph, state, 1)))
    assert same < 1e-8 < 1e-7 < other, (same, other)


@pytest.mark.slow
def test_a_decoder_whose_stream_was_rotated_keeps_its_fingerprint() -> None:
    model, tokens = llama()
    model = model.double().eval()
    graph = tus.discover_symmetries(model, tokens)
    state = tus.fold_norms(graph, random_state(model, torch.Generator().manual_seed(1)))
    maps = tus.symmetry.random_linear(graph, generator=torch.Generator().manual_seed(2), folded=True)
    assert any(g.subgroup == "orthogonal" and g.name in maps for g in graph.linears)
    own = tus.fingerprint(graph, state)
    turned = tus.symmetry.apply_linear(graph, maps, state)
    assert own.matches(tus.fingerprint(graph, moved(graph, turned)))
    assert not own.matches(tus.fingerprint(graph, perturbed(graph, turned, 0)))


@pytest.mark.parametrize("name", ["mlp_relu", "batchnorm_cnn"])
def test_the_distance_grows_with_the_change(name: str) -> None:
    _, graph, state = named(name)
    own = tus.fingerprint(graph, state)
    found = [own.distance(tus.fingerprint(graph, perturbed(graph, state, 0, size))) for size in (0.0, 1e-6, 1e-4, 1e-2)]
    assert found[0] == 0.0 and 30 < found[2] / found[1] < 300 and 30 < found[3] / found[2] < 300


def test_the_numbers_are_norms_of_the_least_form_and_outputs() -> None:
    graph, state = small(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    found, least = tus.fingerprint(graph, moved(graph, state)), least_form(graph, state)[0]
    for name in ("0.weight", "2.weight"):
        rows, columns = (least[name].square().sum(k).sqrt().sort().values for k in (1, 0))
        expected = torch.cat([least[name].norm().reshape(1), rows, columns])
        torch.testing.assert_close(found.invariants[name], expected, rtol=1e-9, atol=0)
    assert graph.probe is not None
    hidden = torch.relu(graph.probe.args[0] @ state["0.weight"].T + state["0.bias"])
    torch.testing.assert_close(found.outputs["outputs 0"], (hidden @ state["2.weight"].T + state["2.bias"]).flatten())


def test_matrices_leave_singular_values() -> None:
    graph, state = small(nn.Linear(4, 3), nn.Linear(3, 5))
    found = tus.fingerprint(graph, state).invariants["1.weight"]
    generator = torch.Generator().manual_seed(0)
    mixed = tus.symmetry.apply_linear(graph, tus.symmetry.random_linear(graph, generator=generator, std=1.0), state)
    torch.testing.assert_close(tus.fingerprint(graph, mixed).invariants["1.weight"], found, rtol=1e-8, atol=0)
    assert len(found) == 1 + 3 + 3


def test_what_the_example_does_not_reach_is_told_by_the_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    graph = tus.discover_symmetries(model, torch.tensor([[1, 2, 3]]))
    state = random_state(model, torch.Generator().manual_seed(0))
    other = {n: t.clone() for n, t in state.items()}
    other["0.weight"][7, 2] += 1e-3
    differences = tus.fingerprint(graph, state).differences(tus.fingerprint(graph, other))
    assert differences["outputs 0"] == 0.0 < 1e-6 < differences["weights of 0.weight"]


def test_complex_weights_and_outputs_are_told() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ self.a.T).sum(-1)

    torch.manual_seed(0)
    model = Waves()
    graph, state = tus.discover_symmetries(model, torch.randn(2, 4).double()), dict(model.state_dict())
    found = tus.fingerprint(graph, state)
    assert found.matches(tus.fingerprint(graph, moved(graph, state)))
    turned, longer = ({"a": state["a"] * factor} for factor in (1j, 1.1))
    differences = found.differences(tus.fingerprint(graph, turned))
    assert differences["weights of a"] < 1e-12 < 0.1 < differences["outputs 0"]
    assert found.differences(tus.fingerprint(graph, longer))["weights of a"] > 0.05


def test_what_keeps_norms_is_told_by_the_outputs() -> None:
    """Two units that are swapped in one layer and not in the next: all norms stay, and the function does not."""
    graph, state = small(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    other = state | {"0.weight": state["0.weight"][[1, 0, 2, 3, 4, 5]]}
    differences = tus.fingerprint(graph, state).differences(tus.fingerprint(graph, other))
    assert max(differences[n] for n in differences if n.startswith("weights")) < 1e-12 < differences["outputs 0"]


def test_units_without_a_least_form_are_left_out() -> None:
    """A dead unit, and four units that matrices mix and three outputs read."""
    graph, state = small(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    dead = state | {"2.weight": state["2.weight"] * torch.tensor([0.0, 1, 1, 1, 1, 1])}
    found = tus.fingerprint(graph, dead)
    assert {*found.left_out} == {"0.weight", "0.bias", "2.weight"} and {*found.invariants} == {"2.bias"}
    assert found.matches(tus.fingerprint(graph, moved(graph, dead)))
    graph, state = small(nn.Linear(5, 4), nn.Linear(4, 3), inputs=(2, 5))
    found = tus.fingerprint(graph, state)
    assert "1.weight" in found.left_out and found.matches(tus.fingerprint(graph, moved(graph, state)))
    assert not found.matches(tus.fingerprint(graph, perturbed(graph, state, 0)))


def test_single_precision_has_the_tolerance_of_its_rounding() -> None:
    _, graph, state = named("mlp_relu")
    rounded = {n: t.float() for n, t in state.items()}
    own, other = tus.fingerprint(graph, rounded), tus.fingerprint(graph, moved(graph, rounded))
    assert own.matches(other) and not own.matches(other, tolerance=1e-12)
    assert own.tolerance > 1e-6 > tus.fingerprint(graph, state).tolerance
    assert len(repr(own)) < 200


def test_refusals() -> None:
    _, graph, state = named("mlp_relu")
    with pytest.raises(tus.SymmetryError, match="take both with one graph"):
        tus.fingerprint(graph, state).distance(tus.fingerprint(*small(nn.Linear(4, 6))))
    with pytest.raises(ValueError, match="this is a stack"):
        tus.fingerprint(graph, {n: torch.stack([t, t]) for n, t in state.items()})
    with pytest.raises(tus.SymmetryError, match="NaN"):
        tus.fingerprint(graph, state | {"0.weight": state["0.weight"] * torch.nan})
