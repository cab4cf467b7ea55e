"""Weight decay and the representation cost (arXiv 2310.08287, section 6): does training reach the least mass?

Small ConvNets are trained with and without weight decay under the ``ScaleCanonicalization`` callback, which logs the
mass (squared norm) of the weights and the least mass over all positive rescalings of the same function.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.files import read_json, read_tensors, write_json, write_safetensors
from tu_symmetry.tables.grid import Grid
from tu_symmetry.tables.models import build_model
from tu_symmetry.tables.predict import accuracy, logits
from tu_symmetry.tables.stage import Results, StageContext, Tracker, stage

STATES = "states.safetensors"


class ConvNet(nn.Module):
    """Two convolutions and two linear layers with ReLU, a stride and a max-pooling, without normalization.

    Args:
        in_features: number of pixels of a square image with one channel.
        num_classes: number of outputs.
        channels: of the two convolutions.
        hidden: units of the first linear layer.
    """

    def __init__(self, in_features: int, num_classes: int, channels: Sequence[int] = (8, 16), hidden: int = 32) -> None:
        super().__init__()
        first, second = channels
        side = math.isqrt(in_features) // 4
        self.conv1 = nn.Conv2d(1, first, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1)
        self.hidden = nn.Linear(second * side**2, hidden)
        self.output = nn.Linear(hidden, num_classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, 1, side, side]``."""
        x = self.conv1(x).relu()
        x = self.pool(self.conv2(x).relu())
        return self.output(self.hidden(x.flatten(1)).relu())


@dataclass(frozen=True)
class RunsOptions:
    """Training.

    Attributes:
        weight_decays: of SGD, on all parameters; every one is trained from the same initializations.
        seeds: runs with each weight decay.
        epochs: over the training set.
        batch_size: of each step.
        learning_rate: of SGD, constant.
        momentum: of SGD.
    """

    weight_decays: list[float] = field(default_factory=lambda: [0.0, 5e-4, 5e-3])
    seeds: int = 3
    epochs: int = 50
    batch_size: int = 100
    learning_rate: float = 0.05
    momentum: float = 0.9


@dataclass(frozen=True)
class ProfilesOptions:
    """Where mass profiles are taken.

    Attributes:
        reach: largest natural-log factor, in both directions.
        points: evenly spaced log-factors.
    """

    reach: float = 1.0
    points: int = 81


@dataclass(frozen=True)
class ReportOptions:
    """A report has no options."""


class _ShuffledBatches:
    """Batches of resident data in a new order each epoch, drawn from a generator of their own."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, generator: torch.Generator) -> None:
        self.x, self.y, self.batch_size, self.generator = x, y, batch_size, generator

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.x), generator=self.generator).to(self.x.device)
        for batch in order.split(self.batch_size):
            yield self.x[batch], self.y[batch]


@stage()
def train_runs(context: StageContext, options: RunsOptions) -> Results:
    """Train every weight decay from the same initializations; finished runs survive an interruption."""
    runs: list[dict[str, Any]] = []
    states: list[dict[str, Tensor]] = []
    total = len(options.weight_decays) * options.seeds * options.epochs
    with context.track("training", total) as tracker:
        for decay in options.weight_decays:
            for seed in range(options.seeds):
                record, weights = (context.folder / f"run-{decay}-{seed}.{kind}" for kind in ("json", "safetensors"))
                if not record.exists():
                    found, state = _train(context, options, decay, seed, tracker, done=len(runs) * options.epochs)
                    write_safetensors(weights, state)
                    write_json(record, found, seal=True)  # renamed into place last: a run without it is trained again
                runs.append(read_json(record)[0])
                states.append(read_tensors(weights))
    shape = (len(options.weight_decays), options.seeds)
    stacked = {k: torch.stack([s[k] for s in states]).unflatten(0, shape).contiguous() for k in states[0]}
    write_safetensors(context.folder / STATES, stacked)
    ratios = {d: _mean([r["ratio"][-1] for r in runs if r["weight_decay"] == d]) for d in options.weight_decays}
    text = ", ".join(f"{ratio:.3f} with {decay:g}" for decay, ratio in ratios.items())
    return {"runs": runs, "options": asdict(options), "headline": f"mass over minimal mass at the end: {text}"}


def _train(
    context: StageContext, options: RunsOptions, decay: float, seed: int, tracker: Tracker, done: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One run: its history, and its last weights."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from tu_symmetry.callbacks.scale import ScaleCanonicalization
    from tu_symmetry.scaling.canonical import canonicalize

    class Routine(LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(
                self.parameters(), lr=options.learning_rate, momentum=options.momentum, weight_decay=decay
            )

    class Progress(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            ratio = canonical.history[-1]["ratio"][0]
            tracker.update(done + trainer.current_epoch + 1, decay=f"{decay:g}", seed=str(seed), ratio=ratio)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed(f"initialization {seed}"))
        routine = Routine(build_model(context.table.model, context.data))
    start = canonicalize(context.graph, routine.model.state_dict())
    canonical = ScaleCanonicalization(every_n_epochs=1, graph=context.graph)
    generator = context.generator(f"batches {seed}")
    batches = _ShuffledBatches(context.data.train_x, context.data.train_y, options.batch_size, generator)
    with _quiet_lightning():
        trainer = Trainer(
            callbacks=[canonical, Progress()],
            accelerator="gpu" if context.device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=options.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(routine, batches)
    state = {name: t.detach() for name, t in routine.model.to(context.device).state_dict().items()}
    history = canonical.history
    mass = [start.mass_before, *(r["mass"][0] for r in history)]
    least = [start.mass_after, *(r["minimal_mass"][0] for r in history)]
    loss, accuracy = _evaluate(context, state)
    record = {
        "weight_decay": decay,
        "seed": seed,
        "step": [0, *(r["step"] for r in history)],
        "mass": mass,
        "minimal_mass": least,
        "ratio": [m / c for m, c in zip(mass, least, strict=True)],
        "train_loss": loss,
        "test_accuracy": accuracy,
    }
    return record, state


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keep what Lightning says at every fit out of the table's progress; errors are raised as ever."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _evaluate(context: StageContext, state: dict[str, Tensor]) -> tuple[float, float]:
    """Mean loss on the training set (nats), and accuracy on the test set."""
    data = context.data
    train, test = (logits(context.model, state, part) for part in (data.train, data.test))
    return float(cross_entropy(train, data.train_y)), accuracy(test, data.test_y)


@stage(inputs=("runs",))
def take_profiles(context: StageContext, options: ProfilesOptions) -> Results:
    """Mass, relative to its minimum, when all units of a layer are scaled: from the last weights, from the optimum."""
    from tu_symmetry.scaling.canonical import canonicalize
    from tu_symmetry.scaling.profiles import mass_profile

    graph = context.graph
    states = read_tensors(context.inputs["runs"].folder / STATES)
    log_factors = torch.linspace(-options.reach, options.reach, options.points, dtype=torch.float64)
    found: dict[str, dict[str, Any]] = {}
    for i, decay in enumerate(context.inputs["runs"].results["options"]["weight_decays"]):
        mine: dict[str, Any] = {k: {g.name: [] for g in graph.scales} for k in ("last", "optimum", "minimum", "rms")}
        for seed in range(len(next(iter(states.values()))[i])):
            state = {name: t[i, seed] for name, t in states.items()}
            least = canonicalize(graph, state)
            last, optimum = (mass_profile(graph, s, log_factors) for s in (state, least.state))
            for name, log_scale in least.log_scale.items():
                mine["last"][name].append((last.masses[name] / least.mass_after).tolist())
                mine["optimum"][name].append((optimum.masses[name] / least.mass_after).tolist())
                mine["minimum"][name].append(last.minima[name])
                mine["rms"][name].append(float(log_scale.square().mean().sqrt()))
        found[f"{decay:g}"] = mine
    distances = {d: _mean([v for values in mine["rms"].values() for v in values]) for d, mine in found.items()}
    return {
        "log_factors": log_factors,
        "profiles": found,
        "headline": "log-factors to the minimum, root mean square: "
        + ", ".join(f"{value:.3f} with {d}" for d, value in distances.items()),
    }


def draw(
    path: Path, runs: Sequence[Mapping[str, Any]], log_factors: Sequence[float], profiles: Mapping[str, Any]
) -> None:
    """Mass, its minimum and their ratio along training, and the mass profiles around the last weights.

    Args:
        path: of the PNG.
        runs: the records of the training stage.
        log_factors: natural-log factors of the profiles.
        profiles: weight decay to ``last`` and ``optimum``, and those to group to ``[seeds, points]`` masses relative to
            the minimal mass.
    """
    from tu_symmetry.tables import plots

    colors = (plots.GRAY, plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE)
    groups = list(next(iter(profiles.values()))["last"])
    with plots.figure(path, 2 + len(groups), width=3.1) as axes:
        for color, (decay, found) in zip(colors, profiles.items(), strict=False):
            mine = [r for r in runs if f"{r['weight_decay']:g}" == decay]
            steps = mine[0]["step"]
            plots.band(axes[0], steps, [r["mass"] for r in mine], color, f"weight decay {decay}")
            plots.band(axes[0], steps, [r["minimal_mass"] for r in mine], color, None, linestyle="--")
            plots.band(axes[1], steps, [r["ratio"] for r in mine], color, f"weight decay {decay}")
            for ax, group in zip(axes[2:], groups, strict=True):
                plots.band(ax, log_factors, found["last"][group], color, None)
                plots.band(ax, log_factors, found["optimum"][group], color, None, linestyle="--")
        axes[0].set(title="Mass (dashed: minimal)", xlabel="step", ylabel="squared norm of the weights", yscale="log")
        axes[1].set(title="Mass over minimal mass", xlabel="step", ylabel="ratio")
        axes[1].axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        for ax, group in zip(axes[2:], groups, strict=True):
            ax.axvline(0.0, color="black", linewidth=0.8, linestyle=":")
            ax.set(title=f"Profile of {group}", xlabel="log-factor on all units", ylabel="mass over minimal mass")
        axes[2].plot([], [], color="black", label="from the last weights")
        axes[2].plot([], [], color="black", linestyle="--", label="from the optimum")
        for ax in axes[1:3]:
            low, high = ax.get_ylim()
            ax.set_ylim(low, high + 0.25 * (high - low))
            ax.legend(loc="upper right")


@stage(inputs=("runs", "profiles"), reads_table=True)
def report(context: StageContext, options: ReportOptions) -> Results:
    """Write ``report.md``: the claim in numbers, and the figure."""
    runs = context.inputs["runs"].results["runs"]
    found = context.inputs["profiles"].results
    draw(context.folder / "mass.png", runs, found["log_factors"], found["profiles"])
    decays = list(found["profiles"])
    by_decay = [[r for r in runs if f"{r['weight_decay']:g}" == decay] for decay in decays]
    half = len(runs[0]["ratio"]) // 2
    lines: list[tuple[str, Callable[[dict[str, Any]], float], str]] = [
        ("mass at the end", lambda r: r["mass"][-1], ".1f"),
        ("minimal mass at the end", lambda r: r["minimal_mass"][-1], ".1f"),
        ("ratio at the start", lambda r: r["ratio"][0], ".4f"),
        ("ratio halfway", lambda r: r["ratio"][half], ".4f"),
        ("ratio at the end", lambda r: r["ratio"][-1], ".4f"),
        ("lowest ratio of the run", lambda r: min(r["ratio"]), ".4f"),
        ("training loss (nats)", lambda r: r["train_loss"], ".2g"),
        ("test accuracy (%)", lambda r: 100 * r["test_accuracy"], ".2f"),
    ]
    rows = [[name, *(_spread([read(r) for r in mine], form) for mine in by_decay)] for name, read, form in lines]
    rms = [found["profiles"][decay]["rms"].values() for decay in decays]
    distances = [[_mean(layers) for layers in zip(*values, strict=True)] for values in rms]
    rows.insert(6, ["log-factor to the minimum", *(_spread(values, ".3f") for values in distances)])
    caption = (
        f"Ratio: mass over minimal mass. {len(by_decay[0])} seeds, ± one standard deviation. Log-factor: root mean "
        "square of the natural-log factors from the last weights to the minimum, mean over the layers."
    )
    grid = Grid(context.table.title, ["weight decay", *decays], rows, caption)
    environment = ", ".join(f"{k} {v}" for k, v in context.environment.items())
    parts = [f"# {context.table.title}", f"Reproduces: {context.table.source}.", context.table.note, grid.markdown()]
    parts += ["![mass](mass.png)", f"## Hardware and versions\n\n{environment}"]
    (context.folder / "report.md").write_text("\n\n".join(p for p in parts if p) + "\n", encoding="utf-8")
    return {"tables": [grid.to_dict()], "headline": f"{context.name}/report.md"}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {torch.tensor(values, dtype=torch.float64).std().item():{form}}" if len(values) > 1 else ""
    return f"{_mean(values):{form}}{spread}"
