"""Task vectors and adapters go where the element goes that aligns their base, and change nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from zoo import llama, outputs, relative, scale_only, some_cases, weights

import tu_symmetry as tus
from tu_symmetry.alignment.moves import move_tensors, undo_tensors
from tu_symmetry.alignment.over import compared
from tu_symmetry.symmetry import SignedPermutation, apply_linear, apply_signed, random_linear
from tu_symmetry.symmetry.running.weights import random_state

State = dict[str, Tensor]


def near(state: State, seed: int, size: float = 0.2) -> State:
    """A network beside another one: running variances stay positive, counters stay."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        found[name] = tensor
        if name.endswith("running_var"):
            found[name] = tensor * (size * noise).exp()
        elif tensor.is_floating_point():
            found[name] = tensor + size * (tensor.std() if tensor.numel() > 1 else 1.0) * noise
    return found


def close(a: State, b: State, rtol: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def tied(graph: tus.SymmetryGraph, state: State) -> State:
    return {n: state[names[0]] for names in graph.aliases.values() for n in names}


@some_cases
def test_a_task_vector_follows_a_planted_permutation(case: Case) -> None:
    """It is the fine-tuned network, moved; through a third base it is the same; without a task it is the base."""
    _, graph, base = weights(case, 4)
    base = tied(graph, base)
    tuned = tied(graph, near(base, 5)) | {n: base[n] for n in graph.constants}
    generator = torch.Generator().manual_seed(6)
    bases, goals = [], []
    for _ in range(2):
        p = tus.random_permutation(graph, generator=generator)
        bases.append(tus.apply_permutation(graph, p, base))
        goals.append(tus.apply_permutation(graph, p, tuned))
    found = [tus.transport(graph, base, tuned, new) for new in bases]
    close(found[0].state, goals[0])
    assert found[0].certificates and all(one.holds for one in found[0].certificates)
    over = tus.transport(graph, bases[0], found[0].state, bases[1])
    close(over.state, goals[1])
    nothing = tus.transport(graph, base, base, bases[0])
    assert all(torch.equal(t, bases[0][n]) for n, t in nothing.state.items()) and nothing.task_norm == 0


def test_weights_scale_the_task_vector_and_running_variances_stay_positive() -> None:
    _, graph, base = batchnorm()
    tuned, other = near(base, 1), near(base, 2, 3.0)
    found = {w: tus.transport(graph, base, tuned, other, weight=w) for w in (0.0, 0.5, 1.0, -2.0)}
    close(found[0.0].state, other)
    half, full = found[0.5].state, found[1.0].state
    for name, tensor in other.items():
        if name.endswith("running_var"):
            torch.testing.assert_close(half[name] ** 2, tensor * full[name])
            assert all(bool((one.state[name] > 0).all()) for one in found.values())
        elif tensor.is_floating_point():
            torch.testing.assert_close(half[name], (tensor + full[name]) / 2)
        else:
            assert torch.equal(full[name], tensor)
    moved = tus.apply_permutation(graph, found[1.0].move.permutation, base)
    parameters = [n for n in base if n not in graph.buffers]
    goal = sum((found[1.0].state[n] - other[n]).square().sum() for n in parameters) ** 0.5
    assert found[1.0].task_norm == pytest.approx(float(goal))
    apart = sum((moved[n] - other[n]).square().sum() for n in parameters) ** 0.5
    assert found[1.0].distance_after == pytest.approx(float(apart))


def batchnorm() -> tuple[nn.Module, tus.SymmetryGraph, State]:
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)
    )
    model = model.double().eval()
    graph = tus.discover_symmetries(model, torch.randn(3, 5, dtype=torch.float64))
    return model, graph, random_state(model, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU()])
def test_over_scales_and_signs_the_result_computes_what_the_fine_tuned_network_does(activation: nn.Module) -> None:
    model, graph, base = perceptron(activation)
    tuned = near(base, 1)
    generator = torch.Generator().manual_seed(2)
    over: Any = ("permutations", "signs") if graph.signs else ("permutations", "scales")
    element = SignedPermutation(
        tus.random_permutation(graph, generator=generator), tus.random_signs(graph, generator=generator)
    )
    scaled = [tus.apply_scale(graph, scale_only(graph, 3), s) if graph.scales else s for s in (base, tuned)]
    new, goal = (apply_signed(graph, element, s) for s in scaled)
    found = tus.transport(graph, base, tuned, new, over=over)
    close(found.state, goal, rtol=1e-6)
    x = torch.randn(9, 6, dtype=torch.float64)
    assert relative(outputs(model, tuned, (x,)), outputs(model, found.state, (x,))) < 1e-6


def perceptron(activation: nn.Module) -> tuple[nn.Module, tus.SymmetryGraph, State]:
    model = nn.Sequential(nn.Linear(6, 9), activation, nn.Linear(9, 8), activation, nn.Linear(8, 4)).double().eval()
    graph = tus.discover_symmetries(model, torch.randn(3, 6, dtype=torch.float64))
    return model, graph, random_state(model, torch.Generator().manual_seed(0))


def test_over_rotations_gains_have_to_be_those_of_the_base() -> None:
    model, inputs = llama()
    graph = tus.discover_symmetries(model.double().eval(), inputs)
    base = {n: t.clone() for n, t in model.state_dict().items()}
    base = {n: torch.randn(t.shape, generator=torch.Generator().manual_seed(k), dtype=t.dtype) * 0.1 + ("norm" in n)
            for k, (n, t) in enumerate(base.items())}  # fmt: skip
    gains = [n for n in base if "norm" in n]
    tuned = near(base, 1) | {n: base[n] for n in gains}
    form = compared(graph, base, ("permutations", "rotations"))
    maps = random_linear(graph, generator=torch.Generator().manual_seed(2), std=0.0)
    folded = [move_tensors(graph, form, s) for s in (base, tuned)]
    close(undo_tensors(graph, form, folded[0]), base)
    new, goal = (apply_linear(graph, maps, s) for s in folded)
    found = tus.transport(graph, base, tuned, new, over=("permutations", "rotations"))
    assert found.distance_after < 1e-6 * found.distance_before and found.move.maps
    close(found.state, goal, rtol=1e-6)
    with pytest.raises(tus.SymmetryError, match="fold_norms"):
        tus.transport(graph, base, near(base, 1), new, over=("permutations", "rotations"))


@pytest.mark.parametrize("over", [("permutations",), ("permutations", "scales")])
def test_an_adapter_goes_where_its_product_goes(over: Any) -> None:
    """The new factors, by PEFT's names, are of the same rank, and adapt the new base as the old ones the old base."""
    model, graph, base = perceptron(nn.ReLU())
    peft = get_peft_model(model, LoraConfig(target_modules=["0", "2"], r=2))
    generator = torch.Generator().manual_seed(1)
    adapter = {
        n.replace(".default", ""): torch.randn(t.shape, generator=generator, dtype=torch.float64)
        for n, t in peft.state_dict().items()
        if "lora_" in n
    }
    assert "base_model.model.0.lora_A.weight" in adapter

    def merged(weights: State, lora: State) -> State:
        part = {
            k: lora[f"base_model.model.{k}.lora_B.weight"] @ lora[f"base_model.model.{k}.lora_A.weight"] for k in "02"
        }
        return weights | {f"{k}.weight": weights[f"{k}.weight"] + product for k, product in part.items()}

    model, graph, base = perceptron(nn.ReLU())
    new, goal = (
        tus.apply_permutation(graph, tus.random_permutation(graph, generator=torch.Generator().manual_seed(3)), s)
        for s in (
            tus.apply_scale(graph, scale_only(graph, 2), s) if "scales" in over else s
            for s in (base, merged(base, adapter))
        )
    )
    found = tus.transport(graph, base, adapter, new, over=over)
    assert {n: t.shape for n, t in found.state.items()} == {n: t.shape for n, t in adapter.items()}
    close(merged(new, found.state), goal, rtol=1e-6)
    torch.rand(1)  # whatever the global random state is
    again = tus.transport(graph, base, adapter, new, over=over)
    assert all(torch.equal(t, again.state[n]) for n, t in found.state.items())
    twice = tus.transport(graph, base, adapter, new, over=over, weight=2.0)
    difference = merged(new, twice.state)["0.weight"] - new["0.weight"]
    torch.testing.assert_close(difference, 2 * (goal["0.weight"] - new["0.weight"]), rtol=1e-6, atol=1e-6)
    assert twice.task_norm == pytest.approx(2 * found.task_norm)


def test_an_adapter_of_a_tied_layer_is_found_by_either_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.mix, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.words(x)
            return self.head(h + self.mix(h).relu())  # type: ignore[no-any-return]

    model = Tied().double()
    graph = tus.discover_symmetries(model, torch.randint(7, (2, 3)))
    base = random_state(model, torch.Generator().manual_seed(0))
    new = tus.apply_permutation(graph, tus.random_permutation(graph, generator=torch.Generator().manual_seed(1)), base)
    adapter = {
        f"head.lora_{k}.weight": torch.randn(s, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        for k, s in (("A", (2, 6)), ("B", (7, 2)))
    }
    found = tus.transport(graph, base, adapter, new)
    assert found.transpositions > 0
    product = adapter["head.lora_B.weight"] @ adapter["head.lora_A.weight"]
    assert found.task_norm == pytest.approx(float(product.norm()))
    (group,) = (g for g in graph.permutations if g.size == 6)
    torch.testing.assert_close(
        found.state["head.lora_B.weight"] @ found.state["head.lora_A.weight"],
        product[:, found.move.permutation[group.name]],
    )


def test_wrong_inputs_are_named() -> None:
    _, graph, base = perceptron(nn.ReLU())
    good = {"0.lora_A.weight": torch.ones(2, 6), "0.lora_B.weight": torch.ones(9, 2)}
    cases: list[tuple[Any, str]] = [
        (good | {"1.lora_A.weight": torch.ones(2, 6)}, "no factor of a linear layer"),
        (good | {"0.lora_magnitude": torch.ones(3)}, "no factor of a linear layer"),
        (good | {"0.lora_A.other.weight": torch.ones(2, 6)}, "two adapters of one layer"),
        ({"0.lora_A.weight": torch.ones(2, 6)}, "finetuned has"),
        (good | {"0.lora_B.weight": torch.ones(9, 3)}, "finetuned has"),
        (good | {"0.lora_B.weight": torch.full((9, 2), torch.nan)}, "NaN"),
        ({n: t for n, t in base.items() if n != "0.bias"}, "finetuned is not a state dict"),
        (base | {"4.weight": torch.ones(5, 8)}, "finetuned.*shape"),
        ({n: t[None] for n, t in base.items()}, "a stack of networks"),
    ]
    for tuned, message in cases:
        with pytest.raises(tus.SymmetryError, match=message):
            tus.transport(graph, base, tuned, base)
    with pytest.raises(ValueError, match="finite number"):
        tus.transport(graph, base, base, base, weight=float("inf"))
    with pytest.raises(TypeError, match="must be a number"):
        tus.transport(graph, base, base, base, weight="all")  # type: ignore[arg-type]
    small = {n: t.half() for n, t in base.items()}
    with pytest.raises(tus.SymmetryError, match="leaves the range"):
        tus.transport(graph, small, {n: t * 2 for n, t in small.items()}, small, weight=1e6)
