"""Jacobian products from a Jacobian kept in memory, where the network and the data are small enough for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace.tangent import TangentModel, batch_size, evaluating, rows_of
from tu_symmetry.tables.data import Batches


class StoredJacobian(TangentModel):
    """The tangent model with the Jacobian of every batch of a data set in memory: ``samples x outputs x size``.

    Products with the stored batches are matrix products, an order of magnitude faster than automatic differentiation;
    all others are as in the base class. A batch is known by its place in memory, so it has to come from the same
    tensors again, as :class:`~tu_symmetry.tables.data.Batches` gives them.

    Args:
        tangent: the network and its chosen parameters.
        data: the data set, in the batches of the passes to come.
        chunk: samples differentiated at once.
        shown: called with the number of samples done.
    """

    def __init__(
        self, tangent: TangentModel, data: Batches, chunk: int = 50, shown: Callable[[int], None] = lambda done: None
    ) -> None:
        super().__init__(tangent.model, tangent.names)
        self.data = data
        self._stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        done = 0
        with evaluating(self.model):
            for inputs, _ in data:
                outputs = self.outputs(inputs)
                jacobian = outputs.new_empty(*outputs.shape, self.size)
                for start in range(0, len(inputs), chunk):
                    rows = slice(start, start + chunk)
                    for k, unit in enumerate(torch.eye(outputs.shape[1]).to(outputs)):
                        part = rows_of(inputs, rows)
                        jacobian[rows, k] = self.sample_gradients(part, unit.expand(batch_size(part), -1))
                    shown(done + min(start + chunk, len(inputs)))
                done += len(inputs)
                self._stored[self._key(inputs)] = (outputs, jacobian)

    @staticmethod
    def _key(inputs: Any) -> tuple[int, int]:
        return (inputs.data_ptr(), len(inputs)) if isinstance(inputs, Tensor) else (0, 0)

    def jvp(self, inputs: Any, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, and the Jacobian times a flat vector, both ``[batch, outputs]``."""
        if self._key(inputs) not in self._stored:
            return super().jvp(inputs, vector)
        outputs, jacobian = self._stored[self._key(inputs)]
        return outputs, jacobian @ vector

    def vjp(self, inputs: Any, cotangent: Tensor) -> Tensor:
        """The transposed Jacobian times ``[batch, outputs]``, summed over the batch: a flat vector."""
        if self._key(inputs) not in self._stored:
            return super().vjp(inputs, cotangent)
        jacobian = self._stored[self._key(inputs)][1]
        return cotangent.flatten() @ jacobian.flatten(0, 1)
