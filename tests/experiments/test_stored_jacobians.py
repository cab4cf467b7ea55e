"""Jacobians that are kept: the same products, evidence and predictive as the network's own."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, jacrev

from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.linearized_laplace import CNN, Transformer
from tu_symmetry.experiments.linearized_laplace.jacobians import StoredJacobian, Tangent, features
from tu_symmetry.experiments.linearized_laplace.networks import matrices
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.tangent import TangentModel


def test_a_stored_jacobian_gives_the_same_products() -> None:
    torch.manual_seed(0)
    model = CNN(3, width=2).double().eval()
    x = torch.randn(7, 1, 12, 12, dtype=torch.float64)
    data = Batches(x, torch.arange(7) % 3, 4)
    plain = TangentModel(model, matrices(model))
    seen: list[int] = []
    stored = StoredJacobian(plain, data, chunk=3, shown=seen.append)
    assert seen == [3, 4, 7]
    weights = plain.parameters()
    full = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(model, {**full, **w}, (x,)))(weights)
    expected = torch.cat([jacobian[name].flatten(2) for name in plain.names], dim=2)
    vector = torch.randn(plain.size, dtype=torch.float64)
    cotangent = torch.randn(7, 3, dtype=torch.float64)
    outputs = model(x).detach()
    for inputs, rows in ((x[:4], slice(0, 4)), (x[4:], slice(4, 7)), (x[1:6], slice(1, 6))):  # the last is not stored
        found, product = stored.jvp(inputs, vector)
        torch.testing.assert_close(found, outputs[rows])
        torch.testing.assert_close(product, expected[rows] @ vector)
        torch.testing.assert_close(
            stored.vjp(inputs, cotangent[rows]), torch.einsum("bc,bcp->p", cotangent[rows], expected[rows])
        )


@pytest.mark.parametrize("name", ["CNN", "T-Former"])
def test_the_tangent_of_a_network_has_its_evidence_and_predictive(name: str) -> None:
    torch.manual_seed(0)
    small = CNN(3, width=2) if name == "CNN" else Transformer(3, width=2, depth=1, heads=2, patch=4, size=8)
    model = small.double().eval()
    x, y = torch.rand(30, 1, 8, 8, dtype=torch.float64), torch.arange(30) % 3
    names = matrices(model)
    rows = features(model, names, x, chunk=7)
    tangent = Tangent(model, names)
    torch.testing.assert_close(tangent(rows), model(x))
    found = []
    for module, inputs in ((model, x), (tangent, rows)):
        la = LinearizedLaplace(module, prior="single", evaluate_at="tangent_mode", curvature="full", parameters=names)
        result = la.fit([(inputs, y)]).optimize_evidence(tolerance=1e-4, mode_tolerance=1e-4)
        found.append((result.log_marginal_likelihood, la.log_precision, la.theta, la.predictive(inputs)))
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-5, atol=1e-7)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-8)
