"""What the library promises by name: its top level, and the packages that hold the rest."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import tu_symmetry as tus

ROOMS = (
    "alignment",
    "callbacks",
    "datamodules",
    "laplace",
    "likelihoods",
    "metrics",
    "routines",
    "rules",
    "scaling",
    "symmetry",
)


def modules() -> list[ModuleType]:
    """The package and each of its public packages."""
    return [tus, *(importlib.import_module(f"tu_symmetry.{room}") for room in ROOMS)]


def names() -> Iterator[tuple[str, Any]]:
    """Path below ``tus`` and value of all that is public and no module: ``("routines.HMCRoutine", ...)``."""
    for module in modules():
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if not isinstance(value, ModuleType) and (module is tus or name not in tus.__all__):
                yield f"{module.__name__}.{name}".removeprefix("tu_symmetry."), value
