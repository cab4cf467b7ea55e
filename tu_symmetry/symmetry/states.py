"""State dicts as users hand them in: what is no tensor, or no tensor of the kind that the network has, is named.

A state may come from anywhere: a checkpoint of integers, a numpy archive, a list. Torch's own error for these is raised
deep inside a computation, or not at all (a bool times a float is a float). Every public function that takes states
checks them here first, and the error says which tensor it is, what it is, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.symmetry.graph import SymmetryError

State = dict[str, Tensor]
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def kind_of(dtype: torch.dtype) -> str:
    """The kind of number of a dtype: ``"real"``, ``"complex"``, ``"integer"``, ``"boolean"``, or its own name."""
    if dtype in _REAL:
        return "real"
    if dtype.is_complex:
        return "complex"
    if dtype == torch.bool:
        return "boolean"
    coarse = dtype.is_floating_point or str(dtype).startswith(("torch.q", "torch.float"))
    return str(dtype) if coarse else "integer"


def check_tensor(value: Any, what: str, kind: str | None = None, *, values: bool = True) -> Tensor:
    """A tensor that can be computed with, or an error that says what it is instead.

    Args:
        value: what was given.
        what: its name in an error, such as ``state['0.weight']``.
        kind: of the network's own tensor, see :func:`kind_of`. A real tensor must be real and a complex one complex;
            one that is neither (a counter, a mask) may be of any kind but complex. None: not known, any kind will do.
        values: whether its values are read, which a tensor without storage has not.

    Raises:
        SymmetryError: no tensor, one that is sparse, quantized or without values, or of another kind.
    """
    if not isinstance(value, Tensor):
        own = type(value)
        full = own.__name__ if own.__module__ == "builtins" else f"{own.__module__}.{own.__name__}"
        kept = f" of {value.dtype}" if hasattr(value, "dtype") else ""
        raise SymmetryError(f"{what} is a {full}{kept}, not a tensor; convert it with torch.as_tensor(...)")
    if value.layout != torch.strided or value.is_quantized:
        how = "dequantize" if value.is_quantized else "to_dense"
        raise SymmetryError(
            f"{what} is a {value.dtype} tensor of layout {value.layout}, and only dense tensors can be used; "
            f"convert it with .{how}()"
        )
    if values and value.is_meta:
        raise SymmetryError(f"{what} is on the meta device, where tensors have no values; load the weights first")
    found = kind_of(value.dtype)
    if found == kind or (kind is None and found in ("real", "complex", "integer", "boolean")):
        return value
    if kind in ("integer", "boolean") and found in ("integer", "boolean", "real"):
        return value
    wanted = {None: "a tensor of real numbers", "real": "real floating-point numbers", "complex": "complex numbers"}
    advice = {
        "integer": "integer checkpoints hold quantized weights: dequantize them, or convert with .float()",
        "boolean": "a mask is no weight; pass the weights themselves",
        "complex": "pass its real part (.real) if the imaginary part is zero",
        "real": "convert it with .to(torch.complex64) if it was meant",
    }
    raise SymmetryError(
        f"{what} is of {value.dtype}, but the network's own tensor holds {wanted.get(kind, f'{kind} numbers')}; "
        + advice.get(found, "convert it with .float()")
    )


def require_state(state: Any, name: str, like: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
    """A state dict of tensors, or an error that says what it is instead.

    Args:
        state: what was given.
        name: what to call it in an error.
        like: a state of the same network, such as ``model.state_dict()``; tensors must be of its tensors' kinds.

    Raises:
        TypeError: not a mapping of names to tensors.
        SymmetryError: values that are no tensors, or of another kind than the network's.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} is a {type(state).__name__}, not a state dict; for a module pass module.state_dict()")
    for key, value in state.items():
        known = like is not None and isinstance(like.get(key), Tensor)
        check_tensor(value, f"{name}[{key!r}]", kind_of(like[key].dtype) if like is not None and known else None)
    return state


def unstack(states: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]) -> list[State]:
    """A stack with a leading sample axis, or a sequence of states, as a list of states (views).

    Raises:
        TypeError: members that are not state dicts.
        SymmetryError: values that are no tensors.
        ValueError: a dict of tensors without a common leading axis.
    """
    if isinstance(states, Mapping):
        require_state(states, "states")
        counts = {name: t.shape[0] if t.ndim else None for name, t in states.items()}
        if not counts or None in counts.values() or len(set(counts.values())) != 1:
            raise ValueError(
                f"a stack of states needs the same leading sample axis on every tensor, got leading sizes {counts}; "
                "pass a list of state dicts, or stack them with torch.stack for each name"
            )
        count = next(iter(counts.values()))
        assert count is not None
        return [{name: t[k] for name, t in states.items()} for k in range(count)]
    if not isinstance(states, Iterable):
        raise TypeError(f"states is a {type(states).__name__}, not a list of state dicts or a stack of states")
    return [dict(require_state(s, f"states[{k}]")) for k, s in enumerate(states)]
