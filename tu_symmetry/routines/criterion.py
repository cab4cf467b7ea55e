"""A score for out-of-distribution data that TorchUncertainty's routines take: what a Laplace posterior leaves open."""

from __future__ import annotations

import math

from torch import Tensor

from tu_symmetry._extras import scripting_unsaid
from tu_symmetry.routines.laplace import LaplacePostProcessing

with scripting_unsaid():
    from torch_uncertainty.ood_criteria import OODCriterionInputType, TUOODCriterion


class EpistemicCriterion(TUOODCriterion):
    """The ``ood_criterion`` of a routine whose ``post_processing`` is a :class:`LaplacePostProcessing`.

    The score is :meth:`LinearizedLaplace.epistemic` over the log of the number of classes, between 0 and 1. It does not
    depend on the temperature that calibration has chosen. :class:`~tu_symmetry.callbacks.FitLaplace` connects the two;
    by hand, call :meth:`connect`.
    """

    input_type = OODCriterionInputType.POST_PROCESSING
    _source: LaplacePostProcessing | None = None

    def connect(self, post_processing: LaplacePostProcessing) -> None:
        """Score the batches that this post-processing predicts."""
        if not isinstance(post_processing, LaplacePostProcessing):
            raise ValueError("EpistemicCriterion needs a routine with post_processing=LaplacePostProcessing()")
        self.__dict__["_source"] = post_processing  # which the routine registers itself

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores ``[batch]`` of the batch whose probabilities ``[batch, classes]`` these are."""
        source = self._source
        batch = None if source is None else source.last_inputs
        if source is None or source.laplace is None or batch is None or len(batch) != len(inputs):
            raise RuntimeError(
                "EpistemicCriterion scores what a LaplacePostProcessing has just predicted: give the routine "
                "post_processing=LaplacePostProcessing(), and the trainer FitLaplace (or call connect)"
            )
        found = source.laplace.epistemic(batch, num_samples=source.predictive_options["num_samples"])
        return (found / math.log(inputs.shape[-1])).clamp(0, 1)
