"""A table as a list of commands: what a reader would type one after the other, skipped where it is done.

A command is skipped if its configuration and inputs are those of a finished run and its files are untouched; a training
that was cut goes on from its last checkpoint. A finished command leaves ``.table/NAME.json`` in the run folder: a
fingerprint of its configuration and inputs, the digest of every file that it wrote, and its time.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from tu_symmetry.configs import ConfigError, read_mapping
from tu_symmetry.files import (
    clear_scratch,
    digest_file,
    digest_folder,
    digest_of,
    lock_folder,
    read_json,
    remove_folder,
    write_json,
)
from tu_symmetry.reporting.environment import describe_environment
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.crew import Crew
from tu_symmetry.tables.functions import OUT
from tu_symmetry.tables.outcome import plain

Subcommand = Literal["fit", "validate", "test", "predict", "run"]
MARKS = ".table"


@dataclass(frozen=True)
class CommandConfig:
    """One command of a table.

    Attributes:
        name: its folder below the run folder.
        command: subcommand of ``tu-symmetry``.
        config: YAML files, as paths from the recipe folder; the later ones override the earlier.
        needs: names of the earlier commands whose files it reads.
        set: dotted flag to value, over the files: one file can serve several rows.
        copies: run it so often, as ``NAME_0``, ``NAME_1`` and so on; ``needs: [NAME]`` means all of them.
        seeds: the flags whose values are the number of the copy.
        together: it trains the members of a :class:`~tu_symmetry.routines.MembersRoutine`, which the processes that
            ``torchrun`` starts share; without it, one of them runs it, while others run other commands.
    """

    name: str
    command: Subcommand
    config: str | list[str]
    needs: list[str] = field(default_factory=list)
    set: dict[str, Any] = field(default_factory=dict)
    copies: int = 0
    seeds: list[str] = field(default_factory=lambda: ["seed_everything"])
    together: bool = False


@dataclass(frozen=True)
class CommandTable:
    """``table.yaml`` of a recipe.

    Attributes:
        title: heading of the report.
        root: the run folder, unless another one is given.
        commands: in the order in which they run.
        bases: subcommand to the YAML files that come before each of its commands' own.
        source: the paper's table or figure that this one reproduces.
        note: what was reduced against the paper, and why.
        paper: the paper's numbers, row to column to value; in the file also the ``table.yaml`` that has them.
        claims: what the paper says of them, name to sentence; the report answers each.
        rehearsal: for :func:`~tu_symmetry.tables.rehearsal.rehearse`, by command (copies share one): ``set``, flags
            that make it short; ``times``, how often the work and the files of what is left are in the whole;
            ``step_times``, the same of one training step.
    """

    title: str
    root: str
    commands: list[CommandConfig]
    bases: dict[Subcommand, list[str]] = field(default_factory=dict)
    source: str = ""
    note: str = ""
    paper: dict[str, dict[str, float | None]] = field(default_factory=dict)
    claims: dict[str, str] = field(default_factory=dict)
    rehearsal: dict[str, dict[str, Any]] = field(default_factory=dict)


def load_table(folder: str | Path) -> CommandTable:
    """Read and check a recipe folder; copies are commands of their own, and files are with their bases."""
    from jsonargparse import ArgumentError, ArgumentParser

    path = Path(folder) / "table.yaml"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(CommandTable)
    given = {key: value for key, value in read_mapping(path).items() if value is not None}
    if isinstance(given.get("paper"), str):
        given["paper"] = read_mapping(path.parent / given["paper"]).get("paper", {})
    try:
        table = CommandTable(**vars(parser.instantiate(parser.parse_object(given))))
    except ArgumentError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if strangers := set(table.rehearsal) - {command.name for command in table.commands}:
        raise ConfigError(f"{path}: rehearsal names {sorted(strangers)}, which are no commands")
    copies: dict[str, list[str]] = {}
    commands: list[CommandConfig] = []
    for command in table.commands:
        where = f"{path}: command {command.name!r}"
        if command.name in copies or not re.fullmatch(r"[\w-]+", command.name):
            raise ConfigError(f"{where}: names are letters, digits, - and _, and each stands once")
        if command.together and command.command != "fit":
            raise ConfigError(f"{where}: together is for a training (fit), which {command.command} is not")
        if unknown := [name for name in command.needs if name not in copies]:
            raise ConfigError(f"{where} needs {unknown[0]!r}, which is no earlier command (there: {', '.join(copies)})")
        own = [command.config] if isinstance(command.config, str) else command.config
        files = [*table.bases.get(command.command, ()), *own]
        flag = "command.init_args.out" if command.command == "run" else "trainer.default_root_dir"
        values: list[Any] = [read_mapping(path.parent / file) for file in files]
        for key in flag.split("."):
            values = [value[key] for value in values if isinstance(value, Mapping) and key in value]
        if (found := command.set.get(flag, values[-1] if values else None)) != OUT:
            raise ConfigError(f"{where} ({', '.join(files)}): {flag} is {found!r}, it must be {OUT!r}")
        needs = [copy for name in command.needs for copy in copies[name]]
        made = replace(command, config=files, needs=needs, copies=0, seeds=[])
        copies[command.name] = [f"{command.name}_{k}" for k in range(command.copies)] or [command.name]
        for k, name in enumerate(copies[command.name]):
            seeds = dict.fromkeys(command.seeds if command.copies else (), k)
            commands.append(replace(made, name=name, set=made.set | seeds))
    if not commands:
        raise ConfigError(f"{path}: 'commands' must list the commands in order")
    return replace(table, commands=commands)


def typed(folder: Path, command: CommandConfig, root: Path, data_root: str | Path | None = None) -> list[str]:
    """What is typed after ``tu-symmetry`` for one command of a recipe folder."""
    folders = [f"--root={root}", f"--name={command.name}", *([] if data_root is None else [f"--data_root={data_root}"])]
    files = [f"--config={Path(os.path.normpath(folder / file))}" for file in command.config]
    return [command.command, *files, *folders, *_dotted(command.set)]


def _dotted(values: Mapping[str, Any]) -> list[str]:
    dumped = {key: yaml.safe_dump(value, default_flow_style=True) for key, value in values.items()}
    return [f"--{key}={text.removesuffix('...' + chr(10)).strip()}" for key, text in dumped.items()]


def parse_overrides(table: CommandTable, overrides: Sequence[str]) -> dict[str, list[str]]:
    """The flags ``--FLAG=VALUE`` of each command, of ``NAME.FLAG=VALUE``."""
    flags: dict[str, list[str]] = {command.name: [] for command in table.commands}
    for override in overrides:
        key, separator, value = override.partition("=")
        name, _, flag = key.strip().partition(".")
        if not separator or not flag or name not in flags:
            raise ConfigError(
                f"--set {override!r}: write NAME.FLAG=VALUE with a command of this recipe ({', '.join(flags)}) and one "
                "of its flags, for example hmc.routine.num_samples=100"
            )
        flags[name].append(f"--{flag}={value}")
    return flags


class TableInterrupted(Exception):
    """The time is over; the same call resumes from here."""


def run_commands(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    overrides: Sequence[str] = (),
    max_time: timedelta | None = None,
    display: Display | None = None,
) -> dict[str, dict[str, Any]]:
    """Run the commands of a recipe folder in order.

    Each of the processes that ``torchrun`` has started takes the next command whose ``needs`` are done; all return the
    results of all.

    Args:
        folder: the recipe folder.
        out: run folder; the recipe's own by default.
        data_root: folder of data sets, ``$data_root`` in the files; ``data`` by default.
        overrides: ``NAME.FLAG=VALUE``: ``hmc.routine.num_samples=100`` is ``--routine.num_samples=100`` of ``hmc``.
        max_time: stop after this long, a fit at the next point from which it resumes exactly (see
            :class:`~tu_symmetry.callbacks.LastCheckpoint`), anything else before it starts.
        display: where progress is shown; the terminal by default.

    Returns:
        Name of each command to its results.
    """
    folder = Path(folder)
    table = load_table(folder)
    root = Path(out) if out is not None else Path(table.root)
    if root.resolve() == folder.resolve():
        raise ConfigError(f"{root} is the recipe, which a run would write into: choose another folder with --out")
    flags = parse_overrides(table, overrides)
    deadline = None if max_time is None else time.monotonic() + max_time.total_seconds()
    (root / MARKS).mkdir(parents=True, exist_ok=True)
    crew = Crew()
    run, over = _Run(folder, table, root, data_root, flags, deadline, display or Display(), crew), None
    with crew.at_work(), lock_folder(root) if crew.number == 0 else nullcontext():
        if crew.number == 0:
            clear_scratch(root)
        crew.all_here("the folder is ours")
        try:
            run.all()
        except TableInterrupted as interrupted:
            over = interrupted
        crew.all_here("the end")
    if over is not None:
        raise over
    return {command.name: run.marks[command.name]["results"] for command in table.commands}


@dataclass
class _Run:
    """One call of :func:`run_commands`; ``marks`` are those of the commands that are done, by name."""

    folder: Path
    table: CommandTable
    root: Path
    data_root: str | Path | None
    flags: Mapping[str, list[str]]
    deadline: float | None
    display: Display
    crew: Crew
    marks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def all(self) -> None:
        commands = self.table.commands
        self.display.console.print(self.table.title, style="bold")
        while left := [command for command in commands if command.name not in self.marks]:
            if not any([self._done(command, f"{commands.index(command) + 1} of {len(commands)}") for command in left]):
                self._require_time(left[0].name)
                self.crew.pause()

    def _done(self, command: CommandConfig, place: str) -> bool:
        """Whether a command is done, here and now or by another process."""
        name, crew = command.name, self.crew
        if said := crew.said(f"{name} is done"):
            self.marks[name] = self._read_mark(name) or {}
            self.display.done(name, said, self.marks[name]["headline"])
        elif any(needed not in self.marks for needed in command.needs) or crew.meeting() not in ("", name):
            return False
        elif command.together and crew.count > 1:
            if crew.meeting(name) == name:
                with crew.met():
                    self._meet(command, place)
            if name not in self.marks:  # it is read when the first process says that it is done
                return False
        elif crew.first(f"{name} is taken", str(crew.number)) != str(crew.number):
            return False
        else:
            self._make(command, place)
        if crew.number == 0:
            self._write_results()
        return True

    def _make(self, command: CommandConfig, place: str, *, together: bool = False) -> None:
        """Run a command, unless that was done before, and tell the others."""
        said = "done before"
        if self._take(command):
            self.display.done(command.name, said)
        else:
            said = self._run(command, place, together)
        self.crew.say(f"{command.name} is done", said)

    def _meet(self, command: CommandConfig, place: str) -> None:
        """Run a command with all other processes; the first keeps its books."""
        if self.crew.number == 0:
            self._make(command, place, together=True)
            return
        while not (words := self.crew.said(f"{command.name} is run")):
            if self.crew.said(f"{command.name} is done"):
                return
            self.crew.pause()
        with self.crew.in_group(command.name):
            found = _execute(json.loads(words), self.deadline)
        if found is None:
            self._require_time(command.name)

    def _require_time(self, name: str) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise TableInterrupted(f"the time is over; the same command resumes with {name}")

    def _fingerprint(self, command: CommandConfig) -> str:
        flags = [*_dotted(command.set), *self.flags[command.name]]
        more = [Path(flag.partition("=")[2]) for flag in flags if flag.startswith("--config=")]
        return digest_of(
            {
                "command": command.command,
                "config": [read_mapping(self.folder / file) for file in command.config],
                "flags": flags,
                "more": {str(path): digest_file(path) for path in more if path.is_file()},
                "needs": {name: self.marks[name]["files"] for name in command.needs},
            }
        )

    def _take(self, command: CommandConfig) -> bool:
        """Whether a command is done: its configuration is the same and its files are as they were written."""
        mark = self._read_mark(command.name)
        if mark is None or mark["status"] != "done" or mark["fingerprint"] != self._fingerprint(command):
            return False
        target = self.root / command.name
        found = digest_folder(target)
        if found == mark["files"]:
            self.marks[command.name] = mark
        elif found:
            aside = target.with_name(f"{command.name}.changed-{time.time_ns()}")
            target.rename(aside)
            self.display.note(f"{command.name} is made again, since files in it were changed; they are now in {aside}")
        return command.name in self.marks

    def _read_mark(self, name: str) -> dict[str, Any] | None:
        path = self.root / MARKS / f"{name}.json"
        return read_json(path)[0] if path.exists() else None

    def _mark(self, name: str, **mark: Any) -> dict[str, Any]:
        write_json(self.root / MARKS / f"{name}.json", plain(mark), seal=True)
        return plain(mark)

    def _run(self, command: CommandConfig, place: str, together: bool) -> str:
        target, name = self.root / command.name, command.name
        fingerprint, old = self._fingerprint(command), self._read_mark(name)
        if target.exists() and old is None:
            raise ConfigError(
                f"{target} is there, and this table has not made it: move it away, or give another run folder (--out)"
            )
        resumed = old is not None and old["fingerprint"] == fingerprint and target.is_dir()
        checkpoints = list(target.rglob("last*.ckpt")) if resumed and command.command == "fit" else []
        resumed = resumed and (command.command == "run" or bool(checkpoints))  # else cut before there was one
        if resumed:
            clear_scratch(target, recursive=True)
        elif target.exists():
            remove_folder(target)
        spent = old["seconds"] if resumed and old else 0.0
        self._mark(name, fingerprint=fingerprint, seconds=spent, status="running")
        self._require_time(name)
        words = [*typed(self.folder, command, self.root, self.data_root), *self.flags[name]]
        words += [f"--ckpt_path={path}" for path in sorted(checkpoints, key=lambda p: p.stat().st_mtime)[-1:]]
        self.display.started(name, place, resumed=resumed)
        started = time.perf_counter()
        if together:
            self.crew.say(f"{name} is run", json.dumps(words))
        with self.crew.in_group(name) if together else self.crew.alone(name):
            found = _execute(words, self.deadline)
        seconds = round(spent + time.perf_counter() - started, 2)
        if found is None:
            self._mark(name, fingerprint=fingerprint, seconds=seconds, status="running")
            raise TableInterrupted(f"the time is over; the same command resumes with {name}")
        self.display.done(name, said := f"{seconds:.1f} s", found["headline"])
        files = digest_folder(target)
        if not files:
            raise ConfigError(f"{name} has written nothing to {target}")
        made = {"fingerprint": fingerprint, "seconds": seconds, "status": "done", "resumed": resumed, "files": files}
        self.marks[name] = self._mark(name, **found, **made)
        return said

    def _write_results(self) -> None:
        keep = ("results", "headline", "seconds", "resumed")
        marks = {c.name: self.marks[c.name] for c in self.table.commands if c.name in self.marks}
        commands = {name: {key: mark[key] for key in keep} for name, mark in marks.items()}
        environment = describe_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        content = {"recipe": self.folder.name, "table": asdict(self.table), "environment": environment}
        write_json(self.root / "results.json", plain(content | {"commands": commands}), seal=True)


def _execute(words: list[str], deadline: float | None) -> dict[str, Any] | None:
    """Run a command in this process: its results and a line about them, or None for a fit that was cut."""
    from tu_symmetry.tables.functions import run_function
    from tu_symmetry.tables.lightning import OutOfTime, run_lightning  # loads TorchUncertainty

    if words[0] == "run":
        outcome = run_function(words[1:])
        tables = [grid.to_dict() for grid in outcome.tables]
        return {"results": outcome.results | {"tables": tables}, "headline": outcome.headline}
    try:
        trainer = run_lightning(words, deadline=deadline if words[0] == "fit" else None).trainer
    except OutOfTime:
        return None
    metrics = plain({name: value.item() for name, value in trainer.callback_metrics.items()})
    shown = [f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, float)]
    return {"results": {"metrics": metrics}, "headline": ", ".join(shown[:4])}
