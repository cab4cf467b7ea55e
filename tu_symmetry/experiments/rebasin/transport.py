"""Task vectors between networks that were trained apart: what they are worth as they are, and moved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.over import Over
from tu_symmetry.alignment.transport import transport
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches, accuracy, logits
from tu_symmetry.experiments.study import Images, tracked
from tu_symmetry.reporting.grid import Grid, measured
from tu_symmetry.states import State
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.models import MLP
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors
from tu_symmetry.tables.report import Report, table

TASKS = {
    "rotated": lambda x: x.rot90(1, (-2, -1)),
    "inverted": lambda x: 1 - x,
}
WEIGHTS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
WAYS: dict[str, tuple[Over, ...]] = {
    "permuted": ("permutations",),
    "permuted, scaled": ("permutations", "scales"),
}
ROWS = {
    "the new base": "new base",
    "with the task vector as it is": "as it is",
    "with the task vector, permuted": "permuted",
    "with it, permuted and scaled": "permuted, scaled",
    "the fine-tuned original": "original",
}


def move_tasks(
    out: Path,
    data: ImageDataModule,
    widths: Sequence[int] = (64, 256, 512),
    pairs: int = 5,
    epochs: int = 30,
    tuning_epochs: int = 30,
    device: str = "cpu",
) -> Outcome:
    """Train bases and fine-tune them, and move each task vector to the next base: accuracies on the task's images.

    Bases are perceptrons with ReLU and two hidden layers, from their own initialization and order of batches. The
    new base is another one (``another``), or the old one after as many epochs more (``continued``). What is added is
    multiplied by the weight that is best on the task's validation images, for each way to move it by itself. A pair of
    bases is kept in the ``parts`` of ``out`` at once.

    Args:
        pairs: number of pairs of bases for each width.
        tuning_epochs: of fine-tuning a base on the images of a task.
    """
    images = Images(data, device)
    held_out = images.held_out("weights are chosen on")
    parts = Parts(out / "parts", [epochs, tuning_epochs, images.digest(), digest_tensors(*held_out)])
    runs: list[dict[str, Any]] = []
    for width, pair in tracked("pairs", [(w, p) for w in widths for p in range(pairs)], lambda job: f"width {job[0]}"):
        runs += parts.take(f"{width}-{pair}", _pair, images, held_out, width, pair, epochs, tuning_epochs)["runs"]
    another = [run["found"] for run in runs if run["kind"] == "another"]
    gains = [one["permuted"]["test"] - one["as it is"]["test"] for one in another]
    return Outcome(
        {"runs": runs, "widths": list(widths)},
        f"gain of the moved task vector over the same as it is: {100 * fmean(gains):.1f} points on another base",
    )


def _pair(
    images: Images, held_out: tuple[Tensor, Tensor], width: int, pair: int, epochs: int, tuning_epochs: int
) -> dict[str, Any]:
    """All that is measured between two bases."""
    x, y = images.train.x, images.train.y
    networks = []
    for seed in (2 * pair, 2 * pair + 1):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = MLP(x[0].numel(), images.data.num_classes, (width, width)).to(images.device)
        networks.append(_trained(model, x, y, epochs, seed))
    graph = discover_symmetries(model, x[:2])
    old, other = (network.state_dict() for network in networks)
    bases = {"another": other, "continued": _trained(networks[0], x, y, epochs, 2 * pair + 1).state_dict()}
    runs = []
    for task, change in TASKS.items():
        tuned = _trained(networks[0], change(x), y, tuning_epochs, 2 * pair).state_dict()
        sets = {
            "validation": Batches(change(held_out[0]), held_out[1]),
            "test": Batches(change(images.test.x), images.test.y),
            "upright": images.test,
        }
        for kind, new in bases.items():
            found = {"original": _scores(model, tuned, sets), "new base": _scores(model, new, sets)}
            moved = {way: transport(graph, old, tuned, new, over=over) for way, over in WAYS.items()}
            vectors = {way: {n: t - new[n] for n, t in one.state.items()} for way, one in moved.items()}
            for way, vector in {"as it is": {n: t - old[n] for n, t in tuned.items()}, **vectors}.items():
                every = {w: _scores(model, {n: t + w * vector[n] for n, t in new.items()}, sets) for w in WEIGHTS}
                best = max(every, key=lambda w, every=every: every[w]["validation"])  # type: ignore[misc]
                found[way] = every[best] | {"weight": best}
            distances = [moved["permuted"].distance_before, moved["permuted"].distance_after]
            job = {"width": width, "pair": pair, "task": task, "kind": kind}
            runs.append({**job, "found": found, "distances": distances})
    return {"runs": runs}


def _scores(model: nn.Module, state: State, sets: Mapping[str, Batches]) -> dict[str, float]:
    return {name: accuracy(logits(model, state, part), part.y) for name, part in sets.items()}


def _trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    """A copy of a network after some epochs of Adam on the cross-entropy, in an order of the seed's."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator, device="cpu").to(x.device)
        for batch in order.split(64):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model


def report_transport(out: Path, recipe: str, transported: Path) -> Outcome:
    """Write ``report.md`` with a table for each task and kind of new base, from `move_tasks`' folder."""
    page, found = Report(out, recipe), Outcome.load(transported).results
    names = {"another": "a base from another seed", "continued": "the old base, trained on"}
    for kind, base in names.items():
        for task in TASKS:
            runs = [run for run in found["runs"] if run["kind"] == kind and run["task"] == task]
            page.add(_table(f"{task.capitalize()}, {base}", runs, found["widths"]))
    return page.done()


def _table(title: str, runs: Sequence[Mapping[str, Any]], widths: Sequence[int]) -> Grid:
    """Accuracies on one task from one kind of base, for each width on the task's images and on upright ones."""
    of_width = {w: [run["found"] for run in runs if run["width"] == w] for w in widths}

    def cell(found: Sequence[Mapping[str, Any]], key: str, row: str) -> str:
        return measured([100 * one[row][key] for one in found], ".1f")

    columns: dict[str, Callable[[str], str]] = {
        f"{w}\n{name}": partial(cell, found, key)
        for key, name in (("test", "task"), ("upright", "upright"))
        for w, found in of_width.items()
    }
    last = of_width[widths[-1]]
    columns["weight"] = lambda row: f"{fmean(f[row]['weight'] for f in last):.2f}" if "weight" in last[0][row] else ""
    caption = (
        f"test accuracy in %, mean ± standard error over {len(last)} pairs, for each width; the task vector's weight "
        f"is chosen on validation images of the task (its mean for width {widths[-1]})"
    )
    return table(title, ROWS, columns, caption)
