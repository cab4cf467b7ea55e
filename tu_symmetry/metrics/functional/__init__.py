"""Pure functions behind the metrics: tensors in, tensors out."""

from tu_symmetry.metrics.functional.discrepancy import maximum_mean_discrepancy, mmd_bandwidths, network_discrepancy
from tu_symmetry.metrics.functional.diversity import pairwise_mutual_information
from tu_symmetry.metrics.functional.homogeneity import HomogeneityTest, marginal_homogeneity, unit_samples
from tu_symmetry.metrics.functional.predictive import predictive_agreement, predictive_total_variation
from tu_symmetry.metrics.functional.representation import RepresentationCosts, representation_costs

__all__ = [
    "HomogeneityTest",
    "RepresentationCosts",
    "marginal_homogeneity",
    "maximum_mean_discrepancy",
    "mmd_bandwidths",
    "network_discrepancy",
    "pairwise_mutual_information",
    "predictive_agreement",
    "predictive_total_variation",
    "representation_costs",
    "unit_samples",
]
