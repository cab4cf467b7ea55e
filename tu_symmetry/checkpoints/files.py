"""The checkpoints that a run reads and the files that it writes: names, digests, checks, and whose files are whose.

What a run writes carries a header under one key of safetensors' metadata; nothing without it is overwritten.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tu_symmetry.alignment.networks import StateSource
from tu_symmetry.alignment.over import Over, check_over
from tu_symmetry.files import (
    FileError,
    clear_scratch,
    digest_file,
    lock_folder,
    read_header,
    read_json,
    write_safetensors,
)
from tu_symmetry.processes import by_first, gathered, shared
from tu_symmetry.remote import is_remote, local_copies
from tu_symmetry.reporting.progress import Track, Tracker
from tu_symmetry.shards import files_of, is_part
from tu_symmetry.states import SymmetryError, read_once
from tu_symmetry.symmetry.graph import SymmetryGraph

FORMAT = "tu_symmetry.aligned"
VERSION = 5
PERMUTATION = ".permutation.safetensors"
MEAN = "mean.safetensors"
MOVED = "signs, largest factor, mixed blocks"  # the title of what moved_text tells


@dataclass(frozen=True)
class Checkpoint:
    """A file or a folder, the name of its results, and the digest of its bytes."""

    path: Path
    name: str
    sha256: str


class _Silent:
    def update(self, done: int, **info: float | str) -> None:
        """Show nothing."""


def silent(description: str, total: int) -> AbstractContextManager[Tracker]:
    """A :data:`Track` that shows nothing."""
    return nullcontext(_Silent())


def find_checkpoints(patterns: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files by their paths or globs (``**`` descends into folders), in the order given, each once.

    A folder of ``torch.distributed.checkpoint`` is one checkpoint, for which each file in it stands.
    """
    found: dict[str, Path] = {}
    for pattern in map(str, patterns):
        matches: Sequence[Any] = [pattern]
        if is_remote(pattern):
            matches = local_copies(pattern)
        elif not Path(pattern).exists():
            matches = sorted(glob.glob(pattern, recursive=True))
        files = [path for path in map(_whole, matches) if path.is_file() or (path.is_dir() and files_of(path))]
        if not files:
            raise FileError(f"{pattern} is no file, and no folder of torch.distributed.checkpoint")
        for file in files:
            found.setdefault(os.path.abspath(file), file)
    return list(found.values())


def _whole(match: str | Path) -> Path:
    """What a file that was found belongs to; Lightning puts one of its own beside those of torch."""
    path = Path(match)
    inside = path.is_file() and (is_part(path) or (path.name == "meta.pt" and files_of(path.parent)))
    return path.parent if inside else path


def verified_groups(graph: SymmetryGraph, over: Sequence[Over], track: Track) -> SymmetryGraph:
    """What alignment uses of a graph, verified; the rest is left out, which large networks take long to verify."""
    parts: dict[str, dict[str, Any]] = {
        "signs": {"signs": (), "sign_terms": {}},
        "scales": {"scales": (), "normalizations": (), "scale_terms": {}},
        "rotations": {"linears": (), "guesses": ()},
    }
    used = {*check_over(over), *(("scales", "signs") if "rotations" in over else ())}  # which fold norms
    left_out = [part for word, part in parts.items() if word not in used]
    gone = {name: nothing for part in left_out for name, nothing in part.items()}
    narrow = None if graph.narrow is None else replace(graph.narrow, **gone)
    alone = replace(graph, **gone, narrow=narrow)
    with track(f"verifying the {' and '.join(', '.join(over).rsplit(', ', 1))} in float64", 1) as tracker:
        alone.require_verified()
        tracker.update(1)
    return alone


def moved_text(moved: Mapping[str, float]) -> str:
    """What else than permutations moved a network, in a cell of a table."""
    return f"{moved['sign_changes']}, {moved['largest_factor']:.3g}, {moved['mixed_blocks']}"


def output_names(checkpoints: Sequence[Path]) -> list[str]:
    """A name for each checkpoint's results: its stem, with its folders or suffix where stems are not unique."""
    absolute = [Path(os.path.abspath(p)) for p in checkpoints]
    shared = os.path.commonpath([p.parent for p in absolute])
    relative = [p.relative_to(shared) for p in absolute]
    stems = ["-".join(p.with_suffix("").parts) for p in relative]
    suffixed = [f"{stem}-{p.suffix.lstrip('.')}" for stem, p in zip(stems, relative, strict=True)]
    for style in ([p.stem for p in relative], stems, suffixed):
        counts = Counter(name.lower() for name in style)
        taken = [n for n in style if n.endswith(".permutation") or f"{n}.safetensors".lower() == MEAN]
        if max(counts.values()) == 1 and not taken:
            return style
    twice = sorted(name for name, count in counts.items() if count > 1)
    raise FileError(f"the checkpoints' names do not tell them apart ({(twice or taken)[:3]}); rename them")


def open_checkpoint(graph: SymmetryGraph, path: Path, prefix: str) -> Mapping[str, Tensor]:
    """A network of the graph's architecture; a file without any name that has the prefix is read as it is.

    All tensors are looked at, one after the other; those of large safetensors files are read again when they are asked
    for.
    """
    state = read_once(StateSource([path], prefix=prefix).open(0))
    try:
        stacked = graph.check_state(state, name=str(path))
    except SymmetryError as error:
        if (path.parent / "adapter_config.json").exists() or any(name.endswith(".lora_A.weight") for name in state):
            raise FileError(f"{path} holds adapters, which PEFT merges: model.add_weighted_adapter(...)") from error
        prefix, classes = _prefix_of(graph, state), _classes_of(graph, state)
        hint = f" (option --prefix {prefix})" if prefix else ""
        if classes:
            hint = f"; its last layer has another number of classes (option --init num_classes={classes})"
        raise FileError(f"{error}{hint}") from error
    if stacked:
        raise FileError(f"{path} holds a stack of networks (extra leading axes), not one; split it into files")
    return state


def _prefix_of(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> str:
    """What stands before every name of the architecture in a state; empty if there is no such thing."""
    names = [alias for aliases in graph.aliases.values() for alias in aliases]
    for candidate in (n.removesuffix(names[0]) for n in state if n.endswith(f".{names[0]}")):
        if all(candidate + name in state for name in names):
            return candidate
    return ""


def _classes_of(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> int:
    """The outputs of a state's last layer, where their number is all that differs from the architecture; else 0."""
    wanted = {alias: graph.shapes[key] for key, aliases in graph.aliases.items() for alias in aliases}
    differing = {n: tuple(state[n].shape) for n in wanted if n in state and tuple(state[n].shape) != wanted[n]}
    same = all(shape and shape[1:] == wanted[n][1:] for n, shape in differing.items())
    layers = {name.rpartition(".")[0] for name in differing}
    last = [*wanted][-1].rpartition(".")[0] if wanted else ""
    return next(iter(differing.values()))[0] if same and state.keys() == wanted.keys() and layers == {last} else 0


def check_checkpoints(graph: SymmetryGraph, paths: Sequence[Path], prefix: str, track: Track) -> list[Checkpoint]:
    """Read every file once, before anything is written, so that a bad one is known at the start and not after hours."""
    names = output_names(paths)

    def read(k: int) -> Checkpoint | str:
        try:
            open_checkpoint(graph, paths[k], prefix)
            return Checkpoint(paths[k], names[k], sha256(paths[k]))
        except (FileError, OSError) as error:
            return str(error)

    with track("checking the files", len(paths)) as tracker:
        every = shared(len(paths), read, progress=tracker.update)
    found = [one for one in every if isinstance(one, Checkpoint)]
    errors = [one for one in every if isinstance(one, str)]
    if len(errors) == 1:
        raise FileError(errors[0])
    if errors:
        more = [f"and {len(errors) - 10} more"] if len(errors) > 10 else []
        raise FileError("\n  ".join([f"{len(errors)} of {len(paths)} files cannot be aligned:", *errors[:10], *more]))
    return found


@contextmanager
def alone_in(folder: Path, of: Collection[str] | None = None) -> Iterator[None]:
    """Keep other runs from a folder, and clear what killed ones left there; of several processes the first does it."""
    with ExitStack() as held:

        def enter() -> None:
            held.enter_context(lock_folder(folder))
            clear_scratch(folder, of=of)

        by_first(enter)
        yield
        gathered(None)  # the first lets go when all are done


def sha256(path: Path) -> str:
    """The digest of a file's bytes that other programs know too; of several files, of one after the other."""
    digest = hashlib.sha256()
    return [digest_file(file, digest) for file in files_of(path)][-1]


def write_owned(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors with a header, whole or not at all."""
    content = {"format": FORMAT, "version": VERSION, **header}
    write_safetensors(path, tensors, {FORMAT: json.dumps(content, sort_keys=True)})


def owned_header(path: Path) -> dict[str, Any] | None:
    """What :func:`write_owned` wrote about a file; None if there is no file, or it is not its own."""
    try:
        content = json.loads(read_header(path).metadata.get(FORMAT, "null"))
    except (ValueError, OSError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


def refuse_foreign(
    tensors: Sequence[Path], texts: Mapping[Path, str], inputs: Sequence[Path], *, folders: Sequence[Path] = ()
) -> None:
    """Nothing that a run reads, and nothing that another program wrote, may be overwritten.

    Args:
        tensors: safetensors files that the run writes.
        texts: other files that it writes, and a mark that each holds where an earlier run wrote it.
        inputs: what it reads; the parts of an index belong to it. Links, hard links and other cases of letters count.
        folders: folders that it deletes, and whose owner is looked at elsewhere.
    """
    read = {file: path for path in inputs for one in files_of(path) for file in _identities(one)}
    within = {folder for file in read if isinstance(file, Path) for folder in file.parents}
    for path in (*tensors, *texts, *folders):
        found = next((str(read[file]) for file in _identities(path) if file in read), "")
        if found or (path in folders and path.resolve() in within):
            named = f" (as {found})" if found not in ("", str(path)) else ""
            raise FileError(
                f"{path} is read by this command{named} and would be overwritten; choose another place with --out"
            )
    foreign = [path for path in tensors if path.exists() and owned_header(path) is None]
    foreign += [path for path, mark in texts.items() if path.exists() and not _marked(path, mark)]
    if foreign:
        raise FileError(
            f"{foreign[0]} was not written by this command, or is damaged; move it away or choose another place"
        )


def _identities(path: Path) -> list[Any]:
    """By what two names of one file agree: the path without links, and the number of what is there."""
    try:
        found = path.stat()
    except OSError:
        return [path.resolve()]
    return [path.resolve(), (found.st_dev, found.st_ino)]


def _marked(path: Path, mark: str) -> bool:
    try:
        return mark.encode() in path.read_bytes() and (path.suffix != ".json" or bool(read_json(path)))
    except FileError:
        return False
