"""Copies of modules of any class: with weights of their own, with shared ones, or with none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.modules import uncompiled


def copied(model: nn.Module, held: dict[int, Any] | None = None) -> nn.Module:
    """A copy of any module, also of one that keeps tensors with a gradient's history."""
    memo = {} if held is None else held
    for part in reversed(list(model.modules())):
        if uncompiled(part) is not part and not isinstance(part, _Plain):
            memo[id(part)] = _Plain(copied(uncompiled(part), memo)).train(part.training)
    for part in model.modules():
        for value in vars(part).values():
            for leaf in _leaves(value):
                if id(leaf) not in memo and (leaf.layout != torch.strided or not leaf.is_leaf):
                    own = leaf.detach().clone()  # what deepcopy refuses: sparse tensors, and gradients' histories
                    memo[id(leaf)] = nn.Parameter(own, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else own
    memo |= {id(p): p for p in model.parameters() if id(p) not in memo and valueless(p)}
    return copy.deepcopy(model, memo)


def valueless(tensor: Tensor) -> bool:
    """Whether a tensor has the shape of weights alone: one number, repeated, stands for all of them."""
    return tensor.layout == torch.strided and not any(tensor.stride()) and tensor.numel() > 1


def sharing(model: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers."""
    return copied(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def to_trace(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters, unless switching it to evaluation mode may write to them."""
    return copied(model) if switches(model) else copied(model, {id(p): p for p in model.parameters()})


def switches(model: nn.Module) -> bool:
    """Whether some part of a module has its own way of being switched between training and evaluation."""
    return any(
        type(m).train is not nn.Module.train or type(m).eval is not nn.Module.eval
        for m in model.modules()
        if not isinstance(m, torch.jit.ScriptModule)
    )


class _Plain(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
