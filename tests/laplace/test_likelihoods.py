"""Every likelihood against torch's losses and automatic differentiation, and through the whole approximation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from laplace_oracles import dense_covariance, dense_curvature, jacobian, mlp, randomize, split
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.laplace.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    make_likelihood,
)
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.outputs import as_outputs

BATCH, POSITIONS = 7, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def real(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def numbers(*shape: int, classes: int = 4, ignored: int | None = None) -> Tensor:
    found = torch.randint(0, classes, shape, generator=generator(3))
    if ignored is not None:
        found.view(-1)[::3] = ignored
    return found


def soft(*shape: int, classes: int = 4) -> Tensor:
    return real(*shape, classes, seed=5).softmax(-1)


WEIGHTS = [0.5, 2.0, 0.0, 1.3]
YES = [0.4, 3.0, 1.0, 2.0]


def bce(f: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y.to(f), reduction="none", **options).sum()


def cross(f: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(f.flatten(0, -2), y.flatten(0, -2) if y.is_floating_point() else y.flatten(),
                           reduction="sum", **options)  # fmt: skip


W = torch.tensor(WEIGHTS, dtype=torch.float64)

# likelihood, targets of a shape, torch's loss
CASES: dict[str, tuple[Likelihood, Any, Any]] = {
    "labels": (Categorical(), numbers, cross),
    "ignored": (Categorical(ignore_index=255), lambda *s: numbers(*s, ignored=255),
                lambda f, y: cross(f, y, ignore_index=255)),
    "smoothed": (Categorical(label_smoothing=0.2), lambda *s: numbers(*s, ignored=-100),
                 lambda f, y: cross(f, y, label_smoothing=0.2)),
    "weighted": (Categorical(class_weights=WEIGHTS), numbers, lambda f, y: cross(f, y, weight=W)),
    "all": (Categorical(class_weights=WEIGHTS, label_smoothing=0.1, ignore_index=1), numbers,
            lambda f, y: cross(f, y, weight=W, label_smoothing=0.1, ignore_index=1)),
    "soft": (Categorical(), soft, cross),
    "soft_weighted": (Categorical(class_weights=WEIGHTS, label_smoothing=0.3), soft,
                      lambda f, y: cross(f, y, weight=W, label_smoothing=0.3)),
    "binary": (Bernoulli(), lambda *s: numbers(*s, 4, classes=2), bce),
    "binary_soft": (Bernoulli(pos_weight=YES), lambda *s: real(*s, 4).sigmoid(),
                    lambda f, y: bce(f, y, pos_weight=torch.tensor(YES, dtype=torch.float64))),
    "regression": (Gaussian(), lambda *s: real(*s, 4, seed=2), lambda f, y: 0.5 * (f - y).square().sum()),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, POSITIONS)])
@pytest.mark.parametrize("name", list(CASES))
def test_loss_and_derivatives_are_those_of_torch(name: str, shape: tuple[int, ...]) -> None:
    likelihood, make, loss = CASES[name]
    f, y = real(*shape, 4), make(*shape)
    targets = likelihood.targets(f, y)
    torch.testing.assert_close(likelihood.loss(f, targets).sum(), loss(f, y))
    each = torch.stack([loss(f[i : i + 1], y[i : i + 1]) for i in range(BATCH)])
    torch.testing.assert_close(likelihood.loss(f, targets), each)
    torch.testing.assert_close(likelihood.residual(f, targets), torch.func.grad(lambda g: loss(g, y))(f))
    dense = torch.func.hessian(lambda g: loss(g, y))(f).reshape(f.numel(), f.numel())
    vectors = real(2, *f.shape, seed=8)
    found = likelihood.hessian_product(f, targets, vectors)
    torch.testing.assert_close(found.flatten(1), vectors.flatten(1) @ dense, rtol=1e-9, atol=1e-11)
    columns = torch.stack(list(likelihood.root(f, targets, "type-2", generator()))).flatten(2)
    blocks = torch.einsum("rbi,rbj->bij", columns, columns)
    torch.testing.assert_close(torch.block_diag(*blocks), dense, rtol=1e-9, atol=1e-11)
    if shape == (BATCH,):
        many = [own.repeat(4000, *[1] * (own.ndim - 1)) for own in (f, targets)]
        drawn = likelihood.sampled_root(*many, generator(1)).view(4000, BATCH, 4)
        estimate = torch.einsum("rbi,rbj->bij", drawn, drawn) / 4000
        torch.testing.assert_close(torch.block_diag(*estimate), dense, rtol=0, atol=0.35)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.CrossEntropyLoss(weight=W, label_smoothing=0.1, ignore_index=1), "all"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(YES, dtype=torch.float64)), "binary_soft"),
        (nn.MSELoss(), "regression"),
    ],
)
def test_a_training_loss_is_a_likelihood(loss: nn.Module, name: str) -> None:
    expected, make, _ = CASES[name]
    found = make_likelihood(loss)
    assert type(found) is type(expected)
    assert found.config() == expected.config()
    f, y = real(BATCH, 4), make(BATCH)
    torch.testing.assert_close(found.loss(f, found.targets(f, y)), expected.loss(f, expected.targets(f, y)))
    again = make_likelihood(found.name, found.config())
    assert (type(again), again.config()) == (type(found), found.config())


def data(name: str, positions: bool) -> tuple[nn.Module, Tensor, Tensor]:
    shape = (BATCH, POSITIONS) if positions else (BATCH,)
    return mlp(4, inputs=3), real(*shape, 3, seed=4), CASES[name][1](*shape)


def dense_hessian(model: nn.Module, names: Any, x: Tensor, y: Tensor, name: str) -> Tensor:
    """``J^T H J`` over all outputs of all samples together."""
    jac = jacobian(model, names, x).flatten(0, -2)
    f = model(x).detach()
    h = torch.func.hessian(lambda g: CASES[name][2](g, y))(f).reshape(f.numel(), f.numel())
    return jac.T @ h @ jac


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        pytest.param(n, p, marks=pytest.mark.slow if p and n not in ("all", "binary_soft") else ())
        for n in CASES
        for p in (False, True)
    ],
)
def test_curvature_mode_and_evidence_by_their_definition(name: str, positions: bool) -> None:
    model, x, y = data(name, positions)
    likelihood = CASES[name][0]
    loader = [(x[:4], y[:4]), (x[4:], y[4:])]
    options: dict[str, Any] = {"curvature": "full", "prior": "per_layer"}
    if likelihood.noisy:
        options["noise_variance"] = 0.5
    la = LinearizedLaplace(model, likelihood, **options).fit(loader)
    torch.testing.assert_close(
        dense_curvature(la), dense_hessian(model, la.tangent.names, x, y, name), rtol=1e-9, atol=1e-9
    )
    kfac = LinearizedLaplace(model, likelihood, prior="single").fit(loader)
    for block in kfac.posterior.blocks:
        if block.kind == "dense":  # a bias: exact
            own = slice(block.start, block.stop)
            torch.testing.assert_close(
                dense_curvature(kfac)[own, own], dense_curvature(la)[own, own], rtol=1e-9, atol=1e-9
            )
    la.set_precision({n: 5.0 + i for i, n in enumerate(la.prior_groups.names)})
    found = la.log_marginal_likelihood()
    point, function = split(model, la.tangent.names)
    jac = jacobian(model, la.tangent.names, x).flatten(0, -2)
    precision = la.prior_groups.spread(la.log_precision.exp())
    linear = function(point, x).detach() + (jac @ (la.theta - point)).view(*x.shape[:-1], 4)
    loss, noise = CASES[name][2], la.noise_variance
    stationary = jac.T @ torch.func.grad(lambda g: loss(g, y))(linear).flatten() / noise + precision * la.theta
    torch.testing.assert_close(stationary, torch.zeros_like(stationary), rtol=0, atol=1e-4)
    ratio = torch.linalg.slogdet(torch.eye(len(point)) + dense_curvature(la) / noise / precision).logabsdet
    constant = 0.5 * y.numel() * math.log(2 * math.pi * noise) if likelihood.noisy else 0.0
    expected = -loss(linear, y) / noise - constant - 0.5 * (precision * la.theta**2).sum() - 0.5 * ratio
    assert found == pytest.approx(float(expected), rel=1e-7)


@pytest.mark.parametrize("curvature", ["full", "diag"])
def test_ignored_tokens_are_no_observations(curvature: Any) -> None:
    """A network that treats positions by themselves, with the last ones ignored, is that of shorter sequences."""
    model, x, y = data("labels", True)
    masked = y.clone()
    masked[:, 2:] = -100
    whole = LinearizedLaplace(model, curvature=curvature, prior="single").fit([(x, masked)])
    short = LinearizedLaplace(model, curvature=curvature, prior="single").fit([(x[:, :2], y[:, :2])])
    assert whole.summary.loss == pytest.approx(short.summary.loss)
    torch.testing.assert_close(dense_curvature(whole), dense_curvature(short))


@pytest.mark.parametrize("curvature", ["full", "diag"])  # the input factor of kfac counts samples, not weights
def test_a_class_weight_of_two_counts_samples_twice(curvature: Any) -> None:
    model, x, y = data("labels", False)
    twice = y == 2
    weighted = LinearizedLaplace(model, Categorical(class_weights=[1, 1, 2, 1]), curvature=curvature, prior="single")
    weighted.fit([(x, y)])
    doubled = LinearizedLaplace(model, curvature=curvature, prior="single")
    doubled.fit([(torch.cat([x, x[twice]]), torch.cat([y, y[twice]]))])
    assert weighted.summary.loss == pytest.approx(doubled.summary.loss)
    for la in (weighted, doubled):
        la.set_precision(1.3)
    torch.testing.assert_close(dense_curvature(weighted), dense_curvature(doubled))
    assert weighted.log_marginal_likelihood() == pytest.approx(doubled.log_marginal_likelihood(), rel=1e-8)


@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
def test_one_logit_is_a_softmax_over_it_and_zero(evaluate_at: Any) -> None:
    class Pair(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            f = self.inner(x)
            return torch.cat([torch.zeros_like(f), f], -1)

    model, x = mlp(1, inputs=3), real(BATCH, 3, seed=4)
    y = numbers(BATCH, classes=2)
    one = LinearizedLaplace(model, "binary", evaluate_at=evaluate_at, prior="per_layer").fit([(x, y)])
    two = LinearizedLaplace(Pair(model), evaluate_at=evaluate_at, prior="per_layer").fit([(x, y)])
    for la in (one, two):
        la.optimize_evidence()
    torch.testing.assert_close(one.log_precision, two.log_precision, rtol=1e-4, atol=1e-5)
    assert one.log_marginal_likelihood() == pytest.approx(two.log_marginal_likelihood(), rel=1e-7)
    torch.testing.assert_close(dense_curvature(one), dense_curvature(two), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(one.predictive(x, num_samples=4096)[:, 0], two.predictive(x, num_samples=4096)[:, 1],
                               rtol=0, atol=2e-3)  # fmt: skip


def test_binary_predictives_by_their_definition() -> None:
    model, x, y = data("binary", False)
    la = LinearizedLaplace(model, "binary", prior="single", evaluate_at="map").fit([(x, y)])
    jac = jacobian(model, la.tangent.names, x)
    covariance = jac @ dense_covariance(la) @ jac.mT
    mean, variance = model(x).detach(), covariance.diagonal(dim1=1, dim2=2)
    expected = (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid()
    torch.testing.assert_close(la.predictive(x, link_approx="probit"), expected, rtol=1e-7, atol=1e-9)
    points, weights = (torch.tensor(v) for v in _hermite())
    exact = ((mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * points).sigmoid() * weights).sum(-1)
    torch.testing.assert_close(la.predictive(x, num_samples=4096), exact, rtol=0, atol=2e-3)
    assert la.predictive(x, joint=True, num_samples=5).shape == (5, BATCH, 4)


def _hermite() -> tuple[Any, Any]:
    import numpy

    points, weights = numpy.polynomial.hermite_e.hermegauss(60)
    return points, weights / weights.sum()


@pytest.mark.filterwarnings("ignore::tu_symmetry.laplace.report.LaplaceHurtsWarning")
@pytest.mark.parametrize("name", [n for n in CASES if n != "regression"])
def test_calibration_measures_what_was_observed(name: str) -> None:
    """Smoothing and weights are of the training loss; ignored labels count nowhere."""
    model, x, y = data(name, True)
    la = LinearizedLaplace(model, CASES[name][0], prior="single", evaluate_at="map").fit([(x, y)])
    found = la.calibrate([(x[:3], y[:3]), (x[3:], y[3:])])
    assert found.calibrated.nll <= found.network.nll
    f = model(x).detach()
    if name.startswith("binary"):
        expected = bce(f, y) / y.numel()
    elif y.is_floating_point():
        expected = -(y * f.log_softmax(-1)).sum(-1).mean()
    else:
        ignored = CASES[name][0].config()["ignore_index"]
        expected = F.cross_entropy(f.flatten(0, 1), y.flatten(), ignore_index=-100 if ignored is None else ignored)
    assert found.network.nll == pytest.approx(float(expected))


class Segmenter(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.first, self.second, self.layout = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 1), layout

    def forward(self, x: Tensor) -> Tensor:
        f = self.second(torch.tanh(self.first(x)))
        if self.layout == "last":
            return f.permute(0, 2, 3, 1)
        if self.layout == "flat":
            return f.flatten(2).mT
        return f.flatten(2) if self.layout == "middle" else f


LAYOUTS = {"torch": None, "last": -1, "flat": None, "middle": 1}


@pytest.mark.parametrize(
    ("layout", "labels"),
    [
        pytest.param(a, b, marks=() if a == "torch" or b == "soft" else pytest.mark.slow)
        for a in ("torch", "last", "middle")
        for b in ("numbers", "soft", "binary", "real")
    ],
)
def test_images_are_positions(layout: str, labels: str) -> None:
    model, x = randomize(Segmenter(layout)), real(3, 2, 4, 2, seed=4)
    flat = randomize(Segmenter("flat"))
    kind: Any = {"numbers": Categorical, "soft": Categorical, "binary": Bernoulli, "real": Gaussian}[labels]
    targets: Tensor = {"numbers": numbers(3, 4, 2), "soft": soft(3, 4, 2), "binary": numbers(3, 4, 2, 4, classes=2),
                       "real": real(3, 4, 2, 4)}[labels]  # fmt: skip
    own, rows = targets, targets.flatten(1, 2)
    if labels != "numbers":
        own = {"torch": targets.permute(0, 3, 1, 2), "last": targets, "middle": rows.mT}[layout]
    elif layout == "middle":
        own = rows
    options: dict[str, Any] = {"prior": "single", "evaluate_at": "map"}
    expected = LinearizedLaplace(flat, kind(), **options).fit([(x, rows)])
    la = LinearizedLaplace(model, kind(class_axis=LAYOUTS[layout]), **options).fit([(x[:2], own[:2]), (x[2:], own[2:])])
    torch.testing.assert_close(dense_curvature(la), dense_curvature(expected))
    for one in (la, expected):
        one.set_precision(2.0)
    assert la.log_marginal_likelihood() == pytest.approx(expected.log_marginal_likelihood())
    found, wanted = la.predictive(x), expected.predictive(x)
    for one, other in zip(*((p if isinstance(p, tuple) else (p,)) for p in (found, wanted)), strict=True):
        assert one.shape == model(x).shape
        torch.testing.assert_close(as_outputs(one, 3, LAYOUTS[layout]), other)
    assert la.function_samples(x, 2).shape == (2, *model(x).shape)
    assert la.predictive(x, joint=True, num_samples=2).shape == (2, *model(x).shape)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "message"),
    [
        ("classification", 1, numbers(BATCH, classes=2), "likelihood='binary'"),
        ("classification", 4, 2 * soft(BATCH), "add up to 1"),
        (Categorical(class_weights=[1, 2]), 4, numbers(BATCH), "2 class weights for 4 outputs"),
        (Categorical(ignore_index=None), 4, numbers(BATCH, ignored=-100), r"\[-100, 1\]"),
        ("binary", 4, numbers(BATCH), "class numbers belong to"),
        ("binary", 1, numbers(BATCH), "from 0 to 1"),
        (Bernoulli(pos_weight=[1, 2]), 4, numbers(BATCH, 4, classes=2), "2 positive weights for 4 outputs"),
    ],
)
def test_targets_that_do_not_belong(likelihood: Any, outputs: int, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearizedLaplace(mlp(outputs, inputs=3), likelihood, prior="single").fit([(real(BATCH, 3), targets)])


def test_options_out_of_range() -> None:
    for make in (
        lambda: Categorical(label_smoothing=1.0),
        lambda: Categorical(class_weights=[1, -1]),
        lambda: Bernoulli(pos_weight=math.inf),
        lambda: make_likelihood(nn.HuberLoss()),
        lambda: make_likelihood(nn.BCEWithLogitsLoss(weight=torch.ones(4))),
        lambda: as_outputs(real(2, 3, 4), 2, 3),
        lambda: as_outputs(real(2, 3, 4), 2, 0),
    ):
        with pytest.raises(ValueError, match=r".{20}"):
            make()
