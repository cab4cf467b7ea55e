"""Figure 3 of arXiv 2401.00611: permute an initialization by a number of transpositions (NoT), train, match again.

Permuted copies of one initialization, trained on different batches, end in different places. How much of the
permutation does training keep, and how do the distance and the loss barrier between the trained networks depend on it?
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.activations import activation_matching
from tu_symmetry.alignment.barrier import interpolate, loss_barrier
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


def make_pairs(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    counts: int = 8,
    runs: int = 5,
    seed: int = 0,
    device: str = "auto",
) -> Outcome:
    """Initialize networks, and permute each by different numbers of transpositions.

    Args:
        out: gets the sample store ``initial/``: for each run (chain) the initialization, and ``counts`` copies of it.
        model: the architecture, with one hidden layer.
        counts: how many different numbers of transpositions, evenly spaced from 1 to width - 1.
        runs: independent initializations.
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
        start = initialized(model, derived_seed(seed, 1, run)).state_dict()
        permutations = [{group.name: permutation_with_count(group.size, count, generator)} for count in wanted]
        copies = [start, *(apply_permutation(graph, p, start) for p in permutations)]
        stack = {name: torch.stack([c[name] for c in copies]).cpu() for name in start}
        store.append(stack, chain=run, step=range(len(copies)))
    return Outcome(
        {"initial": wanted, "runs": runs, "networks": len(store)}, f"{runs} initializations, {len(store)} networks"
    )


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
    """Match every trained copy to its trained original: NoT, squared distance, barrier, and NoT along the last path.

    ``pairs`` is the folder of :func:`make_pairs`, ``samples`` that of the trained networks, in the same order.
    """
    study = Study(model, data, device)
    made = Outcome.load(pairs).results
    initial, runs = made["initial"], made["runs"]
    store = SampleStore.open(samples)
    if len(store) != made["networks"]:
        raise FileError(f"{samples} holds {len(store)} networks, but {pairs} has {made['networks']} initial ones")
    trained = {k: t.unflatten(0, (runs, 1 + len(initial))) for k, t in store.load(device=study.device).items()}
    keys = ("transpositions", "distance", "distance_unmatched", "barrier", "barrier_unmatched")
    panels: dict[str, list[list[float]]] = {key: [[] for _ in range(runs)] for key in keys}
    ratios = torch.linspace(0, 1, points, dtype=torch.float64, device="cpu").tolist()
    walks = []

    def match(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
        return activation_matching(study.graph, study.model, a, b, study.train).permutation

    for r, run in tracked("matching", list(enumerate(unstack(trained)))):
        first, *others = unstack(run)
        for other in others:
            p = match(first, other)
            panels["transpositions"][r].append(transposition_count(p))
            for name, state in (("", apply_permutation(study.graph, p, other)), ("_unmatched", other)):
                path = loss_barrier(study.model, first, state, study.train, cross_entropy, points=points)
                panels[f"distance{name}"][r].append(weight_distance(study.graph, first, state) ** 2)
                panels[f"barrier{name}"][r].append(path.barrier)
        walks.append([transposition_count(match(first, interpolate(first, others[-1], t))) for t in ratios])
    ends = [fmean(run[i] for run in panels["transpositions"]) for i in (0, -1)]
    return Outcome(
        {"initial": initial, "panels": panels, "walk": {"ratios": ratios, "transpositions": walks}},
        f"NoT {initial[0]} → {ends[0]:.1f}, {initial[-1]} → {ends[1]:.1f}",
    )


def report_transpositions(out: Path, recipe: str, matching: Path) -> Outcome:
    """Write ``report.md`` with the figure and its numbers, from the folder of :func:`match_pairs`."""
    page, found = Report(out, recipe), Outcome.load(matching).results

    def cell(key: str, i: int, form: str) -> str:
        return measured([run[i] for run in found["panels"][key]], form, error=False)

    columns = {
        "NoT after training": lambda i: cell("transpositions", i, ".1f"),
        "squared distance": lambda i: f"{cell('distance_unmatched', i, '.1f')}\n{cell('distance', i, '.1f')}",
        "barrier (nats)": lambda i: f"{cell('barrier_unmatched', i, '.2g')}\n{cell('barrier', i, '.2g')}",
    }
    rows = {str(count): i for i, count in enumerate(found["initial"])}
    caption = "second line: after activation matching; ± one standard deviation over runs"
    page.add(table(page.table.title, rows, columns, caption, "NoT at initialization"), heading=False)
    page.figure("transpositions", draw_transpositions, found)
    return page.done()


def draw_transpositions(path: Path, found: Found) -> None:
    """Figure 3 of arXiv 2401.00611: after training against the initial NoT, and NoT along the interpolation."""
    initial, panels, walk = found["initial"], found["panels"], found["walk"]
    start = "NoT at initialization"
    with plots.figure(path, 4, width=3.1) as axes:
        axes[0].plot([0, max(initial)], [0, max(initial)], color=plots.GRAY, linestyle=":", label="unchanged")
        plots.band(axes[0], initial, panels["transpositions"], plots.BLUE, "found by matching")
        axes[0].set(title="NoT after training", xlabel=start, ylabel="NoT")
        axes[1].set(title="Weight distance", xlabel=start, ylabel="$\\|W_0 - W_1\\|_2^2$")
        axes[2].set(title="Loss barrier", xlabel=start, ylabel="training loss (nats)")
        for ax, key in ((axes[1], "distance"), (axes[2], "barrier")):
            plots.band(ax, initial, panels[f"{key}_unmatched"], plots.GRAY, "before matching")
            plots.band(ax, initial, panels[key], plots.BLUE, "after matching")
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
        plots.band(axes[3], walk["ratios"], walk["transpositions"], plots.BLUE, None)
        label = r"interpolation $\lambda$"
        axes[3].set(title="NoT along the interpolation", xlabel=label, ylabel="NoT to $W_0$", xlim=(0, 1))
        for ax in axes[:3]:
            ax.legend(loc="best")
