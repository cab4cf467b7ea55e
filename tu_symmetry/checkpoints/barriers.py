"""Loss barriers between aligned checkpoint files, before and after: a table, a figure, and what a killed run needs.

All pairs or a sample of them are measured, and the network whose weights are the mean of all. Two networks are in
memory at a time, and the batches.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.barrier import Loss, loss_barrier, mean_loss
from tu_symmetry.alignment.networks import StateSource
from tu_symmetry.alignment.repair import Correction, batchnorm_layers, correct, reestimate_batchnorm
from tu_symmetry.checkpoints.align import BARRIERS, FIGURE, FileAlignment, write_reports
from tu_symmetry.checkpoints.files import FORMAT, Track, owned_header, silent
from tu_symmetry.configs import ConfigError, parse_assignments, resolve
from tu_symmetry.files import FileError, digest_of, lock_folder, read_json, write_bytes, write_json
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State

CROSS_ENTROPY = "torch.nn.functional.cross_entropy"
CORRECTIONS = {"none": "as interpolated", "batchnorm": "BatchNorm re-estimated", "repair": "REPAIR"}
WHEN = ("before", "after")


@dataclass(frozen=True)
class BarrierData:
    """Batches in memory: ``(inputs, targets)`` to measure losses on, inputs for statistics, and the digest of all."""

    name: str
    evaluation: list[tuple[Tensor, Tensor]]
    statistics: list[Tensor]
    digest: str

    @property
    def num_samples(self) -> int:
        """Number of samples that losses are measured on."""
        return sum(len(x) for x, _ in self.evaluation)


def load_data(name: str, arguments: Sequence[str], num_samples: int, dtype: torch.dtype) -> BarrierData:
    """Take the first samples of a loader by its dotted name; floating-point inputs are converted to ``dtype``.

    It names a LightningDataModule (losses on its test loader, the first if there are several; statistics on its
    training loader), or a function that returns a loader of batches ``(inputs, targets)`` (for both), or a pair of
    loaders: evaluation and statistics. ``arguments`` are ``KEY=VALUE`` texts for it.
    """
    values = parse_assignments(arguments, "--data-init")
    try:
        build = resolve(name)
        with torch.random.fork_rng(devices=[]):  # loaders may shuffle
            torch.default_generator.manual_seed(0)  # that of the CPU, which alone is put back
            evaluation, statistics = _loaders(build(**values))
            labeled = _first(evaluation, num_samples, dtype)
            others = labeled if statistics is evaluation else _first(statistics, num_samples, dtype)
    except (FileError, ConfigError) as error:
        raise FileError(f"--data {name}: {error}") from error
    except Exception as error:
        raise FileError(
            f"--data {name} fails: {type(error).__name__}: {error}. It is called with {values} (option --data-init) "
            "and has to be a LightningDataModule, or return a loader of batches (inputs, targets), or two loaders"
        ) from error
    unlabeled = [x for x, _ in others]
    digest = hashlib.sha256()
    for tensor in (*(t for pair in labeled for t in pair), *unlabeled):
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return BarrierData(name, labeled, unlabeled, digest.hexdigest())


def _loaders(source: Any) -> tuple[Iterable[Any], Iterable[Any]]:
    """Loaders for evaluation and for statistics."""
    if not (hasattr(source, "train_dataloader") and hasattr(source, "test_dataloader")):
        return source if isinstance(source, tuple) and len(source) == 2 else (source, source)
    source.prepare_data()
    source.setup("fit")
    source.setup("test")
    test, train = source.test_dataloader(), source.train_dataloader()
    return test[0] if isinstance(test, (list, tuple)) else test, train[0] if isinstance(train, (list, tuple)) else train


def _first(loader: Iterable[Any], num_samples: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    taken: list[tuple[Tensor, Tensor]] = []
    left = num_samples
    for batch in loader:
        if not isinstance(batch, (list, tuple)) or [isinstance(t, Tensor) for t in batch] != [True, True]:
            kinds = [type(t).__name__ for t in batch] if isinstance(batch, (list, tuple)) else type(batch).__name__
            raise FileError(f"a batch has to be (inputs, targets), two tensors, but it is {kinds}")
        x, y = (tensor[:left] for tensor in batch)
        taken.append((x.to(dtype) if x.is_floating_point() else x, y))
        left -= len(x)
        if left <= 0:
            break
    if not taken:
        raise FileError("the data are empty: the loader gave no batch")
    return taken


def check_loss(model: nn.Module, data: BarrierData, loss: str, corrections: Sequence[Correction] = ()) -> Loss:
    """The loss of a dotted name, tried on the first batch, so that a wrong one is known before anything is aligned."""
    if "batchnorm" in corrections and not batchnorm_layers(model):
        raise FileError(f"{type(model).__name__} has no BatchNorm statistics to re-estimate; leave out batchnorm")
    try:
        function: Loss = resolve(loss)
        mean_loss(model, model.state_dict(), data.evaluation[:1], function)
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in data.evaluation[0])
        raise FileError(
            f"{loss} of the network's outputs cannot be computed on a batch of --data {data.name} ({shapes}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return function


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
    *,
    loss: str = CROSS_ENTROPY,
    pairs: int | None = 10,
    points: int = 11,
    corrections: Sequence[Correction] = (),
    track: Track = silent,
) -> dict[str, Any]:
    """Measure barriers between files before and after their alignment, and write them into the reports in ``out``.

    Each pair is kept in ``barriers.json`` when it is measured, so a killed run goes on to the same result.

    The module is in the dtype of the data. ``pairs`` are drawn at random with a fixed seed, None takes all; ``points``
    count the ends; without ``corrections`` there are ``none``, and ``batchnorm`` for a network that has BatchNorm.
    """
    if len(alignment.files) < 2:
        raise FileError("barriers are between networks, so there must be two checkpoints at least")
    function = check_loss(model, data, loss, corrections)
    corrections = list(corrections) or (["none", "batchnorm"] if batchnorm_layers(model) else ["none"])
    chosen = sampled_pairs(len(alignment.files), pairs)
    measured_on = [data.digest, loss, points, corrections, str(next(model.parameters()).dtype)]
    with lock_folder(out):
        networks = _networks(alignment, out)
        kept = _kept(out, digest_of([alignment.key, measured_on]))
        todo = [(i, j) for i, j in chosen if f"{i}-{j}" not in kept["pairs"]]
        with track("measuring barriers", len(todo)) as tracker:
            for done, (i, j) in enumerate(todo, 1):
                paths: dict[str, dict[str, Any]] = {}
                for when in WHEN:
                    ends = [networks[when][i], networks[when][j]]
                    try:
                        paths[when] = {m: _path(model, ends, data, function, m, points) for m in corrections}
                    except ValueError as error:
                        sources = f"{alignment.files[i].source} and {alignment.files[j].source}"
                        raise FileError(f"no barrier between {sources}: {error}") from error
                kept["pairs"][f"{i}-{j}"] = paths
                write_json(out / BARRIERS, kept, seal=True)
                tracker.update(done, **{when: paths[when][corrections[0]]["barrier"] for when in WHEN})
        means: dict[str, dict[str, float]] = {}
        for when in WHEN:
            with track(f"averaging, {when} the alignment", len(alignment.files)) as tracker:
                mean = _mean(networks[when], tracker.update)
            means[when] = {"none": mean_loss(model, mean, data.evaluation, function)}
            if "batchnorm" in corrections:
                again = reestimate_batchnorm(model, mean, data.statistics)
                means[when]["batchnorm"] = mean_loss(model, again, data.evaluation, function)
        measured = [kept["pairs"][f"{i}-{j}"] for i, j in chosen]
        single: dict[int, float] = {}
        for (i, j), one in zip(chosen, measured, strict=True):
            losses = one["before"][corrections[0]]["losses"]
            single |= {i: losses[0], j: losses[-1]}
        every = {w: {m: [one[w][m] for one in measured] for m in corrections} for w in WHEN}
        report = {
            "alignment": alignment.key,
            "data": data.name,
            "num_samples": data.num_samples,
            "loss": loss,
            "points": points,
            "pairs": chosen,
            "networks_in_matrix": sorted(single),
            "matrix": {w: {m: _matrix(chosen, every[w][m]) for m in corrections} for w in WHEN},
            "paths": every,
            "mean_network_loss": means,
            "single_network_loss": fmean(single.values()),
        }
        write_bytes(out / FIGURE, draw_matrices(report))
        grid = barrier_grid(report, len(alignment.files))
        text = (
            f"<!-- tu_symmetry.aligned barriers -->\n\n## {grid.title}\n\n{grid.markdown()}\n\n"
            f"![barrier matrices]({FIGURE})\n\n"
            "Networks are numbered as in the table above, from 0; gray pairs were not measured."
        )
        write_reports(out, alignment, report, text)
    return report


def _networks(alignment: FileAlignment, out: Path) -> dict[str, StateSource]:
    """The networks before and after their alignment, each read when it is asked for."""
    for file in alignment.files:
        header = owned_header(out / file.aligned) or {}
        made_of = [header.get("source_sha256"), header.get("reference_sha256")]
        if made_of != [file.source_sha256, alignment.reference_sha256]:
            raise FileError(f"{out / file.aligned} was changed by another run; run the command again")
    before = StateSource([Path(file.source) for file in alignment.files], prefix=alignment.options["prefix"])
    return {"before": before, "after": StateSource([out / file.aligned for file in alignment.files])}


def _kept(out: Path, made_of: str) -> dict[str, Any]:
    """The pairs that an earlier run has measured, by their names ``I-J``; none if it was of something else."""
    if (out / BARRIERS).exists():
        kept = read_json(out / BARRIERS)[0]
        if kept.get("made_of") == made_of:
            return kept
    elif (out / FIGURE).exists():
        raise FileError(f"{out / FIGURE} was not written by this command; move it away or choose another folder")
    return {"format": FORMAT, "made_of": made_of, "pairs": {}}


def _path(
    model: nn.Module, ends: Sequence[State], data: BarrierData, loss: Loss, correction: Correction, points: int
) -> dict[str, Any]:
    """Barrier and losses along the path between two networks."""

    def merge(state: State, ratio: float) -> State:
        return correct(model, ends, [1 - ratio, ratio], state, data.statistics, correction)

    found = loss_barrier(model, ends[0], ends[1], data.evaluation, loss, points=points, merge=merge)
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


def _matrix(pairs: Sequence[tuple[int, int]], paths: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Barriers between the networks that are in a pair; NaN for pairs that were not measured."""
    place = {k: n for n, k in enumerate(sorted({k for pair in pairs for k in pair}))}
    matrix = [[0.0 if a == b else math.nan for a in place] for b in place]
    for (i, j), found in zip(pairs, paths, strict=True):
        matrix[place[i]][place[j]] = matrix[place[j]][place[i]] = found["barrier"]
    return matrix


def _unit(loss: str) -> str:
    return " (nats)" if loss.endswith("cross_entropy") else ""


def barrier_grid(report: dict[str, Any], networks: int) -> Grid:
    """Mean and largest barrier, and the loss of the mean network, before and after."""
    rows = []
    for correction, name in CORRECTIONS.items():
        if correction in report["paths"]["before"]:
            values = [[path["barrier"] for path in report["paths"][w][correction]] for w in WHEN]
            rows.append([f"mean barrier, {name}", *(f"{fmean(v):.4f}" for v in values)])
            rows.append([f"largest barrier, {name}", *(f"{max(v):.4f}" for v in values)])
    means = report["mean_network_loss"]
    for correction in means["before"]:
        name = "as averaged" if correction == "none" else CORRECTIONS[correction]
        rows.append([f"mean network, {name}", *(f"{means[w][correction]:.4f}" for w in WHEN)])
    total, count, loss = networks * (networks - 1) // 2, len(report["pairs"]), report["loss"]
    pairs = f"all {total} pairs" if count == total else f"{count} of {total} pairs at random"
    caption = (
        f"{loss.rpartition('.')[2]}{_unit(loss)} on {report['num_samples']} samples of {report['data']}; {pairs}, "
        f"{report['points']} points on each; single networks: {report['single_network_loss']:.4f}"
    )
    return Grid("Loss barriers and the mean network", ["", *WHEN], rows, caption)


def draw_matrices(report: dict[str, Any]) -> bytes:
    """Barriers between pairs as colors, before and after, two panels for each correction with one scale, as PNG."""
    from tu_symmetry.reporting import plots

    corrections = list(report["matrix"]["before"])
    shown = [str(network) for network in report["networks_in_matrix"]]
    content: Any = io.BytesIO()
    with plots.figure(content, len(WHEN) * len(corrections), width=3.4, height=3.0) as axes:
        for k, correction in enumerate(corrections):
            matrices = {f"{when}, {CORRECTIONS[correction]}": report["matrix"][when][correction] for when in WHEN}
            label = f"barrier{_unit(report['loss'])}"
            plots.barriers(axes[len(WHEN) * k :][: len(WHEN)], matrices, label=label, names=shown)
    drawn: bytes = content.getvalue()
    return drawn
