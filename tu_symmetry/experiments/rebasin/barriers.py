"""Barriers of all pairs of networks and their mean, for each matching and each correction.

All pairs are measured, so those that were never matched to each other count too. Each merged network is measured as it
is, with re-estimated BatchNorm statistics, and after REPAIR (arXiv 2211.08403); each with the softmax temperature 1 and
with a tuned one. The same without any permutation is the control that a matching has to beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch
from torch import nn

from tu_symmetry.alignment.barrier import chord_excess, classifier_scores, interpolate
from tu_symmetry.alignment.repair import Correction, correct
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.rebasin.matching import Members, read_permutations
from tu_symmetry.experiments.study import tracked
from tu_symmetry.files import FileError
from tu_symmetry.states import State, mean_state
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors

CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
Scores = dict[str, float]


def measure(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    samples: Path,
    matching: Path,
    points: int = 5,
    statistics: int = 1000,
    held_out: int = 500,
    device: str = "auto",
) -> Outcome:
    """Barriers of all pairs, and the mean network, for each matching and each correction; every path is kept at once.

    Args:
        data: losses are of its test set, statistics of its training set.
        matching: folder of :func:`~tu_symmetry.experiments.rebasin.match`, whose methods are measured.
        points: evenly spaced points on each path, both ends and the middle included (an odd number).
        statistics: training images, the first ones, for re-estimated statistics and REPAIR.
        held_out: test images, the last ones, on which temperatures are tuned; the others measure losses.
    """
    if points < 3 or points % 2 == 0:
        raise ValueError(f"points must be odd and 3 at least (both ends and the middle), not {points}")
    members = Members(model, data, samples, device)
    found = Outcome.load(matching).results
    if found["networks"] != members.networks:
        raise FileError(f"{matching} holds a matching of other networks than those in {samples}: match these first")
    judge = Judge(members, points, statistics, held_out)
    permutations = read_permutations(matching)
    made_from = {
        "networks": members.networks,
        "permutations": {m: [digest_tensors(*(p[g] for g in sorted(p))) for p in ps] for m, ps in permutations.items()},
        "images": digest_tensors(members.test.x, members.test.y, judge.statistics.x),
        "options": [points, held_out],
    }
    parts = Parts(out / "parts", made_from)
    methods: dict[str, Any] = {}
    ends = [parts.take(f"network/{k}", judge.scores, state) for k, state in enumerate(members.states)]
    for method in tracked("measuring", list(found["methods"]), str):
        states = members.matched(permutations[method])
        inner = [parts.take(f"{method}/{i}-{j}", judge.between, states[i], states[j]) for i, j in members.pairs]
        paths = {
            correction: [
                path_scores([ends[i], *part[correction], ends[j]])
                for (i, j), part in zip(members.pairs, inner, strict=True)
            ]
            for correction in CORRECTIONS
        }
        methods[method] = {"paths": paths, "mean": parts.take(f"{method}/mean", judge.mean, states)}

    def mean_barrier(method: str, correction: str) -> str:
        return f"{fmean(path['barrier'] for path in methods[method]['paths'][correction]):.2f}"

    shown = (f"{name} {mean_barrier(name, 'none')} → {mean_barrier(name, 'batchnorm')}" for name in methods)
    return Outcome(
        {"members": ends, "pairs": members.pairs, "ratios": judge.ratios, "methods": methods, "matching": found},
        f"barrier, no correction → statistics re-estimated: {', '.join(shown)}",
    )


class Judge:
    """Scores networks on test images, merged ones corrected in each way on training images; options as `measure`'s."""

    def __init__(self, members: Members, points: int, statistics: int, held_out: int) -> None:
        test, measured = members.test, len(members.test.x) - held_out
        if not 0 < measured < len(test.x):
            raise ValueError(
                f"held_out is {held_out}, which leaves none of the {len(test.x)} test images to measure, or none to "
                "tune on"
            )
        self.model = members.model
        self.statistics = members.first_images(statistics)
        self.test = Batches(test.x[:measured], test.y[:measured])
        self.held_out = Batches(test.x[measured:], test.y[measured:])
        self.ratios: list[float] = torch.linspace(0, 1, points, dtype=torch.float64, device="cpu").tolist()

    def scores(self, state: State) -> Scores:
        """Loss (nats), accuracy, tuned temperature, and the loss at that temperature."""
        return asdict(classifier_scores(self.model, state, self.test, calibration=self.held_out))

    def between(self, a: State, b: State) -> dict[str, list[Scores]]:
        """Scores at the inner points of the path between two networks, for each correction."""
        points = [self.merged([a, b], [1 - ratio, ratio], interpolate(a, b, ratio)) for ratio in self.ratios[1:-1]]
        return {correction: [point[correction] for point in points] for correction in CORRECTIONS}

    def mean(self, states: Sequence[State]) -> dict[str, Scores]:
        """Scores of the mean of all networks, for each correction."""
        return self.merged(states, [1 / len(states)] * len(states), mean_state(states))

    def merged(self, ends: Sequence[State], ratios: Sequence[float], state: State) -> dict[str, Scores]:
        """Scores of a merged network after each correction.

        Where every hidden layer feeds a BatchNorm layer, REPAIR has nothing to do but to re-estimate statistics, and
        the network is scored once for both.
        """
        states = {c: correct(self.model, ends, ratios, state, self.statistics, c) for c in CORRECTIONS}
        found = {c: self.scores(states[c]) for c in ("none", "batchnorm")}
        same = all(torch.equal(states["repair"][name], t) for name, t in states["batchnorm"].items())
        return found | {"repair": found["batchnorm"] if same else self.scores(states["repair"])}


def path_scores(points: Sequence[Scores]) -> dict[str, Any]:
    """Scores along one path, its barriers (nats), and the accuracy in the middle; a loss of None is infinite."""
    columns = {name: [point[name] for point in points] for name in points[0]}
    losses = torch.tensor(
        [[math.inf if loss is None else loss for loss in columns[name]] for name in ("loss", "tempered_loss")],
        dtype=torch.float64,
        device="cpu",
    )
    if not losses[:, [0, -1]].isfinite().all():
        raise ValueError(f"the losses of two networks are {losses[0, 0]} and {losses[0, -1]}: train them again")
    barrier, tempered = chord_excess(losses).tolist()
    middle = columns["accuracy"][len(points) // 2]
    return columns | {"barrier": barrier, "tempered_barrier": tempered, "middle_accuracy": middle}
