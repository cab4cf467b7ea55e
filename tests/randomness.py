"""The global random states of torch, its CUDA devices, NumPy and Python, which are a user's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def seed_all(seed: int = 0) -> None:
    """Seed them all."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def states() -> dict[str, Any]:
    """What they are, to be compared with ``==``."""
    name, keys, *rest = np.random.get_state()
    found: dict[str, Any] = {
        "torch": torch.random.get_rng_state().tolist(),
        "numpy": (name, keys.tolist(), rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    return found


def moved(call: Callable[[], Any]) -> list[str]:
    """Which of them a call has changed."""
    before = states()
    call()
    after = states()
    return [name for name, state in after.items() if state != before.get(name, state)]
