"""What the source code of a module says: whether it asks for training mode or for sizes, and what it names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

DYNAMIC = frozenset(("getattr", "_modules", "_parameters", "_buffers", "children", "modules", "parameters", "buffers",
                     "named_children", "named_modules", "named_parameters", "named_buffers", "state_dict",
                     "get_parameter", "get_submodule", "get_buffer", "__dict__", "vars"))  # fmt: skip
SIZES = frozenset(("shape", "size", "len", "numel", "ndim"))
_NOISE = frozenset(("torchvision.ops.stochastic_depth",))  # asks for the shape of what it multiplies


def asks_for_mode(model: nn.Module) -> bool:
    """Whether a module has code of its own, beside torch's layers, that asks whether it is in training mode."""
    return any("training" in _names(code) for code in _codes(model))


def asks_for_sizes(model: nn.Module) -> bool:
    """Whether a module has code of its own, beside torch's layers and constructors, that asks for sizes."""
    asking = (function for function in _own_functions(model) if function.__module__ not in _NOISE)
    return any(_names(f.__code__) & SIZES for f in asking if f.__name__ != "__init__")


def never_named(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Those tensors of a state dict that no code of the module can reach: none names them, or computes names."""
    named = frozenset[str]().union(*map(_names, _codes(model)))

    def reachable(name: str) -> bool:
        holder: nn.Module | None = model
        for part in name.split("."):
            own = holder is not None and type(holder).__module__.startswith("torch.nn.")
            if not own and part not in named:  # torch's layers use what they hold, containers hold it by numbers
                return False
            holder = getattr(holder, "_modules", {}).get(part)
        return True

    return set() if named & DYNAMIC else {name for name in names if not reachable(name)}


def _codes(model: nn.Module) -> Iterator[types.CodeType]:
    return (function.__code__ for function in _own_functions(model))


def _own_functions(model: nn.Module) -> Iterator[types.FunctionType]:
    """The functions of all classes but torch's, of functions that modules hold, and of functions that these call."""
    open_: list[Any] = []
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if not kind.__module__.startswith(("torch.nn.", "builtins", "typing", "abc")):
            open_ += vars(kind).values()
    for module in model.modules():
        hooks = (vars(module).get(key, {}).values() for key in ("_forward_hooks", "_forward_pre_hooks"))
        open_ += [*vars(module).values(), *(hook for group in hooks for hook in group)]
    seen: set[int] = set()
    while open_:
        for function in _functions(open_.pop()):
            if id(function) in seen or (function.__module__ or "").startswith("torch."):
                continue
            seen.add(id(function))
            yield function
            held = function.__globals__
            open_ += [held[n] for n in _names(function.__code__) if isinstance(held.get(n), types.FunctionType)]
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    open_.append(cell.cell_contents)


def _functions(held: Any) -> Iterator[types.FunctionType]:
    held = held.func if isinstance(held, functools.partial) else held
    for one in (held.fget, held.fset) if isinstance(held, property) else (getattr(held, "__func__", held),):
        one = inspect.unwrap(one) if callable(one) else one
        if isinstance(one, types.FunctionType):
            yield one


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return frozenset(found)
