"""Activation matching: where units are observed, what their similarity is, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import discovered, planted, tied_resnet

import tu_symmetry as tus
from tu_symmetry.symmetry.running.weights import random_state


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_states(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return random_state(model, generator), random_state(model, generator)


@pytest.mark.parametrize("similarity", ["product", "correlation"])
def test_similarities_are_those_of_the_hidden_layer(similarity: Any) -> None:
    """On a flattened convolution: a channel's positions and all samples count alike, over batches of any size."""
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 9, 3)).double()
    x = normal(20, 2, 5, 5)
    graph = tus.discover_symmetries(model, x)
    a, b = two_states(model)
    hidden = [F.relu(F.conv2d(x, s["0.weight"], s["0.bias"])).movedim(1, 0).flatten(1) for s in (a, b)]
    wanted = hidden[0] @ hidden[1].T if similarity == "product" else torch.corrcoef(torch.cat(hidden))[:5, 5:]
    rows, columns = linear_sum_assignment(wanted.numpy(), maximize=True)
    found = tus.activation_matching(graph, model, a, b, [x[:3], (x[3:15], None), x[15:]], similarity=similarity)
    assert found.permutation["0"].tolist() == columns.tolist()
    assert found.objective == pytest.approx(float(wanted[rows, columns].sum()), rel=1e-9)
    assert found.by_weights == ()


def test_a_residual_stream_is_seen_in_all_its_places() -> None:
    """The objective of a stream is the sum over the inputs of all layers that read it."""
    model = tied_resnet(6, 2).double()
    x = normal(8, 3, 6, 6)
    graph = tus.discover_symmetries(model, x)
    a, b = two_states(model)
    found = tus.activation_matching(graph, model, a, b, [x])
    seen: list[list[Tensor]] = [[], []]
    readers = [m for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and n != "0"]
    for inputs, state in zip(seen, (a, tus.apply_permutation(graph, found.permutation, b)), strict=True):

        def record(module: nn.Module, args: Any, output: Tensor, inputs: list[Tensor] = inputs) -> None:
            inputs.append(args[0].clone())

        handles = [m.register_forward_hook(record) for m in readers]
        torch.func.functional_call(model, state, (x,))
        for handle in handles:
            handle.remove()
    total = sum(float((p * q).sum()) for p, q in zip(*seen, strict=True))
    assert len(seen[0]) == 5
    assert found.objective == pytest.approx(total, rel=1e-9)


PLANTED = (
    "mlp_relu batchnorm_cnn cnn_flatten resnet_batchnorm DenseConcat conv1d_transposed unet_concat conv3d GroupedConv "
    "BlocksInBlocks CalledTwice GroupNormNet weight_norm transformer_separate Recurrent PooledHeads grouped_query"
)


@pytest.mark.parametrize("name", PLANTED.split())
def test_noisy_planted_permutations_are_found(name: str) -> None:
    """Copies with 2 % noise on the weights, by what they compute on data."""
    case = next(c for c in CASES if c.name == name)
    model, graph = discovered(case)
    _, reference, exact = planted(case, 21)
    _, _, noisy = planted(case, 21, noise=0.02)
    shape = case.inputs()[0].shape
    loader = [normal(64, *shape[1:], seed=k) for k in range(2)]
    found = tus.activation_matching(graph, model, reference, noisy, loader, similarity="correlation")
    exactly = tus.activation_matching(graph, model, reference, exact, loader, similarity="correlation")
    assert exactly.distance_after <= 1e-7 * exactly.distance_before
    assert found.distance_after < 0.5 * found.distance_before


def test_constant_units_correlate_with_nothing() -> None:
    """Units that are constant up to rounding pair with what is left over, and add nothing to the objective."""
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    graph = tus.discover_symmetries(model, torch.zeros(2, 3))
    generator = torch.Generator().manual_seed(0)
    reference = {n: torch.randn(t.shape, generator=generator) for n, t in model.state_dict().items()}
    reference["0.weight"][:2] = 0.0
    reference["0.bias"] = torch.tensor([1e3, -1.0, 0.0, 0.0, 0.0, 0.0])  # one far from zero, one dead
    p = torch.tensor([3, 0, 5, 1, 2, 4])
    state = tus.apply_permutation(graph, {"0": p}, reference)
    x = torch.randn(50, 3, generator=generator)
    found = tus.activation_matching(graph, model, reference, state, [x[:20], x[20:]], similarity="correlation")
    assert found.permutation["0"][2:].tolist() == p.argsort()[2:].tolist()
    assert found.objective == pytest.approx(4.0, rel=1e-5)


def test_groups_that_no_module_shows_are_matched_by_weights_and_named() -> None:
    case = next(c for c in CASES if c.name == "DirectParameters")
    model, graph = discovered(case)
    _, reference, state = planted(case, 5)
    found = tus.activation_matching(graph, model, reference, state, [normal(6, 5)])
    assert found.by_weights == tuple(g.name for g in graph.permutations)
    assert found.distance_after <= 1e-7 * found.distance_before


def test_models_and_states_are_left_as_they_were() -> None:
    """Mode of every submodule, hooks, weights and running statistics; also when the forward pass fails."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)).double()
    graph = tus.discover_symmetries(model, normal(3, 4))
    model.train()
    model[1].eval()
    a, b = two_states(model)
    kept = [{n: t.clone() for n, t in s.items()} for s in (model.state_dict(), a, b)]
    tus.activation_matching(graph, model, a, b, [normal(9, 4)])
    with pytest.raises(RuntimeError):
        tus.activation_matching(graph, model, a, b, [normal(9, 5)])
    assert [m.training for m in model] == [True, False, True, True, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for state, before in zip((model.state_dict(), a, b), kept, strict=True):
        assert all(torch.equal(state[n], t) for n, t in before.items())
