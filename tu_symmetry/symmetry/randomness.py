"""Random numbers of one's own: the global random states of torch, NumPy and Python stay as they were."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
T = TypeVar("T")


def leaves_randomness(function: Callable[P, T]) -> Callable[P, T]:
    """A function after which the global random states are what they were before."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        others = np.random.get_state(), random.getstate()
        try:
            with torch.random.fork_rng(devices=list(cuda)):
                return function(*args, **kwargs)
        finally:
            np.random.set_state(others[0])
            random.setstate(others[1])

    return wrapped


def own_generator(generator: torch.Generator | None) -> torch.Generator:
    """The generator, or a new one with a seed of the operating system's: torch's global state is never drawn from."""
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return generator
