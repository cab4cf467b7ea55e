"""Aligning many checkpoint files, a few in memory at a time; results of an interrupted run are used again.

For every checkpoint the folder takes ``NAME.safetensors``, the aligned weights, and ``NAME.permutation.safetensors``;
what they were made of stands in their headers. With a mean it also takes ``mean.safetensors``, the mean of all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tu_symmetry.alignment.align import matcher
from tu_symmetry.alignment.consensus import Reference, Target, bounded, find_target
from tu_symmetry.alignment.matching import Solver, weight_distance, weight_matching
from tu_symmetry.alignment.networks import StateSource
from tu_symmetry.checkpoints.files import (
    FORMAT,
    MEAN,
    PERMUTATION,
    VERSION,
    Checkpoint,
    Track,
    check_checkpoints,
    load_checkpoint,
    output_names,
    owned_header,
    refuse_foreign,
    sha256,
    silent,
    write_owned,
)
from tu_symmetry.files import (
    FileError,
    check_file,
    clear_scratch,
    digest_of,
    lock_folder,
    without_nan,
    write_json,
    write_text,
)
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import State
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.certificate import measured
from tu_symmetry.symmetry.elements import Permutation, identity_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph

REPORT, REPORT_DATA = "report.md", "report.json"
BARRIERS, FIGURE = "barriers.json", "barriers.png"
_MARKS = {REPORT: "<!-- tu_symmetry.aligned -->", **dict.fromkeys((REPORT_DATA, BARRIERS), f'"format": "{FORMAT}"')}
_FIGURES = ("transpositions", "distance_before", "distance_after", "output_change", "output_change_allowed")


@dataclass(frozen=True)
class Aligned:
    """One checkpoint of a report.

    The aligned weights and the permutation are names of files. Distances are L2 distances of the parameters to the
    reference's, ``output_change`` the relative change of the network's outputs on the example input (None if it was not
    measured), ``output_change_allowed`` what rounding explains of it.
    """

    source: str
    source_sha256: str
    aligned: str
    permutation: str
    transpositions: int
    distance_before: float
    distance_after: float
    output_change: float | None = None
    output_change_allowed: float | None = None


@dataclass(frozen=True)
class FileAlignment:
    """What :func:`align_files` did.

    ``mode`` is ``file`` or a word of ``reference``; ``reference`` the file that distances are measured to, of a mean
    ``mean.safetensors`` in the folder; ``search`` how it was found (candidates of a medoid and their totals, sweeps of
    a universe); ``skipped`` how many files had been done before.
    """

    architecture: str
    mode: str
    reference: str
    reference_sha256: str
    search: dict[str, Any]
    options: dict[str, Any]
    files: tuple[Aligned, ...]
    skipped: int

    @property
    def key(self) -> str:
        """Digest of all that the aligned weights depend on."""
        return digest_of([self.mode, self.reference_sha256, self.options, [f.source_sha256 for f in self.files]])

    def grid(self, limit: int | None = None) -> Grid:
        """The table of distances and NoT, of at most so many rows; paths are relative to the folder of all."""
        shared = os.path.commonpath([Path(os.path.abspath(f.source)).parent for f in self.files])
        rows = [
            [
                os.path.relpath(f.source, shared),
                str(f.transpositions),
                f"{f.distance_before:.4f}",
                f"{f.distance_after:.4f}",
                "not measured" if f.output_change is None else f"{f.output_change:.0e}" if f.output_change else "none",
            ]
            for f in self.files[:limit]
        ]
        if len(rows) < len(self.files):
            rows.append([f"... {len(self.files) - len(rows)} more in {REPORT}", "", "", "", ""])
        named = os.path.relpath(self.reference, shared)
        target = {
            "mean": "the mean of all (each was matched to the mean of those before it)",
            "universe": "the mean of all",
            "medoid": f"their medoid {named}",
        }.get(self.mode, named)
        count = "1 checkpoint" if len(self.files) == 1 else f"{len(self.files)} checkpoints"
        return Grid(
            title=f"{count} of {self.architecture} aligned to {target}",
            header=["checkpoint", "NoT", "distance before", "distance after", "output change"],
            rows=rows,
            caption=self._caption(),
        )

    def _caption(self) -> str:
        if self.mode == "medoid" and len(self.search["candidates"]) < len(self.files):
            return f"the medoid of {len(self.search['candidates'])} of the {len(self.files)} files, drawn at random"
        if self.mode == "universe":
            end = "the last one moved nothing" if self.search["converged"] else "the last one still moved units"
            return f"sweeps: {self.search['sweeps']}; {end}"
        return ""


def align_files(
    graph: SymmetryGraph,
    checkpoints: Sequence[Path],
    out: Path,
    *,
    reference: Path | Reference = "first",
    prefix: str = "",
    solver: Solver = "frank_wolfe",
    threads: int = 1,
    track: Track = silent,
) -> FileAlignment:
    """Align checkpoint files, by the words of :func:`tu_symmetry.align`; files that a former run has aligned are kept.

    In memory are the reference (for a mean: the sum of all, float64) and, for each thread, one network, its permuted
    copy, and what matching needs. All files are checked before the first is written.

    The ``prefix`` is taken off the names in files; files whose names have none are read as they are. So many networks
    as there are ``threads`` are matched at the same time (a mean and sweeps go one after the other).
    """
    mode = reference if isinstance(reference, str) else "file"
    averaged = mode in ("mean", "universe")
    if (averaged or mode == "medoid") and len(checkpoints) < 2:
        raise FileError(f"a {mode} needs at least two checkpoints, got one")
    if out.exists() and not out.is_dir():
        raise FileError(f"{out} is a file, and the results need a folder; choose another name with --out")
    names = [f"{name}{suffix}" for name in output_names(checkpoints) for suffix in (".safetensors", PERMUTATION)]
    tensors, texts = [out / name for name in (*names, MEAN)], {out / name: mark for name, mark in _MARKS.items()}
    inputs = [*checkpoints, reference] if isinstance(reference, Path) else checkpoints
    refuse_foreign(tensors, texts, inputs, others=[out / FIGURE])
    graph.require_verified()
    files = check_checkpoints(graph, checkpoints, prefix, track)
    given = load_checkpoint(graph, reference, prefix) if isinstance(reference, Path) else reference
    out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out):
        clear_scratch(out, of={path.name for path in (*tensors, *texts, out / FIGURE)})
        with track("finding what to align to", len(files)) as tracker:
            target = find_target(
                graph,
                StateSource(list(checkpoints), prefix=prefix),
                given,
                matcher(graph, "weights", solver, "product", None, None),
                threads=threads,
                progress=lambda at: tracker.update(at["done"] * len(files) // at["total"], what=at["step"]),
            )
        search = dict(target.search)
        if mode == "medoid":
            search["candidates"] = [str(files[k].path) for k in search["candidates"]]
        if averaged:
            write_owned(out / MEAN, target.state, {"mean_of": len(files)})
        path = reference if isinstance(reference, Path) else out / MEAN
        path = path if target.index is None else files[target.index].path
        options = {"solver": solver, "prefix": prefix}
        digest = sha256(path)
        header = {
            "architecture": graph.architecture,
            "mode": "mean" if averaged else "file",
            "reference_sha256": digest,
            "options": options,
        }

        def one(k: int) -> Aligned:
            state, permutation = load_checkpoint(graph, files[k].path, prefix), target.permutations.get(k)
            if files[k].sha256 == digest:
                permutation = identity_permutation(graph)
            elif permutation is None:
                permutation = weight_matching(graph, target.state, state, solver=solver).permutation
            return _write(graph, files[k], out, header, target, state, permutation)

        done = [_done_before(out, file, header) for file in files]
        results = {k: found for k, found in enumerate(done) if found is not None}
        skipped, todo = len(results), [k for k in range(len(files)) if k not in results]
        before = f" ({skipped} done before)" if skipped else ""
        with track(f"{'writing' if averaged else 'aligning'}{before}", len(todo)) as tracker:
            for k, result in bounded(one, todo, threads):
                results[k] = result
                tracker.update(len(results) - skipped, file=files[k].path.name)
        alignment = FileAlignment(
            architecture=graph.architecture,
            mode=mode,
            reference=MEAN if averaged else str(path),
            reference_sha256=digest,
            search=search,
            options=options,
            files=tuple(results[k] for k in range(len(files))),
            skipped=skipped,
        )
        if (out / BARRIERS).exists():
            (out / FIGURE).unlink(missing_ok=True)
        write_reports(out, alignment)
    return alignment


def _aligned(file: Checkpoint, figures: Mapping[str, Any]) -> Aligned:
    names = f"{file.name}.safetensors", f"{file.name}{PERMUTATION}"
    return Aligned(str(file.path), file.sha256, *names, **{name: figures[name] for name in _FIGURES})


def _write(
    graph: SymmetryGraph,
    file: Checkpoint,
    out: Path,
    header: Mapping[str, Any],
    target: Target,
    state: State,
    permutation: Permutation,
) -> Aligned:
    """Write the permuted network, whose outputs are compared, and the permutation."""
    moved = permute_tensors(graph, permutation, state)
    certificate, _ = measured(graph, state, moved, f"{file.path}, aligned", rounded=False)
    figures = {
        "transpositions": transposition_count(permutation),
        "distance_before": weight_distance(graph, target.state, state),
        "distance_after": weight_distance(graph, target.state, moved),
        "output_change": None if certificate is None else certificate.change,
        "output_change_allowed": None if certificate is None else certificate.allowed,
    }
    result = _aligned(file, figures)
    whole = {**header, "source_sha256": file.sha256, **figures}
    write_owned(out / result.permutation, permutation, whole)
    write_owned(out / result.aligned, moved, whole)
    return result


def _done_before(out: Path, file: Checkpoint, header: Mapping[str, Any]) -> Aligned | None:
    """What a former run has written with the same source, reference and options; None if there was none."""
    written = [out / f"{file.name}{suffix}" for suffix in (".safetensors", PERMUTATION)]
    first, second = map(owned_header, written)
    wanted = {**header, "source_sha256": file.sha256, "version": VERSION}
    if first is None or first != second or any(first.get(k) != v for k, v in wanted.items()):
        return None
    for path in written:
        check_file(path)
    return _aligned(file, first)


def _certified(alignment: FileAlignment) -> str:
    """A sentence on the measured change of outputs."""
    changes = [f.output_change for f in alignment.files if f.output_change is not None]
    if len(changes) < len(alignment.files):
        return "Changes of outputs were not measured: the network could not be run with these weights."
    allowed = max(f.output_change_allowed or 0.0 for f in alignment.files)
    return (
        f"Certified on the example input: no network's outputs change by more than {max(changes):.0e} of their size "
        f"(rounding explains {allowed:.0e})."
    )


def write_reports(
    out: Path, alignment: FileAlignment, barriers: Mapping[str, Any] | None = None, text: str = ""
) -> None:
    """Write ``report.json`` and ``report.md``, with what was measured on data, and a section on it."""
    content = {"format": FORMAT, "version": VERSION, **asdict(alignment)}
    del content["skipped"]
    if barriers is not None:
        content["barriers"] = barriers
    write_json(out / REPORT_DATA, without_nan(content))
    grid = alignment.grid()
    options = ", ".join(f"{k} {v!r}" for k, v in alignment.options.items())
    parts = [
        _MARKS[REPORT],
        f"# {grid.title}",
        grid.markdown(),
        f"L2 distances between parameters; NoT is the number of transpositions. {_certified(alignment)} Options: "
        f"{options}.",
        text,
    ]
    write_text(out / REPORT, "\n\n".join(p.strip("\n") for p in parts if p) + "\n")
