"""The report of images that are turned more and more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tu_symmetry.experiments.linearized_laplace.choices import NETWORK, Choice
from tu_symmetry.experiments.linearized_laplace.reports.cells import (
    COLORS,
    OPEN_CAPTION,
    cell,
    marks,
    title_of,
)
from tu_symmetry.experiments.linearized_laplace.shift import CALIBRATED
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, mean_and_error
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

SHIFTED = {"nll": "NLL", "ece": "ECE"}


def report_rotations(out: Path, recipe: str, rotations: Path) -> Outcome:
    """Write ``report.md`` and ``rotations.png``.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        rotations: folder of :func:`~tu_symmetry.experiments.linearized_laplace.measure_rotations`.
    """
    report, found = Report(out, recipe), Outcome.load(rotations).results
    sizes = ", ".join(f"{count:,} {name}" for name, count in found["sizes"].items())
    report.add(f"{len(found['rows'][NETWORK])} networks of {found['parameters']:,} parameters; images: {sizes}.")
    report.figure("rotations", draw_rotations, found, alt="NLL and ECE by angle")
    report.add(*(_by_angle(found, column) for column in ("nll", "ece", "accuracy")), _against_network(found))
    return report.done()


def shift_title(key: str) -> str:
    """What the report calls a row of rotated images."""
    plain = key.removesuffix(CALIBRATED)
    return title_of(plain) + (", calibrated" if plain != key else "")


def _by_angle(found: Mapping[str, Any], column: str) -> Grid:
    angles = [f"{angle:g}" for angle in found["angles"]]
    scale, digits = (1, 3) if column == "nll" else (100, 1)
    body = []
    for key, runs in found["rows"].items():
        cells = [mean_and_error([scale * run["by_angle"][a][column] for run in runs])[0] for a in angles]
        body.append([shift_title(key), *(f"{value:.{digits}f}{marks(runs)}" for value in cells)])
    name = {"nll": "Test NLL (nats)", "ece": "Expected calibration error (%)", "accuracy": "Accuracy (%)"}[column]
    caption = (
        "means over networks; columns: degrees by which the test images are turned. calibrated: the temperature of the "
        f"posterior chosen on validation images that are not turned. {OPEN_CAPTION}"
    )
    return Grid(f"{name} by angle", ["", *(f"{a}°" for a in angles)], body, caption)


def _against_network(found: Mapping[str, Any]) -> Grid:
    """By how much each row is better or worse than the networks: unturned, and on average over all turned images."""
    rows, angles = found["rows"], [f"{angle:g}" for angle in found["angles"]]
    turned = [a for a in angles if float(a) != 0]
    body = []
    for key, runs in rows.items():
        if key == NETWORK:
            continue
        cells = []
        for column, scale, digits in (("nll", 1, 3), ("ece", 100, 1)):
            for some in ([a for a in angles if a not in turned], turned):
                if not some:
                    cells.append("–")
                    continue
                values = [
                    scale * sum(run["by_angle"][a][column] - own["by_angle"][a][column] for a in some) / len(some)
                    for run, own in zip(runs, rows[NETWORK], strict=True)
                ]
                cells.append(cell(values, digits, sign="+") + marks(runs))
        temperatures = [run["temperature"] for run in runs if "temperature" in run]
        cells.append(" / ".join(f"{t:.2g}" for t in temperatures) or "1")
        body.append([shift_title(key), *cells])
    header = ["", "NLL\nnot turned", "NLL\nturned", "ECE %\nnot turned", "ECE %\nturned", "temperature"]
    caption = (
        "difference to the networks themselves, mean ± standard error over networks; negative helps. turned: mean over "
        f"all angles but 0. {OPEN_CAPTION}"
    )
    return Grid("Laplace instead of the network", header, body, caption)


def draw_rotations(path: Path, found: Mapping[str, Any]) -> None:
    """NLL and ECE against the angle: networks in gray, Laplace by the evidence in color, calibrated dashed."""
    angles = found["angles"]
    with plots.figure(path, len(SHIFTED), width=4.6, height=3.4) as axes:
        for ax, (column, name) in zip(axes, SHIFTED.items(), strict=True):
            for key, runs in found["rows"].items():
                plain = key.removesuffix(CALIBRATED)
                choice = None if key == NETWORK else Choice.parse(plain)
                color = plots.GRAY if choice is None else COLORS[choice.where]
                values = [[run["by_angle"][f"{a:g}"][column] for run in runs] for a in angles]
                ax.plot(
                    angles,
                    [mean_and_error(own)[0] for own in values],
                    color=color,
                    marker="s" if choice is not None and choice.prior == "single" else "o",
                    linestyle=(0, (2, 2)) if plain != key else "-",
                    label=shift_title(key).replace("θ~", r"$\tilde\theta$").replace("θ*", r"$\theta_*$") + marks(runs),
                )
            ax.set(title=name, xlabel="rotation of the test images (degrees)", xticks=angles)
            ax.set_ylim(bottom=0)
        axes[0].set_ylabel("nats, mean over networks")
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=6)
