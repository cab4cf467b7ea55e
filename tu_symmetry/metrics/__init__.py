"""Metrics of posteriors and of weight-space symmetries, as torchmetrics classes.

Their pure functions are in :mod:`tu_symmetry.metrics.functional`. Each class loads on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tu_symmetry._lazy import attach

_EXPORTS: dict[str, str] = {
    "FunctionalDiversity": "diversity",
    "MarginalHomogeneity": "homogeneity",
    "MaximumMeanDiscrepancy": "discrepancy",
    "PairwiseMutualInformation": "diversity",
    "PredictiveAgreement": "predictive",
    "PredictiveTotalVariation": "predictive",
    "QuotientDistance": "quotient",
    "RepresentationCost": "representation",
    "TranspositionCount": "transpositions",
}

__all__ = [
    "FunctionalDiversity",
    "MarginalHomogeneity",
    "MaximumMeanDiscrepancy",
    "PairwiseMutualInformation",
    "PredictiveAgreement",
    "PredictiveTotalVariation",
    "QuotientDistance",
    "RepresentationCost",
    "TranspositionCount",
]

if TYPE_CHECKING:
    from tu_symmetry.metrics.discrepancy import MaximumMeanDiscrepancy
    from tu_symmetry.metrics.diversity import FunctionalDiversity, PairwiseMutualInformation
    from tu_symmetry.metrics.homogeneity import MarginalHomogeneity
    from tu_symmetry.metrics.predictive import PredictiveAgreement, PredictiveTotalVariation
    from tu_symmetry.metrics.quotient import QuotientDistance
    from tu_symmetry.metrics.representation import RepresentationCost
    from tu_symmetry.metrics.transpositions import TranspositionCount
else:
    __getattr__, __dir__ = attach(__name__, _EXPORTS)
