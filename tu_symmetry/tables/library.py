"""The recipes that travel with the package, and how a recipe is found by its name."""

from __future__ import annotations

from pathlib import Path

from tu_symmetry.configs import ConfigError, read_mapping

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = (_PACKAGE / "recipes", _PACKAGE.parent / "recipes")  # in a wheel, and in a checkout


def library() -> dict[str, Path]:
    """Name (``compact_posterior/digits``) to folder of every recipe with a table."""
    folder = next((f for f in _SHIPPED if f.is_dir()), None)
    if folder is None:
        return {}
    return {p.parent.relative_to(folder).as_posix(): p.parent for p in sorted(folder.rglob("table.yaml"))}


def titles() -> dict[str, str]:
    """Name of every recipe to its title."""
    return {name: str(read_mapping(folder / "table.yaml").get("title", "")) for name, folder in library().items()}


def find_recipe(name: str | Path) -> Path:
    """The folder of a recipe: a path, or the name of one that travels with the package.

    Raises:
        ConfigError: neither.
    """
    folder = Path(name)
    if (folder / "table.yaml").is_file():
        return folder
    known = library()
    if str(name).strip("/") in known:
        return known[str(name).strip("/")]
    raise ConfigError(
        f"{name} is no recipe folder (it has no table.yaml), and none of the recipes that come with the package: "
        f"{', '.join(known) or 'none'}; `tu-symmetry recipes` lists them"
    )
