"""Folders of checkpoints as posterior samples, one network at a time; the published data set of arXiv 2310.08287.

The data set is ``torch-uncertainty/Checkpoints`` on Hugging Face: thousands of independently trained networks. How its
files are laid out is not taken for granted: :func:`list_checkpoints` lists what is there, and a folder with files of
one architecture is one set of samples.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError, State, layout_of, load_state, require_same

CHECKPOINTS = "torch-uncertainty/Checkpoints"
SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder with checkpoints.

    Attributes:
        folder: relative to where was looked; ``.`` for that folder itself.
        files: the checkpoints in it, in the order of the numbers in their names.
    """

    folder: str
    files: tuple[str, ...]


def list_checkpoints(source: str | os.PathLike[str] = CHECKPOINTS) -> list[CheckpointFolder]:
    """The folders that hold checkpoints, below a local folder or in a data set of Hugging Face.

    Args:
        source: an existing folder, or the name of a data set.

    Raises:
        SampleFileError: neither a folder nor a data set that can be reached; nothing in it.
    """
    if Path(source).is_dir():
        root = Path(source)
        names = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
    else:
        hub = _hub()
        try:
            names = hub.list_repo_files(str(source), repo_type="dataset")
        except Exception as error:  # no network, no such data set, no right to read it: the hub has a class for each
            raise SampleFileError(_unreachable(str(source), error)) from error
    by_folder: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(SUFFIXES):
            by_folder.setdefault(Path(name).parent.as_posix(), []).append(name)
    if not by_folder:
        raise SampleFileError(f"{source} holds no {', '.join(SUFFIXES)} file; it has {sorted(names)[:6]}")
    return [CheckpointFolder(f, tuple(sorted(files, key=_natural))) for f, files in sorted(by_folder.items())]


def collect_checkpoints(
    out: str | os.PathLike[str],
    source: str | os.PathLike[str] = CHECKPOINTS,
    *,
    folder: str = ".",
    prefix: str = "",
    start: int = 0,
    count: int | None = None,
    per_shard: int = 16,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> SampleStore:
    """Stream a folder of checkpoints into a sample store, in memory no more than one shard at a time.

    The networks are chains ``0, 1, ...`` in the order of their names. A call that was interrupted resumes.
    Files of a data set are fetched one by one, and stay in the cache of ``huggingface_hub``.

    Args:
        out: folder of the store; new, or of an interrupted call.
        source: a local folder, or the name of a data set of Hugging Face.
        folder: which of its folders, as :func:`list_checkpoints` names it.
        prefix: what stands before the names in the files, ``"model."`` in checkpoints of routines.
        start: number of the first network.
        count: number of networks; all that follow by default.
        per_shard: networks in each file of the store.
        progress: receives ``done``, ``total`` and ``file`` after each network.

    Raises:
        SampleFileError: no such folder or data set; a file that is damaged, or of another architecture than the first.
        ValueError: fewer networks than asked for, or NaN or infinite weights.
    """
    found = {f.folder: f for f in list_checkpoints(source)}
    key = Path(folder).as_posix()
    if key not in found:
        raise SampleFileError(
            f"{source} has no folder {folder!r} with checkpoints; it has "
            f"{ {name: len(f.files) for name, f in list(found.items())[:12]} } (folder: number of files)"
        )
    files = found[key].files
    left = len(files) - start
    if start < 0 or left < 1 or (count is not None and not 1 <= count <= left):
        raise ValueError(
            f"{folder} of {source} holds {len(files)} checkpoints, {'all' if count is None else count} from number "
            f"{start} on are wanted"
        )
    if per_shard < 1:
        raise ValueError(f"per_shard must be at least 1, got {per_shard}")
    files = files[start : None if count is None else start + count]
    out = Path(out)
    there = SampleStore.open_if_there(out)
    if there is not None:
        store = there
        if (store.metadata.get("source"), store.metadata.get("subfolder")) != (str(source), key):
            raise SampleFileError(f"{out} holds samples of {store.metadata}, not of {folder} of {source}")
    else:
        store = SampleStore.create(
            out, architecture=key, method="checkpoints", seed=None, source=str(source), subfolder=key
        )
    done = set(store.chains)
    waiting = [k for k in range(len(files)) if k not in done]
    first = {n: t[0] for n, t in store.stack([0]).items()} if len(store) else None
    held: list[State] = []
    numbers: list[int] = []
    for position, k in enumerate(waiting):
        path = _local(source, files[k])
        state = load_state(path, prefix=prefix)
        expected = first or (None if not held else held[0])
        if expected is not None:
            require_same(layout_of(state), layout_of(expected), str(path), "the files before it", SampleFileError)
        held.append(state)
        numbers.append(k)
        if progress is not None:
            progress({"done": len(done) + position + 1, "total": len(files), "file": files[k]})
        if len(held) == per_shard or position == len(waiting) - 1:
            store.append(held, chain=numbers, step=[0] * len(numbers))
            first = first or held[0]
            held, numbers = [], []
    return store


def _local(source: str | os.PathLike[str], name: str) -> Path:
    if Path(source).is_dir():
        return Path(source) / name
    hub = _hub()
    try:
        return Path(hub.hf_hub_download(str(source), name, repo_type="dataset"))
    except Exception as error:
        raise SampleFileError(_unreachable(str(source), error)) from error


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise SampleFileError(
            "data sets of Hugging Face are read by huggingface_hub: pip install huggingface_hub, or give a local folder"
        ) from error
    return huggingface_hub


def _unreachable(source: str, error: Exception) -> str:
    said = (str(error).strip().splitlines() or [""])[0][:200]
    return (
        f"{source} is no local folder, and the data set cannot be reached ({type(error).__name__}: {said}). Where "
        f"there is a network, get it with `hf download {source} --repo-type dataset --local-dir DIR` (with --include "
        "'FOLDER/*' a part of it), and give DIR in its place"
    )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """``net_2`` before ``net_10``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
