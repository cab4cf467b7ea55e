"""The checkpoints that a run reads and the folder that it writes to: names, digests, checks, and whose files are whose.

Files that a run has written carry a header under one key of safetensors' metadata; files without it are never
overwritten. They are sealed (see :mod:`tu_symmetry.files`): one that was changed since is refused, not used.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tu_symmetry.files import (
    FileError,
    FolderInUseError,
    check_file,
    clear_scratch,
    digest_of,
    lock_folder,
    read_header,
    read_json,
    read_safetensors,
    write_json,
    write_safetensors,
)
from tu_symmetry.reporting.progress import Track, Tracker
from tu_symmetry.sources import files_of, is_remote, locate
from tu_symmetry.states import State, SymmetryError, load_state, without_prefix
from tu_symmetry.symmetry.graph import SymmetryGraph

FORMAT = "tu_symmetry.aligned"
VERSION = 4
PERMUTATION = ".permutation.safetensors"
MEAN = "mean.safetensors"
STATE = "state"
PIECE = re.compile(
    r"((permutation|scores|soup|mean|start|sweep|distance|pair)-[a-z\d+-]+|[0-9a-f]{64})\.(json|safetensors)"
)
_OF, _LONG = "tu_symmetry.made_of", 60


@dataclass(frozen=True)
class Checkpoint:
    """One file to be aligned.

    Attributes:
        path: as given.
        name: the name of its results, unique among the files of a run.
        sha256: the digest of its bytes.
    """

    path: Path
    name: str
    sha256: str


class _Silent:
    def update(self, done: int, **info: float | str) -> None:
        """Show nothing."""


def silent(description: str, total: int) -> AbstractContextManager[Tracker]:
    """A :data:`Track` that shows nothing."""
    return nullcontext(_Silent())


@contextmanager
def shown(track: Track) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function for ``progress=`` that shows each step in turn."""
    with ExitStack() as stack:
        step, tracker = "", _Silent()

        def show(at: dict[str, Any]) -> None:
            nonlocal step, tracker
            if at["step"] != step:
                stack.close()
                step, tracker = at["step"], stack.enter_context(track(at["step"], at["total"]))  # type: ignore[assignment]
            tracker.update(at["done"])

        yield show


def find_checkpoints(patterns: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files of weights, in the order given, each once however it is written.

    Patterns are paths, globs of files or folders (``**`` descends into folders), and all that
    :func:`tu_symmetry.sources.locate` knows.

    Raises:
        FileError: a path or pattern that stands for no file, or weights that cannot be fetched.
    """
    found: dict[str, Path] = {}
    for pattern in map(str, patterns):
        path = Path(pattern)
        here = path.exists() or is_remote(pattern)
        matches = [pattern] if here else sorted(glob.glob(pattern, recursive=True))
        folders = [m for m in matches if Path(m).is_dir()]
        if not here and len(folders) < len(matches):  # a glob of files that also meets folders
            matches = [m for m in matches if m not in folders]
        files = [file for match in matches for file in locate(match)]
        if not files:
            raise FileError(f"{pattern} is no file")
        for file in files:
            found.setdefault(os.path.abspath(file), file)
    return list(found.values())


def output_names(checkpoints: Sequence[Path]) -> list[str]:
    """A name for each checkpoint's results: its stem, with its folders or suffix where stems are not unique.

    Raises:
        FileError: names that agree even then.
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
        taken = [n for n in style if n.endswith(".permutation") or f"{n}.safetensors".lower() == MEAN]
        if max(counts.values()) == 1 and not taken:
            return style
    twice = sorted(name for name, n in counts.items() if n > 1)
    raise FileError(f"the checkpoints' names do not tell them apart ({(twice or taken)[:3]}); rename them")


def load_checkpoint(graph: SymmetryGraph, path: Path, prefix: str) -> State:
    """Read a network as :func:`read_state` does, and check that it belongs to the architecture.

    Raises:
        FileError: another architecture, NaN or infinite weights, a stack of networks, a file that is truncated,
            foreign or not there.
    """
    state = read_state(path, prefix)
    try:
        stacked = graph.check_state(state, name=str(path))
    except SymmetryError as error:
        found = _prefix_of(graph, state)
        raise FileError(f"{error}{f' (option --prefix {found})' if found else ''}") from error
    if stacked:
        raise FileError(f"{path} holds a stack of networks (extra leading axes), not one; split it into files")
    return state


def read_state(path: Path, prefix: str) -> State:
    """Read a state dict and take a prefix off its names.

    A file without any such name is read as it is, so that files with and without a prefix can be mixed.

    Raises:
        FileError: a file that is truncated, foreign or not there.
    """
    try:
        state = load_state(path)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    return without_prefix(state, prefix) or state


def _prefix_of(graph: SymmetryGraph, state: Mapping[str, Tensor]) -> str:
    """What stands before every name of the architecture in a state; empty if there is no such thing."""
    names = [alias for aliases in graph.aliases.values() for alias in aliases]
    for candidate in (n.removesuffix(names[0]) for n in state if n.endswith(f".{names[0]}")):
        if all(candidate + name in state for name in names):
            return candidate
    return ""


def check_checkpoints(
    graph: SymmetryGraph, paths: Sequence[Path], names: Sequence[str], prefix: str, track: Track
) -> list[Checkpoint]:
    """Read every file once, before anything is written, so that a bad one is known at the start and not after hours.

    Raises:
        FileError: names every file that is truncated, foreign, of another architecture, or holds NaN.
    """
    found, errors = [], []
    with track("checking the files", len(paths)) as tracker:
        for k, (path, name) in enumerate(zip(paths, names, strict=True), 1):
            try:
                load_checkpoint(graph, path, prefix)
                found.append(Checkpoint(path, name, sha256(path)))
            except FileError as error:
                errors.append(str(error))
            tracker.update(k, file=path.name)
    if len(errors) == 1:
        raise FileError(errors[0])
    if errors:
        shown = "".join(f"\n  {e}" for e in errors[:10]) + (f"\n  and {len(errors) - 10} more" * (len(errors) > 10))
        raise FileError(f"{len(errors)} of {len(paths)} files cannot be aligned:{shown}")
    return found


def sha256(path: Path) -> str:
    """Digest of a file's bytes.

    Raises:
        FileError: no such file.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def write_owned(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors with a header, whole or not at all."""
    content = {"format": FORMAT, "version": VERSION, **header}
    write_safetensors(path, tensors, {FORMAT: json.dumps(content, sort_keys=True)})  # one key: order is fixed


def owned_header(path: Path) -> dict[str, Any] | None:
    """What :func:`write_owned` wrote about a file; None if there is no file, or it is not its own.

    Only its head is read; :func:`check_owned` compares its content with its seal.
    """
    try:
        content = json.loads(read_header(path).metadata.get(FORMAT, "null"))
    except (ValueError, OSError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


def check_owned(path: Path) -> dict[str, str]:
    """Compare a result with its seal; the versions that wrote it.

    Raises:
        FileError: it was changed after it was written.
    """
    try:
        return check_file(path).versions
    except (FileError, OSError) as error:
        raise FileError(f"{error} (deleting it has it made again)") from error


class Kept(MutableMapping[str, Any]):
    """What a run has found so far, each piece in a sealed file of its own that says what it was made of.

    Permutations are safetensors files, everything else is JSON. A piece that was made of other files or with other
    options counts as not there, and is replaced.

    Args:
        folder: the folder of the pieces; it is made when the first one is.
        made_of: what a piece depends on, by its key (``sweep/1/0``).
    """

    def __init__(self, folder: Path, made_of: Callable[[str], Any]) -> None:
        self.folder, self._made_of = folder, made_of
        self._used: set[str] = set()

    def _name(self, key: str) -> str:
        return key.replace("/", "-") if len(key) < _LONG else digest_of(key)

    def _digest(self, key: str) -> str:
        return digest_of([VERSION, key, self._made_of(key)])

    def __getitem__(self, key: str) -> Any:
        self._used.add(self._name(key))
        for path in (self.folder / f"{self._name(key)}{suffix}" for suffix in (".safetensors", ".json")):
            if path.is_file():
                made_of, value = _piece(path)
                if made_of == self._digest(key):
                    return value
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._used.add(self._name(key))
        self.folder.mkdir(parents=True, exist_ok=True)
        path, made_of = self.folder / self._name(key), self._digest(key)
        if value and all(isinstance(part, Tensor) for part in value.values()):
            tensors = {n: t.contiguous() for n, t in value.items()}
            write_safetensors(path.with_name(f"{path.name}.safetensors"), tensors, {_OF: made_of})
        else:
            write_json(path.with_name(f"{path.name}.json"), {_OF: made_of, "value": value}, seal=True)

    def __delitem__(self, key: str) -> None:
        for path in self.folder.glob(f"{glob.escape(self._name(key))}.*"):
            path.unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in self.folder.glob("*") if PIECE.fullmatch(path.name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def tidy(self) -> None:
        """Take away the pieces of earlier runs that this one has not asked for, and what killed ones have left."""
        clear_scratch(self.folder)
        for name in list(self):
            if name.rpartition(".")[0] not in self._used and _piece(self.folder / name):
                (self.folder / name).unlink()


def _piece(path: Path) -> tuple[str, Any]:
    """What a piece was made of, and its value.

    Raises:
        FileError: it is damaged, or of another program.
    """
    try:
        if path.suffix == ".safetensors":
            value, header = read_safetensors(path)
            content: dict[str, Any] = {**header.metadata, "value": value}
        else:
            content = read_json(path)[0]
    except (FileError, OSError) as error:
        raise FileError(f"{error} (deleting it has it found again)") from error
    if _OF not in content:
        raise FileError(f"{path} was not written by this command; move it away or choose another --out")
    return content[_OF], content["value"]


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other runs from writing the folder of the results.

    Raises:
        FileError: another run does.
    """
    try:
        with lock_folder(out):
            yield
    except FolderInUseError as error:
        raise FileError(f"{error} with --out") from None


def clear_left(tensors: Sequence[Path], texts: Mapping[Path, str]) -> None:
    """Take away what killed runs have left of a run's files; only while the folder is locked."""
    for folder in {path.parent for path in (*tensors, *texts)}:
        clear_scratch(folder, of={path.name for path in (*tensors, *texts) if path.parent == folder})


def refuse_foreign(
    tensors: Sequence[Path], texts: Mapping[Path, str], inputs: Sequence[Path], *, others: Sequence[Path] = ()
) -> None:
    """Nothing that a run reads, and nothing that another program wrote, may be overwritten.

    A file that is read is known however it is spelled: by links, hard links, and other cases of letters where the file
    system takes them for the same. The files that an index names are read too. Besides safetensors files and texts,
    which hold a mark where an earlier run wrote them, ``others`` are files that a run writes or deletes, and folders
    that it deletes, which are looked at elsewhere.

    Raises:
        FileError: names the file that is in the way.
    """
    read = {file: path for path in inputs for one in files_of(path) for file in _identities(one)}
    within = {folder for file in read if isinstance(file, Path) for folder in file.parents}
    for path in (*tensors, *texts, *others):
        found = next((str(read[file]) for file in _identities(path) if file in read), "")
        if found or (path in others and path.resolve() in within):
            named = f" (as {found})" if found not in ("", str(path)) else ""
            raise FileError(
                f"{path} is read by this command{named} and would be overwritten; choose another place with --out"
            )
    for path in tensors:
        if path.exists() and owned_header(path) is None:
            raise FileError(
                f"{path} was not written by this command, or is damaged; move it away or choose another folder"
            )
    for path, mark in texts.items():
        if path.exists() and not _marked(path, mark):
            raise FileError(f"{path} was not written by this command; move it away or choose another folder")


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
