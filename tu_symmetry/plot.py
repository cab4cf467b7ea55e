"""Figures of what the library measures; each function returns ``(figure, axes)``, and draws on axes that are given.

Matplotlib is imported when a figure is drawn, and its backend stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Drawn = tuple[Any, Any]


def new_axes(ax: Any = None, panels: int = 1, *, width: float = 4.6, height: float = 3.4) -> Drawn:
    """Figure and axes in the library's style: those given, or new ones; more than one come as a list.

    Raises:
        ValueError: another number of axes than needed.
    """
    if ax is not None:
        given = list(np.atleast_1d(np.asarray(ax, dtype=object)).flat)
        if len(given) != panels:
            raise ValueError(f"{panels} axes are needed, and {len(given)} were given")
        return given[0].figure, given[0] if panels == 1 else given
    from matplotlib import pyplot as plt

    from tu_symmetry.reporting.plots import STYLE

    with plt.rc_context(STYLE):
        figure, made = plt.subplots(1, panels, figsize=(width * panels, height), squeeze=False)
    return figure, made[0][0] if panels == 1 else list(made[0])


def interpolation(lines: Mapping[str, Any], *, ylabel: str = "loss", title: str = "", ax: Any = None) -> Drawn:
    """The loss along one or several lines of :func:`~tu_symmetry.loss_barrier` for each label, with the mean barriers.

    Raises:
        ValueError: no lines, or lines of different points.
    """
    from tu_symmetry.reporting.plots import BLUE, COLORS, GRAY, band

    figure, axes = new_axes(ax)
    colors = (GRAY, BLUE) if len(lines) == 2 else COLORS  # of two, the first is the one before
    for k, (label, given) in enumerate(lines.items()):
        found = list(given) if isinstance(given, Sequence) else [given]
        if not found or len({tuple(one.ratios) for one in found}) != 1:
            raise ValueError(f"{label!r} holds {len(found)} lines; at least one is needed, all with the same points")
        barrier = sum(one.barrier for one in found) / len(found)
        losses = [one.losses for one in found]
        band(axes, found[0].ratios, losses, colors[k % len(colors)], f"{label} (barrier {barrier:.3g})")
    axes.set(xlabel=r"interpolation $\lambda$", ylabel=ylabel, title=title, xlim=(0, 1))
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.3 * (top - bottom))
    axes.legend(loc="upper left")
    return figure, axes


def sigma_histograms(sigmas: Mapping[str, Mapping[str, Any]], *, ax: Any = None) -> Drawn:
    """Distribution of the weights' standard deviations before (sigma_d) and after (sigma_r) symmetries are removed.

    There is a panel for each title of ``{"before": values, "after": values}``, arrays or tensors.
    """
    from tu_symmetry.reporting.plots import BLUE, GRAY

    figure, axes = new_axes(ax, len(sigmas), width=3.6, height=2.9)
    for one, (title, pair) in zip(np.atleast_1d(axes), sigmas.items(), strict=True):
        values = {name: _array(found).reshape(-1) for name, found in pair.items()}
        top = max(float(np.quantile(s, 0.998)) for s in values.values())
        bins = np.linspace(0, top or 1.0, 60).tolist()
        for (name, found), color, symbol in zip(values.items(), (GRAY, BLUE), ("d", "r"), strict=False):
            label = rf"$\sigma_{symbol}$, {name} (median {np.median(found):.2g})"
            one.hist(found, bins=bins, color=color, alpha=0.55, label=label, density=True)
            one.axvline(float(np.median(found)), color=color, linewidth=1, linestyle=(0, (3, 2)))
        one.set(title=title, xlabel="standard deviation of a weight", ylabel="density", xlim=(0, top or 1.0))
        one.set_ylim(0, one.get_ylim()[1] * 1.25)
        one.legend(loc="upper right")
    return figure, axes


def barriers(
    matrices: Mapping[str, Any], *, label: str = "barrier", names: Sequence[str] | None = None, ax: Any = None
) -> Drawn:
    """Barriers between pairs of networks, ``[n, n]`` with NaN where nothing was measured, as colors of one scale.

    Raises:
        ValueError: no square matrices.
    """
    values = {title: _array(found) for title, found in matrices.items()}
    if not values or any(v.ndim != 2 or v.shape[0] != v.shape[1] for v in values.values()):
        raise ValueError(f"barriers need square matrices, got {[v.shape for v in values.values()]}")
    figure, axes = new_axes(ax, len(values), width=3.4, height=3.0)
    largest = max(float(v[np.isfinite(v)].max(initial=0.0)) for v in values.values())
    for one, (title, matrix) in zip(np.atleast_1d(axes), values.items(), strict=True):
        image = one.imshow(matrix, vmin=0, vmax=largest or 1.0, cmap="viridis")
        one.set_facecolor("#dddddd")
        shown = names or [str(k) for k in range(len(matrix))]
        ticks = list(range(0, len(matrix), math.ceil(len(matrix) / 10)))
        for axis in (one.xaxis, one.yaxis):
            axis.set_ticks(ticks, [shown[k] for k in ticks])
        one.set(title=title, xlabel="network", ylabel="network")
        one.grid(visible=False)
        figure.colorbar(image, ax=one, shrink=0.8, label=label)
    return figure, axes


def _array(values: Any) -> NDArray[np.float64]:
    """Numbers as an array, also those of a tensor on a device or in half precision."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=float)
