"""Permuting a network where it is, with everything that is shaped like its weights and has to follow them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import apply_permutation, move_optimizer_state, permute_tensors
from tu_symmetry.symmetry.elements import Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph


@torch.no_grad()
def permute_in_place(
    graph: SymmetryGraph,
    permutation: Permutation,
    network: nn.Module,
    *,
    mirrors: Iterable[nn.Module] = (),
    swag: Iterable[tuple[dict[str, Tensor], str]] = (),
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> None:
    """Permute the hidden units of a network without changing its function or its training trajectory.

    Parameters and buffers keep their identity (hooks, optimizers and data-parallel buckets go on holding them).

    Args:
        graph: the symmetry graph of the network.
        permutation: on the CPU; group name to LongTensor.
        network: changed in place, with its gradients.
        mirrors: averages of its weights, of the same architecture, changed in place.
        swag: SWAG statistics and the prefix of the network's names in them, changed in place.
        optimizers: whatever they hold for the network's parameters moves along.

    Raises:
        SymmetryError: before anything is changed, if an optimizer's state cannot follow.
    """
    if all(torch.equal(p, torch.arange(p.shape[-1]).expand(p.shape)) for p in permutation.values()):
        return
    optimizers = list(optimizers)
    for optimizer in optimizers:
        _check_elementwise(optimizer)
    for module in (network, *mirrors):
        _permute_module(graph, permutation, module)
    for statistics, prefix in swag:
        _permute_swag(graph, permutation, statistics, prefix)
    names = {id(p): name for name, p in network.named_parameters()}
    for optimizer in optimizers:
        move_optimizer_state(graph, optimizer, names, permutation=permutation)


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose state is not shaped like the weights, before anything has been changed."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            listed = isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
            shaped = not isinstance(value, Tensor) or value.numel() == 1 or value.shape == parameter.shape
            if listed or not shaped:
                raise SymmetryError(
                    f"{type(optimizer).__name__} keeps {key!r} in a form that is not its parameter's, so it cannot "
                    "follow a permutation; use in_place=False, or an optimizer with elementwise state (SGD, Adam and "
                    "their kin)"
                )


def _permute_module(graph: SymmetryGraph, permutation: Permutation, module: nn.Module) -> None:
    state = {name: t.detach() for name, t in module.state_dict().items()}
    for name, tensor in apply_permutation(graph, permutation, state).items():
        if tensor is not state[name]:
            state[name].copy_(tensor)
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for name, tensor in permute_tensors(graph, permutation, grads).items():
        if tensor is not grads[name]:
            grads[name].copy_(tensor)


def _permute_swag(graph: SymmetryGraph, permutation: Permutation, stats: dict[str, Tensor], prefix: str) -> None:
    """Permute SWAG's moments ``[*shape]`` and its flattened deviations ``[models, numel]``."""
    for kind in ("_mean", "_sq_mean", "_covariance_sqrt"):
        keys = {name: f"{prefix}{name}{kind}" for name in graph.shapes if f"{prefix}{name}{kind}" in stats}
        tensors = {}
        for name, key in keys.items():
            shape = graph.shapes[name]
            tensors[name] = stats[key].reshape(stats[key].numel() // math.prod(shape), *shape)
        for name, tensor in permute_tensors(graph, permutation, tensors).items():
            stats[keys[name]] = tensor.reshape(stats[keys[name]].shape)
