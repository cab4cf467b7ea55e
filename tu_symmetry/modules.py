"""Which networks a module trains: the one of a LightningModule, the members of a deep ensemble.

Nothing of Lightning or TorchUncertainty is imported: both are told by names. A module that keeps its networks otherwise
(stacked, as draws on disk) has a method ``network_states()``, which returns their state dicts or raises what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

AVERAGES = ("ema_model", "swa_model")


def is_source(value: Any) -> bool:
    """Whether a value is a module in which networks are to be looked for, rather than a network itself."""
    if not isinstance(value, nn.Module):
        return False
    lightning = any(kind.__name__ == "LightningModule" for kind in type(value).__mro__)
    return lightning or isinstance(getattr(uncompiled(value), "core_models", None), nn.ModuleList)


def states_of(source: nn.Module, name: str) -> list[dict[str, Tensor]]:
    """The state dicts of the networks that a routine, called ``name``, has trained: of all members of an ensemble.

    Raises:
        ValueError: no network, or several that are not members of one ensemble: which is meant has to be said.
    """
    module: Any = uncompiled(source)
    if callable(own := getattr(module, "network_states", None)):
        return list(own())
    members = getattr(module, "core_models", None)
    if isinstance(members, nn.ModuleList):
        return [state for k, member in enumerate(members) for state in states_of(member, f"{name}.core_models[{k}]")]
    if isinstance(core := getattr(module, "core_model", None), nn.Module):
        _require_alone(module, name)
        return states_of(core, f"{name}.core_model")
    if is_source(module):
        network = network_of(module, name=name, advice=lambda path: f"pass {name}.{path}.state_dict()")
        if network is not module:
            return states_of(network, f"{name}'s network")
    return [module.state_dict()]


def state_of(source: nn.Module, name: str) -> dict[str, Tensor]:
    """The state dict of the only network of a routine.

    Raises:
        ValueError: none, or several.
    """
    found = states_of(source, name)
    if len(found) != 1:
        raise ValueError(
            f"{name} is a {type(source).__name__} with {len(found)} networks where one is read; pass it by itself as "
            "states, which takes all of them, or the state_dict() of one of its core_models"
        )
    return found[0]


def _require_alone(wrapper: nn.Module, name: str) -> None:
    """Refuse a wrapper that trains one network and predicts with others (averages, checkpoints)."""
    others = [
        key
        for key, child in wrapper.named_children()
        if key != "core_model" and child is not None and next(child.parameters(), None) is not None
    ]
    if others:
        kind = type(wrapper).__name__
        raise ValueError(
            f"{name} is a {kind}, which holds several networks: core_model, which is trained, and "
            f"{', '.join(others)}; pass the state_dict() of the one that is meant"
        )


def network_of(module: nn.Module, *, name: str, advice: Any) -> nn.Module:
    """The network that a LightningModule trains: its ``model``, its only submodule with weights, or else itself.

    Raises:
        ValueError: several submodules have weights, or none, or there are weights beside the only one. It calls the
            module ``name``, and says by ``advice(attribute)`` how to name a submodule.
    """
    model = getattr(module, "model", None)
    if isinstance(model, nn.Module):
        return model
    with_weights = {key: m for key, m in module.named_children() if next(m.parameters(), None) is not None}
    beside = [key for key, _ in module.named_parameters(recurse=False)]
    if len(with_weights) == 1 and not beside:
        return next(iter(with_weights.values()))
    if not with_weights:
        if beside:
            return module
        raise ValueError(f"{name} has no weights yet, so there is no network to act on; make it in __init__")
    found = ", ".join(f"{key!r} ({type(m).__name__})" for key, m in with_weights.items())
    parts = f"its submodules with weights are {found}"
    if beside:
        parts += f", and it has weights of its own ({', '.join(beside[:3])})"
    raise ValueError(
        f"{name} has no submodule 'model', and {parts}; say which network is meant, for example "
        f"{advice(next(iter(with_weights)))}"
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given."""
    return getattr(module, "_orig_mod", module)


def is_dropout_sampler(module: Any) -> bool:
    """Whether a module is TorchUncertainty's ``mc_dropout`` around a network: one network, run several times."""
    return isinstance(module, nn.Module) and all(hasattr(module, n) for n in ("core_model", "filtered_modules"))


def as_one_network(model: nn.Module) -> AbstractContextManager[Any]:
    """Have what is in evaluation mode run its network once, without dropout; within the context nothing is compiled.

    Who put it into that mode puts it back. What is compiled knows no transforms of ``torch.func``.
    """
    for part in filter(is_dropout_sampler, model.modules()):
        part.training = True  # in which it runs its network once
        for dropout in part.filtered_modules:  # type: ignore[union-attr]
            dropout.training = False
    compiled = any(uncompiled(m) is not m or getattr(m, "_compiled_call_impl", None) for m in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def uncopyable(model: nn.Module, *, compiled: bool = False) -> str:
    """Why a copy of a network would read the weights of the original, or "" where it would not.

    Functions are copied by reference: a ``forward`` that was set on an instance, and has the network in its closure or
    its defaults, goes on reading it. With ``compiled`` the caller copies what ``torch.compile`` was given.
    """
    own = {id(held) for held in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, part in model.named_modules():
        function = None if compiled and uncompiled(part) is not part else vars(part).get("forward")
        if any(id(held) in own for held in _held(function, 4)):
            return (
                f"{path + '.' if path else ''}forward was set on the instance of {type(part).__name__} as a function "
                "that holds parts of the network, which a copy would read from the original. Make it a method of the "
                "class, or bind it with types.MethodType(function, module)"
            )
    return ""


def _held(function: Any, depth: int) -> Iterator[Any]:
    """What a function refers to by its closure and its defaults, and functions among them by theirs."""
    if isinstance(function, partial):
        yield from (v for v in (*function.args, *function.keywords.values()) if isinstance(v, Tensor))
        function = function.func
    if not isinstance(function, FunctionType) or not depth:
        return
    for value in (*_contents(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield value.__self__ if isinstance(value, MethodType) else value
        yield from _held(value, depth - 1)


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
