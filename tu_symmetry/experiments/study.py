"""What the commands of several papers read: images, an architecture and its symmetries, on one device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches, chosen_device
from tu_symmetry.reporting.progress import Display, Progress, StageProgress, Tracker
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.tables.outcome import digest_tensors

T = TypeVar("T")


def tracked(description: str, jobs: Sequence[T], name: Callable[[T], str] | None = None) -> Iterator[T]:
    """Jobs one after the other; how many are done is shown, and the name of the one at work."""
    return (job for job, _ in followed(description, jobs, name))


def followed(
    description: str, jobs: Sequence[T], name: Callable[[T], str] | None = None
) -> Iterator[tuple[T, Progress]]:
    """The same, each job with an argument ``progress`` for the long computations that it is made of."""
    with Display().track(description, len(jobs)) as tracker:
        for done, job in enumerate(jobs):
            of = {} if name is None else {"of": name(job)}
            tracker.update(done, **of)
            yield job, partial(_show, tracker, done, of, StageProgress())
        tracker.update(len(jobs))


def _show(tracker: Tracker, done: int, of: dict[str, str], job: StageProgress, info: dict[str, Any]) -> None:
    tracker.update(done, **of, now=job.line(info))


class Images:
    """Training, test and, with ``eval_ood``, out-of-distribution images (``other``) on one device."""

    def __init__(self, data: ImageDataModule, device: str = "auto") -> None:
        self.device, self.data = chosen_device(device), data
        data.prepare_data()
        self.train, self.test = (
            Batches(part.x.to(self.device), part.y.to(self.device)) for part in (data.train, data.test)
        )
        self.other = data.ood.x.to(self.device) if data.eval_ood else None

    def held_out(self, purpose: str) -> tuple[Tensor, Tensor]:
        """Validation images and their classes."""
        if self.data.val_size < 1:
            raise ValueError(f"data: val_size must be at least 1, for {purpose} validation images")
        return self.data.val.x.to(self.device), self.data.val.y.to(self.device)

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of images."""
        sizes = {"training": len(self.train.x), "validation": len(self.data.val.x), "test": len(self.test.x)}
        return sizes if self.other is None else sizes | {"out-of-distribution": len(self.other)}

    def digest(self) -> str:
        """A digest of all images and classes."""
        other = () if self.other is None else (self.other,)
        return digest_tensors(self.train.x, self.train.y, self.test.x, self.test.y, *other)


class Study(Images):
    """An architecture, in evaluation mode, and its data on one device; its own weights do not matter."""

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
