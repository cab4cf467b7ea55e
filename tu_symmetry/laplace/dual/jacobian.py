"""Networks with outputs of any shape, flattened; their Jacobian, and the linear observation of their tangent model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from tu_symmetry.laplace.dual.observation import LinearObservation
from tu_symmetry.laplace.inputs import rows_of
from tu_symmetry.laplace.tangent import TangentModel, evaluating


class FlatTangentModel(TangentModel):
    """A tangent model whose outputs are ``[batch, outputs]``, whatever shape the network gives them."""

    def read(self, found: Any, batch: int) -> Tensor:
        """The flattened outputs."""
        several = isinstance(found, Tensor) and found.ndim > 2 and len(found) == batch
        return super().read(found.flatten(1) if several else found, batch)


def jacobian(tangent: TangentModel, inputs: Any, *, chunk: int = 56) -> dict[str, Tensor]:
    """The whole Jacobian of a batch, parameter to ``[batch * outputs, *shape]``."""
    with evaluating(tangent.model):
        outputs = tangent.outputs(inputs)
        count, width = outputs.shape
        flat = outputs.new_empty(count * width, tangent.size)
        eye = torch.eye(width, dtype=outputs.dtype, device=outputs.device)
        for sample in range(count):
            row = rows_of(inputs, slice(sample, sample + 1))
            with torch.enable_grad():
                pullback = vjp(tangent.function(row), tangent.parameters())[1]
                for start in range(0, width, chunk):
                    rows = _gradients(tangent, pullback, eye[start : start + chunk].unsqueeze(1))
                    flat[sample * width + start : sample * width + start + len(rows)] = rows
    return {name: flat[:, s.start : s.stop].unflatten(1, s.shape) if s.shape else flat[:, s.start]
            for name, s in tangent.slots.items()}  # fmt: skip


def _gradients(tangent: TangentModel, pullback: Callable[[Tensor], Any], cotangents: Tensor) -> Tensor:
    """``[count, size]`` for cotangents ``[count, 1, outputs]``, at once where the operators can be vectorized."""

    def one(cotangent: Tensor) -> dict[str, Tensor]:
        return pullback(cotangent)[0]

    try:
        found: Mapping[str, Tensor] = vmap(one)(cotangents)
    except RuntimeError:  # an operator without a batching rule
        each = [one(cotangent) for cotangent in cotangents]
        found = {name: torch.stack([g[name] for g in each]) for name in tangent.names}
    return torch.cat([found[name].detach().reshape(len(cotangents), -1) for name in tangent.names], dim=1)


class ObservedTangent:
    """``A J`` and its transpose for all inputs, matrix-free: what the sampling-based evidence works on.

    Outputs are those of all batches of inputs, one after the other.
    """

    def __init__(
        self, tangent: TangentModel, batches: Sequence[Any], observation: LinearObservation | None = None
    ) -> None:
        self.tangent, self.batches = tangent, list(batches)
        self.observation = LinearObservation() if observation is None else observation
        with evaluating(tangent.model):
            found = [tangent.outputs(inputs) for inputs in self.batches]
        self._shapes = [tuple(f.shape) for f in found]
        self.base = torch.cat([f.reshape(-1) for f in found])
        self.outputs, self.size = self.base.numel(), tangent.size
        self.values = self.outputs if self.observation.matrix is None else len(self.observation.matrix)
        self.observation.check_sizes(self.outputs, self.values)

    def forward(self, vectors: Tensor) -> Tensor:
        """``A J v``: ``[count, size] -> [count, values]``."""
        return self.observation.forward(self.unobserved(vectors))

    def unobserved(self, vectors: Tensor) -> Tensor:
        """``J v``: ``[count, size] -> [count, outputs]``."""
        with evaluating(self.tangent.model):
            return torch.cat([self.tangent.jvps(inputs, vectors).flatten(1) for inputs in self.batches], dim=1)

    def adjoint(self, values: Tensor) -> Tensor:
        """``J^T A^T u``: ``[count, values] -> [count, size]``."""
        back = self.observation.adjoint(values)
        lengths = [shape[0] * shape[1] for shape in self._shapes]
        found = back.new_zeros(len(back), self.size)
        with evaluating(self.tangent.model):
            for inputs, own, shape in zip(self.batches, back.split(lengths, dim=1), self._shapes, strict=True):
                with torch.enable_grad():
                    pullback = vjp(self.tangent.function(inputs), self.tangent.parameters())[1]
                    found += _gradients(self.tangent, pullback, own.unflatten(1, shape))
        return found
