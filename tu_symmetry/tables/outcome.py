"""What a command that trains no network has found: numbers, a line, tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tu_symmetry.files import read_json, write_json
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
        """Read what :meth:`save` wrote.

        Raises:
            FileError: a file that was changed or damaged.
            OSError: no such file: the command that makes it has not been run, or wrote elsewhere.
        """
        content, _ = read_json(Path(folder) / RESULTS)
        return cls(content["results"], content["headline"], [Grid(**grid) for grid in content["tables"]])


def plain(value: Any) -> Any:
    """Results as JSON can hold them: tensors become lists, numbers that are not finite become None."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
