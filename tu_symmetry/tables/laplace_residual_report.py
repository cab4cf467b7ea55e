"""The report of Table 2 of arXiv 2206.08900: ours beside the paper's, what became of the groups, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tu_symmetry.reporting.grid import Grid
from tu_symmetry.reporting.plots import BLUE, GRAY, GREEN, ORANGE, figure
from tu_symmetry.tables.laplace_residual import Choice
from tu_symmetry.tables.stage import Results, StageContext, stage

WHERE = {"map": "M(θ~)", "tangent_mode": "M(θ*), simple", "full": "M(θ*), full"}
COLORS = {"map": ORANGE, "tangent_mode": BLUE, "full": GREEN}
NETWORK = "network itself"
COLUMNS = {"nll": "NLL", "accuracy": "accuracy %", "ece": "ECE %", "auroc": "OOD AUROC %"}


@dataclass(frozen=True)
class ReportOptions:
    """A report has no options."""


@stage(inputs=("networks", "evidence"), reads_table=True)
def report(context: StageContext, options: ReportOptions) -> Results:
    """Write ``report.md`` and ``evidence.png``; the tables go to the terminal too."""
    networks, evidence = (context.inputs[role].results for role in ("networks", "evidence"))
    rows: dict[str, Sequence[Mapping[str, Any]]] = {NETWORK: networks["networks"], **evidence["rows"]}
    grids = [_quality(rows, context.table.paper, context.table.title), _dimensions(evidence["rows"])]
    if several := _several(evidence["rows"]):
        grids.append(_groups(several))
    _draw(context.folder / "evidence.png", rows)
    sizes = ", ".join(f"{count:,} {name}" for name, count in evidence["sizes"]["sizes"].items())
    facts = (
        f"{len(networks['networks'])} networks of {networks['parameters']:,} parameters, {networks['epochs']} epochs; "
        f"images: {sizes} (in distribution {evidence['sizes']['source']}, out of it "
        f"{evidence['sizes']['out_of_distribution']})."
    )
    environment = ", ".join(f"{k} {v}" for k, v in context.environment.items())
    parts = [f"# {context.table.title}", f"Reproduces: {context.table.source}.", context.table.note, facts]
    parts += [f"## {grid.title}\n\n{grid.markdown()}" for grid in grids]
    parts += ["## Figure\n\n![test likelihood and groups](evidence.png)", f"## Hardware and versions\n\n{environment}"]
    (context.folder / "report.md").write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    return {"tables": [grid.to_dict() for grid in grids], "headline": f"{context.name}/report.md"}


def name_of(key: str) -> str:
    """What a report calls a row."""
    if key == NETWORK:
        return key
    choice = Choice.parse(key)
    prior = "single λ" if choice.prior == "single" else "several λ"
    return f"{WHERE[choice.where]}, {prior}{', no hyperprior' if choice.flat else ''}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, None for a single value."""
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std()) / len(found) ** 0.5 if len(found) > 1 else None


def _cell(runs: Sequence[Mapping[str, Any]], column: str) -> str:
    scale, digits = (1, 3) if column == "nll" else (100, 1)
    mean, error = mean_and_error([scale * run[column] for run in runs])
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _quality(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], paper: Mapping[str, Mapping[str, float | None]], title: str
) -> Grid:
    columns = [column for column in COLUMNS if all(column in run for runs in rows.values() for run in runs)]
    body = []
    for key, runs in rows.items():
        theirs = paper.get(key, {})
        known = theirs.get("nll") is not None and theirs.get("error") is not None
        cells = [_cell(runs, column) for column in columns]
        cells[0] += f"\n{theirs['nll']:.3f} ± {theirs['error']:.3f}" if known else ""
        body.append([name_of(key), *cells])
    caption = (
        "mean ± standard error over networks; second line: the paper's NLL, which has an offset (compare orderings and "
        "gaps). AUROC: of the predictive entropy."
    )
    return Grid(title, ["", *(COLUMNS[column] for column in columns)], body, caption)


def _dimensions(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Grid:
    body = []
    for key, runs in rows.items():
        precisions = [g["precision"] for run in runs for g in run["groups"].values()]
        body.append(
            [
                name_of(key),
                f"{mean_and_error([run['gamma'] for run in runs])[0]:.0f}",
                f"{min(precisions):.3g} to {max(precisions):.3g}",
                f"{sum(run['pruned'] for run in runs)}/{len(precisions)}",
                f"{mean_and_error([run['log_evidence'] for run in runs])[0]:.0f}",
                "/".join(str(run["iterations"]) for run in runs),
                f"{sum(run['converged'] for run in runs)}/{len(runs)}",
            ]
        )
    header = ["", "eff. dimension", "λ", "pruned groups", "log evidence", "iterations", "converged"]
    caption = "means over networks; λ: smallest and largest of all groups; log evidence in nats, over the training data"
    return Grid("Effective dimensions and precisions", header, body, caption)


def _several(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The rows with several groups."""
    return {key: runs for key, runs in rows.items() if all(len(run["groups"]) > 1 for run in runs)}


def _groups(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Grid:
    names = list(next(iter(rows.values()))[0]["groups"])
    body = []
    for name in names:
        cells = []
        for runs in rows.values():
            found = [run["groups"][name] for run in runs]
            log_mean = sum(torch.tensor(g["precision"], dtype=torch.float64).log().item() for g in found) / len(found)
            gamma = sum(g["gamma"] for g in found) / len(found)
            cells.append(f"{torch.tensor(log_mean).exp().item():.3g} ({gamma:.0f})")
        body.append([f"{name} ({next(iter(rows.values()))[0]['groups'][name]['size']:,})", *cells])
    caption = "λ (geometric mean over networks) and in brackets the effective dimension; behind each group its weights"
    return Grid("Precisions by group", ["", *(name_of(key) for key in rows)], body, caption)


def _draw(path: Path, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Test NLL of every row, and the precision of every group relative to its center."""
    several = _several({key: runs for key, runs in rows.items() if key != NETWORK})
    with figure(path, 2 if several else 1, width=5.4, height=3.6) as axes:
        for place, (key, runs) in enumerate(reversed(list(rows.items()))):
            mean, error = mean_and_error([run["nll"] for run in runs])
            color = GRAY if key == NETWORK else COLORS[Choice.parse(key).where]
            filled = key == NETWORK or not Choice.parse(key).flat
            face = color if filled else "white"
            axes[0].errorbar(mean, place, xerr=error, fmt="o", color=color, markerfacecolor=face, capsize=2)
        axes[0].set_yticks(range(len(rows)), [name_of(key) for key in reversed(list(rows))])
        axes[0].set(title="Test NLL", xlabel="nats, mean ± standard error over networks")
        if several:
            names = list(next(iter(several.values()))[0]["groups"])
            for key, runs in several.items():
                choice = Choice.parse(key)
                relative = [
                    mean_and_error([run["groups"][n]["precision"] / run["groups"][n]["center"] for run in runs])[0]
                    for n in names
                ]
                axes[1].plot(
                    range(len(names)),
                    relative,
                    marker="o",
                    color=COLORS[choice.where],
                    linestyle=":" if choice.flat else "-",
                    label=name_of(key),
                )
            axes[1].set_xticks(range(len(names)), names, rotation=90, fontsize=6)
            axes[1].set(title="Precision of each group", ylabel=r"$\lambda_g$ over its center", yscale="log")
            axes[1].legend(loc="best", fontsize=6)
