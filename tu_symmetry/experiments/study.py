"""What the commands of several papers read: images, an architecture and its symmetries, on one device."""

from __future__ import annotations

import zlib
from functools import cached_property

import torch
from torch import nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches, chosen_device
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.parts import digest_tensors


class Images:
    """Training, test and, if there are any, out-of-distribution images on one device.

    Args:
        data: what reads them.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Attributes:
        train: training images, in order, and their classes.
        test: test images and their classes.
        other: out-of-distribution images, None without ``eval_ood``.
    """

    def __init__(self, data: ImageDataModule, device: str = "auto") -> None:
        self.device = chosen_device(device)
        data.prepare_data()
        self.train, self.test = (
            Batches(part.x.to(self.device), part.y.to(self.device)) for part in (data.train, data.test)
        )
        self.other = data.ood.x.to(self.device) if data.eval_ood else None

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of images."""
        sizes = {"training": len(self.train.x), "test": len(self.test.x)}
        return sizes if self.other is None else sizes | {"out-of-distribution": len(self.other)}

    def digest(self) -> str:
        """A digest of all images and classes."""
        other = () if self.other is None else (self.other,)
        return digest_tensors(self.train.x, self.train.y, self.test.x, self.test.y, *other)


class Study(Images):
    """An architecture and its data on one device.

    Args:
        model: the architecture; its own weights do not matter.
        data: the data.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
        seed: the seed of all draws.

    Attributes:
        model: in evaluation mode, on the device.
    """

    def __init__(self, model: nn.Module, data: ImageDataModule, device: str = "auto", seed: int = 0) -> None:
        super().__init__(data, device)
        self.model, self.seed = model.to(self.device).eval(), seed

    @cached_property
    def graph(self) -> SymmetryGraph:
        """The architecture's symmetries, verified."""
        graph = discover_symmetries(self.model, self.train.x[:2])
        graph.require_verified()
        return graph

    def generator(self, purpose: str) -> torch.Generator:
        """A generator that depends on the seed and the purpose only."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{purpose}".encode()))
