"""Jacobians that are kept: the same products as the network's own."""

from __future__ import annotations

import torch
from torch.func import functional_call, jacrev

from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.linearized_laplace import CNN
from tu_symmetry.experiments.linearized_laplace.jacobians import StoredJacobian
from tu_symmetry.experiments.linearized_laplace.networks import matrices
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
