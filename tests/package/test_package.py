"""The package as a whole: quick and lazy to import, every public name there, typed, one version."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import tu_symmetry

HEAVY = ("torch", "lightning", "torch_uncertainty", "torchmetrics", "scipy", "matplotlib")
CORE = ("symmetry", "alignment", "scaling", "laplace", "posterior", "metrics")
PUBLIC = sorted(name for name in tu_symmetry.__all__ if name != "__version__")


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import tu_symmetry; print(time.perf_counter() - start);"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    runs = [run_python(code).splitlines() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 0.2
    assert runs[0][1] == "[]"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name: str) -> None:
    value = getattr(tu_symmetry, name)
    assert value is getattr(tu_symmetry, name)
    assert value.__doc__, f"{name} has no docstring"


def test_dir_lists_what_is_public_and_names_are_unique() -> None:
    assert set(tu_symmetry.__all__) <= set(dir(tu_symmetry))
    assert len(set(tu_symmetry.__all__)) == len(tu_symmetry.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'discover_symetries'"):
        _ = tu_symmetry.discover_symetries


def test_core_rooms_load_without_lightning_and_torch_uncertainty() -> None:
    code = f"""
import importlib, pkgutil, sys
import tu_symmetry
for room in {CORE!r}:
    package = importlib.import_module(f"tu_symmetry.{{room}}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print([m for m in ("lightning", "pytorch_lightning", "torch_uncertainty") if m in sys.modules])
"""
    assert run_python(code).strip() == "[]"


def test_version_is_that_of_the_distribution() -> None:
    try:
        installed = importlib.metadata.version("tu-symmetry")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from a checkout that is not installed")
    assert tu_symmetry.__version__ == installed


def test_package_is_typed() -> None:
    assert tu_symmetry.__file__ is not None
    assert Path(tu_symmetry.__file__).with_name("py.typed").is_file()
