"""Runs the stages of a recipe in order: skips what is done, reruns what a change touches, resumes what was cut off.

Each stage works in ``<run folder>/<stage>.partial`` and is renamed to ``<run folder>/<stage>`` when it is done. Its
``stage.json`` holds the results and a fingerprint: a hash of the stage's kind, version and options, of data, model and
seed, and of the fingerprints of its inputs. A stage whose fingerprint is unchanged is skipped; a partial folder with
the right fingerprint is handed to the stage again, which goes on from the files in it; others are made anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tu_symmetry.tables.data import Data, load_data
from tu_symmetry.tables.environment import describe_environment
from tu_symmetry.tables.progress import Display
from tu_symmetry.tables.recipe import Recipe, RecipeError, load_recipe, parse
from tu_symmetry.tables.stage import Input, Results, StageContext, StageKind, stage_kind

MARK = "stage.json"


@dataclasses.dataclass(frozen=True)
class _Step:
    name: str
    kind: StageKind
    options: Any
    inputs: dict[str, str]
    fingerprint: str


def run_table(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    data_root: str | Path = "data",
    device: str = "cpu",
    overrides: Sequence[str] = (),
    fresh: bool = False,
    display: Display | None = None,
) -> dict[str, Results]:
    """Run a recipe folder.

    Args:
        folder: the recipe folder.
        out: run folder; ``runs/<recipe>`` by default.
        data_root: folder of data sets; what is missing there is downloaded.
        device: ``cpu`` or ``cuda``.
        overrides: ``key=value`` strings, see :func:`~tu_symmetry.tables.recipe.load_recipe`.
        fresh: run every stage again, whatever has been done.
        display: where progress is shown; the terminal by default.

    Returns:
        Stage name to its results.

    Raises:
        RecipeError: a recipe or override that cannot be used, foreign files in the run folder, no such device.
    """
    recipe = load_recipe(folder, overrides)
    run_folder = Path(out) if out is not None else Path("runs") / recipe.name
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RecipeError(
            f"--device {device}: torch sees no CUDA device here; use --device cpu or a machine with a GPU"
        )
    display = display or Display()
    data = load_data(recipe.table.data, Path(data_root))
    steps = _plan(recipe, data)
    run_folder.mkdir(parents=True, exist_ok=True)
    with _lock(run_folder):
        return _run(recipe, steps, run_folder, data, Path(data_root), torch.device(device), fresh, display)


def _plan(recipe: Recipe, data: Data) -> list[_Step]:
    steps: list[_Step] = []
    fingerprints: dict[str, str] = {}
    table = recipe.table
    for name, config in recipe.stages.items():
        where = str(recipe.folder / f"{name}.yaml")
        kind = stage_kind(config.stage)
        options = parse(kind.options, config.options, f"{where}: options")
        roles = {role.rstrip("?") for role in kind.inputs}
        required = {role for role in kind.inputs if not role.endswith("?")}
        if not required <= config.inputs.keys() <= roles:
            raise RecipeError(
                f"{where}: a {config.stage} stage has the inputs {', '.join(kind.inputs) or 'none'} "
                f"(? for optional), the file names {', '.join(config.inputs) or 'none'}"
            )
        content = {
            "stage": config.stage,
            "version": kind.version,
            "options": dataclasses.asdict(options),
            "seed": table.seed,
            "data": data.checksum,
            "model": dataclasses.asdict(table.model),
            "inputs": {role: fingerprints[source] for role, source in sorted(config.inputs.items())},
        }
        if kind.reads_table:
            content |= {"paper": table.paper, "title": table.title, "note": table.note, "source": table.source}
        text = json.dumps(content, sort_keys=True, default=str)
        fingerprints[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
        steps.append(_Step(name, kind, options, dict(config.inputs), fingerprints[name]))
    return steps


def _run(
    recipe: Recipe,
    steps: list[_Step],
    run_folder: Path,
    data: Data,
    data_root: Path,
    device: torch.device,
    fresh: bool,
    display: Display,
) -> dict[str, Results]:
    results: dict[str, Results] = {}
    resident = data.to(device)
    environment = describe_environment(device)
    marks = {step.name: _read_mark(run_folder / step.name) for step in steps}
    done = [s.name for s in steps if not fresh and (marks[s.name] or {}).get("fingerprint") == s.fingerprint]
    display.plan(recipe.table.title, [s.name for s in steps], done)
    for number, step in enumerate(steps):
        final = run_folder / step.name
        mark = marks[step.name]
        if step.name in done:
            assert mark is not None
            results[step.name] = mark["results"]
            display.skipped(step.name)
            continue
        partial = final.with_name(f"{step.name}.partial")
        old = _read_mark(partial)
        resumed = old is not None and old["fingerprint"] == step.fingerprint and not fresh
        if not resumed:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _write_mark(partial, {"fingerprint": step.fingerprint, "status": "running"})
        context = StageContext(
            name=step.name,
            table=recipe.table,
            data=resident,
            device=device,
            folder=partial,
            inputs={role: Input(run_folder / source, results[source]) for role, source in step.inputs.items()},
            track=display.track,
            environment=environment,
            data_root=data_root,
        )
        following = next((s.name for s in steps[number + 1 :] if s.name not in done), None)
        with display.stage(step.name, resumed=resumed, following=following) as status:
            started, processor = time.perf_counter(), time.process_time()
            outcome = plain(step.kind.run(context, step.options))
            seconds = time.perf_counter() - started
            status.done(outcome)
        mark = {
            "fingerprint": step.fingerprint,
            "status": "done",
            "results": outcome,
            "seconds": round(seconds, 2),
            "processor_seconds": round(time.process_time() - processor, 2),
            "resumed": resumed,
            "environment": environment,
        }
        _write_mark(partial, mark)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        marks[step.name] = mark
        results[step.name] = outcome
        _write_results(recipe, run_folder, steps, marks, environment)
    _write_results(recipe, run_folder, steps, marks, environment)
    return results


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


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file under a temporary name and rename it."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def _write_results(
    recipe: Recipe, run_folder: Path, steps: list[_Step], marks: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    stages = {}
    for step in steps:
        mark = marks[step.name]
        if mark is not None and mark["fingerprint"] == step.fingerprint:
            keep = ("results", "seconds", "processor_seconds", "resumed", "environment")
            stages[step.name] = {"options": dataclasses.asdict(step.options)} | {k: mark.get(k) for k in keep}
    table = dataclasses.asdict(recipe.table)
    content = {"recipe": recipe.name, "table": table, "environment": environment, "stages": stages}
    write_json(run_folder / "results.json", plain(content))


def _write_mark(folder: Path, mark: Mapping[str, Any]) -> None:
    write_json(folder / MARK, mark)


def _read_mark(folder: Path) -> dict[str, Any] | None:
    if not folder.exists():
        return None
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        if "fingerprint" in mark and "status" in mark:
            return dict(mark)
    except (OSError, ValueError, TypeError):
        pass
    raise RecipeError(
        f"{folder} exists but holds no readable {MARK}, so this program did not write it or it is damaged; "
        "move it away, or give another run folder with --out"
    )


class _lock:
    """Keeps two processes from writing one run folder; the operating system frees it however the process ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"

    def __enter__(self) -> None:
        import fcntl

        self.file = self.path.open("w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise RecipeError(
                f"{self.path.parent} is in use by another run; wait for it, or give another run folder with --out"
            ) from None

    def __exit__(self, *_: object) -> None:
        self.file.close()
