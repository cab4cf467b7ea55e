"""Moving a network where it is: its weights, and everything that is shaped like them and has to follow.

Parameters and buffers keep their identity. Everything that can be refused is refused before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import permute_tensors, require_range, scale_tensors, sign_tensors
from tu_symmetry.symmetry.elements import LogScale, Permutation, Signs
from tu_symmetry.symmetry.graph import SymmetryGraph

if TYPE_CHECKING:
    from typing import Unpack

_SWAG = {"_mean": 1.0, "_sq_mean": 2.0, "_covariance_sqrt": 1.0}  # statistic, and its power of the weights' factor
_LIKE_GRADIENTS = frozenset({"momentum_buffer", "exp_avg", "exp_inf", "grad_avg", "prev"})
_LIKE_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})


class Followers(TypedDict, total=False):
    """What has to follow a network's weights."""

    mirrors: list[nn.Module]  # averages of them, of the same architecture
    swag: list[tuple[dict[str, Tensor], str]]  # SWAG statistics and the prefix of the network's names in them
    optimizers: list[torch.optim.Optimizer]


def permute_in_place(
    graph: SymmetryGraph, permutation: Permutation, network: nn.Module, **followers: Unpack[Followers]
) -> None:
    """Permute the hidden units of a network, with its gradients, and its training trajectory.

    Raises:
        SymmetryError: before anything is changed, if the permutation or a module does not belong to the graph, or an
            optimizer's state cannot follow.
    """
    if any((p != torch.arange(p.shape[-1], device="cpu")).any() for p in permutation.values()):
        _move_all(graph, network, followers, permutation, None)


def scale_in_place(
    graph: SymmetryGraph, log_scale: LogScale, network: nn.Module, **followers: Unpack[Followers]
) -> None:
    """Rescale a network, with its gradients; errors are those of :func:`permute_in_place`, and a range that is left."""
    if any(bool(s.any()) for s in log_scale.values()):
        _move_all(graph, network, followers, None, log_scale)


def sign_in_place(graph: SymmetryGraph, signs: Signs, network: nn.Module, **followers: Unpack[Followers]) -> None:
    """Turn the signs of a network, with its gradients, and its training trajectory; errors as before."""
    if any(bool((s < 0).any()) for s in signs.values()):
        _move_all(graph, network, followers, None, None, signs)


def _moved(
    graph: SymmetryGraph,
    tensors: Mapping[str, Tensor],
    power: float,
    permutation: Mapping[str, Tensor] | None,
    log_scale: LogScale | None,
    signs: Signs | None,
) -> Mapping[str, Tensor]:
    """Tensors that are multiplied by the ``power`` of the factors, and of the signs."""
    if permutation is not None:
        tensors = permute_tensors(graph, permutation, tensors)
    if signs is not None and power % 2:
        tensors = sign_tensors(graph, signs, tensors)
    return tensors if log_scale is None else scale_tensors(graph, log_scale, tensors, power=power)


@torch.no_grad()
def _move_all(
    graph: SymmetryGraph,
    network: nn.Module,
    followers: Followers,
    permutation: Permutation | None,
    log_scale: LogScale | None,
    signs: Signs | None = None,
) -> None:
    """Check everything, then move modules with their gradients, SWAG statistics, and the network's optimizers."""
    modules = [network, *followers.get("mirrors", ())]
    optimizers = followers.get("optimizers", [])
    names = {id(p): name for name, p in network.named_parameters()}
    for optimizer in optimizers:
        list(_that_follow(optimizer, names, permuted=permutation is not None, rescaled=log_scale is not None))
    graph.require_verified()
    states = [{name: tensor.detach() for name, tensor in module.state_dict().items()} for module in modules]
    for module, state in zip(modules, states, strict=True):
        graph.check_state(state, finite=False, name=f"the state of {type(module).__name__}")
        if log_scale is not None:
            require_range(graph, log_scale, state)
    for module, state in zip(modules, states, strict=True):
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        for held, power in ((state, 1.0), (gradients, -1.0)):
            for name, tensor in _moved(graph, held, power, permutation, log_scale, signs).items():
                if tensor is not held[name]:
                    held[name].copy_(tensor)
    for statistics, prefix in followers.get("swag", ()):
        for kind, power in _SWAG.items():
            keys = {name: f"{prefix}{name}{kind}" for name in graph.shapes if f"{prefix}{name}{kind}" in statistics}
            tensors = {}
            for name, key in keys.items():  # moments are [*shape], deviations are flattened: [models, numel]
                shape, statistic = graph.shapes[name], statistics[key]
                tensors[name] = statistic.reshape(statistic.numel() // math.prod(shape), *shape)
            for name, tensor in _moved(graph, tensors, power, permutation, log_scale, signs).items():
                statistics[keys[name]] = tensor.reshape(statistics[keys[name]].shape)
    for optimizer in optimizers:
        move_optimizer_state(graph, optimizer, names, permutation=permutation, log_scale=log_scale, signs=signs)


def move_optimizer_state(
    graph: SymmetryGraph,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    *,
    permutation: Mapping[str, Tensor] | None = None,
    log_scale: LogScale | None = None,
    signs: Signs | None = None,
) -> None:
    """Move an optimizer's per-parameter state along with weights that were permuted, rescaled or turned (in place).

    After a permutation the next training step is exactly the permuted step. So it is after signs, which gradients and
    momenta follow, and second moments do not. After a rescaling by factors ``c``
    gradients and momenta scale by ``1 / c``, second moments by ``1 / c**2``; the trajectory is another one. ``names``
    maps ``id(parameter)`` to the parameter's name in the graph.

    Raises:
        SymmetryError: before anything is changed, if some state is neither a scalar nor of its parameter's shape (as
            Adafactor's), or it is not known how it scales.
    """
    kinds = {"permuted": permutation is not None, "rescaled": log_scale is not None}
    for name, key, value in list(_that_follow(optimizer, names, **kinds)):
        power = -2.0 if key in _LIKE_SQUARES else -1.0
        value.copy_(_moved(graph, {name: value}, power, permutation, log_scale, signs)[name])


def _that_follow(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, permuted: bool, rescaled: bool
) -> Iterator[tuple[str, str, Tensor]]:
    """What an optimizer keeps for each entry of a named parameter: the name, what it is, the tensor."""
    for parameter, state in optimizer.state.items():
        if id(parameter) not in names:
            continue
        name = names[id(parameter)]
        for key, value in state.items():
            listed = isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
            if not listed and (not isinstance(value, Tensor) or value.ndim == 0):
                continue
            if permuted and not listed and value.numel() == 1 != parameter.numel():
                continue
            preconditioned = rescaled and key == "momentum_buffer" and "square_avg" in state
            known = key in _LIKE_SQUARES or (key in _LIKE_GRADIENTS and not preconditioned)
            if listed or value.shape != parameter.shape or not (permuted or known):
                what = "rescaling" if rescaled else "permutation" if permuted else "change of signs"
                raise SymmetryError(
                    f"{type(optimizer).__name__} keeps {key!r} for {name!r}, and how that follows a {what} is not "
                    "known; use in_place=False, or train with an optimizer with elementwise state (SGD, Adam and their "
                    "kin)"
                )
            yield name, key, value
