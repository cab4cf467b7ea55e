"""The reports of Tables 1 and 2 of arXiv 2206.08900."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tu_symmetry.experiments.linearized_laplace import rows as paper
from tu_symmetry.experiments.linearized_laplace.rows import CALIBRATED, NETWORK, SCALED, Runs
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, mean_and_error
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Found, Report, table

CHANGES = {  # title to what is compared with what
    "θ* instead of θ~, single λ": ("tangent_mode/single", "map/single"),
    "θ* instead of θ~, several λ": ("tangent_mode/per_group", "map/per_group"),
    "several λ instead of one, θ*": ("tangent_mode/per_group", "tangent_mode/single"),
    "several λ instead of one, θ~": ("map/per_group", "map/single"),
    "no hyperprior, θ*, several λ": ("tangent_mode/per_group/flat", "tangent_mode/per_group"),
    "Laplace (θ*, single λ) instead of the network": ("tangent_mode/single", NETWORK),
    "Laplace (θ*, several λ) instead of the network": ("tangent_mode/per_group", NETWORK),
    "temperature scaling instead of the network": (SCALED, NETWORK),
    "calibrated Laplace (θ*, single λ) instead of the scaled network": ("tangent_mode/single" + CALIBRATED, SCALED),
    "calibrated Laplace (θ*, several λ) instead of the scaled network": ("tangent_mode/per_group" + CALIBRATED, SCALED),
}
COLUMNS = {"nll": "NLL", "accuracy": "accuracy %", "ece": "ECE %", "auroc": "OOD AUROC %"}


def report_architectures(out: Path, recipe: str, evidence: dict[str, Path]) -> Outcome:
    """Write ``report.md``: a table like the paper's for every training length, and what became of the groups.

    Args:
        evidence: title, ``after 40 epochs`` for example, to the folder of :func:`.evidence.optimize_evidence`.
    """
    page = Report(out, recipe)
    for title, folder in evidence.items():
        page.add(*architecture_tables(Outcome.load(folder).results, title, page.table.paper))
    return page.done()


def architecture_tables(found: Found, title: str, published: Found) -> list[Grid]:
    """Test NLLs beside the paper's; what one change of the method does to the same networks; effective dimensions."""
    rows = paper.with_rivals(found["networks"], found["rows"])

    def quality(row: tuple[str, str], name: str) -> str:
        key, column = row
        runs = rows[key][name]
        theirs = (published.get(f"{key}{kind}", {}).get(name) for kind in ("", "/error"))
        return paper.cell([run[column] for run in runs]) + paper.marks(runs) + paper.beside(*theirs)

    def difference(change: tuple[str, str], name: str) -> str:
        after, before = (rows[key][name] for key in change)
        gaps = [a["nll"] - b["nll"] for a, b in zip(after, before, strict=True)]
        return paper.cell(gaps, sign="+") + paper.marks([*after, *before])

    def dimension(key: str, name: str) -> str:
        runs = rows[key][name]
        pruned, count = sum(run["pruned"] for run in runs), sum(len(run["groups"]) for run in runs)
        of_groups = f"{pruned}/{count} pruned, " if count > len(runs) else ""
        gamma = f"{fmean(run['gamma'] for run in runs):.0f}{paper.marks(runs)}"
        return f"{gamma}\n{of_groups}{sum(run['converged'] for run in runs)}/{len(runs)} converged"

    def made(heading: str, lines: Mapping[str, Any], show: Callable[[Any, str], str], caption: str) -> Grid:
        columns: dict[str, Any] = {name: lambda line, name=name: show(line, name) for name in found["networks"]}
        return table(f"{heading} {title}", lines, columns, f"{caption}. {paper.OPEN_CAPTION}")

    lines = {paper.ITSELF: (NETWORK, "nll"), "the same, training data": (NETWORK, "train_nll")}
    lines |= {paper.title_of(key): (key, "nll") for key in (SCALED, *found["rows"])}
    changes = {change: keys for change, keys in CHANGES.items() if set(keys) <= rows.keys()}
    return [
        made(
            "Test NLL",
            lines,
            quality,
            "test NLL (nats), mean ± standard error over seeds; second line: the paper's. Several λ of FixUp are one "
            "for each layer, since it has no normalized groups. Temperature scaled: on validation images",
        ),
        made(
            "What each choice changes",
            changes,
            difference,
            "difference of test NLL (nats) on the same networks, mean ± standard error over seeds; negative helps",
        ),
        made(
            "Effective dimension",
            {paper.title_of(key): key for key in found["rows"]},
            dimension,
            "effective directions that the data determine, mean over seeds; second line: pruned groups and converged "
            "evidences of all seeds",
        ),
    ]


def report_residual(out: Path, recipe: str, evidence: Path) -> Outcome:
    """Write ``report.md`` and ``evidence.png``, from the folder of :func:`.evidence.optimize_kronecker_evidence`."""
    page, found = Report(out, recipe), Outcome.load(evidence).results
    rows: dict[str, Runs] = paper.with_rivals(found["networks"], found["rows"])
    several = {key: runs for key, runs in rows.items() if all(len(run.get("groups", ())) > 1 for run in runs)}
    page.add(paper.images_line(f"{len(rows[NETWORK])} networks of {found['parameters']:,} parameters", found))
    page.add(quality_table(rows, page.table.paper, page.table.title), dimension_table(found["rows"]))
    if several:
        page.add(group_table(several))
    drawn = {key: runs for key, runs in rows.items() if not key.endswith(CALIBRATED)}
    page.figure("evidence", draw_evidence, drawn, several, title="Figure", alt="test likelihood and groups")
    return page.done()


def quality_table(rows: Mapping[str, Runs], published: Found, title: str) -> Grid:
    """Test NLL beside the paper's, accuracy, calibration, detection."""

    def show(key: str, column: str) -> str:
        runs, theirs = rows[key], published.get(key, {}) if column == "nll" else {}
        scale, digits = (1, 3) if column == "nll" else (100, 1)
        text = paper.cell([scale * run[column] for run in runs], digits) + paper.marks(runs)
        return text + paper.beside(theirs.get("nll"), theirs.get("error"))

    columns: dict[str, Any] = {
        name: lambda key, column=column: show(key, column)
        for column, name in COLUMNS.items()
        if all(column in run for runs in rows.values() for run in runs)
    }
    columns["NLL less the\nscaled network's"] = lambda key: paper.cell(
        [own["nll"] - rival["nll"] for own, rival in zip(rows[key], rows[SCALED], strict=True)], sign="+"
    )
    caption = (
        "mean ± standard error over networks; scaled, calibrated: on validation images; second line: the paper's NLL, "
        "which has an offset (compare orderings and gaps). AUROC: of the predictive entropy. "
        f"{paper.OPEN_CAPTION}. {paper.MOVING}: the last refresh of the curvature still moved a log precision by more "
        "than the tolerance, so that this is no fixed point"
    )
    return table(title, {paper.title_of(key): key for key in rows}, columns, caption)


def dimension_table(rows: Mapping[str, Runs]) -> Grid:
    """What the evidence chose, and how its optimization ended."""

    def precisions(key: str) -> list[float]:
        return [g["precision"] for run in rows[key] for g in run["groups"].values()]

    def values(key: str, what: str) -> list[float]:
        return [run[what] for run in rows[key]]

    columns: dict[str, Callable[[str], str]] = {
        "eff. dimension": lambda key: f"{fmean(values(key, 'gamma')):.0f}",
        "λ": lambda key: f"{min(precisions(key)):.3g} to {max(precisions(key)):.3g}",
        "pruned groups": lambda key: f"{sum(values(key, 'pruned'))}/{len(precisions(key))}",
        "log evidence": lambda key: f"{fmean(values(key, 'log_evidence')):.0f}",
        "iterations": lambda key: "/".join(map(str, values(key, "iterations"))),
        "converged": lambda key: f"{sum(values(key, 'converged'))}/{len(rows[key])}",
        "largest change": lambda key: f"{max(values(key, 'change')):.2g}",
        "by a refresh": lambda key: f"{max(values(key, 'moved')):.2g}" if key.startswith("full") else "",
    }
    caption = (
        "means over networks; λ: smallest and largest of all groups; log evidence in nats, over the training data; "
        "largest change: of a log λ in the last iteration, and from before to after the last refresh of the curvature"
    )
    lines = {paper.title_of(key) + paper.marks(runs): key for key, runs in rows.items()}
    return table("Effective dimensions and precisions", lines, columns, caption)


def group_table(rows: Mapping[str, Runs]) -> Grid:
    """Precision and effective dimension of each group."""

    def show(runs: Runs, name: str) -> str:
        found = [run["groups"][name] for run in runs]
        log_mean = torch.tensor([g["precision"] for g in found], dtype=torch.float64, device="cpu").log().mean()
        return f"{log_mean.exp().item():.3g} ({fmean(g['gamma'] for g in found):.0f})"

    first = next(iter(rows.values()))[0]["groups"]
    columns: dict[str, Any] = {
        paper.title_of(key) + paper.marks(runs): lambda name, runs=runs: show(runs, name) for key, runs in rows.items()
    }
    caption = (
        "λ (geometric mean over networks) and in brackets the effective dimension; behind each group its weights. "
        f"{paper.OPEN_CAPTION}"
    )
    return table("Precisions by group", {f"{n} ({first[n]['size']:,})": n for n in first}, columns, caption)


def draw_evidence(path: Path, rows: Mapping[str, Runs], several: Mapping[str, Runs]) -> None:
    """Test NLL of every row, and the precision of every group relative to its center; crosses had not converged."""
    shapes = {key: "x" if paper.OPEN in paper.marks(runs) else "o" for key, runs in rows.items()}
    with plots.figure(path, 2 if several else 1, width=5.4, height=3.6) as axes:
        for place, (key, runs) in enumerate(reversed(list(rows.items()))):
            mean, error = mean_and_error([run["nll"] for run in runs])
            color = paper.style_of(key)["color"]
            face = "white" if key.endswith("/flat") else color
            axes[0].errorbar(mean, place, xerr=error, fmt=shapes[key], color=color, markerfacecolor=face, capsize=2)
        axes[0].set_yticks(range(len(rows)), [paper.title_of(key) for key in reversed(list(rows))])
        axes[0].set(title="Test NLL", xlabel="nats, mean ± standard error over networks; ×: had not converged")
        names = list(next(iter(several.values()))[0]["groups"]) if several else []
        for key, runs in several.items():
            relative = [fmean(r["groups"][n]["precision"] / r["groups"][n]["center"] for r in runs) for n in names]
            style = paper.style_of(key)
            axes[1].plot(range(len(names)), relative, marker=shapes[key], label=paper.title_of(key), **style)
        if several:
            axes[1].set_xticks(range(len(names)), names, rotation=90, fontsize=6)
            axes[1].set(title="Precision of each group", ylabel=r"$\lambda_g$ over its center", yscale="log")
            axes[1].legend(loc="best", fontsize=6)
