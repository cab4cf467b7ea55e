"""The report of Table 1 and Figure 5 of arXiv 2401.00611: ours and theirs, and the figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tu_symmetry import plot
from tu_symmetry.alignment.barrier import LossBarrier
from tu_symmetry.experiments.compact_posterior.sources import Q_D, Q_R, SAMPLES, Runs
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.library import find_recipe
from tu_symmetry.tables.logs import last_values, logged_curve
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import write_report

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


def report(out: Path, recipe: str, runs: Runs, comparison: Path, pruning: Path, interpolation: Path) -> Outcome:
    """Write ``report.md`` and its plots from what the other commands of the table have left in their folders.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title, note and the paper's numbers.
        runs: the folders of the chain, the ensemble and variational inference.
        comparison: folder of :func:`~tu_symmetry.experiments.compact_posterior.compare`.
        pruning: folder of :func:`~tu_symmetry.experiments.compact_posterior.prune`.
        interpolation: folder of :func:`~tu_symmetry.experiments.compact_posterior.interpolate`.
    """
    table = load_table(find_recipe(recipe))
    found = {"comparison": Outcome.load(comparison).results, "pruning": Outcome.load(pruning).results}
    found["interpolation"] = Outcome.load(interpolation).results
    grids = [
        main_table(found["comparison"], table.paper, table.title),
        alignment_table(runs, found["interpolation"]),
        chain_table(runs),
    ]
    out.mkdir(parents=True, exist_ok=True)
    sigmas = {
        title: {"before": _sigma(run / Q_D), "after": _sigma(run / Q_R)}
        for title, run in (("HMC", runs.hmc), ("Ensemble", runs.ensemble))
    }
    with plots.figure(out / "sigma.png", len(sigmas)) as axes:
        plot.sigma_histograms(sigmas, ax=axes)
    plots.pruning(out / "pruning.png", found["pruning"]["keep"], found["pruning"]["curves"])
    paths = {k: v for k, v in found["interpolation"].items() if "/" in k}
    with plots.figure(out / "interpolation.png", 2) as axes:
        for ax, (source, title) in zip(
            axes, {"ensemble": "Ensemble members", "hmc": "HMC samples"}.items(), strict=True
        ):
            lines = {
                f"{when} alignment": [
                    LossBarrier(barrier, found["interpolation"]["ratios"], losses, [], [])
                    for barrier, losses in zip(
                        *(paths[f"{source}/{when}"][k] for k in ("barrier", "loss")), strict=True
                    )
                ]
                for when in ("before", "after")
            }
            plot.interpolation(lines, ylabel="training loss (nats)", title=title, ax=ax)
    pairs = len(found["interpolation"]["ensemble/before"]["loss"])
    sections = [
        *(f"## {g.title}\n\n{g.markdown()}" for g in grids),
        "## Standard deviations before and after alignment\n\n![sigma histograms](sigma.png)",
        "## Accuracy against pruning level\n\n![pruning](pruning.png)\n\nKept are the weights of lowest σ. For "
        "HMC's and VI's σ on the ensemble's mean and members, all are matched to the ensemble's mean first.",
        "## Loss along the interpolation\n\n![interpolation](interpolation.png)\n\nShaded: one standard deviation over "
        f"{pairs} pairs.",
    ]
    return Outcome({}, str(write_report(out, table, sections)), grids)


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


def alignment_table(runs: Runs, paths: Mapping[str, Any]) -> Grid:
    """Transpositions, standard deviations and barriers of each alignment."""
    body = []
    for label, source in (("HMC", "hmc"), ("Ensemble", "ensemble")):
        run: Path = getattr(runs, source)
        q_d, q_r = (CompactPosterior.load(run / name) for name in (Q_D, Q_R))
        _, *moved = q_r.metadata["transpositions"]  # the first is the reference
        barriers = [np.mean(paths[f"{source}/{when}"]["barrier"]) for when in ("before", "after")]
        body.append(
            [
                label,
                str(1 + len(moved)),
                f"{np.mean(moved):.1f}",
                f"{min(moved)}–{max(moved)}",
                f"{paths['transpositions_random']:.1f}",
                f"{_root_mean_square(q_d):.3f} → {_root_mean_square(q_r):.3f}",
                f"{barriers[0]:.2f} → {barriers[1]:.2f}",
            ]
        )
    header = ["", "nets", "NoT mean", "NoT range", "random", "rms σ", "barrier"]
    caption = "random: mean NoT of a random permutation; barrier: excess of the training loss in nats, mean over pairs"
    return Grid("Alignments to the first network", header, body, caption)


def chain_table(runs: Runs) -> Grid:
    """Whether the chain is one: acceptance, effective sample sizes and split R-hat of its transitions."""
    _, acceptance = logged_curve(runs.hmc, "hmc/acceptance")
    last = {name: value for name, value in last_values(runs.hmc).items() if name.startswith(("hmc/ess", "hmc/rhat"))}
    words = {"ess": "effective sample size", "rhat": "split R-hat"}
    body = [
        ["transitions", str(len(acceptance))],
        ["samples stored", str(len(SampleStore.open(runs.hmc / SAMPLES)))],
        ["acceptance rate", f"{np.mean(acceptance):.3f}"],
    ]
    for name, value in sorted(last.items()):
        _, kind, of = name.split("/")
        which = {"projections": "worst random projection", "projections_median": "median random projection"}
        body.append([f"{words[kind]}, {which.get(of, of)}", f"{value:.3g}"])
    return Grid("The HMC chain", ["", "value"], body)


def _root_mean_square(q: CompactPosterior) -> float:
    return float(q.sigma().double().square().mean().sqrt())


def _sigma(path: Path) -> np.ndarray:
    return np.asarray(CompactPosterior.load(path).sigma().double())
