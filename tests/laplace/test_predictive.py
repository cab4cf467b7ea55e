"""The predictive against the exact Gaussian of the tangent model, by dense Jacobians in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from laplace_oracles import (
    SelfAttention,
    cnn,
    data,
    dense_covariance,
    dense_curvature,
    exact_ggn,
    jacobian,
    mlp,
    randomize,
)
from laplace_oracles import fitted as fit
from torch import Tensor, nn

from tu_symmetry.laplace.likelihood import Categorical
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.mixture import LaplaceMixture


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 5), nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(a) * self.b(b)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: data(4, outputs=3)[0]),
    "cnn": (cnn, lambda: data(2, 6, 6, outputs=3)[0]),
    "attention": (lambda: randomize(SelfAttention(True)), lambda: data(3, 5, outputs=3)[0]),
    "two_inputs": (
        lambda: randomize(TwoInputs()),
        lambda: (data(4, outputs=3)[0], data(2, outputs=3, seed=2)[0]),
    ),
}


def fitted(
    name: str = "mlp", kind: str = "classification", evaluate_at: str = "map", **options: Any
) -> tuple[LinearizedLaplace, Any]:
    build, inputs = NETWORKS[name]
    model, x = build(), inputs()
    y = data(1, outputs=3, kind=kind)[1]
    options = {"prior": "per_layer"} | options
    la = LinearizedLaplace(model, kind, evaluate_at=evaluate_at, **options).fit([(x, y)])  # type: ignore[arg-type]
    numbers = torch.arange(1, len(la.prior_groups) + 1).double()
    la.set_precision(dict(zip(la.prior_groups.names, (0.3 * numbers).tolist(), strict=True)))
    return la, x


def exact(la: LinearizedLaplace, inputs: Any) -> tuple[Tensor, Tensor]:
    """Mean ``[batch, outputs]`` and covariance ``[batch, outputs, batch, outputs]`` of the tangent model."""
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    jac = jacobian(la.model, la.tangent.names, inputs)
    covariance = torch.einsum("nci,ij,mdj->ncmd", jac, dense_covariance(la), jac)
    return la.model(*args).detach(), covariance


def each(covariance: Tensor) -> Tensor:
    return torch.einsum("ncnd->ncd", covariance)


@pytest.mark.parametrize("curvature", ["kfac", "full", "diag"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_covariance_is_jacobian_covariance_jacobian(name: str, curvature: str) -> None:
    la, x = fitted(name, curvature=curvature)
    mean, covariance = exact(la, x)
    found = la.function_covariance(x)
    torch.testing.assert_close(found[0], mean)
    torch.testing.assert_close(found[1], each(covariance), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_wide_last_layer_has_kronecker_factors(bias: bool, shape: tuple[int, ...], kind: str) -> None:
    """Those of ``kfac``, and closed forms of its features alone: of covariances, variances and samples."""
    generator = torch.Generator().manual_seed(0)
    model = randomize(nn.Sequential(nn.Linear(4, 260), nn.Tanh(), nn.Linear(260, 8, bias=bias)))
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    labels = torch.randint(8, shape[:-1], generator=generator)
    y = labels if kind == "classification" else torch.randn(*shape[:-1], 8, dtype=torch.float64, generator=generator)
    last, layered = (
        LinearizedLaplace(
            model, kind, curvature=curvature, parameters=["2"], prior="per_layer", evaluate_at="map"
        ).fit([(x, y)])
        for curvature in ("last_layer", "kfac")
    )  # fmt: skip
    assert last.tangent.size > 2048
    torch.testing.assert_close(last.log_marginal_likelihood(), layered.log_marginal_likelihood())
    ways: list[Callable[[LinearizedLaplace], Any]] = [
        lambda la: la.function_covariance(x),
        lambda la: la.predictive(x, link_approx="probit"),
        lambda la: la.predictive(x, covariance="exact", num_samples=8),
        lambda la: la.function_samples(x, 3),
    ]
    for way in ways:
        for found, expected in zip(way(last), way(layered), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("curvature", ["kfac", "full", "diag"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_function_samples_are_the_tangent_model_at_weight_samples(name: str, curvature: str) -> None:
    la, x = fitted(name, curvature=curvature)
    weights = torch.cat(list(la.posterior.draws(5, 3)))
    expected = exact(la, x)[0] + torch.einsum("nci,si->snc", jacobian(la.model, la.tangent.names, x), weights)
    torch.testing.assert_close(la.function_samples(x, 5, seed=3), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["cnn", "last_layer"])
def test_sampled_weights_are_those_of_the_sampled_functions(name: str) -> None:
    """At the temperature of predictions, around the trained weights, of which a part may be certain."""
    la, x = fitted("cnn", curvature="last_layer") if name == "last_layer" else fitted(name)
    for temperature in (1.0, 0.25, 0.0):
        la = LinearizedLaplace.from_fitted(replace(la.fitted, temperature=temperature))
        states, own = la.sample(5, seed=3), la.model.state_dict()
        assert states.keys() == own.keys() and all(t.shape == (5, *own[n].shape) for n, t in states.items())
        changes = torch.cat([(states[n] - own[n]).flatten(1) for n in la.tangent.names], dim=1)
        expected = exact(la, x)[0] + torch.einsum("nci,si->snc", jacobian(la.model, la.tangent.names, x), changes)
        torch.testing.assert_close(la.function_samples(x, 5, seed=3), expected, rtol=1e-8, atol=1e-10)
        assert all(torch.equal(states[n][0], own[n]) for n in own.keys() - set(la.tangent.names))
        assert torch.equal(la(x, num_samples=7, seed=2), la.predictive(x, num_samples=7, seed=2))
    with pytest.raises(ValueError, match="at least 1"):
        la.sample(0)


def test_what_was_fitted_is_printed() -> None:
    la = LinearizedLaplace(mlp(), prior="per_layer", evaluate_at="map")
    assert repr(la).startswith("LinearizedLaplace(of: Sequential, likelihood: classification, curvature: kfac, prior: ")
    assert repr(la).endswith("fitted: not yet)")
    x, y = data(4, outputs=3)
    la = LinearizedLaplace.from_fitted(replace(la.fit([(x, y)]).fitted, temperature=0.25))
    count, groups = sum(p.numel() for p in la.model.parameters()), len(la.prior_groups)
    assert f"fitted: {count} weights in {groups} groups, to {len(x)} samples, temperature: 0.25" in repr(la)
    assert "\n" not in repr(la)


def test_samples_are_joint_over_inputs_batches_and_calls() -> None:
    la, x = fitted("cnn")
    together = la.function_samples(x, 6)
    apart = torch.cat([la.function_samples(x[:4], 6), la.function_samples(x[4:], 6)], dim=1)
    torch.testing.assert_close(apart, together)
    torch.testing.assert_close(la.function_samples(x, 20)[:6], together)  # more samples extend fewer
    assert not torch.allclose(la.function_samples(x, 6, seed=1), together)


def test_joint_samples_have_the_covariance_between_inputs() -> None:
    la, x = fitted()
    _, covariance = exact(la, x[:2])
    drawn = la.function_samples(x[:2], 2000).flatten(1)
    found, expected = torch.cov(drawn.T), covariance.reshape(6, 6)
    assert float((found - expected).norm() / expected.norm()) < 0.15
    assert float(expected[:3, 3:].norm() / expected.norm()) > 0.1
    torch.testing.assert_close(
        la.predictive(x[:2], joint=True, num_samples=9), la.function_samples(x[:2], 9).softmax(-1)
    )


def monte_carlo(mean: Tensor, covariance: Tensor, count: int = 200_000) -> Tensor:
    """Mean of the softmax under the exact Gaussian."""
    generator = torch.Generator().manual_seed(99)
    root = torch.linalg.cholesky(covariance)
    noise = torch.randn(count, *mean.shape, generator=generator, dtype=torch.float64)
    return (mean + torch.einsum("ncd,snd->snc", root, noise)).softmax(-1).mean(0)


@pytest.mark.parametrize("covariance", ["exact", "samples"])
def test_monte_carlo_predictive_converges_to_the_exact_one(covariance: str) -> None:
    la, x = fitted()
    mean, both = exact(la, x[:4])
    expected = monte_carlo(mean, each(both))
    errors = [
        float((la.predictive(x[:4], num_samples=n, covariance=covariance) - expected).abs().max())  # type: ignore
        for n in (20, 1000)
    ]
    assert errors[1] < 0.03 and errors[1] < errors[0]
    assert float((mean.softmax(-1) - expected).abs().max()) > 0.05  # the uncertainty matters here


@pytest.mark.parametrize("curvature", ["kfac", "last_layer"])
def test_probit(curvature: str) -> None:
    la, x = fitted(curvature=curvature)
    mean, covariance = exact(la, x)
    variance = torch.einsum("ncnc->nc", covariance)
    expected = (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
    torch.testing.assert_close(la.predictive(x, link_approx="probit"), expected, rtol=1e-8, atol=1e-10)
    sampled = la.predictive(x, link_approx="probit", covariance="samples", num_samples=800)
    assert 1e-6 < float((sampled - expected).abs().max()) < 0.03


@pytest.mark.parametrize("curvature", ["kfac", "full", "diag", "last_layer"])
def test_regression_predictive(curvature: str) -> None:
    la, x = fitted(kind="regression", curvature=curvature, noise_variance=0.3)
    mean, covariance = exact(la, x)
    found = la.predictive(x)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.epistemic, torch.einsum("ncnc->nc", covariance), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.variance, found.epistemic + 0.3)
    sampled = la.predictive(x, covariance="samples", num_samples=800)
    torch.testing.assert_close(sampled.epistemic, found.epistemic, rtol=0.25, atol=1e-3)
    assert la.predictive(x, joint=True, num_samples=7).shape == (7, 9, 3)


def test_single_precision() -> None:
    model, (x, y) = cnn(), data(2, 6, 6, outputs=3)
    expected = LinearizedLaplace(model, prior="per_group", evaluate_at="map").fit([(x, y)])
    expected.optimize_evidence()
    double = expected.predictive(x, link_approx="probit")
    single = LinearizedLaplace(model.float(), prior="per_group", evaluate_at="map").fit([(x.float(), y)])
    single.optimize_evidence()
    found = single.predictive(x.float(), link_approx="probit")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), double, rtol=0, atol=1e-3)


def sequences(kind: str = "classification", samples: int = 6, tokens: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with three outputs for every token."""
    x, real = data(tokens, 3, outputs=3 * tokens, kind="regression", samples=samples)
    y = real.view(samples, tokens, 3)
    return mlp(inputs=3), x, y if kind == "regression" else y.argmax(-1)


def test_the_noise_variance_counts_every_position() -> None:
    model, x, y = sequences("regression", samples=30)
    la = fit(model, x, y, "regression", curvature="full", evaluate_at="tangent_mode")
    la.optimize_evidence()
    # MacKay's fixed point: the squared residuals over the number of observed values less the determined directions
    values = torch.linalg.eigvalsh(dense_curvature(la)) / la.noise_variance
    gamma = float((values / (values + la.log_precision.exp())).sum())
    assert la.noise_variance == pytest.approx(2 * la.solution.loss / (y.numel() - gamma), rel=1e-5)


def test_predictives_of_every_position() -> None:
    model, x, y = sequences()
    la = fit(model, x, y)
    jac, mean = jacobian(model, la.tangent.names, x), model(x).detach()
    own = torch.einsum("ntci,ij,ntdj->ntcd", jac, dense_covariance(la), jac)
    variance = own.diagonal(dim1=-2, dim2=-1)
    expected = (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
    torch.testing.assert_close(la.predictive(x, link_approx="probit"), expected, rtol=1e-7, atol=1e-9)
    exact = la.predictive(x, num_samples=4096, covariance="exact")
    draws = torch.randn(40_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    some = mean[0, 1] + draws @ torch.linalg.cholesky(own[0, 1] + 1e-12 * torch.eye(3)).T
    torch.testing.assert_close(exact[0, 1], some.softmax(-1).mean(0), rtol=0, atol=0.01)
    torch.testing.assert_close(la.predictive(x, num_samples=400, covariance="samples"), exact, rtol=0, atol=0.15)
    spread = (la.function_samples(x, 300) - mean).square().mean(0)
    torch.testing.assert_close(spread, variance, rtol=0.5, atol=1e-3)
    assert la.predictive(x, joint=True, num_samples=5).shape == (5, 6, 4, 3)
    model, x, y = sequences("regression")
    la = fit(model, x, y, "regression", noise_variance=0.3)
    variance = torch.einsum("ntci,ij,ntcj->ntc", jac, dense_covariance(la), jac)
    torch.testing.assert_close(la.predictive(x).epistemic, variance, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(la.predictive(x).variance, variance + 0.3, rtol=1e-7, atol=1e-9)


def test_sequences_of_several_lengths() -> None:
    """Batches may differ in their number of positions; a regression's noise needs them equal."""
    model, x, y = sequences()
    la = LinearizedLaplace(model, prior="single", evaluate_at="map", curvature="full")
    la.fit([(x[:3], y[:3]), (x[3:, :2], y[3:, :2])])
    exact = exact_ggn(model, la.tangent.names, x[:3], y[:3], "classification")
    exact = exact + exact_ggn(model, la.tangent.names, x[3:, :2], y[3:, :2], "classification")
    torch.testing.assert_close(dense_curvature(la), exact, rtol=1e-9, atol=1e-9)
    model, x, y = sequences("regression")
    with pytest.raises(ValueError, match="equally many"):
        LinearizedLaplace(model, "regression", prior="single").fit([(x[:3], y[:3]), (x[3:, :2], y[3:, :2])])


def mixture(kind: Any = "classification") -> tuple[LaplaceMixture, Tensor, Tensor]:
    x, y = data(4, outputs=3, kind="regression" if kind == "regression" else "classification")
    if kind == "binary":
        y = torch.stack([y == c for c in range(3)], -1)
    return LaplaceMixture([fit(mlp(seed=seed), x, y, kind) for seed in range(3)]), x, y


def test_moments_of_a_regression_by_their_definition() -> None:
    found, x, y = mixture("regression")
    means, variances = [], []
    for la in found.members:
        jac = jacobian(la.model, la.tangent.names, x)
        means.append(la.model(x).detach())
        variances.append(torch.einsum("nci,ij,ncj->nc", jac, dense_covariance(la), jac))
    mean, second = torch.stack(means), torch.stack(means) ** 2 + torch.stack(variances)
    predictive = found.predictive(x)
    torch.testing.assert_close(predictive.mean, mean.mean(0))
    epistemic = second.mean(0) - mean.mean(0) ** 2
    torch.testing.assert_close(predictive.epistemic, epistemic, rtol=1e-7, atol=1e-9)
    noise = (torch.stack(means) - y).square().mean()  # of each member's residuals on the data that it was fitted to
    torch.testing.assert_close(predictive.variance, epistemic + noise, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_probabilities_are_averaged(kind: str) -> None:
    found, x, _ = mixture(kind)
    parts = [la.predictive(x, link_approx="probit") for la in found.members]
    torch.testing.assert_close(found.predictive(x, link_approx="probit"), sum(parts) / 3)


def test_a_mixture_is_of_one_likelihood() -> None:
    found, x, y = mixture()
    for wrong in ([], [*found.members, fit(mlp(), x, y, Categorical(label_smoothing=0.1))]):
        with pytest.raises(ValueError, match="one likelihood"):
            LaplaceMixture(wrong)
