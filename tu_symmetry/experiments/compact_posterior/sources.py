"""What the commands of this paper read: data on a device, an architecture with its graph, and the folders of runs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches, chosen_device
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import evenly
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph

SAMPLES = "samples"
Q_D, Q_R = "q_d.safetensors", "q_r.safetensors"
COLUMNS = ("hmc/q_d", "hmc/q_r", "ensemble/q_d", "ensemble/q_r", "vi/q")


@dataclass(frozen=True)
class Runs:
    """The folders that the runs of Table 1 have written.

    Attributes:
        hmc: of the chain: ``samples/``, ``q_d.safetensors`` and ``q_r.safetensors``.
        ensemble: of the deep ensemble: the same.
        vi: of variational inference: ``q.safetensors``.
    """

    hmc: Path
    ensemble: Path
    vi: Path

    def posterior(self, column: str) -> Path:
        """The file of a column of Table 1, ``hmc/q_d`` for example."""
        source, _, q = column.partition("/")
        return getattr(self, source) / f"{q}.safetensors"


class Study:
    """An architecture and its data on one device.

    Args:
        model: the architecture; its own weights do not matter.
        data: the data.
        seed: of all draws.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
    """

    def __init__(self, model: nn.Module, data: ImageDataModule, seed: int, device: str) -> None:
        self.device, self.seed = chosen_device(device), seed
        data.prepare_data()
        self.model = model.to(self.device).eval()
        self.train = Batches(data.train.x.to(self.device), data.train.y.to(self.device))
        self.test = Batches(data.test.x.to(self.device), data.test.y.to(self.device))

    @cached_property
    def graph(self) -> SymmetryGraph:
        """The architecture's symmetries, verified."""
        graph = discover_symmetries(self.model, self.train.x[:2])
        graph.require_verified()
        return graph

    def generator(self, purpose: str) -> torch.Generator:
        """A generator that depends on the seed and the purpose only."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{purpose}".encode()))

    def posterior(self, path: Path) -> CompactPosterior:
        """A fitted Gaussian of this architecture."""
        return CompactPosterior.load(path, self.graph).to(self.device)

    def samples(self, run: Path, wanted: int | None = None) -> dict[str, Tensor]:
        """The networks of a run, stacked: ``wanted`` evenly spaced ones of them, or all."""
        store = SampleStore.open(run / SAMPLES)
        return store.stack(evenly(len(store), wanted), device=self.device)
