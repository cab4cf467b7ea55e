"""The digits of one client: classes are shared out among clients by a Dirichlet distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tu_symmetry.datamodules.images import DigitsDataModule
from tu_symmetry.datamodules.readers import LabeledImages


class ClientDigitsDataModule(DigitsDataModule):
    """The training images of one client, and the test images of all.

    The images of each class are shared out in proportions from a symmetric Dirichlet distribution, as usual in the
    literature on federated learning. Every image belongs to exactly one client.

    Args:
        client: number of the client, from 0.
        clients: how many there are.
        concentration: the concentration of the Dirichlet distribution: 100 gives all clients the same mixture, 0.1
            almost one class each.
        split_seed: seed of the proportions and of who gets which image.
        options: further arguments of :class:`~tu_symmetry.datamodules.DigitsDataModule`.

    Raises:
        ValueError: no such client, or a concentration that is not positive.
    """

    def __init__(
        self, client: int = 0, clients: int = 2, concentration: float = 1.0, split_seed: int = 0, **options: Any
    ) -> None:
        if not 0 <= client < clients:
            raise ValueError(f"client={client}, but clients are numbered 0 to {clients - 1}")
        if not concentration > 0:
            raise ValueError(f"concentration must be positive, got {concentration}")
        super().__init__(**options)
        self.client, self.clients = client, clients
        self.concentration, self.split_seed = concentration, split_seed

    def read(self, part: Any) -> LabeledImages:
        """The client's share of the training images; all of every other part."""
        images = super().read(part)
        if part != "train":
            return images
        mine = self.share(images.y)
        return LabeledImages(images.x[mine], images.y[mine])

    def share(self, targets: torch.Tensor) -> torch.Tensor:
        """Positions of the client's images among all, in order.

        Args:
            targets: class of each image.
        """
        drawn = np.random.default_rng(self.split_seed)
        mine = []
        for label in sorted(set(targets.tolist())):
            where = drawn.permutation(np.flatnonzero(targets.numpy() == label))
            shares = drawn.dirichlet([self.concentration] * self.clients)
            ends = np.round(np.cumsum(shares) * len(where)).astype(int)
            mine.append(where[0 if self.client == 0 else ends[self.client - 1] : ends[self.client]])
        return torch.from_numpy(np.sort(np.concatenate(mine)))
