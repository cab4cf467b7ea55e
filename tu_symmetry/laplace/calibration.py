"""How far to trust a network and its posterior: sharpness and temperature, chosen on held-out data.

With temperature ``T`` the outputs have the covariance ``T J Sigma J^T``; with sharpness ``s`` the likelihood is raised
to that power. ``T = s = 1`` is the posterior of the evidence, ``T = 0`` the network itself, whose logits ``s`` scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace.data import all_reduce, own_batches, together
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.function_posterior import tempered_predictives

SHARPNESSES = (1.0, *(10 ** (i / 20) for i in range(-20, 21) if i))  # 1, and 0.1 to 10
LOUDER = tuple(10 ** (i / 20) for i in range(-80, -20))  # of a regression, whose residuals may be next to nothing
TEMPERATURES = (0.0, *(10 ** (i / 4) for i in range(-24, 9)))  # 0, and 1e-6 to 100 in quarters of a decade


@dataclass(frozen=True)
class Judged:
    """How good each of several predictions of the same samples is.

    ``nll`` are those of this process's samples (nats, sums over a sample's observations), ``[predictions, samples]``,
    and ``observations`` how many these are, ``[samples]``.
    """

    nll: Tensor
    observations: Tensor

    @cached_property
    def samples(self) -> int:
        """Their number over all processes."""
        found = torch.tensor(float(self.nll.shape[1]), dtype=torch.float64, device=self.nll.device)
        all_reduce(found)
        return int(found)

    @cached_property
    def means(self) -> Tensor:
        """The NLL of an observation, for every prediction."""
        sums = torch.cat([self.nll.sum(1), self.observations.sum(0, keepdim=True)])
        all_reduce(sums)
        if not sums[-1]:
            raise ValueError(
                "there is nothing to choose on: every observation of these data is left out (ignore_index)"
            )
        return sums[:-1] / sums[-1]

    @cached_property
    def errors(self) -> Tensor:
        """Standard errors of the differences between the means of all predictions and of the first (nats).

        Observations of one sample (the pixels of an image, say) depend on each other, so that a difference is a ratio
        of two sums over samples, whose error is that of its linearization; of a single sample it is infinite.
        """
        if self.samples < 2:
            return torch.full_like(self.means, math.inf).index_fill(0, torch.tensor(0, device=self.nll.device), 0.0)
        differences = self.nll - self.nll[0]
        means, count = self.means - self.means[0], self.observations.sum()
        squares = (differences - means.unsqueeze(1) * self.observations).square().sum(1)
        all_reduce(squares, count)
        return (squares * self.samples / (self.samples - 1)).sqrt() / count

    def choose(self, standard_errors: float) -> int:
        """The place of the best prediction, once so many standard errors are taken off the gain over the first."""
        found = (self.means + standard_errors * self.errors if standard_errors else self.means).tolist()
        return min(range(len(found)), key=lambda i: (math.isnan(found[i]), found[i]))


def judge(
    fitted: FittedLaplace, loader: Iterable[Any], candidates: list[tuple[float, float]], **options: Any
) -> Judged:
    """The predictions of held-out data at every temperature and sharpness, with the ``options`` of predictions."""
    likelihood, device = fitted.likelihood, fitted.tangent.point().device
    nll: list[Tensor] = []
    observations: list[Tensor] = []
    with together(device):
        for inputs, targets in own_batches(loader, device):
            outputs, found = tempered_predictives(fitted, inputs, candidates, **options)
            observed = likelihood.observed(outputs, targets)
            count = len(observed)
            nll.append(torch.stack([likelihood.nll(p, observed).reshape(count, -1).sum(1) for p in found]))
            observations.append(likelihood.present(observed).reshape(count, -1).sum(1).double())
    return Judged(torch.cat(nll, 1), torch.cat(observations))
