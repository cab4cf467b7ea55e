"""From Gaussian outputs of a network to predictions of what is observed."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torch import Tensor

LinkApprox = Literal["mc", "probit", "mean"]


class GaussianPredictive(NamedTuple):
    """Predictive distribution of a regression.

    Attributes:
        mean: ``f(x)``, ``[batch, outputs]``.
        variance: the variance of a new observation: ``epistemic`` plus the noise variance.
        epistemic: variance of the network's outputs.
    """

    mean: Tensor
    variance: Tensor
    epistemic: Tensor


def check_link_approx(link_approx: str) -> None:
    """Refuse link approximations that are not known.

    The Laplace bridge (arXiv 2003.01227) is none of them: where variances are large, the class with the least variance
    wins there, whatever the means say.

    Raises:
        ValueError: another one.
    """
    if link_approx == "bridge":
        raise ValueError(
            "link_approx='bridge' is left out: with the variances that a Laplace approximation of several classes "
            "has, it changes which class is predicted, and its probabilities are far from the true ones; choose "
            "'mc', or 'probit' in closed form"
        )
    if link_approx not in ("mc", "probit", "mean"):
        raise ValueError(f"link_approx={link_approx!r} is not known; choose 'mc', 'probit' or 'mean'")


def shrunk_logits(mean: Tensor, variance: Tensor) -> Tensor:
    """MacKay's ``f / sqrt(1 + pi/8 var)``: the sigmoid of it is nearly the mean of the sigmoid."""
    return mean / (1 + math.pi / 8 * variance).sqrt()


def probit_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    """Class probabilities from Gaussian logits in closed form, by MacKay's ``softmax(f / sqrt(1 + pi/8 var))``.

    Args:
        mean: the mean of the logits, ``[..., classes]``.
        variance: the variance of every logit, in the same shape.
    """
    return shrunk_logits(mean, variance).softmax(-1)
