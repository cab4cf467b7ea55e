"""Members that several processes train: each has a share of the stack, and sees the batches that one process would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor


class MembersStrategy(DDPStrategy):
    """For a :class:`~tu_symmetry.routines.MembersRoutine` alone: each process trains a share of its members.

    Unlike in other strategies of several processes, all of them read the same batches, and no gradients are averaged.
    The files are those of one process, and a checkpoint of so many processes is resumed by any other number.
    ``tu-symmetry fit`` takes it by itself where ``torchrun`` starts it.
    """

    def __init__(self) -> None:
        super().__init__(process_group_backend="gloo")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Those of one process."""
        return {"num_replicas": 1, "rank": 0}

    def setup_distributed(self) -> None:
        """Start the process group; the global random states stay as they are, which are one process's."""
        with isolate_rng():
            super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Put the module on its device as it is."""
        trainer._accelerator_connector.use_distributed_sampler = False
        super(DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: Any) -> Any:
        return model


def share_sizes(count: int, unit: int, processes: int) -> list[int]:
    """How many of ``count`` members each process takes, in whole chunks of ``unit`` but for the last.

    Raises:
        ValueError: fewer chunks than processes.
    """
    chunks = -(-count // unit)
    if chunks < processes:
        raise ValueError(
            f"{count} members in chunks of {unit} are fewer than {processes} processes: start fewer, or give a smaller "
            "chunk_size"
        )
    ends = [min(count, (k + 1) * chunks // processes * unit) for k in range(processes)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def joined(part: Tensor, sizes: Sequence[int], device: torch.device) -> Tensor:
    """The shares of all processes one after the other, in all of them; they travel on ``device``."""
    rank = torch.distributed.get_rank()
    parts = [torch.empty((n, *part.shape[1:]), dtype=part.dtype, device=device) for n in sizes]
    parts[rank] = part.detach().to(device).contiguous()
    for k, sent in enumerate(parts):
        torch.distributed.broadcast(sent, k)
    return torch.cat(parts).to(part.device)
