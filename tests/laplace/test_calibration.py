"""The posterior's temperature by held-out data: never worse than the network, and the evidence stays as it is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace_oracles import data, mlp
from torch import Tensor, nn

from tu_symmetry.laplace.calibration import TEMPERATURES
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import LaplaceHurtsWarning

pytestmark = pytest.mark.filterwarnings("ignore::tu_symmetry.laplace.report.LaplaceHurtsWarning")


def fit(kind: str = "classification", scale: float = 0.6, **options: Any) -> LinearizedLaplace:
    model = mlp(hidden=6, scale=scale)
    loader = [data(4, outputs=3, kind=kind, samples=15)]
    options = {"evaluate_at": "map", "prior": "single", **options}
    return LinearizedLaplace(model, kind, **options).fit(loader)  # type: ignore[arg-type]


def held_out(kind: str = "classification", samples: int = 40, seed: int = 7) -> list[tuple[Tensor, Tensor]]:
    x, y = data(4, outputs=3, kind=kind, samples=samples, seed=seed)
    return [(x[:17], y[:17]), (x[17:], y[17:])]


def nll(la: LinearizedLaplace, batches: list[tuple[Tensor, Tensor]], **options: Any) -> float:
    """By hand, of whatever :meth:`predictive` gives."""
    values = []
    for x, y in batches:
        p = la.predictive(x, **options)
        if isinstance(p, Tensor):
            values.append(-p.gather(-1, y.unsqueeze(-1)).log().flatten())
        else:
            values.append(-torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(y).flatten())
    return float(torch.cat(values).mean())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("classification", {}),
        ("classification", {"link_approx": "probit"}),
        ("classification", {"covariance": "samples", "num_samples": 20}),
        ("regression", {}),
    ],
)
def test_held_out_nll_is_never_worse_than_the_networks(
    kind: str, options: dict[str, Any], scale: float, seed: int
) -> None:
    """Exactly, and of the predictions that are made afterwards."""
    la, batches = fit(kind, scale), held_out(kind, seed=seed)
    found = la.calibrate(batches, sharpen=False, **options)
    assert found.calibrated.nll <= found.network.nll
    assert found.calibrated.nll <= found.evidence.nll
    assert nll(la, batches, **options) == pytest.approx(found.calibrated.nll, abs=1e-12)
    assert la.temperature == found.temperature
    assert found.samples == 40
    for temperature, quality in ((0.0, found.network), (1.0, found.evidence)):
        other = LinearizedLaplace.from_fitted(replaced(la, temperature))
        assert nll(other, batches, **options) == pytest.approx(quality.nll, abs=1e-12)


def replaced(la: LinearizedLaplace, temperature: float) -> Any:
    return replace(la.fitted, temperature=temperature)


def test_temperature_zero_is_the_network_and_one_the_evidence() -> None:
    la = fit()
    x = held_out()[0][0]
    before = la.predictive(x)
    cold = LinearizedLaplace.from_fitted(replaced(la, 0.0))
    torch.testing.assert_close(cold.predictive(x), la.model(x).softmax(-1))
    torch.testing.assert_close(cold.predictive(x, link_approx="probit"), la.model(x).softmax(-1))
    assert torch.equal(LinearizedLaplace.from_fitted(replaced(la, 1.0)).predictive(x), before)
    half = LinearizedLaplace.from_fitted(replaced(la, 0.5))
    torch.testing.assert_close(half.function_covariance(x)[1], 0.5 * la.function_covariance(x)[1])
    mean = la.model(x)
    torch.testing.assert_close(half.function_samples(x, 5) - mean, 0.5**0.5 * (la.function_samples(x, 5) - mean))


def test_a_planted_temperature_is_found() -> None:
    """Labels drawn from the predictive at temperature 10 (the network's logits are far too sure)."""
    la = fit(scale=2.0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 4, generator=generator, dtype=torch.float64)
    p = LinearizedLaplace.from_fitted(replaced(la, 10.0)).predictive(x)
    y = torch.multinomial(p, 1, generator=generator).squeeze(-1)
    found = la.calibrate([(x, y)])
    assert 10**0.5 <= found.temperature <= 10**1.5
    assert found.calibrated.nll < found.network.nll - 0.01


def test_the_evidence_does_not_know_of_it_and_new_precisions_take_it_back(tmp_path: Path) -> None:
    la, batches = fit(), held_out()
    la.optimize_evidence()
    before = (la.log_marginal_likelihood(), la.log_precision.clone(), la.report())
    la = LinearizedLaplace.from_fitted(replaced(la, 100.0), la.train_loader)
    assert (la.log_marginal_likelihood(), la.report()) == (before[0], before[2])
    assert torch.equal(la.log_precision, before[1])
    la.save(tmp_path / "a.safetensors")
    again = LinearizedLaplace.load(tmp_path / "a.safetensors", la.model)
    assert again.temperature == 100
    assert torch.equal(again.predictive(batches[0][0]), la.predictive(batches[0][0]))
    la.set_precision(2.0)
    assert la.temperature == 1
    again.optimize_evidence()
    assert again.temperature == 1


def test_a_posterior_that_hurts_is_said_once_with_what_to_do() -> None:
    la = fit(scale=2.0)
    la.set_precision(1e-4)
    x = held_out()[0][0]
    batches = [(x, la.model(x).argmax(-1))]  # the network is always right
    with pytest.warns(LaplaceHurtsWarning, match=r"temperature 0 .*last_layer") as caught:
        found = la.calibrate(batches)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert found.temperature == 0 and found.hurts
    assert "network" in str(found) and "temperature 0" in str(found) and f"{found.network.nll:.4f}" in str(found)


@pytest.mark.filterwarnings("error")
def test_a_posterior_that_changes_nothing_does_not_hurt() -> None:
    la = fit(scale=2.0)
    x = held_out()[0][0]
    batches = [(x, la.model(x).argmax(-1))]
    la.set_precision(1e6)
    found = la.calibrate(batches)
    assert 0 < found.evidence.nll - found.network.nll < 1e-4 and not found.hurts


def each(la: LinearizedLaplace, x: Tensor, y: Tensor) -> list[list[float]]:
    """The NLLs of every sample's observations, from whatever :meth:`predictive` gives, by hand."""
    p = la.predictive(x)
    if not isinstance(p, Tensor):
        return (-torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(y)).flatten(1).tolist()
    if y.is_floating_point():
        return (-torch.distributions.Bernoulli(p).log_prob(y)).flatten(1).tolist()
    rows = y.unsqueeze(1) if y.ndim == 1 else y
    q = p.reshape(*rows.shape, -1)
    return [[-math.log(q[i, k, c]) for k, c in enumerate(row) if c >= 0] for i, row in enumerate(rows.tolist())]


def bound(own: list[list[float]], network: list[list[float]], standard_errors: float) -> tuple[float, float]:
    """Gain over the network less its standard errors, and one of these, sample by sample."""
    differences = [sum(b) - sum(a) for a, b in zip(own, network, strict=True)]
    counts = [len(a) for a in own]
    gain, n = sum(differences) / sum(counts), len(own)
    squares = sum((d - gain * c) ** 2 for d, c in zip(differences, counts, strict=True))
    error = math.sqrt(n / (n - 1) * squares) / sum(counts)
    return gain - standard_errors * error, error


def observed(model: nn.Module, kind: str, seed: int, samples: int = 30) -> tuple[Tensor, Tensor]:
    """What a network of which this one is too sure would have seen."""
    generator = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(samples, *[3] * (kind == "positions"), 4, generator=generator, dtype=torch.float64)
    f = model(x).detach() / 1.5
    if kind == "regression":
        return x, 1.5 * f + 1.2 * torch.randn(f.shape, generator=generator, dtype=torch.float64)
    if kind == "binary":
        return x, torch.bernoulli(f.sigmoid(), generator=generator)
    y = torch.multinomial(f.softmax(-1).flatten(0, -2), 1, generator=generator).view(x.shape[:-1])
    if kind == "positions":
        y[torch.rand(y.shape, generator=generator) < 0.4] = -100
        y[4] = -100  # of one sample all are left out
    return x, y


@pytest.mark.parametrize("kind", ["classification", "positions", "binary", "regression"])
def test_the_highest_gain_less_its_standard_errors(kind: str) -> None:
    """Against a slow oracle; observations of one sample are not independent, and samples with none count as such."""
    chosen = torch.tensor([checked(kind, seed, (0.0, 0.7, 2.0)) for seed in range(6)])
    inside = (chosen > 0) & (chosen < max(TEMPERATURES))
    assert len(chosen.unique()) > 3 and int(inside.sum()) > 6, "vacuous: nearly always at an end"
    assert int((chosen[:, 0] > chosen[:, 2]).sum()) > 2, "vacuous: all rules choose the same"


def checked(kind: str, seed: int, rules: tuple[float, ...]) -> list[float]:
    """The temperatures by several rules, which are those of the oracle."""
    model = mlp(hidden=6, scale=0.5 + 0.3 * seed)
    likelihood = "classification" if kind == "positions" else kind
    training = observed(model, kind, -1, 12)
    la = LinearizedLaplace(model, likelihood, evaluate_at="map", prior="single").fit([training])  # type: ignore[arg-type]
    x, y = observed(model, kind, seed)
    rows = {t: each(LinearizedLaplace.from_fitted(replaced(la, t)), x, y) for t in TEMPERATURES}
    temperatures = []
    for rule in rules:
        found = la.calibrate([(x[:13], y[:13]), (x[13:], y[13:])], standard_errors=rule, sharpen=False)
        bounds = {t: bound(own, rows[0.0], rule) for t, own in rows.items()}
        best = max(bounds, key=lambda t: (bounds[t][0], -t))
        assert found.temperature == best
        assert found.standard_error == pytest.approx(bounds[best][1], rel=1e-7, abs=1e-15)
        gain = found.network.nll - found.calibrated.nll
        assert gain >= 0 and gain == pytest.approx(bound(rows[best], rows[0.0], 0.0)[0], abs=1e-12)
        assert ("standard error" in str(found)) == (best > 0)
        temperatures.append(best)
    return temperatures


def test_refusals() -> None:
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="standard_errors"):
            fit().calibrate(held_out(), standard_errors=wrong)
    with pytest.raises(ValueError, match="left out"):
        fit().calibrate([(x, torch.full_like(y, -100)) for x, y in held_out()])
