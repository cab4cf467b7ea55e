"""Reference networks from the paper's published data set."""

from __future__ import annotations

from pathlib import Path

from tu_symmetry.posterior.published import CHECKPOINTS, collect_checkpoints
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.outcome import Outcome


def collect(
    out: Path, folder: str, source: str = CHECKPOINTS, *, start: int = 0, count: int | None = None, prefix: str = ""
) -> Outcome:
    """Stream a folder of published checkpoints into the sample store of a run.

    Args:
        out: folder of the run; the store is ``samples`` in it.
        folder: folder of the data set, see :func:`~tu_symmetry.posterior.published.list_checkpoints`.
        source: the data set, or a local copy of it.
        start: number of the first network.
        count: number of networks; all that follow by default.
        prefix: what stands before the names in the files.
    """
    with Display().track("checkpoints", count or 1) as tracker:
        store = collect_checkpoints(
            out / "samples",
            source,
            folder=folder,
            start=start,
            count=count,
            prefix=prefix,
            progress=lambda p: tracker.update(int(p["done"]), file=p["file"]),
        )
    return Outcome({"networks": len(store), "source": source, "folder": folder}, f"{len(store)} networks of {folder}")
