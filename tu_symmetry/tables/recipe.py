"""A recipe: one folder, one table. ``table.yaml`` names data, model and stages; each stage has its own YAML file.

The schema is the dataclasses below and the options dataclass of each stage; an unknown key is an error that names the
file and the keys that exist there.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


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
    raw = _read(path)
    names = raw.get("stages")
    if not isinstance(names, list) or not names:
        raise RecipeError(f"{path}: 'stages' must list the names of the stages in order")
    raw_stages = {str(name): _read(folder / f"{name}.yaml") for name in names}
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
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(f"cannot import {path!r}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecipeError(f"{path} is missing: each stage listed in table.yaml has a YAML file of its name beside it")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold a mapping of keys to values, it holds {type(values).__name__}")
    return values


def _override(table: dict[str, Any], stages: dict[str, dict[str, Any]], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise RecipeError(f"--set {override!r}: write key=value, for example hmc.num_samples=100")
    value = yaml.safe_load(text)
    head, _, rest = key.strip().partition(".")
    if not rest and head in {"seed", "title", "note"}:
        table[head] = value
    elif rest and head == "data":
        table.setdefault("data", {})[rest] = value
    elif rest and head == "model":
        table.setdefault("model", {}).setdefault("init_args", {})[rest] = value
    elif rest and head in stages:
        stages[head].setdefault("options", {})[rest] = value
    else:
        raise RecipeError(
            f"--set {override!r} names nothing in this recipe: use seed=..., data.<key>=..., model.<argument>=..., "
            f"or <stage>.<option>=... with a stage of {', '.join(stages)}"
        )
