"""Figure 3 of arXiv 2401.00611: permute an initialization by a number of transpositions (NoT), train, match again.

An initialization and a permuted copy of it, trained on different batches, end in different places. How much of the
permutation does training keep, and how do the distance and the barriers between the trained networks depend on it?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.activations import activation_matching
from tu_symmetry.alignment.barrier import Loss, interpolate, measure
from tu_symmetry.alignment.matching import weight_distance
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.experiments.study import Study, tracked
from tu_symmetry.files import FileError, remove_folder
from tu_symmetry.posterior.network import derived_seed, initialized
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import measured
from tu_symmetry.states import unstack
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.elements import transposition_count
from tu_symmetry.tables.outcome import RESULTS, Outcome
from tu_symmetry.tables.report import Found, Report, table

States = Mapping[str, Tensor]
SCORES: dict[str, Loss] = {"loss": cross_entropy, "error": lambda z, y: (z.argmax(-1) != y).double().mean()}


def make_pairs(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    counts: int = 8,
    runs: int = 5,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """Initialize networks, each with a copy that is permuted by a number of transpositions.

    Args:
        out: gets the sample store ``initial/``: for each run (chain) and each number of transpositions an
            initialization of its own, and behind it its copy.
        model: the architecture, with one hidden layer.
        counts: how many different numbers of transpositions, evenly spaced from 1 to width - 1.
        runs: how often all of it is repeated.
    """
    study = Study(model, data, device, seed)
    graph = study.graph
    if len(graph.permutations) != 1:
        raise ValueError(f"this figure is about one hidden layer, the model has {len(graph.permutations)} groups")
    (group,) = graph.permutations
    wanted = torch.linspace(1, group.size - 1, counts, dtype=torch.float64, device="cpu").round().long().tolist()
    generator = study.generator("permutations")
    if not (out / RESULTS).exists():  # what a killed call has left
        remove_folder(out / "initial")
    architecture = type(model).__name__
    store = SampleStore.create(out / "initial", architecture=architecture, method="permuted_copies", seed=seed)
    for run in range(runs):
        for i, count in enumerate(wanted):
            start = initialized(model, derived_seed(seed, 1, run * counts + i)).state_dict()
            permutation = {group.name: permutation_with_count(group.size, count, generator)}
            store.append([start, apply_permutation(graph, permutation, start)], chain=run, step=[2 * i, 2 * i + 1])
    found = {"initial": wanted, "runs": runs, "networks": len(store)}
    return Outcome(found, f"{len(store) // 2} pairs, {len(store)} networks")


def permutation_with_count(size: int, count: int, generator: torch.Generator) -> Tensor:
    """A random permutation that takes exactly ``count`` transpositions, LongTensor ``[size]``.

    Swaps of elements from different cycles merge the cycles, so each of them raises the number by exactly one.
    """
    if not 0 <= count < size:
        raise ValueError(f"a permutation of {size} takes 0 to {size - 1} transpositions, not {count}")
    permutation, cycle = torch.arange(size, device="cpu"), torch.arange(size, device="cpu")
    for _ in range(count):
        i = int(torch.randint(size, (1,), generator=generator, device="cpu"))
        others = (cycle != cycle[i]).nonzero().flatten()
        j = int(others[torch.randint(len(others), (1,), generator=generator, device="cpu")])
        permutation[[i, j]] = permutation[[j, i]]
        cycle[cycle == cycle[i]] = cycle[j].clone()
    return permutation


def match_pairs(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    pairs: Path,
    samples: Path,
    points: int = 11,
    device: str = "auto",
) -> Outcome:
    """Match every trained copy to its trained original: NoT, squared distance, barriers, and NoT along the last paths.

    A barrier is the loss (nats) or the error of the network in the middle, over the mean of both ends, on all training
    or test points; of initial networks it is measured as well. One pair is in memory at a time.

    Args:
        pairs: the folder of :func:`make_pairs`.
        samples: folder of the trained networks, in the same order.
        points: networks at which the NoT is found along one path of each run, that of the most transpositions.
    """
    study = Study(model, data, device)
    made = Outcome.load(pairs).results
    initial, runs = made["initial"], made["runs"]
    starts, ends = SampleStore.open(pairs / "initial"), SampleStore.open(samples)
    if len(ends) != made["networks"]:
        raise FileError(f"{samples} holds {len(ends)} networks, but {pairs} has {made['networks']} initial ones")
    parts = {"training": replace(study.train, batch_size=10_000), "test": replace(study.test, batch_size=10_000)}
    panels: dict[str, list[list[float]]] = {}
    ratios = torch.linspace(0, 1, points, dtype=torch.float64, device="cpu").tolist()
    walks = []

    def match(a: States, b: States) -> dict[str, Tensor]:
        return activation_matching(study.graph, study.model, a, b, parts["training"]).permutation

    def note(run: int, **values: float) -> None:
        for name, value in values.items():
            panels.setdefault(name, [[] for _ in range(runs)])[run].append(value)

    def note_barriers(run: int, when: str, a: States, others: dict[str, States]) -> None:
        middles = {name: interpolate(a, other, 0.5) for name, other in others.items()}
        for part, batches in parts.items():
            networks = [a, next(iter(others.values())), *middles.values()]
            one, two, *found = (measure(study.model, state, batches, SCORES) for state in networks)
            for name, score in zip(middles, found, strict=True):
                for kind, value in score.items():
                    note(run, **{f"{when}{part} {kind}{name}": value - (one[kind] + two[kind]) / 2})

    jobs = [(run, i) for run in range(runs) for i in range(len(initial))]
    for run, i in tracked("matching", jobs, lambda job: f"run {job[0]}, NoT {initial[job[1]]}"):
        place = 2 * (run * len(initial) + i)
        start, copy = unstack(starts.stack([place, place + 1], device=study.device))
        note_barriers(run, "initial ", start, {"": copy})
        a, b = unstack(ends.stack([place, place + 1], device=study.device))
        p = match(a, b)
        matched = apply_permutation(study.graph, p, b)
        note(run, transpositions=transposition_count(p))
        for name, state in (("", matched), ("_unmatched", b)):
            note(run, **{f"distance{name}": weight_distance(study.graph, a, state) ** 2})
        note_barriers(run, "", a, {"_unmatched": b, "": matched})
        if i == len(initial) - 1:
            walks.append([transposition_count(match(a, interpolate(a, b, t))) for t in ratios])
    means = [fmean(run[i] for run in panels["transpositions"]) for i in (0, -1)]
    return Outcome(
        {"initial": initial, "panels": panels, "walk": {"ratios": ratios, "transpositions": walks}},
        f"NoT {initial[0]} → {means[0]:.1f}, {initial[-1]} → {means[1]:.1f}",
    )


def report_transpositions(out: Path, recipe: str, matching: Path) -> Outcome:
    """Write ``report.md`` with the figure and its numbers, from the folder of :func:`match_pairs`."""
    page, found = Report(out, recipe), Outcome.load(matching).results

    def cell(keys: Sequence[str], i: int, form: str) -> str:
        return "\n".join(measured([run[i] for run in found["panels"][key]], form, error=False) for key in keys)

    def barrier(what: str, form: str) -> Callable[[int], str]:
        return lambda i: cell([f"{what}_unmatched", what], i, form)

    columns = {
        "NoT after training": lambda i: cell(["transpositions"], i, ".1f"),
        "squared distance": lambda i: cell(["distance_unmatched", "distance"], i, ".1f"),
        "barrier, training loss (nats)": barrier("training loss", ".2g"),
        "test loss (nats)": barrier("test loss", ".2g"),
        "training error": barrier("training error", ".2%"),
        "test error": barrier("test error", ".2%"),
    }
    rows = {str(count): i for i, count in enumerate(found["initial"])}
    caption = "second line: after activation matching; ± one standard deviation over runs; barriers at the midpoint"
    page.add(table(page.table.title, rows, columns, caption, "NoT at initialization"), heading=False)
    page.figure("transpositions", draw_transpositions, found)
    return page.done()


def draw_transpositions(path: Path, found: Found) -> None:
    """Figure 3 of arXiv 2401.00611: after training against the initial NoT, and NoT along the interpolation."""
    initial, panels, walk = found["initial"], found["panels"], found["walk"]
    start = "NoT at initialization"
    named = {
        "distance": ("Weight distance", "$\\|W_0 - W_1\\|_2^2$"),
        "training loss": ("Barrier, training loss", "loss (nats)"),
        "test error": ("Barrier, test error", "error (share)"),
    }
    with plots.figure(path, 5, width=3.1) as axes:
        axes[0].plot([0, max(initial)], [0, max(initial)], color=plots.GRAY, linestyle=":", label="unchanged")
        plots.band(axes[0], initial, panels["transpositions"], plots.BLUE, "found by matching")
        axes[0].set(title="NoT after training", xlabel=start, ylabel="NoT")
        for ax, (key, (title, unit)) in zip(axes[1:4], named.items(), strict=True):
            if f"initial {key}" in panels:
                plots.band(ax, initial, panels[f"initial {key}"], plots.ORANGE, "before training", linestyle=":")
            plots.band(ax, initial, panels[f"{key}_unmatched"], plots.GRAY, "before matching")
            plots.band(ax, initial, panels[key], plots.BLUE, "after matching")
            ax.set(title=title, xlabel=start, ylabel=unit)
        plots.band(axes[4], walk["ratios"], walk["transpositions"], plots.BLUE, None)
        label = r"interpolation $\lambda$"
        axes[4].set(title="NoT along the interpolation", xlabel=label, ylabel="NoT to $W_0$", xlim=(0, 1))
        for ax in axes[:4]:
            ax.legend(loc="best")
