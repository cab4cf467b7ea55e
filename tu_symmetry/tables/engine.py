"""Runs the stages of a recipe in order: skips what is done, reruns what a change touches, resumes what was cut off.

Each stage works in ``<run folder>/<stage>.partial`` and is renamed to ``<run folder>/<stage>`` when it is done. Its
``stage.json`` holds the results and a fingerprint: a hash of the stage's kind, version and options, of data, model and
seed, and of the fingerprints of its inputs. A stage whose fingerprint is unchanged is skipped; a partial folder with
the right fingerprint is handed to the stage again, which resumes from the files in it; others are made anew.

A kill at any moment leaves something to go on from: a partial folder gets its name with its mark inside, a folder that
is to be deleted loses its name first, and a partial folder whose mark says ``done`` only has to be renamed. The mark
also holds the digests of the stage's files; a result that was changed, replaced or lost since is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tu_symmetry.configs import ConfigError, check_numbers, parse
from tu_symmetry.files import (
    FileError,
    FolderInUseError,
    clear_scratch,
    digest_file,
    digest_folder,
    lock_folder,
    new_folder,
    other_versions,
    read_json,
    remove_folder,
    write_json,
)
from tu_symmetry.reporting.environment import describe_environment
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.data import Data, load_data
from tu_symmetry.tables.outcome import plain
from tu_symmetry.tables.recipe import Recipe, load_recipe
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
        ConfigError: a recipe or override that cannot be used, foreign files in the run folder, a result in it that was
            changed after it was made, another run in it, no such device, a stage that refuses its options.
        OSError: a run folder that cannot be written, a full disk.
    """
    recipe = load_recipe(folder, overrides)
    if out is not None and not str(out).strip():
        raise ConfigError("--out is empty; name a run folder, or leave it out for runs/<recipe>")
    run_folder = Path(out) if out is not None else Path("runs") / recipe.name
    if next((p for p in (run_folder, *run_folder.parents) if p.exists() and not p.is_dir()), None):
        raise ConfigError(f"{run_folder} is a file or lies in one, and a run needs a folder; choose another with --out")
    where = _device(device)
    display = display or Display()
    data = load_data(recipe.table.data, Path(data_root))
    steps = _plan(recipe, data)
    run_folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock_folder(run_folder):
            clear_scratch(run_folder)
            return _run(recipe, steps, run_folder, data, Path(data_root), where, fresh, display)
    except FolderInUseError as error:
        raise ConfigError(f"{error} with --out") from None


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no CUDA device here; use --device cpu or a machine with a GPU")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).sum().item()  # a device that torch knows may still not be there
    except (RuntimeError, NotImplementedError, AssertionError, ImportError) as error:
        said = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"--device {name!r} cannot be used here; use cpu or cuda. torch said: {said}") from error
    return device


def _plan(recipe: Recipe, data: Data) -> list[_Step]:
    steps: list[_Step] = []
    fingerprints: dict[str, str] = {}
    table = recipe.table
    for name, config in recipe.stages.items():
        where = str(recipe.folder / f"{name}.yaml")
        kind = stage_kind(config.stage)
        options = parse(kind.options, config.options, f"{where}: options")
        check_numbers(options, f"{where}: options")
        roles = {role.rstrip("?") for role in kind.inputs}
        required = {role for role in kind.inputs if not role.endswith("?")}
        if not required <= config.inputs.keys() <= roles:
            raise ConfigError(
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
    if not fresh:
        for step in steps:
            _finish(step, run_folder)
    marks = {step.name: _read_mark(run_folder / step.name) for step in steps}
    done = [s.name for s in steps if not fresh and (marks[s.name] or {}).get("fingerprint") == s.fingerprint]
    for name in done:
        _check_files(run_folder / name, marks[name] or {})
    display.plan(recipe.table.title, [s.name for s in steps], done)
    for number, step in enumerate(steps):
        final = run_folder / step.name
        mark = marks[step.name]
        if step.name in done:
            assert mark is not None
            results[step.name] = mark["results"]
            unchecked = "" if "files" in mark else "; its files cannot be checked"
            other = other_versions(mark["written_by"])
            display.skipped(step.name, f"by {other}{unchecked}" if other else "")
            remove_folder(final.with_name(f"{step.name}.partial"))  # of a run with other options that was killed
            continue
        partial = final.with_name(f"{step.name}.partial")
        _set_unmarked_aside(partial, display)
        old = _read_mark(partial)
        resumed = old is not None and old["fingerprint"] == step.fingerprint and not fresh
        if resumed:
            clear_scratch(partial, recursive=True)
        else:
            remove_folder(partial)
            with new_folder(partial) as made:
                _write_mark(made, {"fingerprint": step.fingerprint, "status": "running"})
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
            outcome = plain(_stage_results(step, context))
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
        clear_scratch(partial, recursive=True)
        mark["files"] = digest_folder(partial, without=[MARK])
        _write_mark(partial, mark)
        _finish(step, run_folder)
        marks[step.name] = mark
        results[step.name] = outcome
        _write_results(recipe, run_folder, steps, marks, environment)
    _write_results(recipe, run_folder, steps, marks, environment)
    return results


def _stage_results(step: _Step, context: StageContext) -> Results:
    try:
        return step.kind.run(context, step.options)
    except ConfigError:
        raise
    except FileError as error:
        raise ConfigError(f"stage {step.name}: {error} (deleting {context.folder} starts the stage over)") from error
    except ValueError as error:  # what functions say about arguments that they cannot use
        raise ConfigError(f"stage {step.name}: {' '.join(str(error).split())}") from error


def _finish(step: _Step, run_folder: Path) -> None:
    """Give a stage that is done its name, also one that a killed run has left without."""
    partial, final = run_folder / f"{step.name}.partial", run_folder / step.name
    if not (partial / MARK).is_file():
        return
    mark = _read_mark(partial)
    if mark is not None and mark["status"] == "done" and mark["fingerprint"] == step.fingerprint:
        _read_mark(final)  # a foreign folder of that name is not ours to delete
        remove_folder(final)
        os.replace(partial, final)


def _check_files(folder: Path, mark: Mapping[str, Any]) -> None:
    """Refuse a result whose files are not those that the stage wrote."""
    for name, digest in mark.get("files", {}).items():
        path = folder / name
        if not path.is_file() or digest_file(path) != digest:
            state = "was changed or replaced after it was made" if path.is_file() else "is gone"
            raise ConfigError(
                f"{path} {state}: restore it, or delete the folder {folder} to have the stage run again (--fresh runs "
                "all of them)"
            )


def _set_unmarked_aside(partial: Path, display: Display) -> None:
    """A partial folder without a mark counts as empty; should something lie in it, it is kept under another name."""
    if not partial.is_dir() or (partial / MARK).exists():
        return
    clear_scratch(partial)
    try:
        partial.rmdir()
    except OSError:
        aside = partial.with_name(f"{partial.name}.{secrets.token_hex(4)}.unmarked")
        os.replace(partial, aside)
        display.note(f"{partial} holds no {MARK}, so nothing is known of it; it is now {aside}")


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
    write_json(folder / MARK, {**mark, "seal": True}, seal=True)


def _read_mark(folder: Path) -> dict[str, Any] | None:
    if not folder.exists():
        return None
    try:
        mark, written_by = read_json(folder / MARK)
        if {"fingerprint", "status"} <= mark.keys() and (written_by or "seal" not in mark):
            return {**mark, "written_by": written_by}
    except (OSError, FileError):
        pass
    raise ConfigError(
        f"{folder} exists but holds no readable {MARK}, so this program did not write it or it is damaged; "
        "move it away, or give another run folder with --out"
    )
