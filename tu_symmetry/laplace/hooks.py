"""The layers of a network, and the hooks that watch them: what goes in, and gradients of what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import ParametrizationList

from tu_symmetry.laplace.attention import AttentionProjection, attention_forward, attention_projections
from tu_symmetry.laplace.inputs import arguments
from tu_symmetry.laplace.layers import Layer, Part, UnsupportedLayerError, layer_of, runs_forward_of
from tu_symmetry.laplace.likelihood import Directions

_INSTEAD = "leave it out with parameters=[...], or use curvature='diag' or 'full'"


class Watch:
    """One forward pass with its inputs and, for each backward pass, its output gradients, layer by layer."""

    def __init__(self, on_input: Callable[[Layer, Tensor], None], *, once: bool = True) -> None:
        """With ``once``, a layer that is called again is refused; its later calls are left out of account, else."""
        self.on_input, self.once = on_input, once
        self.on_gradient: Callable[[Layer, Tensor], None] | None = None
        self.running = False  # only the forward pass itself is watched, and no module that is run again later
        self.leaves: list[Tensor] = []
        self.seen: set[str] = set()
        self.repeated: set[str] = set()
        self.batch = -1
        self.outputs = 0

    def __call__(self, layer: Layer, inputs: Tensor, output: Tensor) -> Tensor:
        """Note one layer's input, and put a gradient hook on its output."""
        if not self.running:
            return output
        if layer.name in self.seen and not self.once:
            self.repeated.add(layer.name)
            return output
        if layer.name in self.seen:
            raise UnsupportedLayerError(
                f"the module {layer.path!r} is used several times in this forward pass, and was not in the first: its "
                f"Kronecker factors do not hold. Freeze it, {_INSTEAD}"
            )
        self.seen.add(layer.name)
        if output.ndim < 1 or len(output) != self.batch or len(inputs) != self.batch:
            raise UnsupportedLayerError(
                f"the module {layer.path!r} sees an input of shape {tuple(inputs.shape)} in a batch of {self.batch} "
                f"samples: the first axis has to be the batch. Build the model batch-first, {_INSTEAD}"
            )
        self.on_input(layer, inputs.detach())
        self.outputs += output.numel()
        if not output.requires_grad:
            leaf = output.detach().requires_grad_()
            leaf.register_hook(partial(self._note, layer))
            self.leaves.append(leaf)
            return leaf.clone()  # a layer that works in place must not meet a leaf
        output.register_hook(partial(self._note, layer))
        return output

    def _note(self, layer: Layer, gradient: Tensor) -> None:
        if self.on_gradient is not None:
            self.on_gradient(layer, gradient.detach())

    def backward(
        self, outputs: Tensor, root: Directions | Sequence[Tensor], on_gradient: Callable[[int, Layer, Tensor], None]
    ) -> None:
        """One backward pass for each column of ``root``, all in the shape of the outputs, without weight gradients."""
        for column, direction in enumerate(root if self.leaves else ()):
            self.on_gradient = partial(on_gradient, column)
            torch.autograd.grad(outputs, self.leaves, direction, retain_graph=column + 1 < len(root), allow_unused=True)
        self.on_gradient = None


@contextmanager
def watching(model: nn.Module, layers: Sequence[Layer], watch: Watch) -> Iterator[Callable[[Any, int], Tensor]]:
    """Hooks on the layers of a model in evaluation mode; yields the forward pass (inputs, batch size) -> outputs."""
    modules = dict(model.named_modules())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    handles, patched = [], []

    def forward(inputs: Any, batch: int) -> Tensor:
        watch.batch = batch
        watch.leaves.clear()
        watch.seen.clear()
        watch.running = True
        try:
            with torch.enable_grad():
                args, kwargs = arguments(inputs)
                outputs = functional_call(model, weights, args, kwargs)
        finally:
            watch.running = False
        silent = [layer.path for layer in layers if layer.name not in watch.seen]
        if silent:
            raise UnsupportedLayerError(
                f"the forward pass never calls the modules {silent[:6]}: their weights are unused, or read without "
                "calling the module. Freeze them, leave them out with parameters=[...], or use curvature='diag'"
            )
        return outputs

    def hook(layer: Layer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if not watch.running:
            return output
        if not args:
            raise UnsupportedLayerError(
                f"the module {layer.path!r} is called with its input as a keyword ({', '.join(kwargs)}=...), where "
                f"hooks do not look; pass it by position, {_INSTEAD}"
            )
        return watch(layer, args[0], output)

    try:
        attentions: dict[str, list[AttentionProjection]] = {}
        for layer in layers:
            if isinstance(layer, AttentionProjection):
                attentions.setdefault(layer.path, []).append(layer)
            else:
                handles.append(modules[layer.path].register_forward_hook(partial(hook, layer), with_kwargs=True))
        for name, projections in attentions.items():
            module = modules[name]
            assert isinstance(module, nn.MultiheadAttention)
            module.forward = partial(attention_forward, module, projections, watch)  # type: ignore[method-assign]
            patched.append(module)
        yield forward
    finally:
        for handle in handles:
            handle.remove()
        for module in patched:
            del module.forward


def find_layers(model: nn.Module, names: Sequence[str]) -> list[Layer]:
    """The layers that have the given parameters, apart from tied ones and those that a parametrization makes.

    Raises:
        UnsupportedLayerError: modules without gradients of single samples, by name.
    """
    every = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    uses = Counter(number for _, number in every)
    chosen = set(names) - {name for name, number in every if uses[number] > 1}
    layers: list[Layer] = []
    refused: list[str] = []
    inside: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue
        prefix, called = f"{path}." if path else "", path or "the model itself"
        if isinstance(module, nn.MultiheadAttention):
            names_here = {n for n in chosen if n.startswith(prefix)}
            if names_here and not runs_forward_of(module, nn.MultiheadAttention):
                refused.append(f"{called} ({type(module).__name__} with a forward of its own)")
            elif names_here:
                layers.extend(attention_projections(path, module, chosen))
            inside |= names_here
            continue
        own = {leaf: p for leaf, p in module.named_parameters(recurse=False) if prefix + leaf in chosen - inside}
        if not own:
            continue
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
            refused.append(f"{called} (Embedding with max_norm or scale_grad_by_freq)")
            continue
        known = layer_of(path, module, {leaf: Part(prefix + leaf, tuple(p.shape)) for leaf, p in own.items()})
        layers.extend([known] if known else [])
    if refused:
        raise UnsupportedLayerError(
            f"no exact gradients for the parameters of {'; '.join(refused[:6])}. Freeze them, leave them out with "
            "parameters=[...], or use curvature='diag' (any layer) or 'full' (small networks)"
        )
    return layers
