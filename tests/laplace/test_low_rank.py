"""Low-rank curvature: exact where the rank suffices, below the full one where not, and all that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from laplace_oracles import agree, data, dense_covariance, dense_curvature, jacobian, posterior_covariance, randomize
from torch import Tensor, nn

from tu_symmetry.laplace.evidence import Noise
from tu_symmetry.laplace.model import LinearizedLaplace


def problem(kind: str = "classification", samples: int = 9) -> tuple[nn.Module, Tensor, Tensor]:
    model = randomize(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    return model, *data(4, outputs=3, kind=kind, samples=samples)


def batches(x: Tensor, y: Tensor, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("prior", ["single", "per_layer", "per_filter"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_enough_directions_are_the_full_curvature(kind: Any, prior: Any) -> None:
    """Nine samples with three outputs have rank 27 at most: posterior, evidence and prediction are the full ones."""
    model, x, y = problem(kind)
    options: dict[str, Any] = {"prior": prior, "groups": {"first": ["0.weight"]} if prior == "per_filter" else None}
    low = LinearizedLaplace(model, kind, curvature="lowrank", rank=27, **options).fit(batches(x, y))
    full = LinearizedLaplace(model, kind, curvature="full", **options).fit([(x, y)])
    torch.testing.assert_close(dense_curvature(low), dense_curvature(full), rtol=1e-8, atol=1e-9)
    for la in (low, full):
        la.set_precision({name: 0.5 + i for i, name in enumerate(la.prior_groups.names)})
    torch.testing.assert_close(posterior_covariance(low.posterior), dense_covariance(full), rtol=1e-7, atol=1e-9)
    assert low.log_marginal_likelihood() == pytest.approx(full.log_marginal_likelihood(), rel=1e-8)
    torch.testing.assert_close(low.function_covariance(x)[1], full.function_covariance(x)[1], rtol=1e-7, atol=1e-9)
    found, expected = low.fitted.curvature.determinants, full.fitted.curvature.determinants
    rho = low.log_precision
    torch.testing.assert_close(found.gamma(rho, 0.3), expected.gamma(rho, 0.3), rtol=1e-8, atol=1e-9)
    norms = torch.rand(len(rho), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(len(rho) + 1, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    free = torch.ones(len(x), dtype=torch.bool)
    one, other = (d.response(x, norms, rho, 0.3, Noise(27, 4.0), 0.2, free) for d in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
def test_the_same_precisions_as_by_the_full_curvature(evaluate_at: Any) -> None:
    model, x, y = problem()
    results = []
    for curvature in ("lowrank", "full"):
        la = LinearizedLaplace(model, curvature=curvature, prior="per_layer", evaluate_at=evaluate_at)  # type: ignore[arg-type]
        results.append((la.fit([(x, y)]).optimize_evidence(), la))
    (first, low), (second, full) = results
    assert first.converged and second.converged
    assert first.log_marginal_likelihood == pytest.approx(second.log_marginal_likelihood, rel=1e-6)
    torch.testing.assert_close(low.log_precision, full.log_precision, rtol=1e-3, atol=1e-3)


def test_fewer_directions_are_the_main_ones_and_never_too_much() -> None:
    model, x, y = problem(samples=60)
    full = dense_curvature(LinearizedLaplace(model, curvature="full", prior="single").fit([(x, y)]))
    values = torch.linalg.eigvalsh(full).flip(0)
    for rank in (3, 8, 15):
        la = LinearizedLaplace(model, curvature="lowrank", rank=rank, prior="single").fit(batches(x, y, 7))
        found = dense_curvature(la)
        assert int(torch.linalg.matrix_rank(found)) == rank
        assert float(torch.linalg.eigvalsh(full - found).min()) > -1e-9 * float(values[0])
        assert float(found.trace()) > 0.93 * float(values[:rank].sum())
        torch.testing.assert_close(posterior_covariance(la.posterior), dense_covariance(la), rtol=1e-7, atol=1e-9)
        jac = jacobian(model, la.tangent.names, x)
        expected = jac @ dense_covariance(la) @ jac.mT
        torch.testing.assert_close(la.function_covariance(x)[1], expected, rtol=1e-7, atol=1e-9)


def test_samples_have_the_posterior_covariance() -> None:
    model, x, y = problem()
    la = LinearizedLaplace(model, curvature="lowrank", rank=5, prior="per_layer").fit([(x, y)])
    root = la.posterior.sample(torch.eye(la.posterior.size, dtype=torch.float64))
    torch.testing.assert_close(root.mT @ root, dense_covariance(la), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("subset", [5, 12])
def test_on_a_subset_of_the_data_it_is_the_gaussian_process_of_laplace_torch(subset: int) -> None:
    """``FunctionalLaplace`` on M of N samples, whose kernel has M / N of the prior's variance."""
    from laplace import FunctionalLaplace  # type: ignore[import-untyped]
    from torch.utils.data import DataLoader, TensorDataset

    model, x, y = problem("regression", samples=12)
    peer = FunctionalLaplace(model, "regression", n_subset=subset, sigma_noise=0.4, prior_precision=0.7)
    peer.fit(DataLoader(TensorDataset(x, y), batch_size=3))
    own = x[peer.train_loader.sampler.indices], y[peer.train_loader.sampler.indices]
    la = LinearizedLaplace(model, "regression", curvature="lowrank", rank=3 * subset, prior="single", evaluate_at="map",
                           noise_variance=0.16, prior_precision=0.7 * 12 / subset).fit([own])  # fmt: skip
    new = data(4, outputs=3, samples=6, seed=7)[0]
    mean, covariance = peer._glm_predictive_distribution(new)
    found = la.function_covariance(new)
    torch.testing.assert_close(found[0], mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], covariance, rtol=1e-5, atol=1e-6)
    jac = jacobian(model, la.tangent.names, torch.cat([new, own[0]]))
    star, kept = jac[:6].flatten(0, 1), jac[6:].flatten(0, 1)
    variance = subset / 12 / 0.7
    middle = torch.linalg.inv(variance * kept @ kept.mT + 0.16 * torch.eye(len(kept), dtype=torch.float64))
    exact = variance * star @ star.mT - variance**2 * star @ kept.mT @ middle @ kept @ star.mT
    exact = exact.view(6, 3, 6, 3).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    torch.testing.assert_close(found[1], exact, rtol=1e-8, atol=1e-9)


def test_files(tmp_path: Path) -> None:
    model, x, y = problem()
    la = LinearizedLaplace(model, curvature="lowrank", rank=5, prior="per_layer", evaluate_at="map").fit([(x, y)])
    la.save(tmp_path / "la.safetensors")
    again = LinearizedLaplace.load(tmp_path / "la.safetensors", model)
    assert again.options == la.options and torch.equal(again.predictive(x), la.predictive(x))
    agree(again.optimize_evidence(), la.optimize_evidence())
    with pytest.raises(ValueError, match="at least 1"):
        LinearizedLaplace(model, curvature="lowrank", rank=0)
