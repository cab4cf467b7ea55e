"""Jacobians that are kept in memory, where the network and the data are small enough for that.

The evidence and the posterior of linearized Laplace depend on a network through ``f(x)``, ``J(x)`` and the weights.
With the Jacobians of all data in memory a pass over the data is a matrix product, an order of magnitude faster than
automatic differentiation, and the same in all that follows. There are two ways to use them: :class:`StoredJacobian`
stands in for a network's tangent model where the network itself is still needed (Kronecker factors are its layers'),
and :class:`Tangent` is a module of its own, whose inputs are the Jacobians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


class _Product(torch.autograd.Function):
    """``J v``, linear in ``v``: without the tangent of zeros that forward mode makes for all of ``J``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(jacobian: Tensor, vector: Tensor) -> Tensor:
        return jacobian @ vector

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def jvp(ctx: Any, _: Any, change: Tensor) -> Tensor:
        return ctx.saved_tensors[0] @ change

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor]:
        jacobian = ctx.saved_tensors[0]
        return None, cotangent.flatten() @ jacobian.flatten(0, -2)


class Tangent(nn.Module):
    """``h_theta = f + J (theta - theta~)``, for inputs ``[batch, outputs, size + 1]`` of :func:`features`.

    Its Jacobian is ``J`` at every ``theta``, and it is linearized at the network's weights ``theta~``.

    Args:
        model: the network.
        parameters: names of the parameters that make up ``theta``.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[str]) -> None:
        super().__init__()
        own = dict(model.named_parameters())
        for name in parameters:
            holder: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_parameter(leaf, nn.Parameter(own[name].detach().clone()))
        self.point: Tensor
        self.register_buffer("point", torch.cat([own[name].detach().flatten() for name in parameters]))
        self.parts = tuple(parameters)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[batch, outputs]``."""
        theta = torch.cat([_at(self, name).flatten() for name in self.parts])
        product: Tensor = _Product.apply(x[..., :-1], theta - self.point)
        return x[..., -1] + product


def _at(module: nn.Module, name: str) -> Tensor:
    *path, leaf = name.split(".")
    found: Tensor = getattr(module.get_submodule(".".join(path)), leaf)
    return found


def features(model: nn.Module, parameters: Sequence[str], x: Tensor, chunk: int = 250) -> Tensor:
    """Jacobians and outputs of a network, as :class:`Tangent` takes them.

    Args:
        model: the network.
        parameters: names of the parameters of which the Jacobians are taken.
        x: ``[n, ...]`` inputs.
        chunk: inputs that are differentiated at once.

    Returns:
        ``[n, outputs, size + 1]``: the Jacobian along the last axis, and then the output itself.
    """
    tangent = TangentModel(model, parameters)
    found = [outputs_and_jacobians(tangent, part, chunk) for part in x.split(chunk)]
    return torch.cat([torch.cat([jacobian, outputs.unsqueeze(-1)], dim=-1) for outputs, jacobian in found])
