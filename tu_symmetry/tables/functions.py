"""``tu-symmetry run``: functions that are no training runs, with the conventions of LightningCLI.

A configuration names a function that returns an :class:`~tu_symmetry.tables.outcome.Outcome`, and its arguments::

    command: {class_path: tu_symmetry.experiments.compact_posterior.interpolate, init_args: {out: $root/$name, ...}}
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from tu_symmetry.configs import ConfigError, resolve
from tu_symmetry.tables.outcome import Outcome

OUT = "$root/$name"
_FOLDER = re.compile(r"\$(root|name|data_root)\b")
_NOISE = re.compile(
    r"(Does not validate|Subtypes:|Errors:|Given value|(- )?Expected a <class 'NoneType'>|- Expected a path but)"
)


class OneLineParser(ArgumentParser):
    """A parser that ends with one line, and without the usage of all options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the cause in one line and end with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        lines = [line.strip() for line in message.splitlines() if line.strip() and not _NOISE.match(line.strip())]
        text = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", " ".join(lines))
        text = re.sub(r"(?:- )?Problem with given class_path '(?:[\w.]+\.)?(\w+)':", r"\1:", text)
        text = re.sub(r"Parser key \"([\w.+]+)\":", r"\1:", text)
        cut = text if len(text) < 600 else f"{text[:600]} ..."
        if os.environ.get("RANK", "0") == "0":  # the first of several processes says it
            print(f"{self.prog.replace(' [options]', '')}: {cut}", file=sys.stderr)
        sys.exit(2)


def add_folders(parser: ArgumentParser) -> None:
    """The options that fill ``$root``, ``$name`` and ``$data_root`` in."""
    parser.add_argument("--root", type=str, default="runs", help="folder of the runs, $root in a configuration")
    parser.add_argument(
        "--name", type=str, default="", help="of the run, $name in a configuration (default: its last file's name)"
    )
    parser.add_argument("--data_root", type=str, default="data", help="folder of data sets, $data_root")


def with_folders(config: Namespace) -> Namespace:
    """The parsed configuration with the folders filled in, wherever they stand."""
    files = [str(path) for path in config.get("config") or () if path is not None]
    folders = {key: str(config[key]) for key in ("root", "name", "data_root")}
    folders["name"] = folders["name"] or (Path(files[-1]).stem if files else "")

    def folder(found: re.Match[str]) -> str:
        if not folders[found[1]]:
            raise ConfigError(f"{found.string!r} in the configuration: say what {found[0]} is (--{found[1]} ...)")
        return folders[found[1]]

    def filled(value: Any) -> Any:
        if isinstance(value, Namespace):
            return Namespace({key: filled(inner) for key, inner in vars(value).items()})
        if isinstance(value, Mapping):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(filled, value))
        if isinstance(value, str | Path) and _FOLDER.search(str(value)):
            return type(value)(_FOLDER.sub(folder, str(value)))
        return value

    found: Namespace = filled(config)
    return found


def build_parser() -> ArgumentParser:
    """The parser of ``tu-symmetry run``; what does not return an Outcome is refused before it is called."""
    parser = OneLineParser(
        prog="tu-symmetry run",
        description="Calls a function that a YAML file names, prints what it found and writes it to results.json.",
    )
    parser.add_argument("-c", "--config", action="config", help="YAML file; may be repeated, the later overrides")
    parser.add_argument("--seed_everything", type=int, default=0, help="seed of all random numbers (default: 0)")
    add_folders(parser)
    parser.add_subclass_arguments(Outcome, "command", required=True)
    return parser


def run_function(arguments: Sequence[str]) -> Outcome:
    """Parse, seed, call, and write the results to the function's ``out`` folder if it has one."""
    from lightning.pytorch import seed_everything

    config = with_folders(build_parser().parse_args(list(arguments)))
    seed_everything(config.seed_everything, verbose=False)
    # the classes among the arguments are instantiated apart from the call, whose errors are then its own
    function = resolve(config.command.class_path)
    caller = ArgumentParser()
    caller.add_function_arguments(function, "arguments")
    given = caller.instantiate(caller.parse_object({"arguments": config.command.init_args})).arguments
    outcome: Outcome = function(**given)
    folder = config.command.init_args.get("out")
    if folder is not None:
        outcome.save(str(folder))
    return outcome
