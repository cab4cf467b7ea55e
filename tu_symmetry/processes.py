"""Work of several processes, as ``torchrun`` starts them: who takes what, and how the results come together.

Within :func:`together` each of N processes computes its share, and all have all results, in the order in which one
process would have found them; elsewhere there is one process. What goes wrong in one of them is raised in all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_PATIENCE = timedelta(days=7)  # with others that work on longer shares
_working: list[bool] = []  # whether processes share work now; a callback on one rank of a run does not


class ElsewhereError(RuntimeError):
    """What went wrong in another process, which says it."""


@contextmanager
def together() -> Iterator[None]:
    """Let the processes that ``torchrun`` started share work, for the time of a block; one stays by itself.

    All of them have to run the block alike. A process group that exists is used; else it is one of gloo's.
    """
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not known and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo", timeout=_PATIENCE)
    _working.append(known or int(os.environ.get("WORLD_SIZE", "1")) > 1)
    try:
        yield
    finally:
        if _working.pop() and not known:
            torch.distributed.destroy_process_group()


def rank() -> int:
    """The number of this process; 0 if it works alone."""
    return torch.distributed.get_rank() if _working and _working[-1] else 0


def count() -> int:
    """How many processes share work."""
    return torch.distributed.get_world_size() if _working and _working[-1] else 1


def shared(number: int, compute: Callable[[int], T], *, progress: Callable[[int], Any] = lambda done: None) -> list[T]:
    """``[compute(k) for k in range(number)]``, of which each process computes every N-th.

    Args:
        number: how many results there are.
        compute: is called with the numbers of this process's share, in order. What it returns is pickled.
        progress: is called with how many of all are done, as far as this process can tell.

    Raises:
        Exception: what ``compute`` raised here or, as an :class:`ElsewhereError`, in another process.
    """
    world = count()
    found: list[T] = []
    error: Exception | None = None
    try:
        for k in range(rank(), number, world):
            found.append(compute(k))
            progress(min(k + world, number))
    except Exception as raised:
        if world == 1:
            raise
        raised.add_note(f"in process {rank()}")
        error = raised
    every = gathered((found, error))
    for place, (_, failure) in enumerate(every):
        _raise(failure, place)
    return [every[k % world][0][k // world] for k in range(number)]


def gathered(value: T) -> list[T]:
    """What all processes have, in their order."""
    every = [value] * count()
    if count() > 1:
        torch.distributed.all_gather_object(every, value)
    return every


def by_first(compute: Callable[[], T]) -> T:
    """What the first process computes, in all of them; the others wait.

    Raises:
        Exception: what ``compute`` raised, in other processes as an :class:`ElsewhereError`.
    """
    if count() == 1:
        return compute()
    told: list[Any] = [None, None]
    if rank() == 0:
        try:
            told[0] = compute()
        except Exception as error:
            told[1] = error
    torch.distributed.broadcast_object_list(told, src=0)
    _raise(told[1], 0)
    result: T = told[0]
    return result


def _raise(error: Exception | None, place: int) -> None:
    if error is not None and place != rank():
        raise ElsewhereError(f"process {place} failed: {error}") from error
    if error is not None:
        raise error
