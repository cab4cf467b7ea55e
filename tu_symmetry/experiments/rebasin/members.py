"""The trained networks of one kind, on one device, with their data and their symmetries."""

from __future__ import annotations

import itertools
from pathlib import Path

from torch import nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.study import Study
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import State, unstack
from tu_symmetry.tables.parts import digest_tensors


class Members(Study):
    """Independently trained networks of one architecture.

    Args:
        model: the architecture; its own weights do not matter.
        data: the data.
        samples: folder of the networks, a sample store.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Attributes:
        states: the states of the networks, on the device.

    Raises:
        SampleFileError: no store, or networks of another architecture.
        ValueError: fewer than two networks.
    """

    def __init__(self, model: nn.Module, data: ImageDataModule, samples: Path, device: str) -> None:
        super().__init__(model, data, device)
        store = SampleStore.open(samples, like=self.model.state_dict())
        self.states: list[State] = unstack(store.load(device=self.device))
        if len(self.states) < 2:
            raise ValueError(f"barriers are between networks, but {samples} holds {len(self.states)}: train 2 at least")

    @property
    def networks(self) -> str:
        """Digest of all networks."""
        return digest_tensors(*(t for state in self.states for t in state.values()))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs of networks, those with the first one in front."""
        return list(itertools.combinations(range(len(self.states)), 2))

    def first_images(self, count: int, batch_size: int = 1000) -> Batches:
        """The first images of the training set.

        Raises:
            ValueError: there are not so many.
        """
        if not 1 <= count <= len(self.train.x):
            raise ValueError(f"{count} training images are asked for, but there are {len(self.train.x)}")
        return Batches(self.train.x[:count], self.train.y[:count], batch_size)
