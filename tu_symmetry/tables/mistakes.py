"""What jsonargparse says of arguments that do not fit, in one line with the nearest name there is."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

# whose classes a YAML file may name without their module
ROOMS = ("tu_symmetry.callbacks", "tu_symmetry.routines", "tu_symmetry.datamodules")
_NOISE = re.compile(
    r"(Does not validate|Subtypes:|Errors:|Given value|(- )?Expected a <class 'NoneType'>|- Expected a path but)"
)
_OPTION = re.compile(r"Problem with given class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted")
_UNKNOWN = re.compile(r"(?i)(?:unrecognized arguments: |Key ['\"]|Option ['\"])(?:--)?([\w.]+)")
_NO_CLASS = re.compile(r"Expected a dot import path string: ([\w.]+)")


class OneLineParser(ArgumentParser):
    """A parser that ends with one line, and without the usage of all options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the line and end with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        print(f"{self.prog.replace(' [options]', '')}: {in_one_line(message, self)}", file=sys.stderr)
        sys.exit(2)


def in_one_line(message: str, parser: argparse.ArgumentParser) -> str:
    """The cause in a message of a parser of jsonargparse, and the nearest name."""
    if found := _OPTION.search(message):
        path, option = found.groups()
        return f"{path.rpartition('.')[2]} has no argument {option!r}{_nearest(option, _arguments(path))}"
    if found := _NO_CLASS.search(message):
        names = [name for room in ROOMS for name in importlib.import_module(room).__all__]
        return f"there is no class {found[1]!r}{_nearest(found[1], names)} (its module stands before it: package.Class)"
    kept = [line.strip() for line in message.splitlines() if line.strip() and not _NOISE.match(line.strip())]
    text = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", " ".join(kept))
    text = re.sub(r"(?:- )?Problem with given class_path '(?:[\w.]+\.)?(\w+)':", r"\1:", text)
    text = re.sub(r"Parser key \"([\w.+]+)\":", r"\1:", text)
    unknown = _UNKNOWN.search(text)
    hint = _nearest(unknown[1], set(_options(parser))) if unknown else ""
    return (text if len(text) < 600 else f"{text[:600]} ...") + hint


def _nearest(name: str, names: Collection[str]) -> str:
    found = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Names of all options, without dashes, of the parser and its subcommands'."""
    for action in parser._actions:
        yield from (option.lstrip("-") for option in action.option_strings)
        choices: Any = action.choices
        for inner in getattr(choices, "values", tuple)():
            if isinstance(inner, argparse.ArgumentParser):
                yield from _options(inner)


def _arguments(path: str) -> set[str]:
    """Names of the arguments of a class or function, those of the classes that it inherits from included."""
    module, _, name = path.rpartition(".")
    made = getattr(importlib.import_module(module), name)
    sources = [vars(c)["__init__"] for c in made.__mro__ if "__init__" in vars(c)] if inspect.isclass(made) else [made]
    return {p.name for s in sources for p in inspect.signature(s).parameters.values() if p.kind < p.VAR_KEYWORD}
