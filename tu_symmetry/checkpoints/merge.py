"""One network from checkpoint files: aligned, averaged, its statistics corrected, written with a report.

While it works, the folder ``NAME.merging`` beside the result holds what moves networks and the scores found so far:
after an interruption the same command goes further. ``NAME.report.md`` and ``NAME.report.json`` say what each step is
worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.consensus import Reference
from tu_symmetry.alignment.merging import Merged, Weights, merge
from tu_symmetry.alignment.networks import StateSource
from tu_symmetry.alignment.over import Over
from tu_symmetry.alignment.repair import Correction
from tu_symmetry.checkpoints.data import CROSS_ENTROPY, Data, check_loss
from tu_symmetry.checkpoints.files import (
    MOVED,
    Checkpoint,
    Track,
    alone_in,
    check_checkpoints,
    moved_text,
    open_checkpoint,
    owned_header,
    refuse_foreign,
    sha256,
    silent,
    verified_groups,
    write_owned,
)
from tu_symmetry.evaluation import accuracy
from tu_symmetry.files import (
    LOCK,
    SCRATCH,
    FileError,
    clear_scratch,
    digest_of,
    layouts_of,
    read_tensors,
    remove_folder,
    without_nan,
    write_json,
    write_text,
)
from tu_symmetry.processes import by_first, rank
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.graph import SymmetryGraph

MARK = "Networks merged by tu-symmetry"
STEPS = {
    "naive": "averaged as they are",
    "naive_corrected": "averaged as they are, statistics corrected",
    "aligned": "aligned and averaged",
    "corrected": "statistics corrected",
}


def merge_files(
    graph: SymmetryGraph,
    checkpoints: Sequence[Path],
    out: Path,
    model: nn.Module,
    *,
    data: Data | None = None,
    loss: str = CROSS_ENTROPY,
    weights: Weights = "equal",
    correction: Correction = "none",
    reference: Reference | Path = "first",
    over: Sequence[Over] = ("permutations",),
    prefix: str = "",
    track: Track = silent,
) -> Merged:
    """Merge checkpoint files into one, by the words of :func:`tu_symmetry.merge`.

    An ``out`` that an earlier run wrote is replaced. ``data`` and ``loss``, a dotted name, are for statistics and
    scores.
    """
    if out.suffix != ".safetensors" or out.is_dir():
        raise FileError(f"{out} is no name for the merged network: give a file NAME.safetensors")
    if len(checkpoints) < 2:
        raise FileError(f"merging needs at least two checkpoints, got {len(checkpoints)}")
    if data is not None and all(t.is_meta for t in model.parameters()):
        raise FileError("--narrow builds the network without weights, and --data measures it; leave one of them out")
    if data is None and correction != "none":
        raise FileError("corrections measure networks on data: pass --data")
    reports = [out.with_name(f"{out.stem}.report{suffix}") for suffix in (".md", ".json")]
    working = out.with_name(f"{out.stem}.merging")
    inputs = [*checkpoints, reference] if isinstance(reference, Path) else checkpoints
    refuse_foreign([out], dict.fromkeys(reports, MARK), inputs, folders=[working])
    function = None if data is None else check_loss(model, data, loss, correction)
    graph = verified_groups(graph, over, track)
    files = check_checkpoints(graph, checkpoints, prefix, track)
    if data is not None:
        _check_precision(model, open_checkpoint(graph, files[0].path, prefix), files[0].path)
    made_of = {
        "architecture": graph.architecture,
        "files": [file.sha256 for file in files],
        "reference": sha256(reference) if isinstance(reference, Path) else reference,
        "options": [prefix, correction, loss, *sorted(over)],
        "data": None if data is None else data.digest,
    }
    classes = data is not None and not data.evaluation[0][1].is_floating_point() and loss.endswith("cross_entropy")
    metrics: dict[str, Any] = {"accuracy": accuracy} if classes else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    with working_folder(working, made_of) as kept, track("measuring, aligning and averaging", len(files)) as tracker:
        by_first(lambda: clear_scratch(out.parent, of={path.name for path in (out, *reports, working)}))
        merged = merge(
            graph,
            StateSource([file.path for file in files], prefix=prefix, lazily=True),
            model,
            None if data is None else data.statistics,
            correction=correction,
            weights=weights,
            reference=open_checkpoint(graph, reference, prefix) if isinstance(reference, Path) else reference,
            over=over,
            loss=function,
            metrics=metrics,
            validation=None if data is None else data.evaluation,
            resume=kept,
            progress=lambda at: tracker.update(at["done"], what=at["step"]),
        )

        def write() -> None:
            report = {"model": graph.architecture, **_report(merged, files, reference, data, loss)}
            grid = merge_grid(merged, [f.path for f in files], graph.architecture)
            write_owned(out, merged.state, {"merged": report})
            write_json(reports[1], {"what": MARK, **report})
            write_text(reports[0], f"# {MARK}\n\n{grid.markdown()}\n")

        by_first(write)
    return merged


def _report(
    merged: Merged, files: Sequence[Checkpoint], reference: Reference | Path, data: Data | None, loss: str
) -> dict[str, Any]:
    """What ``NAME.report.json`` and the head of the merged file say."""
    report: dict[str, Any] = without_nan(
        {
            "files": [{"path": str(f.path), "sha256": f.sha256} for f in files],
            "weights": merged.weights,
            "reference": str(reference),
            "correction": merged.correction,
            "over": list(merged.over),
            "transpositions": merged.transpositions,
            "moved": [move.counts() for move in merged.moves],
            "data": None if data is None else {"name": data.name, "num_samples": data.num_samples, "loss": loss},
            "members": merged.members,
            "scores": merged.scores,
            "barriers": merged.barriers,
            "ensemble": merged.ensemble,
            "verdict": merged.verdict,
        }
    )
    return report


class Kept(dict[str, Any]):
    """What a merge has found so far, tensors or numbers by name, each piece in a sealed file that says what it is.

    Args:
        folder: the folder of the pieces.
        made_of: all that they depend on; pieces of anything else count as not there.
    """

    def __init__(self, folder: Path, made_of: Any) -> None:
        super().__init__()
        self.folder, self.made_of = folder, digest_of(made_of)
        for path in sorted(folder.glob("*.safetensors")):
            header = owned_header(path) or {}
            try:
                held = read_tensors(path)
            except FileError as error:
                raise FileError(f"{error} (deleting it has it found again)") from error
            if header.get("made_of") == self.made_of:
                found = {name: held[name] for name in header["names"]}  # in the order in which they came
                super().__setitem__(header["key"], {n: t if t.ndim else t.item() for n, t in found.items()})

    def __setitem__(self, key: str, value: Mapping[str, Tensor | float]) -> None:
        tensors = {
            n: t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64, device="cpu")
            for n, t in value.items()
        }
        header = {"key": key, "made_of": self.made_of, "names": list(value)}
        write_owned(self.folder / f"{digest_of(key)}.safetensors", tensors, header)
        super().__setitem__(key, value)


@contextmanager
def working_folder(folder: Path, made_of: Any) -> Iterator[Kept]:
    """What a merge keeps while it works, in a locked folder, which goes when the block ends without an error."""
    if folder.exists() and not (folder.is_dir() and all(map(_own, folder.iterdir()))):
        raise FileError(f"{folder} was not written by this command; move it away or choose another --out")
    folder.mkdir(exist_ok=True)
    with alone_in(folder):
        kept = Kept(folder, made_of)
        try:
            yield kept
        except BaseException:
            if not kept and rank() == 0:  # it failed before anything was found
                remove_folder(folder)
            raise
        by_first(lambda: remove_folder(folder))


def _own(path: Path) -> bool:
    """Whether a file of a working folder is of this command, or was left by a process that was killed there."""
    return path.name == LOCK or SCRATCH.fullmatch(path.name) is not None or owned_header(path) is not None


def _check_precision(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Networks are measured with their own weights on data in the precision of the module."""
    wanted = {t.dtype for t in model.state_dict().values() if t.is_floating_point()}
    found = {dtype for _, dtype in layouts_of(state).values() if dtype.is_floating_point}
    if wanted != found:
        names, own = (", ".join(sorted(str(t).removeprefix("torch.") for t in kinds)) for kinds in (found, wanted))
        raise FileError(f"{path} holds {names}, and the network and its data are {own}: pass --dtype {names}")


def merge_grid(merged: Merged, names: Sequence[Path], model: str) -> Grid:
    """A row for each network and for each step: weight, NoT, scores; the caption says of what network."""
    keys = list(merged.members[0]) if merged.members else []
    others = [MOVED] if len(merged.over) > 1 else []
    header = ["", "weight", "NoT", *others, *keys, *(["barrier"] if keys else [])]
    rows = []
    for k, name in enumerate(names):
        scores = [f"{merged.members[k][key]:.4f}" for key in keys] + [""] * bool(keys)
        moved = [moved_text(merged.moves[k].counts()) for _ in others]
        rows.append([str(name), f"{merged.weights[k]:.3g}", str(merged.transpositions[k]), *moved, *scores])
    blank = ["", "", *("" for _ in others)]
    if merged.ensemble:
        rows.append(["ensemble of all", *blank, *(f"{merged.ensemble[key]:.4f}" for key in keys), ""])
    for step, found in merged.scores.items():
        scores = [f"{found[key]:.4f}" for key in keys]
        rows.append([STEPS[step], *blank, *scores, f"{merged.barriers[step]:.4f}"])
    said = f"{model}, correction: {merged.correction}"
    if keys:
        said += f"; barrier: by how much the loss exceeds the weighted mean of the networks' own; {merged.verdict}"
    return Grid("Merged network", header, rows, said)
