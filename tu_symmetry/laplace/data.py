"""Reading a loader, and adding up what several processes have seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tu_symmetry.laplace.inputs import batch_size, inputs_and_targets, mapped, ordinary


def batches(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """Inputs and targets on the device, batch by batch; a ``ValueError`` for a loader without samples."""
    empty = True
    for batch in loader:
        own, targets = inputs_and_targets(batch)
        inputs = mapped(lambda tensor: tensor.to(device), ordinary(own))
        if batch_size(inputs) == 0:
            continue
        empty = False
        yield inputs, ordinary(targets).to(device)
    if empty:
        raise ValueError(
            "the loader gave no samples: an empty data set, drop_last with fewer samples than one batch, or a "
            "generator that was read before (pass what can be iterated several times, such as a DataLoader)"
        )


def opened(loader: Iterable[Any], device: torch.device) -> tuple[Any, Iterator[Any]]:
    """The inputs of the first batch, and all batches of one pass (the first one again): nothing is read twice."""
    every, read = iter(loader), []

    def reading() -> Iterator[Any]:
        for batch in every:
            read.append(batch)
            yield batch

    inputs, _ = next(batches(reading(), device))
    return inputs, chain(read, every)


def count_of(loader: Iterable[Any]) -> int | None:
    """How many batches a loader will give, where it says so."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # no length, or that of a stream
        return None


def processes() -> int:
    """Number of processes that share the work; 1 without an initialized process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce(*tensors: Tensor) -> None:
    """Sum tensors over all processes, in place; nothing happens without an initialized process group."""
    if processes() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


@contextmanager
def together(device: torch.device) -> Iterator[None]:
    """Where one process fails, all do (a ``RuntimeError``): none waits for ever for sums that will not come."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = torch.tensor(float(error is not None), device=device)
    all_reduce(failed)
    if error is not None:
        raise error
    if failed.item() > 0:
        raise RuntimeError("another process could not read its share of the data; its own error says why")
