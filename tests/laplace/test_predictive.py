"""The predictive against the exact Gaussian of the tangent model, by dense Jacobians in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace_oracles import Recurrent, data, dense_covariance, jacobian, mlp, posterior_covariance, randomize
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.laplace.linearized import LinearizedLaplace


def cnn() -> nn.Module:
    return randomize(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, groups=2),
            nn.GroupNorm(2, 6), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
        )
    )  # fmt: skip


class Transformer(nn.Module):
    """Embedding, attention module, and attention by the function that has no forward-mode derivative when fused."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(6, 4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.query, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        q = self.query(x).unsqueeze(1)
        return self.head(F.scaled_dot_product_attention(q, q, q).squeeze(1).mean(1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 5), nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(a) * self.b(b)))


def tokens() -> Tensor:
    return torch.randint(0, 6, (9, 4), generator=torch.Generator().manual_seed(3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: data(4, outputs=3)[0]),
    "cnn": (cnn, lambda: data(2, 5, 5, outputs=3)[0]),
    "transformer": (lambda: randomize(Transformer()), tokens),
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


def test_covariance_of_a_recurrent_network() -> None:
    """No rule for vectorized or forward-mode derivatives of nn.LSTM: products fall back to reverse mode."""
    model, (x, y) = randomize(Recurrent()), data(3, 4, outputs=3)
    la = LinearizedLaplace(model, prior="single", curvature="diag", parameters=["head"]).fit([(x, y)])
    torch.testing.assert_close(la.function_covariance(x)[1], each(exact(la, x)[1]), rtol=1e-8, atol=1e-10)
    whole = LinearizedLaplace(model, prior="single", curvature="kfac", parameters=["memory.weight_ih_l0"])
    names = whole.tangent.names
    vector = torch.randn(whole.tangent.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact_product = jacobian(model, names, x) @ vector
    torch.testing.assert_close(whole.tangent.jvp(x, vector)[1], exact_product, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(whole.tangent.jvp(x, 2 * vector)[1], 2 * exact_product, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_last_layer_closed_form(kind: str) -> None:
    la, x = fitted(kind=kind, curvature="last_layer")
    full, _ = fitted(kind=kind, curvature="full", parameters=["2"])
    torch.testing.assert_close(la.function_covariance(x)[1], each(exact(la, x)[1]), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(la.function_covariance(x)[1], full.function_covariance(x)[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(la.function_samples(x, 4), full.function_samples(x, 4), rtol=1e-7, atol=1e-9)


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


def test_weight_samples_have_the_posterior_covariance() -> None:
    la, _ = fitted(curvature="kfac")
    drawn = torch.cat(list(la.posterior.draws(4000, 0)))
    expected = dense_covariance(la)
    assert float(drawn.mean(0).abs().max()) < 0.12
    assert float((torch.cov(drawn.T) - expected).norm() / expected.norm()) < 0.12


@pytest.mark.parametrize("prior", ["single", "per_layer"])
def test_directions_of_which_the_data_say_nothing_have_the_prior(prior: str) -> None:
    """Two samples of wide layers with dead units: products and samples take the other eigenvectors alone."""
    model = randomize(
        nn.Sequential(
            nn.Conv2d(4, 6, 2, groups=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 20),
            nn.ReLU(), nn.Linear(20, 3),
        )
    )  # fmt: skip
    with torch.no_grad():
        model[4].bias[3:9] = -50  # type: ignore[index, operator]
    x, y = data(4, 3, 3, outputs=3, samples=2)
    la = LinearizedLaplace(model, prior=prior, evaluate_at="map").fit([(x, y)])  # type: ignore
    numbers = torch.arange(1, len(la.prior_groups) + 1).double()
    la.set_precision(dict(zip(la.prior_groups.names, (0.3 * numbers).tolist(), strict=True)))
    expected = dense_covariance(la)
    torch.testing.assert_close(posterior_covariance(la.posterior), expected, rtol=1e-9, atol=1e-11)
    root = la.posterior.sample(torch.eye(la.tangent.size, dtype=torch.float64))
    torch.testing.assert_close(root, root.mT, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(root @ root, expected, rtol=1e-9, atol=1e-11)


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


def test_the_mean_stays_where_the_network_is_and_weights_move_in_mode_linear() -> None:
    la, x = fitted(evaluate_at="tangent_mode")
    la.log_marginal_likelihood()
    assert float((la.theta - la.tangent.point()).norm()) > 0.1
    torch.testing.assert_close(la.function_covariance(x)[0], la.model(x).detach())


@pytest.mark.parametrize("covariance", ["exact", "samples"])
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_prediction_inside_inference_mode(context: Any, covariance: str) -> None:
    """Where Lightning calls it."""
    la, x = fitted("transformer")
    expected = la.predictive(x, num_samples=5, covariance=covariance)  # type: ignore[arg-type]
    with context():
        found = la.predictive(x.clone(), num_samples=5, covariance=covariance)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


def test_single_precision() -> None:
    model, (x, y) = cnn(), data(2, 5, 5, outputs=3)
    expected = LinearizedLaplace(model, prior="per_group", evaluate_at="map").fit([(x, y)])
    expected.optimize_evidence()
    double = expected.predictive(x, link_approx="probit")
    single = LinearizedLaplace(model.float(), prior="per_group", evaluate_at="map").fit([(x.float(), y)])
    single.optimize_evidence()
    found = single.predictive(x.float(), link_approx="probit")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), double, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"link_approx": "logit"}, "'probit'"),
        ({"covariance": "all"}, "'samples'"),
    ],
)
def test_options_that_are_not_known(options: dict[str, Any], message: str) -> None:
    la, x = fitted()
    with pytest.raises(ValueError, match=message):
        la.predictive(x, **options)
