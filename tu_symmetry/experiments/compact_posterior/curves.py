"""The curves of arXiv 2401.00611: accuracy against pruning level (Figure 5) and loss along interpolations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.activations import activation_matching
from tu_symmetry.alignment.barrier import loss_barrier
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import accuracy, logits, mean_probabilities
from tu_symmetry.experiments.compact_posterior.sources import PosteriorStudy, Runs
from tu_symmetry.posterior.compact import prune as masked
from tu_symmetry.reporting.progress import Display
from tu_symmetry.states import unstack
from tu_symmetry.symmetry.action import apply_permutation, permute_tensors
from tu_symmetry.tables.outcome import Outcome

KEEP = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01)


def prune(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    runs: Runs,
    keep: Sequence[float] = KEEP,
    num_samples: int = 200,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """Accuracy of pruned samples (own sigma), and of the ensemble's mean and members pruned by HMC's and VI's sigma.

    A sigma of another method orders the units of *its* networks; so the means are first matched to the ensemble's mean
    by activation matching, and the masks move along. A random order of the weights is the control.

    Args:
        out: folder of the results.
        model: the architecture.
        data: units are matched on its training set, accuracies are of its test set.
        runs: the folders of the chain, the ensemble and variational inference.
        keep: shares of the weights that are kept, those of lowest sigma.
        num_samples: draws from each q.
        seed: the seed of the draws and of the random order.
        device: ``cpu``, ``cuda``, or ``auto``.
    """
    study = PosteriorStudy(model, data, device, seed)
    graph, model = study.graph, study.model

    def accuracy_of(state: dict[str, Tensor]) -> float:
        return accuracy(logits(model, state, study.test), study.test.y)

    columns = {"HMC": "hmc/q_r", "ensemble": "ensemble/q_r", "VI": "vi/q"}
    q = {name: study.posterior(runs.posterior(column)) for name, column in columns.items()}
    center = q["ensemble"].mean
    moves = {
        name: activation_matching(graph, model, center, other.mean, study.train).permutation
        for name, other in q.items()
        if name != "ensemble"
    }
    members = list(unstack(study.samples(runs.ensemble)))
    member_moves = [activation_matching(graph, model, center, m, study.train).permutation for m in members]
    aligned = [apply_permutation(graph, p, m) for p, m in zip(member_moves, members, strict=True)]
    generator = study.generator("control")
    order = {
        n: torch.rand(t.shape, generator=generator, dtype=torch.float64, device="cpu").to(t.device)
        for n, t in center.items()
    }
    draws = {name: one.sample(num_samples, generator=study.generator(name)) for name, one in q.items()}

    curves: dict[str, list[float]] = {}

    def add(curve: str, value: float) -> None:
        curves.setdefault(curve, []).append(value)

    with Display().track("pruning", len(keep)) as tracker:
        for i, share in enumerate(keep):
            for name, posterior in q.items():
                mask = posterior.pruning_mask(share)
                predictive = mean_probabilities(model, masked(draws[name], mask), study.test)
                add(f"{name} samples, own σ", accuracy(predictive, study.test.y))
                add(f"{name} mean, own σ", accuracy_of(masked(posterior.mean, mask)))
            foreign = {name: permute_tensors(graph, p, q[name].pruning_mask(share)) for name, p in moves.items()}
            foreign["random"] = _lowest(order, share)
            for name, mask in foreign.items():
                label = "random order" if name == "random" else f"{name}'s σ"
                add(f"ensemble mean, {label}", accuracy_of(masked(center, mask)))
                single = [accuracy_of(masked(m, mask)) for m in aligned]
                add(f"single networks, {label}", sum(single) / len(single))
            tracker.update(i + 1)
    half = min(range(len(keep)), key=lambda i: abs(keep[i] - 0.5))
    own, foreign_hmc = (curves[f"ensemble mean, {which}"][half] for which in ("own σ", "HMC's σ"))
    return Outcome(
        {"keep": list(keep), "curves": curves},
        f"keeping {keep[half]:.0%}: ensemble mean {own:.3f} (own σ), {foreign_hmc:.3f} (HMC's σ)",
    )


def interpolate(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    runs: Runs,
    points: int = 21,
    pairs: int = 4,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """Training loss on the segments between networks, before and after activation matching.

    Args:
        out: folder of the results.
        model: the architecture.
        data: units are matched and losses taken on its training set.
        runs: the folders of the chain and the ensemble.
        points: number of points on each segment, both ends included.
        pairs: number of pairs of each source; the first network with each of the others in turn.
        seed: nothing is drawn; kept so that all commands of a table take one.
        device: ``cpu``, ``cuda``, or ``auto``.
    """
    study = PosteriorStudy(model, data, device, seed)
    found: dict[str, Any] = {}
    with Display().track("interpolating", 4 * pairs) as tracker:
        done = 0
        for source in ("ensemble", "hmc"):
            first, *others = unstack(study.samples(getattr(runs, source), pairs + 1))
            for kind in ("before", "after"):
                paths = []
                for other in others:
                    if kind == "after":
                        matching = activation_matching(study.graph, study.model, first, other, study.train)
                        other = apply_permutation(study.graph, matching.permutation, other)
                    paths.append(loss_barrier(study.model, first, other, study.train, cross_entropy, points=points))
                    done += 1
                    tracker.update(done, path=f"{source} {kind}")
                found["ratios"] = paths[0].ratios
                found[f"{source}/{kind}"] = {"loss": [p.losses for p in paths], "barrier": [p.barrier for p in paths]}
    means = {k: sum(v["barrier"]) / len(v["barrier"]) for k, v in found.items() if k != "ratios"}
    # what a random permutation of n has on average: n minus its expected number of cycles
    found["transpositions_random"] = sum(
        g.size - sum(1 / k for k in range(1, g.size + 1)) for g in study.graph.permutations
    )
    return Outcome(
        found,
        f"mean barrier before → after: ensemble {means['ensemble/before']:.3g} → {means['ensemble/after']:.3g}, "
        f"HMC {means['hmc/before']:.3g} → {means['hmc/after']:.3g} nats",
    )


def _lowest(order: dict[str, Tensor], keep: float) -> dict[str, Tensor]:
    flat = torch.cat([t.flatten() for t in order.values()])
    threshold = flat.sort().values[max(round(keep * flat.numel()), 1) - 1]
    return {name: t <= threshold for name, t in order.items()}
