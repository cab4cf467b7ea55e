"""Pairwise mutual information and maximum mean discrepancy: third-party oracles, laws, and distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from sklearn.metrics.pairwise import laplacian_kernel, rbf_kernel
from torch import Tensor

from tu_symmetry.metrics import MaximumMeanDiscrepancy, PairwiseMutualInformation
from tu_symmetry.metrics.functional import diversity as diversity_module
from tu_symmetry.metrics.functional import maximum_mean_discrepancy, mmd_bandwidths, pairwise_mutual_information


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probabilities(*shape: int, seed: int = 0) -> Tensor:
    return (2 * normal(*shape, seed=seed)).softmax(-1)


def test_mutual_information_is_scipys_jensen_shannon_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    p = probabilities(4, 25, 6)
    expected = [[(jensenshannon(a.numpy(), b.numpy(), axis=-1) ** 2).mean() for b in p] for a in p]
    found = pairwise_mutual_information(p)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-14)
    monkeypatch.setattr(diversity_module, "_ELEMENTS_AT_ONCE", 1)
    torch.testing.assert_close(pairwise_mutual_information(p), found, atol=1e-15, rtol=0)


def test_mutual_information_laws() -> None:
    p = probabilities(3, 10, 5)
    found = pairwise_mutual_information(p)
    assert torch.equal(found, found.T) and torch.equal(found.diagonal(), torch.zeros(3).double())
    torch.testing.assert_close(pairwise_mutual_information(p[..., torch.randperm(5)]), found)
    assert pairwise_mutual_information(torch.eye(2).unsqueeze(1))[0, 1].item() == pytest.approx(math.log(2))
    assert pairwise_mutual_information(torch.stack([p[0], p[0]])).abs().max() < 1e-15


def test_mutual_information_accumulates() -> None:
    p = probabilities(4, 30, 3)
    matrix, mean = PairwiseMutualInformation(4, reduction="none"), PairwiseMutualInformation(4)
    for part in p.split((4, 25, 1), dim=1):
        matrix.update(part)
        torch.testing.assert_close(mean(part), pairwise_mutual_information(part).sum() / 12)
    expected = pairwise_mutual_information(p)
    torch.testing.assert_close(matrix.compute(), expected)
    torch.testing.assert_close(mean.compute(), expected[torch.ones(4, 4).triu(1).bool()].mean())


def test_mutual_information_errors() -> None:
    with pytest.raises(ValueError, match="members, points, classes"):
        pairwise_mutual_information(probabilities(5, 3))
    with pytest.raises(ValueError, match="softmax"):
        pairwise_mutual_information(normal(2, 5, 3))
    with pytest.raises(ValueError, match="num_members=3"):
        PairwiseMutualInformation(3).update(probabilities(2, 5, 3))
    with pytest.raises(ValueError, match="at least 2"):
        PairwiseMutualInformation(1)


def mmdagg_bandwidths(distances: np.ndarray, count: int) -> np.ndarray:
    """A transcription of ``compute_bandwidths`` in MMDAgg's code."""
    distances = distances + (distances == 0) * np.median(distances)
    dd = np.sort(distances)
    lambda_min = max(dd[int(np.floor(len(dd) * 0.05))], 0.1) if np.min(distances) < 0.1 else np.min(distances)
    lambda_min, lambda_max = lambda_min / 2, max(np.max(distances), 0.3) * 2
    power = (lambda_max / lambda_min) ** (1 / (count - 1))
    return np.array([power**i * lambda_min for i in range(count)])


@pytest.mark.parametrize("distances", [normal(101).abs(), normal(100).abs() + 0.2, normal(50).abs() / 100,
                                       torch.cat([torch.zeros(3).double(), normal(20).abs() + 1])])  # fmt: skip
def test_bandwidths_are_those_of_mmdagg(distances: Tensor) -> None:
    np.testing.assert_allclose(mmd_bandwidths(distances, 7).numpy(), mmdagg_bandwidths(distances.numpy(), 7))


def test_mmd_is_the_u_statistic_of_sklearns_kernels() -> None:
    x, y = normal(9, 4), 0.5 * normal(12, 4, seed=1) + 0.7
    found = maximum_mean_discrepancy(x, y, reduction="none")
    for row, p in enumerate((1, 2)):
        bandwidths = mmdagg_bandwidths(torch.cdist(x, y, p=float(p)).flatten().numpy(), 10)
        for column, b in enumerate(bandwidths):
            kernel, gamma = (laplacian_kernel, 1 / b) if p == 1 else (rbf_kernel, 1 / b**2)
            kxx, kyy, kxy = (kernel(s.numpy(), t.numpy(), gamma=gamma) for s, t in ((x, x), (y, y), (x, y)))
            expected = (kxx.sum() - 9) / 72 + (kyy.sum() - 12) / 132 - 2 * kxy.mean()
            assert found[row, column].item() == pytest.approx(expected, abs=1e-13)
    assert maximum_mean_discrepancy(x, y).item() == pytest.approx(found.mean().item())


def test_mmd_laws() -> None:
    x, y = normal(20, 5), normal(30, 5, seed=1) + 0.5
    value = maximum_mean_discrepancy(x, y)
    torch.testing.assert_close(maximum_mean_discrepancy(y, x), value)
    torch.testing.assert_close(maximum_mean_discrepancy(x.flip(0, 1), y.flip(1)), value)
    torch.testing.assert_close(maximum_mean_discrepancy(x + 3, y + 3), value)
    torch.testing.assert_close(maximum_mean_discrepancy(7 * x, 7 * y), value)
    single = maximum_mean_discrepancy((x + 1e3).float(), (y + 1e3).float())  # distances must not cancel
    torch.testing.assert_close(single, value, atol=1e-4, rtol=0)


def test_mmd_is_unbiased_and_sees_a_shift() -> None:
    draws = [maximum_mean_discrepancy(normal(15, 3, seed=2 * s), normal(15, 3, seed=2 * s + 1)) for s in range(200)]
    null = torch.stack(draws)
    assert null.mean().abs() < 3 * null.std() / 200**0.5 and (null < 0).any()
    assert maximum_mean_discrepancy(normal(15, 3), normal(15, 3, seed=1) + 1) > null.max()


def test_mmd_errors() -> None:
    x = normal(5, 3)
    for bad, message in ((x[:1], "samples >= 2"), (x * torch.nan, "diverged"), (x[:, :2], "one architecture")):
        with pytest.raises(ValueError, match=message):
            maximum_mean_discrepancy(x, bad)
    metric = MaximumMeanDiscrepancy()
    with pytest.raises(ValueError, match="leading sample axis"):
        metric.update({"a": normal(3, 2), "b": normal(4, 2)}, reference=True)
    metric.update({"a": normal(3, 2)}, reference=True)
    with pytest.raises(ValueError, match=r"they differ in \['a', 'b'\]"):
        metric.update({"a": normal(3, 3), "b": normal(3)}, reference=False)
    with pytest.raises(ValueError, match="no samples so far"):
        metric.compute_by_part()


def networks(count: int, seed: int) -> dict[str, Tensor]:
    return {
        "w": normal(count, 3, 2, seed=seed),
        "b": normal(count, 3, seed=seed + 1),
        "steps": torch.zeros(count).long(),
    }


def test_mmd_of_states_accumulates_over_tensors_and_batches() -> None:
    reference, samples = networks(12, 0), networks(8, 2)
    metric = MaximumMeanDiscrepancy(reset_reference=False)
    for part in (slice(0, 5), slice(5, 12)):
        metric.update({n: t[part] for n, t in reference.items()}, reference=True)
    metric.update(samples, reference=False)
    expected = {n: maximum_mean_discrepancy(reference[n].flatten(1), samples[n].flatten(1)) for n in ("w", "b")}
    by_part = metric.compute_by_part()
    assert by_part.keys() == expected.keys()
    torch.testing.assert_close(by_part, expected)
    torch.testing.assert_close(metric.compute(), (expected["w"] + expected["b"]) / 2)
    metric.reset()
    metric.update({n: t[:4] for n, t in samples.items()}, reference=False)
    assert sum(map(len, metric.reference)) == 12 and sum(map(len, metric.samples)) == 4
    forgetful = MaximumMeanDiscrepancy()
    forgetful.update(reference, reference=True)
    forgetful.reset()
    forgetful.update({"other": normal(3, 2)}, reference=True)  # another architecture may follow
    assert sum(map(len, forgetful.reference)) == 3


def by_bias(state: dict[str, Tensor]) -> dict[str, Tensor]:
    order = state["b"].argsort()
    return {"w": state["w"][order], "b": state["b"][order]}


def test_removing_symmetries_removes_what_only_the_symmetry_explains() -> None:
    reference, samples = networks(60, 0), networks(60, 2)
    ascending = [by_bias({n: t[i] for n, t in samples.items()}) for i in range(60)]  # the same functions, another mode
    samples = {n: torch.stack([s[n] for s in ascending]) for n in ("w", "b")}
    reference.pop("steps")
    values = []
    for remove in (None, by_bias):
        metric = MaximumMeanDiscrepancy(remove)
        metric.update(reference, reference=True)
        metric.update(samples, reference=False)
        values.append(float(metric.compute_by_part()["b"]))
    assert values[0] > 0.05 and abs(values[1]) < 0.01
