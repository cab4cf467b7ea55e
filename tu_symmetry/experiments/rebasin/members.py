"""The trained networks of one kind, on one device, with their data and their symmetries."""

from __future__ import annotations

import itertools
from functools import cached_property
from pathlib import Path

from torch import nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches, chosen_device
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import State, unstack
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.parts import digest_tensors


class Members:
    """Independently trained networks of one architecture.

    Args:
        model: the architecture; its own weights do not matter.
        data: the data.
        samples: folder of the networks, a sample store.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Attributes:
        model: in evaluation mode, on the device.
        states: of the networks, on the device.
        train: the training set, on the device.
        test: the test set, on the device.

    Raises:
        SampleFileError: no store, or networks of another architecture.
        ValueError: fewer than two networks.
    """

    def __init__(self, model: nn.Module, data: ImageDataModule, samples: Path, device: str) -> None:
        self.device = chosen_device(device)
        data.prepare_data()
        self.model = model.to(self.device).eval()
        store = SampleStore.open(samples, like=self.model.state_dict())
        self.states: list[State] = unstack(store.load(device=self.device))
        if len(self.states) < 2:
            raise ValueError(f"barriers are between networks, but {samples} holds {len(self.states)}: train 2 at least")
        self.train = Batches(data.train.x.to(self.device), data.train.y.to(self.device))
        self.test = Batches(data.test.x.to(self.device), data.test.y.to(self.device))

    @cached_property
    def graph(self) -> SymmetryGraph:
        """The architecture's symmetries, verified."""
        graph = discover_symmetries(self.model, self.train.x[:2])
        graph.require_verified()
        return graph

    @property
    def digest(self) -> str:
        """Of all networks."""
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
