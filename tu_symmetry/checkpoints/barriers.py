"""Loss barriers between aligned checkpoint files, before and after: a table, a figure, and what a killed run needs.

All pairs or a sample of them are measured, not only those with the reference, and the network whose weights are the
mean of all. Two networks and their aligned forms are in memory at a time, and the batches.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.barrier import Loss, loss_barrier, mean_loss
from tu_symmetry.alignment.repair import Correction, batchnorm_layers, correct, reestimate_batchnorm
from tu_symmetry.checkpoints.align import BARRIERS_FIGURE as FIGURE
from tu_symmetry.checkpoints.align import BARRIERS_MARK, FileAlignment, write_reports
from tu_symmetry.checkpoints.files import (
    STATE,
    Kept,
    Track,
    locked,
    owned_header,
    read_state,
    silent,
)
from tu_symmetry.configs import ConfigError, parse_assignments, resolve
from tu_symmetry.files import FileError, read_json
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State

CORRECTIONS = {
    "none": "as interpolated",
    "batchnorm": "BatchNorm re-estimated",
    "repair": "REPAIR",
}
WHEN = ("before", "after")


@dataclass(frozen=True)
class BarrierData:
    """Batches, in memory, and what they are.

    Attributes:
        name: as it was typed.
        evaluation: batches ``(inputs, targets)`` on which losses are measured.
        statistics: batches of inputs for re-estimated statistics.
        digest: the digest of all of it.
    """

    name: str
    evaluation: list[tuple[Tensor, Tensor]]
    statistics: list[Tensor]
    digest: str

    @property
    def num_samples(self) -> int:
        """Number of samples that losses are measured on."""
        return sum(len(x) for x, _ in self.evaluation)


@dataclass(frozen=True)
class BarrierOptions:
    """What is measured.

    Attributes:
        loss: dotted name of a function ``(outputs, targets) -> mean over the batch``.
        pairs: number of pairs, drawn at random with a fixed seed; None for all.
        points: evenly spaced points on each path, the ends included.
        corrections: some of ``none``, ``batchnorm`` (running statistics re-estimated) and ``repair`` (REPAIR); if
            empty, ``none``, and ``batchnorm`` for a network that has BatchNorm.
    """

    loss: str = "torch.nn.functional.cross_entropy"
    pairs: int | None = 10
    points: int = 11
    corrections: tuple[Correction, ...] = ()


@dataclass(frozen=True)
class BarrierReport:
    """Barriers and mean networks, before and after an alignment.

    Attributes:
        data: name of the data.
        num_samples: number of samples that losses are measured on.
        loss: name of the loss.
        points: on each path.
        networks: number of networks.
        pairs: ``(i, j)`` of the networks in the order given.
        barriers: ``before`` and ``after``, correction, then ``{"barrier", "losses"}`` for each pair.
        mean_losses: ``before`` and ``after``, correction, loss of the mean network.
        single_loss: mean loss of the networks that are in a pair.
    """

    data: str
    num_samples: int
    loss: str
    points: int
    networks: int
    pairs: list[tuple[int, int]]
    barriers: dict[str, dict[str, list[dict[str, Any]]]]
    mean_losses: dict[str, dict[str, float]]
    single_loss: float

    @property
    def unit(self) -> str:
        """The unit of the loss, in parentheses, where it is known."""
        return " (nats)" if self.loss.endswith("cross_entropy") else ""

    def grid(self) -> Grid:
        """Mean and largest barrier, and the loss of the mean network, before and after."""
        rows = []
        for correction, name in CORRECTIONS.items():
            if correction in self.barriers["before"]:
                values = [[p["barrier"] for p in self.barriers[w][correction]] for w in WHEN]
                rows.append([f"mean barrier, {name}", *(f"{fmean(v):.4f}" for v in values)])
                rows.append([f"largest barrier, {name}", *(f"{max(v):.4f}" for v in values)])
        for correction, losses in self.mean_losses["before"].items():
            name = "as averaged" if correction == "none" else CORRECTIONS[correction]
            rows.append([f"mean network, {name}", f"{losses:.4f}", f"{self.mean_losses['after'][correction]:.4f}"])
        total = self.networks * (self.networks - 1) // 2
        pairs = f"all {total} pairs" if len(self.pairs) == total else f"{len(self.pairs)} of {total} pairs at random"
        caption = (
            f"{self.loss.rpartition('.')[2]}{self.unit} on {self.num_samples} samples of {self.data}; {pairs}, "
            f"{self.points} points on each; single networks: {self.single_loss:.4f}"
        )
        return Grid("Loss barriers and the mean network", ["", *WHEN], rows, caption)

    def matrix(self, when: str, correction: str) -> tuple[list[int], list[list[float]]]:
        """The networks that are in a pair, and their barriers; NaN for pairs that were not measured."""
        shown = sorted({k for pair in self.pairs for k in pair})
        place = {k: n for n, k in enumerate(shown)}
        matrix = [[0.0 if a == b else math.nan for a in shown] for b in shown]
        for (i, j), found in zip(self.pairs, self.barriers[when][correction], strict=True):
            matrix[place[i]][place[j]] = matrix[place[j]][place[i]] = found["barrier"]
        return shown, matrix


def load_data(name: str, arguments: Sequence[str], num_samples: int, dtype: torch.dtype) -> BarrierData:
    """Take the first samples of a loader by its dotted name; floating-point inputs are converted to ``dtype``.

    It names a LightningDataModule (losses on its test loader, the first if there are several; statistics on its
    training loader), or a function that returns a loader of batches ``(inputs, targets)`` (for both), or a pair of
    loaders: evaluation and statistics. ``arguments`` are ``KEY=VALUE`` texts for it.

    Raises:
        FileError: no such name, or what it returns gives no such batches.
    """
    if num_samples < 1:
        raise FileError(f"num_samples must be at least 1, got {num_samples}")
    values = parse_assignments(arguments, "--data-init")
    try:
        build = resolve(name)
        with torch.random.fork_rng(devices=[]):  # loaders may shuffle
            torch.default_generator.manual_seed(0)  # that of the CPU, which alone is put back
            evaluation, statistics = _loaders(build(**values))
            labeled = [(_inputs(b, dtype), b[1]) for b in _first(_batches(evaluation, name), num_samples)]
            inputs = labeled if statistics is evaluation else _first(_batches(statistics, name), num_samples)
            unlabeled = [_inputs(b, dtype) for b in inputs]
    except FileError:
        raise
    except ConfigError as error:
        raise FileError(f"--data {name}: {error}") from error
    except Exception as error:
        raise FileError(
            f"--data {name} fails: {type(error).__name__}: {error}. It is called with {values} (option --data-init) "
            "and has to be a LightningDataModule, or return a loader of batches (inputs, targets), or two loaders"
        ) from error
    digest = hashlib.sha256()
    for tensor in (*(t for pair in labeled for t in pair), *unlabeled):
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return BarrierData(name, labeled, unlabeled, digest.hexdigest())


def _loaders(source: Any) -> tuple[Iterable[Any], Iterable[Any]]:
    """Loaders for evaluation and for statistics."""
    if hasattr(source, "train_dataloader") and hasattr(source, "test_dataloader"):
        source.prepare_data()
        source.setup("fit")
        source.setup("test")
        loaders = source.test_dataloader(), source.train_dataloader()
        first, second = (one[0] if isinstance(one, (list, tuple)) else one for one in loaders)
        return first, second
    if isinstance(source, tuple) and len(source) == 2:
        return source
    return source, source


def _batches(loader: Iterable[Any], name: str) -> Iterable[tuple[Tensor, Tensor]]:
    for batch in loader:
        if not isinstance(batch, (list, tuple)) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
            kinds = [type(t).__name__ for t in batch] if isinstance(batch, (list, tuple)) else type(batch).__name__
            raise FileError(f"--data {name}: a batch has to be (inputs, targets), two tensors, but it is {kinds}")
        yield batch[0], batch[1]


def _first(batches: Iterable[tuple[Tensor, Tensor]], num_samples: int) -> list[tuple[Tensor, Tensor]]:
    taken: list[tuple[Tensor, Tensor]] = []
    left = num_samples
    for x, y in batches:
        taken.append((x[:left], y[:left]))
        left -= len(taken[-1][0])
        if left <= 0:
            break
    if not taken:
        raise FileError("the data are empty: the loader gave no batch")
    return taken


def _inputs(batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    return batch[0].to(dtype) if batch[0].is_floating_point() else batch[0]


def check_loss(model: nn.Module, data: BarrierData, options: BarrierOptions) -> Loss:
    """The loss, tried on the first batch, so that a wrong one is known before anything is aligned.

    Raises:
        FileError: no such function, or it fails on the network's outputs.
    """
    unknown = [m for m in options.corrections if m not in CORRECTIONS]
    if unknown or options.points < 3 or (options.pairs is not None and options.pairs < 1):
        raise FileError(
            f"points must be at least 3, pairs at least 1 and corrections among {', '.join(CORRECTIONS)}; got {options}"
        )
    if "batchnorm" in options.corrections and not batchnorm_layers(model):
        raise FileError(f"{type(model).__name__} has no BatchNorm statistics to re-estimate; leave out batchnorm")
    try:
        loss: Loss = resolve(options.loss)
        mean_loss(model, model.state_dict(), data.evaluation[:1], loss)
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in data.evaluation[0])
        raise FileError(
            f"{options.loss} of the network's outputs cannot be computed on a batch of --data {data.name} ({shapes}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return loss


def sampled_pairs(networks: int, pairs: int | None) -> list[tuple[int, int]]:
    """All pairs of networks, or some at random with a fixed seed, in order."""
    total = networks * (networks - 1) // 2
    chosen: Iterable[int] = range(total)
    if pairs is not None and pairs < total:
        chosen = random.Random(0).sample(range(total), pairs)
    found = []
    for number in chosen:  # pairs (i, j), i < j, are numbered by j first
        j = (1 + math.isqrt(1 + 8 * number)) // 2
        found.append((number - j * (j - 1) // 2, j))
    return sorted(found)


def measure_barriers(
    model: nn.Module,
    alignment: FileAlignment,
    out: Path,
    data: BarrierData,
    options: BarrierOptions,
    *,
    track: Track = silent,
) -> BarrierReport:
    """Measure barriers between files before and after their alignment, and write them into the reports in ``out``.

    Each pair is kept in ``state/barriers`` when it is measured, so a killed run resumes to the same result. The module
    is in the dtype of the data; ``barriers.png`` is drawn.

    Raises:
        FileError: fewer than two networks, a loss that fails, a foreign ``barriers.png``, another run in the
            folder, results that are not those of this alignment any more.
    """
    with locked(out):
        return _measure(model, alignment, out, data, options, track)


def _measure(
    model: nn.Module, alignment: FileAlignment, out: Path, data: BarrierData, options: BarrierOptions, track: Track
) -> BarrierReport:
    if len(alignment.files) < 2:
        raise FileError("barriers are between networks, so there must be two checkpoints at least")
    folder = out / STATE / "barriers"
    if (out / FIGURE).exists() and not folder.is_dir() and not _reported(out):
        raise FileError(f"{out / FIGURE} was not written by this command; move it away or choose another folder")
    loss = check_loss(model, data, options)
    corrections = options.corrections or (("none", "batchnorm") if batchnorm_layers(model) else ("none",))
    made_of = [
        [f.source_sha256 for f in alignment.files],
        [alignment.mode in ("mean", "universe"), alignment.reference_sha256, alignment.options],
        [data.digest, options.loss, options.points, str(next(model.parameters()).dtype)],
        list(corrections),
    ]
    kept = Kept(folder, lambda key: made_of)

    def states(k: int) -> dict[str, State]:
        file = alignment.files[k]
        header = owned_header(out / file.aligned) or {}
        if [header.get("source_sha256"), header.get("reference_sha256")] != [
            file.source_sha256,
            alignment.reference_sha256,
        ]:
            raise FileError(f"{out / file.aligned} was changed by another run; run the command again")
        return {
            "before": read_state(Path(file.source), alignment.options["prefix"]),
            "after": read_state(out / file.aligned, ""),
        }

    pairs = sampled_pairs(len(alignment.files), options.pairs)
    found = {(i, j): kept[f"pair/{i}/{j}"] for i, j in pairs if f"pair/{i}/{j}" in kept}
    todo = [pair for pair in pairs if pair not in found]
    with track("measuring barriers", len(todo)) as tracker:
        for done, (i, j) in enumerate(todo, 1):
            first, second = states(i), states(j)
            try:
                found[i, j] = {
                    w: {m: _measured(model, first[w], second[w], data, loss, m, options.points) for m in corrections}
                    for w in WHEN
                }
            except ValueError as error:
                sources = f"{alignment.files[i].source} and {alignment.files[j].source}"
                raise FileError(f"no barrier between {sources}: {error}") from error
            kept[f"pair/{i}/{j}"] = found[i, j]
            shown = {w: found[i, j][w][corrections[0]]["barrier"] for w in WHEN}
            tracker.update(done, **shown)

    def of_the_mean(when: str) -> dict[str, float]:
        with track(f"averaging, {when} the alignment", len(alignment.files)) as tracker:
            mean = _mean((states(k)[when] for k in range(len(alignment.files))), tracker.update)
        losses = {"none": mean_loss(model, mean, data.evaluation, loss)}
        if "batchnorm" in corrections:
            again = reestimate_batchnorm(model, mean, data.statistics)
            losses["batchnorm"] = mean_loss(model, again, data.evaluation, loss)
        return losses

    for when in WHEN:
        if f"mean/{when}" not in kept:
            kept[f"mean/{when}"] = of_the_mean(when)
    means = {when: kept[f"mean/{when}"] for when in WHEN}
    kept.tidy()
    measured = [found[pair] for pair in pairs]
    single = {
        k: p["before"][corrections[0]]["losses"][end]
        for pair, p in zip(pairs, measured, strict=True)
        for k, end in zip(pair, (0, -1), strict=True)
    }
    report = BarrierReport(
        data=data.name,
        num_samples=data.num_samples,
        loss=options.loss,
        points=options.points,
        networks=len(alignment.files),
        pairs=pairs,
        barriers={w: {m: [p[w][m] for p in measured] for m in corrections} for w in WHEN},
        mean_losses=means,
        single_loss=fmean(single.values()),
    )
    draw_matrices(out / STATE / FIGURE, report)
    os.replace(out / STATE / FIGURE, out / FIGURE)
    grid = report.grid()
    text = (
        f"{BARRIERS_MARK}\n\n## {grid.title}\n\n{grid.markdown()}\n\n![barrier matrices]({FIGURE})\n\n"
        "Networks are numbered as in the "
        "table above, from 0; gray pairs were not measured."
    )
    write_reports(out, alignment, {"barriers": {"alignment": alignment.key, **_json(report)}}, text)
    return report


def _reported(out: Path) -> bool:
    """Whether the report of an earlier run holds barriers, so that the figure is its own."""
    try:
        return "barriers" in read_json(out / "report.json")[0]
    except (OSError, ValueError):
        return False


def _measured(
    model: nn.Module, a: State, b: State, data: BarrierData, loss: Loss, correction: Correction, points: int
) -> dict[str, Any]:
    """Barrier and losses along the path between two networks."""

    def merge(state: State, ratio: float) -> State:
        return correct(model, [a, b], [1 - ratio, ratio], state, data.statistics, correction)

    found = loss_barrier(model, a, b, data.evaluation, loss, points=points, merge=merge)
    return {"barrier": found.barrier, "losses": found.losses}


def _mean(states: Iterable[State], update: Callable[[int], None]) -> State:
    """The mean network, one network in memory at a time; sums in float64."""
    total: dict[str, Tensor] = {}
    like: State = {}
    count = 0
    for count, state in enumerate(states, 1):
        like = like or state
        for name, tensor in state.items():
            if tensor.is_floating_point():
                total[name] = total[name] + tensor if name in total else tensor.double()
        update(count)
    return {n: (total[n] / count).to(t.dtype) if n in total else t for n, t in like.items()}


def _json(report: BarrierReport) -> dict[str, Any]:
    return {
        "data": report.data,
        "num_samples": report.num_samples,
        "loss": report.loss,
        "points": report.points,
        "pairs": report.pairs,
        "networks_in_matrix": report.matrix("before", next(iter(report.barriers["before"])))[0],
        "matrix": {w: {m: report.matrix(w, m)[1] for m in report.barriers[w]} for w in WHEN},
        "paths": report.barriers,
        "mean_network_loss": report.mean_losses,
        "single_network_loss": report.single_loss,
    }


def draw_matrices(path: Path, report: BarrierReport) -> None:
    """Barriers between pairs as colors, before and after, two panels for each correction with one scale."""
    from tu_symmetry import plot
    from tu_symmetry.reporting import plots

    corrections = list(report.barriers["before"])
    with plots.figure(path, len(WHEN) * len(corrections), width=3.4, height=3.0) as axes:
        for k, correction in enumerate(corrections):
            shown = [str(network) for network in report.matrix(WHEN[0], correction)[0]]
            matrices = {f"{when}, {CORRECTIONS[correction]}": report.matrix(when, correction)[1] for when in WHEN}
            plot.barriers(matrices, label=f"barrier{report.unit}", names=shown, ax=axes[len(WHEN) * k :][: len(WHEN)])
