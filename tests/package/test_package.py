"""The package as a whole: quick and lazy to import, every public name there, typed, one version."""

from __future__ import annotations

import ast
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
PACKAGE = Path(tu_symmetry.__file__ or "").parent
LAZY = sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py") if "attach(__name__" in p.read_text())
PUBLIC = sorted(name for name in tu_symmetry.__all__ if name != "__version__")


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, tu_symmetry; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


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


def declared_names(source: str, package: str) -> dict[str, dict[str, str]]:
    """Where each name comes from, once by ``_EXPORTS`` and once by the block that type checkers read."""
    found: dict[str, dict[str, str]] = {"exports": {}, "typed": {}}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_EXPORTS":
            assert node.value is not None
            pairs = ast.literal_eval(node.value)
            found["exports"] = {name: f"{package}.{module}" for name, module in pairs.items()}
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom) and not any(alias.asname for alias in line.names)
                inside = line.module != package  # of the package itself: a public submodule
                found["typed"] |= {a.name: str(line.module) if inside else f"{package}.{a.name}" for a in line.names}
    return found


@pytest.mark.parametrize("room", ["", *LAZY])
def test_type_checkers_are_told_of_the_very_names_that_load(room: str) -> None:
    name = f"tu_symmetry.{room}".rstrip(".")
    package = importlib.import_module(name)
    found = declared_names((PACKAGE / room / "__init__.py").read_text(), name)
    assert found["typed"] == found["exports"]
    assert sorted(package.__all__) == sorted([*found["exports"], *([] if room else ["__version__"])])


def test_every_lazy_package_uses_the_one_mechanism() -> None:
    own = [p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py") if "def __getattr__(name: str)" in p.read_text()]
    assert not own
    assert {"callbacks", "metrics", "routines", "datamodules"} <= set(LAZY)


@pytest.mark.slow
def test_every_public_name_has_a_type_for_checkers_and_misspelled_ones_are_errors(tmp_path: Path) -> None:
    from mypy import api

    code = tmp_path / "names.py"
    lines = [f"reveal_type(tus.{name})" for name in tu_symmetry.__all__]
    code.write_text("\n".join(["import tu_symmetry as tus", *lines, "tus.discover_symetries", ""]))
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {PACKAGE.parent}\nignore_missing_imports = True\n")
    out, errors, _ = api.run(["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(code)])
    said = [line for line in out.splitlines() if line.startswith(str(code))]
    revealed = [line.partition("Revealed type is ")[2].strip('"') for line in said if "Revealed type" in line]
    assert len(revealed) == len(lines), out + errors
    assert not [n for n, t in zip(tu_symmetry.__all__, revealed, strict=True) if t in ("Any", "")]
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
    assert tu_symmetry.__version__ == installed


def test_package_is_typed() -> None:
    assert tu_symmetry.__file__ is not None
    assert Path(tu_symmetry.__file__).with_name("py.typed").is_file()
