"""arXiv 2310.08287, section 6: the representation cost of networks trained with and without weight decay."""

from tu_symmetry.experiments.representation_cost.networks import ConvNet
from tu_symmetry.experiments.representation_cost.profiles import take_profiles
from tu_symmetry.experiments.representation_cost.report import report

__all__ = ["ConvNet", "report", "take_profiles"]
