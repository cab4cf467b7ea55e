"""The joint optimum in the span of all directions, the network linearized once, and the certificate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from laplace_oracles import data, randomize
from torch import Tensor, nn

from tu_symmetry.laplace import kept, subspace
from tu_symmetry.laplace.evidence import Hyperprior
from tu_symmetry.laplace.jacobians import StoredJacobian
from tu_symmetry.laplace.joint import at_mode
from tu_symmetry.laplace.kept import KeptData
from tu_symmetry.laplace.mode import duality_gap
from tu_symmetry.laplace.model import LinearizedLaplace
from tu_symmetry.laplace.tangent import LastLayerModel, Linearization, TangentModel, evaluating, normal


class Attention(nn.Module):
    """Tokens ``[batch, 5, 4]`` to outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))
        return found


class Recurrent(nn.Module):
    """An operator without forward-mode derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.cell(x)[0][:, -1])
        return found


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "convolutional": (convolutional, (2, 6, 6)),
    "attention": (Attention, (5, 4)),
    "recurrent": (Recurrent, (5, 4)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 3)), (6, 4)),
}


def targets_of(name: str, x: Tensor) -> Tensor:
    shape = (len(x), x.shape[1]) if name == "positions" else (len(x),)
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(2))


# ---------------------------------------------------------------------- the network linearized once


@pytest.mark.parametrize("budget", [0, 1 << 30])
@pytest.mark.parametrize("name", NETWORKS)
def test_products_with_a_kept_linearization_equal_those_without(name: str, budget: int) -> None:
    make, shape = NETWORKS[name]
    model = randomize(make())
    x, _ = data(*shape, outputs=3, samples=11)
    y = targets_of(name, x)
    la = LinearizedLaplace(model)
    loader = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    tangent = TangentModel(model, la.tangent.names)
    with evaluating(model):
        found = KeptData(tangent, la.likelihood, loader, budget=budget)
        assert (len(found.outputs), found.kept) == ((1, 1) if budget else (3, 0))
        vector = torch.randn(tangent.size, dtype=torch.float64)
        outputs, expected = tangent.jvp(x, vector)
        cotangent = torch.randn_like(outputs)
        torch.testing.assert_close(torch.cat(found.outputs), outputs, rtol=1e-12, atol=1e-12)
        for _ in range(2):  # what is kept serves again
            torch.testing.assert_close(torch.cat(found.push(vector)), expected, rtol=1e-12, atol=1e-12)
            pieces = cotangent.split([len(o) for o in found.outputs])
            torch.testing.assert_close(found.pull(pieces), tangent.vjp(x, cotangent), rtol=1e-12, atol=1e-12)
    assert not any(p.grad is not None for p in model.parameters())


def test_what_the_network_keeps_is_told_from_the_rest_of_a_batch() -> None:
    model = randomize(convolutional())
    x, _ = data(2, 6, 6, outputs=3, samples=400)
    tangent = TangentModel(model, LinearizedLaplace(model).tangent.names)
    with evaluating(model):
        assert kept._saved(tangent, x[:8]) == kept._saved(tangent, x[:8].clone())
        total, largest = kept._saved(tangent, x[:8].clone())
        assert largest == 8 * 2 * 6 * 6 * 8  # the images themselves, in double precision
        assert 3 * largest < total < 10 * largest  # and what convolutions, normalizations and activations return


def test_chunks_hold_no_tensor_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(convolutional())
    x, y = data(2, 6, 6, outputs=3, samples=48)
    la = LinearizedLaplace(model)
    loader = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 48, 4)]
    with evaluating(model):
        whole = KeptData(la.tangent, la.likelihood, loader)
        monkeypatch.setattr(kept, "_TENSOR", 17 * 2 * 6 * 6 * 8)  # the images of 17 samples
        found = KeptData(la.tangent, la.likelihood, loader)
        assert [len(o) for o in whole.outputs] == [48] and [len(o) for o in found.outputs] == [16, 16, 16]
        vector = torch.randn(la.tangent.size, dtype=torch.float64)
        torch.testing.assert_close(torch.cat(found.push(vector)), whole.push(vector)[0], rtol=1e-12, atol=1e-12)


def test_a_linearization_is_tried_once_for_each_structure_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    tangent, tried = TangentModel(model, ["0.weight", "2.weight"]), []
    jvp = TangentModel.jvp

    def counted(self: TangentModel, inputs: Any, vector: Tensor) -> tuple[Tensor, Tensor]:
        tried.append(inputs.shape)
        return jvp(self, inputs, vector)

    monkeypatch.setattr(TangentModel, "jvp", counted)
    with evaluating(model):
        for shape in ((3, 4), (5, 4), (3, 2, 4), (4, 2, 4)):
            tangent.linearize(torch.randn(shape, dtype=torch.float64))
    assert tried == [(3, 4), (3, 2, 4)]


def test_other_ways_to_the_products_are_linearized_too() -> None:
    model = randomize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x, y = data(4, outputs=3, samples=7)
    plain = TangentModel(model, ["2.weight", "2.bias"])
    for tangent in (LastLayerModel(model, "2"), StoredJacobian(plain, [(x, y)])):
        vector = torch.randn(plain.size, dtype=torch.float64)
        with evaluating(model):
            own = tangent.linearize(x)
            outputs, expected = plain.jvp(x, vector)
            torch.testing.assert_close(own.outputs, outputs, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(own.push(vector), expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(own.pull(outputs), plain.vjp(x, outputs), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- the joint optimum


def fit(kind: str = "classification", samples: int = 30, **options: Any) -> LinearizedLaplace:
    model = randomize(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    loader = [data(4, outputs=3, kind=kind, samples=samples)]
    return LinearizedLaplace(model, kind, **{"prior": "per_layer", **options}).fit(loader)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("classification", {}),
        ("classification", {"prior": "single", "curvature": "diag"}),
        ("classification", {"curvature": "full"}),
        ("classification", {"curvature": "last_layer", "prior": "single"}),
        ("regression", {}),
        ("regression", {"noise_variance": 0.3, "curvature": "ekfac"}),
    ],
)
@pytest.mark.parametrize("hyperprior", [Hyperprior(), Hyperprior(std=0.5)])
def test_both_solvers_end_at_one_stationary_point(kind: str, options: dict[str, Any], hyperprior: Hyperprior) -> None:
    objectives, precisions = [], []
    for solver in ("subspace", "alternation"):
        la = fit(kind, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = la.optimize_evidence(hyperprior=hyperprior, solver=solver)  # type: ignore[arg-type]
        assert result.converged and result.gradient_norm <= 1e-6
        assert result.gap <= 1e-6
        norms = la.prior_groups.total(la.theta.square())
        slopes = la.log_precision.exp() * norms - la.fitted.gamma()
        slopes += 2 * (la.log_precision - la.center.log()) / hyperprior.std**2
        assert float(slopes.abs().max()) < 1e-4
        objectives.append(la.fitted.objective())
        precisions.append(la.log_precision)
    assert objectives[0] == pytest.approx(objectives[1], abs=1e-7)
    torch.testing.assert_close(*precisions, rtol=0, atol=1e-4)


def test_a_flat_hyperprior_prunes_what_the_alternation_prunes() -> None:
    found = []
    for solver in ("subspace", "alternation"):
        la = fit(samples=12)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.optimize_evidence(hyperprior=None, solver=solver)  # type: ignore[arg-type]
        found.append(([row.pruned for row in la.report()], la.fitted.objective()))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=0.02)


def note(values: list[float], info: dict[str, Any]) -> None:
    if info["stage"] == "evidence":
        values.append(info["objective"])


@pytest.mark.parametrize("limit", [4, 48])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_objective_falls_from_direction_to_direction(
    kind: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where few directions are kept, and the oldest are forgotten."""
    monkeypatch.setattr(subspace, "_DIRECTIONS", limit)
    la, values = fit(kind), []
    result = la.optimize_evidence(progress=partial(note, values))
    assert all(b <= a + 1e-9 for a, b in pairwise(values))
    assert values[0] > values[-1] + 1
    assert la.fitted.objective() == pytest.approx(values[-1], abs=1e-9)
    assert result.converged
    assert la.log_marginal_likelihood() == pytest.approx(result.log_marginal_likelihood, rel=1e-12)


def test_groups_are_stretched_again_while_precisions_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """At iterations 1, 6, 12, 24, ..., without informative observations: the same optimum, wherever it is done."""
    monkeypatch.setattr(subspace, "most_rows", lambda *_: 0)
    gradients: list[int] = []
    calls: list[int] = []
    found: list[float] = []
    add, gradient = subspace._Search.add_groups, subspace._Search.gradient

    def noted(self: subspace._Search, point: subspace._Point, slope: Tensor) -> None:
        calls.append(len(gradients))
        add(self, point, slope)

    def counted(self: subspace._Search, point: subspace._Point) -> Tensor:
        gradients.append(0)  # one before each direction
        return gradient(self, point)

    monkeypatch.setattr(subspace._Search, "gradient", counted)
    monkeypatch.setattr(subspace._Search, "add_groups", noted)
    for moving, expected in ((math.inf, [1, 6]), (0.0, [1, 6, 12, 24])):
        monkeypatch.setattr(subspace, "_MOVING", moving)
        calls.clear()
        gradients.clear()
        la = fit()
        result = la.optimize_evidence()
        assert result.converged and calls == [k for k in expected if k <= result.iterations]
        assert len(calls) > (2 if moving == 0 else 1)
        found.append(la.fitted.objective())
    assert found[0] == pytest.approx(found[1], abs=1e-8)


@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_of_many_groups_few_are_stretched_by_themselves(curvature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the steepest ascent to their curvature, and the others together: the same optimum."""
    monkeypatch.setattr(subspace, "most_rows", lambda *_: 0)
    added: list[int] = []
    found: list[float] = []
    add = subspace._Search.add_groups

    def counted(self: subspace._Search, point: subspace._Point, gradient: Tensor) -> None:
        before = self.span.count
        add(self, point, gradient)
        added.append(self.span.count - before)

    monkeypatch.setattr(subspace._Search, "add_groups", counted)
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = randomize(nn.Sequential(*layers, nn.Linear(4, 3)))
    loader = [data(4, outputs=3, kind="classification", samples=30)]
    for most in (1, 3, 100):
        monkeypatch.setattr(subspace, "_STRETCHED", most)
        added.clear()
        la = LinearizedLaplace(model, prior="per_layer", curvature=curvature).fit(loader)  # type: ignore[arg-type]
        assert len(la.prior_groups) == 5
        result = la.optimize_evidence(solver="subspace")
        assert result.converged and added and set(added) == {min(most, len(la.prior_groups))}
        found.append(la.fitted.objective())
    assert max(found) - min(found) < 1e-8


def test_residuals_that_would_become_subnormal_are_zero() -> None:
    """Those of samples that are fitted with certainty; what is left changes no digit."""
    for dtype, tiny in ((torch.float32, 1e-30), (torch.float64, 1e-200)):
        residual = torch.tensor([[0.3, -0.3, 0.0], [tiny, -tiny, 1e-12]], dtype=dtype)
        found = normal(residual)
        assert found.tolist() == [residual[0].tolist(), [0.0, 0.0, float(residual[1, 2])]]
        assert torch.equal(normal(residual[1:] * 0), residual[1:] * 0)
        scaled = residual * 1e-15  # relative to the largest
        assert torch.equal(normal(scaled) != 0, found != 0)


def test_certain_samples_reach_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[Tensor] = []
    pull = KeptData.pull

    def noted(self: KeptData, cotangents: list[Tensor]) -> Tensor:
        pulled.extend(cotangents)
        return pull(self, cotangents)

    monkeypatch.setattr(KeptData, "pull", noted)
    model = randomize(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).float()
    x, y = data(4, outputs=3, samples=30)
    with torch.no_grad():
        y = (model(x.float()) + 0.0).argmax(-1)
        model[2].weight *= 300  # certain of nearly all
        model[2].bias *= 300
    la = LinearizedLaplace(model, prior="per_layer").fit([(x.float(), y)])
    with torch.no_grad():
        outputs = la.model(x.float())
        residual = la.likelihood.residual(outputs, la.likelihood.targets(outputs, y))
    assert 0 < float(residual[residual != 0].abs().min()) < 1e-19, "vacuous: no residual is that small"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.optimize_evidence(max_iterations=1)
    values = torch.cat([own.flatten() for own in pulled]).abs()
    assert float(values[values > 0].min()) >= 1e-19 * float(values.max())


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_it_ends_at_the_same_point_whatever_is_kept_and_however_it_is_batched(budget: int) -> None:
    la = fit()
    ((x, y),) = la.train_loader or []
    first = la.optimize_evidence()
    other = fit()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    result = other.optimize_evidence([(x[i], y[i]) for i in order.split(7)], memory=budget)
    assert other.fitted.objective() == pytest.approx(la.fitted.objective(), abs=1e-8)
    # the evidence by itself is not stationary there: it moves with the precisions' own tolerance of 1e-6
    assert result.log_marginal_likelihood == pytest.approx(first.log_marginal_likelihood, abs=1e-6)
    torch.testing.assert_close(la.log_precision, other.log_precision, rtol=0, atol=1e-5)


def test_linearizations_that_turn_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that pass the trial, and are wrong from the fifth on."""
    right = fit()
    expected = right.optimize_evidence()
    linearize, calls = TangentModel.linearize, []

    def turning(self: TangentModel, inputs: Any) -> Linearization:
        own = linearize(self, inputs)

        def push(vector: Tensor) -> Tensor:
            calls.append(0)
            return own.push(vector) * (1.0 if len(calls) < 5 else 1.1)

        return own._replace(push=push)

    monkeypatch.setattr(TangentModel, "linearize", turning)
    la = fit()
    result = la.optimize_evidence()
    assert len(calls) > 5
    assert result.log_marginal_likelihood == pytest.approx(expected.log_marginal_likelihood, abs=1e-8)
    assert result.converged


def test_data_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BUDGET", 100)
    la, stages = fit(), []
    with pytest.raises(ValueError, match="do not fit"):
        la.optimize_evidence(solver="subspace", memory=100)
    result = la.optimize_evidence(memory=100, progress=lambda info: stages.append(info["stage"]))
    assert result.converged and "mode" in stages  # the alternation's
    with pytest.raises(ValueError, match="solver='newton' is not known"):
        la.optimize_evidence(solver="newton")  # type: ignore[arg-type]


def test_other_data_than_those_of_the_fit_are_refused() -> None:
    la = fit()
    ((x, y),) = la.train_loader or []
    with pytest.raises(ValueError, match="30 samples, and the loader now gives 20"):
        la.optimize_evidence([(x[:20], y[:20])])


# ---------------------------------------------------------------------- the certificate


@pytest.mark.parametrize("precision", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_certificate_bounds_the_distance_to_the_optimum(kind: str, precision: float) -> None:
    la = fit(kind, evaluate_at="tangent_mode", **({"noise_variance": 0.4} if kind == "regression" else {}))
    la.set_precision(precision)
    best = at_mode(la.fitted, la.train_loader or [], tolerance=1e-10)
    assert best.solution.gap < 1e-12
    lowest = best.objective()
    noise, generator = la.noise_variance, torch.Generator().manual_seed(0)
    weights = la.fitted.groups.spread(la.log_precision.exp())
    ((x, y),) = la.train_loader or []
    for size in (1e-3, 0.1, 1.0, 10.0):
        theta = best.theta + size * torch.randn(len(best.theta), generator=generator, dtype=torch.float64)
        outputs, change = la.tangent.jvp(x, theta - la.tangent.point())
        targets = la.likelihood.targets(outputs, y)
        loss = float(la.likelihood.loss(outputs + change, targets).sum()) / noise
        gradient = la.tangent.vjp(x, la.likelihood.residual(outputs + change, targets)) / noise + weights * theta
        lowest_loss = best.solution.loss / noise
        distance = (loss + 0.5 * weights @ theta.square()) - (lowest_loss + 0.5 * weights @ best.theta.square())
        assert 0 < float(distance) <= duality_gap(gradient, weights) * (1 + 1e-9)
    assert math.isfinite(lowest)


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_the_result_of_a_search_that_stopped_early_is_certified(iterations: int) -> None:
    la = fit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = la.optimize_evidence(max_iterations=iterations)
    assert result.iterations == iterations and not result.converged
    best = at_mode(la.fitted, la.train_loader or [], tolerance=1e-10)
    missing = best.log_evidence() - result.log_marginal_likelihood
    assert 0 <= missing <= result.gap
    assert result.gap == la.solution.gap
