"""What a server makes of the clients' networks: the mean as they are, aligned, and with corrected statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry import plot
from tu_symmetry.alignment.barrier import LossBarrier
from tu_symmetry.alignment.merging import Merged, merge
from tu_symmetry.datamodules.images import ImageDataModule
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.outcome import Outcome
from tu_symmetry.tables.report import Report

STEPS = {"naive": "mean of the weights", "aligned": "aligned, then mean", "corrected": "and REPAIR"}


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
        out: folder of the results and of the merged network.
        model: the architecture; its own weights do not matter.
        data: test images of all classes, and training images for the statistics.
        clients: folders of the clients' sample stores, the last sample of each is taken.
        points: on the lines between networks.
        num_statistics: number of unlabeled images.
    """
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    loader: Any = data.test_dataloader()
    test = [(x, y) for x, y in (loader[0] if isinstance(loader, list) else loader)]
    images = torch.cat([x for x, _ in data.train_dataloader()])[:num_statistics]
    states = []
    for folder in clients:
        store = SampleStore.open(folder, like=model.state_dict())
        states.append(store[len(store) - 1])
    graph = discover_symmetries(model, test[0][0][:2])
    found = merge(
        graph,
        states,
        model,
        [images],
        correction="repair",
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": _accuracy},
        validation=test,
        points=points,
    )
    lines = {
        step: [{"barrier": one.barrier, "ratios": one.ratios, "losses": one.losses} for one in ones]
        for step, ones in found.lines.items()
    }
    results = {
        "members": found.members,
        "scores": found.scores,
        "transpositions": found.transpositions,
        "lines": lines,
        "images": len(images),
    }
    best = f"{found.scores['corrected']['accuracy']:.1%} after alignment and REPAIR"
    plain = found.scores.get("naive", found.scores["aligned"])  # the same where no unit had to move
    return Outcome(results, f"{plain['accuracy']:.1%} as they are, {best}", [clients_table(found)])


def clients_table(found: Merged) -> Grid:
    """Clients, then the steps towards the merged network."""
    rows = [
        [f"client {k}", f"{100 * one['accuracy']:.1f}", f"{one['loss']:.3f}", ""] for k, one in enumerate(found.members)
    ]
    for step, one in found.scores.items():
        barrier = max(line.barrier for line in found.lines[step])
        rows.append([STEPS[step], f"{100 * one['accuracy']:.1f}", f"{one['loss']:.3f}", f"{barrier:.3f}"])
    caption = "test images of all classes; loss and barrier in nats, the barrier is the largest over the lines"
    return Grid("Clients' networks merged", ["", "accuracy (%)", "loss", "barrier"], rows, caption)


def report(out: Path, recipe: str, merging: Path) -> Outcome:
    """Write ``report.md`` with the table and the lines between the networks.

    Args:
        out: folder of the report.
        recipe: folder or name of the recipe, whose ``table.yaml`` holds title and note.
        merging: folder of :func:`merge_clients`.
    """
    report, found = Report(out, recipe), Outcome.load(merging)
    report.add(*found.tables, heading=False)
    report.figure("lines", draw_lines, found.results["lines"])
    return report.done()


def draw_lines(path: Path, steps: Mapping[str, Any]) -> None:
    """Losses along the lines between networks, for each step towards the merged one."""
    lines = {
        STEPS[step]: [LossBarrier(one["barrier"], one["ratios"], one["losses"], [], []) for one in ones]
        for step, ones in steps.items()
    }
    with plots.figure(path, 1, width=4.6, height=3.4) as axes:
        plot.interpolation(lines, ylabel="test loss (nats)", title="Between the clients' networks", ax=axes[0])


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()
