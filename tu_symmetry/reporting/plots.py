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
    """Panels ``[rows, columns]`` of so many inches in the common style, written as PNG to ``path`` at the end."""
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(width * columns, height * rows))  # of no window system, whatever backend is in use
        yield made.subplots(rows, columns, squeeze=False, **options)
        made.savefig(path)


def band(ax: Axes, x: Sequence[float], runs: Any, color: str, label: str | None, **style: Any) -> None:
    """Mean over runs ``[runs, points]`` with plus and minus one standard deviation shaded."""
    values = np.asarray(runs, dtype=float)
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    ax.plot(x, mean, color=color, label=label, **style)
    if len(values) > 1:
        ax.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)


def interpolation(ax: Axes, ratios: Sequence[float], lines: Mapping[str, Any], *, ylabel: str, title: str) -> None:
    """Losses along lines between networks for each label, from the lines' ``barrier`` and ``loss`` (one for each)."""
    colors = (GRAY, BLUE) if len(lines) == 2 else COLORS  # of two, the first is the one before
    for color, (label, found) in zip(colors, lines.items(), strict=False):
        barrier = sum(found["barrier"]) / len(found["barrier"])
        band(ax, ratios, found["loss"], color, f"{label} (barrier {barrier:.3g})")
    ax.set(xlabel=r"interpolation $\lambda$", ylabel=ylabel, title=title, xlim=(0, 1))
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top + 0.3 * (top - bottom))
    ax.legend(loc="upper left")
