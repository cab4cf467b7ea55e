"""Work of several processes, as ``torchrun`` starts them: who takes what, and how the results come together.

Within :func:`together` all of N processes are given the same. Each computes its share, and all have all results, in
the order in which one process would have found them. Elsewhere there is one process, as there is within a share: what
it calls is not shared again. What goes wrong in one of them is raised in all.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_LARGE = 1 << 16  # bytes of a tensor that is sent by itself
_PATIENCE = timedelta(days=7)  # with others that work on longer shares
_working: list[bool] = []  # whether processes share work now; a callback on one rank of a run does not


class ElsewhereError(RuntimeError):
    """What went wrong in another process, which says it."""


@contextmanager
def together() -> Iterator[None]:
    """Let the processes that ``torchrun`` started share work, for the time of a block; one stays by itself.

    All of them have to run the block alike, with the same data: Lightning's runs of several processes, which have
    shares of their own, belong outside. A process group that exists is used; else it is one of gloo's.
    """
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not known and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo", timeout=_PATIENCE)
    several = known or int(os.environ.get("WORLD_SIZE", "1")) > 1
    _working.append(_working[-1] if _working else several)  # within a share, a process stays by itself
    try:
        yield
    finally:
        _working.pop()
        if several and not known:
            torch.distributed.destroy_process_group()


def rank() -> int:
    """The number of this process; 0 if it works alone."""
    return torch.distributed.get_rank() if _working and _working[-1] else 0


def count() -> int:
    """How many processes share work."""
    return torch.distributed.get_world_size() if _working and _working[-1] else 1


def adding() -> int:
    """How many processes add up what they have seen: those that share work, else those of a run's process group."""
    known = not _working and torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if known else count()


@contextmanager
def sharing() -> Iterator[None]:
    """Let processes that add up share what follows, which is the same for all."""
    _working.append(adding() > 1)
    try:
        yield
    finally:
        _working.pop()


@contextmanager
def _alone() -> Iterator[None]:
    _working.append(False)
    try:
        yield
    finally:
        _working.pop()


def shared(
    number: int,
    compute: Callable[[int], T],
    *,
    progress: Callable[[int], Any] = lambda done: None,
    costs: Sequence[float] | None = None,
) -> list[T]:
    """``[compute(k) for k in range(number)]``, of which each process computes every N-th, or what costs as much.

    Args:
        number: how many results there are.
        compute: is called with the numbers of this process's share, in order. What it returns is pickled.
        progress: is called with how many of all are done, as far as this process can tell.
        costs: how long each takes, where that differs: the longest are dealt out first, each to the process that has
            least to do so far.

    Raises:
        Exception: what ``compute`` raised here or, as an :class:`ElsewhereError`, in another process.
    """
    owners = dealt([1.0] * number if costs is None else costs)
    found: list[T] = []

    def own() -> None:
        for k in (k for k, owner in enumerate(owners) if owner == rank()):
            with _alone():
                found.append(compute(k))
            progress(min(len(found) * count(), number))

    error = _caught(own)
    every = gathered((found if error is None else [], _said(error), number))
    _raise_first([said for _, said, _ in every], error)
    if len({asked for _, _, asked in every}) > 1:
        raise ValueError(
            f"the processes share work of different sizes, {[asked for _, _, asked in every]}: within together() all "
            "have to be given the same (files may differ, or random numbers that have no seed)"
        )
    parts = [iter(part) for part, _, _ in every]
    return [next(parts[owner]) for owner in owners]


def dealt(costs: Sequence[float]) -> list[int]:
    """Which process takes each piece of work: the longest first, each to the one that has least to do so far."""
    loads, owners = [0.0] * count(), [0] * len(costs)
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owners[k] = loads.index(min(loads))
        loads[owners[k]] += costs[k]
    return owners


def in_step(work: Callable[[], T]) -> T:
    """What ``work`` returns here; what it raises in one process is raised in all, so that none waits for its sums."""
    found: list[T] = []
    error = _caught(lambda: found.append(work()))
    _raise_first(gathered(_said(error)), error)
    return found[0]


def add_up(*tensors: Tensor) -> None:
    """Sum tensors over the processes that share work, in place."""
    for tensor in tensors if count() > 1 else ():
        total = tensor.to(_device(tensor.device))
        torch.distributed.all_reduce(total)
        tensor.copy_(total)


def gathered(value: T) -> list[T]:
    """What all processes have, in their order."""
    if count() == 1:
        return [value]
    own, heads = _Parcel.of(value), [_Parcel()] * count()
    torch.distributed.all_gather_object(heads, own.head())
    return [(own if place == rank() else head).sent(place) for place, head in enumerate(heads)]


def require_alike(digest: Callable[[], str]) -> None:
    """Raise a ValueError where processes that share work have different networks, by a digest of their weights."""
    if count() > 1 and len(set(gathered(digest()))) > 1:
        raise ValueError(
            "the processes have networks of different weights, and within together() all have to be given the same: "
            "load them from one file, or make them with one seed (torch.manual_seed)"
        )


def by_first(compute: Callable[[], T]) -> T:
    """What the first process computes, in all of them; the others wait.

    Raises:
        Exception: what ``compute`` raised, in other processes as an :class:`ElsewhereError`.
    """
    if count() == 1:
        return compute()
    told: list[Any] = [None, None]
    error: Exception | None = None

    def first() -> None:
        with _alone():
            told[0] = compute()

    if rank() == 0:
        error = _caught(first)
    own = _Parcel.of((None if error else told[0], _said(error)))
    heads = [own.head()]
    torch.distributed.broadcast_object_list(heads, src=0)
    result, said = (own if rank() == 0 else heads[0]).sent(0)
    _raise_first([said], error)
    found: T = result
    return found


@dataclass
class _Parcel:
    """What one process sends to others: a pickle, and by themselves its large tensors, which pickle slowly."""

    text: bytes = b""
    kinds: list[tuple[torch.Size, torch.dtype, str]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> _Parcel:
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(value)
        tensors = [tensor.detach() for _, tensor in packer.found.values()]
        return cls(file.getvalue(), [(t.shape, t.dtype, t.device.type) for t in tensors], tensors)

    def head(self) -> _Parcel:
        return replace(self, tensors=[])

    def sent(self, source: int) -> Any:
        """The value, once all processes have called this with what ``source`` told them."""
        received: list[Tensor] = []
        for k, (shape, dtype, kind) in enumerate(self.kinds):
            place = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
            own = self.tensors[k] if self.tensors else torch.empty(shape, dtype=dtype, device=place)
            data = own.to(_device(place)).reshape(-1).view(torch.uint8)
            torch.distributed.broadcast(data, source)
            received.append(data.view(dtype).view(shape).to(place))
        return _Unpacker(io.BytesIO(self.text), received).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: dict[int, tuple[int, Tensor]] = {}

    def persistent_id(self, value: Any) -> int | None:
        plain = type(value) is Tensor and value.layout is torch.strided and value.device.type in ("cpu", "cuda")
        if not plain or not value.is_contiguous() or value.is_conj() or value.is_neg():
            return None
        if value.device.type == "cpu" and value.nbytes < _LARGE:
            return None
        return self.found.setdefault(id(value), (len(self.found), value))[0]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, key: Any) -> Tensor:
        return self.tensors[key]


def _device(device: torch.device) -> torch.device:
    """Where the process group takes a tensor from."""
    return torch.device("cuda") if torch.distributed.get_backend() == "nccl" else device


def _caught(work: Callable[[], Any]) -> Exception | None:
    """What goes wrong, for others to hear of; where there are none it is raised at once."""
    try:
        work()
    except Exception as raised:
        if count() == 1:
            raise
        raised.add_note(f"in process {rank()}")
        return raised
    return None


def _said(error: Exception | None) -> str | None:
    """What others are told of an error, which need not be one that can be pickled."""
    return None if error is None else str(error) or type(error).__name__


def _raise_first(said: Sequence[str | None], own: Exception | None) -> None:
    """Raise what went wrong in the first of the processes where something did."""
    for place, text in enumerate(said):
        if text is not None:
            raise own if own is not None and place == rank() else ElsewhereError(f"process {place} failed: {text}")
