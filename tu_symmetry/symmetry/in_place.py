"""Moving a network where it is: its weights, and everything that is shaped like them and has to follow.

Parameters and buffers keep their identity, so that hooks, optimizers and data-parallel buckets go on holding them. What
follows the weights is named by how it changes when they are multiplied by ``c`` (a permutation moves all of it alike)::

    weights, averages of weights, SWAG's mean and deviations      c
    SWAG's mean of squares                                        c ** 2
    gradients, momenta, first moments                             c ** -1
    second moments                                                c ** -2

As an example, a weight ``w = 3`` of gradient 0.5 between two ReLUs. Scaled by ``c = 2`` it is 6, and where it changed
by 0.1 it now has to change by 0.2 for the same change of the loss, 0.05: its gradient is 0.25.

Everything that can be refused (a state of another architecture, an optimizer whose state cannot follow, a weight that
would leave the range of its dtype) is refused before anything is changed.

Laws (tests/symmetry/test_in_place.py, float64): the function is unchanged, and gradients, averages and elementwise
optimizer state are those of the moved network; after a permutation, so is all of the training that follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import permute_tensors, require_range, scale_tensors
from tu_symmetry.symmetry.elements import LogScale, Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

_Move = Callable[[Mapping[str, Tensor], float], dict[str, Tensor]]
"""From tensors, and the power of the factor that multiplies them, to the moved tensors."""


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

    Args:
        graph: the symmetry graph of the network (verified on first use).
        permutation: on the CPU; group name to LongTensor.
        network: changed in place, with its gradients.
        mirrors: averages of its weights, of the same architecture, changed in place.
        swag: SWAG statistics and the prefix of the network's names in them, changed in place.
        optimizers: whatever they hold for the network's parameters moves along.

    Raises:
        SymmetryError: before anything is changed, if the permutation or a module does not belong to the graph, or an
            optimizer's state cannot follow.
    """
    if all(torch.equal(p, torch.arange(p.shape[-1], device="cpu").expand(p.shape)) for p in permutation.values()):
        return
    optimizers, modules = list(optimizers), [network, *mirrors]
    for optimizer in optimizers:
        _check_elementwise(optimizer)
    _check_modules(graph, modules)
    _move_all(graph, modules, swag, lambda tensors, power: permute_tensors(graph, permutation, tensors))
    names = {id(p): name for name, p in network.named_parameters()}
    for optimizer in optimizers:
        move_optimizer_state(graph, optimizer, names, permutation=permutation)


@torch.no_grad()
def scale_in_place(
    graph: SymmetryGraph,
    log_scale: LogScale,
    network: nn.Module,
    *,
    mirrors: Iterable[nn.Module] = (),
    swag: Iterable[tuple[dict[str, Tensor], str]] = (),
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> None:
    """Rescale a network by positive factors without changing its function, with everything that follows its weights.

    Arguments and errors are those of :func:`permute_in_place`, with natural-log factors on the CPU; a weight that would
    leave the range of its dtype is one more error. What of the training trajectory is not invariant stands at
    :func:`move_optimizer_state`.
    """
    if not any(bool(s.any()) for s in log_scale.values()):
        return
    optimizers, modules = list(optimizers), [network, *mirrors]
    names = {id(p): name for name, p in network.named_parameters()}
    for optimizer in optimizers:
        check_scalable_state(optimizer, names)
    _check_modules(graph, modules)
    for module in modules:
        require_range(graph, log_scale, _state(module))
    _move_all(graph, modules, swag, lambda tensors, power: scale_tensors(graph, log_scale, tensors, power=power))
    for optimizer in optimizers:
        move_optimizer_state(graph, optimizer, names, log_scale=log_scale)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def _check_modules(graph: SymmetryGraph, modules: Iterable[nn.Module]) -> None:
    graph.require_verified()
    for module in modules:
        graph.check_state(_state(module), finite=False, name=f"the state of {type(module).__name__}")


def _move_all(
    graph: SymmetryGraph, modules: Iterable[nn.Module], swag: Iterable[tuple[dict[str, Tensor], str]], move: _Move
) -> None:
    """Move modules with their gradients, and SWAG statistics, by the powers that the table above gives."""
    for module in modules:
        state = _state(module)
        _replace(state, move(state, 1.0))
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        _replace(gradients, move(gradients, -1.0))
    for statistics, prefix in swag:
        for kind, power in (("_mean", 1.0), ("_sq_mean", 2.0), ("_covariance_sqrt", 1.0)):
            keys = {name: f"{prefix}{name}{kind}" for name in graph.shapes if f"{prefix}{name}{kind}" in statistics}
            tensors = {}
            for name, key in keys.items():  # moments are [*shape], deviations are flattened: [models, numel]
                shape, held = graph.shapes[name], statistics[key]
                tensors[name] = held.reshape(held.numel() // math.prod(shape), *shape)
            for name, tensor in move(tensors, power).items():
                statistics[keys[name]] = tensor.reshape(statistics[keys[name]].shape)


def _replace(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for name, tensor in new.items():
        if tensor is not old[name]:
            old[name].copy_(tensor)


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose state is not shaped like the weights, before anything has been changed."""
    for parameter, key, value in _entries(optimizer):
        if _listed(value) or (isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape):
            raise SymmetryError(
                f"{type(optimizer).__name__} keeps {key!r} in a form that is not its parameter's, so it cannot "
                "follow a permutation; use in_place=False, or an optimizer with elementwise state (SGD, Adam and "
                "their kin)"
            )


def _entries(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str, Any]]:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            yield parameter, key, value


def _listed(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)


def move_optimizer_state(
    graph: SymmetryGraph,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    *,
    permutation: Mapping[str, Tensor] | None = None,
    log_scale: LogScale | None = None,
) -> None:
    """Move an optimizer's per-parameter state along with weights that were permuted or rescaled (in place).

    After a permutation the next training step is exactly the permuted step, for every optimizer whose state is
    elementwise (SGD with momentum, Adam and its kin). After a rescaling by factors ``c`` gradients and momenta scale
    by ``1 / c``, second moments by ``1 / c**2`` (see :func:`check_scalable_state`). Plain SGD and Adam are *not*
    equivariant under rescaling (their step would have to scale by ``c``), so only the stored statistics agree with the
    new coordinates, not the trajectory.

    Args:
        graph: the symmetry graph.
        optimizer: its ``state`` is changed in place.
        names: ``id(parameter)`` to the parameter's name in the graph.
        permutation: the one that was applied to the weights.
        log_scale: the log-factors that were applied to the weights (after the permutation).

    Raises:
        SymmetryError: a state tensor of a known parameter that is neither a scalar nor of the parameter's shape
            (factored statistics, as in Adafactor, cannot be moved); with ``log_scale``, state of which it is not known
            how it scales.
    """
    if log_scale is not None:
        check_scalable_state(optimizer, names)
    for parameter, key, value in _entries(optimizer):
        name = names.get(id(parameter))
        if name is None or not isinstance(value, Tensor) or value.ndim == 0 or value.numel() == 1 != parameter.numel():
            continue
        if value.shape != parameter.shape:
            raise SymmetryError(
                f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(parameter.shape)}: factored or flattened statistics cannot follow a symmetry"
            )
        moved: dict[str, Tensor] = {name: value}
        if permutation is not None:
            moved = permute_tensors(graph, permutation, moved)
        if log_scale is not None:
            moved = scale_tensors(graph, log_scale, moved, power=-2.0 if key in _LIKE_SQUARES else -1.0)
        value.copy_(moved[name])


_LIKE_GRADIENTS = frozenset({"momentum_buffer", "exp_avg", "exp_inf", "grad_avg", "prev"})
_LIKE_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})


def check_scalable_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse state of which it is not known how it follows a rescaling: what is neither like gradients nor squares.

    RMSprop's momentum is of steps that were divided by their root mean square, so that it does not scale as gradients
    do; it is refused like Adadelta's, Rprop's, ASGD's and LBFGS's own state.

    Args:
        optimizer: the optimizer.
        names: ``id(parameter)`` to the parameter's name; other parameters are not looked at.

    Raises:
        SymmetryError: naming the optimizer, the entry and the parameter.
    """
    for parameter, key, value in _entries(optimizer):
        scalar = not isinstance(value, Tensor) or value.ndim == 0
        if id(parameter) not in names or (scalar and not _listed(value)):
            continue
        preconditioned = key == "momentum_buffer" and "square_avg" in optimizer.state[parameter]
        known = key in _LIKE_SQUARES or (key in _LIKE_GRADIENTS and not preconditioned)
        if _listed(value) or not known or value.shape != parameter.shape:
            raise SymmetryError(
                f"{type(optimizer).__name__} keeps {key!r} for {names[id(parameter)]!r}, and how that follows a "
                "rescaling is not known; leave the weights' scale as it is (in_place=False in a callback), or "
                "train with SGD, Adam, AdamW, NAdam, RAdam, Adamax or Adagrad"
            )
