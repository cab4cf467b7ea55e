"""What a preflight says of two networks, beside what their merge then loses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tu_symmetry as tus
from benchmarks._report import Section, Settings
from benchmarks.planted import ResidualBlock
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.evaluation import Batches, accuracy
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State

PAIRS = ("same", "halves", "common")
EDGES = (-1.0, 0.3, 0.45, 0.55, 0.7, 1.0)
MOST = 3.0  # points of accuracy


def _perceptron(width: int, *, norm: bool) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for size in (64, width):
        layers += [nn.Linear(size, width), *([nn.BatchNorm1d(width)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _convolutions(width: int, *, norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, width), (width, 2 * width)):
        layers.append(nn.Conv2d(before, after, 3, padding=1))
        layers += [*([nn.BatchNorm2d(after)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * width, 10))


def _residual(width: int, *, norm: bool) -> nn.Module:
    blocks = (ResidualBlock(width, width) for _ in range(3))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *blocks, nn.Linear(width, 10))


NETWORKS: dict[str, tuple[Callable[..., nn.Module], bool, Sequence[int], tuple[int, int]]] = {
    "perceptron": (_perceptron, False, (16, 64, 256), (3, 30)),
    "perceptron, BatchNorm": (_perceptron, True, (16, 128), (3, 30)),
    "convolutions": (_convolutions, False, (8, 16), (2, 10)),
    "convolutions, BatchNorm": (_convolutions, True, (8, 16), (2, 10)),
    "residual perceptron": (_residual, False, (32, 128), (3, 30)),
}


def run(settings: Settings) -> Section:
    """Train pairs of networks, look at them, and merge them."""
    data = DigitsDataModule()
    records: list[dict[str, Any]] = []
    for name, (make, norm, widths, lengths) in NETWORKS.items():
        for width in widths[:1] if settings.quick else widths:
            model = make(4 if settings.quick else width, norm=norm)
            graph = tus.discover_symmetries(model.eval(), data.train.x[:2])
            for epochs, kind in itertools.product((1,) if settings.quick else lengths, PAIRS):
                about = {"network": name, "width": width, "epochs": epochs, "pair": kind}
                records.append(about | measure(model, graph, data, kind, epochs, norm=norm))
        settings.say(f"{name}: {len(records)} merges")
    return section(records)


def measure(
    model: nn.Module, graph: tus.SymmetryGraph, data: DigitsDataModule, kind: str, epochs: int, *, norm: bool
) -> dict[str, Any]:
    """Train two networks: what the preflight says, and what the merged network loses."""
    x, y = data.train.x, data.train.y
    parts = [slice(None)] * 2 if kind == "same" else [slice(None, len(x) // 2), slice(len(x) // 2, None)]
    starts = [0, int(kind != "common")]
    states = [_fit(model, x[p], y[p], epochs, s, k) for k, (p, s) in enumerate(zip(parts, starts, strict=True))]
    model.eval()
    batches, held_out = Batches(x[:500], y[:500], 250), [(data.test.x, data.test.y)]
    told = tus.alignment.preflight(graph, states, model, batches)
    merged = tus.merge(
        graph,
        states,
        model,
        batches,
        correction="batchnorm" if norm else "none",
        loss=cross_entropy,
        metrics={"accuracy": _accuracy},
        validation=held_out,
    )
    lost = fmean(one["accuracy"] for one in merged.members) - list(merged.scores.values())[-1]["accuracy"]
    return {
        "correlation": told.correlation,
        "distance": told.distance_after / told.distance_before,
        "barrier": list(merged.barriers.values())[-1],
        "lost": 100 * lost,
    }


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.tensor(accuracy(outputs, targets))


def _fit(model: nn.Module, x: Tensor, y: Tensor, epochs: int, start: int, seed: int) -> State:
    torch.manual_seed(start)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.Adam(model.train().parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def section(records: list[dict[str, Any]]) -> Section:
    """Merges by the correlation of their units, and how well either number tells what they lose."""
    rows = []
    for low, high in itertools.pairwise(EDGES):
        own = [r for r in records if low <= r["correlation"] < high or r["correlation"] == high == 1]
        if own:
            lost, barriers = ([r[key] for r in own] for key in ("lost", "barrier"))
            fine = sum(value <= MOST for value in lost)
            kinds = ", ".join(f"{kind} {sum(r['pair'] == kind for r in own)}" for kind in PAIRS)
            label = f"{low:g} to {high:g}" if low >= 0 else f"below {high:g}"
            rows.append([label, f"{len(own)}", kinds, f"{fine} of {len(own)}"])
            rows[-1] += [f"{median(lost):+.1f}, {max(lost):+.1f}", f"{median(barriers):+.2f}, {max(barriers):+.2f}"]
    header = ["correlation", "merges", "pairs", f"lose at most {MOST:g} points", "points lost: median, most", "barrier"]
    tells = {
        key: spearmanr([r[key] for r in records], [r["lost"] for r in records]).statistic
        for key in ("correlation", "distance")
    }
    ranks = ", ".join(
        f"{value:+.2f} with the {'correlation' if key == 'correlation' else 'ratio of distances'}"
        for key, value in tells.items()
    )
    text = (
        "Pairs of networks on scikit-learn's digits, trained for few and for many epochs of Adam: on the same images, "
        "on a half each, and on a half each from one initialization (*common*). The preflight sees 500 training images "
        "without labels, units are permuted, statistics of BatchNorm re-estimated. Points of test accuracy are those "
        "by which the merged network is below the mean of both, barriers those of the test loss halfway, in nats. Rank "
        f"correlation of the points lost: {ranks}. The edge at 0.55 and the 3 points were "
        "chosen on these merges, so that the table is no test of them."
    )
    return Section(
        "What a preflight tells of a merge",
        text,
        [Grid("Merges by the correlation of matched units", header, rows)],
        [],
        records,
    )
