"""Figures of what the library measures; each function returns ``(figure, axes)``, and draws on axes that are given.

::

    tus.plot.interpolation({"as given": merged.lines["naive"], "aligned": merged.lines["aligned"]})
    tus.plot.sigma_histograms({"ensemble": {"before": q_d.std, "after": q_r.std}})
    tus.plot.group_graph(graph)

Matplotlib is imported when a figure is drawn, and its backend stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tu_symmetry.symmetry.drawing import lay_out

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph

Drawn = tuple[Any, Any]
_BEFORE_AFTER = 2


def new_axes(ax: Any = None, panels: int = 1, *, width: float = 4.6, height: float = 3.4) -> Drawn:
    """Figure and axes in the library's style: those given, or new ones (without a display where there is none).

    Args:
        ax: axes, or a sequence of them; None for new ones.
        panels: number of axes that are needed; more than one come as a list.
        width: the width of a new panel, in inches.
        height: the height of a new panel, in inches.

    Raises:
        ValueError: another number of axes than needed.
    """
    given = [] if ax is None else list(np.atleast_1d(np.asarray(ax, dtype=object)).flat)
    if ax is not None:
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
    """Means over runs with plus and minus one standard deviation shaded.

    Args:
        x: ``[points]``.
        runs: label to values ``[runs, points]``, or ``[points]`` for one run.
        xlabel: label of the horizontal axis.
        ylabel: label of the vertical axis.
        title: the title of the axes.
        ax: axes to draw on.
    """
    from tu_symmetry.reporting.plots import COLORS, band

    figure, axes = new_axes(ax)
    for k, (label, values) in enumerate(runs.items()):
        band(axes, x, np.atleast_2d(_array(values, flat=False)), COLORS[k % len(COLORS)], label)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if runs:
        axes.legend(loc="best")
    return figure, axes


def interpolation(
    lines: Mapping[str, Any], *, ylabel: str = "loss", title: str = "", colors: Sequence[str] = (), ax: Any = None
) -> Drawn:
    """The loss along the lines between networks, with the largest excess over the chord in the legend.

    Args:
        lines: label to what :func:`~tu_symmetry.loss_barrier` returns, one or several.
        ylabel: label of the vertical axis.
        title: the title of the axes.
        colors: the colors of the labels, in turn.
        ax: axes to draw on.

    Raises:
        ValueError: no lines, or lines of different points.
    """
    from tu_symmetry.reporting.plots import band

    figure, axes = new_axes(ax)
    usual = _colors(len(lines))
    for k, (label, given) in enumerate(lines.items()):
        found = list(given) if isinstance(given, Sequence) else [given]
        if not found or len({tuple(one.ratios) for one in found}) != 1:
            raise ValueError(f"{label!r} holds {len(found)} lines; at least one is needed, all with the same points")
        barrier = sum(one.barrier for one in found) / len(found)
        color = (colors or usual)[k % len(colors or usual)]
        band(axes, found[0].ratios, [one.losses for one in found], color, f"{label} (barrier {barrier:.3g})")
    axes.set(xlabel=r"interpolation $\lambda$", ylabel=ylabel, title=title, xlim=(0, 1))
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.3 * (top - bottom))
    axes.legend(loc="upper left")
    return figure, axes


def sigma_histograms(sigmas: Mapping[str, Mapping[str, Any]], *, ax: Any = None) -> Drawn:
    """Distribution of the weights' standard deviations before (sigma_d) and after (sigma_r) symmetries are removed.

    Args:
        sigmas: title of a panel to ``{"before": values, "after": values}``: arrays, tensors, or states of tensors
            (``CompactPosterior.std``), whose entries are taken together.
        ax: axes to draw on, one for each panel.

    Raises:
        ValueError: nothing to draw.
    """
    from tu_symmetry.reporting.plots import BLUE, GRAY

    if not sigmas:
        raise ValueError("there are no standard deviations to draw")
    figure, axes = new_axes(ax, len(sigmas), width=3.6, height=2.9)
    for one, (title, pair) in zip(axes if len(sigmas) > 1 else [axes], sigmas.items(), strict=True):
        values = {name: _array(found) for name, found in pair.items()}
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


def barriers(matrices: Any, *, label: str = "barrier", names: Sequence[str] | None = None, ax: Any = None) -> Drawn:
    """Barriers between pairs of networks as colors, all panels on one scale.

    Args:
        matrices: what :func:`~tu_symmetry.barrier_matrix` returns (``[n, n]``), or title to matrix for several panels.
        label: the label of the color bar.
        names: the names of the networks; their numbers if left out.
        ax: axes to draw on, one for each matrix.

    Raises:
        ValueError: no square matrices.
    """
    panels = matrices if isinstance(matrices, Mapping) else {"": matrices}
    values = {title: _array(getattr(found, "barriers", found), flat=False) for title, found in panels.items()}
    if not values or any(v.ndim != 2 or v.shape[0] != v.shape[1] for v in values.values()):
        raise ValueError(f"barriers need square matrices, got {[v.shape for v in values.values()]}")
    figure, axes = new_axes(ax, len(values), width=3.4, height=3.0)
    largest = max((float(v[np.isfinite(v)].max(initial=0.0)) for v in values.values()), default=0.0)
    for one, (title, matrix) in zip(axes if len(values) > 1 else [axes], values.items(), strict=True):
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


def marginals(samples: Mapping[str, Any], *, bins: int = 40, title: str = "", ax: Any = None) -> Drawn:
    """Histograms of the marginal of a weight (or of the pooled marginals of several), one for each label.

    Args:
        samples: label to samples, arrays or tensors of any shape, whose entries are taken together.
        bins: number of bins, which all labels share.
        title: the title of the axes.
        ax: axes to draw on.

    Raises:
        ValueError: no samples.
    """
    values = {label: _array(found) for label, found in samples.items()}
    if not values or any(v.size == 0 for v in values.values()):
        raise ValueError("a marginal needs at least one sample for each label")
    figure, axes = new_axes(ax)
    edges = np.histogram_bin_edges(np.concatenate(list(values.values())), bins=bins).tolist()
    usual = _colors(len(values))
    for k, (label, found) in enumerate(values.items()):
        axes.hist(found, bins=edges, density=True, alpha=0.55, color=usual[k % len(usual)], label=label)
    axes.set(xlabel="weight", ylabel="density", title=title)
    axes.legend(loc="best")
    return figure, axes


def bars(
    values: Mapping[str, Sequence[float]], names: Sequence[str], *, ylabel: str = "", log: bool = False, ax: Any = None
) -> Drawn:
    """One bar for each name and label, side by side: masses of layers, precisions of groups.

    Args:
        values: label to one number for each name.
        names: under the bars.
        ylabel: label of the vertical axis.
        log: whether that axis is logarithmic.
        ax: axes to draw on.
    """
    figure, axes = new_axes(ax, width=min(max(4.6, 0.25 * len(names)), 24))
    usual = _colors(len(values))
    wide = 0.8 / max(len(values), 1)
    for k, (label, numbers) in enumerate(values.items()):
        at = [i + (k - (len(values) - 1) / 2) * wide for i in range(len(names))]
        axes.bar(at, list(numbers), wide, color=usual[k % len(usual)], label=label)
    axes.set_xticks(range(len(names)), list(names), rotation=90 if len(names) > 4 else 0)
    axes.set(ylabel=ylabel, yscale="log" if log else "linear")
    axes.legend(loc="best")
    return figure, axes


def group_graph(graph: SymmetryGraph, *, ax: Any = None) -> Drawn:
    """The network with its groups, as ``graph.to_html`` draws it: layers as boxes, groups as lines that branch to them.

    A dot: the group moves what the layer makes; a ring: it moves what the layer reads. Solid lines are permutations,
    thin ones permutations within blocks, dashed ones positive scales, dotted ones normalizations.

    Args:
        graph: the symmetry graph.
        ax: axes to draw on.
    """
    from matplotlib.colors import hsv_to_rgb

    layout = lay_out(graph)
    box, spacing = 240.0, 12.0
    width = box + 30 + spacing * layout.columns + 200
    figure, axes = new_axes(ax, width=width / 75, height=max(layout.height, 60) / 75)
    for layer in layout.layers:
        axes.add_patch(_box(layer.top, layer.height, box))
        middle = layer.top + layer.height / 2
        axes.text(6, middle, layer.name[-30:], va="center", fontsize=7, family="monospace")
        axes.text(
            box - 6, middle, "×".join(map(str, layer.shape)), va="center", ha="right", fontsize=6, color="#666666"
        )
    styles = {"permutation": ("-", 1.8), "nested": ("-", 0.8), "scale": ("--", 1.1), "normalization": (":", 1.1)}
    labels = box + 20 + spacing * layout.columns
    for lane in layout.lanes:
        color = tuple(hsv_to_rgb((lane.hue / 360, 0.8, 0.75)))
        style, thick = styles[lane.kind]
        x = box + 14 + spacing * lane.column
        axes.plot([x, x], [lane.branches[0].y, lane.branches[-1].y], style, color=color, linewidth=thick)
        for branch in lane.branches:
            axes.plot([box, x], [branch.y, branch.y], style, color=color, linewidth=thick)
            if branch.makes:
                axes.plot([x], [branch.y], "o", color=color, markersize=3.5)
            if branch.reads:
                at = box if branch.makes else x
                axes.plot([at], [branch.y], "o", color=color, markersize=3.5, markerfacecolor="white")
        kind = "" if lane.kind == "permutation" else f" {lane.kind}"
        axes.text(
            labels,
            lane.branches[0].y,
            f"{lane.name} {lane.size}{kind}",
            color=color,
            va="center",
            fontsize=7,
            family="monospace",
        )
    axes.set(xlim=(-2, width), ylim=(layout.height + 4, -8))
    axes.axis("off")
    return figure, axes


def _colors(labels: int) -> Sequence[str]:
    from tu_symmetry.reporting.plots import BLUE, COLORS, GRAY

    return (GRAY, BLUE) if labels == _BEFORE_AFTER else COLORS


def _box(top: float, height: float, width: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((0, top), width, height, facecolor="#f4f4f2", edgecolor="#8a8a86", linewidth=0.8)


def _array(values: Any, *, flat: bool = True) -> NDArray[np.float64]:
    """Numbers as an array; the entries of a state's tensors together."""
    if isinstance(values, Mapping):
        parts = [_array(v).reshape(-1) for v in values.values()]
        return np.concatenate(parts) if parts else np.empty(0)
    made: NDArray[np.float64] = np.asarray(
        values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values, dtype=float
    )
    return made.reshape(-1) if flat else made
