"""The package as a whole: quick and lazy to import, every public name there, typed, one version."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import public
import pytest

import tu_symmetry

HEAVY = ("torch", "lightning", "torch_uncertainty", "torchmetrics", "scipy", "matplotlib")
CORE = ("symmetry", "alignment", "scaling", "laplace", "posterior", "metrics")
PACKAGE = Path(tu_symmetry.__file__ or "").parent


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, tu_symmetry; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_public_names_resolve_and_are_documented() -> None:
    assert not [name for name, value in public.names() if not value.__doc__]
    assert set(tu_symmetry.__all__) <= set(dir(tu_symmetry))
    with pytest.raises(AttributeError, match="attribute discover_symetries"):
        _ = tu_symmetry.discover_symetries


def test_names_at_the_top_are_few_and_rooms_hold_the_rest() -> None:
    names = [name for name, _ in public.names()]
    assert len([n for n in names if "." not in n]) <= 48
    assert len(set(names)) == len(names)
    leaves = [n.rpartition(".")[2] for n in names]
    assert len(set(leaves)) == len(leaves), "one import path a name"


@pytest.mark.slow
def test_every_public_name_has_a_type_for_checkers_and_misspelled_ones_are_errors(tmp_path: Path) -> None:
    from mypy import api

    code = tmp_path / "names.py"
    names = [name for name, _ in public.names()]
    lines = [f"reveal_type(tus.{name})" for name in names]
    code.write_text("\n".join(["import tu_symmetry as tus", *lines, "tus.discover_symetries", ""]))
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {PACKAGE.parent}\nignore_missing_imports = True\n")
    out, errors, _ = api.run(["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(code)])
    said = [line for line in out.splitlines() if line.startswith(str(code))]
    revealed = [line.partition("Revealed type is ")[2].strip('"') for line in said if "Revealed type" in line]
    assert len(revealed) == len(lines), out + errors
    assert not [n for n, t in zip(names, revealed, strict=True) if t in ("Any", "")]
    assert any("discover_symetries" in line and "attr-defined" in line for line in said), out


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
    assert tu_symmetry.__version__ == installed and (PACKAGE / "py.typed").is_file()
