"""arXiv 2310.08287 (A Symmetry-Aware Exploration of Bayesian Neural Network Posteriors)."""

from tu_symmetry.experiments.symmetry_aware.evaluation import collect, evaluate
from tu_symmetry.experiments.symmetry_aware.networks import SmallLeNet, SWAGSchedule, residual_network
from tu_symmetry.experiments.symmetry_aware.report import report

__all__ = ["SWAGSchedule", "SmallLeNet", "collect", "evaluate", "report", "residual_network"]
