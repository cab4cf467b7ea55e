"""Small stages for the tests of the tables' engine, which a recipe names as ``toy_stages:count``."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch

from tu_symmetry.files import read_tensors, write_safetensors
from tu_symmetry.tables.stage import Results, StageContext, stage


@dataclass(frozen=True)
class CountOptions:
    """Steps of a random walk."""

    steps: int = 5
    scale: float = 1.0


@dataclass(frozen=True)
class NoOptions:
    """No options."""


@stage()
def count(context: StageContext, options: CountOptions) -> Results:
    """A random walk that saves each step; TOY_KILL_AT ends the process there, as kill -9 does."""
    path = context.folder / "walk.safetensors"
    walk = read_tensors(path)["walk"] if path.exists() else torch.zeros(1)
    found = len(walk) - 1
    with context.track("walking", options.steps) as tracker:
        while len(walk) <= options.steps:
            step = torch.randn(1, generator=context.generator(str(len(walk))))
            walk = torch.cat([walk, walk[-1:] + options.scale * step])
            write_safetensors(path, {"walk": walk})
            tracker.update(len(walk) - 1)
            if len(walk) - 1 == int(os.environ.get("TOY_KILL_AT", -1)):
                os.kill(os.getpid(), signal.SIGKILL)
            if len(walk) - 1 == int(os.environ.get("TOY_INTERRUPT_AT", -1)):
                raise KeyboardInterrupt
    return {"walk": walk, "found": found, "headline": f"{len(walk) - 1} steps"}


@stage(inputs=("walk", "other?"))
def double(context: StageContext, options: NoOptions) -> Results:
    """Twice the end of the walk."""
    end = context.inputs["walk"].results["walk"][-1]
    grid = {"title": "Doubled", "header": ["", "value"], "rows": [["end", f"{2 * end:.6f}"]]}
    return {"end": 2 * end, "nan": float("nan"), "tables": [grid]}
