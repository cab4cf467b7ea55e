"""Pairwise mutual information and maximum mean discrepancy: third-party oracles, laws, and distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from drawn import normal, probabilities
from scipy.spatial.distance import jensenshannon

from tu_symmetry.metrics import MaximumMeanDiscrepancy, PairwiseMutualInformation
from tu_symmetry.metrics.functional import diversity as diversity_module
from tu_symmetry.metrics.functional import maximum_mean_discrepancy, pairwise_mutual_information


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
    p, mean = probabilities(4, 30, 3), PairwiseMutualInformation(4)
    for part in p.split((4, 25, 1), dim=1):
        torch.testing.assert_close(mean(part), pairwise_mutual_information(part).sum() / 12)
    torch.testing.assert_close(mean.compute(), pairwise_mutual_information(p)[torch.ones(4, 4).triu(1).bool()].mean())


def test_mutual_information_errors() -> None:
    with pytest.raises(ValueError, match="members, points, classes"):
        pairwise_mutual_information(probabilities(5, 3))
    with pytest.raises(ValueError, match="softmax"):
        pairwise_mutual_information(normal(2, 5, 3))
    with pytest.raises(ValueError, match="num_members=3"):
        PairwiseMutualInformation(3).update(probabilities(2, 5, 3))
    with pytest.raises(ValueError, match="at least 2"):
        PairwiseMutualInformation(1)


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
        metric.compute()
