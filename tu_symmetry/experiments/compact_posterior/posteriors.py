"""Table 1 of arXiv 2401.00611, its pruning curves (Figure 5), and losses along interpolations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.activations import activation_matching
from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.barrier import loss_barrier
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import accuracy, logits, mean_probabilities
from tu_symmetry.experiments.study import Study, tracked
from tu_symmetry.posterior.assessment import predictive_scores
from tu_symmetry.posterior.compact import CompactPosterior, sample_low_rank
from tu_symmetry.posterior.compact import prune as masked
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import State, evenly, stack_states, unstack
from tu_symmetry.symmetry.action import apply_permutation, permute_tensors
from tu_symmetry.symmetry.elements import Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import Outcome

Draw = Callable[..., State]
COLUMNS = ("hmc/q_d", "hmc/q_r", "ensemble/q_d", "ensemble/q_r", "vi/q")


@dataclass(frozen=True)
class Runs:
    """The folders of the chain and the deep ensemble (``samples/``, ``q_d`` and ``q_r``), and of VI (``q``)."""

    hmc: Path
    ensemble: Path
    vi: Path

    def posterior(self, column: str) -> Path:
        """The file of a column of Table 1, ``hmc/q_d`` for example."""
        source, _, q = column.partition("/")
        return getattr(self, source) / f"{q}.safetensors"


class PosteriorStudy(Study):
    """A study of posteriors that runs have written."""

    def posterior(self, path: Path) -> CompactPosterior:
        """A fitted Gaussian of this architecture."""
        return CompactPosterior.load(path, self.graph).to(self.device)

    def samples(self, run: Path, wanted: int | None = None) -> dict[str, Tensor]:
        """The networks of a run, stacked: ``wanted`` evenly spaced ones of them, or all."""
        store = SampleStore.open(run / "samples")
        return store.stack(evenly(len(store), wanted), device=self.device)

    def matched(self, reference: dict[str, Tensor], state: dict[str, Tensor]) -> Permutation:
        """The permutation that matches a network to another one by the activations on the training set."""
        return activation_matching(self.graph, self.model, reference, state, self.train).permutation

    def predictive(self, states: dict[str, Tensor]) -> Tensor:
        """Mean class probabilities of stacked networks on the test set."""
        return mean_probabilities(self.model, states, self.test)

    def accuracy_of(self, state: dict[str, Tensor]) -> float:
        """The test accuracy of one network."""
        return accuracy(logits(self.model, state, self.test), self.test.y)


def compare(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    runs: Runs,
    num_samples: int = 100,
    repeats: int = 1,
    rank: int = 20,
    seed: int = 0,
    device: str = "auto",
    hmc: bool = True,
) -> Outcome:
    """Agreement with HMC, total variation to HMC, accuracy and NLL, for every column of Table 1 and for its rivals.

    These are one member alone, the first, and the same with isotropic noise of q_r's rms; and, as in the authors' code,
    Gaussians with the covariance of q_d's and q_r's networks along its ``rank`` largest directions at most, beside as
    many of the networks as these have to store. Figures are means over ``repeats`` predictives of ``num_samples`` draws
    each: draws from a wide q are poor networks, their predictive varies from set to set, and more draws would flatter
    it. Without ``hmc``, what needs the chain is left out: its columns, agreement and total variation.
    """
    study = PosteriorStudy(model, data, device, seed)
    sources = ("hmc", "ensemble") if hmc else ("ensemble",)
    posteriors = {c: study.posterior(runs.posterior(c)) for c in COLUMNS if c.startswith((*sources, "vi"))}
    mean_accuracy = {column: study.accuracy_of(q.mean) for column, q in posteriors.items()}
    # what is stored, in networks, and the networks or what draws them; of a Gaussian a mean and standard deviations
    rivals: dict[str, tuple[int, State | Draw]] = {column: (2, q.sample) for column, q in posteriors.items()}
    how: dict[str, Any] = {"match_on": "activations", "model": study.model, "dataloader": study.train}
    for source in sources:
        run, q_r = getattr(runs, source), posteriors[f"{source}/q_r"]
        states = study.samples(run)
        every, count = unstack(states), q_r.metadata["networks"]
        rivals[f"{source}/sample"] = len(every), states
        rivals[f"{source}/member"] = 1, stack_states(every[:1])
        rivals[f"{source}/noise"] = 1, q_r.isotropic(every[0]).sample
        fitted = [every[i] for i in evenly(len(every), count)]
        stored = 1 + min(rank, count - 1)  # the mean and directions
        for kind, used in (("q_d", fitted), ("q_r", align(study.graph, fitted, certify=False, **how).states)):
            draw = partial(sample_low_rank, used, study.graph, rank=stored - 1)
            rivals[f"{source}/{kind}, low rank"] = stored, draw
        if stored < len(every):
            rivals[f"{source}/as_many"] = stored, study.samples(run, stored)
    predictives: dict[str, list[Tensor]] = {}
    for column, (_, made) in tracked("predicting", list(rivals.items()), lambda job: job[0]):
        generator = study.generator(column)
        sets = (made(num_samples, generator=generator) for _ in range(repeats)) if callable(made) else [made]
        predictives[column] = [study.predictive(states) for states in sets]
    (reference,) = predictives[f"{sources[0]}/sample"]
    judged = {c: [predictive_scores(p, reference, study.test.y) for p in ps] for c, ps in predictives.items()}
    rows: dict[str, dict[str, float]] = {"mean_accuracy": mean_accuracy}
    spread: dict[str, dict[str, float]] = {}
    for name in judged["ensemble/sample"][0] if hmc else ("accuracy", "nll"):
        values = {column: [one[name] for one in found] for column, found in judged.items()}
        rows[name] = {column: fmean(v) for column, v in values.items()}
        spread[name] = {column: stdev(v) for column, v in values.items() if len(v) > 1}
    rows["storage"] = {column: stored for column, (stored, _) in rivals.items()}
    gains = (
        f"{source} {rows['accuracy'][f'{source}/q_d']:.3f} → {rows['accuracy'][f'{source}/q_r']:.3f}"
        for source in sources
    )
    return Outcome(
        {"rows": rows, "spread": spread, "draws": [repeats, num_samples]}, f"accuracy of q_d → q_r: {', '.join(gains)}"
    )


def prune(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    runs: Runs,
    keep: Sequence[float],
    num_samples: int = 200,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """Accuracy of pruned samples (own sigma), and of the ensemble's mean and members pruned by HMC's and VI's sigma.

    A sigma of another method orders the units of *its* networks; so the means are first matched to the ensemble's mean
    by activation matching, and the masks move along. A random order of the weights is the control. ``keep`` are shares
    of the weights, those of lowest sigma. How near the three Gaussians are in weight space is said before and after.
    """
    study = PosteriorStudy(model, data, device, seed)
    columns = {"HMC": "hmc/q_r", "ensemble": "ensemble/q_r", "VI": "vi/q"}
    q = {name: study.posterior(runs.posterior(column)) for name, column in columns.items()}
    center = q["ensemble"].mean
    moves = {name: study.matched(center, other.mean) for name, other in q.items() if name != "ensemble"}
    members = list(unstack(study.samples(runs.ensemble)))
    aligned = [apply_permutation(study.graph, study.matched(center, m), m) for m in members]
    generator = study.generator("control")
    order = {
        n: torch.rand(t.shape, generator=generator, dtype=torch.float64, device="cpu").to(t.device)
        for n, t in q["ensemble"].std.items()
    }
    control = CompactPosterior(center, order)
    draws = {name: one.sample(num_samples, generator=study.generator(name)) for name, one in q.items()}
    curves: dict[str, list[float]] = {}
    for share in tracked("pruning", keep):
        found: dict[str, float] = {}
        for name, posterior in q.items():
            mask = posterior.pruning_mask(share)
            found[f"{name} samples, own σ"] = accuracy(study.predictive(masked(draws[name], mask)), study.test.y)
            found[f"{name} mean, own σ"] = study.accuracy_of(masked(posterior.mean, mask))
        foreign = {f"{m}'s σ": permute_tensors(study.graph, p, q[m].pruning_mask(share)) for m, p in moves.items()}
        foreign["random order"] = control.pruning_mask(share)
        for label, mask in foreign.items():
            found[f"ensemble mean, {label}"] = study.accuracy_of(masked(center, mask))
            found[f"single networks, {label}"] = fmean([study.accuracy_of(masked(m, mask)) for m in aligned])
        for curve, value in found.items():
            curves.setdefault(curve, []).append(value)
    half = min(range(len(keep)), key=lambda i: abs(keep[i] - 0.5))
    own, foreign_hmc = (curves[f"ensemble mean, {which}"][half] for which in ("own σ", "HMC's σ"))
    return Outcome(
        {"keep": list(keep), "curves": curves, "weight_space": weight_space(study.graph, q, moves)},
        f"keeping {keep[half]:.0%}: ensemble mean {own:.3f} (own σ), {foreign_hmc:.3f} (HMC's σ)",
    )


def weight_space(
    graph: SymmetryGraph, q: Mapping[str, CompactPosterior], moves: Mapping[str, Permutation]
) -> dict[str, dict[str, list[float]]]:
    """How near Gaussians are to each other, each pair before and after ``moves``.

    ``distance`` of the means is relative: ``|a - b| / sqrt(|a|^2 + |b|^2)``, 1 for orthogonal ones; ``order`` is
    Spearman's rank correlation of the sigmas, ``scale`` the ratio of their rms, which no permutation changes.
    """

    def flat(name: str, permutation: Permutation, part: str) -> Tensor:
        moved = permute_tensors(graph, permutation, getattr(q[name], part))
        return torch.cat([moved[n].flatten() for n in q[name].std]).double().cpu()

    found: dict[str, dict[str, list[float]]] = {}
    for a, b in combinations(q, 2):
        row = found[f"{a}, {b}"] = {"distance": [], "order": [], "scale": [q[a].rms() / q[b].rms()]}
        for how in ({}, moves):
            (x, s), (y, t) = ([flat(m, how.get(m, {}), part) for part in ("mean", "std")] for m in (a, b))
            row["distance"].append(float((x - y).norm() / torch.hypot(x.norm(), y.norm())))
            row["order"].append(float(spearmanr(s, t).statistic))
    return found


def interpolate(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    runs: Runs,
    points: int = 21,
    pairs: int = 4,
    device: str = "auto",
) -> Outcome:
    """Training loss on the segments between the first network and others in turn, before and after matching.

    Of the ensemble also along its training (``snapshots/`` in its folder): the losses of both ends and of the middle.
    """
    study = PosteriorStudy(model, data, device)
    found: dict[str, Any] = {}
    for source in tracked("interpolating", ("ensemble", "hmc"), str):
        first, *others = unstack(study.samples(getattr(runs, source), pairs + 1))
        moved = [apply_permutation(study.graph, study.matched(first, other), other) for other in others]
        for kind, ends in (("before", others), ("after", moved)):
            paths = [loss_barrier(study.model, first, end, study.train, cross_entropy, points=points) for end in ends]
            found["ratios"] = paths[0].ratios
            found[f"{source}/{kind}"] = {"loss": [p.losses for p in paths], "barrier": [p.barrier for p in paths]}
    means = {k: fmean(v["barrier"]) for k, v in found.items() if k != "ratios"}
    found["dynamics"] = along_training(study, SampleStore.open(runs.ensemble / "snapshots"), pairs)
    # what a random permutation of n has on average: n minus its expected number of cycles
    found["transpositions_random"] = sum(
        g.size - sum(1 / k for k in range(1, g.size + 1)) for g in study.graph.permutations
    )
    return Outcome(
        found,
        f"mean barrier before → after: ensemble {means['ensemble/before']:.3g} → {means['ensemble/after']:.3g}, "
        f"HMC {means['hmc/before']:.3g} → {means['hmc/after']:.3g} nats",
    )


def along_training(study: PosteriorStudy, store: SampleStore, pairs: int) -> dict[str, Any]:
    """Training and test losses (nats) of W_0, W_1 and the network between them at each stored step (Figure 2).

    W_0 is the first network, W_1 each of the others in turn; the one between them is matched anew at each step.
    """
    steps = sorted(set(store.steps))
    losses: dict[str, dict[str, list[list[float]]]] = {part: {} for part in ("training", "test")}
    for step in tracked("following the training", steps):
        kept = [i for i, own in enumerate(store.steps) if own == step][: pairs + 1]
        first, *others = unstack(store.stack(kept, device=study.device))
        for k, other in enumerate(others):
            moved = apply_permutation(study.graph, study.matched(first, other), other)
            for part, batches in (("training", study.train), ("test", study.test)):
                before, after = (
                    loss_barrier(study.model, first, end, batches, cross_entropy, points=3).losses
                    for end in (other, moved)
                )
                values = {"W_0": before[0], "W_1": before[2], "before": before[1], "after": after[1]}
                for name, value in values.items():
                    curves = losses[part].setdefault(name, [[] for _ in others])
                    curves[k].append(value)
    return {"steps": steps, **losses}
