"""What many networks cost: time, bytes and memory of ``align``, by a model of two numbers that is checked."""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import start_processes

import tu_symmetry as tus
from benchmarks._measure import figure
from benchmarks._report import Goal, Section, Settings, describe_error
from tu_symmetry.checkpoints.align import align_files
from tu_symmetry.files import write_safetensors
from tu_symmetry.processes import gathered, shared, together
from tu_symmetry.reporting.grid import Grid

_COUNTS = (1, 2, 4)
_FILES, _FEW = 16, 4
_AGREES, _LEAST = 0.15, 0.8
LARGE = {"resnet18": (10_000, 64), "vit_l_16": (1000, 64)}  # networks and processes
Record = dict[str, Any]


def run(settings: Settings) -> Section:
    """Align a few networks with several numbers of processes, and one pair of each large architecture."""
    files, few = (4, 2) if settings.quick else (_FILES, _FEW)
    name = "tiny" if settings.quick else "resnet18"
    alone, jointly, rows, off, efficiencies = {}, {}, [], [], []
    for count in _COUNTS:
        alone[count], jointly[count] = measured(name, count, few, apart=True), measured(name, count, files)
        settings.say(f"{files} files, {count} processes: {figure(jointly[count]['seconds'])} s")
        own, (fixed, each) = jointly[count], _numbers(alone[count], few)
        said = fixed + -(-files // count) * each
        off.append(own["seconds"] / said - 1)
        efficiencies.append((fixed + files * each) / (count * own["seconds"]))
        rows.append(
            [
                str(count), figure(fixed), figure(each), figure(said), figure(own["seconds"]), f"{off[-1]:+.0%}",
                figure(efficiencies[-1], 2), figure(own["read"] / own["bytes"], 2),
                figure(own["written"] / own["bytes"], 2), figure(own["memory"] / 1e9, 2),
            ]
        )  # fmt: skip
    header = [
        "processes", "each process\ns", "each network\ns", "model\ns", "measured\ncpu s", "off by", "efficiency",
        "bytes read\n× all files", "bytes written\n× all files", "memory of one\nGB",
    ]  # fmt: skip
    grids = [Grid(f"`align` of {files} {name}", header, rows)]
    large, data = [], [{"work": name, "alone": list(alone.values()), "measured": list(jointly.values())}]
    for kind, (number, processes) in {} if settings.quick else LARGE.items():
        try:
            one, of = (alone[1], few) if kind == name else (measured(kind, 1, 1, apart=True), 1)
            a, b = _numbers(one, of)
            settings.say(f"{kind}: {figure(a)} s and {figure(b)} s for each network")
        except Exception as error:  # the others' rows stand
            large.append([kind, f"{number:,}", str(processes), *["-"] * 5, describe_error(error)])
            continue
        hours, size = (a + -(-number // processes) * b) / 3600, number * one["bytes"] / one["files"] / 1e12
        large.append(
            [
                kind, f"{number:,}", str(processes), figure(a), figure(b), figure(hours, 2), figure(size, 2),
                figure(size * one["read"] / one["bytes"], 2), figure(one["memory"] / 1e9, 2),
            ]
        )  # fmt: skip
        data.append({"work": kind, "fixed": a, "each": b, "hours": hours, "measured": [one]})
    if large:
        header = [
            "network", "networks", "processes", "each process\ns", "each network\ns", "hours", "results\nTB",
            "reads\nTB", "memory of one\nGB",
        ]  # fmt: skip
        grids.append(Grid("By the model, with one CPU core for each process", header, large))
    text = (
        "The model: `seconds = a + ceil(networks / processes) * b`, with `a` (discovery and verification, which every "
        "process does) and `b` (checks, matching to one reference, certificate and writing of a network). Both are "
        f"those of as many processes that work at the same time, each by itself on {few} files: they share the cores "
        "and the memory of this machine, whether they work together or not. Seconds are CPU seconds of the process "
        "that had most, one thread each. *Efficiency* is what one process would take for all files at those numbers, "
        "over what all processes took together. Bytes are those that all processes asked the system for, whether the "
        "page cache had them or not."
    )
    worst = max(off, key=abs)
    goals = [
        Goal(f"the model within {_AGREES:.0%} of what several processes take", abs(worst) <= _AGREES, f"{worst:+.0%}"),
        Goal(f"efficiency at least {_LEAST}", min(efficiencies) >= _LEAST, figure(min(efficiencies), 2)),
    ]
    return Section("What many networks cost", text, grids, goals, data)


def _numbers(found: Record, files: int) -> tuple[float, float]:
    """What every process does, and what each network takes."""
    return found["fixed"], (found["seconds"] - found["fixed"]) / files


def measured(name: str, count: int, files: int, *, apart: bool = False) -> Record:
    """Medians of repeats, of the process that took longest; bytes are sums. All files of each process, if ``apart``."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(name)
        paths = []
        for k in range(files + 1):  # the last is the reference
            torch.manual_seed(k)
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.normal_(0, 0.05)
            paths.append(Path(folder) / f"{k}.safetensors")
            write_safetensors(paths[-1], model.state_dict(), {})
        size = sum(path.stat().st_size for path in paths[:files])
        start_processes(_work, (name, count, files, folder, apart), nprocs=count, start_method="spawn")
        every = [json.loads((Path(folder) / f"{k}.json").read_text()) for k in range(count)]
    worst = {key: max(own[key] for own in every) for key in ("seconds", "fixed", "memory")}
    sums = {key: sum(own[key] for own in every) for key in ("read", "written")}
    return {"processes": count, "files": files, "bytes": size, **worst, **sums}


def build(name: str) -> nn.Module:
    """A network of torchvision, or a tiny one."""
    if name == "tiny":
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 30 * 30, 10)).eval()
    import torchvision

    network: Callable[..., nn.Module] = getattr(torchvision.models, name)
    return network().eval()


def _work(rank: int, name: str, count: int, files: int, folder: str, apart: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    model, paths = build(name), [Path(folder) / f"{k}.safetensors" for k in range(files + 1)]
    tus.discover_symmetries(
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2, 2)
    ).require_verified()
    size = 32 if name == "tiny" else 224
    spent, alone, moved = [], [], []
    with together():
        for repeat in range(1 if files == 1 else 3):
            gathered(None)  # all begin at once
            before, start = _bytes(), time.process_time()
            graph = tus.discover_symmetries(model, torch.zeros(1, 3, size, size))
            graph.require_verified()
            alone.append(time.process_time() - start)
            align = partial(_align, graph, paths, Path(folder) / f"out{repeat}")
            if apart:
                shared(count, align)  # what a share calls is not shared again
            else:
                align()
            spent.append(time.process_time() - start)
            moved.append([b - a for a, b in zip(before, _bytes(), strict=True)])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read, written = (statistics.median(own) for own in zip(*moved, strict=True))
    seconds, fixed = statistics.median(spent), statistics.median(alone)
    found = {"seconds": seconds, "fixed": fixed, "memory": memory, "read": read, "written": written}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _align(graph: tus.SymmetryGraph, paths: list[Path], out: Path, process: int | None = None) -> None:
    align_files(graph, paths[:-1], out if process is None else Path(f"{out}-{process}"), reference=paths[-1])


def _bytes() -> tuple[int, int]:
    """Bytes that this process has read and written so far, by the system's count."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])
