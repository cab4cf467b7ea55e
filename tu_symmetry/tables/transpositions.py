"""Figure 3 of arXiv 2401.00611: permute an initialization by a number of transpositions (NoT), train, match again.

Permuted copies of one initialization, trained on different batches, end in different places. How much of the
permutation does training keep, and how do the distance and the loss barrier between the trained networks depend on it?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from tu_symmetry.files import read_tensors, write_safetensors
from tu_symmetry.tables import plots
from tu_symmetry.tables.grid import Grid
from tu_symmetry.tables.models import build_model
from tu_symmetry.tables.predict import unstack
from tu_symmetry.tables.stage import Results, StageContext, stage

PAIRS = "pairs.safetensors"
CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class PairsOptions:
    """Which networks are trained, and how.

    Attributes:
        counts: how many different numbers of transpositions, evenly spaced from 1 to width - 1.
        runs: independent initializations.
        epochs: over the training set.
        batch_size: every network draws its own batches.
        learning_rate: of SGD on the mean cross-entropy.
        momentum: of SGD.
    """

    counts: int = 8
    runs: int = 5
    epochs: int = 50
    batch_size: int = 64
    learning_rate: float = 1e-3
    momentum: float = 0.9


@dataclass(frozen=True)
class MatchingOptions:
    """How trained pairs are compared.

    Attributes:
        points: points on each interpolation, both ends included.
    """

    points: int = 11


@dataclass(frozen=True)
class ReportOptions:
    """A report has no options."""


def permutation_with_count(size: int, count: int, generator: torch.Generator) -> Tensor:
    """A random permutation that takes exactly ``count`` transpositions, LongTensor ``[size]``.

    Swaps of elements from different cycles merge the cycles, so each of them raises the number by exactly one.
    """
    if not 0 <= count < size:
        raise ValueError(f"a permutation of {size} takes 0 to {size - 1} transpositions, not {count}")
    permutation, cycle = torch.arange(size), torch.arange(size)
    for _ in range(count):
        i = int(torch.randint(size, (1,), generator=generator))
        others = (cycle != cycle[i]).nonzero().flatten()
        j = int(others[torch.randint(len(others), (1,), generator=generator)])
        permutation[[i, j]] = permutation[[j, i]]
        cycle[cycle == cycle[i]] = cycle[j].clone()
    return permutation


@stage()
def train_pairs(context: StageContext, options: PairsOptions) -> Results:
    """Train an initialization and permuted copies of it, all runs at once: states ``[runs, 1 + counts, ...]``."""
    from tu_symmetry.symmetry.action import apply_permutation
    from tu_symmetry.symmetry.elements import transposition_count

    graph = context.graph
    largest = sum(g.size - 1 for g in graph.permutations)
    if len(graph.permutations) != 1:
        raise ValueError(f"this figure is about one hidden layer, the model has {len(graph.permutations)} groups")
    group = graph.permutations[0]
    wanted = torch.linspace(1, largest, options.counts, dtype=torch.float64).round().long().tolist()
    generator = context.generator("permutations")
    states = []
    for run in range(options.runs):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed(f"initialization {run}"))
            start = build_model(context.table.model, context.data).state_dict()
        states.append(start)
        for count in wanted:
            p = {group.name: permutation_with_count(group.size, count, generator)}
            assert transposition_count(p) == count
            states.append(apply_permutation(graph, p, start))
    stacked = {name: torch.stack([s[name] for s in states]).to(context.device) for name in states[0]}
    trained = _sgd(context, options, stacked)
    shape = (options.runs, 1 + options.counts)
    write_safetensors(context.folder / PAIRS, {k: v.unflatten(0, shape) for k, v in trained.items()})
    (context.folder / CHECKPOINT).unlink(missing_ok=True)
    networks = options.runs * (1 + options.counts)
    return {"initial": wanted, "runs": options.runs, "networks": networks, "headline": f"{networks} networks"}


def _sgd(context: StageContext, options: PairsOptions, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train all networks of a stack together, each on its own batches; goes on from the last saved epoch."""
    model, x, y = context.model, context.data.train_x, context.data.train_y
    count = len(next(iter(start.values())))

    def loss(state: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, state, (inputs,)), targets)

    step: Callable[..., tuple[dict[str, Tensor], Tensor]] = vmap(grad_and_value(loss))
    checkpoint = context.folder / CHECKPOINT
    epoch, weights, momenta = 0, start, {name: torch.zeros_like(t) for name, t in start.items()}
    if checkpoint.exists():
        saved = read_tensors(checkpoint, device=context.device)
        epoch = int(saved["epoch"])
        weights = {name: saved[f"weights/{name}"] for name in start}
        momenta = {name: saved[f"momenta/{name}"] for name in start}
    last = float("nan")
    with context.track(f"training {count} networks", options.epochs) as tracker:
        tracker.update(epoch)
        while epoch < options.epochs:
            generator = context.generator(f"batches {epoch}")
            orders = torch.stack([torch.randperm(len(x), generator=generator) for _ in range(count)]).to(x.device)
            for batch in orders.split(options.batch_size, dim=1):
                gradients, values = step(weights, x[batch], y[batch])
                momenta = {name: options.momentum * m + gradients[name] for name, m in momenta.items()}
                weights = {name: w - options.learning_rate * momenta[name] for name, w in weights.items()}
                last = float(values.mean())
            epoch += 1
            tracker.update(epoch, loss=last)
            saved = {f"weights/{k}": v for k, v in weights.items()} | {f"momenta/{k}": v for k, v in momenta.items()}
            write_safetensors(checkpoint, saved | {"epoch": torch.tensor(epoch)})
    return weights


@stage(inputs=("pairs",))
def match_pairs(context: StageContext, options: MatchingOptions) -> Results:
    """Match every permuted copy to its original: NoT, squared distance and barrier, and NoT along one interpolation."""
    from tu_symmetry.alignment.activations import activation_matching
    from tu_symmetry.alignment.barrier import interpolate, loss_barrier
    from tu_symmetry.alignment.matching import weight_distance
    from tu_symmetry.symmetry.action import apply_permutation
    from tu_symmetry.symmetry.elements import transposition_count

    graph, model, data = context.graph, context.model, context.data
    pairs = read_tensors(context.inputs["pairs"].folder / PAIRS, device=context.device)
    initial = context.inputs["pairs"].results["initial"]
    keys = ("transpositions", "distance", "distance_unmatched", "barrier", "barrier_unmatched")
    panels: dict[str, list[list[float]]] = {key: [] for key in keys}
    ratios = torch.linspace(0, 1, options.points, dtype=torch.float64).tolist()
    walks = []

    def measure(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, float]:
        return (
            weight_distance(graph, a, b) ** 2,
            loss_barrier(model, a, b, data.train, cross_entropy, points=options.points).barrier,
        )

    def count(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
        return transposition_count(activation_matching(graph, model, a, b, data.train).permutation)

    runs = list(unstack(pairs))
    with context.track("matching", len(runs) * len(initial)) as tracker:
        for r, run in enumerate(runs):
            first, *others = unstack(run)
            row: dict[str, list[float]] = {key: [] for key in keys}
            for i, other in enumerate(others):
                p = activation_matching(graph, model, first, other, data.train).permutation
                matched = measure(first, apply_permutation(graph, p, other))
                for name, values in (("", matched), ("_unmatched", measure(first, other))):
                    row[f"distance{name}"].append(values[0])
                    row[f"barrier{name}"].append(values[1])
                row["transpositions"].append(transposition_count(p))
                tracker.update(r * len(initial) + i + 1)
            for key in keys:
                panels[key].append(row[key])
            walks.append([count(first, interpolate(first, others[-1], ratio)) for ratio in ratios])
    counts = panels["transpositions"]
    ends = [sum(c[i] for c in counts) / len(counts) for i in (0, -1)]
    return {
        "initial": initial,
        "panels": panels,
        "walk": {"ratios": ratios, "transpositions": walks},
        "headline": f"NoT {initial[0]} → {ends[0]:.1f}, {initial[-1]} → {ends[1]:.1f}",
    }


@stage(inputs=("matching", "pairs"), reads_table=True)
def report(context: StageContext, options: ReportOptions) -> Results:
    """Write ``report.md`` with the figure and its numbers."""
    found = context.inputs["matching"].results
    panels = found["panels"]
    plots.transpositions(context.folder / "transpositions.png", found["initial"], panels, found["walk"])

    def cell(key: str, i: int, form: str) -> str:
        values = torch.tensor([run[i] for run in panels[key]], dtype=torch.float64)
        spread = f" ± {format(values.std().item(), form)}" if len(values) > 1 else ""
        return f"{format(values.mean().item(), form)}{spread}"

    rows = [
        [
            str(count),
            cell("transpositions", i, ".1f"),
            f"{cell('distance_unmatched', i, '.1f')}\n{cell('distance', i, '.1f')}",
            f"{cell('barrier_unmatched', i, '.2g')}\n{cell('barrier', i, '.2g')}",
        ]
        for i, count in enumerate(found["initial"])
    ]
    header = ["NoT at initialization", "NoT after training", "squared distance", "barrier (nats)"]
    grid = Grid(
        context.table.title, header, rows, "second line: after activation matching; ± one standard deviation over runs"
    )
    environment = ", ".join(f"{k} {v}" for k, v in context.environment.items())
    parts = [f"# {context.table.title}", f"Reproduces: {context.table.source}.", context.table.note, grid.markdown()]
    parts += ["![transpositions](transpositions.png)", f"## Hardware and versions\n\n{environment}"]
    (context.folder / "report.md").write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    return {"tables": [grid.to_dict()], "headline": f"{context.name}/report.md"}
