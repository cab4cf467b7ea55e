"""The report of the paper's Table 1: test likelihoods of five kinds of networks, ours beside theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tu_symmetry.experiments.linearized_laplace.choices import NETWORK
from tu_symmetry.experiments.linearized_laplace.reports.cells import ITSELF, OPEN_CAPTION, cell, marks, title_of
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

CHANGES = {  # title to what is compared with what
    "θ* instead of θ~, single λ": ("tangent_mode/single", "map/single"),
    "θ* instead of θ~, several λ": ("tangent_mode/per_group", "map/per_group"),
    "several λ instead of one, θ*": ("tangent_mode/per_group", "tangent_mode/single"),
    "several λ instead of one, θ~": ("map/per_group", "map/single"),
    "no hyperprior, θ*, several λ": ("tangent_mode/per_group/flat", "tangent_mode/per_group"),
    "Laplace (θ*, single λ) instead of the network": ("tangent_mode/single", NETWORK),
    "Laplace (θ*, several λ) instead of the network": ("tangent_mode/per_group", NETWORK),
}


def report_architectures(out: Path, recipe: str, evidence: dict[str, Path]) -> Outcome:
    """Write ``report.md``: a table like the paper's for every training length, and what became of the groups.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title, note and the paper's numbers.
        evidence: title, ``after 40 epochs`` for example, to the folder of
            :func:`~tu_symmetry.experiments.linearized_laplace.optimize_evidence`.
    """
    report = Report(out, recipe)
    for title, folder in evidence.items():
        found = Outcome.load(folder).results
        report.add(_quality(found, title, report.table.paper), _differences(found, title), _dimensions(found, title))
    return report.done()


def _quality(found: Mapping[str, Any], title: str, paper: Mapping[str, Mapping[str, float | None]]) -> Grid:
    networks, names = found["networks"], list(found["networks"])
    body = [
        [ITSELF, *(cell([run["nll"] for run in networks[name]]) for name in names)],
        ["the same, training data", *(cell([run["train_nll"] for run in networks[name]]) for name in names)],
    ]
    for key, by_name in found["rows"].items():
        means, errors = paper.get(key, {}), paper.get(f"{key}/error", {})
        cells = []
        for name in names:
            theirs = f"{means[name]:.3f} ± {errors[name]:.3f}" if name in means and name in errors else ""
            cells.append(f"{cell([run['nll'] for run in by_name[name]])}{marks(by_name[name])}\n{theirs}")
        body.append([title_of(key), *cells])
    caption = (
        f"test NLL (nats), mean ± standard error over seeds; second line: the paper's. {OPEN_CAPTION}. Each FixUp cell "
        "of several λ has one for each layer, for it has no normalized groups."
    )
    return Grid(f"Test NLL {title}", ["", *names], body, caption)


def _differences(found: Mapping[str, Any], title: str) -> Grid:
    """What one change of the method does to the same networks, with every other choice held."""
    names = list(found["networks"])
    everything = {NETWORK: found["networks"], **found["rows"]}
    body = []
    for change, (after, before) in CHANGES.items():
        if after in everything and before in everything:
            cells = []
            for name in names:
                pairs = list(zip(everything[after][name], everything[before][name], strict=True))
                mark = marks([run for pair in pairs for run in pair])
                cells.append(cell([a["nll"] - b["nll"] for a, b in pairs], sign="+") + mark)
            body.append([change, *cells])
    caption = (
        "difference of test NLL (nats) on the same networks, mean ± standard error over seeds; negative helps. "
        f"{OPEN_CAPTION}"
    )
    return Grid(f"What each choice changes {title}", ["", *names], body, caption)


def _dimensions(found: Mapping[str, Any], title: str) -> Grid:
    """Effective dimensions, pruned groups, and how many optimizations converged."""
    names = list(found["networks"])
    body = []
    for key, by_name in found["rows"].items():
        cells = []
        for name in names:
            runs = by_name[name]
            gamma = sum(sum(g["gamma"] for g in run["groups"].values()) for run in runs) / len(runs)
            pruned, count = sum(run["pruned"] for run in runs), sum(len(run["groups"]) for run in runs)
            of_groups = f"{pruned}/{count} pruned, " if count > len(runs) else ""
            converged = f"{sum(run['converged'] for run in runs)}/{len(runs)} converged"
            cells.append(f"{gamma:.0f}{marks(runs)}\n{of_groups}{converged}")
        body.append([title_of(key), *cells])
    caption = (
        "effective directions that the data determine, mean over seeds; second line: pruned groups and converged "
        f"evidences of all seeds. {OPEN_CAPTION}"
    )
    return Grid(f"Effective dimension {title}", ["", *names], body, caption)
