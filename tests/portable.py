"""Run the fast tests as another machine would: ``python tests/portable.py SETTING [arguments of pytest]``.

A setting is named (``shuffled:5EED`` with a seed), or it is that of a commit (``commit:HASH``): a series of commits
goes through all but that whose outcome hangs on releases of other libraries. ``make test-portable`` calls this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Variables of the environment, and options of the plugin `tests/portability.py`.
SETTINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "products": ({}, ["--perturb-products"]),
    "shapes": ({}, ["--perturb-shapes"]),
    "files": ({}, ["--perturb-products", "--displace-files"]),
    "plain-kernels": ({"ATEN_CPU_CAPABILITY": "default"}, []),
    "mkl-compatible": ({"MKL_CBWR": "COMPATIBLE"}, []),
    "onednn-sse41": ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, []),
    "threads-1": ({"OMP_NUM_THREADS": "1"}, []),
    "threads-4": ({"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}, []),
    "shuffled": ({}, ["--shuffle={number}"]),
    "elsewhere": ({"LC_ALL": "C", "HOME": "{home}"}, []),  # in a copy, at a path with a space, without ``../shared``
    "warnings": ({}, ["--warnings-are-errors"]),
}


def main(chosen: str, arguments: list[str]) -> int:
    """The exit status of the tests."""
    name, _, digits = chosen.partition(":")
    number = int(digits[:8] or "0", 16)
    if name == "commit":
        turns = [known for known in SETTINGS if known != "warnings"]
        name = turns[number % len(turns)]
    if name not in SETTINGS:
        raise SystemExit(f"there is no setting {name!r}; choose one of {', '.join(SETTINGS)}")
    variables, options = SETTINGS[name]
    print(f"== {variables} {options}\n== again: make test-portable COMBINATION={name}:{number:x}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        home, folder = Path("/sys"), ROOT  # what not even the administrator writes to
        if os.geteuid() != 0:
            home = Path(scratch) / "home"
            home.mkdir(mode=0o500)
        if name == "elsewhere":
            folder = Path(scratch) / "a path with a space"
            ignored = shutil.ignore_patterns(".git", ".venv", "build", "runs", "dist", "__pycache__", ".*_cache")
            shutil.copytree(ROOT, folder, ignore=ignored)
        own = {variable: value.format(home=home) for variable, value in variables.items()}
        environment = os.environ | own | {"PYTHONPATH": str(folder)}
        plugin = ["-p", "tests.portability", *(option.format(number=number) for option in options)]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, *arguments]
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
