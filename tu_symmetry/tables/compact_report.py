"""The report of a compact-posterior table: Table 1 of arXiv 2401.00611 with ours and theirs, and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tu_symmetry.tables import plots
from tu_symmetry.tables.grid import Grid
from tu_symmetry.tables.stage import Results, StageContext, stage

COLUMNS = {
    "hmc/sample": "HMC\nsample",
    "hmc/q_d": "HMC\nq_d",
    "hmc/q_r": "HMC\nq_r",
    "ensemble/sample": "Ens.\nsample",
    "ensemble/q_d": "Ens.\nq_d",
    "ensemble/q_r": "Ens.\nq_r",
    "vi/q": "VI\nq",
}
ROWS = {
    "agreement": "agreement with HMC ↑",
    "tv": "TV to HMC ↓",
    "accuracy": "samples' accuracy % ↑",
    "mean_accuracy": "means' accuracy % ↑",
}
ROLES = ("ensemble", "hmc", "vi", "ensemble_compact", "hmc_compact", "evaluation", "pruning", "interpolation")


@dataclass(frozen=True)
class ReportOptions:
    """A report has no options."""


@stage(inputs=ROLES, reads_table=True)
def report(context: StageContext, options: ReportOptions) -> Results:
    """Write ``report.md`` and its plots; the tables go to the terminal too."""
    found = {role: context.inputs[role].results for role in ROLES}
    grids = [
        main_table(found["evaluation"], context.table.paper, context.table.title),
        alignment_table(found),
        chain_table(found["hmc"]),
    ]
    plots.sigma_histograms(
        context.folder / "sigma.png",
        {
            title: {
                when: _sigma(context, role, file)
                for when, file in (("before", "q_d.safetensors"), ("after", "q_r.safetensors"))
            }
            for title, role in (("HMC", "hmc_compact"), ("Ensemble", "ensemble_compact"))
        },
    )
    plots.pruning(context.folder / "pruning.png", found["pruning"]["keep"], found["pruning"]["curves"])
    paths = {k: v for k, v in found["interpolation"].items() if "/" in k}
    plots.interpolation(context.folder / "interpolation.png", found["interpolation"]["ratios"], paths)
    text = _markdown(context, grids, found)
    (context.folder / "report.md").write_text(text, encoding="utf-8")
    return {"tables": [grid.to_dict() for grid in grids], "headline": f"{context.name}/report.md"}


def main_table(found: Mapping[str, Any], paper: Mapping[str, Any], title: str) -> Grid:
    """Table 1: ours, and the paper's below."""
    rows, spread = found["rows"], found["spread"]
    repeats, draws = found["draws"]

    def cell(row: str, column: str) -> str:
        ours, theirs = rows[row].get(column), paper.get(row, {}).get(column)
        percent = row.endswith("accuracy")
        shown = ["–" if v is None else f"{100 * v:.2f}" if percent else f"{v:.4f}" for v in (ours, theirs)]
        return shown[0] if ours is None and theirs is None else "\n".join(shown)

    body = [[f"{label}\npaper", *(cell(row, column) for column in COLUMNS)] for row, label in ROWS.items()]
    worst = 100 * max(spread["accuracy"].values(), default=0.0)
    sets = f"means over {repeats} sets of {draws} draws; their accuracies vary by {worst:.1f} at most (std)"
    caption = f"second lines: the paper; q: {sets if repeats > 1 else f'{draws} draws'}"
    return Grid(title, ["", *COLUMNS.values()], body, caption)


def alignment_table(found: Mapping[str, Any]) -> Grid:
    """Transpositions, standard deviations and barriers of each alignment."""
    body = []
    for label, source in (("HMC", "hmc"), ("Ensemble", "ensemble")):
        compact, paths = found[f"{source}_compact"], found["interpolation"]
        barriers = [np.mean(paths[f"{source}/{when}"]["barrier"]) for when in ("before", "after")]
        body.append(
            [
                label,
                str(compact["aligned"]),
                f"{compact['transpositions_mean']:.1f}",
                f"{compact['transpositions_min']}–{compact['transpositions_max']}",
                f"{compact['transpositions_random']:.1f}",
                f"{compact['sigma_rms']['q_d']:.3f} → {compact['sigma_rms']['q_r']:.3f}",
                f"{barriers[0]:.2f} → {barriers[1]:.2f}",
            ]
        )
    header = ["", "nets", "NoT mean", "NoT range", "random", "rms σ", "barrier"]
    caption = "random: mean NoT of a random permutation; barrier: excess of the training loss in nats, mean over pairs"
    return Grid("Alignments to the first network", header, body, caption)


def chain_table(hmc: Mapping[str, Any]) -> Grid:
    """Whether the chain is one: acceptance and effective sample size."""
    ess = hmc["effective_sample_size"]
    body = [
        ["samples kept", str(hmc["num_samples"])],
        ["acceptance rate", f"{hmc['acceptance_rate']:.3f}"],
        *([f"effective sample size, {name}", f"{value:.1f}"] for name, value in ess.items()),
    ]
    return Grid("The HMC chain", ["", "value"], body)


def _sigma(context: StageContext, role: str, file: str) -> np.ndarray:
    from tu_symmetry.posterior.compact import CompactPosterior

    posterior = CompactPosterior.load(context.inputs[role].folder / file, context.graph)
    return np.concatenate([_flat(t) for t in posterior.std.values()])


def _flat(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().flatten().numpy()


def _markdown(context: StageContext, grids: list[Grid], found: Mapping[str, Any]) -> str:
    table = context.table
    environment = ", ".join(f"{k} {v}" for k, v in context.environment.items())
    parts = [f"# {table.title}", f"Reproduces: {table.source}."]
    if table.note:
        parts.append(table.note)
    parts += [f"## {g.title}\n\n{g.markdown()}" for g in grids]
    parts += [
        "## Standard deviations before and after alignment\n\n![sigma histograms](sigma.png)",
        "## Accuracy against pruning level\n\n![pruning](pruning.png)\n\nKept are the weights of lowest σ. For "
        "HMC's and VI's σ on the ensemble's mean and members, all are matched to the ensemble's mean first.",
        "## Loss along the interpolation\n\n![interpolation](interpolation.png)\n\nShaded: one standard deviation over "
        f"{len(found['interpolation']['ensemble/before']['loss'])} pairs.",
        f"## Hardware and versions\n\n{environment}",
    ]
    return "\n\n".join(parts) + "\n"
