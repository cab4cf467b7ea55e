"""Configurations as plain values: safe YAML, ``KEY=VALUE`` words, checked dataclasses, objects by their dotted names.

What a configuration names is imported and called: it is trusted like code. What cannot be used is a ConfigError.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class ConfigError(ValueError):
    """A recipe, an option or a run folder that cannot be used; the message says where and what to do."""


def parse(config_class: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a config dataclass from plain values, with type checks; ``where`` names them in an error."""
    from jsonargparse import ArgumentError, ArgumentParser

    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping of keys to values, got {values!r}")
    names = [f.name for f in dataclasses.fields(config_class)]  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"{where}: unknown key {key!r}{hint}; the keys are {', '.join(sorted(names))}")
        if value is None:
            raise ConfigError(f"{where}: {key} has no value; give one, or leave the key out for the default")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(config_class)
    try:
        parsed = parser.instantiate(parser.parse_object(dict(values)))
    except ArgumentError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
    return config_class(**vars(parsed))


def resolve(path: str) -> Any:
    """The object with a dotted name: ``package.module.name``, ``module:name``, also an attribute of a class."""
    parent, _, name = path.replace(":", ".").rpartition(".")
    if not parent or not name:
        raise ConfigError(f"cannot import {path!r}: it is no dotted name, such as package.module.name")
    try:
        holder: Any = importlib.import_module(parent)
    except Exception as error:  # a module that fails when it is imported can raise anything
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing and f"{parent}.".startswith(f"{missing}."):  # a class, or nothing
            if "." not in parent:
                said = f"there is no module {parent!r}; install it, or run where it can be imported"
                raise ConfigError(f"cannot import {path!r}: {said}") from None
            holder = resolve(parent)
        else:
            said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
            raise ConfigError(f"cannot import {path!r}: importing {parent} fails: {said}") from error
    if not hasattr(holder, name):
        raise ConfigError(f"cannot import {path!r}: {parent} has no {name!r}")
    return getattr(holder, name)


def parse_assignments(texts: Iterable[str], option: str) -> dict[str, Any]:
    """``KEY=VALUE`` words that were given to an option; the last of several with one key counts."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{option}: {text!r} is not KEY=VALUE")
        values[key] = parse_value(value, f"{option} {text}")
    return values


def parse_value(text: str, where: str) -> Any:
    """A value of a command line: a Python literal (``(3, 4)``, ``1e-3``, ``None``), else YAML (``true``, ``[a, b]``).

    A plain word stays a string (``resnet18``, ``runs/a b``), and quotes make anything one.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None if text.lower() == "none" else read_yaml(text, where)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, where YAML keeps the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"the key {key!r} stands twice (line {line} and below)")
        return super().construct_mapping(node, deep)


def read_yaml(content: str | bytes, where: str) -> Any:
    """Plain values from YAML text; a key that stands twice in one mapping is refused."""
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return yaml.load(text, _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is no text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no valid YAML: {' '.join(str(error).split())}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping of keys to values."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing: table.yaml names it")
    values = read_yaml(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, it holds {type(values).__name__}")
    return values
