"""Networks trained on different data, merged without the data: one round of federated learning.

Every client has a share of the digits with its own mixture of classes, and trains a network of its own, from its own
initialization. A server sees their weights alone: it aligns and averages them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.barrier import LossBarrier, loss_barrier
from tu_symmetry.alignment.merging import Merged, merge
from tu_symmetry.alignment.repair import repair
from tu_symmetry.datamodules.images import DigitsDataModule, ImageDataModule
from tu_symmetry.datamodules.readers import LabeledImages
from tu_symmetry.evaluation import accuracy
from tu_symmetry.experiments.study import Images
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Found, Report, table

STEPS = {
    "naive": "mean of the weights",
    "naive_corrected": "mean of the weights and REPAIR",
    "aligned": "aligned, then mean",
    "corrected": "and REPAIR",
}


class ClientDigitsDataModule(DigitsDataModule):
    """The training images of one client, and the test images of all; every image belongs to exactly one client.

    The images of each class are shared out in proportions from a symmetric Dirichlet distribution.

    Args:
        client: number of the client, from 0.
        concentration: the concentration of the Dirichlet distribution: 100 gives all clients the same mixture, 0.1
            almost one class each.
        options: further arguments of :class:`~tu_symmetry.datamodules.DigitsDataModule`.
    """

    def __init__(self, client: int = 0, clients: int = 2, concentration: float = 1.0, **options: Any) -> None:
        if not 0 <= client < clients or not concentration > 0:
            raise ValueError(f"no client {client} of {clients}, or concentration {concentration} is not positive")
        super().__init__(**options)
        self.client, self.clients, self.concentration = client, clients, concentration

    def read(self, part: Any) -> LabeledImages:
        """The client's share of the training images; all of every other part."""
        images = super().read(part)
        if part != "train":
            return images
        drawn, mine = np.random.default_rng(0), []
        for label in sorted(set(images.y.tolist())):
            where = drawn.permutation(np.flatnonzero(images.y.numpy() == label))
            shares = drawn.dirichlet([self.concentration] * self.clients)
            ends = [0, *np.round(np.cumsum(shares) * len(where)).astype(int)]
            mine.append(where[ends[self.client] : ends[self.client + 1]])
        rows = torch.from_numpy(np.sort(np.concatenate(mine)))
        return LabeledImages(images.x[rows], images.y[rows])


def merge_clients(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    clients: Sequence[Path],
    points: int = 11,
    num_statistics: int = 200,
) -> Outcome:
    """Merge one network of each client, and measure clients and merged networks on test images of all classes.

    Alignment reads weights alone. REPAIR reads ``num_statistics`` unlabeled images, which the server is taken to have.

    Args:
        clients: folders of the clients' sample stores, the last sample of each is taken.
        points: on the lines between networks.
    """
    images = Images(data, "cpu")
    statistics = torch.cat([x for x, _ in data.train_dataloader()])[:num_statistics]
    stores = [SampleStore.open(folder, like=model.state_dict()) for folder in clients]
    states = [store[len(store) - 1] for store in stores]
    graph, validation = discover_symmetries(model, images.test.x[:2]), list(images.test)
    found = merge(
        graph,
        states,
        model,
        [statistics],
        correction="repair",
        loss=cross_entropy,
        metrics={"accuracy": lambda outputs, y: outputs.new_tensor(accuracy(outputs, y), dtype=torch.float64)},
        validation=validation,
    )
    aligned = [apply_permutation(graph, p, state) for p, state in zip(found.permutations, states, strict=True)]

    def walk(ends: list[State], *, repaired: bool = False) -> list[LossBarrier]:
        """From the first network to each of the others; networks between the two are repaired."""
        walked = []
        for end in ends[1:]:

            def between(state: State, ratio: float, end: State = end) -> State:
                return repair(model, [ends[0], end], [1 - ratio, ratio], state, [statistics])

            merged = between if repaired else None
            walked.append(loss_barrier(model, ends[0], end, validation, cross_entropy, points=points, merge=merged))
        return walked

    steps = {"naive": walk(states)} if any(found.transpositions) else {}
    steps |= {"aligned": walk(aligned), "corrected": walk(aligned, repaired=True)}
    lines = {
        step: {"ratios": own[0].ratios, "barrier": [one.barrier for one in own], "loss": [one.losses for one in own]}
        for step, own in steps.items()
    }
    plain = found.scores.get("naive", found.scores["aligned"])  # the same where no unit had to move
    best = f"{found.scores['corrected']['accuracy']:.1%} after alignment and REPAIR"
    return Outcome(
        {"members": found.members, "scores": found.scores, "transpositions": found.transpositions, "lines": lines},
        f"{plain['accuracy']:.1%} as they are, {best}",
        [clients_table(found, steps)],
    )


def clients_table(found: Merged, lines: Mapping[str, list[LossBarrier]]) -> Grid:
    """Clients, then the steps towards the merged network."""
    scores = {f"client {k}": (one, "") for k, one in enumerate(found.members)}
    scores["ensemble of the clients"] = found.ensemble, ""
    for step, one in found.scores.items():
        scores[STEPS[step]] = one, f"{max(line.barrier for line in lines[step]):.3f}" if step in lines else ""
    columns = {
        "accuracy (%)": lambda row: f"{100 * row[0]['accuracy']:.1f}",
        "loss": lambda row: f"{row[0]['loss']:.3f}",
        "barrier": lambda row: row[1],
    }
    caption = "test images of all classes; loss and barrier in nats, the barrier is the largest over the lines"
    return table("Clients' networks merged", scores, columns, caption)


def report(out: Path, recipe: str, merging: Path) -> Outcome:
    """Write ``report.md`` with the table and the lines between the networks, from the folder of `merge_clients`."""
    page, found = Report(out, recipe), Outcome.load(merging)
    page.add(*found.tables, heading=False)
    page.figure("lines", draw_lines, found.results["lines"])
    return page.done()


def draw_lines(path: Path, steps: Found) -> None:
    """Losses along the lines between networks, for each step towards the merged one."""
    lines = {STEPS[step]: own for step, own in steps.items()}
    ratios = next(iter(steps.values()))["ratios"]
    with plots.figure(path, 1, width=4.6, height=3.4) as (ax,):
        plots.interpolation(ax, ratios, lines, ylabel="test loss (nats)", title="Between the clients' networks")
