"""Likelihoods of :class:`~tu_symmetry.LinearizedLaplace`, for options that their names do not say."""

from tu_symmetry.laplace.likelihood import Bernoulli, Categorical, Likelihood

__all__ = ["Bernoulli", "Categorical", "Likelihood"]
