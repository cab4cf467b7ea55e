"""The toy figure of arXiv 2310.08287: the weights of a 2-2-1 perceptron before and after removing symmetries.

Thousands of initializations are trained at once, those that fit are kept as samples of the posterior, and four panels
show the last layer's weights: raw, scaled, sorted, both. How far the posterior collapses is told by two numbers, the
sum of the marginal variances of all weights and the number of modes that a clustering finds.
"""

from tu_symmetry.experiments.symmetry_toy.groups import TwoGroupsDataModule
from tu_symmetry.experiments.symmetry_toy.networks import Perceptron
from tu_symmetry.experiments.symmetry_toy.removal import remove
from tu_symmetry.experiments.symmetry_toy.report import report

__all__ = ["Perceptron", "TwoGroupsDataModule", "remove", "report"]
