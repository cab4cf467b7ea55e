"""What each kind of layer contributes to a Kronecker-factored curvature, and the hooks that watch it.

A layer turns what goes into it, and gradients with respect to what comes out of it, into rows: the gradient of a
weight is the sum over positions of ``g_t a_t^T``. Positions are what shares a weight within one sample: pixels of a
convolution, tokens of a linear layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from tu_symmetry.laplace.patches import CONVOLUTIONS, patches_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Run = Callable[[Tensor], None]


class UnsupportedLayerError(ValueError):
    """A layer whose parameters have no Kronecker factors here; the message names it and what to do."""


@dataclass(frozen=True)
class Part:
    """A piece of a parameter that one block covers: ``shape`` entries from ``offset`` of the flattened parameter."""

    parameter: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


class Layer(ABC):
    """One use of parameters in the forward pass.

    Attributes:
        name: name of the module, with a suffix for one projection of several.
        path: name of the module.
        weight: what of the weight it covers, None where the weight is not in the posterior.
        bias: the same for the bias.
        deferred: whether its gradients wait for the end of the backward pass, since they take one of their own.
    """

    deferred = False

    def __init__(self, name: str, weight: Part | None, bias: Part | None) -> None:
        self.name = self.path = name
        self.weight, self.bias = weight, bias

    @abstractmethod
    def rows(self, inputs: Tensor) -> Tensor:
        """What the weight's gradient needs of the layer's input."""

    @abstractmethod
    def weight_gradient(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """Gradient of every sample's weight, ``[batch, size]``."""

    @abstractmethod
    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Gradient of every sample's bias, ``[batch, size]``."""


class MatrixLayer(Layer):
    """Linear layers and convolutions: rows ``[batch, groups, positions, features]``.

    Attributes:
        groups: number of independent matrices in the weight (groups of a convolution).
        outputs: rows of each matrix.
        features: columns of each matrix.
    """

    def __init__(
        self, name: str, module: nn.Module | None, shape: Sequence[int], weight: Part | None, bias: Part | None
    ):
        super().__init__(name, weight, bias)
        self.convolution = module if isinstance(module, CONVOLUTIONS) else None
        self.groups = self.convolution.groups if self.convolution is not None else 1
        self.outputs, self.features = shape[0] // self.groups, math.prod(shape[1:])

    def rows(self, inputs: Tensor) -> Tensor:
        """Inputs, or their patches, as rows."""
        if self.convolution is None:
            return inputs.reshape(len(inputs), 1, -1, inputs.shape[-1])
        return patches_of(inputs, self.convolution)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Output gradients as rows ``[batch, groups, positions, outputs]``."""
        if self.convolution is None:
            return gradient.reshape(len(gradient), 1, -1, gradient.shape[-1])
        return gradient.reshape(len(gradient), self.groups, self.outputs, -1).transpose(-1, -2)

    def gradient_gram(self, gradient: Tensor, *, reduce: bool) -> Tensor:
        """``sum g g^T`` over samples and positions, or over samples' sums over positions, ``[groups, n, n]``."""
        if reduce or self.convolution is None:
            rows = self.gradient_rows(gradient).transpose(0, 1)
            rows = rows.sum(2) if reduce else rows.flatten(1, 2)
            return rows.mT @ rows
        split = gradient.reshape(len(gradient), self.groups, self.outputs, -1)
        if self.outputs <= split.shape[-1]:  # as they lie in memory
            return (split @ split.mT).sum(0)
        columns = split.permute(1, 2, 0, 3).flatten(2)
        return columns @ columns.mT

    def weight_gradient(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """``sum_t g_t a_t^T``."""
        return (self.gradient_rows(gradient).transpose(-1, -2) @ rows).flatten(1)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """``sum_t g_t``."""
        return self.gradient_rows(gradient).sum(2).flatten(1)


class NormLayer(Layer):
    """Affine parameters of normalizations: rows are the normalized input, gradients are per feature."""

    def __init__(self, name: str, module: nn.Module, weight: Part | None, bias: Part | None) -> None:
        super().__init__(name, weight, bias)
        self.module = module

    def rows(self, inputs: Tensor) -> Tensor:
        """The input, normalized and not yet scaled."""
        m = self.module
        if isinstance(m, _BATCH_NORMS):
            return F.batch_norm(inputs, m.running_mean, m.running_var, eps=m.eps)
        if isinstance(m, _INSTANCE_NORMS):
            return F.instance_norm(
                inputs, m.running_mean, m.running_var, use_input_stats=not m.track_running_stats, eps=m.eps
            )
        if isinstance(m, nn.GroupNorm):
            return F.group_norm(inputs, m.num_groups, eps=m.eps)
        if isinstance(m, nn.RMSNorm):
            return F.rms_norm(inputs, list(m.normalized_shape), eps=m.eps)
        assert isinstance(m, nn.LayerNorm)
        return F.layer_norm(inputs, list(m.normalized_shape), eps=m.eps)

    def weight_gradient(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """``sum_t g_t * normalized_t``."""
        return self.bias_gradient(rows * gradient)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """``sum_t g_t``."""
        if isinstance(self.module, (nn.LayerNorm, nn.RMSNorm)):
            return gradient.reshape(len(gradient), -1, math.prod(self.module.normalized_shape)).sum(1)
        return gradient.flatten(2).sum(2) if gradient.ndim > 2 else gradient


class EmbeddingLayer(Layer):
    """Embedding tables: rows are the indices ``[batch, positions]``."""

    def __init__(self, name: str, module: nn.Embedding, weight: Part | None) -> None:
        super().__init__(name, weight, None)
        self.entries, self.features, self.padding = module.num_embeddings, module.embedding_dim, module.padding_idx

    def rows(self, inputs: Tensor) -> Tensor:
        """The indices."""
        return inputs.reshape(len(inputs), -1)

    def summed(self, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient rows added up for each (sample, entry) that occurs: ``[pairs, features]`` and their numbers."""
        gradient = gradient.reshape(-1, self.features)
        pairs = (rows + self.entries * torch.arange(len(rows), device=rows.device).unsqueeze(-1)).reshape(-1)
        if self.padding is not None:
            gradient = gradient * (rows.reshape(-1, 1) != self.padding)
        unique, where = pairs.unique(return_inverse=True)
        return gradient.new_zeros(len(unique), self.features).index_add_(0, where, gradient), unique

    def weight_gradient(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the table, dense."""
        values, pairs = self.summed(rows, gradient)
        table = gradient.new_zeros(len(rows) * self.entries, self.features)
        return table.index_copy_(0, pairs, values).reshape(len(rows), -1)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """An embedding has no bias."""
        raise NotImplementedError


class Watch:
    """One forward pass with its inputs and, for each backward pass, its output gradients, layer by layer."""

    def __init__(self, on_input: Callable[[Layer, Tensor], None]) -> None:
        self.on_input = on_input
        self.on_gradient: Callable[[Layer, Tensor], None] | None = None
        self.running = False  # only the forward pass itself is watched, and no module that is run again later
        self._deferred: list[tuple[Layer, Tensor]] = []
        self.leaves: list[Tensor] = []
        self.seen: set[str] = set()
        self.batch = -1
        self.outputs = 0

    def __call__(self, layer: Layer, inputs: Tensor, output: Tensor) -> Tensor:
        """Note one layer's input, and put a gradient hook on its output."""
        if not self.running:
            return output
        if layer.name in self.seen:
            raise UnsupportedLayerError(
                f"the module {layer.path!r} is used several times in one forward pass, where Kronecker factors do not "
                "hold; freeze it, leave it out with parameters=[...], or use curvature='diag' or 'full', which are "
                "exact for shared weights"
            )
        self.seen.add(layer.name)
        if output.ndim < 1 or len(output) != self.batch or len(inputs) != self.batch:
            raise UnsupportedLayerError(
                f"the module {layer.path!r} sees an input of shape {tuple(inputs.shape)} in a batch of {self.batch} "
                "samples: the first axis has to be the batch. Build the model batch-first, leave the module out with "
                "parameters=[...], or use curvature='diag' or 'full'"
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
        if layer.deferred:
            self._deferred.append((layer, gradient.detach()))
        elif self.on_gradient is not None:
            self.on_gradient(layer, gradient.detach())

    def backward(
        self, outputs: Tensor, root: Sequence[Tensor], on_gradient: Callable[[int, Layer, Tensor], None]
    ) -> None:
        """One backward pass for each column of ``root``, all in the shape of the outputs, without weight gradients."""
        for column, direction in enumerate(root):
            self.on_gradient = partial(on_gradient, column)
            torch.autograd.grad(outputs, self.leaves, direction, retain_graph=column + 1 < len(root), allow_unused=True)
            waiting, self._deferred = self._deferred, []
            for layer, gradient in waiting:
                self.on_gradient(layer, gradient)
        self.on_gradient = None


@contextmanager
def watching(model: nn.Module, layers: Sequence[Layer], watch: Watch) -> Iterator[Callable[[Any, int], Tensor]]:
    """Hooks on the layers; yields the forward pass (inputs, batch size) -> what the network returns.

    The model must be in evaluation mode (:func:`tu_symmetry.laplace.tangent.evaluating`).
    """
    from tu_symmetry.laplace.attention import AttentionProjection, attention_forward
    from tu_symmetry.laplace.modules import ModuleLayer

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
                outputs = functional_call(model, weights, inputs if isinstance(inputs, tuple) else (inputs,))
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
        if isinstance(layer, ModuleLayer):
            layer.check_call(args, kwargs, output)
        elif not args:
            raise UnsupportedLayerError(
                f"the module {layer.path!r} is called with its input as a keyword ({', '.join(kwargs)}=...), where "
                "hooks do not look; pass it by position, leave the module out with parameters=[...], or use "
                "curvature='diag' or 'full'"
            )
        return watch(layer, args[0], output)

    try:
        attentions: dict[str, list[AttentionProjection]] = {}
        for layer in layers:
            if isinstance(layer, AttentionProjection):
                attentions.setdefault(layer.attention, []).append(layer)
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
    """The layers that own the given parameters.

    Raises:
        UnsupportedLayerError: tied weights, or modules without gradients of single samples, by name.
    """
    from tu_symmetry.laplace.attention import attention_projections
    from tu_symmetry.laplace.modules import ModuleLayer

    chosen = set(names)
    aliases: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    tied = [shared for shared in aliases.values() if len(shared) > 1 and chosen & set(shared)]
    if tied:
        raise UnsupportedLayerError(
            f"the parameters {tied[0]} are one tied tensor, for which Kronecker factors do not hold; freeze it, leave "
            "it out with parameters=[...], or use curvature='diag' or 'full', which are exact for tied weights"
        )
    layers: list[Layer] = []
    refused: list[str] = []
    inside: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue  # its parameters count as those of the module that it makes a weight for
        own = {leaf: p for leaf, p in module.named_parameters(recurse=False)}
        made: dict[str, nn.Parameter] = {}
        if is_parametrized(module):
            lists = module.get_submodule("parametrizations")
            made = {f"parametrizations.{leaf}": p for leaf, p in lists.named_parameters()}
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.MultiheadAttention):
            names_here = [n for n in chosen if n.startswith(prefix)]
            if names_here:
                layers.extend(attention_projections(path, module, chosen))
            inside.update(n for n in names_here)
            continue
        for leaf, p in sorted(made.items()):
            if prefix + leaf in chosen and prefix + leaf not in inside:
                layers.append(ModuleLayer(path, module, leaf, Part(prefix + leaf, tuple(p.shape))))
        if not any(prefix + leaf in chosen and prefix + leaf not in inside for leaf in own):
            continue
        parts = {leaf: Part(prefix + leaf, tuple(p.shape)) for leaf, p in own.items() if prefix + leaf in chosen}
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
            refused.append(f"{path or 'the model itself'} (Embedding with max_norm or scale_grad_by_freq)")
            continue
        known = _layer(path, module, parts)
        layers.extend(
            [known] if known else [ModuleLayer(path, module, leaf, part) for leaf, part in sorted(parts.items())]
        )
    if refused:
        raise UnsupportedLayerError(
            f"no exact gradients for the parameters of {'; '.join(refused[:6])}"
            + (f" and {len(refused) - 6} more" if len(refused) > 6 else "")
            + ". Freeze them, leave them out with parameters=[...], or use curvature='diag' (any layer) or 'full' "
            "(small networks)"
        )
    return layers


def _layer(path: str, module: nn.Module, parts: dict[str, Part]) -> Layer | None:
    """A layer of a kind that is known, None for any other."""
    weight, bias = parts.get("weight"), parts.get("bias")
    if parts.keys() - {"weight", "bias"}:
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return MatrixLayer(path, module, module.weight.shape, weight, bias)
    if isinstance(module, CONVOLUTIONS) and any(type(module).forward is c.forward for c in CONVOLUTIONS):
        return MatrixLayer(path, module, module.weight.shape, weight, bias)
    if isinstance(module, _NORMS) and any(type(module).forward is n.forward for n in _NORMS):
        return NormLayer(path, module, weight, bias)
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return EmbeddingLayer(path, module, weight)
    return None
