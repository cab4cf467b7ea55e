"""Measures of stacked networks with their symmetry graph: constant on orbits, exact where an oracle is, streamed."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from drawn import generator, normal
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.alignment.removal import removal_element
from tu_symmetry.metrics import MarginalHomogeneity, MaximumMeanDiscrepancy
from tu_symmetry.metrics.functional import (
    Removal,
    discrepancy_test,
    largest_weights,
    maximum_mean_discrepancy,
    network_discrepancy,
    removal,
    representation_costs,
    unit_samples,
    vector_distances,
)
from tu_symmetry.metrics.functional.discrepancy import weight_vectors
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import stack_states, unstack
from tu_symmetry.symmetry.action import permute_tensors, scale_tensors


@functools.cache
def network() -> tuple[nn.Module, tus.SymmetryGraph]:
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    ).double().eval()  # fmt: skip
    graph = tus.discover_symmetries(model, torch.randn(2, 2, 6, 6, dtype=torch.float64))
    graph.require_verified()
    return model, graph


def ensemble(count: int, seed: int) -> dict[str, Tensor]:
    """Independent draws: every layer's weights from one distribution."""
    source, stack = generator(seed), {}
    for name, tensor in network()[0].state_dict().items():
        draw = torch.randn((count, *tensor.shape), generator=source, dtype=torch.float64)
        stack[name] = 0.3 + draw.abs() if "running_var" in name else draw
    stack["1.num_batches_tracked"] = torch.zeros(count, dtype=torch.long)
    return stack


def moved(stack: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Each network somewhere else on its own orbit."""
    _, graph = network()
    source, states = generator(seed), []
    for single in unstack(stack):
        state = tus.apply_permutation(graph, tus.random_permutation(graph, generator=source), single)
        states.append(tus.apply_scale(graph, tus.random_scale(graph, generator=source, std=0.5), state))
    return stack_states(states)


def test_discrepancy_of_networks_is_the_mean_over_their_tensors() -> None:
    _, graph = network()
    x, y = ensemble(7, 0), ensemble(9, 1)
    forms = [tus.remove_symmetries(graph, s, scale="unit_norm") for s in (x, y)]
    names = [n for n in graph.shapes if n not in graph.buffers]
    tensors = [maximum_mean_discrepancy(*(f[n].flatten(1) for f in forms)) for n in names]
    torch.testing.assert_close(network_discrepancy(x, y, graph=graph), torch.stack(tensors).mean())
    plain = [maximum_mean_discrepancy(x[n].flatten(1), y[n].flatten(1)) for n in x if x[n].is_floating_point()]
    torch.testing.assert_close(network_discrepancy(x, y), torch.stack(plain).mean())


def test_discrepancy_with_a_graph_sees_functions_and_not_orbits() -> None:
    _, graph = network()
    x, y = ensemble(12, 0), ensemble(12, 1)
    value = network_discrepancy(x, y, graph=graph)
    torch.testing.assert_close(network_discrepancy(moved(x, 5), moved(y, 6), graph=graph), value, atol=1e-9, rtol=0)
    one_mode = tus.remove_symmetries(graph, x, scale="unit_norm")  # the same functions, other weights
    assert network_discrepancy(one_mode, y) > network_discrepancy(x, y) + 0.02
    torch.testing.assert_close(network_discrepancy(one_mode, y, graph=graph), value, atol=1e-9, rtol=0)
    shifted = {n: t + 1.0 if n == "7.bias" else t for n, t in x.items()}  # another function
    assert network_discrepancy(shifted, y, graph=graph) > value + 1e-2


REMOVALS = ["paper", "min_mass", "aligned"]


def named(name: str) -> Removal:
    if name == "aligned":
        return removal("min_mass", align_to=unstack(ensemble(1, 9))[0])
    return removal(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REMOVALS)
def test_the_element_is_what_the_removal_applies(name: str) -> None:
    _, graph = network()
    chosen, states = named(name), ensemble(3, 0)
    whole = chosen.apply(graph, states)
    for i, state in enumerate(unstack(states)):
        scale, permutation = chosen.element(graph, state)
        for tensor, value in state.items():  # one tensor at a time
            alone = permute_tensors(graph, permutation, scale_tensors(graph, scale, {tensor: value}))[tensor]
            torch.testing.assert_close(alone, whole[tensor][i], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="this is a stack"):
        removal_element(graph, states)


def test_removals_are_named_and_are_the_papers() -> None:
    _, graph = network()
    assert named("paper").name == "unit_norm, sorted by the largest weight"
    inner = named("paper").apply(graph, ensemble(2, 0))["3.weight"].flatten(2)
    torch.testing.assert_close(inner.norm(dim=-1), torch.ones(2, 6).double())
    largest = inner.amax(-1)
    assert bool((largest[:, :-1] >= largest[:, 1:]).all())
    assert named("aligned").name == "min_mass, aligned"
    x, y = ensemble(5, 0), ensemble(6, 4)
    found = discrepancy_test(x, y, graph=graph, bootstraps=0)
    assert found.removed == named("paper").name
    assert found.value == pytest.approx(float(network_discrepancy(x, y, graph=graph)), abs=1e-12)
    with pytest.raises(ValueError, match="removal must be one of"):
        removal("best")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [False, True])
def test_streaming_from_shards_equals_memory(tmp_path: Path, given: bool) -> None:
    sets, stores = (ensemble(5, 0), ensemble(7, 4)), []
    for k, states in enumerate(sets):
        store = SampleStore.create(tmp_path / str(k), architecture="network", method="normal")
        for part in (slice(0, 3), slice(3, None)):
            own = {n: t[part] for n, t in states.items()}
            store.append(own, step=[len(store) + i for i in range(len(own["0.bias"]))])
        stores.append(store)
    graph = network()[1] if given else None
    whole = discrepancy_test(*sets, graph=graph, generator=generator())
    parts = discrepancy_test(*stores, graph=graph, generator=generator(), memory=4 * 12 * 5)
    assert parts.value == pytest.approx(whole.value, abs=1e-6) and parts.p_value == whole.p_value
    assert parts.interval == pytest.approx(whole.interval, abs=1e-6)
    assert (parts.aggregation, parts.removed, parts.sizes) == (whole.aggregation, whole.removed, whole.sizes)


def test_distances_of_aligned_networks_are_constant_on_orbits() -> None:
    _, graph = network()

    def distances(x: dict[str, Tensor], y: dict[str, Tensor]) -> list[float]:
        form = removal("min_mass", align_to=unstack(y)[0])
        vectors = [torch.cat([*weight_vectors(s, graph=graph, removed=form).values()], 1) for s in (x, y)]
        found = vector_distances(*vectors, generator=generator())
        return [found.aligned_l2, found.energy, found.sliced_wasserstein]

    x, y = ensemble(6, 0), ensemble(8, 1)
    assert distances(moved(x, 1), y) == pytest.approx(distances(x, y), abs=1e-6)
    copies = {n: t[:1].expand(4, *t.shape[1:]).clone() for n, t in x.items()}  # one function at four places
    assert distances(moved(copies, 2), moved(copies, 3)) == pytest.approx([0, 0, 0], abs=1e-6)


def test_representation_costs_of_stacks_are_constant_on_orbits() -> None:
    _, graph = network()
    stack = ensemble(4, 0)
    forms = [tus.canonicalize(graph, s) for s in unstack(stack)]
    costs = representation_costs(graph, stack)
    assert costs.mass.tolist() == pytest.approx([f.mass_before for f in forms])
    assert costs.minimal_mass.tolist() == pytest.approx([f.mass_after for f in forms])
    assert bool((costs.ratio > 1).all())
    one, other = (representation_costs(graph, s, normalizations="unit_norm") for s in (stack, moved(stack, 1)))
    torch.testing.assert_close(one.minimal_mass, other.minimal_mass)
    assert not torch.allclose(one.mass, other.mass)


def test_homogeneity_of_networks() -> None:
    _, graph = network()
    metric = MarginalHomogeneity(graph, num_resamples=199)
    metric.update(ensemble(60, 0))
    assert metric.compute_by_group().keys() == {g.name for g in graph.permutations}
    assert float(metric.compute()) > 0.05
    metric.reset()
    metric.update(tus.remove_symmetries(graph, ensemble(60, 0)))  # one mode of the equivalent ones
    assert float(metric.compute()) == pytest.approx(2 / 200)


def test_what_is_tested_of_a_network() -> None:
    _, graph = network()
    stack = ensemble(3, 0)
    first, second = (g.name for g in graph.permutations)
    found = unit_samples(graph, stack)
    assert found[first].shape == (3, 5, 16 + 3) and found[second].shape == (3, 6, 16 + 1)  # 18 and 45 incoming weights
    torch.testing.assert_close(found[first][..., 0], stack["0.weight"].flatten(2)[..., 0])
    torch.testing.assert_close(found[first][..., 16], stack["0.bias"])


def test_the_largest_weight_is_anywhere_for_independent_networks_and_stays_in_a_chain() -> None:
    _, graph = network()
    independent = ensemble(200, 0)
    found = next(iter(largest_weights(graph, independent, generator=generator()).values()))
    assert int(found.counts.sum()) == 200 and found.p_value > 0.01
    assert torch.equal(found.index, independent["0.weight"].flatten(2).amax(-1).argmax(1))
    chain = {n: t[:1] + 0.05 * t if t.is_floating_point() else t for n, t in independent.items()}
    assert next(iter(largest_weights(graph, chain, generator=generator()).values())).p_value == pytest.approx(1 / 1000)


def test_p_values_of_the_largest_weight_have_their_level() -> None:
    _, graph = network()
    shares = torch.tensor([
        next(iter(largest_weights(graph, ensemble(25, s), num_resamples=99, generator=generator(s)).values())).p_value
        for s in range(150)
    ])  # fmt: skip
    for level in (0.1, 0.5):  # counts are discrete, so that p-values are conservative
        assert float((shares <= level).double().mean()) < level + 3 * (level * (1 - level) / 150) ** 0.5
    assert float(shares.min()) < 0.2


def test_what_gives_no_number_is_refused() -> None:
    _, graph = network()
    x = ensemble(2, 0)
    with pytest.raises(ValueError, match="two architectures"):
        network_discrepancy(x, {"0.weight": x["0.weight"]})
    with pytest.raises(tus.SymmetryError, match="missing"):
        network_discrepancy({"0.weight": x["0.weight"]}, x, graph=graph)
    with pytest.raises(ValueError, match="2 sample axes"):
        representation_costs(graph, {n: t.unsqueeze(0) for n, t in x.items()})
    with pytest.raises(ValueError, match="0 samples"):
        representation_costs(graph, {n: t[:0] for n, t in x.items()})
    with pytest.raises(ValueError, match="leading sample axis"):
        unit_samples(graph, unstack(x)[0])
    with pytest.raises(ValueError, match="no samples so far"):
        MarginalHomogeneity(graph).compute_by_group()
    with pytest.raises(tus.SymmetryError, match="no group of interchangeable units"):
        MarginalHomogeneity(tus.discover_symmetries(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)))
    metric = MaximumMeanDiscrepancy()
    with pytest.raises(ValueError, match="leading sample axis"):
        metric.update({"a": normal(3, 2), "b": normal(4, 2)}, reference=True)
    metric.update({"a": normal(3, 2)}, reference=True)
    with pytest.raises(ValueError, match=r"they differ in \['a', 'b'\]"):
        metric.update({"a": normal(3, 3), "b": normal(3)}, reference=False)
