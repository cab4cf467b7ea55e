"""Packages whose names load on first use: importing the library costs milliseconds, and torch only where it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(package: str, exports: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose public names live in its submodules.

    Type checkers and IDEs read none of this. They read an ``if TYPE_CHECKING:`` block that imports the same names;
    ``__getattr__`` stands in its ``else``, so that a misspelled name is an error to them, too. A test compares both
    with ``__all__``.

    Args:
        package: name of the package (its ``__name__``).
        exports: public name to the submodule that defines it, relative to the package.

    Returns:
        The two functions. A name that was looked up once is an ordinary attribute of the package from then on.
    """
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{exports[name]}")
        value = module if exports[name] == name else getattr(module, name)  # a public submodule is itself the name
        namespace[name] = value
        return value

    def names() -> list[str]:
        return sorted({*namespace, *exports})

    return load, names
