"""Networks with outputs of any shape, flattened; their Jacobian, and the linear observation of their tangent model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.inputs import rows_of
from tu_symmetry.laplace.tangent import TangentModel, evaluating

_ROWS = 56  # of the Jacobian at once


class FlatTangentModel(TangentModel):
    """A tangent model whose outputs are ``[batch, outputs]``, whatever shape the network gives them."""

    def read(self, found: Any, batch: int) -> Tensor:
        """The flattened outputs."""
        several = isinstance(found, Tensor) and found.ndim > 2 and len(found) == batch
        return super().read(found.flatten(1) if several else found, batch)


def jacobian(tangent: TangentModel, inputs: Any) -> Tensor:
    """The whole Jacobian of a batch, ``[batch * outputs, size]``."""
    found = []
    with evaluating(tangent.model):
        outputs = tangent.outputs(inputs)
        eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).unsqueeze(1)
        for sample in range(len(outputs)):
            row = rows_of(inputs, slice(sample, sample + 1))
            with torch.enable_grad():
                pullback = vjp(tangent.function(row), tangent.parameters())[1]
                found += [_gradients(tangent, pullback, units) for units in eye.split(_ROWS)]
    return torch.cat(found)


def _gradients(tangent: TangentModel, pullback: Callable[[Tensor], Any], cotangents: Tensor) -> Tensor:
    """``[count, size]`` for ``[count, batch, outputs]``, at once where the operators can be vectorized."""

    def one(cotangent: Tensor) -> dict[str, Tensor]:
        return pullback(cotangent)[0]

    try:
        found: Mapping[str, Tensor] = vmap(one)(cotangents)
    except RuntimeError:  # an operator without a batching rule
        each = [one(cotangent) for cotangent in cotangents]
        found = {name: torch.stack([g[name] for g in each]) for name in tangent.names}
    return torch.cat([found[name].detach().reshape(len(cotangents), -1) for name in tangent.names], dim=1)


class ObservedTangent:
    """``A J`` of one batch of inputs and its transpose, matrix-free: what the sampling-based evidence works on."""

    def __init__(self, tangent: TangentModel, inputs: Any, observation: LinearObservation | None = None) -> None:
        self.tangent, self.inputs = tangent, inputs
        self.observation = LinearObservation() if observation is None else observation
        with evaluating(tangent.model):
            self._outputs = tangent.outputs(inputs)
        self.base = self._outputs.reshape(-1)
        self.size = tangent.size
        self.values = self.base.numel() if self.observation.matrix is None else len(self.observation.matrix)
        self.observation.check_sizes(self.base.numel(), self.values)

    def forward(self, vectors: Tensor) -> Tensor:
        """``A J v``: ``[count, size] -> [count, values]``."""
        return self.observation.forward(self.unobserved(vectors))

    def unobserved(self, vectors: Tensor) -> Tensor:
        """``J v``: ``[count, size] -> [count, outputs]``."""
        with evaluating(self.tangent.model):
            return self.tangent.jvps(self.inputs, vectors).flatten(1)

    def adjoint(self, values: Tensor) -> Tensor:
        """``J^T A^T u``: ``[count, values] -> [count, size]``."""
        back = self.observation.adjoint(values).view(-1, *self._outputs.shape)
        with evaluating(self.tangent.model), torch.enable_grad():
            pullback = vjp(self.tangent.function(self.inputs), self.tangent.parameters())[1]
            return _gradients(self.tangent, pullback, back)
