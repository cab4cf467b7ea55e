"""Distances of aligned networks, functional diversity, and where the largest weight is."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from drawn import generator, normal
from scipy.stats import energy_distance as scipy_energy
from scipy.stats import spearmanr, wasserstein_distance
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.metrics.functional import (
    LargestWeight,
    diversity_summary,
    largest_weights,
    pairwise_mutual_information,
    removal,
    vector_distances,
)
from tu_symmetry.metrics.functional import quotient as quotient_module
from tu_symmetry.metrics.functional.discrepancy import weight_vectors
from tu_symmetry.metrics.functional.homogeneity import _uniform_counts
from tu_symmetry.metrics.functional.quotient import VectorDistances


def test_energy_distance_by_scipy() -> None:
    def energy(x: Tensor, y: Tensor) -> float:
        return vector_distances(x, y, generator=generator()).energy

    x, y = normal(9, 1), 2 * normal(14, 1, seed=1) + 1
    expected = scipy_energy(x[:, 0].numpy(), y[:, 0].numpy()) ** 2  # the V-statistic, with the pairs of equal ones
    biased = [float(torch.cdist(s, s).sum()) * (1 / (n * (n - 1)) - 1 / n**2) for s, n in ((x, 9), (y, 14))]
    assert energy(x, y) == pytest.approx(expected - sum(biased), abs=1e-12)
    null = [energy(normal(8, 3, seed=2 * k), normal(8, 3, seed=2 * k + 1)) for k in range(200)]
    assert abs(np.mean(null)) < 3 * np.std(null) / 200**0.5
    assert energy(3 * x + 1, 3 * y + 1) == pytest.approx(3 * energy(y, x))


@pytest.mark.parametrize("sizes", [(7, 7), (6, 9), (2, 11)])
def test_sliced_wasserstein_on_a_line(sizes: tuple[int, int]) -> None:
    """In one dimension every projection is the identity or its mirror image; unequal sizes by repetition."""
    x, y = normal(sizes[0], 1), normal(sizes[1], 1, seed=1) + 2
    least = math.lcm(*sizes)
    a, b = (s[:, 0].sort().values.repeat_interleave(least // len(s)) for s in (x, y))
    expected = float((a - b).square().mean().sqrt())
    found = vector_distances(x, y, generator=generator()).sliced_wasserstein
    assert found == pytest.approx(expected, abs=1e-12)
    assert expected >= wasserstein_distance(x[:, 0].numpy(), y[:, 0].numpy()) - 1e-12
    shifted = normal(5, 3) + torch.tensor([3.0, 0, 0])
    plane = [vector_distances(normal(5, 3), shifted, generator=generator(k)).sliced_wasserstein for k in range(150)]
    assert np.mean(np.square(plane)) == pytest.approx(3, rel=0.03)  # a shift by 3: E cos^2 = 1/3


def perceptron() -> tuple[nn.Module, tus.SymmetryGraph]:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    graph = tus.discover_symmetries(model, normal(2, 3))
    graph.require_verified()
    return model, graph


MODEL, GRAPH = perceptron()


def states(count: int, seed: int) -> dict[str, Tensor]:
    return {n: normal(count, *t.shape, seed=seed + k) for k, (n, t) in enumerate(MODEL.state_dict().items())}


def moved(stack: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    source = generator(seed)
    found = []
    for i in range(len(stack["0.bias"])):
        state = tus.apply_permutation(
            GRAPH, tus.random_permutation(GRAPH, generator=source), {n: t[i] for n, t in stack.items()}
        )
        found.append(tus.apply_scale(GRAPH, tus.random_scale(GRAPH, generator=source, std=0.5), state))
    return {n: torch.stack([s[n] for s in found]) for n in stack}


def aligned_distances(x: dict[str, Tensor], y: dict[str, Tensor]) -> VectorDistances:
    form = removal("min_mass", align_to={n: t[0] for n, t in y.items()})
    vectors = [weight_vectors(s, graph=GRAPH, removed=form, level="network")["network"] for s in (x, y)]
    return vector_distances(*vectors, generator=generator())


def test_distances_of_aligned_networks_are_constant_on_orbits() -> None:
    x, y = states(6, 0), states(8, 10)
    x["2.weight"] = x["2.weight"] + 2
    first, other = aligned_distances(x, y), aligned_distances(moved(x, 1), y)
    for name in ("aligned_l2", "energy", "sliced_wasserstein"):
        assert getattr(first, name) == pytest.approx(getattr(other, name), abs=1e-6)
    copies = {n: t[:1].expand(4, *t.shape[1:]).clone() for n, t in x.items()}  # one function at four places
    same = aligned_distances(moved(copies, 2), moved(copies, 3))
    assert max(same.aligned_l2, abs(same.energy), same.sliced_wasserstein) < 1e-6
    with pytest.raises(ValueError, match="samples >= 2"):
        aligned_distances({n: t[:1] for n, t in x.items()}, y)


def probabilities(members: int, points: int, spread: float, seed: int) -> Tensor:
    return (normal(1, points, 4, seed=seed) + spread * normal(members, points, 4, seed=seed + 1)).softmax(-1)


def test_diversity_of_networks() -> None:
    a, b = (pairwise_mutual_information(probabilities(9, n, s, k)) for n, s, k in ((40, 0.2, 0), (30, 2.0, 10)))
    upper = np.triu_indices(9, 1)
    first, second = a.numpy()[upper], b.numpy()[upper]
    found = diversity_summary(a, b, generator=generator())
    assert found.id_mean == pytest.approx(first.mean()) and found.ood_mean == pytest.approx(second.mean())
    assert found.id_dispersion == pytest.approx(first.std(ddof=1) / first.mean())
    assert found.correlation == pytest.approx(np.corrcoef(first, second)[0, 1])
    assert found.rank_correlation == pytest.approx(spearmanr(first, second)[0])
    assert found.pairs == 36 and found.collapsed == 0 and found.distinct == 9
    low, high = found.correlation_interval
    assert low < found.correlation < high
    assert found.id_mean < found.ood_mean


def test_functional_collapse_is_reported() -> None:
    p = probabilities(4, 25, 1.0, 0)[[0, 1, 0, 2, 1, 3, 0]]
    found = diversity_summary(*(pairwise_mutual_information(p),) * 2, bootstraps=0)
    assert found.distinct == 4 and found.collapsed == pytest.approx(4 / 21)
    chain = torch.ones(6, 6) - torch.eye(6)  # linked one to the next, in a scrambled order
    for i, j in ((3, 0), (0, 5), (5, 1)):
        chain[i, j] = chain[j, i] = 0
    assert diversity_summary(chain, chain, bootstraps=0).distinct == 3
    with pytest.raises(ValueError, match="at least three"):
        diversity_summary(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="same networks"):
        diversity_summary(torch.zeros(3, 3), torch.zeros(4, 4))


def largest(stack: dict[str, Tensor]) -> LargestWeight:
    (found,) = largest_weights(GRAPH, stack, generator=generator()).values()
    return found


def test_the_largest_weight_is_anywhere_for_independent_networks_and_stays_in_a_chain() -> None:
    independent = states(200, 0)
    found = largest(independent)
    assert int(found.counts.sum()) == 200 and found.p_value > 0.01
    assert torch.equal(found.index, independent["0.weight"].amax(-1).argmax(1))
    chain = {n: t[:1] + 0.05 * normal(200, *t.shape[1:], seed=90 + k) for k, (n, t) in enumerate(independent.items())}
    assert largest(chain).p_value == pytest.approx(1 / 1000)
    metric = tus.MarginalHomogeneity(GRAPH, num_resamples=49)
    metric.update(chain)
    assert float(metric.compute()) == pytest.approx(1 / 50)  # one-run samples violate the corollary


def test_uniform_p_values_of_the_largest_weight() -> None:
    def p_value(seed: int) -> float:
        index = torch.randint(5, (25,), generator=generator(seed))
        return _uniform_counts(index, 5, 99, generator(1000 + seed)).p_value

    shares = torch.tensor([p_value(seed) for seed in range(150)])
    for level in (0.1, 0.5):  # counts are discrete, so that p-values are conservative
        assert float((shares <= level).double().mean()) < level + 3 * (level * (1 - level) / 150) ** 0.5
    assert float(shares.min()) < 0.2


@pytest.mark.parametrize("entries", [1, 20, 37])
def test_distances_do_not_depend_on_how_many_columns_are_looked_at(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = normal(6, 11), normal(4, 11, seed=1)
    expected = asdict(vector_distances(x, y, generator=generator()))
    monkeypatch.setattr(quotient_module, "_ENTRIES", entries)
    found = asdict(vector_distances(x, y, generator=generator(), device=torch.device("cpu")))
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-12, abs=1e-12) if name != "removed" else value)
