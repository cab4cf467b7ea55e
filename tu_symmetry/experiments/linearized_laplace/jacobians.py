"""Jacobians that are kept in memory, where the network and the data are small enough for that.

The evidence of linearized Laplace depends on a network through ``f(x)``, ``J(x)`` and the weights. With the Jacobians
of all data in memory a pass over the data is a matrix product, and the same in all that follows.
:class:`StoredJacobian` stands in for a network's tangent model where the network itself is still needed (Kronecker
factors are its layers').
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tu_symmetry.laplace.tangent import Linearization, TangentModel, evaluating, jacobians


def outputs_and_jacobians(
    tangent: TangentModel, x: Tensor, chunk: int, shown: Callable[[int], None] = lambda done: None
) -> tuple[Tensor, Tensor]:
    """Outputs and Jacobians of a network in evaluation mode.

    Args:
        tangent: the network and its chosen parameters.
        x: ``[n, ...]`` inputs.
        chunk: inputs that are differentiated at once.
        shown: called with the number of inputs done.

    Returns:
        ``[n, outputs]``, and ``[n, outputs, size]``.
    """
    with evaluating(tangent.model):
        outputs = tangent.outputs(x)
        found = outputs.new_empty(*outputs.shape, tangent.size)
        for start in range(0, len(x), chunk):
            part = x[start : start + chunk]
            found[start : start + chunk] = jacobians(tangent, part, outputs.shape[1:])
            shown(start + len(part))
    return outputs, found


class StoredJacobian(TangentModel):
    """The tangent model with the Jacobian of every batch of a data set in memory: ``samples x outputs x size``.

    Products with the stored batches are matrix products, an order of magnitude faster than automatic differentiation;
    all others are as in the base class. A batch is known by its place in memory, so it has to come from the same
    tensors again: batches that are slices of tensors in memory, or a list of batches.

    Args:
        tangent: the network and its chosen parameters.
        data: the data set ``(inputs, targets)``, in the batches of the passes to come.
        chunk: samples differentiated at once.
        shown: called with the number of samples done.
    """

    def __init__(
        self,
        tangent: TangentModel,
        data: Iterable[Any],
        chunk: int = 50,
        shown: Callable[[int], None] = lambda done: None,
    ) -> None:
        super().__init__(tangent.model, tangent.names, class_axis=tangent.class_axis)
        self._stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._kept: list[Tensor] = []  # while they live, nothing else has their places in memory
        done = 0
        for inputs, _ in data:

            def of_all(count: int, before: int = done) -> None:
                shown(before + count)

            self._stored[self._key(inputs)] = outputs_and_jacobians(self, inputs, chunk, of_all)
            self._kept.append(inputs)
            done += len(inputs)

    joins = False  # a joined batch would have another place in memory

    def linearize(self, inputs: Any) -> Linearization:
        """The stored Jacobian."""
        outputs, _ = self.jvp(inputs, self.point())
        return Linearization(
            outputs, lambda vector: self.jvp(inputs, vector)[1], lambda cotangent: self.vjp(inputs, cotangent)
        )

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
