"""Barriers of all pairs of networks and their mean, for each matching and each correction.

All pairs are measured, so those that were never matched to each other count too. Each merged network is measured as it
is, and where there is batch normalization with re-estimated statistics and after REPAIR (arXiv 2211.08403); each with
the softmax temperature 1 and with a tuned one. The same without any permutation is the control that a matching has to
beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tu_symmetry.alignment.barrier import chord_excess, classifier_scores, interpolate
from tu_symmetry.alignment.repair import Correction, correct
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches, accuracy, mean_probabilities
from tu_symmetry.experiments.rebasin.matching import Members
from tu_symmetry.experiments.study import tracked
from tu_symmetry.files import FileError
from tu_symmetry.states import State, mean_state, stack_states
from tu_symmetry.tables.outcome import Outcome, Parts

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
    """Barriers of all pairs, and the mean network, for each matching and each correction.

    Args:
        data: losses are of its test set, statistics of its training set.
        matching: folder of :func:`~tu_symmetry.experiments.rebasin.match`, whose methods are measured; each path is
            kept in the ``parts`` of ``out``.
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
    count = len(members.test.x) - held_out
    if not 0 < count < len(members.test.x):
        raise ValueError(f"held_out is {held_out}, which leaves none of the test images to measure, or none to tune on")
    images = members.first_images(statistics)
    test, tuning = (Batches(members.test.x[rows], members.test.y[rows]) for rows in (slice(count), slice(count, None)))
    ratios = torch.linspace(0, 1, points, dtype=torch.float64, device="cpu").tolist()

    measured = CORRECTIONS if any(isinstance(m, _BatchNorm) for m in members.model.modules()) else CORRECTIONS[:1]

    def scores(state: State) -> Scores:
        return asdict(classifier_scores(members.model, state, test, calibration=tuning))

    def merged(ends: Sequence[State], shares: Sequence[float], state: State) -> dict[str, Scores]:
        """Scores of a merged network after each correction, which are two where REPAIR only re-estimates statistics."""
        if measured == ("none",):
            return {"none": scores(state)}
        states = {c: correct(members.model, ends, shares, state, images, c) for c in CORRECTIONS}
        corrected = {c: scores(states[c]) for c in ("none", "batchnorm")}
        same = all(torch.equal(states["repair"][name], t) for name, t in states["batchnorm"].items())
        return corrected | {"repair": corrected["batchnorm"] if same else scores(states["repair"])}

    moves = found.pop("moves")
    singles = [scores(state) for state in members.states]
    together = mean_probabilities(members.model, stack_states(members.states), test)
    loss = float(-together.gather(1, test.y[:, None]).clamp(min=1e-30).log().mean())
    ensemble = {"loss": loss, "accuracy": accuracy(together, test.y)}
    matched = lru_cache(maxsize=1)(lambda method: members.matched(moves[method]))

    def path(method: str, i: int, j: int) -> dict[str, Any]:
        a, b = matched(method)[i], matched(method)[j]
        inner = [merged([a, b], [1 - ratio, ratio], interpolate(a, b, ratio)) for ratio in ratios[1:-1]]
        return {c: path_scores([singles[i], *(point[c] for point in inner), singles[j]]) for c in measured}

    def mean(method: str) -> dict[str, Scores]:
        states = matched(method)
        return merged(states, [1 / len(states)] * len(states), mean_state(states))

    parts = Parts(out / "parts", [found, moves, members.digest(), repr(model), points, statistics, held_out])
    methods: dict[str, Any] = {method: {"paths": {c: [] for c in measured}} for method in found["methods"]}
    for method, pair in tracked("measuring", [(m, p) for m in methods for p in (*members.pairs, None)], lambda j: j[0]):
        if pair is None:
            methods[method]["mean"] = parts.take(f"{method}-mean", mean, method)
            continue
        kept = parts.take(f"{method}-{pair[0]}-{pair[1]}", path, method, *pair)
        for correction, own in methods[method]["paths"].items():
            own.append(kept[correction])

    def mean_barrier(method: str, correction: str) -> str:
        barriers = (own["barrier"] for own in methods[method]["paths"][correction])
        return f"{fmean(math.inf if barrier is None else barrier for barrier in barriers):.2f}"

    shown = (" → ".join([name, *(mean_barrier(name, c) for c in measured if c != "repair")]) for name in methods)
    return Outcome(
        {
            "members": singles,
            "ensemble": ensemble,
            "pairs": members.pairs,
            "ratios": ratios,
            "methods": methods,
            "matching": found,
        },
        f"barrier{', no correction, statistics re-estimated' if len(measured) > 1 else ''}: {', '.join(shown)}",
    )


def path_scores(points: Sequence[Scores]) -> dict[str, Any]:
    """Scores along one path, its barriers (nats), and the accuracy in the middle; a loss of NaN counts as infinite."""
    columns = {name: [point[name] for point in points] for name in points[0]}
    losses = torch.tensor([columns["loss"], columns["tempered_loss"]], dtype=torch.float64, device="cpu")
    losses = losses.nan_to_num(math.inf, math.inf)
    if not losses[:, [0, -1]].isfinite().all():
        raise ValueError(f"the losses of two networks are {losses[0, 0]} and {losses[0, -1]}: train them again")
    barrier, tempered = chord_excess(losses).tolist()
    middle = columns["accuracy"][len(points) // 2]
    return columns | {"barrier": barrier, "tempered_barrier": tempered, "middle_accuracy": middle}
