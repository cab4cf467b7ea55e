"""arXiv 2203.00479: the linearized deep image prior, its calibration, and its orderings."""

from tu_symmetry.experiments.deep_image_prior.posteriors import (
    dropout_posterior,
    linearized_posterior,
    sampled_against_exact,
    sampled_posterior,
    total_variation_prior,
)
from tu_symmetry.experiments.deep_image_prior.report import report, report_scan
from tu_symmetry.experiments.deep_image_prior.unet import UNet

__all__ = [
    "UNet",
    "dropout_posterior",
    "linearized_posterior",
    "report",
    "report_scan",
    "sampled_against_exact",
    "sampled_posterior",
    "total_variation_prior",
]
