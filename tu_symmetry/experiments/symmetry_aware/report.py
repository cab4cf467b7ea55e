"""The report of the main table: numbers with intervals, controls, claims and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tu_symmetry.experiments.symmetry_aware.claims import answers
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.commands import CommandTable
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

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
    report, found = Report(out, recipe), Outcome.load(evaluation).results
    report.add(main_table(report.table, found), control_table(found), mode_table(found), quotient_table(found))
    if any("agreement" in entries[0] for entries in found["rows"].values()):
        report.add(trusted_table(found))
    report.add(claim_table(report.table, found))
    report.figure(
        "diversity",
        draw_diversity,
        found["pairs"],
        alt="pairwise mutual information",
        before="## Diversity",
        after="Each point is a pair of reference networks.",
    )
    report.figure("discrepancy", draw_discrepancy, found["rows"], before="## MMD against NS")
    report.figure(
        "marginals",
        draw_marginals,
        found["marginals"],
        before="## Marginals",
        after="Distribution of the first layer's weights before and after the paper's removal, one method a panel; "
        "dotted: the reference.",
    )
    report.figure(
        "largest",
        draw_largest,
        found,
        alt="largest weights",
        before="## Where a layer's largest weight is",
        after="Uniform for independent networks.",
    )
    return report.done()


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


def draw_diversity(path: Path, pairs: Mapping[str, Any]) -> None:
    """Mutual information of pairs of networks on OOD data against that on test data, a panel for each OOD set."""
    with plots.figure(path, len(pairs)) as axes:
        for ax, (name, (inside, outside)) in zip(axes, pairs.items(), strict=True):
            ax.scatter(inside, outside, s=4, alpha=0.4, color=plots.BLUE, linewidths=0)
            ax.set(title=name, xlabel="ID mutual information (nats)", ylabel="OOD mutual information (nats)")


def draw_discrepancy(path: Path, rows: Mapping[str, Any]) -> None:
    """NS against MMD of every row, with its intervals."""
    with plots.figure(path, 1, width=4.4, height=3.4) as axes:
        for row, entries in rows.items():
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


def draw_marginals(path: Path, marginals: Mapping[str, Any]) -> None:
    """Distributions of the first layer's weights before and after the removal of symmetries."""
    sets = {n: s for n, s in marginals["sets"].items() if n != "reference"}
    levels, reference = marginals["levels"], marginals["sets"]["reference"]
    with plots.figure(path, len(sets), width=2.3, height=2.4) as axes:
        for ax, (name, both) in zip(axes, sets.items(), strict=True):
            for when, color in (("before", plots.GRAY), ("after", plots.BLUE)):
                ax.plot(*_density(reference[when]["all"], levels), color=color, linestyle=":", linewidth=1)
                ax.plot(*_density(both[when]["all"], levels), color=color, label=when)
            ax.set(title=name.replace(" mode", "").replace("several", "multi"), xlabel="weight", yticks=[])
        axes[0].legend()


def draw_largest(path: Path, found: Mapping[str, Any]) -> None:
    """Which unit has the largest weight of its layer, sample by sample."""
    panels = {n: h for n, h in found["homogeneity"].items()}
    first = next((row for row in found["rows"] if "ensemble" in row), None)
    if first is not None:
        panels[first] = found["rows"][first][0]["homogeneity"]
    with plots.figure(path, len(panels)) as axes:
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
