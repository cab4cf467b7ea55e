"""The tangent model of a small network as a module of its own, which holds Jacobians instead of running the network.

The evidence and the posterior of linearized Laplace depend on a network through ``f(x)``, ``J(x)`` and the weights.
Where the Jacobians of all data fit in memory, a pass over the data is a matrix product, faster than through a
small convolutional network, and the same in all that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.tangent import TangentModel


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
    """Jacobians and outputs of a network in evaluation mode.

    Args:
        model: the network.
        parameters: names of the parameters of which the Jacobians are taken.
        x: ``[n, ...]`` inputs.
        chunk: inputs that are worked on at once.

    Returns:
        ``[n, outputs, size + 1]``: the Jacobian along the last axis, and then the output itself.
    """
    tangent = TangentModel(model, parameters)
    pieces = []
    for part in x.split(chunk):
        outputs = tangent.outputs(part)
        axes = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        rows = [tangent.sample_gradients(part, axis.expand_as(outputs)) for axis in axes]
        pieces.append(torch.cat([torch.stack(rows, dim=1), outputs.unsqueeze(-1)], dim=-1))
    return torch.cat(pieces)
