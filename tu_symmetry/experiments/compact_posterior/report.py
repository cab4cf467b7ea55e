"""The report of Table 1 and Figures 2 and 5 of arXiv 2401.00611: ours and theirs, and the figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np

from tu_symmetry.experiments.compact_posterior.posteriors import Runs
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.logs import last_values, logged_curve
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Found, Report, table

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
    "agreement with HMC ↑\npaper": "agreement",
    "TV to HMC ↓\npaper": "tv",
    "samples' accuracy % ↑\npaper": "accuracy",
    "means' accuracy % ↑\npaper": "mean_accuracy",
}
PANELS = {
    "samples": "Samples, own σ",
    "ensemble mean": "Mean of the ensemble's $q_r$",
    "single networks": "Single networks",
}
SOURCES = {"hmc": "HMC", "ensemble": "Ensemble"}


def report(out: Path, recipe: str, runs: Runs, comparison: Path, pruning: Path, interpolation: Path) -> Outcome:
    """Write ``report.md`` and its plots from what the other commands of the table have left in their folders."""
    page = Report(out, recipe)
    compared, pruned, paths = (Outcome.load(folder).results for folder in (comparison, pruning, interpolation))
    page.add(main_table(compared, page.table.paper, page.table.title), rival_table(compared))
    page.add(alignment_table(runs, paths), weight_space_table(pruned["weight_space"]), chain_table(runs))
    kept = (
        "Kept are the weights of lowest σ. For HMC's and VI's σ on the ensemble's mean and members, all are matched to "
        "the ensemble's mean first."
    )
    shaded = f"Shaded: one standard deviation over {len(paths['ensemble/before']['loss'])} pairs."
    title = "Standard deviations before and after alignment"
    page.figure("sigma", draw_sigmas, runs, title=title, alt="standard deviations")
    page.figure("pruning", draw_pruning, pruned, title="Accuracy against pruning level", after=kept)
    page.figure("interpolation", draw_interpolation, paths, title="Loss along the interpolation", after=shaded)
    title = "Losses along the training of the ensemble"
    page.figure("dynamics", draw_dynamics, paths["dynamics"], title=title, after=shaded)
    return page.done()


def main_table(found: Found, paper: Found, title: str) -> Grid:
    """Table 1: ours, and the paper's below."""
    repeats, draws = found["draws"]

    def cell(row: str, column: str) -> str:
        ours, theirs = found["rows"][row].get(column), paper.get(row, {}).get(column)
        percent = row.endswith("accuracy")
        shown = ["–" if v is None else f"{100 * v:.2f}" if percent else f"{v:.4f}" for v in (ours, theirs)]
        return shown[0] if ours is None and theirs is None else "\n".join(shown)

    worst = 100 * max(found["spread"]["accuracy"].values(), default=0.0)
    sets = f"means over {repeats} sets of {draws} draws; their accuracies vary by {worst:.1f} at most (std)"
    caption = f"second lines: the paper; q: {sets if repeats > 1 else f'{draws} draws'}"
    columns = {header: lambda row, column=column: cell(row, column) for column, header in COLUMNS.items()}
    return table(title, ROWS, columns, caption)


def rival_table(found: Found) -> Grid:
    """The posteriors beside all networks that they were fitted to, one of them, and the same with noise."""
    words = {"sample": "all networks", "member": "one member", "noise": "one member with noise"}
    words["as_many"] = "as many networks as low rank"
    rows = {}
    for column in found["rows"]["storage"]:
        source, _, kind = column.partition("/")
        rows[f"{SOURCES.get(source, 'VI')}: {words.get(kind, kind)}"] = column
    shown = {"agreement": "agreement ↑", "tv": "TV ↓", "accuracy": "accuracy ↑", "nll": "NLL ↓", "storage": "storage"}
    cells = {
        header: lambda column, key=key: f"{found['rows'][key][column]:{'d' if key == 'storage' else '.4f'}}"
        for key, header in shown.items()
    }
    caption = (
        "agreement and TV: with HMC; noise: isotropic, of q_r's rms σ; low rank: with the "
        "networks' covariance along its main directions; NLL in nats; storage in networks"
    )
    return table("Beside what takes one line", dict(sorted(rows.items())), cells, caption)


def alignment_table(runs: Runs, paths: Found) -> Grid:
    """Transpositions, standard deviations and barriers of each alignment."""
    rows = []
    for source, label in SOURCES.items():
        q_d, q_r = (CompactPosterior.load(runs.posterior(f"{source}/{q}")) for q in ("q_d", "q_r"))
        _, *moved = q_r.metadata["transpositions"]  # the first is the reference
        before, after = (fmean(paths[f"{source}/{when}"]["barrier"]) for when in ("before", "after"))
        counts = [f"{fmean(moved):.1f}", f"{min(moved)}–{max(moved)}", f"{paths['transpositions_random']:.1f}"]
        steps = [f"{q_d.rms():.3f} → {q_r.rms():.3f}", f"{before:.2f} → {after:.2f}"]
        rows.append([label, str(1 + len(moved)), *counts, *steps])
    header = ["", "nets", "NoT mean", "NoT range", "random", "rms σ", "barrier"]
    caption = "random: mean NoT of a random permutation; barrier: excess of the training loss in nats, mean over pairs"
    return Grid("Alignments to the first network", header, rows, caption)


def weight_space_table(found: Found) -> Grid:
    """How near HMC, ensemble and VI lie to each other, before and after their means are matched to the ensemble's."""
    columns: dict[str, Callable[[Found], str]] = {
        "distance of means": lambda row: " → ".join(f"{v:.3f}" for v in row["distance"]),
        "rank correlation of σ": lambda row: " → ".join(f"{v:.3f}" for v in row["order"]),
        "ratio of rms σ": lambda row: f"{row['scale'][0]:.2f}",
    }
    caption = "q_r of HMC and of the ensemble, q of VI; distance: |a − b| / √(|a|² + |b|²), 1 for orthogonal means"
    return table("In weight space, before and after matching", found, columns, caption)


def chain_table(runs: Runs) -> Grid:
    """Whether the chain is one: acceptance, effective sample sizes and split R-hat of its transitions."""
    _, acceptance = logged_curve(runs.hmc, "hmc/acceptance")
    rows = {
        "transitions": str(len(acceptance)),
        "samples stored": str(len(SampleStore.open(runs.hmc / "samples"))),
        "acceptance rate": f"{fmean(acceptance):.3f}",
    }
    words = {"ess": "effective sample size", "rhat": "split R-hat"}
    which = {"projections": "worst random projection", "projections_median": "median random projection"}
    for name, value in sorted(last_values(runs.hmc).items()):
        if name.startswith(("hmc/ess", "hmc/rhat")):
            _, kind, of = name.split("/")
            rows[f"{words[kind]}, {which.get(of, of)}"] = f"{value:.3g}"
    return table("The HMC chain", rows, {"value": str})


def draw_sigmas(path: Path, runs: Runs) -> None:
    """Shares of the weights by the standard deviation in q_d (before alignment) and in q_r (after)."""
    with plots.figure(path, len(SOURCES), height=3.1) as axes:
        for ax, (source, title) in zip(axes, SOURCES.items(), strict=True):
            posteriors = (CompactPosterior.load(runs.posterior(f"{source}/{q}")) for q in ("q_d", "q_r"))
            both = [q.sigma().double().numpy().reshape(-1) for q in posteriors]
            top = max(float(np.quantile(sigmas, 0.998)) for sigmas in both) or 1.0
            for sigmas, name, color in zip(both, ("d$, before", "r$, after"), (plots.GRAY, plots.BLUE), strict=True):
                median = float(np.median(sigmas))
                label = rf"$q_{name} alignment (median {median:.2g})"
                ax.plot(np.sort(sigmas), 100 * np.arange(1, sigmas.size + 1) / sigmas.size, color=color, label=label)
            ax.set(title=title, xlabel=r"standard deviation $\sigma$ of a weight", xlim=(0, top), ylim=(0, 130))
            ax.set(ylabel=r"weights of at most this $\sigma$ (%)", yticks=range(0, 101, 25))
            ax.legend(loc="upper left")


def draw_interpolation(path: Path, found: Found) -> None:
    """Losses on the segments between networks before and after alignment, a panel for each source."""
    with plots.figure(path, len(SOURCES)) as axes:
        for ax, (source, title) in zip(axes, SOURCES.items(), strict=True):
            lines = {f"{when} alignment": found[f"{source}/{when}"] for when in ("before", "after")}
            plots.interpolation(ax, found["ratios"], lines, ylabel="training loss (nats)", title=title)


def draw_dynamics(path: Path, found: Found) -> None:
    """Losses of both networks and of the one in the middle along the training (arXiv 2401.00611, Figure 2)."""
    lines = {"W_0": ("$W_0$", plots.ORANGE), "W_1": ("$W_1$", plots.GREEN)}
    lines |= {"before": ("$W_{1/2}$, before matching", plots.GRAY), "after": ("$W_{1/2}$, after matching", plots.BLUE)}
    with plots.figure(path, 2) as axes:
        for ax, part in zip(axes, ("training", "test"), strict=True):
            for name, (label, color) in lines.items():
                plots.band(ax, found["steps"], found[part][name], color, label)
            ax.set(title=f"{part.capitalize()} loss", xlabel="optimizer steps", ylabel="loss (nats)", xscale="log")
            ax.legend(loc="best")


def draw_pruning(path: Path, found: Found) -> None:
    """Accuracy against the share of weights that is kept, those of lowest sigma first (arXiv 2401.00611, Figure 5)."""
    colors = {"own σ": plots.BLUE, "HMC's σ": plots.ORANGE, "VI's σ": plots.GREEN, "random order": plots.GRAY}
    colors |= {"HMC": plots.ORANGE, "ensemble": plots.BLUE, "VI": plots.GREEN}
    removed = [100 * (1 - k) for k in found["keep"]]
    with plots.figure(path, 3) as axes:
        for ax, (kind, title) in zip(axes, PANELS.items(), strict=True):
            for name, values in found["curves"].items():
                head, _, order = name.partition(", ")
                if head == kind or (kind == "samples" and head.endswith(" samples")):
                    label = head.removesuffix(" samples") if kind == "samples" else order
                    line, mark = (":", "") if order == "random order" else ("-", "o")
                    accuracies = [100 * v for v in values]
                    ax.plot(removed, accuracies, label=label, color=colors[label], linestyle=line, marker=mark)
            ax.set(title=title, xlabel="weights pruned (%)", ylabel="test accuracy (%)", ylim=(0, 101), xlim=(-2, 101))
            ax.legend(loc="lower left")
