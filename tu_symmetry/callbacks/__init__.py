"""Room: callbacks for Lightning trainers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS: dict[str, str] = {
    "FitCompactPosterior": "compact",
    "FitLaplace": "laplace",
    "PosteriorSnapshots": "snapshots",
    "PredictiveWriter": "reference",
    "Rebasin": "rebasin",
    "ReferencePredictive": "reference",
    "ScaleCanonicalization": "scale",
}

__all__ = [
    "FitCompactPosterior",
    "FitLaplace",
    "PosteriorSnapshots",
    "PredictiveWriter",
    "Rebasin",
    "ReferencePredictive",
    "ScaleCanonicalization",
]

if TYPE_CHECKING:
    from tu_symmetry.callbacks.compact import FitCompactPosterior
    from tu_symmetry.callbacks.laplace import FitLaplace
    from tu_symmetry.callbacks.rebasin import Rebasin
    from tu_symmetry.callbacks.reference import PredictiveWriter, ReferencePredictive
    from tu_symmetry.callbacks.scale import ScaleCanonicalization
    from tu_symmetry.callbacks.snapshots import PosteriorSnapshots


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"tu_symmetry.callbacks.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tu_symmetry.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
