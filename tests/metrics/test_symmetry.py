"""Metrics that know the symmetry graph: NS, representation cost, homogeneity of marginals."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from drawn import normal
from sklearn.metrics.pairwise import laplacian_kernel, rbf_kernel
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.metrics import MarginalHomogeneity, MaximumMeanDiscrepancy, RepresentationCost
from tu_symmetry.metrics.functional import (
    marginal_homogeneity,
    network_discrepancy,
    representation_costs,
    unit_samples,
)


@functools.cache
def network() -> tuple[nn.Module, tus.SymmetryGraph]:
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    ).double().eval()  # fmt: skip
    return model, tus.discover_symmetries(model, torch.randn(2, 2, 6, 6, dtype=torch.float64))


def ensemble(count: int, seed: int) -> dict[str, Tensor]:
    """Independent draws: every layer's weights from one distribution."""
    model, _ = network()
    generator = torch.Generator().manual_seed(seed)
    stack = {}
    for name, tensor in model.state_dict().items():
        draw = torch.randn((count, *tensor.shape), generator=generator, dtype=torch.float64)
        stack[name] = 0.3 + draw.abs() if "running_var" in name else draw
    stack["1.num_batches_tracked"] = torch.zeros(count, dtype=torch.long)
    return stack


def moved(stack: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Each network somewhere else on its own orbit."""
    _, graph = network()
    generator = torch.Generator().manual_seed(seed)
    states = []
    for i in range(len(stack["0.bias"])):
        p = tus.random_permutation(graph, generator=generator)
        s = tus.random_scale(graph, generator=generator, std=0.5)
        state = tus.apply_permutation(graph, p, {n: t[i] for n, t in stack.items()})
        states.append(tus.apply_scale(graph, s, state))
    return {n: torch.stack([s[n] for s in states]) for n in stack}


def slow_mmd(x: Tensor, y: Tensor) -> float:
    """PROTOCOLS: MMDAgg's kernels and bandwidths, by scikit-learn and numpy, one bandwidth after the other."""
    values = []
    for p, kernel in ((1, laplacian_kernel), (2, rbf_kernel)):
        distances = np.sort(torch.cdist(x, y, p=float(p)).flatten().numpy())
        low = distances[0] if distances[0] >= 0.1 else max(distances[int(0.05 * len(distances))], 0.1)
        low, high = low / 2, 2 * max(distances[-1], 0.3)
        for b in np.geomspace(low, high, 10):
            kxx, kyy, kxy = (kernel(s.numpy(), t.numpy(), gamma=1 / b**p) for s, t in ((x, x), (y, y), (x, y)))
            n, m = len(x), len(y)
            values.append((kxx.sum() - n) / (n * (n - 1)) + (kyy.sum() - m) / (m * (m - 1)) - 2 * kxy.mean())
    return float(np.mean(values))


def test_discrepancy_of_networks_is_that_of_the_slow_oracle() -> None:
    _, graph = network()
    x, y = ensemble(7, 0), ensemble(9, 1)
    forms = [tus.remove_symmetries(graph, s, scale="unit_norm") for s in (x, y)]
    names = [n for n in graph.shapes if n not in graph.buffers]
    tensors = {n: slow_mmd(*(f[n].flatten(1) for f in forms)) for n in names}
    assert float(network_discrepancy(x, y, graph=graph)) == pytest.approx(np.mean(list(tensors.values())), abs=1e-12)
    layers = [
        slow_mmd(*(torch.cat([f[n].flatten(1) for n in names if n.startswith(layer)], 1) for f in forms))
        for layer in ("0.", "1.", "3.", "7.")
    ]
    assert float(network_discrepancy(x, y, graph=graph, level="layer")) == pytest.approx(np.mean(layers), abs=1e-12)
    whole = slow_mmd(*(torch.cat([t.flatten(1) for t in s.values() if t.is_floating_point()], 1) for s in (x, y)))
    assert float(network_discrepancy(x, y, level="network")) == pytest.approx(whole, abs=1e-12)


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


def test_discrepancy_errors() -> None:
    _, graph = network()
    x = ensemble(3, 0)
    with pytest.raises(ValueError, match="level must be"):
        MaximumMeanDiscrepancy(level="block")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two architectures"):
        network_discrepancy(x, {"0.weight": x["0.weight"]})
    with pytest.raises(tus.SymmetryError, match="missing"):
        network_discrepancy({"0.weight": x["0.weight"]}, x, graph=graph)


def test_representation_costs_of_stacks() -> None:
    _, graph = network()
    stack = ensemble(4, 0)
    singles = [{n: t[i] for n, t in stack.items()} for i in range(4)]
    forms = [tus.canonicalize(graph, s) for s in singles]
    costs = representation_costs(graph, stack)
    assert costs.mass.tolist() == pytest.approx([f.mass_before for f in forms])
    assert costs.minimal_mass.tolist() == pytest.approx([f.mass_after for f in forms])
    assert bool((costs.ratio > 1).all())
    metric = RepresentationCost(graph)
    metric.update(singles[0])
    metric.update({n: t[1:] for n, t in stack.items()})
    expected = {"mass": costs.mass.mean(), "minimal_mass": costs.minimal_mass.mean(), "ratio": costs.ratio.mean()}
    torch.testing.assert_close(metric.compute(), expected)
    counted = RepresentationCost(graph, parameters="*.weight")
    counted.update(stack)
    by_hand = [tus.representation_cost(graph, s, parameters="*.weight") for s in singles]
    assert float(counted.compute()["minimal_mass"]) == pytest.approx(sum(by_hand) / 4)


def test_minimal_mass_is_constant_on_orbits() -> None:
    _, graph = network()
    stack = ensemble(3, 0)
    one = representation_costs(graph, stack, normalizations="unit_norm")
    other = representation_costs(graph, moved(stack, 1), normalizations="unit_norm")
    torch.testing.assert_close(one.minimal_mass, other.minimal_mass)
    assert not torch.allclose(one.mass, other.mass)


def test_representation_cost_errors() -> None:
    _, graph = network()
    with pytest.raises(ValueError, match="2 sample axes"):
        representation_costs(graph, {n: t.unsqueeze(0) for n, t in ensemble(2, 0).items()})
    with pytest.raises(ValueError, match="0 samples"):
        representation_costs(graph, {n: t[:0] for n, t in ensemble(2, 0).items()})


def p_value(samples: Tensor, seed: int = 0, **options: object) -> float:
    generator = torch.Generator().manual_seed(seed)
    return marginal_homogeneity(samples, generator=generator, **options).p_value  # type: ignore[arg-type]


def test_p_values_are_uniform_under_the_null() -> None:
    """Units that share a random factor in each sample are exchangeable, though neither normal nor independent."""
    found = []
    for seed in range(200):
        shared = 1 + normal(8, 1, 1, seed=seed).abs()
        found.append(p_value(shared * normal(8, 5, 3, seed=1000 + seed), seed, num_resamples=39))
    values = torch.tensor(found, dtype=torch.float64)
    for level in (0.1, 0.25, 0.5):  # exact: P(p <= level) = level, within three standard errors
        assert abs(float((values <= level + 1e-9).double().mean()) - level) < 3 * (level * (1 - level) / 200) ** 0.5


def planted(kind: str) -> Tensor:
    x = normal(40, 8, 4, seed=3)
    if kind == "location of one unit":
        x[:, 5] += 0.8
    elif kind == "scale of one unit":
        x[:, 2] *= 4.0
    elif kind == "dead unit":
        x[:, 2] = 0.01 * x[:, 2]
    elif kind == "one mode":
        x = normal(1, 8, 4, seed=4) + 0.3 * x
    elif kind == "sorted units":
        x = x.gather(1, x[..., :1].argsort(1).expand(x.shape))
    return x


@pytest.mark.parametrize("kind", ["location of one unit", "scale of one unit", "dead unit", "one mode", "sorted units"])
def test_planted_differences_are_found(kind: str) -> None:
    assert p_value(planted(kind)) == pytest.approx(1 / 200)
    assert p_value(planted("none")) > 0.05


def test_the_statistic_by_its_definition() -> None:
    """Empirical distribution functions at pooled quantiles, in loops."""
    x = normal(6, 3, 2, seed=0)
    squares = []
    for k in range(2):
        pooled = x[..., k].flatten().sort().values
        for level in range(1, 9):
            threshold = pooled[int(level / 9 * 17)]
            for u in range(3):
                own, all_ = (x[:, u, k] <= threshold).double().mean(), (pooled <= threshold).double().mean()
                squares.append(6 * float(own - all_) ** 2)
    for samples in (x, x.exp()):  # by ranks
        found = marginal_homogeneity(samples, num_resamples=1).statistic
        assert found == pytest.approx(np.mean(squares), rel=1e-5)


def test_blocks_are_relabeled_inside() -> None:
    """Units that differ from block to block are no violation; units that differ inside a block are."""
    x = normal(30, 2, 6, 3, seed=0)
    x[:, 1] += 5.0
    assert p_value(x) > 0.05
    x[:, 1, 4] += 2.0
    assert p_value(x) == pytest.approx(1 / 200)


def test_homogeneity_of_networks() -> None:
    _, graph = network()
    metric = MarginalHomogeneity(graph, num_resamples=199)
    stack = ensemble(60, 0)
    for part in (slice(0, 25), slice(25, 60)):
        metric.update({n: t[part] for n, t in stack.items()})
    assert metric.compute_by_group().keys() == {g.name for g in graph.permutations}
    assert float(metric.compute()) > 0.05
    metric.reset()
    metric.update(tus.remove_symmetries(graph, stack))  # one mode of the equivalent ones
    assert float(metric.compute()) == pytest.approx(2 / 200)
    least = min(t.p_value for t in metric.compute_by_group().values())
    assert float(metric.compute()) == pytest.approx(2 * least)


def test_what_is_tested_of_a_network() -> None:
    _, graph = network()
    stack = ensemble(3, 0)
    (first, second) = (g.name for g in graph.permutations)
    found = unit_samples(graph, stack, max_weights=None, max_units=None)
    expected = torch.cat([stack["0.weight"].flatten(2), stack["0.bias"].unsqueeze(-1)], -1)
    torch.testing.assert_close(found[first][..., : 2 * 9], expected[..., :18])
    assert found[first].shape == (3, 5, 18 + 3) and found[second].shape == (3, 6, 45 + 1)
    few = unit_samples(graph, stack, max_weights=2, max_units=3)
    assert few[first].shape == (3, 3, 2 + 3)
    torch.testing.assert_close(few[first][..., 0], found[first][:, [0, 2, 4], 0])


def test_homogeneity_errors() -> None:
    _, graph = network()
    with pytest.raises(ValueError, match="at least 2 samples"):
        marginal_homogeneity(normal(1, 4, 2, seed=0))
    with pytest.raises(ValueError, match="diverged"):
        marginal_homogeneity(normal(3, 4, 2, seed=0) * torch.nan)
    with pytest.raises(ValueError, match="leading sample axis"):
        unit_samples(graph, {n: t[0] for n, t in ensemble(2, 0).items()})
    with pytest.raises(ValueError, match="no samples so far"):
        MarginalHomogeneity(graph).compute_by_group()
    pinned = nn.Sequential(nn.Linear(4, 3))
    nothing = tus.discover_symmetries(pinned, torch.randn(2, 4))
    with pytest.raises(tus.SymmetryError, match="no group of interchangeable units"):
        MarginalHomogeneity(nothing)
