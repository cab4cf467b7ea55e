"""Probabilistic deep image prior for computed tomography (arXiv 2203.00479)."""

from __future__ import annotations

from tu_symmetry.experiments.deep_image_prior.posteriors import dropout_posterior, linearized_posterior
from tu_symmetry.experiments.deep_image_prior.report import report
from tu_symmetry.experiments.deep_image_prior.sampled import sampled_posterior
from tu_symmetry.experiments.deep_image_prior.unet import UNet

__all__ = ["UNet", "dropout_posterior", "linearized_posterior", "report", "sampled_posterior"]
