"""The report of predictive bands in one dimension."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tu_symmetry.experiments.linearized_laplace.choices import Choice
from tu_symmetry.experiments.linearized_laplace.reports.cells import OPEN, marks
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report


def report_bands(out: Path, recipe: str, bands: Path) -> Outcome:
    """Write ``report.md`` with the figure of bands and a table of what was chosen.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        bands: folder of :func:`~tu_symmetry.experiments.linearized_laplace.compute_bands`.
    """
    report, found = Report(out, recipe), Outcome.load(bands).results
    report.add(bands_table(found["rows"], report.table.title), heading=False)
    report.figure("bands", draw_bands, found)
    return report.done()


def band_title(name: str) -> str:
    """What the report calls a band: by a precision, or by a choice."""
    return f"λ = {name}" if "/" not in name else Choice.parse(name).title


def bands_table(rows: Mapping[str, Mapping[str, Any]], title: str) -> Grid:
    """Precisions, test likelihood and spread of every band."""
    header = ["", "λ (effective directions)", "test NLL", "covered", "spread on data", "spread in gap"]
    body = []
    for name, row in rows.items():
        groups = row["groups"].values()
        chosen = ", ".join(
            f"{g['precision']:.3g} ({g['gamma']:.1f}{', pruned' if g['pruned'] else ''})" for g in groups
        )
        numbers = [f"{row['nll']:.3f}", f"{100 * row['coverage']:.1f} %", f"{row['inside']:.3g}", f"{row['gap']:.3g}"]
        body.append([band_title(name), chosen, *(number + marks([row]) for number in numbers)])
    caption = (
        "Several λ: first layer, second layer, last layer. NLL in nats; covered: targets within the 95 % band (with "
        "noise); spread: epistemic standard deviation, root mean square over the test inputs and in the middle of the "
        "gap. M(θ~): evidence at the trained weights; M(θ*): at the joint stationary point (Recommendation 1). "
        f"{OPEN}: the evidence had not converged, so that the number is no result."
    )
    return Grid(title, header, body, caption)


def draw_bands(path: Path, found: Mapping[str, Any]) -> None:
    """The bands in two rows: precisions set by hand, precisions chosen by the evidence.

    Args:
        path: the path of the PNG.
        found: results of :func:`~tu_symmetry.experiments.linearized_laplace.compute_bands`.
    """
    rows = found["rows"]
    fixed = [name for name in rows if "/" not in name]
    chosen = [name for name in rows if "/" in name]
    width = max(len(fixed), len(chosen))
    grid = torch.tensor(found["grid"], device="cpu").numpy()
    with plots.grid(path, 2, width, 2.6, 2.4, sharex=True, sharey=True) as axes:
        for line, names, color in zip(axes, (fixed, chosen), (plots.GRAY, plots.BLUE), strict=True):
            for ax in line[len(names) :]:
                ax.set_visible(False)
            for ax, name in zip(line, names, strict=False):
                mean, spread = (torch.tensor(rows[name][key], device="cpu").numpy() for key in ("mean", "epistemic"))
                for times, alpha in ((1, 0.3), (2, 0.15)):
                    low, high = mean - times * spread, mean + times * spread
                    ax.fill_between(grid, low, high, color=color, alpha=alpha, linewidth=0)
                ax.plot(grid, mean, color=color)
                ax.plot(found["train_x"], found["train_y"], linestyle="", marker=".", color="black", markersize=2.5)
                ax.set_title(band_title(name).replace("θ~", r"$\tilde\theta$").replace("θ*", r"$\theta_*$"))
                text = f"test NLL {rows[name]['nll']:.2f}{'' if rows[name]['converged'] else ' (not converged)'}"
                ax.text(0.03, 0.03, text, transform=ax.transAxes, fontsize=8)
        axes[0, 0].set(ylim=(-4, 4), xlim=(float(grid[0]), float(grid[-1])))
