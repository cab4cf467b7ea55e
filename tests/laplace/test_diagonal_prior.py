"""A precision for each weight: against laplace-torch, dense formulas and scipy, in float64."""

from __future__ import annotations

import math
from typing import Any

import laplace
import pytest
import torch
from laplace_oracles import data, randomize
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tu_symmetry.laplace.blocks import DiagonalBlock
from tu_symmetry.laplace.determinants import (
    FLAT,
    Hyperprior,
    Noise,
    Spectrum,
)
from tu_symmetry.laplace.groups import SingleWeights
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.tangent import Slot


def problem(kind: str = "classification") -> tuple[nn.Module, Tensor, Tensor]:
    model = randomize(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)))
    return model, *data(4, outputs=3, kind=kind, samples=9)


def vector(size: int, seed: int = 0) -> Tensor:
    """Positive numbers over two decades."""
    return (4.6 * torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 2.3).exp()


def fitted(kind: str = "classification", **options: Any) -> tuple[LinearizedLaplace, Tensor, Tensor]:
    model, x, y = problem(kind)
    la = LinearizedLaplace(model, kind, **{"prior": "diagonal", "evaluate_at": "map", "curvature": "diag"} | options)  # type: ignore[arg-type]
    return la.fit([(x[:4], y[:4]), (x[4:], y[4:])]), x, y


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_evidence_and_predictive_are_those_of_laplace_torch(kind: str) -> None:
    """Whose ``prior_precision`` is one vector, in the order of the parameters, as ours may be."""
    model, x, y = problem(kind)
    precision = vector(27)
    noise: dict[str, Any] = {"sigma_noise": 0.6} if kind == "regression" else {}
    theirs = laplace.Laplace(
        model, kind, subset_of_weights="all", hessian_structure="diag", prior_precision=precision, **noise
    )
    theirs.fit(DataLoader(TensorDataset(x, y), 4))
    ours: dict[str, Any] = {"noise_variance": 0.36} if kind == "regression" else {}
    la, *_ = fitted(kind, prior_precision=precision, **ours)
    assert la.log_marginal_likelihood() == pytest.approx(float(theirs.log_marginal_likelihood()), rel=1e-7)
    covariance = theirs._glm_predictive_distribution(x)[1].detach()
    torch.testing.assert_close(la.function_covariance(x)[1], covariance, rtol=1e-6, atol=1e-7)


def test_precisions_by_parameter_by_weight_and_for_all() -> None:
    la, *_ = fitted(prior_precision={"0.weight": torch.arange(1.0, 13.0).view(3, 4), "2.bias": 5.0})
    place = la.tangent.slots["0.weight"]
    torch.testing.assert_close(la.log_precision[place.start : place.stop].exp(), torch.arange(1.0, 13.0).double())
    la.set_precision({"0.weight[2,3]": 0.5})
    names = la.prior_groups.names
    assert len(names) == len(set(names)) == la.tangent.size
    precision = dict(zip(names, la.log_precision.exp().tolist(), strict=True))
    assert precision["0.weight[2,3]"] == pytest.approx(0.5) and precision["0.weight[2,2]"] == pytest.approx(11)
    assert [precision[f"2.bias[{i}]"] for i in range(3)] == pytest.approx([5, 5, 5])
    assert precision["0.bias[0]"] == pytest.approx(float(la.center[names.index("0.bias[0]")]))
    rows = {row.name: row for row in la.report()}
    assert rows["0.weight[2,3]"].precision == pytest.approx(0.5) and rows["0.weight[2,3]"].size == 1
    la.set_precision(2.0)
    assert bool((la.log_precision == math.log(2.0)).all())


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"0.weight": torch.ones(4, 3)}, r"shape \(4, 3\).*\(3, 4\)"),
        ({"0.weight[3,0]": 1.0}, "no prior group '0.weight\\[3,0\\]'"),
        ({"0.weight": torch.zeros(3, 4)}, "positive and finite"),
        (torch.ones(26), "27 prior groups.*26"),
        (torch.full((27,), math.inf), "positive and finite"),
    ],
)
def test_precisions_that_do_not_fit(precision: Any, message: str) -> None:
    la, *_ = fitted()
    before = la.log_precision.clone()
    with pytest.raises(ValueError, match=message):
        la.set_precision(precision)
    assert torch.equal(la.log_precision, before)


@pytest.mark.parametrize("noise", [None, Noise(20, 3.0)])
@pytest.mark.parametrize("hyperprior", [Hyperprior(), Hyperprior(std=0.7, cap=3.0), FLAT])
def test_the_optimum_is_that_of_scipy(hyperprior: Hyperprior, noise: Noise | None) -> None:
    """The objective in all log precisions and the log noise variance, whose minimum scipy finds from another start."""
    rows = 2 * torch.randn(4, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    block = DiagonalBlock("w", 0, torch.arange(7), rows.square().sum(0))
    own = Spectrum.of([block], SingleWeights({"w": Slot(0, 7, (7,))}))
    norms, center = vector(7, 1) / 5, vector(7, 2).log()
    bound = min(math.log(hyperprior.cap), 20.0)  # scipy's line search does not like exp(27)

    def energy(point: Any) -> float:
        rho, tau = torch.as_tensor(point[:7], dtype=torch.float64), float(point[7]) if noise is not None else 0.4
        value = 0.5 * (float((rho.exp() * norms).sum()) + own.log_det_ratio(rho, tau))
        return value + hyperprior.energy(rho, center) + (0.0 if noise is None else noise.energy(tau))

    bounds = [(c - bound, c + bound) for c in center.tolist()]
    start = [*center.tolist(), *([noise.lowest() + 1] if noise is not None else [])]
    bounds += [] if noise is None else [(noise.lowest(), noise.lowest() + 20)]
    limits = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 5000, "maxfun": 100_000}
    exact = minimize(energy, start, bounds=bounds, method="L-BFGS-B", options=limits)
    rho, tau = own.step(norms, center + 1, 0.4 if noise is None else noise.lowest(), center, hyperprior, noise)
    point = [*rho.tolist(), tau] if noise is not None else rho.tolist()
    assert energy(point) <= exact.fun + 1e-9
    assert point == pytest.approx(exact.x.tolist(), abs=2e-3)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_joint_point_is_stationary(kind: str) -> None:
    """The precisions are those of the weights, and the weights those of the precisions."""
    la, *_ = fitted(kind, noise_variance=0.3 if kind == "regression" else None, evaluate_at="tangent_mode")
    found = la.optimize_evidence(tolerance=1e-4, mode_tolerance=1e-4)
    assert found.converged and found.gap < 1e-6
    rho, _ = la.fitted.curvature.determinants.step(
        la.theta.square(), la.center.log(), la.fitted.log_noise, la.center.log(), la.hyperprior, None
    )
    torch.testing.assert_close(rho, la.log_precision, rtol=0, atol=2e-4)
