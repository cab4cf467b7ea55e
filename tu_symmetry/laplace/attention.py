"""``nn.MultiheadAttention`` as four linear layers, for the Kronecker factors of its projections.

The module calls one fused function, which no hook can look into; while the factors are accumulated its forward pass
is replaced by the same computation in the open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tu_symmetry.laplace.layers import Layer, MatrixLayer, Part, UnsupportedLayerError

Watcher = Callable[[Layer, Tensor, Tensor], Tensor]


class AttentionProjection(MatrixLayer):
    """One projection (``q``, ``k``, ``v`` or ``out``, its ``role``) of an attention module."""

    def __init__(self, attention: str, role: str, shape: Sequence[int], weight: Part | None, bias: Part | None) -> None:
        super().__init__(f"{attention}:{role}", None, shape, weight, bias)
        self.path, self.role = attention, role


def attention_projections(path: str, module: nn.MultiheadAttention, chosen: set[str]) -> list[AttentionProjection]:
    """The projections of an attention module whose weights or biases are among ``chosen``."""
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedLayerError(
            f"{path} (MultiheadAttention with add_bias_kv or add_zero_attn) has no Kronecker factors here. Freeze it, "
            "leave it out with parameters=[...], or use curvature='diag'"
        )
    width, found = module.embed_dim, []
    for place, role in enumerate("qkv"):
        own = getattr(module, f"{role}_proj_weight")
        shape = (width, width) if own is None else tuple(own.shape)
        name = f"{path}.in_proj_weight" if own is None else f"{path}.{role}_proj_weight"
        weight = Part(name, shape, place * width * width if own is None else 0)
        found.append((role, shape, weight, Part(f"{path}.in_proj_bias", (width,), place * width)))
    shape = tuple(module.out_proj.weight.shape)
    found.append(("out", shape, Part(f"{path}.out_proj.weight", shape), Part(f"{path}.out_proj.bias", (width,))))
    projections = []
    for role, shape, *parts in found:
        own = [part if part.parameter in chosen else None for part in parts]
        if any(own):
            projections.append(AttentionProjection(path, role, shape, *own))
    return projections


def attention_forward(
    module: nn.MultiheadAttention,
    projections: Sequence[AttentionProjection],
    watch: Watcher,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What ``nn.MultiheadAttention.forward`` computes in evaluation mode; ``watch`` gives outputs to go on with."""
    if not module.batch_first or query.ndim != 3:
        raise UnsupportedLayerError(
            f"{projections[0].path} (MultiheadAttention) needs batch_first=True and batched inputs for Kronecker "
            "factors; leave it out with parameters=[...], or use curvature='diag'"
        )
    watched = {p.role: p for p in projections}
    weights: Sequence[Tensor | None] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    biases: Sequence[Tensor | None] = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)

    def project(role: str, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        output = nn.functional.linear(inputs, weight, bias)
        return watch(watched[role], inputs, output) if role in watched else output

    q, k, v = (
        project(role, x, w, b).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for role, x, w, b in zip("qkv", (query, key, value), weights, biases, strict=True)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if attn_mask is not None:
        mask = _additive(attn_mask, scores)
        scores = scores + (mask if mask.ndim == 2 else mask.reshape(scores.shape))
    if key_padding_mask is not None:
        scores = scores + _additive(key_padding_mask, scores)[:, None, None, :]
    attention = scores.softmax(-1)
    mixed = (attention @ v).transpose(1, 2).flatten(2)
    output = project("out", mixed, module.out_proj.weight, module.out_proj.bias)
    if not need_weights:
        return output, None
    return output, attention.mean(1) if average_attn_weights else attention


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -math.inf)
    return mask.to(like)
