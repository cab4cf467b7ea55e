"""Equality with laplace-torch's KronLaplace where both apply, and conversion both ways."""

from __future__ import annotations

from typing import Any

import laplace
import pytest
import torch
from laplace_oracles import data, randomize
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tu_symmetry.laplace.linearized import LinearizedLaplace

BUILD = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2, bias=False), nn.Tanh(), nn.Flatten(),
            nn.Linear(27, 3),
        ),
        (2, 4, 4),
    ),
}  # fmt: skip


def problem(name: str, kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    build, shape = BUILD[name]
    return (randomize(build()), *data(*shape, outputs=3, kind=kind, samples=12))  # type: ignore[no-untyped-call]


def theirs(model: nn.Module, x: Tensor, y: Tensor, kind: str, **options: Any) -> Any:
    la = laplace.Laplace(model, kind, subset_of_weights="all", hessian_structure="kron", **options)
    la.fit(DataLoader(TensorDataset(x, y), 4))
    return la


def ours(model: nn.Module, x: Tensor, y: Tensor, kind: str, **options: Any) -> LinearizedLaplace:
    options = {"prior": "single", "evaluate_at": "map", "bias": "shared"} | options
    la = LinearizedLaplace(model, kind, **options)  # type: ignore[arg-type]
    return la.fit([(x[:4], y[:4]), (x[4:], y[4:])])


def evidence(other: Any) -> float:
    return float(other.log_marginal_likelihood())


def covariances(other: Any, x: Tensor) -> Tensor:
    """Functional covariances of their GLM predictive ``[batch, outputs, outputs]``."""
    return other._glm_predictive_distribution(x)[1].detach()


@pytest.mark.parametrize("prior", ["single", "per_tensor"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("name", list(BUILD))
def test_evidence_and_predictive_are_theirs(name: str, kind: str, prior: str) -> None:
    model, x, y = problem(name, kind)
    noise = {"sigma_noise": 0.6} if kind == "regression" else {}
    precision = torch.full((1,), 1.7) if prior == "single" else torch.arange(1, 1 + len([*model.parameters()])) / 2
    other = theirs(model, x, y, kind, prior_precision=precision.double(), **noise)
    own = {"noise_variance": 0.36} if kind == "regression" else {}
    la = ours(model, x, y, kind, prior=prior, **own)
    la.set_precision(precision if prior == "per_tensor" else float(precision))
    assert la.log_marginal_likelihood() == pytest.approx(evidence(other), rel=1e-8)
    torch.testing.assert_close(la.function_covariance(x)[1], covariances(other, x), rtol=1e-7, atol=1e-9)
    if kind == "classification":
        expected = other(x, pred_type="glm", link_approx="probit").detach()
        torch.testing.assert_close(la.predictive(x, link_approx="probit"), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("noise", [None, 0.3])
@pytest.mark.parametrize("prior", ["single", "per_layer"])
def test_conversion_to_laplace_torch(prior: str, noise: float | None) -> None:
    model, x, y = problem("cnn", "regression")
    la = ours(model, x, y, "regression", prior=prior, bias="exact", noise_variance=noise)
    la.optimize_evidence(hyperprior="default")
    other = la.to_laplace_torch()
    assert isinstance(other, laplace.KronLaplace)
    if noise is not None:  # else its noise is that of predictions, and not that of the largest evidence
        assert evidence(other) == pytest.approx(la.log_marginal_likelihood(), rel=1e-8)
    torch.testing.assert_close(covariances(other, x), la.function_covariance(x)[1], rtol=1e-7, atol=1e-9)
    mean, variance = other(x)[:2]
    torch.testing.assert_close(mean.detach(), la.predictive(x).mean)
    diagonal = variance.diagonal(dim1=-2, dim2=-1).detach()
    torch.testing.assert_close(diagonal, la.predictive(x).epistemic, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(
        la.predictive(x).variance - diagonal, torch.full_like(diagonal, float(other.sigma_noise) ** 2)
    )
    before = evidence(other)
    other.load_state_dict(other.state_dict())  # through their dense factors
    assert evidence(other) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_conversion_from_laplace_torch(kind: str, layers: int) -> None:
    model, x, y = problem("mlp", kind)
    precision = torch.tensor([0.3, 1.0, 2.0, 5.0], dtype=torch.float64)[:layers]
    noise = {"sigma_noise": 0.6} if kind == "regression" else {}
    other = theirs(model, x, y, kind, prior_precision=precision, **noise)
    la = LinearizedLaplace.from_laplace_torch(other)
    assert la.log_marginal_likelihood() == pytest.approx(evidence(other), rel=1e-8)
    torch.testing.assert_close(la.function_covariance(x)[1], covariances(other, x), rtol=1e-7, atol=1e-9)
    assert [row.precision for row in la.report()] == pytest.approx(precision.tolist())
    there_and_back = la.to_laplace_torch()
    assert evidence(there_and_back) == pytest.approx(evidence(other), rel=1e-8)
    torch.testing.assert_close(covariances(there_and_back, x), covariances(other, x), rtol=1e-7, atol=1e-9)
    better = la.optimize_evidence(hyperprior="default")
    assert better.log_marginal_likelihood > evidence(other)


def test_what_laplace_torch_cannot_hold() -> None:
    model, x, y = problem("mlp", "classification")
    for options, message in (({"curvature": "diag"}, "'kfac'"), ({"parameters": ["2"]}, r"requires_grad_\(False\)")):
        with pytest.raises(ValueError, match=message):
            ours(model, x, y, "classification", **options).to_laplace_torch()
    model = randomize(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)))
    with pytest.raises(ValueError, match=r"0\.weight.*grouped"):
        ours(model, *data(2, 4, 4, outputs=3), "classification").to_laplace_torch()


def test_what_has_no_counterpart() -> None:
    model, x, y = problem("mlp", "classification")
    for option in ({"temperature": 0.5}, {"damping": True}, {"prior_mean": 1.0}):
        with pytest.raises(ValueError, match="no counterpart"):
            LinearizedLaplace.from_laplace_torch(theirs(model, x, y, "classification", **option))
    other = laplace.Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
    with pytest.raises(ValueError, match="DiagLaplace is no fitted KronLaplace"):
        LinearizedLaplace.from_laplace_torch(other)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_calls_and_samples_are_theirs(kind: str) -> None:
    """Samples of both, whitened by their precision matrix, are independent and standard normal."""
    model, x, y = problem("mlp", kind)
    la = ours(model, x, y, kind)
    la.set_precision(1.3)
    other, count = la.to_laplace_torch(), 4000
    if kind == "classification":
        torch.testing.assert_close(la(x, link_approx="probit"), other(x, link_approx="probit"))
    else:
        torch.testing.assert_close(la(x).mean, other(x)[0])
    states = la.sample(count)
    own = torch.cat([states[name].flatten(1) for name, _ in model.named_parameters()], dim=1)
    theirs = other.sample(count, generator=torch.Generator().manual_seed(0))
    root = torch.linalg.cholesky(other.posterior_precision.to_matrix())
    for samples in (own, theirs):
        white = (samples - other.mean) @ root
        assert float(white.mean(0).abs().max()) < 0.1
        assert float((white.mT @ white / count - torch.eye(len(root))).abs().max()) < 0.12
