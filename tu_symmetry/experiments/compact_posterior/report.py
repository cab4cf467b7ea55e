"""The report of Table 1 and Figure 5 of arXiv 2401.00611: ours and theirs, and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from tu_symmetry.tables.logs import last_values, logged_curve
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

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
    report = Report(out, recipe)
    compared, paths = Outcome.load(comparison).results, Outcome.load(interpolation).results
    pruned = Outcome.load(pruning).results
    report.add(main_table(compared, report.table.paper, report.table.title), alignment_table(runs, paths))
    report.add(chain_table(runs))
    title = "## Standard deviations before and after alignment"
    report.figure("sigma", draw_sigmas, runs, alt="sigma histograms", before=title)
    report.figure(
        "pruning",
        draw_pruning,
        pruned["keep"],
        pruned["curves"],
        before="## Accuracy against pruning level",
        after="Kept are the weights of lowest σ. For HMC's and VI's σ on the ensemble's mean and members, all are "
        "matched to the ensemble's mean first.",
    )
    pairs = len(paths["ensemble/before"]["loss"])
    report.figure(
        "interpolation",
        draw_interpolation,
        paths,
        before="## Loss along the interpolation",
        after=f"Shaded: one standard deviation over {pairs} pairs.",
    )
    return report.done()


def draw_sigmas(path: Path, runs: Runs) -> None:
    """Histograms of the standard deviations of q_d and q_r."""
    sigmas = {
        title: {"before": _sigma(run / Q_D), "after": _sigma(run / Q_R)}
        for title, run in (("HMC", runs.hmc), ("Ensemble", runs.ensemble))
    }
    with plots.figure(path, len(sigmas)) as axes:
        plot.sigma_histograms(sigmas, ax=axes)


def draw_interpolation(path: Path, found: Mapping[str, Any]) -> None:
    """Losses on the segments between networks before and after alignment, a panel for each source."""
    titles = {"ensemble": "Ensemble members", "hmc": "HMC samples"}
    with plots.figure(path, len(titles)) as axes:
        for ax, (source, title) in zip(axes, titles.items(), strict=True):
            lines = {}
            for when in ("before", "after"):
                own = found[f"{source}/{when}"]
                pairs = zip(own["barrier"], own["loss"], strict=True)
                lines[f"{when} alignment"] = [LossBarrier(b, found["ratios"], losses, [], []) for b, losses in pairs]
            plot.interpolation(lines, ylabel="training loss (nats)", title=title, ax=ax)


def draw_pruning(path: Path, keep: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """Accuracy against the share of weights that is kept, those of lowest sigma first (arXiv 2401.00611, Figure 5)."""
    panels = {
        "samples": "Samples, own σ",
        "ensemble mean": "Mean of the ensemble's $q_r$",
        "single networks": "Single networks",
    }
    methods = {"HMC": plots.ORANGE, "ensemble": plots.BLUE, "VI": plots.GREEN}
    colors = methods | {"own σ": plots.BLUE, "HMC's σ": plots.ORANGE, "VI's σ": plots.GREEN}
    with plots.figure(path, 3) as axes:
        removed = [100 * (1 - k) for k in keep]
        for ax, (kind, title) in zip(axes, panels.items(), strict=True):
            for name, values in curves.items():
                head, _, order = name.partition(", ")
                if not (head == kind or (kind == "samples" and head.endswith(" samples"))):
                    continue
                label = head.removesuffix(" samples") if kind == "samples" else order
                control = order == "random order"
                line, mark = (":", "") if control else ("-", "o")
                color = plots.GRAY if control else colors[label]
                ax.plot(removed, [100 * v for v in values], label=label, color=color, linestyle=line, marker=mark)
            ax.set(title=title, xlabel="weights pruned (%)", ylabel="test accuracy (%)", ylim=(0, 101), xlim=(-2, 101))
            ax.legend(loc="lower left")


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
