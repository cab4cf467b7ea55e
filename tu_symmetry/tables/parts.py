"""Parts of a long command's results, each in a file of its own as soon as it is made: a cut command resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from tu_symmetry.files import FileError, digest_of, read_json, write_json
from tu_symmetry.tables.outcome import plain


class Parts:
    """A folder of results, sealed and written whole or not at all, and what they depend on.

    A command makes one part after the other and keeps each at once; cut and called again with the same arguments, it
    reads those that are there and makes the others. A part that was made from something else (other options, other
    networks, other data) is neither taken for this command's nor overwritten: that is an error.

    Args:
        folder: the folder of the parts; made when the first one is kept.
        made_from: everything that the parts depend on, as JSON can hold it (of tensors a digest, see
            :func:`digest_tensors`).
    """

    def __init__(self, folder: Path, made_from: Any) -> None:
        self.folder = folder
        self.key = digest_of(plain(made_from))

    def path(self, name: str) -> Path:
        """The file of a part; slashes in its name become dashes."""
        return self.folder / f"{name.replace('/', '-')}.json"

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the parts that are still to be made."""
        return [name for name in names if not self.path(name).exists()]

    def take(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The part, made and kept if it is not there; numbers that are not finite come back as None.

        Raises:
            FileError: it was made from something else, changed, or damaged.
        """
        path = self.path(name)
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, {"made_from": self.key, "part": plain(make())}, seal=True)
        content, _ = read_json(path)
        if content.get("made_from") != self.key:
            raise FileError(
                f"{path} was made with other options, or from other networks or data: move {self.folder} away, or "
                "write to another folder (out)"
            )
        part: dict[str, Any] = content["part"]
        return part


def digest_tensors(*tensors: Tensor) -> str:
    """Digest of the shapes, dtypes and contents of tensors, in their order."""
    digest = hashlib.sha256()
    for t in tensors:
        held = t.detach().cpu().contiguous()
        digest.update(f"{tuple(held.shape)} {held.dtype} ".encode())
        digest.update(held.numpy().tobytes())
    return digest.hexdigest()
