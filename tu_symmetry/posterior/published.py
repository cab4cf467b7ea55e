"""Folders and archives of checkpoints as posterior samples, one network at a time.

Made for ``torch-uncertainty/Checkpoints`` on Hugging Face (arXiv 2310.08287): thousands of independently trained
networks in archives such as ``models/cifar100-resnet18/cifar100-resnet18-0-1023.tgz``, which are read as streams.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from tu_symmetry.files import SUFFIXES
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError, State, layout_of, load_state, require_same

CHECKPOINTS = "torch-uncertainty/Checkpoints"
ARCHIVES = (".tgz", ".tar.gz", ".tar", ".tar.bz2", ".tar.xz")
_PER_SHARD = 16  # networks in memory, and in each file of the store
Load = Callable[[], State]


def list_checkpoints(source: str | os.PathLike[str] = CHECKPOINTS) -> dict[str, list[str]]:
    """The folders below a local folder, or in a data set of Hugging Face, that hold checkpoints or archives of them.

    Each (``.`` is the source itself) with its files, in the order of the numbers in their names.
    """
    if Path(source).is_dir():
        names = [p.relative_to(source).as_posix() for p in Path(source).rglob("*") if p.is_file()]
    else:
        names = _asked(source, lambda hub: hub.list_repo_files(str(source), repo_type="dataset"))
    by_folder: dict[str, list[str]] = {}
    for name in sorted(names, key=_natural):
        if name.endswith((*SUFFIXES, *ARCHIVES)):
            by_folder.setdefault(Path(name).parent.as_posix(), []).append(name)
    if not by_folder:
        kinds = ", ".join((*SUFFIXES, *ARCHIVES))
        raise SampleFileError(f"{source} holds no {kinds} file; it has {sorted(names)[:6]}")
    return dict(sorted(by_folder.items()))


def collect_checkpoints(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str] = CHECKPOINTS,
    *,
    folder: str = ".",
    start: int = 0,
    count: int | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> SampleStore:
    """Stream a folder of checkpoints into a sample store; a call that was interrupted goes on.

    Networks are numbered in the order of their files, within an archive in the archive's order; ``count`` of them (or
    all) become chains ``0, 1, ...`` from number ``start`` on. Archives are read up to the last one that is wanted.
    ``progress`` receives ``done`` and ``file`` after each network.

    Raises:
        SampleFileError: no such folder or data set; a file that is damaged, or of another architecture than the first.
        ValueError: fewer networks than asked for, or NaN or infinite weights.
    """
    found = list_checkpoints(source)
    key = Path(folder).as_posix()
    if key not in found:
        raise SampleFileError(
            f"{source} has no folder {folder!r} with checkpoints; it has "
            f"{ {name: len(files) for name, files in list(found.items())[:12]} } (folder: number of files)"
        )
    if start < 0 or (count is not None and count < 1):
        raise ValueError(f"got start={start} and count={count}; they are at least 0 and 1")
    files = found[key]

    def require_enough(there: int) -> None:
        if there - start < (count or 1):
            raise ValueError(
                f"{folder} of {source} holds no more than {there} checkpoints, {'all' if count is None else count} "
                f"from number {start} on are wanted"
            )

    if not any(map(_is_archive, files)):
        require_enough(len(files))
    store = _opened(Path(out), source, key)
    done = {start + chain for chain in store.chains}
    layout = store.layout
    held: dict[int, State] = {}

    def flush() -> None:
        if held:
            store.append(list(held.values()), chain=[number - start for number in held], step=[0] * len(held))
            held.clear()

    number = start - 1
    try:
        for number, name, load in _networks(source, files, start, None if count is None else start + count, done):
            if load is None:
                continue
            state = load()
            layout = layout or layout_of(state)
            require_same(layout_of(state), layout, name, "the networks before it", SampleFileError)
            held[number] = state
            if len(held) == _PER_SHARD:
                flush()
            done.add(number)
            if progress is not None:
                progress({"done": len(done), "file": name})
    finally:
        flush()
    require_enough(number + 1)
    return store


def _networks(
    source: str | os.PathLike[str], files: Sequence[str], start: int, end: int | None, done: set[int]
) -> Iterator[tuple[int, str, Load | None]]:
    """Numbers and names of networks from ``start`` on, with what loads each; without, where it is done already."""
    number = 0
    for file in files:
        size = _size_by_name(file)
        if size is not None and done.issuperset(range(max(number, start), min(number + size, end or number + size))):
            number += size  # nothing in the archive is wanted, so it is not opened
            if number > start:
                yield number - 1, file, None
            continue
        for name, load in _members(source, file) if _is_archive(file) else [(file, _of_file(source, file))]:
            if end is not None and number >= end:
                return
            if number >= start:
                yield number, name, None if number in done else load
            number += 1


def _members(source: str | os.PathLike[str], file: str) -> Iterator[tuple[str, Load]]:
    """The networks of an archive, in its order; each is to be loaded before the next one is asked for."""
    count = 0

    @contextmanager
    def reading() -> Iterator[None]:
        try:
            yield
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise SampleFileError(
                f"{file} of {source} cannot be read beyond {count} networks ({type(error).__name__}: {error}): it is "
                "truncated or damaged, or the connection broke. They are stored; the same call goes on once it is whole"
            ) from error

    with reading(), _stream(source, file) as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            path = Path(member.name)
            if not member.isfile() or path.suffix not in SUFFIXES or path.name.startswith("."):
                continue
            name = f"{file}: {member.name}"

            def load(member: tarfile.TarInfo = member, name: str = name) -> State:
                with reading(), tempfile.TemporaryDirectory() as scratch:
                    copy = Path(scratch) / Path(member.name).name
                    with copy.open("wb") as target:
                        shutil.copyfileobj(cast("IO[bytes]", archive.extractfile(member)), target, 1 << 20)
                    try:
                        return load_state(copy)
                    except SampleFileError as error:
                        raise SampleFileError(f"in {name}: {error}") from error

            yield name, load
            count += 1


def _of_file(source: str | os.PathLike[str], file: str) -> Load:
    return lambda: load_state(_local(source, file))


def _is_archive(file: str) -> bool:
    return file.endswith(ARCHIVES)


def _size_by_name(file: str) -> int | None:
    """How many networks an archive holds by the first and last number at the end of its name."""
    found = re.search(r"-(\d+)-(\d+)\.[a-z.0-9]+$", file) if _is_archive(file) else None
    size = int(found[2]) - int(found[1]) + 1 if found else 0
    return size if size > 0 else None


def _opened(out: Path, source: str | os.PathLike[str], key: str) -> SampleStore:
    store = SampleStore.open_if_there(out)
    if store is None:
        return SampleStore.create(
            out, architecture=key, method="checkpoints", seed=None, source=str(source), subfolder=key
        )
    if (store.metadata.get("source"), store.metadata.get("subfolder")) != (str(source), key):
        raise SampleFileError(f"{out} holds samples of {store.metadata}, not of {key} of {source}")
    return store


def _stream(source: str | os.PathLike[str], file: str) -> IO[bytes]:
    if Path(source).is_dir():
        return (Path(source) / file).open("rb")
    stream: IO[bytes] = _asked(source, lambda hub: hub.HfFileSystem().open(f"datasets/{source}/{file}", "rb"))
    return stream


def _local(source: str | os.PathLike[str], name: str) -> Path:
    if Path(source).is_dir():
        return Path(source) / name
    return Path(_asked(source, lambda hub: hub.hf_hub_download(str(source), name, repo_type="dataset")))


def _asked(source: str | os.PathLike[str], ask: Callable[[Any], Any]) -> Any:
    """What ``huggingface_hub`` answers."""
    import huggingface_hub

    try:
        return ask(huggingface_hub)
    except Exception as error:  # no network, no such data set, no right to read it: the hub has a class for each
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise SampleFileError(
            f"{source} is no local folder, and the data set cannot be reached ({type(error).__name__}: {said}). Where "
            f"there is a network, get it with `hf download {source} --repo-type dataset --local-dir DIR` (with "
            "--include 'FOLDER/*' a part of it), and give DIR in its place"
        ) from error


def _natural(name: str) -> list[tuple[int, int, str]]:
    """``net_2`` before ``net_10``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
