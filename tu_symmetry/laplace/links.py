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
    """Refuse unknown ones; the Laplace bridge (arXiv 2003.01227) among them, which changes the predicted class."""
    if link_approx not in ("mc", "probit", "mean"):
        raise ValueError(f"link_approx={link_approx!r} is not known; choose 'mc', 'probit' or 'mean'")


def shrunk_logits(mean: Tensor, variance: Tensor) -> Tensor:
    """MacKay's ``f / sqrt(1 + pi/8 var)``: sigmoid and softmax of it are nearly the means of sigmoid and softmax."""
    return mean / (1 + math.pi / 8 * variance).sqrt()
