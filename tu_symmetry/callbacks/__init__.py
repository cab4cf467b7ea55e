"""Room: callbacks for Lightning trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tu_symmetry._lazy import attach

_EXPORTS: dict[str, str] = {
    "EvidenceWeightDecay": "weight_decay",
    "FitCompactPosterior": "compact",
    "FitLaplace": "laplace",
    "LastCheckpoint": "checkpoint",
    "PosteriorDraws": "draws",
    "PosteriorSnapshots": "snapshots",
    "PredictiveWriter": "reference",
    "ProgressLines": "progress",
    "Rebasin": "rebasin",
    "ReferencePredictive": "reference",
    "ScaleCanonicalization": "scale",
    "TrueTemperature": "draws",
}

__all__ = [
    "EvidenceWeightDecay",
    "FitCompactPosterior",
    "FitLaplace",
    "LastCheckpoint",
    "PosteriorDraws",
    "PosteriorSnapshots",
    "PredictiveWriter",
    "ProgressLines",
    "Rebasin",
    "ReferencePredictive",
    "ScaleCanonicalization",
    "TrueTemperature",
]

if TYPE_CHECKING:
    from tu_symmetry.callbacks.checkpoint import LastCheckpoint
    from tu_symmetry.callbacks.compact import FitCompactPosterior
    from tu_symmetry.callbacks.draws import PosteriorDraws, TrueTemperature
    from tu_symmetry.callbacks.laplace import FitLaplace
    from tu_symmetry.callbacks.progress import ProgressLines
    from tu_symmetry.callbacks.rebasin import Rebasin
    from tu_symmetry.callbacks.reference import PredictiveWriter, ReferencePredictive
    from tu_symmetry.callbacks.scale import ScaleCanonicalization
    from tu_symmetry.callbacks.snapshots import PosteriorSnapshots
    from tu_symmetry.callbacks.weight_decay import EvidenceWeightDecay
else:
    __getattr__, __dir__ = attach(__name__, _EXPORTS)
