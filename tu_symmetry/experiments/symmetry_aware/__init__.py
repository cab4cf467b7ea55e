"""arXiv 2310.08287 (A Symmetry-Aware Exploration of Bayesian Neural Network Posteriors)."""

from tu_symmetry.experiments.symmetry_aware.evaluation import evaluate
from tu_symmetry.experiments.symmetry_aware.networks import SmallLeNet
from tu_symmetry.experiments.symmetry_aware.report import report

__all__ = ["SmallLeNet", "evaluate", "report"]
