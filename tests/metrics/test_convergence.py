"""R-hat and effective sample sizes with and without symmetries, of chains that differ by symmetries alone."""

from __future__ import annotations

import pytest
import torch
from drawn import generator
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.metrics.functional import convergence
from tu_symmetry.states import stack_states
from tu_symmetry.tables.models import MLP

stats = pytest.importorskip("arviz_stats.base", reason="comes with the extra sampling").array_stats


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MLP(5, 2, [6, 6]).double()


def planted(model: nn.Module, graph: tus.SymmetryGraph, chains: int = 3, draws: int = 40) -> dict[str, Tensor]:
    """Independent draws near one network, those of each chain moved by another element of its symmetries."""
    source, every = generator(3), []
    for _ in range(chains):
        permutation = tus.random_permutation(graph, generator=source)
        scale = tus.random_scale(graph, generator=source)
        own = []
        for _ in range(draws):
            noise = {
                n: t + 1e-3 * torch.randn(t.shape, generator=source).double() for n, t in model.state_dict().items()
            }
            own.append(tus.apply_scale(graph, scale, tus.apply_permutation(graph, permutation, noise)))
        every.append(stack_states(own))
    return stack_states(every)


def test_chains_that_differ_by_symmetries_alone_agree_without_them() -> None:
    model = network()
    x = torch.randn(7, 5, generator=generator(1)).double()
    graph = tus.discover_symmetries(model, x[:2])
    chains = planted(model, graph)
    found = convergence(graph, chains, model=model, inputs=x)
    raw, removed, outputs = found.spaces.values()
    assert raw["rhat"] > 1.5 > 1.1 > removed["worst rhat"] and outputs["worst rhat"] < 1.1
    assert raw["ess"] < 20 and removed["ess"] > 80 and outputs["ess"] > 80  # of 120 independent draws
    assert raw["quantities"] == sum(p.numel() for p in model.parameters()) and outputs["quantities"] == 14
    flat = torch.cat([found.removed[n].flatten(2) for n in graph.shapes], 2).numpy()
    assert removed["worst rhat"] == pytest.approx(float(stats.rhat(flat, chain_axis=0, draw_axis=1).max()))
    assert removed["least ess"] == pytest.approx(float(stats.ess(flat, chain_axis=0, draw_axis=1).min()))
    for chain in range(2):  # what is without symmetries computes what was given
        for states in (chains, found.removed):
            one = {n: t[chain, 5] for n, t in states.items()}
            found_outputs = torch.func.functional_call(model, one, (x,))
            expected = torch.func.functional_call(model, {n: t[chain, 5] for n, t in chains.items()}, (x,))
            torch.testing.assert_close(found_outputs, expected)
    text = found.table().markdown()
    assert "weights without symmetries" in text and "3 chains of 40 draws" in text


def test_weights_that_do_not_move_are_left_out_and_other_functions_stay_apart() -> None:
    model = network()
    graph = tus.discover_symmetries(model, torch.randn(2, 5).double())
    chains = planted(model, graph, 2, 10)
    other = {n: t + torch.stack([torch.zeros_like(t[0]), torch.ones_like(t[0])]) for n, t in chains.items()}
    assert convergence(graph, other).spaces["weights without symmetries"]["rhat"] > 1.5
    last = {n: chains[n] if n.startswith("layers.2") else t[:1, :1].expand_as(t) for n, t in chains.items()}
    assert convergence(graph, last).spaces["weights"]["quantities"] == 6 * 2 + 2
    still = {n: t[:1, :1].expand_as(t) for n, t in chains.items()}
    for given, message in (
        ({n: t[0] for n, t in chains.items()}, "1 sample axes"),
        ({n: t[:1] for n, t in chains.items()}, "2 sample axes of 1 and 10"),
        ({n: t[:, :3] for n, t in chains.items()}, "of 2 and 3"),
        (still, "nothing moves"),
    ):
        with pytest.raises(ValueError, match=message):
            convergence(graph, given)
    with pytest.raises(ValueError, match="both model= and inputs="):
        convergence(graph, chains, model=model)
