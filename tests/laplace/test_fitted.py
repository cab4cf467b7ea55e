"""The frozen state of a fit: what is derived from it is another object, and the first one never changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from laplace_oracles import agree, data, mlp
from torch import Tensor, nn

from tu_symmetry.laplace.curvature import fit_curvature
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.joint.optimum import at_joint_mode, at_map, at_mode
from tu_symmetry.laplace.linearized import LinearizedLaplace


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


def test_it_is_frozen_and_the_shell_has_no_attributes_to_overwrite() -> None:
    la = fit()
    with pytest.raises(FrozenInstanceError):
        la.fitted.noise_variance = 2.0  # type: ignore[misc]
    for name in ("log_precision", "noise_variance", "solution", "summary", "prior_groups", "fitted"):
        with pytest.raises(AttributeError):
            setattr(la, name, getattr(la, name))


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


def test_before_the_fit_there_is_nothing_to_read() -> None:
    la = LinearizedLaplace(nn.Linear(2, 2))
    for name in ("fitted", "log_precision", "posterior", "theta", "solution"):
        with pytest.raises(RuntimeError, match="call fit"):
            getattr(la, name)
