"""Two groups of points in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from tu_symmetry.datamodules.loading import ResumableLoader, SeededOrder, TensorPairs, as_it_is


class TwoGroupsDataModule(LightningDataModule):
    """Points around two centers; targets are 0.0 and 1.0. Validation and test see the training points.

    Args:
        points: in each group.
        centers: the centers of the groups.
        spread: standard deviation of each coordinate around its center.
        batch_size: the size of training batches.
        orders: independent orders for networks trained at once, batches are ``[orders, batch, ...]`` then; the m-th
            order is that of ``seed + m``.
        seed: the seed of the points and the orders.

    Attributes:
        points: inputs ``[2 * points, 2]`` and targets ``[2 * points]``.

    Raises:
        ValueError: no points, or not two centers in the plane.
    """

    def __init__(
        self,
        points: int = 200,
        centers: Sequence[Sequence[float]] = ((1.0, 0.0), (0.0, 1.0)),
        spread: float = 0.2,
        batch_size: int = 10,
        orders: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(points, batch_size, orders or 1) < 1:
            raise ValueError(
                f"points, batch_size and orders must be at least 1, got {points}, {batch_size} and {orders}"
            )
        if [len(center) for center in centers] != [2, 2]:
            raise ValueError(f"centers must be two points in the plane, got {centers}")
        around = torch.tensor(centers, device="cpu").repeat_interleave(points, 0)
        x = around + spread * torch.randn(around.shape, generator=torch.Generator().manual_seed(seed), device="cpu")
        self.points = TensorPairs(x, torch.arange(2.0, device="cpu").repeat_interleave(points))
        self.batch_size, self.orders, self.seed = batch_size, orders, seed

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches, in an order that depends on the seed and the epoch alone."""
        orders = [SeededOrder(self.points, num_replicas=1, rank=0, seed=self.seed + m) for m in range(self.orders or 1)]
        return ResumableLoader(self.points, self.batch_size, orders[0], orders if self.orders else ())

    def val_dataloader(self) -> DataLoader[Any]:
        """All points, in order."""
        return DataLoader(self.points, batch_size=len(self.points), collate_fn=as_it_is)

    def test_dataloader(self) -> DataLoader[Any]:
        """All points, in order."""
        return self.val_dataloader()
