"""Mixtures of Laplace approximations: moments by their definition, averages, and no change by symmetries."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace_oracles import data, dense_covariance, jacobian, mlp
from torch import Tensor

import tu_symmetry as tus
from tu_symmetry.laplace.links import GaussianPredictive
from tu_symmetry.laplace.mixture import LaplaceMixture, mixed

OPTIONS: dict[str, Any] = {"prior": "single", "evaluate_at": "map"}


def mixture(kind: Any = "classification", weights: Any = None) -> tuple[LaplaceMixture, Tensor, Tensor]:
    x, y = data(4, outputs=3, kind="regression" if kind == "regression" else "classification")
    if kind == "binary":
        y = torch.stack([y == c for c in range(3)], -1)
    members = LaplaceMixture.fit([mlp(seed=s) for s in range(3)], [(x, y)], likelihood=kind, **OPTIONS).members
    return LaplaceMixture(members, weights=weights), x, y


def test_moments_of_a_regression_by_their_definition() -> None:
    found, x, _ = mixture("regression", weights=[1, 2, 1])
    w = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64).view(3, 1, 1)
    means, variances = [], []
    for la in found.members:
        jac = jacobian(la.model, la.tangent.names, x)
        means.append(la.model(x).detach())
        variances.append(torch.einsum("nci,ij,ncj->nc", jac, dense_covariance(la), jac))
    mean, second = torch.stack(means), torch.stack(means) ** 2 + torch.stack(variances)
    predictive = found.predictive(x)
    torch.testing.assert_close(predictive.mean, (w * mean).sum(0))
    epistemic = (w * second).sum(0) - (w * mean).sum(0) ** 2
    torch.testing.assert_close(predictive.epistemic, epistemic, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(predictive.variance, epistemic + 1.0, rtol=1e-7, atol=1e-9)
    samples = found.function_samples(x, 4000)
    assert samples.shape == (4000, len(x), 3)
    torch.testing.assert_close(samples.var(0), epistemic, rtol=0.15, atol=0.05)
    with pytest.raises(ValueError, match="a regression has moments"):
        found.predictive(x, average="log_probabilities")


@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_averages_of_probabilities_and_of_their_logarithms(kind: str) -> None:
    found, x, _ = mixture(kind, weights=[1, 3, 0])
    parts = [la.predictive(x, link_approx="probit") for la in found.members]
    torch.testing.assert_close(found.predictive(x, link_approx="probit"), 0.25 * parts[0] + 0.75 * parts[1])
    geometric = parts[0] ** 0.25 * parts[1] ** 0.75
    if kind == "binary":
        expected = geometric / (geometric + (1 - parts[0]) ** 0.25 * (1 - parts[1]) ** 0.75)
    else:
        expected = geometric / geometric.sum(-1, keepdim=True)
    torch.testing.assert_close(found.predictive(x, link_approx="probit", average="log_probabilities"), expected)


def test_certain_members_have_no_infinite_logarithms() -> None:
    p = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])]
    found = mixed(p, torch.tensor([0.5, 0.5]), average="log_probabilities")
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0]]))
    assert not mixed(p, torch.tensor([0.0, 1.0]), average="log_probabilities").isnan().any()


def test_equal_members_are_one() -> None:
    """Two copies of an approximation predict as one does."""
    for kind in ("classification", "regression", "binary"):
        found, x, _ = mixture(kind)
        one = found.members[0]
        for average in ("probabilities", "log_probabilities")[: 1 if kind == "regression" else 2]:
            twice = LaplaceMixture([one, one]).predictive(x, link_approx="probit", average=average)  # type: ignore[arg-type]
            single = one.predictive(x, link_approx="probit")
            for a, b in zip(
                *((p if isinstance(p, GaussianPredictive) else (p,)) for p in (twice, single)), strict=True
            ):
                torch.testing.assert_close(a, b)


def test_evidence_is_the_mean_of_the_members_and_may_weigh_them() -> None:
    found, _, _ = mixture()
    for result in found.optimize_evidence():
        assert result.converged
    each = torch.tensor([la.log_marginal_likelihood() for la in found.members], dtype=torch.float64)
    assert found.log_marginal_likelihood() == pytest.approx(float(each.logsumexp(0)) - math.log(3))
    weighted = LaplaceMixture(found.members, weights="evidence")
    torch.testing.assert_close(weighted.weights, each.exp() / each.exp().sum())


def test_aligned_members_make_the_same_mixture() -> None:
    """Permuted networks are the same functions with the same approximations: what ``Rebasin`` does changes nothing."""
    x, y = data(4, outputs=3)
    networks = [mlp(seed=s) for s in range(2)]
    graph = tus.discover_symmetries(networks[0], x)
    plain = LaplaceMixture.fit(networks, [(x, y)], **OPTIONS)
    aligned = tus.align(graph, [dict(n.state_dict()) for n in networks])
    moved = [mlp(seed=0), mlp(seed=1)]
    for network, state in zip(moved, aligned.states, strict=True):
        network.load_state_dict(state)
    assert not torch.equal(moved[1].state_dict()["0.weight"], networks[1].state_dict()["0.weight"])
    again = LaplaceMixture.fit(moved, [(x, y)], **OPTIONS)
    for la in (plain, again):
        la.optimize_evidence()
    assert again.log_marginal_likelihood() == pytest.approx(plain.log_marginal_likelihood(), rel=1e-9)
    torch.testing.assert_close(again.predictive(x, link_approx="probit"), plain.predictive(x, link_approx="probit"))


def test_members_are_saved_and_loaded(tmp_path: Path) -> None:
    found, x, _ = mixture()
    found.save(tmp_path / "mixture")
    again = LaplaceMixture.load(tmp_path / "mixture", [la.model for la in found.members])
    assert torch.equal(again.predictive(x), found.predictive(x))
    with pytest.raises(tus.laplace.LaplaceFileError, match="other weights"):
        LaplaceMixture.load(tmp_path / "mixture", [mlp(seed=2), mlp(seed=1)])


def test_what_is_no_mixture() -> None:
    found, x, y = mixture()
    other = tus.LinearizedLaplace(mlp(), tus.likelihoods.Categorical(label_smoothing=0.1), **OPTIONS).fit([(x, y)])
    for make, message in (
        (lambda: LaplaceMixture([]), "at least one"),
        (lambda: LaplaceMixture([*found.members, other]), "several likelihoods"),
        (lambda: LaplaceMixture(found.members, weights=[1, 2]), "have to be 3 numbers"),
        (lambda: LaplaceMixture(found.members, weights="best"), "not known"),  # type: ignore[arg-type]
        (lambda: found.predictive(x, average="votes"), "not known"),  # type: ignore[arg-type]
        (lambda: found.function_samples(x, 0), "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
