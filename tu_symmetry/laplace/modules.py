"""Parameters that a module of any other kind owns: their exact gradients, by running the module again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from tu_symmetry.laplace.layers import Layer, Part, UnsupportedLayerError


class ModuleLayer(Layer):
    """One parameter of a module that is neither linear nor a convolution, normalization, attention or embedding.

    The module may contain others (a class token of a transformer belongs to the whole network). Gradients of single
    samples come from running it on single samples, from its recorded input to its recorded output gradient.

    Attributes:
        path: name of the module.
        module: the module.
        leaf: name of the parameter in it.
    """

    deferred = True

    def __init__(self, path: str, module: nn.Module, leaf: str, weight: Part) -> None:
        super().__init__(f"{path}:{leaf}", weight, None)
        self.path, self.module, self.leaf = path, module, leaf
        self._vectorized = True

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Only modules from one tensor to one tensor can be run again sample by sample.

        Raises:
            UnsupportedLayerError: another kind of call.
        """
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            raise UnsupportedLayerError(
                f"{self.path or 'the model itself'} ({type(self.module).__name__}) is not a module from one tensor to "
                f"one tensor, which its parameter {self.leaf!r} needs for Kronecker-factored curvature. Freeze it, "
                "leave it out with parameters=[...], or use curvature='diag' (any layer) or 'full' (small networks)"
            )

    def rows(self, inputs: Tensor) -> Tensor:
        """The module's input."""
        return inputs

    def weight_gradient(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """One vector-Jacobian product for each sample."""
        fixed = {name: p.detach() for name, p in self.module.named_parameters()}
        own = fixed.pop(self.leaf)

        def one(row: Tensor, direction: Tensor) -> Tensor:
            def outputs(parameter: Tensor) -> Tensor:
                return functional_call(self.module, {**fixed, self.leaf: parameter}, (row.unsqueeze(0),))

            return vjp(outputs, own)[1](direction.unsqueeze(0))[0].reshape(-1)

        with torch.enable_grad():
            if self._vectorized:
                try:
                    return vmap(one)(rows, gradient).detach()
                except RuntimeError:  # an operator that cannot be vectorized; other errors come again below
                    self._vectorized = False
            return torch.stack([one(*pair) for pair in zip(rows, gradient, strict=True)]).detach()

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Every parameter is a weight here."""
        raise NotImplementedError
