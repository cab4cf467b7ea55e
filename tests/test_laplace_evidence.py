"""The evidence and the predictive against closed forms, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tu_symmetry.laplace.model import LinearizedLaplace


def linear_problem() -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(4, 1, generator=generator, dtype=torch.float64)
    y = y + 0.1 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    return nn.Linear(4, 1, bias=False).double(), x, y


@pytest.mark.parametrize("curvature", ["full", "kfac"])
def test_evidence_is_that_of_bayesian_linear_regression(curvature: str) -> None:
    """log N(y | 0, sigma^2 I + X X^T / lambda), at whatever precision and noise the optimization chose."""
    model, x, y = linear_problem()
    la = LinearizedLaplace(model, "regression", prior="single", curvature=curvature)  # type: ignore[arg-type]
    la.fit([(x[:10], y[:10]), (x[10:], y[10:])])
    found = la.optimize_evidence()
    (group,) = la.report()
    noise = float(la.predictive(x[:1]).variance - la.predictive(x[:1]).epistemic)
    covariance = noise * torch.eye(30, dtype=torch.float64) + x @ x.T / group.precision
    exact = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=torch.float64), covariance).log_prob(y[:, 0])
    assert found.log_marginal_likelihood == pytest.approx(float(exact), rel=1e-6)


def test_batches_and_their_order_do_not_matter() -> None:
    model, x, y = linear_problem()
    values = []
    for loader in ([(x, y)], [(x[20:], y[20:]), (x[:20], y[:20])]):
        la = LinearizedLaplace(model, "regression", prior="single", curvature="kfac")
        la.fit(loader)
        values.append(la.log_marginal_likelihood())
    assert values[0] == pytest.approx(values[1], rel=1e-12)
