"""Aligning many checkpoint files, a few in memory at a time, and resuming after an interruption.

The reference is one of the files, any other file, their medoid, their running mean, or their universe (see
:mod:`~tu_symmetry.alignment.consensus`). For every checkpoint the folder takes ``NAME.safetensors``, the aligned
weights, and ``NAME.permutation.safetensors``, the permutation; what they were made of stands in their headers. With
a mean it also takes ``mean.safetensors``, the mean of the aligned networks. The folder ``state`` holds what a killed
run needs to resume; it may be removed when a run is done.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
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
    STATE,
    VERSION,
    Checkpoint,
    Track,
    check_checkpoints,
    check_owned,
    clear_left,
    load_checkpoint,
    locked,
    output_names,
    owned_header,
    refuse_foreign,
    sha256,
    shown,
    silent,
    write_owned,
)
from tu_symmetry.files import FileError, digest_of, other_versions, read_json, without_nan, write_json, write_text
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.states import check_number
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.certificate import measured
from tu_symmetry.symmetry.elements import identity_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph

MARK = "<!-- tu_symmetry.aligned -->"
BARRIERS_MARK = "<!-- tu_symmetry.aligned barriers -->"
BARRIERS_FIGURE = "barriers.png"
_FIGURES = ("transpositions", "distance_before", "distance_after", "output_change", "output_change_allowed")


@dataclass(frozen=True)
class Aligned:
    """One checkpoint of a report.

    Attributes:
        source: the checkpoint, as given.
        source_sha256: the digest of its bytes.
        aligned: name of the file with the permuted weights.
        permutation: name of the file with the permutation.
        transpositions: number of transpositions (NoT).
        distance_before: L2 distance of the parameters to the reference's, as given.
        distance_after: the same after the permutation.
        output_change: relative change of the network's outputs on the example input; None if it was not measured.
        output_change_allowed: what rounding explains of it.
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

    Attributes:
        architecture: name of the module's class.
        mode: ``file``, ``first``, ``medoid``, ``mean`` or ``universe``.
        reference: the file that distances are measured to; ``mean.safetensors`` in the folder for a mean.
        reference_sha256: the digest of its bytes.
        search: how the reference was found: candidates of a medoid and their totals, sweeps of a universe.
        options: the options of the matching and of reading.
        files: one for each checkpoint, in the order given.
        skipped: how many had been done before.
        kept_from: other versions that did some of those, and how many.
        notes: what the user should know of the folder.
    """

    architecture: str
    mode: str
    reference: str
    reference_sha256: str
    search: dict[str, Any]
    options: dict[str, Any]
    files: tuple[Aligned, ...]
    skipped: int
    kept_from: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Digest of all that the aligned weights depend on."""
        return digest_of([self.mode, self.reference_sha256, self.options, [f.source_sha256 for f in self.files]])

    def grid(self, limit: int | None = None) -> Grid:
        """The table of distances and NoT; paths are short, relative to the folder that holds all checkpoints.

        Args:
            limit: rows that are shown at most.
        """
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
            rows.append([f"... {len(self.files) - len(rows)} more in report.md", "", "", "", ""])
        named = Path(self.reference).name
        if len({Path(f.source).name for f in self.files}) < len(self.files):  # a bare name would not tell
            named = os.path.relpath(self.reference, shared)
        count = "1 checkpoint" if len(self.files) == 1 else f"{len(self.files)} checkpoints"
        target = {
            "mean": "the mean of all (each was matched to the mean of those before it)",
            "universe": "the mean of all",
            "medoid": f"their medoid {named}",
        }.get(self.mode, named)
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
    candidates: int = 16,
    max_iterations: int = 20,
    threads: int = 1,
    track: Track = silent,
) -> FileAlignment:
    """Align checkpoint files, by the words of :func:`tu_symmetry.align`; what a former run has done is kept.

    In memory are the reference (for a mean: the sum of all, float64) and, for each thread, one network, its permuted
    copy, and what matching needs. All files are checked before the first is written. The reference is a path, or what
    is found among the checkpoints. The ``prefix`` is taken off the names in files; files whose names have none are read
    as they are. Networks are matched by ``threads`` at the same time (a mean and sweeps go one after the other).

    Returns:
        The alignment; ``report.json`` and ``report.md`` in ``out`` hold the same.

    Raises:
        SymmetryError: a permuted network's outputs changed by more than rounding explains; it is not written.
        TypeError: counts that are no whole numbers.
        FileError: checkpoints that are truncated or foreign, of another architecture, or with NaN or infinite
            weights; two that would have the same name; a file in ``out`` that this function has not written, that was
            changed since, or that is read; another run in ``out``.
    """
    mode = reference if isinstance(reference, str) else "file"
    _check_arguments(checkpoints, mode, candidates, max_iterations, threads)
    names = output_names(checkpoints)
    tensors, texts = _outputs(out, names)
    inputs = [*checkpoints, reference] if isinstance(reference, Path) else checkpoints
    others = [out / BARRIERS_FIGURE, out / STATE]
    refuse_foreign(tensors, texts, inputs, others=others)
    with ExitStack() as stack:
        there = out.is_dir()
        if there:
            stack.enter_context(locked(out))
        graph.require_verified()
        files = check_checkpoints(graph, checkpoints, names, prefix, track)
        given = load_checkpoint(graph, reference, prefix) if isinstance(reference, Path) else reference
        if not there:  # nothing is written before the checks; another run may have made the folder since
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out))
            refuse_foreign(tensors, texts, inputs, others=others)
        clear_left(tensors, texts)
        options = {"solver": solver, "prefix": prefix}
        with shown(track) as progress:
            target = find_target(
                graph,
                StateSource([file.path for file in files], prefix=prefix),
                given,
                matcher(graph, "weights", solver, "product", None, None),
                candidates=candidates,
                max_iterations=max_iterations,
                threads=threads,
                progress=progress,
            )
        path, search = reference, dict(target.search)
        if mode in ("mean", "universe"):
            path = out / MEAN
            write_owned(path, target.state, {"mean_of": len(files)})
        elif target.index is not None:
            path = files[target.index].path
        if mode == "medoid":
            search["candidates"] = [str(files[k].path) for k in search["candidates"]]
        alignment = FileAlignment(
            architecture=graph.architecture,
            mode=mode,
            reference=MEAN if path == out / MEAN else str(path),
            reference_sha256=sha256(Path(path)),
            search=search,
            options=options,
            files=(),
            skipped=0,
        )
        alignment = _permute_files(graph, files, out, alignment, target, threads, track)
        more, text, note = _kept_barriers(out, alignment)
        write_reports(out, alignment, more, text)
    return replace(alignment, notes=(note,) if note else ())


def _check_arguments(
    checkpoints: Sequence[Path], mode: str, candidates: int, max_iterations: int, threads: int
) -> None:
    if not checkpoints:
        raise FileError("no checkpoints to align")
    if mode in ("medoid", "mean", "universe") and len(checkpoints) < 2:
        raise FileError(f"a {mode} needs at least two checkpoints, got one")
    for name, value, least in (
        ("threads", threads, 1),
        ("candidates", candidates, 2),
        ("max_iterations", max_iterations, 1),
    ):
        check_number(value, name, whole=True)
        if value < least:
            raise FileError(f"{name} must be at least {least}, got {value}")


def _permute_files(
    graph: SymmetryGraph,
    files: Sequence[Checkpoint],
    out: Path,
    alignment: FileAlignment,
    target: Target,
    threads: int,
    track: Track,
) -> FileAlignment:
    """Write each network and its permutation, which is matched to the target where it is not known."""
    prefix, solver = alignment.options["prefix"], alignment.options["solver"]
    averaged = alignment.mode in ("mean", "universe")
    keys = [
        {
            "architecture": graph.architecture,
            "mode": "mean" if averaged else "file",
            "reference_sha256": alignment.reference_sha256,
            "options": alignment.options,
            "source_sha256": file.sha256,
        }
        for file in files
    ]
    results: dict[int, Aligned] = {}
    kept: Counter[str] = Counter()

    def aligned(k: int, figures: dict[str, Any]) -> Aligned:
        name = files[k].name
        return Aligned(str(files[k].path), files[k].sha256, f"{name}.safetensors", f"{name}{PERMUTATION}", **figures)

    def one(k: int) -> Aligned:
        state = load_checkpoint(graph, files[k].path, prefix)
        permutation = target.permutations.get(k)
        if files[k].sha256 == alignment.reference_sha256:
            permutation = identity_permutation(graph)
        elif permutation is None:
            permutation = weight_matching(graph, target.state, state, solver=solver).permutation
        moved = permute_tensors(graph, permutation, state)
        certificate, _ = measured(graph, state, moved, f"{files[k].path}, aligned", rounded=False)
        figures = {
            "transpositions": transposition_count(permutation),
            "distance_before": weight_distance(graph, target.state, state),
            "distance_after": weight_distance(graph, target.state, moved),
            "output_change": None if certificate is None else certificate.change,
            "output_change_allowed": None if certificate is None else certificate.allowed,
        }
        result = aligned(k, figures)
        write_owned(out / result.permutation, permutation, {**keys[k], **figures})
        write_owned(out / result.aligned, moved, {**keys[k], **figures})
        return result

    for k, file in enumerate(files):
        figures = _done_before(out / f"{file.name}.safetensors", out / f"{file.name}{PERMUTATION}", keys[k])
        if figures is not None:
            results[k] = aligned(k, figures)
            written_by = [check_owned(out / name) for name in (results[k].aligned, results[k].permutation)]
            if other := other_versions(written_by[0]):
                kept[other] += 1
    skipped = len(results)
    todo = [k for k in range(len(files)) if k not in results]
    before = f" ({skipped} done before)" if skipped else ""
    with track(f"{'writing' if averaged else 'aligning'}{before}", len(todo)) as tracker:
        for k, result in bounded(one, todo, threads):
            results[k] = result
            tracker.update(len(results) - skipped, file=files[k].path.name)
    found = tuple(results[k] for k in range(len(files)))
    return replace(alignment, files=found, skipped=skipped, kept_from=dict(kept))


def _done_before(weights: Path, permutation: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """NoT and distances of a former run with the same source, reference and options; None if there was none."""
    first, second = owned_header(weights), owned_header(permutation)
    if first is None or first != second or any(first.get(k) != v for k, v in {**key, "version": VERSION}.items()):
        return None
    return {k: first[k] for k in _FIGURES} if all(k in first for k in _FIGURES) else None


def _outputs(out: Path, names: Sequence[str]) -> tuple[list[Path], dict[Path, str]]:
    """All files that a run may write, those of tensors and the others, see :func:`refuse_foreign`."""
    if out.exists() and not out.is_dir():
        raise FileError(f"{out} is a file, and the results need a folder; choose another name with --out")
    results = [out / f"{name}{suffix}" for name in names for suffix in (".safetensors", PERMUTATION)]
    texts = {
        out / "report.json": f'"format": "{FORMAT}"',
        out / "report.md": MARK,
    }
    return [*results, out / MEAN], texts


def _kept_barriers(out: Path, alignment: FileAlignment) -> tuple[dict[str, Any], str, str]:
    """Barriers that the reports hold already: their JSON and Markdown if they are of this alignment, else a note.

    They have cost time, and what they were measured in (``state/barriers``) may have been removed.
    """
    try:
        barriers = read_json(out / "report.json")[0].get("barriers")
        text = (out / "report.md").read_text(encoding="utf-8").partition(BARRIERS_MARK)[2]
    except (OSError, ValueError):
        return {}, "", ""
    if not isinstance(barriers, dict):
        return {}, "", ""
    if barriers.get("alignment") == alignment.key and text and (out / BARRIERS_FIGURE).exists():
        return {"barriers": barriers}, BARRIERS_MARK + text, ""
    (out / BARRIERS_FIGURE).unlink(missing_ok=True)
    return {}, "", "the barriers in the reports were those of another alignment; --data measures them again"


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


def write_reports(out: Path, alignment: FileAlignment, more: dict[str, Any] | None = None, text: str = "") -> None:
    """Write ``report.json`` and ``report.md``.

    Args:
        out: folder of the results.
        alignment: what was done.
        more: further entries of the JSON.
        text: further sections of the Markdown.
    """
    content = {k: v for k, v in asdict(alignment).items() if k not in ("skipped", "kept_from", "notes")}
    head = {"format": FORMAT, "version": VERSION}
    write_json(out / "report.json", without_nan({**head, **content, **(more or {})}))
    grid = alignment.grid()
    options = ", ".join(f"{k} {v!r}" for k, v in alignment.options.items())
    parts = [
        MARK,
        f"# {grid.title}",
        grid.markdown(),
        f"L2 distances between parameters; NoT is the number of transpositions. {_certified(alignment)} Options: "
        f"{options}.",
        text,
    ]
    write_text(out / "report.md", "\n\n".join(p.strip("\n") for p in parts if p) + "\n")
