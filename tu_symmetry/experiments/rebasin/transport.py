"""Task vectors between networks that were trained apart: what they are worth as they are, and moved."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.over import Over
from tu_symmetry.alignment.transport import transport
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches, accuracy, logits
from tu_symmetry.experiments.study import Images, tracked
from tu_symmetry.reporting import plots
from tu_symmetry.reporting.grid import measured
from tu_symmetry.states import State
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors
from tu_symmetry.tables.report import Report, table

TASKS = {
    "rotated": lambda x: x.rot90(1, (-2, -1)),
    "inverted": lambda x: 1 - x,
}
WEIGHTS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
WAYS: dict[str, tuple[Over, ...]] = {
    "permuted": ("permutations",),
    "permuted, scaled": ("permutations", "scales"),
}
ROWS = {
    "the new base": "new base",
    "with the task vector as it is": "as it is",
    "with the task vector, permuted": "permuted",
    "with it, permuted and scaled": "permuted, scaled",
    "the fine-tuned original": "original",
}


def move_tasks(
    out: Path,
    data: ImageDataModule,
    widths: Sequence[int] = (64, 256, 512),
    pairs: int = 5,
    depth: int = 2,
    epochs: int = 30,
    tuning_epochs: int = 30,
    learning_rate: float = 1e-3,
    batch_size: int = 64,
    device: str = "cpu",
) -> Outcome:
    """Train bases and fine-tune them, and move each task vector to the next base: accuracies on the task's images.

    Bases are perceptrons with ReLU of so many hidden layers, from their own initialization and order of batches. The
    new base is another one (``another``), or the old one after as many epochs more (``continued``). What is added is
    multiplied by the weight that is best on the task's validation images, for each way to move it by itself. A pair of
    bases is kept in the ``parts`` of ``out`` at once.

    Args:
        pairs: number of pairs of bases for each width.
        depth: number of hidden layers.
        tuning_epochs: of fine-tuning a base on the images of a task.
    """
    images = Images(data, device)
    held_out = images.held_out("weights are chosen on")
    schedule = (depth, epochs, tuning_epochs, learning_rate, batch_size)
    parts = Parts(out / "parts", [schedule, images.digest(), digest_tensors(*held_out)])
    runs: list[dict[str, Any]] = []
    for width, pair in tracked("pairs", [(w, p) for w in widths for p in range(pairs)], lambda job: f"width {job[0]}"):
        found = parts.take(f"{width}-{pair}", _pair, images, held_out, width, pair, schedule)
        runs += [{"width": width, "pair": pair} | run for run in found["runs"]]
    another = [run["found"] for run in runs if run["kind"] == "another"]
    gains = [one["permuted"]["test"] - one["as it is"]["test"] for one in another]
    return Outcome(
        {"runs": runs, "widths": list(widths), "sizes": images.sizes},
        f"gain of the moved task vector over the same as it is: {100 * fmean(gains):.1f} points on another base",
    )


def _pair(
    images: Images, held_out: tuple[Tensor, Tensor], width: int, pair: int, schedule: tuple[int, int, int, float, int]
) -> dict[str, Any]:
    """All that is measured between two bases."""
    depth, epochs, tuning_epochs, rate, batch_size = schedule
    x, y = images.train.x, images.train.y
    sizes = [x[0].numel(), *[width] * depth]
    hidden = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, images.data.num_classes)).to(images.device)
    graph = discover_symmetries(model, x[:2])
    starts = [_drawn(model, 2 * pair + k) for k in range(2)]
    old, other = (_fit(model, s, x, y, epochs, rate, batch_size, 2 * pair + k) for k, s in enumerate(starts))
    bases = {"another": other, "continued": _fit(model, old, x, y, epochs, rate, batch_size, 2 * pair + 1)}
    runs = []
    for task, change in TASKS.items():
        tuned = _fit(model, old, change(x), y, tuning_epochs, rate, batch_size, 2 * pair)
        sets = {
            "validation": Batches(change(held_out[0]), held_out[1]),
            "test": Batches(change(images.test.x), images.test.y),
            "upright": images.test,
        }

        def scores(state: State, sets: dict[str, Batches] = sets) -> dict[str, float]:
            return {name: accuracy(logits(model, state, part), part.y) for name, part in sets.items()}

        for kind, new in bases.items():
            found: dict[str, dict[str, float]] = {"original": scores(tuned), "new base": scores(new)}
            moved = {way: transport(graph, old, tuned, new, over=over) for way, over in WAYS.items()}
            vectors = {way: {n: t - new[n] for n, t in one.state.items()} for way, one in moved.items()}
            for way, vector in [("as it is", {n: t - old[n] for n, t in tuned.items()}), *vectors.items()]:
                every = {w: scores({n: t + w * vector[n] for n, t in new.items()}) for w in WEIGHTS}
                best = max(every, key=lambda w, every=every: every[w]["validation"])  # type: ignore[misc]
                found[way] = every[best] | {"weight": best, "full": every[1.0]["test"]}
            distances = [moved["permuted"].distance_before, moved["permuted"].distance_after]
            runs.append({"task": task, "kind": kind, "found": found, "distances": distances})
    return {"runs": runs}


def _drawn(model: nn.Module, seed: int) -> State:
    """The state of a network with weights as torch draws them, from a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def _fit(
    model: nn.Module, state: State, x: Tensor, y: Tensor, epochs: int, rate: float, batch_size: int, seed: int
) -> State:
    """The state after some epochs of Adam on the cross-entropy, in an order of the seed's."""
    weights = {n: t.clone().requires_grad_() for n, t in state.items()}
    optimizer = torch.optim.Adam(list(weights.values()), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator, device="cpu").to(x.device)
        for batch in order.split(batch_size):
            optimizer.zero_grad()
            cross_entropy(functional_call(model, weights, (x[batch],)), y[batch]).backward()
            optimizer.step()
    return {n: t.detach() for n, t in weights.items()}


def report_transport(out: Path, recipe: str, transported: Path) -> Outcome:
    """Write ``report.md`` with a table for each task and kind of new base, and a figure, from `move_tasks`' folder."""
    page, found = Report(out, recipe), Outcome.load(transported).results
    runs, widths = found["runs"], found["widths"]
    page.figure("transport", draw_transport, runs, widths, alt="accuracy on the task")
    names = {"another": "a base from another seed", "continued": "the old base, trained on"}

    def of(key: str, row: str, **wanted: Any) -> list[float]:
        return [100 * r["found"][row][key] for r in runs if wanted.items() <= r.items()]

    for kind in names:
        for task in TASKS:
            columns: dict[str, Any] = {}
            for width in widths:
                own = {"kind": kind, "task": task, "width": width}
                columns[f"{width}\ntask"] = lambda row, own=own: measured(of("test", row, **own), ".1f")
            for width in widths:
                own = {"kind": kind, "task": task, "width": width}
                columns[f"{width}\nupright"] = lambda row, own=own: measured(of("upright", row, **own), ".1f")
            last = {"kind": kind, "task": task, "width": widths[-1]}
            columns["weight"] = lambda row, own=last: (
                f"{fmean(of('weight', row, **own)) / 100:.2f}" if row not in ("new base", "original") else ""
            )
            caption = (
                f"test accuracy in %, mean ± standard error over {len(of('test', 'original', **last))} pairs, for each "
                "width; on the task's images, and on upright ones; the task vector's weight is chosen on validation "
                f"images of the task (its mean for width {widths[-1]})"
            )
            page.add(table(f"{task.capitalize()}, {names[kind]}", ROWS, columns, caption))
    return page.done()


def draw_transport(path: Path, runs: Sequence[Mapping[str, Any]], widths: Sequence[int]) -> None:
    """Accuracy on the task over the width, for each task on bases from another seed; dots are pairs."""
    with plots.figure(path, len(TASKS)) as axes:
        for ax, task in zip(axes, TASKS, strict=True):
            for color, (label, row) in zip(
                (plots.GRAY, plots.ORANGE, plots.BLUE, plots.PURPLE, plots.GREEN), ROWS.items(), strict=True
            ):
                own = [r for r in runs if r["task"] == task and r["kind"] == "another"]
                columns = [[100 * r["found"][row]["test"] for r in own if r["width"] == w] for w in widths]
                ax.plot(range(len(widths)), [fmean(c) for c in columns], color=color, label=label)
                for k, values in enumerate(columns):
                    ax.plot([k] * len(values), values, "o", color=color, markersize=2.5)
            ax.set_xticks(range(len(widths)), [str(w) for w in widths])
            ax.set(title=task.capitalize(), xlabel="width", ylabel="accuracy on the task, %", ylim=(0, 170))
            ax.set_yticks(range(0, 101, 20))
        axes[0].legend(loc="upper left")
