"""Proposition 3 of arXiv 2206.08900: rescaling normalized weights leaves the per-group predictive as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laplace_oracles import data, randomize
from torch import Tensor, nn

from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.tangent import TangentModel, select_parameters
from tu_symmetry.symmetry.action import apply_scale
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph


def batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, eps=1e-30), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-30),
        nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def layernorm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6, eps=0.0), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5, eps=0.0), nn.Tanh(),
        nn.Linear(5, 3),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "batchnorm": (batchnorm, (2, 6, 6)),
    "layernorm": (layernorm, (4,)),
}


def problem(name: str, kind: str = "classification") -> tuple[nn.Module, SymmetryGraph, Tensor, Tensor]:
    build, shape = NETWORKS[name]
    model = randomize(build())
    x, y = data(*shape, outputs=3, kind=kind, samples=16)
    return model, discover_symmetries(model, x), x, y


def rescaled(model: nn.Module, graph: SymmetryGraph, k: float, build: Any) -> nn.Module:
    """All normalized weights times ``k``, running statistics moving along."""
    found = build().double().eval()
    factors = {g.name: torch.full((g.size,), k, dtype=torch.float64).log() for g in graph.normalizations}
    found.load_state_dict(apply_scale(graph, factors, model.state_dict()))
    return found


def predictions(
    model: nn.Module, graph: SymmetryGraph, x: Tensor, y: Tensor, kind: str = "classification", **options: Any
) -> tuple[LinearizedLaplace, dict[str, Tensor]]:
    la = LinearizedLaplace(model, kind, graph=graph, **options)  # type: ignore[arg-type]
    la.fit([(x, y)])
    assert la.optimize_evidence().converged
    inputs = x[:5] + 0.3
    mean, covariance = la.function_covariance(inputs)
    found = {"mean": mean, "covariance": covariance, "samples": la.function_samples(inputs, 8)}
    if kind == "classification":
        found["probit"] = la.predictive(inputs, link_approx="probit")
        found["mc"] = la.predictive(inputs, covariance="samples", num_samples=8)
    else:
        found["variance"] = la.predictive(inputs).variance
    return la, found


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.filterwarnings("ignore::tu_symmetry.laplace.report.PrunedGroupWarning")
@pytest.mark.parametrize(
    ("kind", "curvature"),
    [
        ("classification", "kfac"),
        pytest.param("classification", "full", marks=pytest.mark.slow),
        pytest.param("regression", "kfac", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", list(NETWORKS))
def test_predictive_does_not_depend_on_the_scale_of_normalized_weights(name: str, kind: str, curvature: str) -> None:
    model, graph, x, y = problem(name, kind)
    reference, expected = predictions(model, graph, x, y, kind, curvature=curvature)
    evidence = reference.log_marginal_likelihood()
    assert graph.normalizations
    for k in (0.1, 10.0, 1000.0):
        moved = rescaled(model, graph, k, NETWORKS[name][0])
        torch.testing.assert_close(moved(x), model(x), rtol=1e-9, atol=1e-9)
        la, found = predictions(moved, graph, x, y, kind, curvature=curvature)
        assert la.noise_variance == pytest.approx(reference.noise_variance, rel=1e-6)
        for key, value in found.items():
            assert relative(value, expected[key]) < 1e-6, key
        assert la.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-7)
        for row, before in zip(la.report(), reference.report(), strict=True):
            factor = 1.0 if row.name == "rest" else k**2
            assert row.precision * factor == pytest.approx(before.precision, rel=1e-4)
            assert row.squared_norm / factor == pytest.approx(before.squared_norm, rel=1e-4, abs=1e-9)
            assert row.gamma == pytest.approx(before.gamma, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "parameters", "vanishes"),
    [
        ("layernorm", ["0", "3", "6"], True),
        ("layernorm", ["0", "3", "6.weight"], False),  # the last bias is fixed
        ("layernorm", ["0", "1", "3", "6"], False),  # the affine parameters of a normalization count twice
        ("batchnorm", ["0", "3", "8"], False),  # running statistics do not move along
    ],
)
def test_the_tangent_model_is_linear_where_normalized_weights_have_no_scale(
    name: str, parameters: list[str], vanishes: bool
) -> None:
    """``h = J theta``, without an offset ``f - J theta~``: for a dense last layer behind normalized weights."""
    model, _, x, _ = problem(name)
    tangent = TangentModel(model, select_parameters(model, parameters))
    found = tangent.linearize(x)
    offset = relative(found.push(tangent.point()), found.outputs)
    assert offset < 1e-12 if vanishes else offset > 0.1
