"""Metrics of posteriors and of weight-space symmetries, as torchmetrics classes.

Their pure functions are in :mod:`tu_symmetry.metrics.functional`. Each class loads on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "MarginalHomogeneity": "homogeneity",
    "MaximumMeanDiscrepancy": "discrepancy",
    "PairwiseMutualInformation": "diversity",
    "PredictiveAgreement": "predictive",
    "PredictiveTotalVariation": "predictive",
    "RepresentationCost": "representation",
    "TranspositionCount": "transpositions",
}

__all__ = [
    "MarginalHomogeneity",
    "MaximumMeanDiscrepancy",
    "PairwiseMutualInformation",
    "PredictiveAgreement",
    "PredictiveTotalVariation",
    "RepresentationCost",
    "TranspositionCount",
]

if TYPE_CHECKING:
    from tu_symmetry.metrics.discrepancy import MaximumMeanDiscrepancy
    from tu_symmetry.metrics.diversity import PairwiseMutualInformation
    from tu_symmetry.metrics.homogeneity import MarginalHomogeneity
    from tu_symmetry.metrics.predictive import PredictiveAgreement, PredictiveTotalVariation
    from tu_symmetry.metrics.representation import RepresentationCost
    from tu_symmetry.metrics.transpositions import TranspositionCount


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
