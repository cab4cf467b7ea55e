"""The report: does training with weight decay reach the least mass?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, measured
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report


def report(out: Path, recipe: str, profiles: Path) -> Outcome:
    """Write ``report.md``: the claim in numbers, and the figure.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        profiles: folder of :func:`~tu_symmetry.experiments.representation_cost.take_profiles`.
    """
    report, found = Report(out, recipe), Outcome.load(profiles).results
    report.add(cost_table(found, report.table.title), heading=False)
    report.figure("mass", draw, found["runs"], found["log_factors"], found["profiles"])
    return report.done()


def cost_table(found: Mapping[str, Any], title: str) -> Grid:
    """Masses, their ratio, and how the networks do, for every weight decay."""
    runs, profiles = found["runs"], found["profiles"]
    decays = list(profiles)
    by_decay = [[r for r in runs if r["weight_decay"] == decay] for decay in decays]
    half = len(runs[0]["ratio"]) // 2
    lines: list[tuple[str, Callable[[dict[str, Any]], float], str]] = [
        ("mass at the end", lambda r: r["mass"][-1], ".1f"),
        ("minimal mass at the end", lambda r: r["minimal_mass"][-1], ".1f"),
        ("ratio at the start", lambda r: r["ratio"][0], ".4f"),
        ("ratio halfway", lambda r: r["ratio"][half], ".4f"),
        ("ratio at the end", lambda r: r["ratio"][-1], ".4f"),
        ("lowest ratio of the run", lambda r: min(r["ratio"]), ".4f"),
        ("training loss (nats)", lambda r: r["train_loss"], ".2g"),
        ("test accuracy (%)", lambda r: 100 * r["test_accuracy"], ".2f"),
    ]
    rows = [
        [name, *(measured([read(r) for r in mine], form, error=False) for mine in by_decay)]
        for name, read, form in lines
    ]
    layers = [profiles[decay]["rms"].values() for decay in decays]
    distances = [[sum(seed) / len(seed) for seed in zip(*values, strict=True)] for values in layers]
    rows.insert(6, ["log-factor to the minimum", *(measured(values, ".3f", error=False) for values in distances)])
    caption = (
        f"Ratio: mass over minimal mass. {len(by_decay[0])} seeds, ± one standard deviation. Log-factor: root mean "
        "square of the natural-log factors from the last weights to the minimum, mean over the layers."
    )
    return Grid(title, ["weight decay", *decays], rows, caption)


def draw(
    path: Path, runs: Sequence[Mapping[str, Any]], log_factors: Sequence[float], profiles: Mapping[str, Any]
) -> None:
    """Mass, its minimum and their ratio along training, and the mass profiles around the last weights.

    Args:
        path: the path of the PNG.
        runs: the records of the runs.
        log_factors: natural-log factors of the profiles.
        profiles: weight decay to ``last`` and ``optimum``, and those to group to ``[seeds, points]`` masses relative to
            the minimal mass.
    """
    colors = (plots.GRAY, plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE)
    groups = list(next(iter(profiles.values()))["last"])
    with plots.figure(path, 2 + len(groups), width=3.1) as axes:
        for color, (decay, found) in zip(colors, profiles.items(), strict=False):
            mine = [r for r in runs if r["weight_decay"] == decay]
            steps = mine[0]["step"]
            plots.band(axes[0], steps, [r["mass"] for r in mine], color, f"weight decay {decay}")
            plots.band(axes[0], steps, [r["minimal_mass"] for r in mine], color, None, linestyle="--")
            plots.band(axes[1], steps, [r["ratio"] for r in mine], color, f"weight decay {decay}")
            for ax, group in zip(axes[2:], groups, strict=True):
                plots.band(ax, log_factors, found["last"][group], color, None)
                plots.band(ax, log_factors, found["optimum"][group], color, None, linestyle="--")
        axes[0].set(title="Mass (dashed: minimal)", xlabel="step", ylabel="squared norm of the weights", yscale="log")
        axes[1].set(title="Mass over minimal mass", xlabel="step", ylabel="ratio")
        axes[1].axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        for ax, group in zip(axes[2:], groups, strict=True):
            ax.axvline(0.0, color="black", linewidth=0.8, linestyle=":")
            ax.set(title=f"Profile of {group}", xlabel="log-factor on all units", ylabel="mass over minimal mass")
        axes[2].plot([], [], color="black", label="from the last weights")
        axes[2].plot([], [], color="black", linestyle="--", label="from the optimum")
        for ax in axes[1:3]:
            low, high = ax.get_ylim()
            ax.set_ylim(low, high + 0.25 * (high - low))
            ax.legend(loc="upper right")
