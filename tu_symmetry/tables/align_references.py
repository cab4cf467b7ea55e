"""What checkpoint files can be aligned to when no file is given: their medoid, their running mean, their universe.

All of it is streamed: a few networks are in memory, whatever their number, and every step is on disk before the next
one begins, so that a killed run goes on to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.alignment.matching import weight_matching
from tu_symmetry.files import FileError, digest_of, read_json, write_json
from tu_symmetry.posterior.samples import State
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import Permutation, compose, identity_permutation, invert
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.checkpoint_files import (
    PERMUTATION,
    VERSION,
    AlignFilesError,
    Checkpoint,
    Track,
    bounded,
    owned_header,
    read_owned,
    write_owned,
)

Load = Callable[[Path], State]
Method = Literal["frank_wolfe", "descent"]
SUM = "sum.safetensors"
MEDOID = "medoid.json"


@dataclass(frozen=True)
class Medoid:
    """The file that is closest to the others after matching.

    Attributes:
        index: of the file.
        candidates: indices of the files that were compared, all of them or a sample.
        totals: of each candidate, its distances to the other candidates after matching, summed.
    """

    index: int
    candidates: list[int]
    totals: list[float]


def find_medoid(
    graph: SymmetryGraph,
    checkpoints: Sequence[Checkpoint],
    folder: Path,
    load: Load,
    *,
    method: Method,
    prefix: str,
    candidates: int,
    threads: int,
    track: Track,
) -> Medoid:
    """The file with the least sum of distances to the others after matching, among at most ``candidates`` files.

    Each pair of candidates is matched once; the distances are kept in ``medoid.json``. The sample is drawn with a
    fixed seed, so it depends on the number of files only.

    Args:
        graph: the symmetry graph.
        checkpoints: the files.
        folder: of the run's state.
        load: reads a file.
        method: of matching.
        prefix: of the names in the files (a part of what the distances depend on).
        candidates: files that are compared, drawn at random if there are more.
        threads: pairs that are matched at the same time.
        track: shows progress.
    """
    order = torch.randperm(len(checkpoints), generator=torch.Generator().manual_seed(0))
    chosen = sorted(order[:candidates].tolist())
    path, options = folder / MEDOID, {"method": method, "prefix": prefix}
    try:
        content = read_json(path)[0] if path.exists() else {}
    except FileError as error:
        raise AlignFilesError(f"{error}; delete it to have its distances measured again") from error
    distances: dict[str, float] = content.get("distances", {}) if content.get("options") == options else {}

    def key(i: int, j: int) -> str:
        return f"{checkpoints[i].sha256}-{checkpoints[j].sha256}"

    todo = [(i, j) for i in chosen for j in chosen if i < j and key(i, j) not in distances]
    with track("comparing pairs", len(todo)) as tracker:
        done = 0
        for i in chosen:
            partners = [b for a, b in todo if a == i]
            if not partners:
                continue
            target = load(checkpoints[i].path)

            def distance(j: int, target: State = target) -> float:
                return weight_matching(graph, target, load(checkpoints[j].path), method=method).distance_after

            for j, found in bounded(distance, partners, threads):
                distances[key(i, j)] = found
                write_json(path, {"options": options, "distances": dict(sorted(distances.items()))}, seal=True)
                done += 1
                tracker.update(done, distance=found)
    totals = [sum(distances[key(min(i, j), max(i, j))] for j in chosen if j != i) for i in chosen]
    return Medoid(chosen[min(range(len(chosen)), key=totals.__getitem__)], chosen, totals)


@dataclass(frozen=True)
class Consensus:
    """A mean that networks were aligned to.

    Attributes:
        mean: of the aligned networks: floating-point tensors, others from the first.
        sweeps: passes over the networks after the first one.
        converged: whether the last sweep moved nothing (True without sweeps).
        element: reads the permutation of the network with an index.
    """

    mean: State
    sweeps: int
    converged: bool
    element: Callable[[int], Permutation]


def find_consensus(
    graph: SymmetryGraph,
    checkpoints: Sequence[Checkpoint],
    folder: Path,
    load: Load,
    *,
    method: Method,
    prefix: str,
    max_sweeps: int,
    track: Track,
) -> Consensus:
    """Align each network to the mean of those before it, then, in sweeps, to the mean of all others.

    The sweeps are block-coordinate ascent of the sum of all pairwise objectives, ``(||sum W||^2 - sum ||W||^2) / 2``
    (Crisostomi et al. 2024, C2M3, eq. 5): each is a descent from the permutation that the network has, so the sum
    never decreases, and a sweep that moves nothing ends them. Only the sum of the networks is kept, in float64, so
    a sweep costs one matching for each network. At the end all elements are composed with the inverse of the first
    network's, so that the first one stays as it is; that changes no distance.

    After each step one file takes the sum, the step's number and its permutation together. The pass over the
    networks needs only those before, so a run with more files at the end of the list goes on from there.

    Args:
        graph: the symmetry graph.
        checkpoints: the files, at least two.
        folder: of the run's state.
        load: reads a file.
        method: of matching in the first pass.
        prefix: of the names in the files (a part of what the sum depends on).
        max_sweeps: bound on the sweeps; 0 for the running mean alone.
        track: shows progress.
    """
    run = _RunningSum(graph, checkpoints, folder, {"method": method, "prefix": prefix}, max_sweeps)
    run.check(load, track)
    count = len(checkpoints)
    while not run.finished:
        sweep = run.next_sweep
        start = run.done if sweep == run.sweep else 0
        description = "aligning to the running mean" if sweep == 0 else f"aligning to all others, sweep {sweep}"
        with track(description, count - start) as tracker:
            for k in range(start, count):
                state = load(checkpoints[k].path)
                run.step(sweep, k, state, _matched(graph, run, sweep, k, state, method))
                tracker.update(k + 1 - start, file=checkpoints[k].path.name)
    back = invert(run.element(0))
    mean = {n: t / count if t.is_floating_point() else t for n, t in run.total.items()}
    like = load(checkpoints[0].path)
    return Consensus(
        mean={n: t.to(like[n].dtype) for n, t in permute_tensors(graph, back, mean).items()},
        sweeps=run.sweep,
        converged=run.sweep == 0 or not run.moved,
        element=lambda k: compose(back, run.element(k)),
    )


def _matched(
    graph: SymmetryGraph, run: _RunningSum, sweep: int, k: int, state: State, method: Method
) -> tuple[Permutation, Permutation | None]:
    """The network's new permutation, and the one that it had (None in the first pass)."""
    if sweep == 0:
        if k == 0:
            return identity_permutation(graph), None
        return weight_matching(graph, run.mean_of_others(state, None, k), state, method=method).permutation, None
    old = run.element(k)
    others = run.mean_of_others(state, old, len(run.checkpoints) - 1)
    return weight_matching(graph, others, state, method="descent", init=old).permutation, old


class _RunningSum:
    """The sum of the aligned networks and where the run stands; permutations are on disk.

    Attributes:
        total: sums of floating-point tensors, float64; other tensors are the first network's.
        sweep: number of the pass, 0 for the first.
        done: networks of this pass that are done.
        moved: whether this pass has changed a permutation.
    """

    def __init__(
        self,
        graph: SymmetryGraph,
        checkpoints: Sequence[Checkpoint],
        folder: Path,
        options: dict[str, Any],
        max_sweeps: int,
    ) -> None:
        self.graph, self.checkpoints, self.folder, self.max_sweeps = graph, checkpoints, folder, max_sweeps
        self._options = options
        self.total: dict[str, Tensor] = {}
        self.sweep, self.done, self.moved = 0, 0, False
        header = owned_header(folder / SUM)
        if (
            header is not None
            and header["version"] == VERSION
            and header["sweep"] <= max_sweeps
            and all(header[k] == v for k, v in self._header(header).items())
        ):
            tensors = read_owned(folder / SUM, f"remove the folder {folder} to start over")
            self.sweep, self.done, self.moved = header["sweep"], header["done"], header["moved"]
            self.total = {n.removeprefix("sum/"): t for n, t in tensors.items() if n.startswith("sum/")}
            last = {n.removeprefix("permutation/"): t for n, t in tensors.items() if n.startswith("permutation/")}
            self._write_element(self.done - 1, last)  # the run may have been killed before this

    def check(self, load: Load, track: Track) -> None:
        """Compare the sum that a former run has left with the networks and permutations that it is the sum of.

        Both are whole and their own by their seals; but one of them can be from another time (a folder that was
        restored in part, two runs at once before there was a lock), and every later step would build on it.

        Raises:
            AlignFilesError: they do not agree to rounding.
        """
        count = len(self.checkpoints) if self.sweep else self.done
        if count == 0:
            return
        found: dict[str, Tensor] = {}
        size: dict[str, Tensor] = {}
        with track("checking the sum", count) as tracker:
            for k, checkpoint in enumerate(self.checkpoints[:count]):
                for name, t in permute_tensors(self.graph, self.element(k), load(checkpoint.path)).items():
                    if t.is_floating_point():
                        found[name] = found[name] + t if name in found else t.double()
                        size[name] = size[name] + t.abs() if name in size else t.double().abs()
                tracker.update(k + 1, file=checkpoint.path.name)
        for name, t in found.items():
            if name not in self.total or ((self.total[name] - t).abs() > 1e-10 * size[name]).any():
                raise AlignFilesError(
                    f"{self.folder / SUM} is not the sum of the networks that it names (they differ in {name!r}); "
                    f"remove the folder {self.folder} to start over"
                )

    def _header(self, place: dict[str, Any]) -> dict[str, Any]:
        """What the sum at some place of a run is made of."""
        sources = [(c.name, c.sha256) for c in self.checkpoints]
        used = sources if place["sweep"] else sources[: place["done"]]
        return {"options": self._options, "architecture": self.graph.architecture, "sources": digest_of(used)}

    @property
    def next_sweep(self) -> int:
        """The pass that the next step belongs to."""
        return self.sweep + (self.done == len(self.checkpoints))

    @property
    def finished(self) -> bool:
        """Whether there is no next step."""
        if self.done < len(self.checkpoints):
            return False
        return self.sweep == self.max_sweeps or (self.sweep > 0 and not self.moved)

    def mean_of_others(self, state: State, own: Permutation | None, count: int) -> State:
        """The mean of ``count`` networks in the sum, without the one whose permutation is given."""
        mine = {} if own is None else permute_tensors(self.graph, own, state)
        mean = dict(state)
        for name, tensor in state.items():
            if tensor.is_floating_point():
                total = self.total[name] - mine[name] if own is not None else self.total[name]
                mean[name] = (total / count).to(torch.promote_types(tensor.dtype, torch.float32))
        return mean

    def step(self, sweep: int, k: int, state: State, found: tuple[Permutation, Permutation | None]) -> None:
        """Take a network's permutation into the sum, and write both."""
        new, old = found
        moved = old is None or any(not torch.equal(new[g], old[g]) for g in new)
        if moved:
            before = {} if old is None else permute_tensors(self.graph, old, state)
            for name, tensor in permute_tensors(self.graph, new, state).items():
                if not tensor.is_floating_point():
                    self.total.setdefault(name, tensor)
                    continue
                change = tensor.double() - before[name] if before else tensor.double()
                self.total[name] = self.total[name] + change if name in self.total else change
        self.moved = sweep > 0 and (moved or (self.moved and sweep == self.sweep))
        self.sweep, self.done = sweep, k + 1
        if not moved and self.done < len(self.checkpoints):
            return  # nothing to keep: a run that goes on from the last write finds the same
        place = {"sweep": self.sweep, "done": self.done, "moved": self.moved}
        tensors = {f"sum/{n}": t for n, t in self.total.items()} | {f"permutation/{g}": p for g, p in new.items()}
        write_owned(self.folder / SUM, tensors, {**place, **self._header(place)})
        self._write_element(k, new)

    def element(self, k: int) -> Permutation:
        """The permutation of a network, as the last step that moved it wrote it."""
        path = self.folder / f"{self.checkpoints[k].name}{PERMUTATION}"
        header = owned_header(path)
        remedy = f"remove the folder {self.folder} to start over"
        if header is None or header["source_sha256"] != self.checkpoints[k].sha256:
            raise AlignFilesError(f"{path} is missing, damaged or of another network; {remedy}")
        return read_owned(path, remedy)

    def _write_element(self, k: int, permutation: Permutation) -> None:
        path = self.folder / f"{self.checkpoints[k].name}{PERMUTATION}"
        write_owned(path, permutation, {"source_sha256": self.checkpoints[k].sha256})
