"""Pure functions behind the metrics: tensors in, tensors out."""

from tu_symmetry.metrics.functional.discrepancy import maximum_mean_discrepancy, mmd_bandwidths
from tu_symmetry.metrics.functional.diversity import pairwise_mutual_information
from tu_symmetry.metrics.functional.predictive import predictive_agreement, predictive_total_variation

__all__ = [
    "maximum_mean_discrepancy",
    "mmd_bandwidths",
    "pairwise_mutual_information",
    "predictive_agreement",
    "predictive_total_variation",
]
