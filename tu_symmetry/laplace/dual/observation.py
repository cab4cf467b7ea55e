"""Linear observations of a network's output, ``y ~ N(A f, v I)``: a tomograph's line integrals, a blurred image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LinearObservation:
    """A linear map ``A`` from the outputs of a network to what is measured.

    Args:
        matrix: ``[values, outputs]``; None where the outputs are measured themselves.

    Example:
        >>> A = LinearObservation(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]))
        >>> A.forward(torch.tensor([1.0, 2.0, 3.0])), A.adjoint(torch.tensor([1.0, 0.0]))
        (tensor([3., 5.]), tensor([1., 1., 0.]))
    """

    def __init__(self, matrix: Tensor | None = None) -> None:
        if matrix is not None:
            if not isinstance(matrix, Tensor) or not matrix.is_floating_point() or matrix.ndim != 2:
                raise ValueError("the observation's matrix has to be a tensor of real numbers [values, outputs]")
            if not matrix.numel() or not torch.isfinite(matrix).all():
                raise ValueError("the observation's matrix is empty, or holds NaN or infinite entries")
        self.matrix = None if matrix is None else matrix.detach()

    def check_sizes(self, outputs: int, values: int) -> None:
        """Refuse outputs or measurements of another length."""
        expected = (outputs, outputs) if self.matrix is None else tuple(self.matrix.shape)
        if outputs != expected[1]:
            raise ValueError(
                f"the observation takes {expected[1]} outputs, the network gives {outputs}; the operator belongs to "
                "another image size, or its matrix has to be transposed to [values, outputs]"
            )
        if values != expected[0]:
            raise ValueError(f"the observation gives {expected[0]} values, but there are {values} measurements")

    def forward(self, outputs: Tensor) -> Tensor:
        """``A f``: ``[..., outputs] -> [..., values]``."""
        return outputs if self.matrix is None else outputs @ self.matrix.to(outputs).mT

    def adjoint(self, values: Tensor) -> Tensor:
        """``A^T u``: ``[..., values] -> [..., outputs]``."""
        return values if self.matrix is None else values @ self.matrix.to(values)

    def reduced(self) -> tuple[Tensor | None, Tensor | None]:
        """``A = Q R``, float64 on the CPU, with at most as many rows of ``R`` as outputs; None stands for the identity.

        ``Q`` has orthonormal columns. What is orthogonal to the range of ``A`` has variance ``v`` in ``A F A^T + v I``.
        """
        if self.matrix is None:
            return None, None
        matrix = self.matrix.double().cpu()
        return torch.linalg.qr(matrix) if len(matrix) > matrix.shape[1] else (None, matrix)


def require_measurements(values: Any) -> Tensor:
    """Measurements that are finite real numbers, in one vector."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise TypeError("measurements have to be a tensor of real numbers")
    wrong = int((~torch.isfinite(values)).sum())
    if wrong:
        raise ValueError(
            f"{wrong} of {values.numel()} measurements are NaN or infinite; leave dead detector bins out of the "
            "measurements and their rows out of the observation"
        )
    return values.detach().reshape(-1)
