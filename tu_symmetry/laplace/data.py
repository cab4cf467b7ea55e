"""Reading a loader, and adding up what several processes have seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tu_symmetry.laplace.inputs import batch_size, inputs_and_targets, mapped, ordinary, rows_of, tensors_in
from tu_symmetry.processes import adding, count, rank, shared


def batches(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """Inputs and targets on the device, batch by batch; a ``ValueError`` for a loader without samples."""
    return _parts(loader, device, 0, 1)


def own_batches(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """:func:`batches`; of processes that work together, and have one loader, each takes its rows of every batch."""
    return _parts(loader, device, rank(), count())


def _parts(loader: Iterable[Any], device: torch.device, place: int, places: int) -> Iterator[tuple[Any, Tensor]]:
    seen = empty = 0
    for batch in loader:
        own, targets = inputs_and_targets(batch)
        own, targets, size = ordinary(own), ordinary(targets), batch_size(own)
        if size == 0:
            continue
        if places > 1:
            rows = _rows(size, (place + seen) % places, places)  # of the smallest batches each gets some in turn
            own, targets = rows_of(own, rows), targets[rows]
        seen += 1
        if batch_size(own) == 0:
            empty += 1
            continue
        yield mapped(lambda tensor: tensor.to(device), own), targets.to(device)
    if not seen:
        raise ValueError(
            "the loader gave no samples: an empty data set, drop_last with fewer samples than one batch, or a "
            "generator that was read before (pass what can be iterated several times, such as a DataLoader)"
        )
    if seen == empty:
        raise ValueError(f"the loader gave too few samples for {places} processes to share: take fewer processes")


def _rows(size: int, place: int, places: int) -> slice:
    return slice(size * place // places, size * (place + 1) // places)


def by_rows(inputs: Any, compute: Callable[[Any], Any], axis: int = 0) -> Any:
    """``compute(inputs)``, whose results have the batch along an axis; processes that work together share the rows."""
    places, size = count(), batch_size(inputs)
    if places == 1 or size < places:
        return compute(inputs)
    device = tensors_in(inputs)[0].device

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.to(device) for part in parts], axis)

    parts = shared(places, lambda k: compute(rows_of(inputs, _rows(size, k, places))))
    if isinstance(parts[0], tuple):
        return getattr(type(parts[0]), "_make", tuple)(map(joined, zip(*parts, strict=True)))
    return joined(parts)


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


def all_reduce(*tensors: Tensor, largest: bool = False) -> None:
    """Sum tensors over all processes that add up, in place, or take the largest entries."""
    for tensor in tensors if adding() > 1 else ():
        dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)


def placed(number: int, device: torch.device) -> tuple[int, int]:
    """Where so many rows of this process begin among those of all that add up, and how many these are."""
    counts = torch.zeros(adding(), dtype=torch.int64, device=device)
    place = dist.get_rank() if adding() > 1 else 0
    counts[place] = number
    all_reduce(counts)
    return int(counts[:place].sum()), int(counts.sum())


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
