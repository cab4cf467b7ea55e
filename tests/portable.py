"""Run the fast tests as another machine would: ``python tests/portable.py COMBINATION [arguments of pytest]``.

A combination is named (``shuffled:5EED`` with a seed), or several are joined (``files+elsewhere``), or it is that of a
commit (``commit:HASH``): a series of commits goes through all but those that take another installation, or whose
outcome hangs on releases of other libraries.
``make test-portable`` calls this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Combination:
    """Settings of one run.

    Attributes:
        environment: variables that are set.
        options: of the plugin ``tests/portability.py``.
        elsewhere: whether the tests run in a copy, at a path with a space and without ``../shared``.
        torch: the release, where it is another one than the installed: an argument of pip.
        turns: whether commits take it in their turn.
    """

    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    elsewhere: bool = False
    torch: str | None = None
    turns: bool = True

    def __add__(self, other: Combination) -> Combination:
        """Both at once; of a variable that both set, the other's value."""
        return Combination(
            self.environment | other.environment,
            self.options + other.options,
            self.elsewhere or other.elsewhere,
            self.torch or other.torch,
            self.turns and other.turns,
        )


COMBINATIONS = {
    "products": Combination(options=("--perturb-products",)),
    "shapes": Combination(options=("--perturb-shapes",)),
    "files": Combination(options=("--perturb-products", "--displace-files")),
    "plain-kernels": Combination({"ATEN_CPU_CAPABILITY": "default"}),
    "mkl-compatible": Combination({"MKL_CBWR": "COMPATIBLE"}),
    "onednn-sse41": Combination({"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    "threads-1": Combination({"OMP_NUM_THREADS": "1"}),
    "threads-4": Combination({"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}),
    "shuffled": Combination(options=("--shuffle={number}",)),
    "elsewhere": Combination({"LC_ALL": "C", "HOME": "{home}"}, elsewhere=True),
    "warnings": Combination(options=("--warnings-are-errors",), turns=False),  # other releases warn of other things
    "torch-2.11": Combination(torch="torch==2.11.*", turns=False),
    "torch-2.14": Combination(torch="torch==2.14.*", turns=False),
    "torch-newest": Combination(torch="torch>=2.14", turns=False),
}


def choose(chosen: str) -> tuple[str, Combination, int]:
    """Name of a combination, its settings, and the seed of its order.

    Raises:
        SystemExit: a combination that is not known.
    """
    name, _, digits = chosen.partition(":")
    number = int(digits[:8] or "0", 16)
    if name == "commit":
        here = [known for known, combination in COMBINATIONS.items() if combination.turns]
        name = here[number % len(here)]
    own = Combination()
    for part in name.split("+"):
        if part not in COMBINATIONS:
            raise SystemExit(f"there is no combination {part!r}; choose one of {', '.join(COMBINATIONS)}")
        own += COMBINATIONS[part]
    if own.torch is not None and "+" in name:
        raise SystemExit(f"{name}: only `make matrix` tests another torch; join the others where it is installed")
    return name, own, number


def main(chosen: str, arguments: list[str]) -> int:
    """The exit status of the tests."""
    name, own, number = choose(chosen)
    print(f"== {own}\n== again: make test-portable COMBINATION={name}:{number:x}", flush=True)
    if own.torch is not None:
        python = "python{}.{}".format(*sys.version_info)
        return subprocess.run(["make", "matrix", f"MATRIX={python},{own.torch}"], cwd=ROOT).returncode
    with tempfile.TemporaryDirectory() as scratch:
        home = Path("/sys")  # what not even the administrator writes to
        if os.geteuid() != 0:
            home = Path(scratch) / "home"
            home.mkdir(mode=0o500)
        folder = ROOT
        if own.elsewhere:
            folder = Path(scratch) / "a path with a space"
            ignored = shutil.ignore_patterns(".git", ".venv", "build", "runs", "dist", "__pycache__", ".*_cache")
            shutil.copytree(ROOT, folder, ignore=ignored)
        settings = {name: value.format(home=home) for name, value in own.environment.items()}
        environment = os.environ | settings | {"PYTHONPATH": str(folder)}
        options = [option.format(number=number) for option in own.options]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.portability", *options, *arguments]
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
