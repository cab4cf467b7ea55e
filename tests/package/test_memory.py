"""What would not fit the memory is refused before it is made; sizes are planted, nothing large is ever allocated."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace_oracles import data, randomize
from torch import Tensor, nn
from trainings import fit, routine

from tu_symmetry import memory
from tu_symmetry.callbacks import FitLaplace
from tu_symmetry.laplace import DualLaplace, IsotropicPrior
from tu_symmetry.laplace.linearized import LinearizedLaplace

GIB = 1 << 30


def plant(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """So many bytes are free, and even one is worth asking about."""
    monkeypatch.setattr(memory, "_SMALL", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: free)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    return randomize(nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3))), *data(4, outputs=3)


@pytest.mark.parametrize(
    ("options", "each", "message"),
    [
        ({"curvature": "full"}, 40 * 243**2, r"243 parameters, a matrix of 243 x 243.*'kfac' or 'diag', or a"),
        ({"curvature": "full", "prior": "per_layer"}, 52 * 243**2, r"243 x 243.*parameters=\[...\]"),
        ({"curvature": "last_layer"}, 40 * 93**2, r"93 parameters.*parameters='last_layer'"),
        ({"curvature": "kfac"}, 8 * (4**2 + 30**2 + 30**2 + 3**2 + 4 * 30**2), r"widest layer '0'.*4 features"),
    ],
)
def test_a_curvature_that_would_not_fit(
    options: dict[str, Any], each: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Says what, how large, how much is free, what to do; with one byte more it is made."""
    model, x, y = problem()
    la = LinearizedLaplace(model, **{"prior": "single", "evaluate_at": "map"} | options)  # type: ignore[arg-type]
    plant(monkeypatch, each - 1)
    read: list[int] = []
    with pytest.raises(ValueError, match=message) as caught:
        la.fit([(x, y)], progress=lambda event: read.append(1))
    assert not read and "GiB at its peak, and 0.0 GiB are free on cpu" in str(caught.value)
    plant(monkeypatch, each)
    la.fit([(x, y)])


def test_the_callback_says_so_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 1000)
    made = routine()
    with pytest.raises(ValueError, match="111 parameters"):
        fit(made, FitLaplace(curvature="full", calibrate=False))
    assert not made.losses


def test_joint_covariances_of_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """``[batch, positions * outputs, positions * outputs]``, and samples of as many outputs."""
    model = randomize(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1))).double()
    images = torch.randn(4, 1, 5, 5, dtype=torch.float64)
    labels = torch.zeros(4, 5, 5, dtype=torch.long)
    for curvature, size in (("kfac", 0), ("diag", 30)):
        la = LinearizedLaplace(model, prior="single", evaluate_at="map", curvature=curvature).fit([(images, labels)])  # type: ignore[arg-type]
        needed = 8 * (2 * 4 * 75**2 + 4 * 75 * size)
        with monkeypatch.context() as patch:
            plant(patch, needed - 1)
            with pytest.raises(ValueError, match=r"4 samples with 75 outputs each.*covariance='samples'"):
                la.function_covariance(images)
            plant(patch, needed)
            assert la.function_covariance(images)[1].shape == (4, 75, 75)
            plant(patch, 4 * 10 * 300 * 8 - 1)
            with pytest.raises(ValueError, match=r"10 samples of .* outputs.*smaller batches"):
                la.predictive(images, covariance="samples", num_samples=10)
            assert la.predictive(images[:2], covariance="samples", num_samples=10).shape == (2, 3, 5, 5)


def test_kernels_of_the_dual_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = problem()
    plant(monkeypatch, 5000)
    with pytest.raises(ValueError, match=r"training outputs and 243 weights.*SampledEvidence"):
        DualLaplace(model, structured=[IsotropicPrior(["0", "2"])]).fit([(x, torch.randn(9, 3, dtype=torch.float64))])


def test_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the machine and its container; 16 GiB where nobody says."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\n")
    assert memory.free_memory(cpu) == 3000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert memory.free_memory(cpu) == 3000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    assert memory.free_memory(cpu) == 400_000
    monkeypatch.setattr(memory, "_of_the_machine", lambda: None)
    monkeypatch.setattr(memory, "_GROUP", tmp_path / "none")
    assert memory.free_memory(cpu) == 16 * GIB


KEPT = """
import resource
from pathlib import Path

import torch

from tu_symmetry.memory import give_back


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


torch.ones(2**23 - 2**16)  # 32 MB, from which on smaller ones are kept
{}
held = [(torch.ones(2**21), torch.ones(2**10)) for _ in range(32)]
before, small = resident(), [b for _, b in held]
del held
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("call", ["give_back()", ""])
def test_freed_blocks_go_back(call: str) -> None:
    """Blocks between which small ones are held, and which the library keeps once a larger one was freed."""
    given = subprocess.run([sys.executable, "-c", KEPT.format(call)], capture_output=True, text=True, check=True)
    assert (int(given.stdout) > 24 * 2**23) == bool(call)
