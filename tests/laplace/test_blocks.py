"""Products with a posterior's blocks in single precision, where the data determine few of the directions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tu_symmetry.laplace.blocks import KroneckerBlock, decompose, decompose_rows

FEATURES, OUTPUTS, ROWS = 200, 6, 30


def planted() -> tuple[Tensor, Tensor]:
    """Rows that go into a layer, and the gradients of many samples, none of which moves all outputs alike."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, ROWS, FEATURES, generator=generator, dtype=torch.float64)
    gradients = 200 * torch.randn(1, 100, OUTPUTS, generator=generator, dtype=torch.float64)
    return rows, gradients - gradients.mean(-1, keepdim=True)


def block(dtype: torch.dtype) -> KroneckerBlock:
    rows, gradients = planted()
    inputs = decompose_rows(rows.to(dtype))
    outputs = decompose((gradients.mT @ gradients).to(dtype))
    return KroneckerBlock("w", 0, torch.tensor(0), inputs[1], inputs[0], outputs[1], outputs[0])


@pytest.mark.parametrize("precision", [1e2, 1.0, 0.1])
def test_small_variances_are_not_lost_beside_those_of_the_prior(precision: float) -> None:
    """Eigenvalues of 1e9 or 1e6 and the prior's variance, a million times as large and more: by ``v^T Sigma v``.

    For ``v`` in the span of the data it is the variance that the data leave. A rounding error of ``v``, times the
    prior's variance, was larger than that, and could make the square negative: a gradient norm of zero, convergence.
    """
    rows, _ = planted()
    weights = torch.randn(OUTPUTS, ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = (weights - weights.mean(0)) @ rows[0]
    vector = weights.flatten()
    log_precision = torch.tensor([math.log(precision)], dtype=torch.float64)
    exact = float(vector @ block(torch.float64).apply(vector, -1.0, log_precision, 1.0))
    own = block(torch.float32)
    outputs, inputs = own.determined()
    assert (outputs.stop - outputs.start, inputs.stop - inputs.start) == (OUTPUTS - 1, ROWS)
    found = float(vector @ own.apply(vector.float(), -1.0, log_precision, 1.0).double())
    assert found == pytest.approx(exact, rel=0.02)
