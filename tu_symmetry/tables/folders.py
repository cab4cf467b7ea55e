"""``$root``, ``$name`` and ``$data_root``: a configuration says where its run stands without naming a folder.

``tu-symmetry table`` gives all three. Typed by itself, ``tu-symmetry fit --config fit.yaml --config hmc.yaml`` writes
to ``runs/hmc``: ``--root runs --name hmc``, the name being that of the last file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tu_symmetry.configs import ConfigError

OUT = "$root/$name"
_FOLDER = re.compile(r"\$(root|name|data_root)\b")


def add_folders(parser: ArgumentParser) -> None:
    """The options that fill ``$root``, ``$name`` and ``$data_root`` in."""
    parser.add_argument("--root", type=str, default="runs", help="folder of the runs, $root in a configuration")
    parser.add_argument(
        "--name", type=str, default="", help="of the run, $name in a configuration (default: its last file's name)"
    )
    parser.add_argument("--data_root", type=str, default="data", help="folder of data sets, $data_root")


def with_folders(config: Namespace) -> Namespace:
    """The parsed configuration with the folders filled in, wherever they stand.

    Raises:
        ConfigError: ``$name`` without a name and without a file.
    """
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
