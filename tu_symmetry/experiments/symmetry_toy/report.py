"""The report: four panels of the last layer's weights, and the numbers of the collapse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.colors import LogNorm
from torch import Tensor

from tu_symmetry.experiments.symmetry_toy.removal import FORMS
from tu_symmetry.files import read_tensors
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

PANELS = {"raw": "Raw", "scaled": "Scaled", "sorted": "Sorted", "both": "Scaled and sorted"}
ROWS = {
    "raw": "raw",
    "scaled": "scaled",
    "sorted": "sorted",
    "both": "scaled and sorted",
    "least": "least mass",
    "cost": "least mass and sorted",
}


def report(out: Path, recipe: str, removal: Path) -> Outcome:
    """Write ``report.md`` with the four panels and the numbers of the collapse.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        removal: folder of :func:`~tu_symmetry.experiments.symmetry_toy.remove`.
    """
    report, forms = Report(out, recipe), read_tensors(removal / FORMS)
    report.add(collapse_table(Outcome.load(removal).results, report.table.title), heading=False)
    report.figure("posterior", draw, {k: forms[f"{k}/output.weight"][:, 0] for k in PANELS})
    return report.done()


def collapse_table(found: Mapping[str, Any], title: str) -> Grid:
    """Variances and modes of every form."""
    rows = []
    for name, label in ROWS.items():
        form = found["forms"][name]
        cells = [f"{form['variance']:.3g}", f"{form['relative_variance']:.4f}"]
        rows.append([label, *cells, str(form["modes"]), f"{100 * form['in_modes']:.1f}"])
    caption = (
        f"{found['kept']} of {found['trained']} networks fit; all forms of a network agree in their outputs to "
        f"{found['output_error']:.0e}. Variance: sum of the marginal variances of all weights; relative: over the "
        "mean squared norm."
    )
    return Grid(title, ["", "variance", "relative", "modes", "in modes (%)"], rows, caption)


def draw(path: Path, points: Mapping[str, Tensor]) -> None:
    """Four panels of the last layer's weights, on a common logarithmic color scale of counts.

    Args:
        path: the path of the PNG.
        points: panel to ``[samples, 2]``.
    """
    limit = 1.05 * max(float(p.abs().quantile(0.998)) for p in points.values())
    with plots.figure(path, len(points), width=2.9, height=3.1) as axes:
        for ax, (name, values) in zip(axes, points.items(), strict=True):
            _, _, _, image = ax.hist2d(
                values[:, 0].numpy(),
                values[:, 1].numpy(),
                bins=90,
                range=[[-limit, limit]] * 2,
                norm=LogNorm(1, 1000),
                cmap="viridis",
                rasterized=True,
            )
            ax.axhline(0, color=plots.GRAY, linewidth=0.5)
            ax.axvline(0, color=plots.GRAY, linewidth=0.5)
            ax.set(title=PANELS[name], xlabel="output weight of unit 1", aspect="equal")
        axes[0].set_ylabel("output weight of unit 2")
        axes[-1].figure.colorbar(image, ax=axes[-1], label="networks in a bin", shrink=0.8)
