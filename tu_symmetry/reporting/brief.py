"""Results that hold many tensors, as one line in a console and as a small table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence


class Brief:
    """Shows :meth:`facts` where Python would print every number of every tensor."""

    def facts(self) -> list[tuple[str, str]]:
        """What is worth seeing at a glance: names and short texts."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {text}' for name, text in self.facts())})"

    def _repr_html_(self) -> str:
        """For notebooks: a table with a line for each fact."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self.facts()
        )
        return f"<table><caption>{html.escape(type(self).__name__)}</caption>{rows}</table>"


def change(before: float, after: float) -> str:
    """``12.3 -> 4.56``."""
    return f"{before:.4g} -> {after:.4g}"


def span(values: Sequence[float]) -> str:
    """The mean of some numbers, and their range where they differ: ``3.5 (2 to 5)``."""
    if not values:
        return "none"
    mean = f"{sum(values) / len(values):.4g}"
    return mean if min(values) == max(values) else f"{mean} ({min(values):.4g} to {max(values):.4g})"
