"""arXiv 2401.00611 (A Compact Representation for Bayesian Neural Networks by Removing Permutation Symmetry)."""

from tu_symmetry.experiments.compact_posterior.posteriors import compare, interpolate, prune
from tu_symmetry.experiments.compact_posterior.regressions import compare_regressions, report_regressions
from tu_symmetry.experiments.compact_posterior.report import report
from tu_symmetry.experiments.compact_posterior.transpositions import make_pairs, match_pairs, report_transpositions

__all__ = [
    "compare",
    "compare_regressions",
    "interpolate",
    "make_pairs",
    "match_pairs",
    "prune",
    "report",
    "report_regressions",
    "report_transpositions",
]
