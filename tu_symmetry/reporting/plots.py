"""The figures of the reports, in one plain style, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, GRAY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#777777"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, GRAY)
STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
}


@contextmanager
def figure(path: Path, panels: int, width: float = 3.6, height: float = 2.9) -> Iterator[list[Axes]]:
    """A row of panels in the common style, written as PNG to ``path`` at the end."""
    with grid(path, 1, panels, width, height) as axes:
        yield list(axes[0])


@contextmanager
def grid(path: Path, rows: int, columns: int, width: float, height: float, **options: Any) -> Iterator[Any]:
    """Rows of panels in the common style (``[rows, columns]``), written as PNG to ``path`` at the end.

    Args:
        path: of the PNG.
        rows: of panels.
        columns: of panels.
        width: of a panel, in inches.
        height: of a panel, in inches.
        options: of ``Figure.subplots`` (``sharex``, ...).
    """
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(width * columns, height * rows))  # of no window system, whatever backend is in use
        yield made.subplots(rows, columns, squeeze=False, **options)
        made.savefig(path)


def band(axes: Axes, x: Sequence[float], runs: Any, color: str, label: str | None, **style: Any) -> None:
    """Mean over runs ``[runs, points]`` with plus and minus one standard deviation shaded."""
    values = np.asarray(runs, dtype=float)
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    axes.plot(x, mean, color=color, label=label, **style)
    if len(values) > 1:
        axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)


def pruning(path: Path, keep: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """Accuracy against the share of weights that is kept, those of lowest sigma first (arXiv 2401.00611, Figure 5)."""
    panels = {
        "samples": "Samples, own σ",
        "ensemble mean": "Mean of the ensemble's $q_r$",
        "single networks": "Single networks",
    }
    colors = {"HMC": ORANGE, "ensemble": BLUE, "VI": GREEN, "own σ": BLUE, "HMC's σ": ORANGE, "VI's σ": GREEN}
    with figure(path, 3) as axes:
        removed = [100 * (1 - k) for k in keep]
        for ax, (kind, title) in zip(axes, panels.items(), strict=True):
            for name, values in curves.items():
                head, _, order = name.partition(", ")
                if not (head == kind or (kind == "samples" and head.endswith(" samples"))):
                    continue
                label = head.removesuffix(" samples") if kind == "samples" else order
                control = order == "random order"
                line, mark = (":", "") if control else ("-", "o")
                color = GRAY if control else colors[label]
                ax.plot(removed, [100 * v for v in values], label=label, color=color, linestyle=line, marker=mark)
            ax.set(title=title, xlabel="weights pruned (%)", ylabel="test accuracy (%)", ylim=(0, 101), xlim=(-2, 101))
            ax.legend(loc="lower left")


def transpositions(path: Path, initial: Sequence[float], panels: Mapping[str, Any], walk: Mapping[str, Any]) -> None:
    """Figure 3 of arXiv 2401.00611: after training against the initial NoT, and NoT along the interpolation.

    Args:
        path: of the PNG.
        initial: NoT applied to the initialization, ``[k]``.
        panels: ``transpositions``, ``distance`` and ``distance_unmatched``, ``barrier`` and ``barrier_unmatched``,
            each ``[runs, k]``.
        walk: ``ratios`` ``[m]`` and ``transpositions`` ``[runs, m]``.
    """
    with figure(path, 4, width=3.1) as axes:
        largest = max(initial)
        axes[0].plot([0, largest], [0, largest], color=GRAY, linestyle=":", label="unchanged")
        band(axes[0], initial, panels["transpositions"], BLUE, "found by matching")
        axes[0].set(title="NoT after training", xlabel="NoT at initialization", ylabel="NoT")
        for ax, key, title, unit in (
            (axes[1], "distance", "Weight distance", "$\\|W_0 - W_1\\|_2^2$"),
            (axes[2], "barrier", "Loss barrier", "training loss (nats)"),
        ):
            band(ax, initial, panels[f"{key}_unmatched"], GRAY, "before matching")
            band(ax, initial, panels[key], BLUE, "after matching")
            ax.set(title=title, xlabel="NoT at initialization", ylabel=unit)
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
        band(axes[3], walk["ratios"], walk["transpositions"], BLUE, None)
        axes[3].set(
            title="NoT along the interpolation", xlabel=r"interpolation $\lambda$", ylabel="NoT to $W_0$", xlim=(0, 1)
        )
        for ax in axes[:3]:
            ax.legend(loc="best")
