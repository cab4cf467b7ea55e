"""Networks with outputs of any shape, flattened; their Jacobian, and the linear observation of their tangent model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from tu_symmetry.laplace.inputs import rows_of
from tu_symmetry.laplace.tangent import TangentModel, evaluating
from tu_symmetry.processes import shared
from tu_symmetry.sparse import transposed_rows

_ROWS = 56  # of the Jacobian at once
_OUTPUTS = 1 << 21  # of all vectors that are multiplied with the Jacobian at once


class FlatTangentModel(TangentModel):
    """A tangent model whose outputs are ``[batch, outputs]``, whatever shape the network gives them."""

    def read(self, found: Any, batch: int) -> Tensor:
        """The flattened outputs."""
        several = isinstance(found, Tensor) and found.ndim > 2 and len(found) == batch
        return super().read(found.flatten(1) if several else found, batch)


def jacobian(tangent: TangentModel, inputs: Any) -> Tensor:
    """The whole Jacobian of a batch, ``[batch * outputs, size]``; processes share its rows."""
    with evaluating(tangent.model):
        outputs = tangent.outputs(inputs)
        units = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).unsqueeze(1).split(_ROWS)

        @lru_cache(maxsize=1)  # all units of a sample after each other
        def pullback(sample: int) -> Callable[[Tensor], Any]:
            row = rows_of(inputs, slice(sample, sample + 1))
            found: Callable[[Tensor], Any] = vjp(tangent.function(row), tangent.parameters())[1]
            return found

        def rows(k: int) -> Tensor:
            with torch.enable_grad():
                return _gradients(tangent, pullback(k // len(units)), units[k % len(units)])

        return torch.cat(shared(len(outputs) * len(units), rows))


def _gradients(tangent: TangentModel, pullback: Callable[[Tensor], Any], cotangents: Tensor) -> Tensor:
    """``[count, size]`` for ``[count, batch, outputs]``."""
    found: Mapping[str, Tensor] = vmap(lambda cotangent: pullback(cotangent)[0])(cotangents)
    return torch.cat([found[name].detach().reshape(len(cotangents), -1) for name in tangent.names], dim=1)


def require_observation(matrix: Tensor | None, outputs: Tensor) -> Tensor:
    """``A`` ``[values, outputs]`` in the place and dtype of the outputs ``[outputs]``; the identity for None.

    It may be in compressed rows (``sparse_csr``).
    """
    if matrix is None:
        return torch.eye(len(outputs), device="cpu").to(outputs)
    shape, entries = tuple(matrix.shape), matrix.values() if matrix.layout == torch.sparse_csr else matrix
    if not matrix.is_floating_point() or matrix.ndim != 2 or shape[1] != len(outputs) or not entries.isfinite().all():
        raise ValueError(
            f"the observation has to be a matrix of finite real numbers [values, {len(outputs)} outputs], got "
            f"{matrix.dtype} of shape {shape}: an operator of another image size, or one that has to be transposed?"
        )
    return matrix.detach().to(outputs)


def require_measurements(measurements: Tensor, matrix: Tensor) -> Tensor:
    """``y``, in the place and dtype of ``A``: one finite real number for each of its rows."""
    if not measurements.is_floating_point() or measurements.numel() != len(matrix):
        raise ValueError(f"{len(matrix)} measurements have to be real numbers, got {tuple(measurements.shape)}")
    if wrong := int((~torch.isfinite(measurements)).sum()):
        raise ValueError(
            f"{wrong} of {len(matrix)} measurements are NaN or infinite; leave dead detector bins out of the "
            "measurements and their rows out of the observation"
        )
    return measurements.detach().reshape(-1).to(matrix)


class ObservedTangent:
    """``A J`` of one batch of inputs and its transpose, matrix-free: what the sampling-based evidence works on.

    Vectors are multiplied with the Jacobian some at a time, as many as have two million outputs together.
    """

    def __init__(self, tangent: TangentModel, inputs: Any, matrix: Tensor | None = None) -> None:
        self.tangent, self.inputs, self.size = tangent, inputs, tangent.size
        with evaluating(tangent.model):
            self._outputs = tangent.outputs(inputs)
        self.base = self._outputs.reshape(-1)
        self.matrix = require_observation(matrix, self.base)
        self._transpose = transposed_rows(self.matrix)
        self.at_once = max(1, _OUTPUTS // len(self.base))

    def forward(self, vectors: Tensor) -> Tensor:
        """``A J v``: ``[count, size] -> [count, values]``."""
        return (self.matrix @ self.unobserved(vectors).mT).mT

    def unobserved(self, vectors: Tensor) -> Tensor:
        """``J v``: ``[count, size] -> [count, outputs]``."""
        with evaluating(self.tangent.model):
            found = [self.tangent.jvps(self.inputs, part).flatten(1) for part in vectors.split(self.at_once)]
        return torch.cat(found)

    def adjoint(self, values: Tensor) -> Tensor:
        """``J^T A^T u``: ``[count, values] -> [count, size]``."""
        back = (self._transpose @ values.mT).mT.reshape(-1, *self._outputs.shape)
        with evaluating(self.tangent.model), torch.enable_grad():
            pullback = vjp(self.tangent.function(self.inputs), self.tangent.parameters())[1]
            return torch.cat([_gradients(self.tangent, pullback, part) for part in back.split(self.at_once)])
