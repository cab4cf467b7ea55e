"""The report of the barrier recipes: two tables for each kind of network, barriers as bars, losses along the paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.tables.stage import Results, StageContext, stage

METHODS = {
    "none": "no permutation",
    "weights": "weights",
    "activations": "activations",
    "straight_through": "straight-through",
    "universe": "universe",
}
CORRECTIONS = {"none": "none", "batchnorm": "BN", "repair": "REPAIR"}
LEGEND = {"none": "no correction", "batchnorm": "BatchNorm statistics re-estimated", "repair": "REPAIR"}
COLORS = dict(zip(METHODS, (plots.GRAY, plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE), strict=True))
SHADES = dict(zip(CORRECTIONS, (plots.GRAY, plots.BLUE, plots.ORANGE), strict=True))


@dataclass(frozen=True)
class ReportOptions:
    """A report has no options."""


def barrier_table(found: Mapping[str, Any]) -> Grid:
    """Barriers with temperature 1 and tuned, and what the matching did to the distance."""

    def cell(method: str, correction: str, key: str) -> str:
        values = [path[key] for path in found["methods"][method]["paths"][correction]]
        return f"{fmean(values):.2f}\n±{stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"

    rows = [
        [
            METHODS[method],
            f"{fmean(found['matching']['methods'][method]['transpositions'][1:]):.0f}",
            f"{fmean(found['matching']['methods'][method]['distances']):.1f}",
            *(cell(method, correction, key) for key in ("barrier", "tuned_barrier") for correction in CORRECTIONS),
        ]
        for method in found["methods"]
    ]
    header = ["", "NoT", "L2"]
    header += [f"{prefix}\n{name}" for prefix in ("T = 1", "tuned") for name in CORRECTIONS.values()]
    largest = found["matching"]["largest_transpositions"]
    caption = (
        f"barriers of the test loss in nats, mean ± one standard deviation over {len(found['pairs'])} pairs; T: "
        "softmax temperature, 1 or tuned at each point on held-out images; BN: BatchNorm statistics re-estimated "
        "(where all hidden layers are normalized, REPAIR is just that); NoT: relative to the first network, mean over "
        f"the others, {largest} at most; L2: distance, mean over pairs"
    )
    return Grid(f"{found['title']}: barriers", header, rows, caption)


def accuracy_table(found: Mapping[str, Any]) -> Grid:
    """Accuracy halfway between two networks, and of the mean of all, with its loss."""
    single = fmean(member["accuracy"] for member in found["members"])
    loss = fmean(member["loss"] for member in found["members"])
    rows = []
    for method, measured in found["methods"].items():
        middle = [
            fmean(path["middle_accuracy"] for path in measured["paths"][correction]) for correction in CORRECTIONS
        ]
        mean = [measured["mean"][correction] for correction in CORRECTIONS]
        rows.append(
            [
                METHODS[method],
                *(f"{100 * value:.1f}" for value in middle),
                *(f"{100 * scores['accuracy']:.1f}\n{scores['loss']:.3f}" for scores in mean),
            ]
        )
    header = ["", *(f"{prefix}\n{name}" for prefix in ("middle", "mean") for name in CORRECTIONS.values())]
    caption = (
        f"test accuracy in %: halfway between two networks (mean over pairs), and of the mean of all "
        f"{len(found['members'])} with its loss in nats below; single networks: {100 * single:.1f} %, {loss:.3f} nats"
    )
    return Grid(f"{found['title']}: merged networks", header, rows, caption)


def draw_barriers(path: Path, networks: Sequence[Mapping[str, Any]]) -> None:
    """Barriers as bars, for each method and correction.

    Dots are pairs: full ones with the first network, hollow ones of two others, which most methods match to the first
    network only. Black lines are means with tuned temperatures.
    """
    with plots.figure(path, len(networks), width=4.2, height=3.2) as axes:
        for ax, found in zip(axes, networks, strict=True):
            for m, correction in enumerate(CORRECTIONS):
                for k, method in enumerate(found["methods"]):
                    paths = found["methods"][method]["paths"][correction]
                    values, x = [p["barrier"] for p in paths], k + 0.26 * (m - 1)
                    label = (
                        LEGEND[correction] if k == 0 else "_"
                    )  # the legend leaves out what begins with an underscore
                    ax.bar(x, fmean(values), 0.24, color=SHADES[correction], alpha=0.75, label=label)
                    for (i, _), value in zip(found["pairs"], values, strict=True):
                        ax.plot(x, value, "o", color="black", markersize=2.5, fillstyle="none" if i else "full")
                    label = "mean, tuned temperature" if k == m == 0 else "_"
                    tuned = fmean(p["tuned_barrier"] for p in paths)
                    ax.plot([x - 0.12, x + 0.12], [tuned, tuned], color="black", linewidth=1.5, label=label)
            ticks = [METHODS[method].replace(" ", "\n").replace("-", "-\n") for method in found["methods"]]
            ax.set_xticks(range(len(ticks)), ticks, fontsize=8)
            ax.set(title=found["title"], ylabel="barrier of the test loss (nats)")
            ax.grid(axis="x", visible=False)
            ax.sharey(axes[0])
        axes[0].set_ylim(0, axes[0].get_ylim()[1] * 1.35)
        axes[0].legend(loc="upper right")


def draw_paths(path: Path, found: Mapping[str, Any]) -> None:
    """Test loss along the paths between two networks of one kind, mean over pairs, a panel for each correction."""
    with plots.figure(path, len(CORRECTIONS), width=3.4) as axes:
        for ax, (correction, name) in zip(axes, LEGEND.items(), strict=True):
            for method, measured in found["methods"].items():
                losses = [p["loss"] for p in measured["paths"][correction]]
                plots.band(ax, found["ratios"], losses, COLORS[method], METHODS[method], marker="o")
            ax.set(title=name, xlabel=r"interpolation $\lambda$", ylabel="test loss (nats)", xlim=(0, 1))
            ax.sharey(axes[0])
        axes[-1].legend(loc="upper right")


@stage(inputs=("first", "second?", "third?", "fourth?"), reads_table=True)
def report(context: StageContext, options: ReportOptions) -> Results:
    """Write ``report.md`` with tables and figures; the inputs are the barriers of up to four kinds of networks."""
    networks = [source.results for source in context.inputs.values()]
    draw_barriers(context.folder / "barriers.png", networks)
    parts = [f"# {context.table.title}", f"To compare with: {context.table.source}.", context.table.note]
    parts.append("![barriers](barriers.png)")
    grids = []
    for role, found in zip(context.inputs, networks, strict=True):
        file = f"paths-{context.inputs[role].folder.name}.png"
        draw_paths(context.folder / file, found)
        tables = [barrier_table(found), accuracy_table(found)]
        grids += tables
        parts.append(f"## {found['title']}")
        parts += [grid.markdown() for grid in tables]
        parts.append(f"![losses along the paths]({file})")
    environment = ", ".join(f"{k} {v}" for k, v in context.environment.items())
    parts.append(f"## Hardware and versions\n\n{environment}")
    (context.folder / "report.md").write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    return {"tables": [grid.to_dict() for grid in grids], "headline": f"{context.name}/report.md"}
