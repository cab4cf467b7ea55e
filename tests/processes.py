"""Work in other processes: copies of one that has imported what takes seconds, and has started no threads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import start_processes

multiprocessing.set_forkserver_preload(
    ["lightning.pytorch.cli", "sklearn.datasets", "torch_uncertainty.routines", "tu_symmetry.tables.commands"]
)


def side_by_side(work: Callable[..., None], *arguments: Any, count: int = 1) -> None:
    """Call ``work(rank, *arguments)`` in so many processes at once; an error in one of them is raised here."""
    start_processes(alone, (work, *arguments), nprocs=count, start_method="forkserver")


def alone(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    work(rank, *arguments)
