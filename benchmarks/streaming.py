"""Memory of the discrepancy without symmetries where the networks do not fit into it: 1,000 and 1,000 ResNet-18."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tu_symmetry as tus
from benchmarks._measure import in_own_process, peak_memory
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.experiments.symmetry_aware import residual_network
from tu_symmetry.metrics.functional import discrepancy_test, removal
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import stack_states

COUNT = 1000  # networks of each set that the figure is of
LIMIT = 8e9
DEFAULT = 2**30  # bytes of weights that are held at a time, when nothing is said
LARGE = 60  # networks of a set, of which one tensor alone takes more than DEFAULT, so that this is what limits a piece
_SHARD = 10
Network = Callable[[], tuple[nn.Module, Tensor]]


def _resnet() -> tuple[nn.Module, Tensor]:
    return residual_network(18, 10).eval(), torch.randn(2, 3, 32, 32)


def _mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)), torch.randn(2, 16)


NETWORKS: dict[str, Network] = {"ResNet-18": _resnet, "MLP": _mlp}


def run(settings: Settings) -> Section:
    """Measure what grows with the size of a network, and what grows with the number of networks, each by itself."""
    few, many, large = (2, 6, "MLP") if settings.quick else (4, COUNT, "ResNet-18")
    plan = [(large, few if settings.quick else LARGE), ("MLP", few), ("MLP", many)]
    rows: list[dict[str, Any]] = []
    for network, count in plan:
        with tempfile.TemporaryDirectory() as folder:
            write(NETWORKS[network], Path(folder), count)
            rows.append(in_own_process("benchmarks.streaming", network, folder, str(DEFAULT)))
        settings.say(f"{network}, {count} and {count} networks: {rows[-1]['peak'] / 1e6:.0f} MB")
    first, base, pairs = rows
    parts = {
        f"measured, {first['count']} and {first['count']} {large}": first["peak"],
        f"pairs: measured, {many} and {many} small networks less {few} and {few}": pairs["peak"] - base["peak"],
        f"units' factors and places, {first['element']} bytes a network": 2.0 * COUNT * first["element"],
    }
    whole = sum(parts.values())
    grid = Grid(
        f"{COUNT} and {COUNT} networks, {first['parameters'] / 1e6:.2f} million weights each",
        ["", "MB"],
        [[part, f"{value / 1e6:.0f}"] for part, value in parts.items()],
        f"sum: {whole / 1e6:.0f} MB; the weights themselves are "
        f"{2 * COUNT * 4 * first['parameters'] / 1e9:.0f} GB in float32; the measured comparison "
        f"of {first['count']} and {first['count']} took {first['cpu']:.0f} s of processor time",
    )
    text = (
        "The networks lie in shards on disk; `discrepancy_test` with the paper's removal, at its default of 1 GiB of "
        "weights at a time, which one tensor of the networks measured exceeds. All numbers are the largest resident "
        "memory of a process of its own, PyTorch and the discovery of the symmetries included. 1,000 and 1,000 "
        "ResNet-18 were not run as a whole (their distances are for an accelerator): what grows with the size of the "
        "network and what grows with the number of networks are measured apart and added."
    )
    goals = [Goal(f"under {LIMIT / 1e9:.0f} GB", whole < LIMIT, f"{whole / 1e9:.2f} GB, added up as above")]
    return Section("Networks that do not fit into memory", text, [grid], goals, rows)


def write(network: Network, folder: Path, count: int) -> None:
    """Two stores ``x`` and ``y`` with ``count`` networks each."""
    torch.manual_seed(0)
    for side in ("x", "y"):
        store = SampleStore.create(folder / side, architecture="benchmark", method="initialization")
        for start in range(0, count, _SHARD):
            stop = min(start + _SHARD, count)
            states = stack_states([network()[0].state_dict() for _ in range(start, stop)])
            store.append(states, step=range(start, stop))


def measure(name: str, folder: Path, memory: int) -> dict[str, Any]:
    """Compare the two stores, in this process."""
    model, x = NETWORKS[name]()
    graph = tus.discover_symmetries(model, x)
    graph.require_verified()
    stores = [SampleStore.open(folder / side) for side in ("x", "y")]
    log_scale, permutation = removal("paper").element(graph, stores[0][0])
    held = [t for kept in (log_scale, permutation) for t in kept.values()]
    start = time.process_time()
    test = discrepancy_test(*stores, graph=graph, permutations=19, bootstraps=0, memory=memory)
    return {
        "network": name,
        "count": len(stores[0]),
        "memory": memory,
        "parameters": sum(p.numel() for p in model.parameters()),
        "element": sum(t.numel() * t.element_size() for t in held),
        "value": test.value,
        "cpu": time.process_time() - start,
        "peak": peak_memory(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
