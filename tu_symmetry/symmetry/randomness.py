"""Random numbers of one's own: torch's global random state is a user's, and stays what it was.

Law (tests/symmetry/test_bad_states.py): ``torch.random.get_rng_state()`` is the same before and after every
public function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def leaves_randomness(function: Callable[P, T]) -> Callable[P, T]:
    """A function after which torch's global random state is what it was before.

    Reading a ``DataLoader`` draws from it, even without shuffling, and so may a module. Within one call the state goes
    on, so that a loader that shuffles gives another order in each epoch.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices=list(cuda)):
            return function(*args, **kwargs)

    return wrapped


def own_generator(generator: torch.Generator | None) -> torch.Generator:
    """The generator, or a new one with a seed of the operating system's: torch's global state is never drawn from."""
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return generator
