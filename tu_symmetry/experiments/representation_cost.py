"""arXiv 2310.08287, section 6: the representation cost of networks trained with and without weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import accuracy, logits
from tu_symmetry.experiments.study import Study, tracked
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid, measured
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.scaling.masses import mass_profile
from tu_symmetry.tables.logs import last_weights, logged_curve
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Found, Report, table


class ConvNet(nn.Module):
    """Two convolutions and two linear layers with ReLU, a stride and a max-pooling, without normalization.

    Args:
        in_features: number of pixels of a square image with one channel.
        channels: the channels of the two convolutions.
        hidden: units of the first linear layer.
    """

    def __init__(self, in_features: int, num_classes: int, channels: Sequence[int] = (8, 16), hidden: int = 32) -> None:
        super().__init__()
        first, second = channels
        side = math.isqrt(in_features) // 4
        self.conv1 = nn.Conv2d(1, first, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.hidden = nn.Linear(second * side**2, hidden)
        self.output = nn.Linear(hidden, num_classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, 1, side, side]``."""
        x = self.conv1(x).relu()
        x = self.pool(self.conv2(x).relu())
        return self.output(self.hidden(x.flatten(1)).relu())


def take_profiles(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    runs: dict[str, list[Path]],
    reach: float = 1.0,
    points: int = 81,
) -> Outcome:
    """Mass, relative to its minimum, when all units of a layer are scaled: from the last weights, from the optimum.

    Args:
        runs: weight decay to the folders of its runs, one for each seed: fits of the architecture by a routine that
            holds it as ``model``, with ``ScaleCanonicalization``, a CSVLogger, and a ``last.ckpt``.
        reach: largest natural-log factor, in both directions.
    """
    study = Study(model, data, "cpu")
    model, train, test, graph = study.model, study.train, study.test, study.graph
    log_factors = torch.linspace(-reach, reach, points, dtype=torch.float64, device="cpu")
    records: list[dict[str, Any]] = []
    kinds = ("last", "optimum", "minimum")
    profiles: dict[str, Any] = {decay: {kind: {g.name: [] for g in graph.scales} for kind in kinds} for decay in runs}
    jobs = [(decay, seed, folder) for decay, folders in runs.items() for seed, folder in enumerate(folders)]
    for decay, seed, folder in tracked("profiles", jobs, lambda job: job[0]):
        state = last_weights(folder)
        step, mass = logged_curve(folder, "scale/mass")
        _, minimal = logged_curve(folder, "scale/minimal_mass")
        ratio = [m / c for m, c in zip(mass, minimal, strict=True)]
        loss = float(cross_entropy(logits(model, state, train), train.y))
        right = accuracy(logits(model, state, test), test.y)
        least, mine = canonicalize(graph, state), profiles[decay]
        factor = fmean(float(log_scale.square().mean().sqrt()) for log_scale in least.log_scale.values())
        record = {"weight_decay": decay, "seed": seed, "step": step, "mass": mass, "minimal_mass": minimal}
        records.append(record | {"ratio": ratio, "log_factor": factor, "train_loss": loss, "test_accuracy": right})
        last, optimum = (mass_profile(graph, s, log_factors) for s in (state, least.state))
        for name in least.log_scale:
            mine["last"][name].append((last.masses[name] / least.mass_after).tolist())
            mine["optimum"][name].append((optimum.masses[name] / least.mass_after).tolist())
            mine["minimum"][name].append(last.minima[name])
    ratios = {decay: fmean([r["ratio"][-1] for r in records if r["weight_decay"] == decay]) for decay in runs}
    text = ", ".join(f"{ratio:.3f} with {decay}" for decay, ratio in ratios.items())
    return Outcome(
        {"runs": records, "log_factors": log_factors, "profiles": profiles},
        f"mass over minimal mass at the end: {text}",
    )


def report(out: Path, recipe: str, profiles: Path) -> Outcome:
    """Write ``report.md``: does training with weight decay reach the least mass? From `take_profiles`' folder."""
    page, found = Report(out, recipe), Outcome.load(profiles).results
    page.add(cost_table(found, page.table.title), heading=False)
    page.figure("mass", draw, found)
    return page.done()


def cost_table(found: Found, title: str) -> Grid:
    """Masses, their ratio, and how the networks do, for every weight decay."""
    by_decay = {decay: [r for r in found["runs"] if r["weight_decay"] == decay] for decay in found["profiles"]}
    half = len(found["runs"][0]["ratio"]) // 2
    lines: dict[str, tuple[Callable[[dict[str, Any]], float], str]] = {
        "mass at the end": (lambda r: r["mass"][-1], ".1f"),
        "minimal mass at the end": (lambda r: r["minimal_mass"][-1], ".1f"),
        "ratio at the start": (lambda r: r["ratio"][0], ".4f"),
        "ratio halfway": (lambda r: r["ratio"][half], ".4f"),
        "ratio at the end": (lambda r: r["ratio"][-1], ".4f"),
        "lowest ratio of the run": (lambda r: min(r["ratio"]), ".4f"),
        "log-factor to the minimum": (lambda r: r["log_factor"], ".3f"),
        "training loss (nats)": (lambda r: r["train_loss"], ".2g"),
        "test accuracy (%)": (lambda r: 100 * r["test_accuracy"], ".2f"),
    }
    columns = {
        decay: lambda line, mine=mine: measured([line[0](r) for r in mine], line[1], error=False)
        for decay, mine in by_decay.items()
    }
    seeds = len(next(iter(by_decay.values())))
    caption = (
        f"Ratio: mass over minimal mass. {seeds} seeds, ± one standard deviation. Log-factor: root mean square of the "
        "natural-log factors from the last weights to the minimum, mean over the layers."
    )
    return table(title, lines, columns, caption, "weight decay")


def draw(path: Path, found: Found) -> None:
    """Mass, its minimum and their ratio along training, and the mass profiles around the last weights."""
    profiles = found["profiles"]
    colors = (plots.GRAY, plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE)  # gray: no decay
    groups = list(next(iter(profiles.values()))["last"])
    with plots.figure(path, 2 + len(groups), width=3.1) as axes:
        for color, (decay, own) in zip(colors, profiles.items(), strict=False):
            mine = [r for r in found["runs"] if r["weight_decay"] == decay]
            steps = mine[0]["step"]
            plots.band(axes[0], steps, [r["mass"] for r in mine], color, f"weight decay {decay}")
            plots.band(axes[0], steps, [r["minimal_mass"] for r in mine], color, None, linestyle="--")
            plots.band(axes[1], steps, [r["ratio"] for r in mine], color, f"weight decay {decay}")
            for ax, group in zip(axes[2:], groups, strict=True):
                plots.band(ax, found["log_factors"], own["last"][group], color, None)
                plots.band(ax, found["log_factors"], own["optimum"][group], color, None, linestyle="--")
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
