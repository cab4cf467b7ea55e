"""The report of the paper's Table 2: residual networks, with the groups' precisions and a figure of the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tu_symmetry.experiments.linearized_laplace.choices import NETWORK, Choice
from tu_symmetry.experiments.linearized_laplace.reports.cells import (
    COLORS,
    MOVING,
    OPEN,
    OPEN_CAPTION,
    Runs,
    cell,
    marks,
    title_of,
)
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, mean_and_error
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

COLUMNS = {"nll": "NLL", "accuracy": "accuracy %", "ece": "ECE %", "auroc": "OOD AUROC %"}


def report_residual(out: Path, recipe: str, evidence: Path) -> Outcome:
    """Write ``report.md`` and ``evidence.png``.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title, note and the paper's numbers.
        evidence: folder of :func:`~tu_symmetry.experiments.linearized_laplace.optimize_kronecker_evidence`.
    """
    report, found = Report(out, recipe), Outcome.load(evidence).results
    rows: dict[str, Runs] = {NETWORK: found["networks"], **found["rows"]}
    sizes = ", ".join(f"{count:,} {name}" for name, count in found["sizes"].items())
    report.add(f"{len(rows[NETWORK])} networks of {found['parameters']:,} parameters; images: {sizes}.")
    report.add(_residual_quality(rows, report.table.paper, report.table.title), _residual_dimensions(found["rows"]))
    if several := _several(found["rows"]):
        report.add(_residual_groups(several))
    report.figure("evidence", draw_evidence, rows, alt="test likelihood and groups", before="## Figure")
    return report.done()


def _residual_quality(rows: Mapping[str, Runs], paper: Mapping[str, Mapping[str, float | None]], title: str) -> Grid:
    columns = [column for column in COLUMNS if all(column in run for runs in rows.values() for run in runs)]
    body = []
    for key, runs in rows.items():
        theirs = paper.get(key, {})
        cells = [cell([run["nll"] for run in runs]) + marks(runs)]
        cells += [cell([100 * run[column] for run in runs], 1) + marks(runs) for column in columns[1:]]
        if theirs.get("nll") is not None and theirs.get("error") is not None:
            cells[0] += f"\n{theirs['nll']:.3f} ± {theirs['error']:.3f}"
        body.append([title_of(key), *cells])
    caption = (
        "mean ± standard error over networks; second line: the paper's NLL, which has an offset (compare orderings and "
        f"gaps). AUROC: of the predictive entropy. {OPEN_CAPTION}. {MOVING}: the last refresh of the curvature still "
        "moved a log precision by more than the tolerance, so that this is no fixed point"
    )
    return Grid(title, ["", *(COLUMNS[column] for column in columns)], body, caption)


def _residual_dimensions(rows: Mapping[str, Runs]) -> Grid:
    body = []
    for key, runs in rows.items():
        precisions = [g["precision"] for run in runs for g in run["groups"].values()]
        moved = f"{max(run['moved'] for run in runs):.2g}" if key.startswith("full") else ""
        body.append(
            [
                title_of(key) + marks(runs),
                f"{mean_and_error([run['gamma'] for run in runs])[0]:.0f}",
                f"{min(precisions):.3g} to {max(precisions):.3g}",
                f"{sum(run['pruned'] for run in runs)}/{len(precisions)}",
                f"{mean_and_error([run['log_evidence'] for run in runs])[0]:.0f}",
                "/".join(str(run["iterations"]) for run in runs),
                f"{sum(run['converged'] for run in runs)}/{len(runs)}",
                f"{max(run['change'] for run in runs):.2g}",
                moved,
            ]
        )
    header = ["", "eff. dimension", "λ", "pruned groups", "log evidence", "iterations", "converged"]
    header += ["largest change", "by a refresh"]
    caption = (
        "means over networks; λ: smallest and largest of all groups; log evidence in nats, over the training data; "
        "largest change: of a log λ in the last iteration, and from before to after the last refresh of the curvature"
    )
    return Grid("Effective dimensions and precisions", header, body, caption)


def _several(rows: Mapping[str, Runs]) -> dict[str, Runs]:
    """The rows with several groups."""
    return {key: runs for key, runs in rows.items() if all(len(run["groups"]) > 1 for run in runs)}


def _residual_groups(rows: Mapping[str, Runs]) -> Grid:
    first = next(iter(rows.values()))[0]["groups"]
    body = []
    for name in first:
        cells = []
        for runs in rows.values():
            found = [run["groups"][name] for run in runs]
            log_mean = torch.tensor([g["precision"] for g in found], dtype=torch.float64, device="cpu").log().mean()
            gamma = sum(g["gamma"] for g in found) / len(found)
            cells.append(f"{log_mean.exp().item():.3g} ({gamma:.0f})")
        body.append([f"{name} ({first[name]['size']:,})", *cells])
    caption = (
        "λ (geometric mean over networks) and in brackets the effective dimension; behind each group its weights. "
        f"{OPEN_CAPTION}"
    )
    return Grid(
        "Precisions by group", ["", *(title_of(key) + marks(runs) for key, runs in rows.items())], body, caption
    )


def draw_evidence(path: Path, rows: Mapping[str, Runs]) -> None:
    """Test NLL of every row, and the precision of every group relative to its center; crosses had not converged."""
    several = _several({key: runs for key, runs in rows.items() if key != NETWORK})
    with plots.figure(path, 2 if several else 1, width=5.4, height=3.6) as axes:
        for place, (key, runs) in enumerate(reversed(list(rows.items()))):
            mean, error = mean_and_error([run["nll"] for run in runs])
            choice = None if key == NETWORK else Choice.parse(key, COLORS)
            color = plots.GRAY if choice is None else COLORS[choice.where]
            face = "white" if choice is not None and choice.flat else color
            shape = "x" if OPEN in marks(runs) else "o"
            axes[0].errorbar(mean, place, xerr=error, fmt=shape, color=color, markerfacecolor=face, capsize=2)
        axes[0].set_yticks(range(len(rows)), [title_of(key) for key in reversed(list(rows))])
        axes[0].set(title="Test NLL", xlabel="nats, mean ± standard error over networks; ×: had not converged")
        if several:
            names = list(next(iter(several.values()))[0]["groups"])
            for key, runs in several.items():
                choice = Choice.parse(key, COLORS)
                relative = [
                    mean_and_error([run["groups"][n]["precision"] / run["groups"][n]["center"] for run in runs])[0]
                    for n in names
                ]
                axes[1].plot(
                    range(len(names)),
                    relative,
                    marker="x" if OPEN in marks(runs) else "o",
                    color=COLORS[choice.where],
                    linestyle=":" if choice.flat else "-",
                    label=choice.title,
                )
            axes[1].set_xticks(range(len(names)), names, rotation=90, fontsize=6)
            axes[1].set(title="Precision of each group", ylabel=r"$\lambda_g$ over its center", yscale="log")
            axes[1].legend(loc="best", fontsize=6)
