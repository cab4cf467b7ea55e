"""Pure functions behind the metrics: tensors in, tensors out."""

from tu_symmetry.metrics.functional.discrepancy import maximum_mean_discrepancy, network_discrepancy
from tu_symmetry.metrics.functional.diversity import (
    DiversitySummary,
    diversity_summary,
    pairwise_mutual_information,
)
from tu_symmetry.metrics.functional.gaussian import gaussian_wasserstein
from tu_symmetry.metrics.functional.homogeneity import (
    HomogeneityTest,
    LargestWeight,
    largest_weights,
    marginal_homogeneity,
    unit_samples,
)
from tu_symmetry.metrics.functional.predictive import predictive_agreement, predictive_total_variation
from tu_symmetry.metrics.functional.quotient import VectorDistances, vector_distances
from tu_symmetry.metrics.functional.removal import Removal, removal
from tu_symmetry.metrics.functional.representation import RepresentationCosts, representation_costs
from tu_symmetry.metrics.functional.two_sample import DiscrepancyTest, discrepancy_test

__all__ = [
    "DiscrepancyTest",
    "DiversitySummary",
    "HomogeneityTest",
    "LargestWeight",
    "Removal",
    "RepresentationCosts",
    "VectorDistances",
    "discrepancy_test",
    "diversity_summary",
    "gaussian_wasserstein",
    "largest_weights",
    "marginal_homogeneity",
    "maximum_mean_discrepancy",
    "network_discrepancy",
    "pairwise_mutual_information",
    "predictive_agreement",
    "predictive_total_variation",
    "removal",
    "representation_costs",
    "unit_samples",
    "vector_distances",
]
