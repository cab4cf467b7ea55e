"""Mixtures of Laplace approximations: moments by their definition, and no change by symmetries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laplace_oracles import data, dense_covariance, jacobian, mlp
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.laplace.mixture import LaplaceMixture

OPTIONS: dict[str, Any] = {"prior": "single", "evaluate_at": "map"}


def members(networks: list[nn.Module], x: Tensor, y: Tensor, kind: Any = "classification") -> list[Any]:
    return [tus.LinearizedLaplace(network, kind, **OPTIONS).fit([(x, y)]) for network in networks]


def mixture(kind: Any = "classification") -> tuple[LaplaceMixture, Tensor, Tensor]:
    x, y = data(4, outputs=3, kind="regression" if kind == "regression" else "classification")
    if kind == "binary":
        y = torch.stack([y == c for c in range(3)], -1)
    return LaplaceMixture(members([mlp(seed=s) for s in range(3)], x, y, kind)), x, y


def test_moments_of_a_regression_by_their_definition() -> None:
    found, x, _ = mixture("regression")
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
    torch.testing.assert_close(predictive.variance, epistemic + 1.0, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_probabilities_are_averaged(kind: str) -> None:
    found, x, _ = mixture(kind)
    parts = [la.predictive(x, link_approx="probit") for la in found.members]
    torch.testing.assert_close(found.predictive(x, link_approx="probit"), sum(parts) / 3)


def test_aligned_members_make_the_same_mixture() -> None:
    """Permuted networks are the same functions with the same approximations: what ``Rebasin`` does changes nothing."""
    x, y = data(4, outputs=3)
    networks = [mlp(seed=s) for s in range(2)]
    graph = tus.discover_symmetries(networks[0], x)
    plain = LaplaceMixture(members(networks, x, y))
    aligned = tus.align(graph, [dict(n.state_dict()) for n in networks])
    moved = [mlp(seed=0), mlp(seed=1)]
    for network, state in zip(moved, aligned.states, strict=True):
        network.load_state_dict(state)
    assert not torch.equal(moved[1].state_dict()["0.weight"], networks[1].state_dict()["0.weight"])
    again = LaplaceMixture(members(moved, x, y))
    for one, other in zip(plain.members, again.members, strict=True):
        results = [la.optimize_evidence().log_marginal_likelihood for la in (one, other)]
        assert results[0] == pytest.approx(results[1], rel=1e-9)
    torch.testing.assert_close(again.predictive(x, link_approx="probit"), plain.predictive(x, link_approx="probit"))


def test_what_is_no_mixture() -> None:
    found, x, y = mixture()
    other = tus.LinearizedLaplace(mlp(), tus.likelihoods.Categorical(label_smoothing=0.1), **OPTIONS).fit([(x, y)])
    for wrong in ([], [*found.members, other]):
        with pytest.raises(ValueError, match="one likelihood"):
            LaplaceMixture(wrong)
