"""A recipe: one folder, one table. ``table.yaml`` names data, model and stages; each stage has its own YAML file.

The schema is the dataclasses below and the options dataclass of each stage; an unknown key is an error that names the
file and the keys that exist there.

A recipe is trusted like code: it names modules, which are imported, and classes, which are called. What is called has
to be what the key expects, and that is looked at first; but importing a module runs what stands in it. So do not run
a recipe of someone whose Python files you would not run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tu_symmetry.configs import ConfigError, parse, parse_value, read_mapping


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


def load_recipe(folder: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe folder.

    Args:
        folder: the folder that holds ``table.yaml``.
        overrides: ``key=value`` strings, values in YAML: ``seed=1``, ``data.train_size=500``, ``model.hidden=[16]``
            (an argument of the model), or ``<stage>.<option>=...``.

    Raises:
        ConfigError: missing files, unknown keys, stages that use later ones, overrides that name nothing.
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
        raise ConfigError(f"{folder} is no recipe folder: it has no table.yaml{hint}")
    raw = read_mapping(path)
    names = raw.get("stages")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{path}: 'stages' must list the names of the stages in order")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
            raise ConfigError(f"{path}: stages: {name!r} is no name of a stage; use letters, digits, _ and -")
        if names.count(name) > 1:
            raise ConfigError(f"{path}: the stage {name!r} is listed twice; a stage that runs again needs another name")
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
                raise ConfigError(
                    f"{folder / name}.yaml: input {role!r} is {source!r}, which is no earlier stage (there: {known})"
                )
        stages[name] = stage
    return Recipe(folder.resolve().name, folder, table, stages)


def _override(table: dict[str, Any], stages: dict[str, dict[str, Any]], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigError(f"--set {override!r}: write key=value, for example hmc.num_samples=100")
    value = parse_value(text, f"--set {override!r}")
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
        raise ConfigError(
            f"--set {override!r} names nothing in this recipe: use seed=..., data.<key>=..., model.<argument>=..., "
            f"or <stage>.<option>=... with a stage of {', '.join(stages)}"
        )


def _mapping(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping under a key, which an override changes; made where there is none."""
    if values.get(key) is None:
        values[key] = {}
    if not isinstance(values[key], dict):
        raise ConfigError(f"{key!r} must hold a mapping of keys to values, it holds {values[key]!r}")
    return values[key]
