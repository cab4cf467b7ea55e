"""Outputs at several positions of a sample (token-level likelihoods), and outputs whose first axis is not the batch.

``test_networks.py`` has their exact blocks and covariances.
"""

from __future__ import annotations

import math

import pytest
import torch
from laplace_oracles import (
    Tokens,
    dense_covariance,
    dense_curvature,
    exact_ggn,
    fitted,
    jacobian,
    losses,
    output_matrices,
    randomize,
    slot,
    split,
)
from torch import Tensor, nn

from tu_symmetry.laplace.linearized import LinearizedLaplace

BATCH, POSITIONS, CLASSES = 6, 4, 3


def problem(name: str, kind: str = "classification", samples: int = BATCH) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name == "tagger":
        model, x = randomize(Tokens(False)), torch.randint(1, 6, (samples, POSITIONS), generator=generator)
    else:
        model = randomize(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)))
        x = torch.randn(samples, POSITIONS, 3, generator=generator, dtype=torch.float64)
    if kind == "classification":
        return model, x, torch.randint(0, CLASSES, (samples, POSITIONS), generator=generator)
    return model, x, torch.randn(samples, POSITIONS, CLASSES, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["first", "second"])
def test_factors_of_a_shared_weight_follow_their_definition(name: str, kfac_approx: str) -> None:
    """``A``: the mean over samples and positions; ``G``: the sum over observations of what reaches each position."""
    model, reduce = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)), kfac_approx == "reduce"
    randomize(model)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, POSITIONS, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (BATCH, POSITIONS), generator=generator)
    la = fitted(model, x, y, kfac_approx=kfac_approx)
    hidden = model[0](x).detach()
    rows, tail, entry = (x, model[1:], hidden) if name == "first" else (model[1](hidden).detach(), nn.Identity(),
                                                                        model(x).detach())  # fmt: skip
    middle = output_matrices("classification", model(x).flatten(0, 1), y.flatten()).unflatten(0, (BATCH, POSITIONS))
    # [sample, position of the output, output, position of the layer, feature of the layer]
    after = torch.stack([torch.func.jacrev(tail)(h) for h in entry]).detach()
    if reduce:
        rows, after = rows.mean(1, keepdim=True), after.sum(3, keepdim=True)
    a = torch.einsum("nti,ntj->ij", rows, rows) / rows.shape[:2].numel()
    g = torch.einsum("nscto,nscd,nsdtp->op", after, middle, after)
    own = slot(la, "0.weight" if name == "first" else "2.weight")
    expected = torch.kron(g.detach().contiguous(), a.detach().contiguous())
    torch.testing.assert_close(dense_curvature(la)[own, own], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("curvature", ["kfac", "full", "diag"])
def test_one_position_is_a_sample_without_positions(curvature: str) -> None:
    """``[batch, 1, classes]`` and ``[batch, classes]`` are one problem."""
    model, x, y = problem("tagger")
    x, y = x[:, :1], y[:, :1]
    with_axis = fitted(model, x, y, curvature=curvature)
    without = fitted(nn.Sequential(model, nn.Flatten()), x, y, curvature=curvature)
    torch.testing.assert_close(dense_curvature(with_axis), dense_curvature(without), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(with_axis.predictive(x)[:, 0], without.predictive(x))


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("curvature", ["kfac", "full"])
@pytest.mark.parametrize("name", ["tagger", "per_position"])
def test_mode_and_evidence_by_their_definition(name: str, curvature: str, kind: str) -> None:
    model, x, y = problem(name, kind)
    noise = {"noise_variance": 0.4} if kind == "regression" else {}
    la = fitted(model, x, y, kind, curvature=curvature, evaluate_at="tangent_mode", prior="per_layer", **noise)
    la.set_precision({n: 0.5 + i for i, n in enumerate(la.prior_groups.names)})
    found = la.log_marginal_likelihood()
    variance, theta = la.noise_variance, la.theta
    point, function = split(model, la.tangent.names)
    jac = jacobian(model, la.tangent.names, x).flatten(0, 1)
    precision = la.prior_groups.spread(la.log_precision.exp())
    outputs = function(point, x).detach().flatten(0, 1) + jac @ (theta - point)
    loss, labels = losses(kind), y.flatten(0, 1)
    gradient = torch.func.vmap(torch.func.grad(loss))(outputs, labels)
    stationary = torch.einsum("nci,nc->i", jac, gradient) / variance + precision * theta
    torch.testing.assert_close(stationary, torch.zeros_like(stationary), rtol=0, atol=1e-4)
    likelihood = sum(float(loss(f, t)) for f, t in zip(outputs, labels, strict=True)) / variance
    if kind == "regression":
        likelihood += 0.5 * y.numel() * math.log(2 * math.pi * variance)
    ratio = torch.linalg.slogdet(torch.eye(len(point)) + dense_curvature(la) / variance / precision).logabsdet
    expected = -likelihood - 0.5 * float((precision * theta * theta).sum()) - 0.5 * float(ratio)
    assert found == pytest.approx(expected, rel=1e-7)


def test_the_noise_variance_counts_every_position() -> None:
    model, x, y = problem("per_position", "regression", samples=30)
    la = fitted(model, x, y, "regression", curvature="full", evaluate_at="tangent_mode")
    la.optimize_evidence()
    # MacKay's fixed point: the squared residuals over the number of observed values less the determined directions
    values = torch.linalg.eigvalsh(dense_curvature(la)) / la.noise_variance
    gamma = float((values / (values + la.log_precision.exp())).sum())
    assert la.noise_variance == pytest.approx(2 * la.solution.loss / (y.numel() - gamma), rel=1e-5)


def test_predictives_of_every_position() -> None:
    model, x, y = problem("tagger")
    la = fitted(model, x, y)
    jac, mean = jacobian(model, la.tangent.names, x), model(x).detach()
    own = torch.einsum("ntci,ij,ntdj->ntcd", jac, dense_covariance(la), jac)
    variance = own.diagonal(dim1=-2, dim2=-1)
    expected = (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
    torch.testing.assert_close(la.predictive(x, link_approx="probit"), expected, rtol=1e-7, atol=1e-9)
    exact = la.predictive(x, num_samples=4096, covariance="exact")
    draws = torch.randn(40_000, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    some = mean[0, 1] + draws @ torch.linalg.cholesky(own[0, 1] + 1e-12 * torch.eye(CLASSES)).T
    torch.testing.assert_close(exact[0, 1], some.softmax(-1).mean(0), rtol=0, atol=0.01)
    torch.testing.assert_close(la.predictive(x, num_samples=400, covariance="samples"), exact, rtol=0, atol=0.15)
    spread = (la.function_samples(x, 300) - mean).square().mean(0)
    torch.testing.assert_close(spread, variance, rtol=0.5, atol=1e-3)
    assert la.predictive(x, joint=True, num_samples=5).shape == (5, BATCH, POSITIONS, CLASSES)
    model, x, y = problem("tagger", "regression")
    la = fitted(model, x, y, "regression", noise_variance=0.3)
    variance = torch.einsum("ntci,ij,ntcj->ntc", jac, dense_covariance(la), jac)
    torch.testing.assert_close(la.predictive(x).epistemic, variance, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(la.predictive(x).variance, variance + 0.3, rtol=1e-7, atol=1e-9)


def test_sequences_of_several_lengths() -> None:
    """Batches may differ in their number of positions; a regression's noise needs them equal."""
    model, x, y = problem("per_position")
    la = LinearizedLaplace(model, prior="single", evaluate_at="map", curvature="full")
    la.fit([(x[:3], y[:3]), (x[3:, :2], y[3:, :2])])
    exact = exact_ggn(model, la.tangent.names, x[:3], y[:3], "classification")
    exact = exact + exact_ggn(model, la.tangent.names, x[3:, :2], y[3:, :2], "classification")
    torch.testing.assert_close(dense_curvature(la), exact, rtol=1e-9, atol=1e-9)
    model, x, y = problem("per_position", "regression")
    with pytest.raises(ValueError, match="equally many"):
        LinearizedLaplace(model, "regression", prior="single").fit([(x[:3], y[:3]), (x[3:, :2], y[3:, :2])])


class Flattened(nn.Module):
    """Positions are flattened into the batch inside of the network, or at its outputs."""

    def __init__(self, inside: bool, outside: bool) -> None:
        super().__init__()
        self.first, self.second, self.inside, self.outside = nn.Linear(3, 4), nn.Linear(4, CLASSES), inside, outside

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:2]
        x = self.second(torch.tanh(self.first(x.flatten(0, 1) if self.inside else x)))
        x = x if self.inside else x.flatten(0, 1)
        return x if self.outside else x.unflatten(0, shape)


@pytest.mark.parametrize("curvature", ["kfac", "full", "last_layer"])
@pytest.mark.parametrize("inside", [False, True])
def test_positions_flattened_into_the_batch_are_refused(inside: bool, curvature: str) -> None:
    _, x, y = problem("per_position")
    with pytest.raises(ValueError, match=r"\(24, 3\) for a batch|\(16, 3\) for a batch|the batch"):
        fitted(randomize(Flattened(inside, True)), x, y, curvature=curvature)


@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_a_layer_that_sees_positions_in_the_batch_is_refused_or_exact(curvature: str) -> None:
    model, (_, x, y) = randomize(Flattened(True, False)), problem("per_position")
    if curvature == "kfac":
        with pytest.raises(ValueError, match="first axis has to be the batch"):
            fitted(model, x, y, curvature=curvature)
        return
    la = fitted(model, x, y, curvature=curvature)
    exact = exact_ggn(model, la.tangent.names, x, y, "classification")
    torch.testing.assert_close(dense_curvature(la).diagonal(), exact.diagonal(), rtol=1e-9, atol=1e-10)
