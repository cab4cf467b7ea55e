"""Networks as a list of state dicts, whatever form they come in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

State = dict[str, Tensor]


def unstack(states: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]) -> list[State]:
    """A stack with a leading sample axis, or a sequence of states, as a list of states (views).

    Raises:
        TypeError: members that are not state dicts.
        ValueError: a dict of tensors without a common leading axis.
    """
    if isinstance(states, Mapping):
        counts = {name: t.shape[0] if t.ndim else None for name, t in states.items()}
        if not counts or None in counts.values() or len(set(counts.values())) != 1:
            raise ValueError(
                f"a stack of states needs the same leading sample axis on every tensor, got leading sizes {counts}; "
                "pass a list of state dicts, or stack them with torch.stack for each name"
            )
        count = next(iter(counts.values()))
        assert count is not None
        return [{name: t[k] for name, t in states.items()} for k in range(count)]
    return [dict(require_state(s, f"states[{k}]")) for k, s in enumerate(states)]


def require_state(state: Any, name: str) -> Mapping[str, Tensor]:
    """A state dict, or an error that says what it is instead.

    Raises:
        TypeError: not a mapping of names to tensors.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} is a {type(state).__name__}, not a state dict; for a module pass module.state_dict()")
    return state
