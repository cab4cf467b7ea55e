"""How much memory is left, and an error before it is filled rather than a process that is killed."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

_SMALL = 1 << 29  # bytes that are not worth asking about
_UNKNOWN = 16 << 30  # free memory where the system does not tell
_MMAP_THRESHOLD, _BLOCK = -3, 1 << 20  # glibc's M_MMAP_THRESHOLD; the size from which blocks go back one by one
_GROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device.

    On the CPU the least of what the machine has and what its container (control group) may still take; on a GPU also
    what torch has reserved and does not use.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    known = [value for value in (_of_the_machine(), _of_the_container()) if value is not None]
    return min(known, default=_UNKNOWN)


def require_memory(needed: int, device: torch.device, what: str, instead: str) -> None:
    """Refuse what needs more bytes at its peak than are free; ``what`` is a subject with its size."""
    if needed > _SMALL and needed > (free := free_memory(device)):
        raise ValueError(
            f"{what} needs about {needed / 2**30:.1f} GiB at its peak, and {free / 2**30:.1f} GiB are free on "
            f"{device}; {instead}"
        )


def give_back() -> None:
    """Have the C library return freed blocks of tensors' sizes to the system at once, where it is glibc.

    By its own rule it comes to keep blocks of up to 32 MB, among which holes remain that nothing fits into.
    """
    with suppress(OSError, AttributeError, TypeError):  # another C library, or Windows
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def _of_the_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:  # all that there is, where nobody says what is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _of_the_container() -> int | None:
    """What the control group leaves; pages of files that it may drop count as free."""
    try:
        most, now = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = (_GROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
    return most - now + sum(int(row.split()[1]) for row in rows if row.startswith("inactive_file "))
