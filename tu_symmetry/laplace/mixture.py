"""A mixture of Laplace approximations, one around each of several networks that were trained apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tu_symmetry.laplace.likelihood import GaussianPredictive
from tu_symmetry.laplace.linearized import LinearizedLaplace


class LaplaceMixture:
    """Several :class:`~tu_symmetry.LinearizedLaplace` of equal weight, one for each member of an ensemble.

    Args:
        members: fitted approximations of networks for the same data, with one likelihood.
    """

    def __init__(self, members: Sequence[LinearizedLaplace]) -> None:
        self.members = tuple(members)
        kinds = {(la.likelihood.name, str(la.likelihood.config())) for la in self.members}
        if len(kinds) != 1:
            raise ValueError(f"a mixture needs members of one likelihood, fitted before; these have {sorted(kinds)}")

    def predictive(self, inputs: Any, *, seed: int = 0, **options: Any) -> Any:
        """The mean of the members' probabilities; of a regression the mixture's mean and variances.

        ``options`` are those of :meth:`LinearizedLaplace.predictive`; each member has a seed of its own.
        """
        found = [la.predictive(inputs, seed=seed + k, **options) for k, la in enumerate(self.members)]
        if not isinstance(found[0], GaussianPredictive):
            return torch.stack(found).mean(0)
        mean, variance, epistemic = (torch.stack(own) for own in zip(*found, strict=True))
        spread = mean.var(0, correction=0)
        return GaussianPredictive(mean.mean(0), variance.mean(0) + spread, epistemic.mean(0) + spread)
