"""Axes for plots of metrics, by torchmetrics' convention: given ones are drawn on, else a figure is made."""

from __future__ import annotations

from typing import Any


def new_axes(ax: Any) -> tuple[Any, Any]:
    """Figure and axes: those given, or new ones (without a display where there is none)."""
    from matplotlib import pyplot as plt

    if ax is not None:
        return ax.figure, ax
    return plt.subplots()
