"""Pure functions behind the metrics: tensors in, tensors out."""

from tu_symmetry.metrics.functional.predictive import predictive_agreement, predictive_total_variation

__all__ = ["predictive_agreement", "predictive_total_variation"]
