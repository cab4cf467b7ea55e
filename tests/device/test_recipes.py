"""What a reader types for each recipe, small, on a GPU: every command runs, and computes there if it can."""

from __future__ import annotations

import gc
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from recipe_runs import run_files, typed_commands

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cuda")]
FAST = (
    "compact_posterior/digits",
    "compact_posterior/transpositions",
    "linearized_laplace/toy",
    "rebasin/fashion-small",
    "representation_cost/mnist",
    "symmetry_toy",
)
RECIPES = sorted({typed.recipe for typed in typed_commands()})
OWN = "symmetry_aware/"  # of tests/experiments/test_symmetry_aware.py, which take the device too


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=() if r in FAST else pytest.mark.slow, id=r) for r in RECIPES if not r.startswith(OWN)],
)
def test_every_command_runs(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.cuda.init()
    before = allocations()
    for typed in run_files([typed for typed in typed_commands() if typed.recipe == recipe], tmp_path, "gpu"):
        there = typed.command != "run"
        if not there:
            module, _, name = typed.content["command"]["class_path"].rpartition(".")
            there = "device" in inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert (allocations() > before) == there, typed
        gc.collect()
        before = allocations()


def allocations() -> int:
    """How many blocks of device memory torch has handed out so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])
