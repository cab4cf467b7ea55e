"""Agreement, total variation and NoT: values by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn import probabilities
from torch import Tensor
from torchmetrics import Metric

from tu_symmetry.metrics import PredictiveAgreement, PredictiveTotalVariation, TranspositionCount
from tu_symmetry.metrics.functional import predictive_agreement, predictive_total_variation
from tu_symmetry.states import SymmetryError

PAIRS = [
    (PredictiveAgreement, predictive_agreement),
    (PredictiveTotalVariation, predictive_total_variation),
]
ELEMENTS = [{"a": torch.tensor([1, 0, 2]), "b": torch.tensor([3, 0, 1, 2])}, {"a": torch.tensor([0, 1, 2])}]


def test_values_by_hand() -> None:
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


def test_laws() -> None:
    a, b, c = (probabilities(50, 3, seed=s) for s in range(3))
    assert predictive_total_variation(a, a) == 0 and predictive_agreement(a, a) == 1
    assert predictive_total_variation(a, b) == predictive_total_variation(b, a)
    direct = predictive_total_variation(a, b)
    assert direct <= predictive_total_variation(a, c) + predictive_total_variation(c, b)
    assert predictive_total_variation(torch.eye(3), torch.eye(3).roll(1, 0)) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.randn(4, 3), "softmax"),
        (torch.full((4, 3), 0.5), "sums over the classes"),
        (torch.tensor([[1.5, -0.5, 0.0]]).expand(4, 3), "least value is -0.5"),
        (torch.full((4, 3), float("nan")), "NaN"),
        (torch.full((4, 2), 0.5), "different points or classes"),
        (torch.ones(4), "expected \\(points, classes\\)"),
        (torch.ones(0, 3), "at least one"),
        (torch.eye(3).long(), "class labels"),
    ],
)
@pytest.mark.parametrize("function", [f for _, f in PAIRS])
def test_errors(function: Any, bad: Tensor, message: str) -> None:
    good = probabilities(4, 3)
    with pytest.raises(ValueError, match=message):
        function(bad, good)
    with pytest.raises(ValueError, match=message):
        function(good, bad)


@pytest.mark.parametrize(("metric_class", "function"), PAIRS)
def test_batches_accumulate_to_the_value_on_all_points(metric_class: type[Metric], function: Any) -> None:
    a, b = probabilities(3, 60, 5), probabilities(60, 5, seed=1)
    metric = metric_class()
    sizes = (7, 30, 1, 22)
    for part_a, part_b in zip(a.split(sizes, 1), b.split(sizes), strict=True):
        torch.testing.assert_close(metric(part_a, part_b), function(part_a, part_b))
    torch.testing.assert_close(metric.compute(), function(a, b))


def test_transposition_count() -> None:
    metric = TranspositionCount()
    for element in ELEMENTS:
        metric.update(element)
    assert float(metric.compute()) == 2.0
    metric.update(torch.tensor([[1, 0], [1, 0]]))
    assert float(metric.compute()) == 2.0


def test_transposition_count_refuses_what_is_no_permutation() -> None:
    with pytest.raises(SymmetryError, match="missing or repeated"):
        TranspositionCount().update(torch.tensor([0, 0, 1]))
    with pytest.raises(SymmetryError, match="integer"):
        TranspositionCount().update({"a": torch.tensor([0.0, 1.0])})
