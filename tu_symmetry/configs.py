"""Configurations as plain values: safe YAML, ``KEY=VALUE`` words, checked dataclasses, objects by their dotted names.

What a configuration names is imported and called: it is trusted like code, so do not run one of someone whose Python
files you would not run.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
_BYTES, _NODES = 1_000_000, 100_000  # of a YAML text, and of its values with every alias written out


class ConfigError(ValueError):
    """A recipe, an option or a run folder that cannot be used; the message says where and what to do."""


def parse(config_class: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a config dataclass from plain values, with type checks.

    Args:
        config_class: a dataclass whose fields are plain values, lists, dicts or dataclasses.
        values: field name to value.
        where: what to call the values in an error, for example the file's name.

    Raises:
        ConfigError: unknown or missing keys, values of a wrong type.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping of keys to values, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"{where}: unknown key {key!r}{hint}; the keys are {', '.join(sorted(fields)) or 'none'}")
    hints = typing.get_type_hints(config_class)
    parser = ArgumentParser(exit_on_error=False)
    parsed: dict[str, Any] = {}
    for name in values:
        if values[name] is None and type(None) not in typing.get_args(hints[name]) and hints[name] is not Any:
            raise ConfigError(f"{where}: {name} has no value; give one, or leave the key out for the default")
        if dataclasses.is_dataclass(hints[name]):
            parsed[name] = parse(hints[name], values[name], f"{where}: {name}")
        else:
            parser.add_argument(f"--{name}", type=hints[name])
    missing = [name for name, f in fields.items() if name not in values and _required(f)]
    if missing:
        raise ConfigError(f"{where}: the key {missing[0]!r} is missing")
    try:
        parsed |= parser.parse_object({k: v for k, v in values.items() if k not in parsed}).as_dict()
    except ArgumentError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
    return config_class(**parsed)


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def resolve(path: str) -> Any:
    """The object with a dotted name: ``package.module.name``, ``module:name``, also an attribute of a class.

    Raises:
        ConfigError: there is no such module or name, or importing the module fails.
    """
    parts = path.replace(":", ".").split(".")
    if len(parts) < 2:
        raise ConfigError(f"cannot import {path!r}: it is no dotted name, such as package.module.name")
    for cut in range(len(parts) - 1, 0, -1):  # the longest part that is a module; what follows are its attributes
        module = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
                continue
            raise ConfigError(f"cannot import {path!r}: importing {module} fails: {error}") from error
        except Exception as error:  # a module that fails when it is imported can raise anything
            said = next(iter(str(error).splitlines()), "no message")
            raise ConfigError(
                f"cannot import {path!r}: importing {module} fails: {type(error).__name__}: {said}"
            ) from error
        for k, name in enumerate(parts[cut:]):
            if not hasattr(found, name):
                raise ConfigError(f"cannot import {path!r}: {'.'.join(parts[: cut + k])} has no {name!r}")
            found = getattr(found, name)
        return found
    raise ConfigError(
        f"cannot import {path!r}: there is no module {parts[0]!r}; install it, or run where it can be imported"
    )


def parse_assignments(texts: Iterable[str], option: str) -> dict[str, Any]:
    """``KEY=VALUE`` words of a command line, as arguments of a function.

    A key is an identifier; the last of several with one key counts. A value is what :func:`parse_value` makes of it.

    Args:
        texts: the words.
        option: the option that they were given to, for errors.

    Raises:
        ConfigError: a word that is not ``KEY=VALUE``.
    """
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{option}: {text!r} is not KEY=VALUE")
        values[key] = parse_value(value, f"{option} {text}")
    return values


def parse_value(text: str, where: str) -> Any:
    """A value of a command line: a Python literal (``(3, 4)``, ``1e-3``, ``None``), else YAML (``true``, ``[a, b]``).

    What is a plain word in YAML stays a string: ``resnet18``, ``runs/a b``. Quotes keep anything a string: ``"3"``.

    Args:
        text: what was typed.
        where: what to call it in an error.

    Raises:
        ConfigError: neither of both (``[1, 2``, ``*a``).
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None if text.lower() == "none" else read_yaml(text, where)


def read_yaml(content: str | bytes, where: str) -> Any:
    """Plain values from YAML text.

    Keys that stand twice in one mapping are refused (YAML would keep the last without a word), and so are texts whose
    aliases, written out, are more than 100,000 values (ten lines of ``b: [*a, *a, *a]`` are a billion) or contain
    themselves.

    Raises:
        ConfigError: no YAML in UTF-8, or one of those.
    """
    if len(content) > _BYTES:
        raise ConfigError(f"{where} is too long for a recipe ({len(content)} bytes, at most {_BYTES})")
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded(node, where, {}) > _NODES:
            raise ConfigError(f"{where}: its aliases stand for more than {_NODES} values; write out what is meant")
        return loader.construct_document(node)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is no text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply, or an alias in it contains itself") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is no valid YAML: {' '.join(str(error).split())}") from error


def _expanded(node: yaml.Node, where: str, known: dict[int, int]) -> int:
    """Number of values below a node with every alias written out; each node is visited once."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = _NODES + 1  # what an alias to a node that is not finished stands for: infinitely many
    children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ConfigError(f"{where}: the key {twice[0]!r} stands twice (line {node.start_mark.line + 1} and below)")
        children = [child for pair in node.value for child in pair]
    known[id(node)] = 1 + sum(_expanded(child, where, known) for child in children)
    return known[id(node)]


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping of keys to values.

    Raises:
        ConfigError: a file that is missing, no YAML (see :func:`read_yaml`) or no mapping.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing: table.yaml names it")
    values = read_yaml(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, it holds {type(values).__name__}")
    return values
