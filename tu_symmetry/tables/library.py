"""The recipes that travel with the package, and how a recipe or one of its files is found by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tu_symmetry.configs import ConfigError
from tu_symmetry.tables.commands import load_table

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = next((f for f in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes") if f.is_dir()), None)  # wheel, checkout


def library() -> dict[str, Path]:
    """Name (``compact_posterior/digits``) to folder of every recipe with a table."""
    tables = sorted(_SHIPPED.rglob("table.yaml")) if _SHIPPED else []
    return {path.parent.relative_to(_SHIPPED).as_posix(): path.parent for path in tables}  # type: ignore[arg-type]


def configurations() -> dict[str, Path]:
    """Name (``lightning/mnist_ensemble_rebasin.yaml``) to file of every configuration that no table runs."""
    if _SHIPPED is None:
        return {}
    commands = [(folder, command) for folder in library().values() for command in load_table(folder).commands]
    used = {(folder / file).resolve() for folder, command in commands for file in command.config}
    files = [p for p in sorted(_SHIPPED.rglob("*.yaml")) if p not in used and not (p.parent / "table.yaml").is_file()]
    return {p.relative_to(_SHIPPED).as_posix(): p for p in files}


def _within_recipes(name: str | Path) -> str:
    """The name of a recipe as it stands in :func:`library`: ``recipes/`` is where they are in a checkout."""
    return str(name).strip("/").removeprefix("./").removeprefix("recipes/")


def find_recipe(name: str | Path) -> Path:
    """The folder of a recipe: a path, or the name of one that travels with the package."""
    if (Path(name) / "table.yaml").is_file():
        return Path(name)
    known = library()
    if (found := known.get(_within_recipes(name))) is not None:
        return found
    raise ConfigError(
        f"{name} is no recipe folder (it has no table.yaml), and none of the recipes that come with the package: "
        f"{', '.join(known) or 'none'}; `tu-symmetry recipes` lists them"
    )


def find_configuration(name: str) -> str:
    """The file that a name means: one that is there, else one that travels with the package, else the name itself."""
    if _SHIPPED is None or Path(name).is_absolute() or Path(name).exists():
        return name
    root, file = _SHIPPED.resolve(), (_SHIPPED / _within_recipes(name)).resolve()
    return str(file) if file.is_file() and file.suffix == ".yaml" and file.is_relative_to(root) else name


def with_configurations(arguments: Sequence[str]) -> list[str]:
    """The words of a command line, with the files after ``--config`` and ``-c`` found by :func:`find_configuration`."""
    flags, found = ("--config", "-c"), list[str]()
    for word in arguments:
        flag, equals, value = word.partition("=")
        if found and found[-1] in flags:
            word = find_configuration(word)
        elif equals and flag in flags:
            word = f"{flag}={find_configuration(value)}"
        found.append(word)
    return found
