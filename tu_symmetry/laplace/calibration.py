"""How far to trust a posterior: its temperature, chosen on held-out data.

With temperature ``T`` the outputs have the covariance ``T J Sigma J^T``, so that one pass over the held-out data serves
all temperatures. ``T = 1`` is the posterior of the evidence, ``T = 0`` the network itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace.data import all_reduce, batches, together
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.predictive import tempered_predictives
from tu_symmetry.laplace.report import Quality
from tu_symmetry.laplace.tangent import evaluating

TEMPERATURES = (0.0, *(10 ** (i / 4) for i in range(-24, 9)))  # 0, and 1e-6 to 100 in quarters of a decade


@dataclass(frozen=True)
class Judged:
    """How good each of several predictions of the same samples is."""

    qualities: list[Quality]  # over all processes
    samples: int  # likewise
    nll: Tensor  # of this process's samples, [predictions, samples] (nats): sums over a sample's observations
    observations: Tensor  # how many these are, [samples]

    def choose(self, standard_errors: float) -> int:
        """The place of the best prediction, once so many standard errors are taken off the gain over the first."""
        found = [quality.nll for quality in self.qualities]
        if standard_errors:
            found = [nll + standard_errors * error for nll, error in zip(found, self.errors, strict=True)]
        return min(range(len(found)), key=lambda i: (math.isnan(found[i]), found[i]))

    @cached_property
    def errors(self) -> list[float]:
        """Standard errors of the differences between the NLLs of all predictions and of the first (nats).

        An NLL is the mean over observations. Those of one sample (the pixels of an image, say) depend on each other, so
        that a difference is a ratio of two sums over samples, whose error is that of its linearization. Of a single
        sample nothing is known: infinite, but for the first itself.
        """
        if self.samples < 2:
            return [0.0, *[math.inf] * (len(self.nll) - 1)]
        differences = self.nll - self.nll[0]
        sums = torch.cat([differences.sum(1), self.observations.sum(0, keepdim=True)])
        all_reduce(sums)
        means = sums[:-1] / sums[-1]
        squares = (differences - means.unsqueeze(1) * self.observations).square().sum(1)
        all_reduce(squares)
        found: list[float] = ((squares * self.samples / (self.samples - 1)).sqrt() / sums[-1]).tolist()
        return found


def judge(fitted: FittedLaplace, loader: Iterable[Any], temperatures: list[float], **options: Any) -> Judged:
    """The predictions of held-out data at every temperature, with the ``options`` of predictions."""
    likelihood, device = fitted.likelihood, fitted.tangent.point().device
    hits: list[Tensor] = []
    nll: list[Tensor] = []
    observations: list[Tensor] = []
    with together(device):
        for inputs, targets in batches(loader, device):
            with evaluating(fitted.model):
                observed = likelihood.observed(fitted.tangent.outputs(inputs), targets)
            found, count = tempered_predictives(fitted, inputs, temperatures, **options), len(observed)
            nll.append(torch.stack([likelihood.nll(p, observed).reshape(count, -1).sum(1) for p in found]))
            observations.append(likelihood.present(observed).reshape(count, -1).sum(1).double())
            right = [own for p in found if (own := likelihood.hits(p, observed)) is not None]
            if right:
                hits.append(torch.stack(right))
    each, counts = torch.cat(nll, 1), torch.cat(observations)
    qualities = _qualities(each.sum(1), counts.sum(), torch.stack(hits).sum(0) if hits else None)
    samples = torch.tensor(float(each.shape[1]), dtype=torch.float64, device=device)
    all_reduce(samples)
    return Judged(qualities, int(samples), each, counts)


def _qualities(nll: Tensor, count: Tensor, hits: Tensor | None) -> list[Quality]:
    """From sums over the observations of this process: NLLs ``[predictions]``, and what ``Likelihood.hits`` gives."""
    all_reduce(nll, count, *(() if hits is None else (hits,)))
    if not count:
        raise ValueError("there is nothing to choose on: every observation of these data is left out (ignore_index)")
    if hits is None:
        return [Quality(value) for value in (nll / count).tolist()]
    right, bins = hits[:, 0] / count, hits[:, 1:].abs().sum(1) / count
    return [Quality(*row) for row in torch.stack([nll / count, right, bins], 1).tolist()]
