"""What checkpoint files can be aligned to when no file is given: their medoid, their running mean, their universe.

The definitions are those of :mod:`tu_symmetry.alignment.consensus`, as for networks in memory. Here they are streamed:
a few networks are in memory, whatever their number (but for the solver ``synchronized``, which holds all of them),
and every step is on disk before the next one begins, so that a killed run resumes to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tu_symmetry.alignment.consensus import AlignSolver, Consensual, Consensus, medoid_candidates, medoid_of
from tu_symmetry.alignment.matching import Solver, weight_matching
from tu_symmetry.checkpoints.files import (
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
from tu_symmetry.files import FileError, digest_of, read_json, write_json
from tu_symmetry.states import State, as_given
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import Permutation, invert
from tu_symmetry.symmetry.graph import SymmetryGraph

Load = Callable[[Path], State]
SUM = "sum.safetensors"
MEDOID = "medoid.json"


def pairwise(solver: AlignSolver) -> Solver:
    """The solver as one of two networks.

    Raises:
        AlignFilesError: it is one of all networks together.
    """
    if solver == "synchronized":
        raise AlignFilesError("the solver synchronized relaxes all networks together, for the universe only")
    return solver


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
    solver: Solver,
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
        solver: of matching.
        prefix: of the names in the files (a part of what the distances depend on).
        candidates: files that are compared, drawn at random if there are more.
        threads: pairs that are matched at the same time.
        track: shows progress.
    """
    chosen = medoid_candidates(len(checkpoints), candidates)
    path, options = folder / MEDOID, {"solver": solver, "prefix": prefix}
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
                return weight_matching(graph, target, load(checkpoints[j].path), solver=solver).distance_after

            for j, found in bounded(distance, partners, threads):
                distances[key(i, j)] = found
                write_json(path, {"options": options, "distances": dict(sorted(distances.items()))}, seal=True)
                done += 1
                tracker.update(done, distance=found)
    best, totals = medoid_of(chosen, {(i, j): distances[key(i, j)] for i in chosen for j in chosen if i < j})
    return Medoid(best, chosen, totals)


def find_consensus(
    graph: SymmetryGraph,
    checkpoints: Sequence[Checkpoint],
    folder: Path,
    load: Load,
    *,
    reference: Consensual,
    solver: AlignSolver,
    prefix: str,
    max_iterations: int,
    threads: int,
    track: Track,
) -> StoredConsensus:
    """Align networks to their mean or their universe.

    Only the sum of the networks is kept, in float64, so a pass costs one matching for each network. After each step one
    file takes the sum, the step's number and its permutation together. The pass of a running mean needs only the
    networks before, so a run with more files at the end of the list resumes from there.

    Args:
        graph: the symmetry graph.
        checkpoints: the files, at least two.
        folder: of the run's state.
        load: reads a file.
        reference: ``mean`` or ``universe``.
        solver: of the first pass.
        prefix: of the names in the files (a part of what the sum depends on).
        max_iterations: bound on the sweeps of a universe.
        threads: networks whose assignments are solved at the same time in the relaxation of a universe.
        track: shows progress.
    """
    run = StoredConsensus(graph, checkpoints, folder, reference, solver, prefix, max_iterations, threads)
    run.check(load, track)
    count = len(checkpoints)
    while not run.finished:
        sweep = run.next_sweep
        start = run.done if sweep == run.sweep else 0
        first = "aligning all networks together" if run.relaxed else "aligning to the running mean"
        with track(f"aligning to all others, sweep {sweep}" if sweep else first, count - start) as tracker:
            for _ in range(start, count):
                k = run.step(lambda j: load(checkpoints[j].path))
                tracker.update(k + 1 - start, file=checkpoints[k].path.name)
    return run


class StoredConsensus(Consensus):
    """A consensus whose sum and permutations are on disk."""

    def __init__(
        self,
        graph: SymmetryGraph,
        checkpoints: Sequence[Checkpoint],
        folder: Path,
        reference: Consensual,
        solver: AlignSolver,
        prefix: str,
        max_iterations: int,
        threads: int,
    ) -> None:
        """Begin, or resume what a former run in the folder has left."""
        super().__init__(
            graph,
            len(checkpoints),
            reference,
            solver,
            lambda target, state, k: weight_matching(graph, target, state, solver=pairwise(solver)).permutation,
            max_iterations=max_iterations,
            threads=threads,
        )
        self.checkpoints, self.folder = checkpoints, folder
        self._options = {"solver": solver, "prefix": prefix, "start": "relaxation" if self.relaxed else "running mean"}
        header = owned_header(folder / SUM)
        if (
            header is not None
            and header["version"] == VERSION
            and header["sweep"] <= self.last_sweep
            and all(header[k] == v for k, v in self._header(header).items())
        ):
            tensors = read_owned(folder / SUM, f"remove the folder {folder} to start over")
            self.sweep, self.done, self.moved = header["sweep"], header["done"], header["moved"]
            self.total = {n.removeprefix("sum/"): t for n, t in tensors.items() if n.startswith("sum/")}
            last = {n.removeprefix("permutation/"): t for n, t in tensors.items() if n.startswith("permutation/")}
            self._write_permutation(self.done - 1, last)  # the run may have been killed before this

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
                for name, t in permute_tensors(self.graph, self.held(k), load(checkpoint.path)).items():
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

    def mean(self, like: State) -> State:
        """The mean of the aligned networks: floating-point tensors in the dtypes of ``like``, others from the sum."""
        mean = {n: t / self.count if t.is_floating_point() else t for n, t in self.total.items()}
        aligned = permute_tensors(self.graph, invert(self.held(0)), mean)
        return as_given(like, {n: t.to(like[n].dtype) for n, t in aligned.items()})

    def _header(self, place: dict[str, Any]) -> dict[str, Any]:
        """What the sum at some place of a run is made of."""
        sources = [(c.name, c.sha256) for c in self.checkpoints]
        used = sources if place["sweep"] or self.relaxed else sources[: place["done"]]
        return {"options": self._options, "architecture": self.graph.architecture, "sources": digest_of(used)}

    def keep(self, k: int, permutation: Permutation, *, moved: bool) -> None:
        """Write the sum and the permutation, unless nothing has changed: a run that resumes finds the same."""
        if not moved and self.done < self.count:
            return
        place = {"sweep": self.sweep, "done": self.done, "moved": self.moved}
        tensors = {f"sum/{n}": t for n, t in self.total.items()}
        tensors |= {f"permutation/{g}": p for g, p in permutation.items()}
        write_owned(self.folder / SUM, tensors, {**place, **self._header(place)})
        self._write_permutation(k, permutation)

    def held(self, k: int) -> Permutation:
        """The permutation of a network in the sum, as the last step that moved it wrote it."""
        path = self.folder / f"{self.checkpoints[k].name}{PERMUTATION}"
        header = owned_header(path)
        remedy = f"remove the folder {self.folder} to start over"
        if header is None or header.get("source_sha256") != self.checkpoints[k].sha256:
            raise AlignFilesError(f"{path} is missing, damaged or of another network; {remedy}")
        return read_owned(path, remedy)

    def _write_permutation(self, k: int, permutation: Permutation) -> None:
        path = self.folder / f"{self.checkpoints[k].name}{PERMUTATION}"
        write_owned(path, permutation, {"source_sha256": self.checkpoints[k].sha256})
