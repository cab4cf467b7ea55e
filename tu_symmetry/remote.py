"""Files in the storage that fsspec knows (``s3://``, ``hf://``, ``memory://``), by copies of this process.

The copies lie in a temporary folder under the names that the files have there, and are made again when these change.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from tu_symmetry.files import AnyPath, FileError, replacing
from tu_symmetry.shards import INDEX, is_part, names_in

_made: dict[Path, str] = {}  # what identified the file that was copied


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Goes with the process."""
    return tempfile.TemporaryDirectory(prefix="tu_symmetry-")


def is_remote(source: AnyPath) -> bool:
    """Whether a name is a URL."""
    return "://" in str(source)


def local_copies(url: str) -> list[Path]:
    """What a URL or a glob of them names, on this machine: files, indices beside their files, folders with parts."""
    from fsspec.core import url_to_fs

    try:
        storage, path = url_to_fs(url)
        storage.invalidate_cache()
        found = [path] if storage.exists(path) else sorted(storage.glob(path))
        return [copy for one in found if (copy := _network(storage, one))]
    except FileError:
        raise
    except Exception as error:  # each storage has errors of its own
        raise FileError(
            f"{url} cannot be read ({type(error).__name__}: {error}); check the name, your credentials and the "
            "connection, or copy it to this machine"
        ) from error


def _network(storage: Any, path: str) -> Path | None:
    """A network; None for a folder that holds none."""
    if "file" in _kinds(storage):
        return Path(path)
    above = path.rpartition("/")[0]
    if is_part(PurePosixPath(path)):
        return _network(storage, above)
    if "https" not in _kinds(storage) and storage.isdir(path):  # there, it would read the file to see links in it
        copies = [_copy(storage, name) for name in storage.ls(path, detail=False) if is_part(PurePosixPath(name))]
        return copies[0].parent if copies else None
    copy = _copy(storage, path)
    if path.endswith(INDEX):
        for name in sorted(set(names_in(copy).values())):
            _copy(storage, f"{above}/{name}")
    return copy


def _kinds(storage: Any) -> tuple[str, ...]:
    return (storage.protocol,) if isinstance(storage.protocol, str) else tuple(storage.protocol)


def _copy(storage: Any, path: str) -> Path:
    if ".." in path.split("/"):
        raise FileError(f"{path} has '..' in its name; copy it to this machine under another name")
    target, key = Path(_folder().name, _kinds(storage)[0], path.lstrip("/")), storage.ukey(path)
    if _made.get(target) != key or not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            storage.get_file(path, str(temporary))
            if os.stat(temporary).st_size != (storage.size(path) or os.stat(temporary).st_size):
                raise FileError(f"{path} was cut off while it was copied; run this again")
        _made[target] = key
    return target
