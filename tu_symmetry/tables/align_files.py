"""Aligning many checkpoint files to one of them, a few in memory at a time, and going on after an interruption.

Each file is matched to the reference on its own, so the result does not depend on what else is aligned, in which
order, or how often the run was killed. For every checkpoint the folder takes ``NAME.safetensors``, the aligned
weights, and ``NAME.permutation.safetensors``, the group element; what they were made of stands in their headers.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from tu_symmetry.alignment.matching import weight_distance, weight_matching
from tu_symmetry.posterior.samples import State, load_state, write_safetensors
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import Permutation, identity_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryError, SymmetryGraph
from tu_symmetry.tables.grid import Grid

_KEY = "tu_symmetry.aligned"
_VERSION = 1
_PERMUTATION = ".permutation.safetensors"
_MARK = "<!-- tu_symmetry.aligned -->"


class AlignFilesError(ValueError):
    """Files that cannot be aligned, or that would be overwritten; the message names them."""


@dataclass(frozen=True)
class Aligned:
    """One checkpoint of a report.

    Attributes:
        source: the checkpoint, as given.
        source_sha256: of its bytes.
        aligned: name of the file with the permuted weights.
        permutation: name of the file with the group element.
        transpositions: number of transpositions (NoT).
        distance_before: L2 distance of the parameters to the reference's, as given.
        distance_after: the same after the permutation.
    """

    source: str
    source_sha256: str
    aligned: str
    permutation: str
    transpositions: int
    distance_before: float
    distance_after: float


@dataclass(frozen=True)
class FileAlignment:
    """What :func:`align_files` did.

    Attributes:
        architecture: name of the module's class.
        reference: the file that all are aligned to.
        reference_sha256: of its bytes.
        options: of the matching and of reading.
        files: one for each checkpoint, in the order given.
        skipped: how many had been done before.
    """

    architecture: str
    reference: str
    reference_sha256: str
    options: dict[str, Any]
    files: tuple[Aligned, ...]
    skipped: int

    def grid(self) -> Grid:
        """The table of distances and NoT; paths are short, relative to the folder that holds all checkpoints."""
        shared = os.path.commonpath([Path(os.path.abspath(f.source)).parent for f in self.files])
        rows = [
            [
                os.path.relpath(f.source, shared),
                str(f.transpositions),
                f"{f.distance_before:.4f}",
                f"{f.distance_after:.4f}",
            ]
            for f in self.files
        ]
        return Grid(
            title=f"{len(self.files)} checkpoints of {self.architecture} aligned to {Path(self.reference).name}",
            header=["checkpoint", "NoT", "distance before", "distance after"],
            rows=rows,
        )


def find_checkpoints(patterns: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files from paths and globs (``**`` descends into folders), each once, in the order given.

    Raises:
        AlignFilesError: a path or pattern that stands for no file.
    """
    found: dict[Path, None] = {}
    for pattern in map(str, patterns):
        path = Path(pattern)
        matches = [path] if path.is_file() else sorted(p for p in map(Path, glob.glob(pattern, recursive=True)))
        files = [p for p in matches if p.is_file()]
        if not files:
            hint = "a folder; name its files, for example with a glob" if path.is_dir() else "no file"
            raise AlignFilesError(f"{pattern} is {hint}")
        found.update(dict.fromkeys(files))
    return list(found)


def align_files(
    graph: SymmetryGraph,
    checkpoints: Sequence[Path],
    out: Path,
    *,
    reference: Path | None = None,
    prefix: str = "",
    method: Literal["frank_wolfe", "descent"] = "frank_wolfe",
    threads: int = 1,
    progress: Callable[[int, Aligned | None], None] | None = None,
) -> FileAlignment:
    """Align checkpoint files to a reference; what a former run has done is kept.

    In memory are the reference and, for each thread, one network and its permuted copy.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        checkpoints: files that :func:`tu_symmetry.posterior.samples.load_state` reads.
        out: folder of the results.
        reference: file that all are aligned to; the first checkpoint without one.
        prefix: of the names in the checkpoints, for example ``model.``.
        method: of :func:`tu_symmetry.alignment.matching.weight_matching`.
        threads: networks that are matched at the same time.
        progress: called with the number of finished files and the last of them (None at the start).

    Returns:
        The alignment; ``report.json`` and ``report.md`` in ``out`` hold the same.

    Raises:
        AlignFilesError: a checkpoint of another architecture, or with NaN or infinite weights; two checkpoints
            that would have the same name; a file in ``out`` that this function has not written.
        SampleFileError: a file that is truncated or foreign.
    """
    if not checkpoints:
        raise AlignFilesError("no checkpoints to align")
    if threads < 1:
        raise AlignFilesError(f"threads must be at least 1, got {threads}")
    names = output_names(checkpoints)
    out.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(out, names, checkpoints)
    target_path = reference or checkpoints[0]
    target_hash = _sha256(target_path)
    graph.require_verified()
    target = _load(graph, target_path, prefix)
    options = {"method": method, "prefix": prefix}
    common = {
        "format": _KEY,
        "version": _VERSION,
        "architecture": graph.architecture,
        "reference_sha256": target_hash,
        "options": options,
    }
    skipped = 0

    def one(path: Path, name: str) -> tuple[Aligned, bool]:
        digest = _sha256(path)
        key = {**common, "source_sha256": digest}
        weights, element = out / f"{name}.safetensors", out / f"{name}{_PERMUTATION}"
        figures = _done_before(weights, element, key)
        before = figures is not None
        if figures is None:
            state = target if digest == target_hash else _load(graph, path, prefix)
            permutation: Permutation = identity_permutation(graph)
            if digest != target_hash:
                permutation = weight_matching(graph, target, state, method=method).permutation
            aligned = permute_tensors(graph, permutation, state)
            figures = {
                "transpositions": transposition_count(permutation),
                "distance_before": weight_distance(graph, target, state),
                "distance_after": weight_distance(graph, target, aligned),
            }
            header = {_KEY: json.dumps({**key, **figures}, sort_keys=True)}  # one key: the order of several is random
            write_safetensors(element, permutation, header)
            write_safetensors(weights, aligned, header)
        return Aligned(str(path), digest, weights.name, element.name, **figures), before

    results: dict[int, Aligned] = {}
    if progress is not None:
        progress(0, None)
    for index, (result, before) in _bounded(one, list(zip(checkpoints, names, strict=True)), threads):
        results[index] = result
        skipped += before
        if progress is not None:
            progress(len(results), result)
    alignment = FileAlignment(
        architecture=graph.architecture,
        reference=str(target_path),
        reference_sha256=target_hash,
        options=options,
        files=tuple(results[k] for k in range(len(checkpoints))),
        skipped=skipped,
    )
    _write_reports(out, alignment)
    return alignment


def output_names(checkpoints: Sequence[Path]) -> list[str]:
    """A name for each checkpoint's results: its stem, with its folders or suffix where stems are not unique.

    Raises:
        AlignFilesError: names that agree even then.
    """
    absolute = [Path(os.path.abspath(p)) for p in checkpoints]
    shared = Path(os.path.commonpath([p.parent for p in absolute]))
    relative = [p.relative_to(shared) for p in absolute]
    for style in (
        [p.stem for p in relative],
        ["-".join(p.with_suffix("").parts) for p in relative],
        ["-".join((*p.with_suffix("").parts, p.suffix.lstrip("."))) for p in relative],
    ):
        counts = Counter(name.lower() for name in style)
        if max(counts.values()) == 1 and not any(n.endswith(".permutation") for n in style):
            return style
    twice = sorted(name for name, n in counts.items() if n > 1)
    raise AlignFilesError(f"the checkpoints' names do not tell them apart ({twice[:3]}); rename them")


def _load(graph: SymmetryGraph, path: Path, prefix: str) -> State:
    state = load_state(path, prefix=prefix)
    try:
        graph.check_state(state, name=str(path))
    except SymmetryError as error:
        hint = "" if prefix else " (option --prefix model.)" if "strip the prefix" in str(error) else ""
        raise AlignFilesError(f"{error}{hint}") from error
    return state


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise AlignFilesError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _header(path: Path) -> dict[str, Any] | None:
    """What :func:`align_files` wrote about a file; None if the file is not its own."""
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {}).get(_KEY, "null"))
    except (SafetensorError, ValueError, OSError):
        return None
    return content if isinstance(content, dict) and content.get("format") == _KEY else None


def _done_before(weights: Path, element: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """NoT and distances of a former run with the same source, reference and options; None if there was none."""
    first, second = (_header(p) if p.exists() else None for p in (weights, element))
    if first is None or first != second or any(first.get(k) != v for k, v in key.items()):
        return None
    return {k: first[k] for k in ("transpositions", "distance_before", "distance_after")}


def _refuse_foreign(out: Path, names: Sequence[str], checkpoints: Sequence[Path]) -> None:
    """Nothing that another program wrote may be overwritten; what a killed run left half written is cleared away."""
    inputs = {p.resolve() for p in checkpoints}
    targets = [out / f"{name}{suffix}" for name in names for suffix in (".safetensors", _PERMUTATION)]
    for path in targets:
        if path.resolve() in inputs:
            raise AlignFilesError(f"{path} is a checkpoint and would be overwritten; choose another folder with --out")
        if path.exists() and _header(path) is None:
            raise AlignFilesError(
                f"{path} was not written by this command, or is damaged; move it away or choose another folder"
            )
    reports = {"report.json": f'"format": "{_KEY}"', "report.md": _MARK}
    for name, mark in reports.items():
        path = out / name
        if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace"):
            raise AlignFilesError(f"{path} was not written by this command; move it away or choose another folder")
    for path in [*targets, *(out / name for name in reports)]:
        for left in out.glob(f".{glob.escape(path.name)}.????????.tmp"):
            left.unlink(missing_ok=True)


def _bounded(
    function: Callable[[Path, str], tuple[Aligned, bool]], items: Sequence[tuple[Path, str]], threads: int
) -> Iterator[tuple[int, tuple[Aligned, bool]]]:
    """Results as they come, with never more than ``threads`` items begun; the first error ends it."""
    if threads == 1:
        for k, item in enumerate(items):
            yield k, function(*item)
        return
    with ThreadPoolExecutor(threads) as pool:
        running: dict[Future[tuple[Aligned, bool]], int] = {}
        waiting = iter(enumerate(items))
        while True:
            while len(running) < threads and (following := next(waiting, None)) is not None:
                running[pool.submit(function, *following[1])] = following[0]
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _write_reports(out: Path, alignment: FileAlignment) -> None:
    head = {"format": _KEY, "version": _VERSION}
    content = {k: v for k, v in asdict(alignment).items() if k != "skipped"}
    _write_text(out / "report.json", json.dumps({**head, **content}, indent=1) + "\n")
    grid = alignment.grid()
    options = ", ".join(f"{k} {v!r}" for k, v in alignment.options.items())
    text = (
        f"{_MARK}\n\n# {grid.title}\n\n{grid.markdown()}\n\nL2 distances between parameters; NoT is the number of "
        f"transpositions. Options: {options}.\n"
    )
    _write_text(out / "report.md", text)


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
