"""The report of the main table: numbers with intervals, controls, claims and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tu_symmetry.experiments.symmetry_aware.claims import answers
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.commands import CommandTable, load_table
from tu_symmetry.tables.library import find_recipe
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import write_report

COLUMNS = {
    "mmd": "MMD ↓",
    "ns": "NS ↓",
    "accuracy": "Acc % ↑",
    "ece": "ECE % ↓",
    "ace": "ACE % ↓",
    "brier": "Brier % ↓",
    "aupr": "AUPR % ↑",
    "fpr95": "FPR95 % ↓",
    "id_mi": "ID MI ↓",
    "ood_mi": "OOD MI ↑",
}
_PERCENT = ("accuracy", "ece", "ace", "brier", "aupr", "fpr95")


def report(out: Path, recipe: str, evaluation: Path) -> Outcome:
    """Write ``report.md`` and its figures from what :func:`evaluate` has left.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title, note, claims and the paper's numbers.
        evaluation: folder of :func:`~tu_symmetry.experiments.symmetry_aware.evaluate`.
    """
    table = load_table(find_recipe(recipe))
    found = Outcome.load(evaluation).results
    grids = [main_table(table, found), control_table(found), mode_table(found), quotient_table(found)]
    if any("agreement" in entries[0] for entries in found["rows"].values()):
        grids.append(trusted_table(found))
    claims = claim_table(table, found)
    out.mkdir(parents=True, exist_ok=True)
    _figures(out, found)
    sections = [f"## {grid.title}\n\n{grid.markdown()}" for grid in (*grids, claims)]
    sections += [
        "## Diversity\n\n![pairwise mutual information](diversity.png)\n\nEach point is a pair of reference networks.",
        "## MMD against NS\n\n![discrepancy](discrepancy.png)",
        "## Marginals\n\n![marginals](marginals.png)\n\nDistribution of the first layer's weights before and after the "
        "paper's removal, one method a panel; dotted: the reference.",
        "## Where a layer's largest weight is\n\n![largest weights](largest.png)\n\nUniform for independent networks.",
    ]
    return Outcome({}, str(write_report(out, table, sections)), [*grids, claims])


def main_table(table: CommandTable, found: Mapping[str, Any]) -> Grid:
    """Every row with its intervals, and the paper's numbers below where there are any."""
    body = []
    for row, entries in found["rows"].items():
        cells = []
        for column in COLUMNS:
            value, low, high = _interval(entries[0], column)
            shown = f"{value} [{low}, {high}]"
            theirs = table.paper.get(column, {}).get(row)
            cells.append(shown if theirs is None else f"{shown}\n{theirs:g}")
        body.append([row, *cells])
    networks = found["networks"]
    first = next(iter(found["rows"].values()))[0]
    caption = (
        f"{networks['row']} networks in each row, {networks['reference']} in the reference; brackets: 95 % bootstrap "
        f"intervals (networks or whole runs for MMD and NS, points for the others). MMD and NS times 100, squared, "
        f"{first['mmd']['aggregation']}; NS: {first['ns']['removed']}. MI in hundredths of a nat."
    )
    return Grid(table.title, ["", *COLUMNS.values()], body, caption)


def control_table(found: Mapping[str, Any]) -> Grid:
    """MMD and NS at equal sizes, with p-values, and NS with this package's removal."""
    columns = {
        "mmd_equal": "MMD, equal sizes",
        "ns_equal": "NS, equal sizes",
        "ns_aligned": "NS, aligned",
        "ns_aligned_equal": "NS, aligned, equal sizes",
    }
    body = [
        [row, *(f"{100 * e[c]['value']:.2f} (p {e[c]['p_value']:.3f})" for e in entries[:1] for c in columns)]
        for row, entries in found["rows"].items()
    ]
    first = next(iter(found["rows"].values()))[0]
    sizes = " and ".join(map(str, first["mmd_equal"]["sizes"]))
    caption = f"times 100; equal sizes: {sizes} networks; aligned: {first['ns_aligned']['removed']}"
    return Grid("Controls of MMD and NS", ["", *columns.values()], body, caption)


def mode_table(found: Mapping[str, Any]) -> Grid:
    """What the choice of the one mode makes of MMD, NS, accuracy and ECE: each run by itself."""
    body = []
    for row, entries in found["rows"].items():
        if len(entries) < 2:
            continue
        cells = [" / ".join(_interval(e, column)[0] for e in entries) for column in ("mmd", "ns", "accuracy", "ece")]
        body.append([row, *cells])
    return Grid("The choice of the mode", ["", *(COLUMNS[c] for c in ("mmd", "ns", "accuracy", "ece"))], body, "by run")


def quotient_table(found: Mapping[str, Any]) -> Grid:
    """Distances on the quotient space."""
    body = []
    for row, entries in found["rows"].items():
        q = entries[0]["quotient"]
        body.append(
            [
                row,
                f"{q['aligned_l2']:.2f}",
                f"{q['within'][0]:.2f}",
                f"{q['energy']:.3f}",
                f"{q['sliced_wasserstein']:.4f}",
            ]
        )
    header = ["", "aligned L2", "within the row", "energy", "sliced Wasserstein"]
    q = next(iter(found["rows"].values()))[0]["quotient"]
    caption = f"between a row and the reference, {q['removed']}; within the reference {q['within'][1]:.2f}"
    return Grid("On the quotient space", header, body, caption)


def trusted_table(found: Mapping[str, Any]) -> Grid:
    """Agreement with and total variation to the trusted predictive."""
    body = [
        [row, f"{100 * e[0]['agreement']:.2f}", f"{e[0]['total_variation']:.4f}"] for row, e in found["rows"].items()
    ]
    return Grid("Against the trusted predictive", ["", "agreement % ↑", "total variation ↓"], body)


def claim_table(table: CommandTable, found: Mapping[str, Any]) -> Grid:
    """The paper's claims, one by one."""
    given = answers(found)
    body = [[given[name].verdict, sentence, given[name].evidence] for name, sentence in table.claims.items()]
    return Grid("The paper's claims", ["", "claim", "evidence"], body)


def _interval(entry: Mapping[str, Any], column: str) -> tuple[str, str, str]:
    if column in ("mmd", "ns"):
        test = entry[column]
        values = (test["value"], *test["interval"])
        digits = 2
    else:
        values = entry[column]
        digits = 1 if column in _PERCENT else 2
    return tuple("–" if v is None else f"{100 * v:.{digits}f}" for v in values)  # type: ignore[return-value]


def _figures(out: Path, found: Mapping[str, Any]) -> None:
    with plots.figure(out / "diversity.png", len(found["pairs"])) as axes:
        for ax, (name, (inside, outside)) in zip(axes, found["pairs"].items(), strict=True):
            ax.scatter(inside, outside, s=4, alpha=0.4, color=plots.BLUE, linewidths=0)
            ax.set(title=name, xlabel="ID mutual information (nats)", ylabel="OOD mutual information (nats)")
    with plots.figure(out / "discrepancy.png", 1, width=4.4, height=3.4) as axes:
        for row, entries in found["rows"].items():
            color = plots.ORANGE if row.startswith("one") else plots.BLUE
            mmd, ns = (entries[0][k] for k in ("mmd", "ns"))
            axes[0].errorbar(
                100 * mmd["value"], 100 * ns["value"], xerr=_reach(mmd), yerr=_reach(ns), fmt="o", color=color
            )
            axes[0].annotate(
                row.partition("/")[2], (100 * mmd["value"], 100 * ns["value"]), fontsize=7,
                xytext=(4, 3), textcoords="offset points",
            )  # fmt: skip
        axes[0].set(title="Orange: one mode, blue: several", xlabel="MMD, times 100", ylabel="NS, times 100")
    sets = {n: s for n, s in found["marginals"]["sets"].items() if n != "reference"}
    levels = found["marginals"]["levels"]
    reference = found["marginals"]["sets"]["reference"]
    with plots.figure(out / "marginals.png", len(sets), width=2.3, height=2.4) as axes:
        for ax, (name, both) in zip(axes, sets.items(), strict=True):
            for when, color in (("before", plots.GRAY), ("after", plots.BLUE)):
                ax.plot(*_density(reference[when]["all"], levels), color=color, linestyle=":", linewidth=1)
                ax.plot(*_density(both[when]["all"], levels), color=color, label=when)
            ax.set(title=name.replace(" mode", "").replace("several", "multi"), xlabel="weight", yticks=[])
        axes[0].legend()
    panels = {n: h for n, h in found["homogeneity"].items()}
    first = next((row for row in found["rows"] if "ensemble" in row), None)
    if first is not None:
        panels[first] = found["rows"][first][0]["homogeneity"]
    with plots.figure(out / "largest.png", len(panels)) as axes:
        for ax, (name, entry) in zip(axes, panels.items(), strict=True):
            for (group, largest), color in zip(
                entry["largest"].items(), (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE) * 9, strict=False
            ):
                index, units = largest["index"], len(largest["counts"])
                ax.plot([i / max(1, units - 1) for i in index], ".", color=color, markersize=2,
                        label=f"{group} (p {largest['p_value']:.3f})")  # fmt: skip
            ax.set(title=name, xlabel="sample", ylabel="unit, as a share of the layer")
            ax.legend(fontsize=6)


def _reach(test: Mapping[str, Any]) -> list[list[float]] | None:
    low, high = test["interval"]
    if low is None or high is None:
        return None
    return [[100 * max(0.0, test["value"] - low)], [100 * max(0.0, high - test["value"])]]


def _density(quantiles: Sequence[float], levels: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """A smoothed density from quantiles, good enough to look at."""
    at, p = np.asarray(quantiles), np.asarray(levels)
    grid = np.linspace(at[0], at[-1], 60)
    cdf = np.interp(grid, at, p)
    return (grid[1:] + grid[:-1]) / 2, np.diff(cdf) / np.maximum(np.diff(grid), 1e-12)
