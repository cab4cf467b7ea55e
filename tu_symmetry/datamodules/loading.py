"""Batches of tensors by index, in an order that is a function of the seed and the epoch alone, and can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Pair = tuple[Tensor, Tensor]
Augmentation = Callable[..., Tensor]  # of inputs, and of generators that have an equal share of them each


class TensorPairs(Dataset[Pair]):
    """Inputs ``x`` and targets ``y``, ``[n, ...]``, in memory (or on a device), read a whole batch at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Pair:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        """A batch; what a :class:`~torch.utils.data.DataLoader` asks for. The whole set in order is not copied."""
        if len(indices) == len(self) and list(indices) == list(range(len(self))):
            return self.x, self.y
        chosen = torch.as_tensor(indices, device=self.x.device)
        return self.x[chosen], self.y[chosen]


class SeededOrder(DistributedSampler[Pair]):
    """A shuffle that is a function of ``seed`` and the epoch alone; each process of a parallel run takes its share.

    Orders of different seeds are independent, where :class:`~torch.utils.data.DistributedSampler` adds seed and epoch.
    """

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]  # torch types the samples, not the indices
        return iter(self.order().tolist())

    def order(self) -> Tensor:
        """Indices of this process in this epoch; the first ones are repeated where the shares would be unequal."""
        n = len(self.dataset)  # type: ignore[arg-type]
        generator = _generator(self.seed, self.epoch)
        order = torch.randperm(n, generator=generator, device="cpu") if self.shuffle else torch.arange(n, device="cpu")
        order = order[torch.arange(self.total_size, device="cpu") % n]
        return order[self.rank : self.total_size : self.num_replicas]

    def generator(self, batch: int) -> torch.Generator:
        """A generator for one batch of this epoch: a function of the seed, the epoch, the batch and the process."""
        return _generator(self.seed, self.epoch, 1 + batch, self.rank)  # [seed, epoch, 0, 0] is [seed, epoch] to numpy


def _generator(*entropy: int) -> torch.Generator:
    """A generator on the CPU that is a function of these numbers."""
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


class ResumableLoader(DataLoader[Any]):
    """A loader in :class:`SeededOrder` whose place within the epoch is part of Lightning's checkpoints.

    Args:
        sampler: the order, or the first of several.
        orders: all of several orders; batches are ``[orders, batch, ...]`` then, row by row those of each order.
        augment: what is done to the inputs of every batch, with the order's generator of that batch; of several orders
            to ``[orders * batch, ...]``, with a generator of each.
    """

    def __init__(
        self,
        dataset: TensorPairs,
        batch_size: int,
        sampler: SeededOrder,
        orders: Sequence[SeededOrder] = (),
        augment: Augmentation | None = None,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, collate_fn=as_it_is)
        self.orders = tuple(orders)
        self.augment = augment
        self._done = 0
        self._resume: tuple[int, int] | None = None  # epoch, and batches of it that are done

    def set_epoch(self, epoch: int) -> None:
        """Take the orders of this epoch. Lightning does so by itself, through the sampler."""
        self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, int]:
        """The place: the epoch, and how many of its batches have been given."""
        return {"epoch": self.sampler.epoch, "done": self._done}  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume that epoch after those batches; other epochs start at their beginning."""
        self._resume = (state_dict["epoch"], state_dict["done"])

    def __iter__(self) -> Any:
        """Batches; nothing is read before the first one is asked for, when Lightning has set the epoch."""
        epoch, resume = self.sampler.epoch, self._resume  # type: ignore[attr-defined]
        self._resume = None
        self._done = resume[1] if resume is not None and resume[0] == epoch else 0
        dataset: TensorPairs = self.dataset  # type: ignore[assignment]
        orders: Any = self.orders or (self.sampler,)
        for one in orders:
            one.set_epoch(epoch)
        assert self.batch_size is not None
        table = torch.stack([one.order() for one in orders])
        every = torch.arange(len(dataset), device="cpu")
        whole = not self.orders and len(every) <= self.batch_size and torch.equal(table[0], every)  # is not copied
        for columns in table.to(dataset.x.device).split(self.batch_size, dim=1)[self._done :]:
            self._done += 1
            chosen = columns if self.orders else columns[0]
            x, y = (dataset.x, dataset.y) if whole else (dataset.x[chosen], dataset.y[chosen])
            if self.augment is not None:
                images = x.flatten(0, 1) if self.orders else x
                x = self.augment(images, *(one.generator(self._done) for one in orders)).view_as(x)
            yield x, y


def flip_and_shift(x: Tensor, *generators: torch.Generator, shift: int = 4) -> Tensor:
    """Images ``[n, channels, height, width]``, each flipped left to right at random and shifted over a border of zeros.

    The generators are on the CPU, each with an equal share of the images; ``shift`` is the largest one, in pixels.
    """
    count, channels, height, width = x.shape
    drawn = []
    for generator in generators:
        own = count // len(generators)
        flips = torch.rand(own, generator=generator, device="cpu") < 0.5
        shifts = torch.randint(2 * shift + 1, (2, own), generator=generator, device="cpu")
        drawn.append(torch.cat([flips.unsqueeze(0), shifts]))
    flip, top, left = torch.cat(drawn, 1).unsqueeze(-1).to(x.device)
    padded = F.pad(torch.where(flip[:, :, None, None] > 0, x.flip(-1), x), [shift] * 4)
    rows = (top + torch.arange(height, device=x.device))[:, None, :, None]
    columns = (left + torch.arange(width, device=x.device))[:, None, None, :]
    image = torch.arange(count, device=x.device)[:, None, None, None]
    return padded[image, torch.arange(channels, device=x.device)[:, None, None], rows, columns]


def as_it_is(batch: Any) -> Any:
    """What the data set gave (it gives whole batches already)."""
    return batch
