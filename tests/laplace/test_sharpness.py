"""Sharpness: temperature scaling of the network beside the posterior's temperature; and the epistemic score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, gaussian_nll_loss

from tu_symmetry.laplace.linearized import LinearizedLaplace

pytestmark = pytest.mark.filterwarnings("ignore")

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(400, 3, generator=GENERATOR, dtype=torch.float64)
TRUE = 2 * torch.randn(3, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.multinomial((X @ TRUE).softmax(-1), 1, generator=GENERATOR).squeeze(-1)
YES = torch.bernoulli((X @ TRUE).sigmoid(), generator=GENERATOR)
REAL = X @ TRUE + 2 * torch.randn(400, 4, generator=GENERATOR, dtype=torch.float64)
TRAIN, HELD = slice(0, 200), slice(200, 400)
TARGETS = {"classification": LABELS, "binary": YES, "regression": REAL}


def fit(kind: str, factor: float, **options: Any) -> LinearizedLaplace:
    """A network whose outputs are the true ones times a factor."""
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64))
    with torch.no_grad():
        model[0].weight.copy_(factor * TRUE.T)
        model[0].bias.zero_()
    la = LinearizedLaplace(model, kind, curvature="full", evaluate_at="map", prior="single", **options)  # type: ignore[arg-type]
    la.fit([(X[TRAIN], TARGETS[kind][TRAIN])])
    la.optimize_evidence()
    return la


def nll(kind: str, outputs: Tensor, s: float) -> float:
    y = TARGETS[kind][HELD]
    if kind == "classification":
        return cross_entropy(s * outputs, y).item()
    if kind == "binary":
        return binary_cross_entropy_with_logits(s * outputs, y).item()
    return gaussian_nll_loss(outputs, y, torch.full_like(y, 1 / s), full=True).item()


@pytest.mark.parametrize(
    ("kind", "factor", "options"),
    [
        ("classification", 4.0, {}),
        ("classification", 0.3, {}),
        ("binary", 4.0, {}),
        ("regression", 1.0, {"noise_variance": 1.0}),
    ],
)
def test_the_network_alone_is_scaled_as_by_a_search_of_its_own(
    kind: str, factor: float, options: dict[str, Any], tmp_path: Path
) -> None:
    la = fit(kind, factor, **options)
    found = la.calibrate([(X[HELD][:120], TARGETS[kind][HELD][:120]), (X[HELD][120:], TARGETS[kind][HELD][120:])])
    with torch.no_grad():
        outputs = la.model(X[HELD])
    best = minimize_scalar(lambda log: nll(kind, outputs, math.exp(log)), bounds=(-2.3, 2.3), method="bounded")
    assert found.network.nll == pytest.approx(nll(kind, outputs, 1.0), rel=1e-6)
    assert found.scaled.nll == pytest.approx(best.fun, abs=2e-3) and found.scaled.nll < found.network.nll - 0.01
    assert found.calibrated.nll <= found.scaled.nll
    if found.temperature == 0:
        assert math.log(found.sharpness) == pytest.approx(best.x, abs=0.06)
    assert la.sharpness == found.sharpness and la.temperature == found.temperature

    predicted = la.predictive(X[HELD])
    targets = TARGETS[kind][HELD]
    if kind == "classification":
        own = -predicted.gather(1, targets[:, None]).log().mean().item()
    elif kind == "binary":
        own = torch.nn.functional.binary_cross_entropy(predicted, targets).item()
    else:
        own = gaussian_nll_loss(predicted.mean, targets, predicted.variance, full=True).item()
    assert own == pytest.approx(found.calibrated.nll, rel=1e-6)
    la.save(tmp_path / "la.safetensors")
    again = LinearizedLaplace.load(tmp_path / "la.safetensors", la.model)
    assert again.sharpness == la.sharpness
    torch.testing.assert_close(again.predictive(X[HELD]), predicted)
    la.set_precision(1.0)
    assert la.sharpness == 1


def test_a_network_that_is_right_is_left_alone() -> None:
    found = fit("classification", 1.0).calibrate([(X[HELD], LABELS[HELD])], standard_errors=2.0)
    assert found.sharpness == 1 and found.temperature == 0 and found.calibrated == found.scaled == found.network


def test_the_likelihood_stays_as_it_is_where_that_is_asked_for() -> None:
    la = fit("classification", 4.0)
    found = la.calibrate([(X[HELD], LABELS[HELD])], sharpen=False)
    assert found.sharpness == 1 and found.scaled == found.network and found.temperature > 0


def test_joint_predictions_are_as_sharp() -> None:
    la = fit("classification", 4.0)
    found = la.calibrate([(X[HELD], LABELS[HELD])])
    joint = la.predictive(X[:5], joint=True, num_samples=4)
    torch.testing.assert_close(joint, (found.sharpness * la.function_samples(X[:5], 4)).softmax(-1))


@pytest.mark.parametrize("kind", ["classification", "binary", "regression"])
def test_the_epistemic_score_is_that_of_the_evidence_whatever_the_temperature(kind: str) -> None:
    la = fit(kind, 1.0)
    inputs = torch.cat([X[:6], 30 * X[:6]])
    samples = la.function_samples(inputs, 50)
    if kind == "regression":
        expected = samples.var(0, correction=0).mean(-1)
    elif kind == "binary":
        p = samples.sigmoid()
        both = torch.stack([p, 1 - p], -1)
        expected = (torch.special.entr(both.mean(0)).sum(-1) - torch.special.entr(both).sum(-1).mean(0)).sum(-1)
    else:
        p = samples.softmax(-1)
        expected = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    found = la.epistemic(inputs, num_samples=50)
    assert found.shape == (12,) and bool((found >= 0).all())
    torch.testing.assert_close(found, expected)
    la.calibrate([(X[HELD], TARGETS[kind][HELD])])
    torch.testing.assert_close(la.epistemic(inputs, num_samples=50), expected)


def stopped_early(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network that stopped on its way to a planted curve; 60 points with noise of 0.1 that it saw, and 400 others."""
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(460, 1, generator=generator, dtype=torch.float64) - 3
    y = (2 * x).sin() + 0.1 * torch.randn(460, 1, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        (model(x[:60]) - y[:60]).square().mean().backward()
        optimizer.step()
    return model.eval(), x, y


@pytest.mark.parametrize("options", [{}, {"evaluate_at": "map", "prior": "single"}, {"curvature": "last_layer"}])
@pytest.mark.parametrize("seed", range(2))
def test_a_regression_has_the_noise_of_its_own_mean(options: dict[str, Any], seed: int) -> None:
    """Residuals of the network, not those of the tangent model's mode; calibrated it is no worse than these alone."""
    model, x, y = stopped_early(seed)
    la = LinearizedLaplace(model, "regression", **options).fit([(x[:60], y[:60])])
    la.optimize_evidence(max_iterations=30)
    with torch.no_grad():
        outputs = model(x)
    noise = (y - outputs)[:60].square().mean()
    found, alone = la.predictive(x), torch.full_like(y, float(noise))
    torch.testing.assert_close(found.variance - found.epistemic, alone)

    def judged(variance: Tensor, rows: slice) -> float:
        return gaussian_nll_loss(outputs[rows], y[rows], variance[rows], full=True).item()

    report = la.calibrate([(x[60:160], y[60:160])], standard_errors=2.0)
    assert report.network.nll == pytest.approx(judged(alone, slice(60, 160)), rel=1e-6)
    assert judged(la.predictive(x).variance, slice(160, 460)) < judged(alone, slice(160, 460)) + 0.02


@pytest.mark.parametrize("seed", range(2))
def test_a_planted_noise_is_found_whatever_the_residuals(seed: int) -> None:
    """The network of the truth, fitted to points on which its residuals are a hundred times too small."""
    model, x, _ = stopped_early(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        y = model(x) + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        memorized = model(x[:60]) + 0.001 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    la = LinearizedLaplace(model, "regression", evaluate_at="map", prior="single").fit([(x[:60], memorized)])
    la.optimize_evidence()
    la.calibrate([(x[60:], y[60:])])
    assert float(la.predictive(x).variance.mean()) == pytest.approx(0.01, rel=0.2)
