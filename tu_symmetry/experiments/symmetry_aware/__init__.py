"""arXiv 2310.08287 (A Symmetry-Aware Exploration of Bayesian Neural Network Posteriors)."""

from tu_symmetry.experiments.symmetry_aware.networks import SmallLeNet

__all__ = ["SmallLeNet"]
