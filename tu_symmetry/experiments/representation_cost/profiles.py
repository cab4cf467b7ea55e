"""Mass along training, and mass profiles of the trained networks (arXiv 2310.08287, section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import accuracy, logits
from tu_symmetry.experiments.study import Study
from tu_symmetry.reporting.progress import Display
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.scaling.profiles import mass_profile
from tu_symmetry.tables.logs import last_weights, logged_curve
from tu_symmetry.tables.outcome import Outcome


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
        out: folder of the results.
        model: the architecture; its own weights do not matter.
        data: losses are of its training set, accuracies of its test set.
        runs: weight decay to the folders of its runs, one for each seed: fits of the architecture by a routine that
            holds it as ``model``, with ``ScaleCanonicalization``, a CSVLogger, and a ``last.ckpt``.
        reach: largest natural-log factor, in both directions.
        points: evenly spaced log-factors.
    """
    study = Study(model, data, "cpu")
    model, train, test, graph = study.model, study.train, study.test, study.graph
    log_factors = torch.linspace(-reach, reach, points, dtype=torch.float64, device="cpu")
    records: list[dict[str, Any]] = []
    profiles: dict[str, dict[str, Any]] = {}
    with Display().track("profiles", sum(len(folders) for folders in runs.values())) as tracker:
        for decay, folders in runs.items():
            mine: dict[str, Any] = {
                k: {g.name: [] for g in graph.scales} for k in ("last", "optimum", "minimum", "rms")
            }
            for seed, folder in enumerate(folders):
                state = last_weights(folder)
                loss = float(cross_entropy(logits(model, state, train), train.y))
                curves = mass_curves(folder)
                score = accuracy(logits(model, state, test), test.y)
                records.append(
                    {"weight_decay": decay, "seed": seed, **curves, "train_loss": loss, "test_accuracy": score}
                )
                least = canonicalize(graph, state)
                last, optimum = (mass_profile(graph, s, log_factors) for s in (state, least.state))
                for name, log_scale in least.log_scale.items():
                    mine["last"][name].append((last.masses[name] / least.mass_after).tolist())
                    mine["optimum"][name].append((optimum.masses[name] / least.mass_after).tolist())
                    mine["minimum"][name].append(last.minima[name])
                    mine["rms"][name].append(float(log_scale.square().mean().sqrt()))
                tracker.update(len(records))
            profiles[decay] = mine
    ratios = {decay: fmean([r["ratio"][-1] for r in records if r["weight_decay"] == decay]) for decay in runs}
    text = ", ".join(f"{ratio:.3f} with {decay}" for decay, ratio in ratios.items())
    return Outcome(
        {"runs": records, "log_factors": log_factors, "profiles": profiles},
        f"mass over minimal mass at the end: {text}",
    )


def mass_curves(run: Path) -> Mapping[str, Any]:
    """Mass, minimal mass and their ratio along a run, at the same steps."""
    step, mass = logged_curve(run, "scale/mass")
    _, least = logged_curve(run, "scale/minimal_mass")
    ratio = [m / c for m, c in zip(mass, least, strict=True)]
    return {"step": step, "mass": mass, "minimal_mass": least, "ratio": ratio}
