"""The runs as on other machines: their settings reach torch, and the plugin does what its options say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

ELSEWHERE = """
import pytest, torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

@pytest.mark.parametrize("product", [
    lambda a: a @ a, lambda a: torch.mm(a, a, out=torch.empty_like(a)), lambda a: torch.einsum("ij,jk", a, a),
    lambda a: F.linear(a, a, a[0]), lambda a: a @ a[0], lambda a: a[0].dot(a[1]), lambda a: torch.stack([a, a]) @ a,
    lambda a: F.conv1d(a[None], a[:, :, None]), lambda a: torch.func.vmap(lambda v: v @ a)(a),
    lambda a: torch.autograd.grad((a @ (b := a.clone().requires_grad_())).cos().sum(), b)[0],
])
def test_products(product):
    a = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = torch.empty(65, dtype=torch.float64)[1:].view(8, 8).copy_(a)
    assert moved.data_ptr() % 64 == 8 and not torch.equal(product(a), product(moved))
    assert torch.allclose(product(a), product(moved), rtol=1e-12)

def test_files(tmp_path):
    a = torch.arange(6.0).view(2, 3)
    save_file({"a": a}, tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        found = [load_file(tmp_path / "a")["a"], file.get_tensor("a"), file.get_slice("a")[:]]
    assert all(torch.equal(a, t) and t.data_ptr() % 64 == 8 for t in found)
"""
SHAPES = """
import torch

def test_shapes():
    a = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = a @ a
    assert torch.equal(whole, a @ a.clone()) and not torch.equal(whole[:4], a[:4] @ a)
    assert torch.allclose(whole[:4], a[:4] @ a, rtol=1e-12) and torch.equal(torch.eye(8) @ torch.eye(8), torch.eye(8))
"""
WARNING = """
import pytest, warnings

@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning])
def test_it(kind):
    warnings.warn("so", kind)
"""


@pytest.mark.parametrize(
    ("content", "options", "outcome"),
    [
        (ELSEWHERE, ["--perturb-products", "--displace-files"], "11 passed"),
        (SHAPES + WARNING, ["--perturb-shapes", "--warnings-are-errors"], "2 failed, 1 passed"),
    ],
    ids=["elsewhere", "shapes and warnings"],
)
def test_the_plugin_does_what_its_options_say(content: str, options: list[str], outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(content)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "tests.portability", *options, str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].startswith(outcome), done.stdout + done.stderr


def test_the_settings_of_this_run_have_reached_torch() -> None:
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
