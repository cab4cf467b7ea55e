"""Many networks brought to one universe: is the time linear in their number, and are all cycles consistent?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import tu_symmetry as tus
from benchmarks._measure import Stopwatch, both, figure
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.elements import Permutation

_NOISE = 0.5
_TRIPLES_UP_TO = 8  # matching all pairs is quadratic in their number
State = dict[str, Tensor]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


def residual_network(width: int, blocks: int) -> nn.Module:
    """A small ResNet of one stage."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*stem, *(_Block(width) for _ in range(blocks)), *head)


def run(settings: Settings) -> Section:
    """Align N = 2, 4, 8, 16 networks, independent ones and noisy permuted copies."""
    width, blocks, counts = (8, 1, (2, 3)) if settings.quick else (64, 3, (2, 4, 8, 16))
    repeats = 1 if settings.quick else 3
    model = residual_network(width, blocks).eval()
    graph = tus.discover_symmetries(model, torch.randn(2, 3, 8, 8))
    graph.require_verified()
    families = {"noisy copies": _copies(graph, model, max(counts)), "independent": _draws(model, max(counts))}
    align(graph, families["independent"][:2])  # first-use costs
    spent: dict[tuple[str, int], list[tuple[float, float]]] = {(f, n): [] for f in families for n in counts}
    found: dict[tuple[str, int], tus.alignment.Alignment[Any]] = {}
    for repeat in range(repeats):
        for key in spent:
            with Stopwatch() as watch:
                found[key] = align(graph, families[key[0]][: key[1]])
            spent[key].append((watch.cpu, watch.wall))
            settings.say(f"{key[0]}, {key[1]} networks: CPU {watch.cpu:.3g} s ({repeat + 1}/{repeats})")
    rows, data = [], []
    for (family, count), alignment in found.items():
        cpu, seconds = (sorted(t)[repeats // 2] for t in zip(*spent[family, count], strict=True))
        record: dict[str, Any] = {"networks": family, "count": count, "seconds": seconds, "cpu": cpu}
        record["rounds"] = alignment.iterations
        record |= {"triples": math.comb(count, 3), "universe": _consistent(_pairs_of(alignment.permutations))}
        if 3 <= count <= _TRIPLES_UP_TO:
            record["pairwise"] = _consistent(_pairwise(graph, families[family][:count]))
        for what in ("before", "after"):
            distances = alignment.distances_before if what == "before" else alignment.distances_after
            record[what] = sum(distances) / len(distances)
        data.append(record)
        rows.append(_row(record))
    header = [
        "networks", "N", "seconds", "cpu s for each\nnetwork", "rounds", "cpu s for each\nnetwork and round",
        "triples consistent\nuniverse", "triples consistent\neach pair alone",
        "mean distance\nbefore", "mean distance\nafter",
    ]  # fmt: skip
    slopes = {f: _slope([(d["count"], d["cpu"]) for d in data if d["networks"] == f]) for f in families}
    steady = {f: _slope([(d["count"], d["cpu"] / d["rounds"]) for d in data if d["networks"] == f]) for f in families}
    text = (
        "`align(..., reference='universe')` on a one-stage ResNet "
        f"({blocks} blocks of width {width}, BatchNorm, float32): noisy permuted copies of one network "
        f"(noise {_NOISE:g} of the weights' standard deviation), and independent networks. Rounds are passes "
        "over all networks, the first by Frank-Wolfe; their number depends on the problem. A triple is "
        "consistent if the permutation from a to c is the one from b to c after the one from a to b, for all groups; "
        "on the right, for permutations that come from matching each pair on its own. Distances are to the mean of "
        "the aligned networks. Fitted exponents of N (least squares in logarithms, 1 is linear): "
        + "; ".join(f"{f}: time {figure(slopes[f])}, time for each round {figure(steady[f])}" for f in families)
        + "."
    )
    return Section("Many networks", text, [Grid("To one universe", header, rows)], _goals(data, slopes, steady), data)


def align(graph: tus.SymmetryGraph, states: list[State]) -> tus.alignment.Alignment[Any]:
    """All networks to one universe, on one thread."""
    return tus.align(graph, states, reference="universe")


def _draws(model: nn.Module, count: int) -> list[State]:
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or "running" in name:
            return tensor.clone()
        return torch.randn(tensor.shape, generator=generator) / max(tensor[0].numel(), 1) ** 0.5

    return [{n: draw(n, t) for n, t in model.state_dict().items()} for _ in range(count)]


def _copies(graph: tus.SymmetryGraph, model: nn.Module, count: int) -> list[State]:
    generator = torch.Generator().manual_seed(1)
    (base,) = _draws(model, 1)
    copies = []
    for _ in range(count):
        noisy = {
            n: t + _NOISE * t.std() * torch.randn(t.shape, generator=generator)
            if t.is_floating_point() and "running" not in n
            else t
            for n, t in base.items()
        }
        copies.append(tus.apply_permutation(graph, tus.random_permutation(graph, generator=generator), noisy))
    return copies


Pairs = Mapping[tuple[int, int], Permutation]


def _pairs_of(permutations: list[Permutation]) -> Pairs:
    """For each pair the permutation that brings the second network to the first, through the universe."""
    numbers = range(len(permutations))
    return {
        (a, b): tus.compose(tus.invert(permutations[a]), permutations[b]) for a, b in itertools.combinations(numbers, 2)
    }


def _pairwise(graph: tus.SymmetryGraph, states: list[State]) -> Pairs:
    return {
        (a, b): tus.weight_matching(graph, states[a], states[b]).permutation
        for a, b in itertools.combinations(range(len(states)), 2)
    }


def _consistent(pairs: Pairs) -> int:
    """Triples a < b < c in which the path over b is the direct one."""
    count = 1 + max(b for _, b in pairs)
    hits = 0
    for a, b, c in itertools.combinations(range(count), 3):
        path = tus.compose(pairs[a, b], pairs[b, c])
        hits += all(torch.equal(path[g], p) for g, p in pairs[a, c].items())
    return hits


def _slope(points: list[tuple[int, float]]) -> float:
    """Least-squares exponent of N."""
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in zip(*points, strict=True))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def _row(record: dict[str, Any]) -> list[str]:
    count, cpu = record["count"], record["cpu"]
    triples = record["triples"]
    return [
        record["networks"],
        str(count),
        both(record["seconds"], cpu),
        figure(cpu / count),
        str(record["rounds"]),
        figure(cpu / count / record["rounds"]),
        f"{record['universe']} of {triples}" if triples else "–",
        f"{record['pairwise']} of {triples}" if "pairwise" in record else "–",
        figure(record["before"]),
        figure(record["after"]),
    ]


def _goals(data: list[dict[str, Any]], slopes: Mapping[str, float], steady: Mapping[str, float]) -> list[Goal]:
    consistent = all(d["universe"] == d["triples"] for d in data)
    goals = [Goal("all cycles consistent", consistent, f"{sum(d['universe'] for d in data)} triples")]
    for family in slopes:
        for what, found in (("a round", steady[family]), ("all rounds together", slopes[family])):
            goals.append(Goal(f"{what} linear in N ({family})", found <= 1.1, f"time grows as N^{figure(found)}"))
    return goals
