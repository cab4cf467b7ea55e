"""What a command that trains no network has found: numbers, a line, tables; and the parts of it, kept one by one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tu_symmetry.files import FileError, digest_of, read_json, write_json
from tu_symmetry.reporting.grid import Grid

RESULTS = "results.json"


class Outcome:
    """What a function returns that ``tu-symmetry run`` can call.

    Attributes:
        results: numbers, texts, lists and dicts; what is not finite becomes None.
        headline: the same in one line.
        tables: to print.
    """

    def __init__(self, results: Mapping[str, Any], headline: str = "", tables: Sequence[Grid] = ()) -> None:
        self.results: dict[str, Any] = plain(results)
        self.headline = headline
        self.tables = tuple(tables)

    def save(self, folder: str | Path) -> None:
        """Write ``results.json``, sealed, whole or not at all."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tables = [grid.to_dict() for grid in self.tables]
        content = {"results": self.results, "headline": self.headline, "tables": tables}
        write_json(Path(folder) / RESULTS, content, seal=True)

    @classmethod
    def load(cls, folder: str | Path) -> Outcome:
        """Read what :meth:`save` wrote."""
        content, _ = read_json(Path(folder) / RESULTS)
        return cls(content["results"], content["headline"], [Grid(**grid) for grid in content["tables"]])


class Parts:
    """A folder of results, each in a sealed file of its own as soon as it is made: a command that was cut resumes.

    ``made_from`` is everything that the parts depend on, as JSON can hold it (of tensors :func:`digest_tensors`). A
    part that was made from something else is an error, and stays as it is.
    """

    def __init__(self, folder: Path, made_from: Any) -> None:
        self.folder = folder
        self.key = digest_of(plain(made_from))

    def path(self, name: str) -> Path:
        """The file of a part; slashes in its name become dashes."""
        return self.folder / f"{name.replace('/', '-')}.json"

    def take(self, name: str, make: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """The part, made by ``make(*arguments)`` and kept if it is not there."""
        path = self.path(name)
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, {"made_from": self.key, "part": plain(make(*arguments))}, seal=True)
        content: dict[str, Any] = read_json(path)[0]
        if content.get("made_from") != self.key:
            raise FileError(
                f"{path} was made with other options, or from other networks or data: move {self.folder} away, or "
                "write to another folder (out)"
            )
        return content["part"]


def plain(value: Any) -> Any:
    """Results as JSON can hold them: tensors become lists, numbers that are not finite become None."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def digest_tensors(*tensors: Tensor) -> str:
    """Digest of the shapes, dtypes and contents of tensors, in their order."""
    digest = hashlib.sha256()
    for t in tensors:
        held = t.detach().cpu().contiguous()
        digest.update(f"{tuple(held.shape)} {held.dtype} ".encode())
        digest.update(held.numpy().tobytes())
    return digest.hexdigest()
