"""Configurations as plain values: safe YAML, ``KEY=VALUE`` words, objects by their dotted names.

What a configuration names is imported and called: it is trusted like code. What cannot be used is a ConfigError.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """A recipe, an option or a run folder that cannot be used; the message says where and what to do."""


def resolve(path: str) -> Any:
    """The object with a dotted name: ``package.module.name``, ``module:name``, also an attribute of a class."""
    parent, _, name = path.replace(":", ".").rpartition(".")
    try:
        try:
            holder: Any = importlib.import_module(parent)
        except ModuleNotFoundError as error:
            if not f"{parent}.".startswith(f"{error.name}."):  # what the module imports itself
                raise
            holder = pkgutil.resolve_name(parent)  # a class, perhaps
        return getattr(holder, name)
    except Exception as error:  # a module that fails when it is imported can raise anything
        said = next(iter(str(error).splitlines()), "no message")
        raise ConfigError(
            f"cannot import {path!r} ({type(error).__name__}: {said}); a dotted name such as package.module.name is "
            "needed, of what is installed or can be imported here"
        ) from error


def parse_assignments(texts: Iterable[str], option: str) -> dict[str, Any]:
    """``KEY=VALUE`` words that were given to an option; the last of several with one key counts.

    A value is a Python literal (``(3, 4)``, ``1e-3``, ``None``), else YAML (``true``, ``[a, b]``). A plain word stays
    a string (``resnet18``, ``runs/a b``), and quotes make anything one.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{option}: {text!r} is not KEY=VALUE")
        try:
            values[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            values[key] = None if value.lower() == "none" else read_yaml(value, f"{option} {text}")
    return values


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, where YAML keeps the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} stands twice (line {node.start_mark.line + 1} and below)")
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


def merged(values: Iterable[Any]) -> Any:
    """Configurations one over the other: of mappings the later entries count, entry by entry."""
    first, *others = values
    for later in others:
        if isinstance(first, Mapping) and isinstance(later, Mapping):
            both = {k: merged([first[k], later[k]]) for k in first.keys() & later.keys()}
            first = {**first, **later, **both}
        else:
            first = later
    return first
