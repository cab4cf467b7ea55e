"""Work that processes share: how much of their time is work that one process would have had, on one thread each."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torchvision.models import resnet18

import tu_symmetry as tus
from benchmarks._measure import Stopwatch, both, figure
from benchmarks._report import Goal, Section, Settings
from benchmarks.many import residual_network
from tu_symmetry.metrics.functional import network_discrepancy
from tu_symmetry.processes import gathered, shared, together
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import stack_states

_WAYS = {"one process": (1, False), "two, each all of it": (2, True), "two, each a share": (2, False)}
_LEAST = 0.8  # of the time of several processes that has to be work
Cases = dict[str, Callable[[], Any]]


def run(settings: Settings) -> Section:
    """Time everything in one process, in two that do all of it each, and in two that share it."""
    spent: dict[str, dict[str, dict[str, list[float]]]] = {}
    for way in _WAYS:
        for name, found in _measured(way, settings.quick).items():
            spent.setdefault(name, {})[way] = found
            settings.say(f"{name}, {way}: {figure(statistics.median(found['wall']))} s")
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    for name, by_way in spent.items():
        medians = {way: {kind: statistics.median(own) for kind, own in found.items()} for way, found in by_way.items()}
        _, whole, share = medians.values()
        shares = {kind: whole[kind] / (2 * share[kind]) for kind in ("wall", "cpu")}
        data.append({"work": name, "processes": medians, "efficiency": shares})
        efficiency = f"{figure(shares['wall'], 2)}\ncpu {figure(shares['cpu'], 2)}"
        rows.append([name, *(both(found["wall"], found["cpu"]) for found in medians.values()), efficiency])
    header = ["work", *_WAYS, "efficiency"]
    text = (
        "Under `tu_symmetry.processes.together()`, with gloo on one machine and one thread for each process. "
        "*Efficiency*: the time of two processes at the same time, each of which does all of it by itself, over twice "
        "that of two that share it; the two hold the same cores and memory of this machine either way. CPU seconds are "
        "those of the process that had more; waiting for the other counts only by the clock."
    )
    least = min(data, key=lambda own: own["efficiency"]["cpu"])
    told = f"{least['work']}: {figure(least['efficiency']['cpu'], 2)}"
    goals = [Goal(f"efficiency of two processes at least {_LEAST}", least["efficiency"]["cpu"] >= _LEAST, told)]
    return Section("Work that processes share", text, [Grid("One process and two", header, rows)], goals, data)


def _measured(way: str, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Wall-clock and CPU seconds of each repeat, of the process that took longest."""
    count, apart = _WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_work, (count, apart, quick, folder), nprocs=count, start_method="spawn")
        every = [torch.load(Path(folder) / f"{k}.pt") for k in range(count)]
    return {
        name: {kind: [max(own) for own in zip(*(one[name][kind] for one in every), strict=True)] for kind in times}
        for name, times in every[0].items()
    }


def _work(rank: int, count: int, apart: bool, quick: bool, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    found: dict[str, dict[str, list[float]]] = {}
    with together():
        for name, call in _cases(quick).items():
            found[name] = {"wall": [], "cpu": []}
            for _ in range(1 if quick else 3):
                gathered(None)  # all begin at once
                with Stopwatch() as watch:
                    if apart:
                        shared(count, partial(_ignoring, call))  # what a share calls is not shared again
                    else:
                        call()
                found[name]["wall"].append(watch.wall)
                found[name]["cpu"].append(watch.cpu)
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _ignoring(call: Callable[[], Any], process: int) -> None:
    call()


def _cases(quick: bool) -> Cases:
    torch.manual_seed(0)  # the same networks in all processes
    number, width, images, size = (6, 8, 4, 8) if quick else (100, 256, 256, 32)
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    ).eval()
    graph = tus.discover_symmetries(model, torch.zeros(2, width))
    graph.require_verified()
    x, y = (_states(model, number, seed) for seed in (0, 1))
    few = _states(model, 3 if quick else 8, 2)
    samples = torch.randn(2000, width, generator=torch.Generator().manual_seed(3))
    loader = [(rows, torch.arange(len(rows)) % 10) for rows in samples.split(250)]
    pictures = torch.randn(images, 3, size, size, generator=torch.Generator().manual_seed(4))
    batches = [(rows, torch.arange(len(rows)) % 10) for rows in pictures.split(64)]
    labels = torch.cat([y for _, y in batches])
    network = residual_network(8, 1).eval() if quick else resnet18(num_classes=10).eval()
    options: Any = {"prior": "per_layer", "evaluate_at": "map"}
    last = tus.LinearizedLaplace(network, curvature="last_layer", **options).fit(batches)
    return {
        f"MMD of {number} and {number} perceptrons": lambda: network_discrepancy(x, y),
        f"symmetries removed from {number}": lambda: tus.remove_symmetries(graph, stack_states(x)),
        f"barriers of all pairs of {len(few)}": lambda: tus.alignment.loss_barriers(
            model, few, loader, nn.functional.cross_entropy
        ),
        f"KFAC of a ResNet-18, {images} images": lambda: tus.LinearizedLaplace(network, **options).fit(batches),
        "the same in one batch": lambda: tus.LinearizedLaplace(network, **options).fit([(pictures, labels)]),
        f"its diagonal curvature, {len(batches[0][0]) // 4} images": lambda: tus.LinearizedLaplace(
            network, curvature="diag", **options
        ).fit([(rows[: len(rows) // 4], labels[: len(rows) // 4]) for rows, labels in batches[:1]]),
        f"predictive of {images} images": lambda: last.predictive(pictures),
    }


def _states(model: nn.Module, count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(t.shape, generator=generator) for n, t in model.state_dict().items()} for _ in range(count)]
