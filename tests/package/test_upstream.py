"""The patches for TorchUncertainty apply to it, their tests pass there, and their tutorials run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("torch_uncertainty")
import torch_uncertainty

PATCHES = sorted((Path(__file__).resolve().parents[2] / "upstream").glob("*.patch"))
OTHERS = """timeseries = ["tslearn>=0.9"]
others = [
  "scikit-learn!=1.6.0,<1.7",
  "curvlinops-for-pytorch<3",
  "laplace-torch",
  "glest==0.0.1a1",
]

cpu = [
"""

pytestmark = [
    pytest.mark.skipif(not version("torch-uncertainty").startswith("0.13."), reason="the patches are for 0.13"),
    pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches"),
]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of TorchUncertainty, as far as it is installed, with all patches."""
    root = tmp_path_factory.mktemp("torch-uncertainty")
    source = Path(torch_uncertainty.__file__).parent
    shutil.copytree(source, root / "src" / "torch_uncertainty", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "pyproject.toml").write_text(OTHERS, encoding="utf-8")
    for patch in PATCHES:
        subprocess.run(["git", "apply", "--whitespace=error", str(patch)], cwd=root, check=True)
    return root


def run(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *arguments]
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_patches_are_applied_and_their_tests_pass(patched: Path) -> None:
    assert len(PATCHES) == 3
    extra = (patched / "pyproject.toml").read_text(encoding="utf-8")
    assert "curvlinops" not in extra
    assert "laplace-torch>=0.3" in extra
    told = run(patched, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "tests")
    assert " passed" in told
    assert "skipped" not in told


def test_tutorials_show_what_they_say(patched: Path) -> None:
    tutorials = {path.stem: path for path in patched.glob("auto_tutorial_source/*/*.py")}
    told = run(patched, str(tutorials["tutorial_calibrated_laplace"]))
    scores = {line.split()[0]: line.split() for line in told.splitlines() if " NLL " in line}
    nll = {name: float(line[line.index("NLL") + 1]) for name, line in scores.items()}
    assert nll["laplace"] < nll["network"] - 0.2
    told = run(patched, str(tutorials["tutorial_weight_symmetries"]))
    biases = [float(line.split()[1]) for line in told.splitlines() if line.split()[0] == "0.bias"]
    assert biases[0] > 0.1 > abs(biases[1])


def test_their_wrapper_runs_with_the_newest_laplace_torch(patched: Path) -> None:
    code = (
        "import torch; from torch import nn; from torch.utils.data import DataLoader, TensorDataset\n"
        "from torch_uncertainty.post_processing import LaplaceApprox\n"
        "la = LaplaceApprox('classification', nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))\n"
        "la.fit(DataLoader(TensorDataset(torch.randn(20, 4), torch.randint(3, (20,))), 5))\n"
        "print(la(torch.randn(2, 4)).sum(-1).allclose(torch.ones(2), atol=1e-5))"
    )
    assert run(patched, "-c", code).strip() == "True"
    assert int(version("curvlinops-for-pytorch").split(".")[0]) >= 3
