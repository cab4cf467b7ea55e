"""What each kind of layer contributes to a Kronecker-factored curvature.

A layer turns what goes into it, and gradients of what comes out of it, into rows: the gradient of a weight is the sum
over positions (pixels of a convolution, tokens of a linear layer) of ``g_t a_t^T``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.laplace.patches import CONVOLUTIONS, gram, patches_of
from tu_symmetry.laplace.tangent import BATCH_NORMS, Slot

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (*BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


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

    def place(self, slots: Mapping[str, Slot]) -> slice:
        """Where it lies in the flat vector."""
        start = slots[self.parameter].start + self.offset
        return slice(start, start + self.size)


class Layer(ABC):
    """One use of parameters in the forward pass, by the module ``path``; ``name`` tells projections of one apart.

    ``weight`` and ``bias`` are what it covers of these, None where they are not in the posterior.
    """

    def __init__(self, name: str, weight: Part | None, bias: Part | None) -> None:
        self.name = self.path = name
        self.weight, self.bias = weight, bias
        self.parts = [part for part in (weight, bias) if part is not None]

    @abstractmethod
    def rows(self, inputs: Tensor) -> Tensor:
        """What the weight's gradient needs of the layer's input."""

    @abstractmethod
    def weight_gradient(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """Gradient of every sample's weight, ``[batch, size]``."""

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Gradient of every sample's bias, ``[batch, size]``."""
        raise NotImplementedError


class MatrixLayer(Layer):
    """Linear layers and convolutions: ``groups`` matrices ``[outputs, features]``.

    Rows are ``[batch, groups, positions, features]``.
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

    def columns(self, gradient: Tensor) -> Tensor:
        """Output gradients ``[batch, groups, outputs, positions]``: as a convolution's lie in memory."""
        if self.convolution is None:
            return gradient.reshape(len(gradient), 1, -1, gradient.shape[-1]).mT
        return gradient.reshape(len(gradient), self.groups, self.outputs, -1)

    def gradient_gram(self, gradient: Tensor, *, reduce: bool) -> Tensor:
        """``sum g g^T`` over samples and positions, or over samples' sums over positions, ``[groups, n, n]``."""
        columns = self.columns(gradient)
        if reduce:
            return gram(columns.sum(-1).transpose(0, 1))
        if self.convolution is not None and columns.shape[-1] >= 2 * self.outputs:
            return (columns @ columns.mT).sum(0)  # as they lie in memory: to move them would take longer
        return gram(columns.mT.transpose(0, 1).flatten(1, 2).contiguous())

    def weight_gradient(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """``sum_t g_t a_t^T``."""
        return (self.columns(gradient) @ rows).flatten(1)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """``sum_t g_t``."""
        return self.columns(gradient).sum(-1).flatten(1)


class NormLayer(Layer):
    """Affine parameters of normalizations: rows are the normalized input, gradients are per feature."""

    def __init__(self, name: str, module: nn.Module, weight: Part | None, bias: Part | None) -> None:
        super().__init__(name, weight, bias)
        self.module = module

    def rows(self, inputs: Tensor) -> Tensor:
        """The input, normalized and not yet scaled."""
        m = self.module
        if isinstance(m, BATCH_NORMS):
            return F.batch_norm(inputs, m.running_mean, m.running_var, eps=m.eps)
        if isinstance(m, _INSTANCE_NORMS):
            own = not m.track_running_stats
            return F.instance_norm(inputs, m.running_mean, m.running_var, use_input_stats=own, eps=m.eps)
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


def layer_of(path: str, module: nn.Module, parts: dict[str, Part]) -> Layer | None:
    """A layer of a kind that is known, None for any other."""
    weight, bias = parts.get("weight"), parts.get("bias")
    known: Any = module
    if parts.keys() - {"weight", "bias"}:
        return None
    if runs_forward_of(module, nn.Linear) or runs_forward_of(module, *CONVOLUTIONS):
        return MatrixLayer(path, known, known.weight.shape, weight, bias)
    if runs_forward_of(module, *_NORMS):
        return NormLayer(path, known, weight, bias)
    if runs_forward_of(module, nn.Embedding):
        return EmbeddingLayer(path, known, weight)
    return None


def runs_forward_of(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call computes what one of these classes does: a subclass or an object may have a forward of its own."""
    own, names = type(module), ("forward", "_conv_forward")
    return (
        isinstance(module, kinds)
        and not set(names) & vars(module).keys()
        and any(all(getattr(own, n, None) is getattr(k, n, None) for n in names) for k in kinds)
    )
