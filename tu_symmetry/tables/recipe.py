"""A recipe: one folder, one table. ``table.yaml`` names data, model and stages; each stage has its own YAML file.

The schema is the dataclasses below and the options dataclass of each stage; an unknown key is an error that names the
file and the keys that exist there.

A recipe is trusted like code: it names modules, which are imported, and classes, which are called. What is called has
to be what the key expects, and that is looked at first; but importing a module runs what stands in it. So do not run
a recipe of someone whose Python files you would not run.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
_LARGEST = 10**12  # of a number among a stage's options
_BYTES, _NODES = 1_000_000, 100_000  # of a YAML text, and of its values with every alias written out


class RecipeError(ValueError):
    """A recipe, an override or a run folder that cannot be used; the message says where and what to do."""


@dataclass(frozen=True)
class DataConfig:
    """Which data a table uses.

    Attributes:
        name: ``digits`` (ships with scikit-learn), ``mnist``, ``fashion_mnist``, ``kmnist`` or ``cifar10``.
        train_size: number of training images, the first ones in the data set's order; None for all.
        test_size: number of test images, the first ones; None for all.
    """

    name: str = "digits"
    train_size: int | None = None
    test_size: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Which module a table's networks are.

    Attributes:
        class_path: dotted path of an ``nn.Module`` class or of a function that makes one.
        init_args: its keyword arguments.
    """

    class_path: str = "tu_symmetry.tables.models.MLP"
    init_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageConfig:
    """One stage's YAML file.

    Attributes:
        stage: kind of stage: a name in ``tu_symmetry.tables.stage.KINDS``, or ``module:function``.
        inputs: role to name of an earlier stage of the same table.
        options: fields of the kind's options dataclass.
    """

    stage: str
    inputs: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableConfig:
    """``table.yaml``.

    Attributes:
        title: heading of the report.
        stages: names of the stages in the order in which they run; ``<name>.yaml`` lies next to ``table.yaml``.
        source: the paper's table or figure that this one reproduces.
        note: what was reduced against the paper, and why; printed in the report.
        seed: of everything random in the table.
        data: see :class:`DataConfig`.
        model: see :class:`ModelConfig`.
        paper: the paper's numbers, row to column to value, as the report stage expects them.
    """

    title: str
    stages: list[str]
    source: str = ""
    note: str = ""
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    paper: dict[str, dict[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A recipe folder, read and checked."""

    name: str
    folder: Path
    table: TableConfig
    stages: dict[str, StageConfig]


def parse(config_class: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a config dataclass from plain values, with type checks.

    Args:
        config_class: a dataclass whose fields are plain values, lists, dicts or dataclasses.
        values: field name to value.
        where: what to call the values in an error, for example the file's name.

    Raises:
        RecipeError: unknown or missing keys, values of a wrong type.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: expected a mapping of keys to values, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise RecipeError(f"{where}: unknown key {key!r}{hint}; the keys are {', '.join(sorted(fields)) or 'none'}")
    hints = typing.get_type_hints(config_class)
    parser = ArgumentParser(exit_on_error=False)
    parsed: dict[str, Any] = {}
    for name in values:
        if values[name] is None and type(None) not in typing.get_args(hints[name]) and hints[name] is not Any:
            raise RecipeError(f"{where}: {name} has no value; give one, or leave the key out for the default")
        if dataclasses.is_dataclass(hints[name]):
            parsed[name] = parse(hints[name], values[name], f"{where}: {name}")
        else:
            parser.add_argument(f"--{name}", type=hints[name])
    missing = [name for name, f in fields.items() if name not in values and _required(f)]
    if missing:
        raise RecipeError(f"{where}: the key {missing[0]!r} is missing")
    try:
        parsed |= parser.parse_object({k: v for k, v in values.items() if k not in parsed}).as_dict()
    except ArgumentError as error:
        raise RecipeError(f"{where}: {' '.join(str(error).split())}") from None
    return config_class(**parsed)


def check_numbers(options: Any, where: str) -> None:
    """Refuse numbers that no option can mean: integers below 1, other numbers below 0, NaN and infinite ones.

    An integer whose default is 0 may be 0. A field of the options dataclass says otherwise by
    ``field(default=..., metadata={"least": 0})``, where None stands for any finite number, or by ``{"above": 0}`` for
    numbers that must be larger. Numbers in lists count too.

    Raises:
        RecipeError: names the option.
    """
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            least = f.metadata.get("least", 1 if isinstance(number, int) and f.default != 0 else 0)
            above = f.metadata.get("above", -math.inf)
            if (isinstance(number, float) and not math.isfinite(number)) or number > _LARGEST:
                raise RecipeError(f"{where}: {f.name} must be a finite number, at most {_LARGEST:g}, got {number:g}")
            if number <= above or (least is not None and number < least):
                bound = f"above {above}" if "above" in f.metadata else f"at least {least}"
                raise RecipeError(f"{where}: {f.name} must be {bound}, got {number}")


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def load_recipe(folder: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe folder.

    Args:
        folder: the folder that holds ``table.yaml``.
        overrides: ``key=value`` strings, values in YAML: ``seed=1``, ``data.train_size=500``, ``model.hidden=[16]``
            (an argument of the model), or ``<stage>.<option>=...``.

    Raises:
        RecipeError: missing files, unknown keys, stages that use later ones, overrides that name nothing.
    """
    folder = Path(folder)
    path = folder / "table.yaml"
    if not path.is_file():
        near = sorted(str(p.parent) for p in folder.parent.glob("*/table.yaml")) if folder.parent.is_dir() else []
        hint = (
            f"; recipes there: {', '.join(near)}"
            if near
            else "; give a folder such as recipes/compact_posterior/digits"
        )
        raise RecipeError(f"{folder} is no recipe folder: it has no table.yaml{hint}")
    raw = read_mapping(path)
    names = raw.get("stages")
    if not isinstance(names, list) or not names:
        raise RecipeError(f"{path}: 'stages' must list the names of the stages in order")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
            raise RecipeError(f"{path}: stages: {name!r} is no name of a stage; use letters, digits, _ and -")
        if names.count(name) > 1:
            raise RecipeError(f"{path}: the stage {name!r} is listed twice; a stage that runs again needs another name")
    raw_stages = {name: read_mapping(folder / f"{name}.yaml") for name in names}
    for override in overrides:
        _override(raw, raw_stages, override)
    table = parse(TableConfig, raw, str(path))
    stages: dict[str, StageConfig] = {}
    for name, values in raw_stages.items():
        stage = parse(StageConfig, values, str(folder / f"{name}.yaml"))
        for role, source in stage.inputs.items():
            if source not in stages:
                known = ", ".join(stages) or "none"
                raise RecipeError(
                    f"{folder / name}.yaml: input {role!r} is {source!r}, which is no earlier stage (there: {known})"
                )
        stages[name] = stage
    return Recipe(folder.resolve().name, folder, table, stages)


def resolve(path: str) -> Any:
    """The object at ``module:name`` or ``module.name``.

    Raises:
        RecipeError: if there is none.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a module that fails when it is imported can raise anything
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise RecipeError(f"cannot import {path!r}: {said}") from error


def read_yaml(content: str | bytes, where: str) -> Any:
    """Plain values from YAML text.

    Keys that stand twice in one mapping are refused (YAML would keep the last without a word), and so are texts whose
    aliases, written out, are more than 100,000 values (ten lines of ``b: [*a, *a, *a]`` are a billion) or contain
    themselves.

    Raises:
        RecipeError: no YAML in UTF-8, or one of those.
    """
    if len(content) > _BYTES:
        raise RecipeError(f"{where} is too long for a recipe ({len(content)} bytes, at most {_BYTES})")
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded(node, where, {}) > _NODES:
            raise RecipeError(f"{where}: its aliases stand for more than {_NODES} values; write out what is meant")
        return loader.construct_document(node)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where} is no text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    except RecursionError as error:
        raise RecipeError(f"{where} is nested too deeply, or an alias in it contains itself") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"{where} is no valid YAML: {' '.join(str(error).split())}") from error


def _expanded(node: yaml.Node, where: str, known: dict[int, int]) -> int:
    """Number of values below a node with every alias written out; each node is visited once."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = _NODES + 1  # what an alias to a node that is not finished stands for: infinitely many
    children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise RecipeError(f"{where}: the key {twice[0]!r} stands twice (line {node.start_mark.line + 1} and below)")
        children = [child for pair in node.value for child in pair]
    known[id(node)] = 1 + sum(_expanded(child, where, known) for child in children)
    return known[id(node)]


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping of keys to values.

    Raises:
        RecipeError: a file that is missing, no YAML (see :func:`read_yaml`) or no mapping.
    """
    if not path.is_file():
        raise RecipeError(f"{path} is missing: each stage listed in table.yaml has a YAML file of its name beside it")
    values = read_yaml(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold a mapping of keys to values, it holds {type(values).__name__}")
    return values


def _override(table: dict[str, Any], stages: dict[str, dict[str, Any]], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise RecipeError(f"--set {override!r}: write key=value, for example hmc.num_samples=100")
    value = read_yaml(text, f"--set {override!r}")
    head, _, rest = key.strip().partition(".")
    if not rest and head in {"seed", "title", "note"}:
        table[head] = value
    elif rest and head == "data":
        _mapping(table, "data")[rest] = value
    elif rest and head == "model":
        _mapping(_mapping(table, "model"), "init_args")[rest] = value
    elif rest and head in stages:
        _mapping(stages[head], "options")[rest] = value
    else:
        raise RecipeError(
            f"--set {override!r} names nothing in this recipe: use seed=..., data.<key>=..., model.<argument>=..., "
            f"or <stage>.<option>=... with a stage of {', '.join(stages)}"
        )


def _mapping(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping under a key, which an override changes; made where there is none."""
    if values.get(key) is None:
        values[key] = {}
    if not isinstance(values[key], dict):
        raise RecipeError(f"{key!r} must hold a mapping of keys to values, it holds {values[key]!r}")
    return values[key]
