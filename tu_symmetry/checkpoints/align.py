"""Aligning many checkpoint files, two or a few tensors in memory; results of an interrupted run are used again.

For every checkpoint the folder takes ``NAME.safetensors``, the aligned weights, and ``NAME.permutation.safetensors``,
in which permutations have the names of their groups, signs ``signs:GROUP``, and in this way ``scales:``, ``balance:``
and ``rotations:``; what they were made of stands in their headers. A mean and a universe also write
``mean.safetensors``, the mean of all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tu_symmetry.alignment.consensus import Reference, Target, find_target
from tu_symmetry.alignment.matching import weight_distance
from tu_symmetry.alignment.moves import moved
from tu_symmetry.alignment.networks import StateSource
from tu_symmetry.alignment.over import Over
from tu_symmetry.checkpoints.files import (
    FORMAT,
    MEAN,
    MOVED,
    PERMUTATION,
    VERSION,
    Checkpoint,
    Track,
    alone_in,
    check_checkpoints,
    moved_text,
    open_checkpoint,
    output_names,
    owned_header,
    refuse_foreign,
    sha256,
    silent,
    verified_groups,
    write_owned,
)
from tu_symmetry.files import FileError, check_file, without_nan, write_json, write_text
from tu_symmetry.processes import by_first, shared
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.certificate import measured
from tu_symmetry.symmetry.elements import identity_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph

REPORT, REPORT_DATA = "report.md", "report.json"
_MARKS = {REPORT: "<!-- tu_symmetry.aligned -->", REPORT_DATA: f'"format": "{FORMAT}"'}
_FIGURES = ("transpositions", "moved", "distance_before", "distance_after", "output_change", "output_change_allowed")


@dataclass(frozen=True)
class Aligned:
    """One checkpoint of a report.

    The aligned weights and the permutation are names of files. ``moved`` is what else moved the network (see
    :meth:`.Move.counts`). Distances are L2 distances of the parameters to the reference's (over scales between both at
    their least mass), ``output_change`` the relative change of the network's outputs on the example input (None if it
    was not measured), ``output_change_allowed`` what rounding explains of it.
    """

    source: str
    source_sha256: str
    aligned: str
    permutation: str
    transpositions: int
    moved: dict[str, float]
    distance_before: float
    distance_after: float
    output_change: float | None = None
    output_change_allowed: float | None = None


@dataclass(frozen=True)
class FileAlignment:
    """What :func:`align_files` did.

    ``mode`` is ``file`` or a word of :func:`tu_symmetry.align`, whose ``over`` is given too; ``reference`` the file
    that distances are measured to, of a mean or a universe ``mean.safetensors`` in the folder; ``skipped`` how many
    files had been done before.
    """

    architecture: str
    mode: str
    over: tuple[Over, ...]
    reference: str
    reference_sha256: str
    sweeps: int
    converged: bool
    prefix: str
    files: tuple[Aligned, ...]
    skipped: int

    def grid(self, limit: int | None = None) -> Grid:
        """The table of distances and NoT, of at most so many rows; paths are relative to the folder of all."""
        shared = os.path.commonpath([Path(os.path.abspath(f.source)).parent for f in self.files])
        others = [MOVED] if len(self.over) > 1 else []
        rows = [
            [
                os.path.relpath(f.source, shared),
                str(f.transpositions),
                *(moved_text(f.moved) for _ in others),
                f"{f.distance_before:.4f}",
                f"{f.distance_after:.4f}",
                "not measured" if f.output_change is None else f"{f.output_change:.0e}" if f.output_change else "none",
            ]
            for f in self.files[:limit]
        ]
        if len(rows) < len(self.files):
            rows.append([f"... {len(self.files) - len(rows)} more in {REPORT}", *[""] * (4 + len(others))])
        target, caption = os.path.relpath(self.reference, shared), ""
        if self.mode == "mean":
            target = "the mean of those before each"
        if self.mode == "universe":
            end = "the last one moved nothing" if self.converged else "the last one still moved units"
            target, caption = "the mean of all", f"sweeps: {self.sweeps}; {end}"
        count = "1 checkpoint" if len(self.files) == 1 else f"{len(self.files)} checkpoints"
        header = ["checkpoint", "NoT", *others, "distance before", "distance after", "output change"]
        return Grid(f"{count} of {self.architecture} aligned to {target}", header, rows, caption)


def align_files(
    graph: SymmetryGraph,
    checkpoints: Sequence[Path],
    out: Path,
    *,
    reference: Path | Reference = "first",
    over: Sequence[Over] = ("permutations",),
    prefix: str = "",
    track: Track = silent,
) -> FileAlignment:
    """Align checkpoint files, by the words of :func:`tu_symmetry.align`; files that a former run has aligned are kept.

    In memory is what matching needs, and for a universe the sum of all (float64), for files of ``torch.save`` the
    reference and one network; other files are read, permuted and written tensor by tensor. All files are checked before
    the first is written. The ``prefix`` is taken off the names in files; files whose names have none are read as they
    are.
    """
    mode = reference if isinstance(reference, str) else "file"
    averaged = mode in ("mean", "universe")
    if mode in ("medoid", "mean", "universe") and len(checkpoints) < 2:
        raise FileError(f"a {mode} needs at least two checkpoints, got one")
    if out.exists() and not out.is_dir():
        raise FileError(f"{out} is a file, and the results need a folder; choose another name with --out")
    names = [f"{name}{suffix}" for name in output_names(checkpoints) for suffix in (".safetensors", PERMUTATION)]
    tensors, texts = [out / name for name in (*names, MEAN)], {out / name: mark for name, mark in _MARKS.items()}
    refuse_foreign(tensors, texts, [*checkpoints, reference] if isinstance(reference, Path) else checkpoints)
    graph = verified_groups(graph, over, track)
    files = check_checkpoints(graph, checkpoints, prefix, track)
    given = open_checkpoint(graph, reference, prefix) if isinstance(reference, Path) else reference
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out, of={path.name for path in (*tensors, *texts)}):
        with track("finding what to align to", len(files)) as tracker:
            target = find_target(
                graph,
                StateSource(list(checkpoints), prefix=prefix),
                given,
                over,
                progress=lambda at: tracker.update(at["done"], what=at["step"]),
            )
        path = reference if isinstance(reference, Path) else files[target.index or 0].path
        if averaged:
            path = out / MEAN
            by_first(lambda: write_owned(path, target.state, {"mean_of": len(files)}))
        header: dict[str, Any] = {
            "architecture": graph.architecture,
            "mode": mode if averaged else "file",
            "reference_sha256": sha256(path),
            "prefix": prefix,
            "over": sorted(over),
        }

        def align(k: int) -> tuple[Aligned, bool]:
            found = _done_before(out, files[k], header)
            return found or _align(target, files[k], k, out, header), found is not None

        with track("aligning", len(files)) as tracker:
            results = shared(len(files), align, progress=tracker.update)
        alignment = FileAlignment(
            architecture=graph.architecture,
            mode=mode,
            over=tuple(over),
            reference=MEAN if averaged else str(path),
            reference_sha256=header["reference_sha256"],
            sweeps=target.sweeps,
            converged=target.converged,
            prefix=prefix,
            files=tuple(one for one, _ in results),
            skipped=sum(before for _, before in results),
        )
        by_first(lambda: _write_reports(out, alignment))
    return alignment


def _aligned(file: Checkpoint, figures: Mapping[str, Any]) -> Aligned:
    names = f"{file.name}.safetensors", f"{file.name}{PERMUTATION}"
    return Aligned(str(file.path), file.sha256, *names, **{name: figures[name] for name in _FIGURES})


def _align(target: Target, file: Checkpoint, k: int, out: Path, header: Mapping[str, Any]) -> Aligned:
    """Write the moved network, whose outputs are compared, and what moved it."""
    graph, reference = target.graph, target.state
    state = open_checkpoint(graph, file.path, header["prefix"])
    is_reference = file.sha256 == header["reference_sha256"]
    move = replace(target.scales[k], permutation=identity_permutation(graph)) if is_reference else target.move(k, state)
    there = moved(graph, move, state)
    certificate, _ = measured(graph, state, there, f"{file.path}, aligned", rounded=move.rounds)
    figures = {
        "transpositions": transposition_count(move.permutation),
        "moved": move.counts(),
        "distance_before": weight_distance(graph, reference, moved(graph, target.scales[k], state)),
        "distance_after": weight_distance(graph, reference, there),
        "output_change": None if certificate is None else certificate.change,
        "output_change_allowed": None if certificate is None else certificate.allowed,
    }
    result = _aligned(file, figures)
    whole = {**header, "source_sha256": file.sha256, **figures}
    write_owned(out / result.permutation, move.flat(), whole)
    write_owned(out / result.aligned, there, whole)
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


def _write_reports(out: Path, alignment: FileAlignment) -> None:
    """Write ``report.json`` and ``report.md``."""
    content = {"format": FORMAT, "version": VERSION, **asdict(alignment)}
    del content["skipped"]
    write_json(out / REPORT_DATA, without_nan(content))
    changes = [f.output_change for f in alignment.files if f.output_change is not None]
    certified = "Changes of outputs were not measured: the network could not be run with these weights."
    if len(changes) == len(alignment.files):
        allowed = max(f.output_change_allowed or 0.0 for f in alignment.files)
        certified = (
            f"Certified on the example input: no network's outputs change by more than {max(changes):.0e} of their "
            f"size (rounding explains {allowed:.0e})."
        )
    grid = alignment.grid()
    said = " of networks at their least mass" if "scales" in alignment.over else ""
    parts = [
        _MARKS[REPORT],
        f"# {grid.title}",
        grid.markdown(),
        f"L2 distances between parameters{said}; NoT is the number of transpositions. {certified}",
    ]
    write_text(out / REPORT, "\n\n".join(part.strip("\n") for part in parts) + "\n")
