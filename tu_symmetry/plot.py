"""Figures of what the library measures; each function returns ``(figure, axes)``, and draws on axes that are given.

Matplotlib is imported when a figure is drawn, and its backend stays as it is.
"""

from __future__ import annotations

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


def bands(
    x: Sequence[float], runs: Mapping[str, Any], *, xlabel: str = "", ylabel: str = "", title: str = "", ax: Any = None
) -> Drawn:
    """Means of ``[runs, points]`` (or ``[points]``) with plus and minus one standard deviation over runs shaded."""
    from tu_symmetry.reporting.plots import COLORS, band

    figure, axes = new_axes(ax)
    for k, (label, values) in enumerate(runs.items()):
        band(axes, x, np.atleast_2d(_array(values, flat=False)), COLORS[k % len(COLORS)], label)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if runs:
        axes.legend(loc="best")
    return figure, axes


def interpolation(lines: Mapping[str, Any], *, ylabel: str = "loss", title: str = "", ax: Any = None) -> Drawn:
    """The loss along one or several lines of :func:`~tu_symmetry.loss_barrier` for each label, with the mean barriers.

    Raises:
        ValueError: no lines, or lines of different points.
    """
    from tu_symmetry.reporting.plots import band

    figure, axes = new_axes(ax)
    colors = _colors(len(lines))
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

    There is a panel for each title of ``{"before": values, "after": values}``: arrays, tensors, or states of tensors
    (``CompactPosterior.std``), whose entries are taken together.
    """
    figure, axes = new_axes(ax, len(sigmas), width=3.6, height=2.9)
    for one, (title, pair) in zip(np.atleast_1d(axes), sigmas.items(), strict=True):
        values = {name: _array(found) for name, found in pair.items()}
        top = max(float(np.quantile(s, 0.998)) for s in values.values())
        bins = np.linspace(0, top or 1.0, 60).tolist()
        for (name, found), color, symbol in zip(values.items(), _colors(2), ("d", "r"), strict=False):
            label = rf"$\sigma_{symbol}$, {name} (median {np.median(found):.2g})"
            one.hist(found, bins=bins, color=color, alpha=0.55, label=label, density=True)
            one.axvline(float(np.median(found)), color=color, linewidth=1, linestyle=(0, (3, 2)))
        one.set(title=title, xlabel="standard deviation of a weight", ylabel="density", xlim=(0, top or 1.0))
        one.set_ylim(0, one.get_ylim()[1] * 1.25)
        one.legend(loc="upper right")
    return figure, axes


def bars(
    values: Mapping[str, Sequence[float]], names: Sequence[str], *, ylabel: str = "", log: bool = False, ax: Any = None
) -> Drawn:
    """One bar for each name and label, side by side: masses of layers, precisions of groups."""
    figure, axes = new_axes(ax, width=min(max(4.6, 0.25 * len(names)), 24))
    colors = _colors(len(values))
    wide = 0.8 / max(len(values), 1)
    for k, (label, numbers) in enumerate(values.items()):
        at = [i + (k - (len(values) - 1) / 2) * wide for i in range(len(names))]
        axes.bar(at, list(numbers), wide, color=colors[k % len(colors)], label=label)
    axes.set_xticks(range(len(names)), list(names), rotation=90 if len(names) > 4 else 0)
    axes.set(ylabel=ylabel, yscale="log" if log else "linear")
    axes.legend(loc="best")
    return figure, axes


def _colors(labels: int) -> Sequence[str]:
    """Gray and blue for before and after; else one for each label."""
    from tu_symmetry.reporting.plots import BLUE, COLORS, GRAY

    return (GRAY, BLUE) if labels == 2 else COLORS


def _array(values: Any, *, flat: bool = True) -> NDArray[np.float64]:
    """Numbers as an array; the entries of a state's tensors together."""
    if isinstance(values, Mapping):
        return np.concatenate([_array(v) for v in values.values()])
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    made: NDArray[np.float64] = np.asarray(values, dtype=float)
    return made.reshape(-1) if flat else made
