"""Results that hold many tensors, as one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class Brief:
    """Shows :meth:`facts` where Python would print every number of every tensor."""

    def facts(self) -> list[tuple[str, str]]:
        """What is worth seeing at a glance: names and short texts."""
        return [(name.replace("_", " "), shorten(value)) for name, value in vars(self).items()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {text}' for name, text in self.facts())})"


def shorten(value: Any) -> str:
    """A number, a word, the mean and the range of numbers, or how many entries there are."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) and not any(isinstance(v, Tensor) for v in value.values()):
        return ", ".join(f"{key} {shorten(v)}" for key, v in value.items()) or "none"
    if isinstance(value, Sequence) and value and all(isinstance(v, (int, float)) for v in value):
        low, high = min(value), max(value)
        mean = shorten(sum(value) / len(value))
        return mean if low == high else f"{mean} ({shorten(float(low))} to {shorten(float(high))})"
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, str):
        return f"{len(value)} entries"
    return str(value)
