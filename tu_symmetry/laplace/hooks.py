"""The layers of a network, and the hooks that watch them: what goes in, and gradients of what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """A network whose layers are watched, see :func:`watching`."""

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], on_input: Callable[[Layer, Tensor], None], once: bool
    ) -> None:
        self.model, self.layers, self.on_input, self.once = model, layers, on_input, once
        self.weights = {name: p.detach() for name, p in model.named_parameters()}
        self.on_gradient: Callable[[Layer, Tensor], None] | None = None
        self.running = False  # only the forward pass itself is watched, and no module that is run again later
        self.leaves: list[Tensor] = []
        self.seen: set[str] = set()
        self.repeated: set[str] = set()  # layers that were called again, or on what all samples share
        self.lengths: dict[str, tuple[int, torch.Size]] = {}  # batch and shape of the first input of each layer
        self.batch = -1
        self.outputs = 0  # entries of all layers' outputs in the last pass

    def forward(self, inputs: Any, batch: int) -> Tensor:
        """The network's outputs for ``batch`` samples, with what :meth:`backward` needs."""
        self.batch, self.outputs, self.running = batch, 0, True
        self.leaves.clear()
        self.seen.clear()
        try:
            with torch.enable_grad():
                args, kwargs = arguments(inputs)
                outputs = functional_call(self.model, self.weights, args, kwargs)
        finally:
            self.running = False
        silent = [layer.path for layer in self.layers if layer.name not in self.seen]
        if silent:
            raise UnsupportedLayerError(
                f"the forward pass never calls the modules {silent[:6]}: their weights are unused, or read without "
                f"calling the module. Freeze them, {_INSTEAD}"
            )
        return outputs

    def backward(
        self, outputs: Tensor, root: Directions | Sequence[Tensor], on_gradient: Callable[[int, Layer, Tensor], None]
    ) -> None:
        """One backward pass for each column of ``root``, all in the shape of the outputs, without weight gradients."""
        for column, direction in enumerate(root if self.leaves else ()):
            self.on_gradient = partial(on_gradient, column)
            torch.autograd.grad(outputs, self.leaves, direction, retain_graph=column + 1 < len(root), allow_unused=True)
        self.on_gradient = None

    def hook(self, layer: Layer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        """A forward hook with keyword arguments."""
        if not self.running:
            return output
        if not args:
            raise UnsupportedLayerError(
                f"the module {layer.path!r} is called with its input as a keyword ({', '.join(kwargs)}=...), where "
                f"hooks do not look; pass it by position, {_INSTEAD}"
            )
        return self(layer, args[0], output)

    def __call__(self, layer: Layer, inputs: Tensor, output: Tensor) -> Tensor:
        """Note one layer's input, and put a gradient hook on its output."""
        if not self.running:
            return output
        if layer.name in self.seen:
            self.repeated.add(layer.name)
            if self.once:
                raise UnsupportedLayerError(
                    f"the module {layer.path!r} is used several times in this forward pass, and was not in the first: "
                    f"its Kronecker factors do not hold. Freeze it, {_INSTEAD}"
                )
            return output
        self.seen.add(layer.name)
        batch, shape = self.lengths.setdefault(layer.name, (self.batch, inputs.shape))
        if batch != self.batch and shape == inputs.shape and not self.once:  # numbers of positions, for example
            self.repeated.add(layer.name)
            return output
        leads = all(t.ndim > 0 and len(t) == self.batch for t in (inputs, output)) and shape[:1] == (batch,)
        if not leads and batch == self.batch and not self.once:
            return output  # a batch of another size will tell
        if not leads:
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


@contextmanager
def watching(
    model: nn.Module, layers: Sequence[Layer], on_input: Callable[[Layer, Tensor], None], *, once: bool = True
) -> Iterator[Watch]:
    """Hooks on the layers of a model in evaluation mode.

    With ``once`` a layer that is called again is refused; else its later calls are left out of account, and passes of
    two sizes of batches have to come, which tell layers whose inputs all samples share.
    """
    modules, watch = dict(model.named_modules()), Watch(model, layers, on_input, once)
    attentions: dict[str, list[AttentionProjection]] = {}
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, AttentionProjection):
                attentions.setdefault(layer.path, []).append(layer)
            else:
                handle = modules[layer.path].register_forward_hook(partial(watch.hook, layer), with_kwargs=True)
                stack.callback(handle.remove)
        for name, projections in attentions.items():
            module: Any = modules[name]
            module.forward = partial(attention_forward, module, projections, watch)
            stack.callback(delattr, module, "forward")
        yield watch


def find_layers(model: nn.Module, names: Sequence[str]) -> list[Layer]:
    """The layers that have the given parameters, apart from tied ones and those that a parametrization makes.

    Raises:
        UnsupportedLayerError: modules without gradients of single samples, by name.
    """
    every = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    uses = Counter(number for _, number in every)
    chosen = set(names) - {name for name, number in every if uses[number] > 1}
    layers: list[Layer] = []
    inside: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue
        prefix, refused = f"{path}." if path else "", ""
        if isinstance(module, nn.MultiheadAttention):
            inner = {name for name in chosen if name.startswith(prefix)}
            inside |= inner
            if inner and runs_forward_of(module, nn.MultiheadAttention):
                layers.extend(attention_projections(path, module, chosen))
            elif inner:
                refused = "with a forward of its own"
        elif own := {leaf: p for leaf, p in module.named_parameters(recurse=False) if prefix + leaf in chosen - inside}:
            known = layer_of(path, module, {leaf: Part(prefix + leaf, tuple(p.shape)) for leaf, p in own.items()})
            layers.extend([known] if known else [])
            if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
                refused = "with max_norm or scale_grad_by_freq"
        if refused:
            raise UnsupportedLayerError(
                f"no exact gradients for the parameters of {path or 'the model itself'} ({type(module).__name__} "
                f"{refused}). Freeze it, {_INSTEAD}"
            )
    return layers
