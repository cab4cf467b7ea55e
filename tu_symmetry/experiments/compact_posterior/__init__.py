"""arXiv 2401.00611 (A Compact Representation for Bayesian Neural Networks by Removing Permutation Symmetry)."""

from tu_symmetry.experiments.compact_posterior.posteriors import compare, interpolate, prune
from tu_symmetry.experiments.compact_posterior.report import report
from tu_symmetry.experiments.compact_posterior.transpositions import make_pairs, match_pairs, report_transpositions

__all__ = ["compare", "interpolate", "make_pairs", "match_pairs", "prune", "report", "report_transpositions"]
