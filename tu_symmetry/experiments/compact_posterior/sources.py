"""What the commands of this paper read: the folders of runs, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tu_symmetry.experiments.study import Study
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import evenly

SAMPLES = "samples"
Q_D, Q_R = "q_d.safetensors", "q_r.safetensors"
COLUMNS = ("hmc/q_d", "hmc/q_r", "ensemble/q_d", "ensemble/q_r", "vi/q")


@dataclass(frozen=True)
class Runs:
    """The folders that the runs of Table 1 have written.

    Attributes:
        hmc: the folder of the chain: ``samples/``, ``q_d.safetensors`` and ``q_r.safetensors``.
        ensemble: the folder of the deep ensemble: the same.
        vi: the folder of variational inference: ``q.safetensors``.
    """

    hmc: Path
    ensemble: Path
    vi: Path

    def posterior(self, column: str) -> Path:
        """The file of a column of Table 1, ``hmc/q_d`` for example."""
        source, _, q = column.partition("/")
        return getattr(self, source) / f"{q}.safetensors"


class PosteriorStudy(Study):
    """A study of posteriors that runs have written."""

    def posterior(self, path: Path) -> CompactPosterior:
        """A fitted Gaussian of this architecture."""
        return CompactPosterior.load(path, self.graph).to(self.device)

    def samples(self, run: Path, wanted: int | None = None) -> dict[str, Tensor]:
        """The networks of a run, stacked: ``wanted`` evenly spaced ones of them, or all."""
        store = SampleStore.open(run / SAMPLES)
        return store.stack(evenly(len(store), wanted), device=self.device)
