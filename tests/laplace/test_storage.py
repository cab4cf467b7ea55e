"""The frozen state of a fit, which nothing changes, and its files: bit-equal predictions, refusals of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace_oracles import agree, data, mlp, randomize
from torch import Tensor, nn

from tu_symmetry.files import write_safetensors
from tu_symmetry.laplace.curvature import fit_curvature
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.joint.optimum import at_joint_mode, at_map, at_mode
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.storage import LaplaceFileError


def cnn(seed: int = 0) -> nn.Module:
    return randomize(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        ),
        seed,
    )  # fmt: skip


def fitted(kind: str = "classification", **options: Any) -> tuple[LinearizedLaplace, Tensor, Tensor]:
    x, y = data(2, 5, 5, outputs=3, kind=kind)
    return LinearizedLaplace(cnn(), kind, **options).fit([(x, y)]), x, y  # type: ignore[arg-type]


def outcome(la: LinearizedLaplace, x: Tensor) -> list[Tensor]:
    mean, covariance = la.function_covariance(x)
    predictive = la.predictive(x)
    return [
        mean,
        covariance,
        la.function_samples(x, 3),
        *(predictive if isinstance(predictive, tuple) else (predictive,)),
        la.theta,
        la.log_precision,
        torch.tensor([la.log_marginal_likelihood(), la.noise_variance]),
        torch.tensor([[r.precision, r.gamma, r.squared_norm, r.center] for r in la.report()]),
    ]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("classification", {"prior": "per_group", "curvature": "kfac"}),
    ("classification", {"prior": "per_layer", "curvature": "full"}),
    ("classification", {"prior": "single", "curvature": "full", "evaluate_at": "map"}),
    ("classification", {"prior": "single", "curvature": "last_layer"}),
    ("regression", {"prior": "per_layer", "curvature": "diag", "parameters": ["3", "6"]}),
    ("regression", {"prior": "single", "curvature": "kfac", "noise_variance": 0.3, "kfac_approx": "reduce"}),
]


@pytest.mark.filterwarnings("ignore::tu_symmetry.laplace.report.PrunedGroupWarning")
@pytest.mark.filterwarnings("ignore::tu_symmetry.laplace.report.NotConvergedWarning")
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_what_is_loaded_is_bit_equal(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    la, x, y = fitted(kind, **options)
    la.optimize_evidence(hyperprior=Hyperprior(std=1.5), max_iterations=3)
    expected = outcome(la, x)
    path = tmp_path / "laplace.safetensors"
    la.save(path)
    assert [f.name for f in tmp_path.iterdir()] == [path.name]
    loaded = LinearizedLaplace.load(path, cnn())
    for found, value in zip(outcome(loaded, x), expected, strict=True):
        assert torch.equal(found, value)
    assert loaded.report() == la.report()
    assert (loaded.prior, loaded.evaluate_at, loaded.options) == (la.prior, la.evaluate_at, la.options)
    assert loaded.prior_groups.names == la.prior_groups.names
    first, second = (m.optimize_evidence([(x, y)], max_iterations=2) for m in (la, loaded))  # and it can go on
    agree(first, second)


def test_before_the_mode_is_known(tmp_path: Path) -> None:
    la, x, y = fitted(prior="single")
    la.save(tmp_path / "a.safetensors")
    loaded = LinearizedLaplace.load(tmp_path / "a.safetensors", cnn())
    with pytest.raises(ValueError, match="train_loader"):
        loaded.log_marginal_likelihood()
    assert loaded.log_marginal_likelihood([(x, y)]) == pytest.approx(la.log_marginal_likelihood(), rel=1e-12)


@pytest.mark.parametrize("change", ["weight", "running_mean"])
def test_other_weights_are_refused(tmp_path: Path, change: str) -> None:
    la, _, _ = fitted(prior="single", evaluate_at="map")
    la.save(tmp_path / "a.safetensors")
    model = cnn()
    with torch.no_grad():
        (model[6].weight if change == "weight" else model[1].running_mean).add_(1e-12)
    with pytest.raises(LaplaceFileError, match="other weights"):
        LinearizedLaplace.load(tmp_path / "a.safetensors", model)
    with pytest.raises(LaplaceFileError, match=r"another network.*3\.weight"):
        LinearizedLaplace.load(tmp_path / "a.safetensors", nn.Sequential(nn.Linear(2, 3)).double())


def test_files_that_are_none(tmp_path: Path) -> None:
    la, _, _ = fitted(prior="single", evaluate_at="map")
    path = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError, match="save writes one"):
        LinearizedLaplace.load(path, cnn())
    la.save(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:5], b"", b"not a file of tensors"):
        path.write_bytes(content)
        with pytest.raises(LaplaceFileError, match="truncated"):
            LinearizedLaplace.load(path, cnn())
    write_safetensors(path, {"weight": torch.zeros(2)})
    with pytest.raises(LaplaceFileError, match="holds no Laplace"):
        LinearizedLaplace.load(path, cnn())
    newer = {"laplace": json.dumps({"format": "tu_symmetry.laplace", "version": 9})}
    write_safetensors(path, {"weight": torch.zeros(2)}, newer)
    with pytest.raises(LaplaceFileError, match="9"):
        LinearizedLaplace.load(path, cnn())


def fit(kind: Any = "classification", **options: Any) -> LinearizedLaplace:
    model = mlp()
    return LinearizedLaplace(model, kind, prior="per_layer", **options).fit([data(4, outputs=3, kind=kind, samples=12)])


def contents(fitted: FittedLaplace) -> dict[str, Any]:
    """Copies of all that it holds."""
    found: dict[str, Any] = {field.name: getattr(fitted, field.name) for field in fields(fitted)}
    copies = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
    copies["theta"] = fitted.theta.clone()
    blocks = {f"{i}{key}": t.clone() for i, b in enumerate(fitted.curvature.blocks) for key, t in b.tensors().items()}
    return found | copies | blocks


DERIVED: dict[str, Callable[[LinearizedLaplace, Any], Any]] = {
    "theta": lambda la, x: la.fitted.with_theta(torch.zeros_like(la.theta)),
    "restarted": lambda la, x: la.fitted.restarted(evaluate_at="map"),
    "mode": lambda la, x: at_mode(la.fitted, la.train_loader or []),
    "map": lambda la, x: at_map(la.fitted.restarted(evaluate_at="map"), Hyperprior()),
    "joint": lambda la, x: at_joint_mode(la.fitted, la.train_loader or [], Hyperprior()),
    "prediction": lambda la, x: LinearizedLaplace.from_fitted(la.fitted).predictive(x),
    "evidence": lambda la, x: LinearizedLaplace.from_fitted(la.fitted, la.train_loader).optimize_evidence(),
    "set": lambda la, x: LinearizedLaplace.from_fitted(la.fitted).set_precision(7.0),
}


@pytest.mark.parametrize("what", DERIVED)
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_nothing_that_is_derived_changes_it(kind: Any, what: str) -> None:
    la = fit(kind)
    before = contents(la.fitted)
    DERIVED[what](la, data(4, outputs=3)[0])
    after = contents(la.fitted)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value is after[name], name


def test_one_curvature_serves_both_places_as_two_fits_do() -> None:
    la = fit()
    for where in ("map", "tangent_mode"):
        own = fit(evaluate_at=where)
        other = LinearizedLaplace.from_fitted(la.fitted.restarted(evaluate_at=where), la.train_loader)  # type: ignore[arg-type]
        results = [each.optimize_evidence() for each in (own, other)]
        agree(*results)
        torch.testing.assert_close(own.log_precision, other.log_precision)
        torch.testing.assert_close(own.theta, other.theta)


def test_another_curvature_has_other_determinants_and_the_same_precisions() -> None:
    la = fit()
    fitted = la.fitted.with_hyperparameters(torch.full((2,), 0.3, dtype=torch.float64).log())
    loader = [(x, y) for x, y in la.train_loader or []] * 2
    blocks, summary = fit_curvature(fitted.tangent, fitted.likelihood, loader, fitted.groups, fitted.options)
    twice = fitted.with_curvature(blocks, summary)
    assert torch.equal(twice.log_precision, fitted.log_precision)
    assert twice.summary.samples == 2 * fitted.summary.samples
    found = twice.curvature.determinants.log_det_ratio(fitted.log_precision, 0.0)
    expected = sum(float((2 * b.eigenvalues() / 0.3).log1p().sum()) for b in fitted.curvature.blocks)
    assert found == pytest.approx(expected, rel=1e-9)
    assert fitted.curvature.determinants.log_det_ratio(fitted.log_precision, 0.0) < found - 1
