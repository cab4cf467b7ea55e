"""What must hold of an installed package: `make package` runs this with an environment that holds nothing else.

python -I tests/installed_package.py            # outside the checkout: everything below
python -I tests/installed_package.py --files    # what was installed, one line a file, to compare sdist and wheel
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

DISTRIBUTION = "tu-symmetry"
RECIPES = ("compact_posterior/digits", "rebasin/fashion-small", "symmetry_aware/mnist-small")
EXTRAS = {"pyro": "sampling", "sphinx": "docs"}
HEAVY = ("torch", "lightning", "torch_uncertainty", "torchmetrics", "scipy", "matplotlib")


def files() -> list[str]:
    """Digest and name of every file of the distribution, but for what the installer wrote itself."""
    own = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "tu-symmetry", "tu-symmetry.exe")
    found = [f for f in importlib.metadata.files(DISTRIBUTION) or () if f.name not in own and f.suffix != ".pyc"]
    return sorted(f"{hashlib.blake2b(f.locate().read_bytes(), digest_size=8).hexdigest()} {f}" for f in found)


def program(*arguments: str, code: int = 0) -> str:
    """What the console script prints on both streams."""
    script = Path(sys.executable).with_name("tu-symmetry")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == code, f"tu-symmetry {' '.join(arguments)} ended with {done.returncode}:\n{said}"
    return said


def main() -> None:
    """Raises an AssertionError for the first thing that does not hold."""
    import tu_symmetry

    folder = Path(tu_symmetry.__file__ or "").parent
    print(f"{folder}: version {tu_symmetry.__version__}")
    assert not [name for name in HEAVY if name in sys.modules]
    assert "site-packages" in folder.parts, "the checkout was imported, not what was installed"
    assert tu_symmetry.__version__ == importlib.metadata.version(DISTRIBUTION)
    assert (folder / "py.typed").is_file()

    present = [name for name in EXTRAS if importlib.util.find_spec(name)]
    assert not present, f"the environment is not empty: it has {present}"
    modules = [m.name for m in pkgutil.walk_packages(tu_symmetry.__path__, "tu_symmetry.") if "__main__" not in m.name]
    for name in modules:
        importlib.import_module(name)
    for name in tu_symmetry.__all__:
        getattr(tu_symmetry, name)
    print(f"{len(modules)} modules and {len(tu_symmetry.__all__)} public names load without any extra")

    listed = program("recipes")
    assert all(name in listed for name in RECIPES) and str(folder / "recipes") in listed
    found = program("inspect", "--model", "torchvision.models.resnet18", "--input", "1,3,32,32")
    assert "permutations" in found and "conv1" in found, found
    said = program("table", "compact_posterior/digits", "--set", "ensemble.trainer.max_epochs=1", code=2)
    assert "tu-symmetry[sampling]" in said, said
    print("recipes are found by their names, and what is missing is said with its extra")


if __name__ == "__main__":
    if "--files" in sys.argv[1:]:
        print("\n".join(files()))
    else:
        with tempfile.TemporaryDirectory() as empty:
            os.chdir(empty)
            main()
