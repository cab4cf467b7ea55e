"""Measures of probabilities, vectors and covariances: values by hand, third-party oracles, laws, distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drawn import generator, normal, probabilities
from scipy.linalg import sqrtm
from scipy.spatial.distance import jensenshannon
from scipy.stats import energy_distance as scipy_energy
from torch import Tensor

from tu_symmetry.metrics.functional import (
    discrepancy_test,
    diversity_summary,
    gaussian_wasserstein,
    marginal_homogeneity,
    maximum_mean_discrepancy,
    network_discrepancy,
    pairwise_mutual_information,
    predictive_agreement,
    predictive_total_variation,
    vector_distances,
)
from tu_symmetry.metrics.functional.discrepancy import pairwise_distances, u_statistics
from tu_symmetry.metrics.functional.two_sample import vectors_test

# --- two predictives


def test_agreement_and_total_variation_by_hand() -> None:
    a = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.0, 0.0, 1.0]])
    b = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.2, 0.2], [0.2, 0.2, 0.6], [1.0, 0.0, 0.0]])
    assert predictive_agreement(a, b) == 0.5
    torch.testing.assert_close(predictive_total_variation(a, b), torch.tensor((0.2 + 0.6 + 0.2 + 1.0) / 4))


def test_members_are_averaged_before_they_are_compared() -> None:
    members, single = probabilities(5, 40, 4), probabilities(40, 4, seed=1)
    tv = sum(0.5 * sum(abs(float(members[:, i, c].mean() - single[i, c])) for c in range(4)) for i in range(40)) / 40
    assert float(predictive_total_variation(members, single)) == pytest.approx(tv, abs=1e-14)
    each = torch.stack([predictive_total_variation(m, single) for m in members]).mean()
    assert float(each) > tv + 1e-3  # an average of distances would be larger
    assert predictive_agreement(members.flip(0), single) == predictive_agreement(members, single)


def test_laws_of_predictives() -> None:
    a, b, c = (probabilities(50, 3, seed=s) for s in range(3))
    assert predictive_total_variation(a, a) == 0 and predictive_agreement(a, a) == 1
    direct = predictive_total_variation(a, b)
    assert direct == predictive_total_variation(b, a)
    assert direct <= predictive_total_variation(a, c) + predictive_total_variation(c, b)
    assert predictive_total_variation(torch.eye(3), torch.eye(3).roll(1, 0)) == 1


# --- mutual information of pairs


def test_mutual_information_is_scipys_jensen_shannon_divergence() -> None:
    p = probabilities(4, 25, 6)
    expected = [[(jensenshannon(a.numpy(), b.numpy(), axis=-1) ** 2).mean() for b in p] for a in p]
    found = pairwise_mutual_information(p)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-14)
    assert torch.equal(found, found.T)
    torch.testing.assert_close(pairwise_mutual_information(p[..., torch.randperm(6)]), found)
    assert pairwise_mutual_information(torch.eye(2).unsqueeze(1))[0, 1].item() == pytest.approx(math.log(2))


def test_diversity_of_networks() -> None:
    def information(points: int, spread: float, seed: int) -> Tensor:
        logits = normal(1, points, 4, seed=seed) + spread * normal(9, points, 4, seed=seed + 1)
        return pairwise_mutual_information(logits.softmax(-1))

    a, b = information(40, 0.2, 0), information(30, 2.0, 10)
    upper = np.triu_indices(9, 1)
    first, second = a.numpy()[upper], b.numpy()[upper]
    found = diversity_summary(a, b, generator=generator())
    assert found.id_mean == pytest.approx(first.mean()) and found.ood_mean == pytest.approx(second.mean())
    assert found.id_dispersion == pytest.approx(first.std(ddof=1) / first.mean())
    assert found.correlation == pytest.approx(np.corrcoef(first, second)[0, 1])
    low, high = found.correlation_interval
    assert low < found.correlation < high and found.id_mean < found.ood_mean


# --- Gaussians


def covariances(count: int, size: int, rank: int, seed: int = 0) -> Tensor:
    root = normal(count, size, rank, seed=seed)
    return root @ root.mT


def oracle(x: Tensor, y: Tensor) -> float:
    """The formula with the trace, by SciPy's matrix roots."""
    a, b = x.numpy(), y.numpy()
    root = np.real(sqrtm(a))
    cross = np.real(sqrtm(root @ b @ root))
    return float(np.sqrt(max(np.trace(a) + np.trace(b) - 2 * np.trace(cross), 0)))


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_the_distance_of_gaussians_is_the_formula_with_the_trace(size: int) -> None:
    x, y = covariances(4, size, size, 1), covariances(4, size, size + 2, 2)
    found = gaussian_wasserstein(x, y)
    assert found.tolist() == pytest.approx([oracle(a, b) for a, b in zip(x, y, strict=True)], rel=1e-7)
    torch.testing.assert_close(gaussian_wasserstein(x[:, None], y[None]).diagonal(), found)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_distance_of_gaussians_is_a_metric(rank: int) -> None:
    """Singular covariances fine; equal ones are at 0 to rounding error, where the trace would leave its root."""
    x, y, z = (covariances(8, 6, rank, seed) for seed in (1, 2, 3))
    size = x.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    assert (gaussian_wasserstein(x, x) <= 1e-12 * size).all()
    if rank == 6:
        near = gaussian_wasserstein(x, (1 + 1e-11) ** 2 * x)
        torch.testing.assert_close(near, 1e-11 * size, rtol=0.05, atol=0)
    there = gaussian_wasserstein(x, y)
    torch.testing.assert_close(there, gaussian_wasserstein(y, x))
    assert (there > 0.1).all(), "vacuous: alike"
    assert (gaussian_wasserstein(x, z) <= there + gaussian_wasserstein(y, z) + 1e-12).all()
    torch.testing.assert_close(gaussian_wasserstein(x, torch.zeros_like(x)), size)
    turn = torch.linalg.qr(normal(6, 6))[0]
    torch.testing.assert_close(gaussian_wasserstein(turn @ x @ turn.mT, turn @ y @ turn.mT), there)
    torch.testing.assert_close(gaussian_wasserstein(9 * x, 9 * y), 3 * there)
    s, t = normal(6, seed=1).abs(), normal(6, seed=2).abs()  # covariances that commute
    found = gaussian_wasserstein(*(turn * d.square() @ turn.mT for d in (s, t)))
    assert float(found) == pytest.approx(float((s - t).norm()), abs=1e-7)


# --- maximum mean discrepancy


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("width", [3, 1024, 2600])
def test_distances_of_close_and_of_wide_rows(power: int, width: int) -> None:
    """Those of rows that almost agree are no rounding of large squares."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x = (100 + 1e-3 * normal(7, width)).to(dtype)
        x[3] = x[5]
        expected = (x.double()[:, None] - x.double()[None]).abs().pow(power).sum(-1).pow(1 / power)
        torch.testing.assert_close(pairwise_distances(x, power), expected, rtol=tolerance, atol=1e-12)


def mmdagg(x: np.ndarray, y: np.ndarray) -> float:
    """The mean of the statistics of the ``mmdagg`` package (Laplace, then Gaussian), written out."""
    m, n = len(x), len(y)
    z = np.concatenate([x, y])
    values = []
    for power in (1, 2):
        pooled = (np.abs(z[:, None] - z[None]) ** power).sum(-1) ** (1 / power)
        between = pooled[m:, :m].ravel()
        between = between + (between == 0) * np.median(between)
        dd = np.sort(between)
        low = max(dd[int(np.floor(len(dd) * 0.05))], 0.1) if between.min() < 0.1 else between.min()
        low, high = low / 2, 2 * max(between.max(), 0.3)
        for i in range(10):
            d = pooled / ((high / low) ** (i / 9) * low)
            k = np.exp(-d) if power == 1 else np.exp(-(d**2))
            np.fill_diagonal(k, 0)
            v11 = np.concatenate([np.ones(m), -np.ones(n)])
            v10, v01 = np.concatenate([np.ones(m), np.zeros(n)]), np.concatenate([np.zeros(m), -np.ones(n)])
            values.append(
                v10 @ k @ v10 * (n - m + 1) / (m * n * (m - 1))
                + v01 @ k @ v01 * (m - n + 1) / (m * n * (n - 1))
                + v11 @ k @ v11 / (m * n)
            )
    return float(np.mean(values))


@pytest.mark.parametrize("scale", [1.0, 0.01, 30.0])
@pytest.mark.parametrize("count", [11, 17])
def test_values_are_those_of_mmdagg(scale: float, count: int) -> None:
    x, y = scale * normal(11, 4), scale * (0.6 * normal(count, 4, seed=1) + 0.4)
    expected = mmdagg(x.numpy(), y.numpy())
    assert float(maximum_mean_discrepancy(x, y)) == pytest.approx(expected, abs=1e-12)
    test = discrepancy_test({"w": x}, {"w": y}, permutations=1, bootstraps=0)
    assert test.value == pytest.approx(expected, abs=1e-12)


def test_laws_of_the_discrepancy() -> None:
    x, y = normal(20, 5), normal(30, 5, seed=1) + 0.5
    value = maximum_mean_discrepancy(x, y)
    for a, b in ((y, x), (x.flip(0, 1), y.flip(1)), (x + 3, y + 3), (7 * x, 7 * y)):
        torch.testing.assert_close(maximum_mean_discrepancy(a, b), value)
    single = maximum_mean_discrepancy((x + 1e3).float(), (y + 1e3).float())  # distances must not cancel
    torch.testing.assert_close(single, value, atol=1e-4, rtol=0)
    draws = [maximum_mean_discrepancy(normal(15, 3, seed=2 * s), normal(15, 3, seed=2 * s + 1)) for s in range(200)]
    null = torch.stack(draws)
    assert null.mean().abs() < 3 * null.std() / 200**0.5 and (null < 0).any()  # unbiased
    assert maximum_mean_discrepancy(normal(15, 3), normal(15, 3, seed=1) + 1) > null.max()


# --- how sure a discrepancy is


def has_level(p_values: list[float]) -> bool:
    """P(p <= level) = level, within three standard errors."""
    values = torch.tensor(p_values, dtype=torch.float64)
    found = {level: float((values <= level + 1e-9).double().mean()) for level in (0.1, 0.25, 0.5)}
    return all(abs(share - p) < 3 * (p * (1 - p) / len(values)) ** 0.5 for p, share in found.items())


def test_the_permutation_test_has_its_level_and_sees_a_shift() -> None:
    found = []
    for seed in range(120):
        x, y = ({"w": normal(n, 3, seed=2 * seed + k)} for k, n in ((0, 12), (1, 9)))
        found.append(discrepancy_test(x, y, permutations=39, bootstraps=0, generator=generator(seed)).p_value)
    assert has_level(found)
    x, y = {"w": normal(12, 3)}, {"w": normal(9, 3, seed=1) + 1.5}
    assert discrepancy_test(x, y, bootstraps=0, generator=generator()).p_value == pytest.approx(1 / 200)


def test_the_interval_covers_the_value_of_the_distributions() -> None:
    """Far from zero 19 in 20 intervals hold the discrepancy of large samples (within three standard errors)."""
    large = [{"w": normal(600, 2, seed=50 + k) + k} for k in (0, 1)]
    truth = discrepancy_test(*large, permutations=1, bootstraps=0).value
    covered = 0
    for seed in range(60):
        x, y = ({"w": normal(40, 2, seed=100 + 2 * seed + k) + k} for k in (0, 1))
        low, high = discrepancy_test(x, y, permutations=1, bootstraps=150, generator=generator(seed)).interval
        covered += low <= truth <= high
    assert covered / 60 > 0.95 - 3 * (0.95 * 0.05 / 60) ** 0.5


def test_replicates_weigh_whole_runs() -> None:
    """Ten copies of five networks tell as much as the five: by runs the interval is as wide as theirs."""
    few, y = normal(5, 3), {"w": normal(20, 3, seed=1) + 1}
    copies = few.repeat_interleave(10, 0) + 1e-3 * normal(50, 3, seed=2)
    runs = torch.arange(5).repeat_interleave(10)

    def width(x: Tensor, groups: tuple[Tensor | None, None]) -> float:
        low, high = vectors_test({"w": x}, y, permutations=1, groups=groups, generator=generator()).interval
        return high - low

    assert width(copies, (runs, None)) == pytest.approx(width(few, (None, None)), rel=0.15)
    assert width(copies, (None, None)) < 0.8 * width(few, (None, None))  # what networks alone would claim


def test_a_run_that_is_drawn_twice_is_not_twice_as_close() -> None:
    """Networks of one run are alike, whichever copy they are in: by hand, over all pairs that count."""
    kernel = torch.rand(6, 6, dtype=torch.float64, generator=generator())
    kernel = (kernel + kernel.T).fill_diagonal_(0)
    own = torch.tensor([0, 0, 1, 1, 2, 2])  # the first set is runs 0 (drawn twice) and 1, the second run 2
    weights = torch.tensor([[2, 2, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]], dtype=torch.float64).T
    drawn = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3)]  # (copy of a run, network)
    pairs = [(p, q) for p in drawn for q in drawn if p[1] != q[1] and (p[0] == q[0] or p[1] // 2 != q[1] // 2)]
    inside = torch.stack([kernel[p[1], q[1]] for p, q in pairs]).mean()
    across = torch.stack([kernel[p[1], j] for p in drawn for j in (4, 5)]).mean()
    assert float(u_statistics(kernel, weights, own)[0]) == pytest.approx(float(inside + kernel[4, 5] - 2 * across))


def test_equal_sizes_and_what_was_aggregated() -> None:
    x, y = ({"a.w": normal(n, 3, seed=n), "a.b": normal(n, 2, seed=n + 1)} for n in (6, 15))
    plain = discrepancy_test(x, y)
    assert plain.sizes == (6, 15) and plain.removed == "nothing"
    assert plain.aggregation.startswith("mean over 2 tensors of the mean over 20 kernels (laplace, gaussian")
    assert vectors_test(x, y, sizes="equal").sizes == (6, 6)
    assert plain.value == pytest.approx(float(network_discrepancy(x, y)), abs=1e-12)


# --- other distances of two sets


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
    found = vector_distances(x, y, generator=generator()).sliced_wasserstein
    assert found == pytest.approx(float((a - b).square().mean().sqrt()), abs=1e-12)
    shifted = normal(5, 3) + torch.tensor([3.0, 0, 0])
    plane = [vector_distances(normal(5, 3), shifted, generator=generator(k)).sliced_wasserstein for k in range(150)]
    assert np.mean(np.square(plane)) == pytest.approx(3, rel=0.03)  # a shift by 3: E cos^2 = 1/3


# --- homogeneity of the units


def p_value(samples: Tensor, seed: int = 0, **options: Any) -> float:
    return marginal_homogeneity(samples, generator=generator(seed), **options).p_value


def test_p_values_are_uniform_under_the_null() -> None:
    """Units that share a random factor in each sample are exchangeable, though neither normal nor independent."""
    samples = ((1 + normal(8, 1, 1, seed=seed).abs()) * normal(8, 5, 3, seed=1000 + seed) for seed in range(200))
    assert has_level([p_value(x, seed, num_resamples=39) for seed, x in enumerate(samples)])


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


# --- refusals

X, P = normal(5, 3), probabilities(4, 3)
REFUSALS: list[tuple[str, Callable[[], Any]]] = [
    ("samples >= 2", lambda: maximum_mean_discrepancy(X, X[:1])),
    ("samples >= 2", lambda: vector_distances(X[:1], X)),
    ("diverged", lambda: maximum_mean_discrepancy(X, X * torch.nan)),
    ("one architecture", lambda: maximum_mean_discrepancy(X, X[:, :2])),
    ("permutations must be", lambda: discrepancy_test({"w": X}, {"w": X}, permutations=0)),
    ("at least two", lambda: discrepancy_test({"w": X[:1]}, {"w": X})),
    ("diverged", lambda: discrepancy_test({"w": X * torch.nan}, {"w": X})),
    ("two architectures", lambda: discrepancy_test({"v": X}, {"w": X})),
    ("features", lambda: discrepancy_test({"w": X[:, :2]}, {"w": X})),
    ("sizes must be", lambda: vectors_test({"w": X}, {"w": X}, sizes="same")),
    ("groups has the shape", lambda: vectors_test({"w": X}, {"w": X}, groups=(torch.zeros(4), None))),
    ("at least 2 samples", lambda: marginal_homogeneity(normal(1, 4, 2))),
    ("diverged", lambda: marginal_homogeneity(normal(3, 4, 2) * torch.nan)),
    ("members, points, classes", lambda: pairwise_mutual_information(P)),
    ("at least three", lambda: diversity_summary(torch.zeros(2, 2), torch.zeros(2, 2))),
    ("same networks", lambda: diversity_summary(torch.zeros(3, 3), torch.zeros(4, 4))),
    ("shapes", lambda: gaussian_wasserstein(torch.eye(3), torch.eye(2))),
    ("no covariance", lambda: gaussian_wasserstein(torch.eye(3), torch.diag(torch.tensor([1.0, 1.0, -1.0])))),
    ("no covariance", lambda: gaussian_wasserstein(torch.eye(3), torch.ones(3, 3).triu())),
    ("NaN", lambda: gaussian_wasserstein(torch.eye(3), torch.eye(3) * torch.nan)),
    ("softmax", lambda: predictive_agreement(normal(4, 3), P)),
    ("sums over the classes", lambda: predictive_agreement(P, torch.full((4, 3), 0.5))),
    ("NaN", lambda: predictive_total_variation(P * torch.nan, P)),
    ("different points or classes", lambda: predictive_total_variation(P, torch.full((4, 2), 0.5))),
    ("points, classes", lambda: predictive_total_variation(torch.ones(4), P)),
    ("at least one", lambda: predictive_total_variation(torch.ones(0, 3), P)),
    ("class labels", lambda: predictive_agreement(torch.eye(3).long(), P)),
]


@pytest.mark.parametrize(("message", "call"), REFUSALS)
def test_what_gives_no_number_is_refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        call()
