"""How far to trust a posterior: its temperature, chosen on held-out data.

With temperature ``T`` the posterior covariance is ``T Sigma``: in the eigenbasis of the curvature every variance
``1 / (s + lambda)`` is multiplied by ``T``. The outputs then have the covariance ``T J Sigma J^T``, so that one pass
over the held-out data serves all temperatures. ``T = 1`` is the posterior of the evidence, and ``T = 0`` the network
itself, which is among the candidates: by the metric that chooses, what is chosen is never worse than the network there.

What is best on held-out data need not be so elsewhere: where Laplace has nothing to give, the best temperature fits
the noise of these data. All temperatures are judged on the same samples, so that the gain over the network is a mean of
paired differences, whose standard error is far below that of either NLL. The gain less a number of standard errors is
what a temperature gains with some certainty; of a temperature that goes to 0 both go to 0 in proportion to it. The
highest of these bounds is at the best temperature where there are many data, and nearer to 0 the fewer there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace import predictive
from tu_symmetry.laplace.data import all_reduce, batches, count_of, together
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.links import GaussianPredictive, LinkApprox
from tu_symmetry.laplace.report import Calibration, PrecisionSearch, Quality
from tu_symmetry.laplace.tangent import evaluating

PRECISIONS = tuple(10 ** (i / 2) for i in range(-8, 17))  # 1e-4 to 1e8 in half decades
TEMPERATURES = (0.0, *(10 ** (i / 4) for i in range(-24, 9)))  # 0, and 1e-6 to 100 in quarters of a decade

Metric = Callable[[Tensor, Tensor], Any]
Progress = Callable[[dict[str, Any]], None]


def calibrate(
    fitted: FittedLaplace,
    drawer: predictive.Drawer,
    loader: Iterable[Any],
    *,
    metric: Metric | None,
    maximize: bool,
    temperatures: Sequence[float],
    link_approx: LinkApprox | Literal["auto"],
    held_out: bool,
    standard_errors: float,
    progress: Progress | None,
    **options: Any,
) -> tuple[FittedLaplace, Calibration]:
    """The approximation with the best temperature on held-out data: :meth:`tu_symmetry.LinearizedLaplace.calibrate`.

    ``options`` are those of the predictions.
    """
    candidates = sorted({0.0, 1.0, *(float(t) for t in temperatures)})
    if not all(t >= 0 and math.isfinite(t) for t in candidates):
        raise ValueError(f"temperatures={list(temperatures)} have to be finite and not negative")
    if link_approx == "mean":
        raise ValueError("link_approx='mean' is the network's own prediction, whatever the temperature")
    if not (standard_errors >= 0 and math.isfinite(standard_errors)):
        raise ValueError(f"standard_errors={standard_errors} has to be finite and not negative")
    if metric is not None and standard_errors:
        raise ValueError(
            f"standard_errors={standard_errors:g} is a rule for the NLL, whose error follows from its samples; a "
            "metric gives one number for all of them: leave one of the two out"
        )
    links: tuple[LinkApprox, ...] = ("mc", "probit") if link_approx == "auto" else (link_approx,)
    tried = [(link, t) for link in links for t in candidates]
    judge = _Judge(fitted, loader, metric, maximize, progress, "calibration")
    judged = judge.of(
        lambda inputs: predictive.tempered_predictives(fitted, drawer, inputs, candidates, link_approx=links, **options)
    )
    if not math.isfinite(judged.scores[0]):
        raise ValueError("the metric of the network itself is not finite on these data")
    chosen = judged.choose(standard_errors)
    link, temperature = tried[chosen]
    report = Calibration(
        temperature=temperature,
        samples=judged.samples,
        network=judged.qualities[0],
        evidence=judged.qualities[tried.index((link, 1.0))],
        calibrated=judged.qualities[chosen],
        held_out=held_out,
        link_approx=link,
        standard_error=judged.errors[chosen],
    )
    return replace(fitted, temperature=temperature, link_approx=link), report


def search_precision(
    fitted: FittedLaplace,
    loader: Iterable[Any],
    *,
    precisions: Sequence[float],
    relative: bool,
    metric: Metric | None,
    maximize: bool,
    link_approx: LinkApprox | None,
    progress: Progress | None,
    **options: Any,
) -> tuple[FittedLaplace, PrecisionSearch]:
    """The same with the best precisions: :meth:`tu_symmetry.LinearizedLaplace.search_precision`."""
    candidates = sorted({float(p) for p in precisions})
    if not candidates or not all(p > 0 and math.isfinite(p) for p in candidates):
        raise ValueError(f"precisions={list(precisions)} have to be positive and finite, and at least one")
    link: LinkApprox = fitted.link_approx if link_approx is None else link_approx
    if link == "mean":
        raise ValueError("link_approx='mean' is the network's own prediction, whatever the precision")
    base = fitted.log_precision if relative else torch.zeros_like(fitted.log_precision)
    network, samples = Quality(math.nan), 0
    found: list[tuple[FittedLaplace, Quality, float]] = []
    for number, precision in enumerate(candidates, start=1):
        other = fitted.uncalibrated().with_hyperparameters(base + math.log(precision))
        judge = _Judge(other, loader, metric, maximize, progress, f"precision {number} of {len(candidates)}")
        judged = judge.of(partial(_at_precision, other, link_approx=link, **options))
        network, samples = judged.qualities[0], judged.samples
        found.append((other, judged.qualities[1], judged.scores[1]))
    best = _lowest([score for *_, score in found])
    if not math.isfinite(found[best][2]):
        raise ValueError("the metric is finite at none of the precisions on these data")
    report = PrecisionSearch(
        precision=candidates[best],
        relative=relative,
        samples=samples,
        network=network,
        found=found[best][1],
        tried=tuple((p, quality) for p, (_, quality, _) in zip(candidates, found, strict=True)),
    )
    return replace(found[best][0], link_approx=link), report


def _at_precision(fitted: FittedLaplace, inputs: Any, **options: Any) -> list[Any]:
    """The network's own predictions, and those of the posterior."""
    return predictive.tempered_predictives(fitted, predictive.Drawer(), inputs, [0.0, 1.0], **options)


def _lowest(scores: Sequence[float]) -> int:
    """The place of the lowest score, the first of equal ones; NaN is never chosen."""
    return min(range(len(scores)), key=lambda i: (math.isnan(scores[i]), scores[i]))


@dataclass(frozen=True)
class Judged:
    """How good each of several predictions of the same samples is.

    Attributes:
        qualities: over all processes.
        scores: the lower the better, likewise.
        samples: their number, likewise.
        nll: the negative log-likelihoods of this process's samples, ``[predictions, samples]`` (nats): sums over
            a sample's observations.
        observations: how many these are, ``[samples]``.
    """

    qualities: list[Quality]
    scores: list[float]
    samples: int
    nll: Tensor
    observations: Tensor

    def choose(self, standard_errors: float) -> int:
        """The place of the best prediction, or of the one that is most surely better than the first (the network's).

        Args:
            standard_errors: that are taken off the gain over the first before predictions are compared; 0 for the best.
        """
        if not standard_errors:
            return _lowest(self.scores)
        return _lowest([score + standard_errors * error for score, error in zip(self.scores, self.errors, strict=True)])

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


@dataclass(frozen=True)
class _Judge:
    """Predictions on held-out data, and how good they are, over all processes."""

    fitted: FittedLaplace
    loader: Iterable[Any]
    metric: Metric | None
    maximize: bool
    progress: Progress | None
    stage: str

    def of(self, predict: Callable[[Any], list[Any]]) -> Judged:
        """How good each of the predictions is that are made of a batch; they are kept for a metric alone.

        Raises:
            ValueError: a loader without batches, or all of whose observations are left out; batches of different
                lengths for a metric.
        """
        likelihood, device = self.fitted.likelihood, self.fitted.tangent.point().device
        hits: list[Tensor] = []
        nll: list[Tensor] = []
        observations: list[Tensor] = []
        kept: list[tuple[list[Any], Tensor]] = []
        seen = 0
        with together(device):
            for number, (inputs, own) in enumerate(batches(self.loader, device), start=1):
                with evaluating(self.fitted.model):
                    observed = likelihood.observed(self.fitted.tangent.outputs(inputs), own)
                rows, count = predict(inputs), len(observed)
                nll.append(torch.stack([likelihood.nll(p, observed).reshape(count, -1).sum(1) for p in rows]))
                observations.append(likelihood.present(observed).reshape(count, -1).sum(1).double())
                right = [found for p in rows if (found := likelihood.hits(p, observed)) is not None]
                if right:
                    hits.append(torch.stack(right))
                if self.metric is not None:
                    kept.append((rows, observed))
                seen += count
                if self.progress is not None:
                    total = count_of(self.loader)
                    self.progress({"stage": self.stage, "batch": number, "batches": total, "samples": seen})
            if len({observed.shape[1:] for _, observed in kept}) > 1:
                raise ValueError(
                    "a metric takes the predictions of all batches as one tensor, and these have different lengths: "
                    "pad them (with labels that ignore_index leaves out), or choose by the NLL"
                )
        each, counts = torch.cat(nll, 1), torch.cat(observations)
        qualities = _qualities(each.sum(1), counts.sum(), torch.stack(hits).sum(0) if hits else None)
        scores = [q.nll for q in qualities]
        if self.metric is not None:
            labels, sign = torch.cat([observed for _, observed in kept]), -1 if self.maximize else 1
            predictions = [_joined(list(parts)) for parts in zip(*(rows for rows, _ in kept), strict=True)]
            values = [float(self.metric(p, labels)) for p in predictions]
            scores = [sign * _mean_over_processes(value, seen, device) for value in values]
        samples = torch.tensor(float(seen), dtype=torch.float64, device=device)
        all_reduce(samples)
        return Judged(qualities, scores, int(samples), each, counts)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], GaussianPredictive):
        return GaussianPredictive(*(torch.cat(own) for own in zip(*parts, strict=True)))
    return torch.cat(parts)


def _mean_over_processes(value: float, count: int, device: torch.device) -> float:
    sums = torch.tensor([value * count, count], dtype=torch.float64, device=device)
    all_reduce(sums)
    return float(sums[0] / sums[1])


def _qualities(nll: Tensor, count: Tensor, hits: Tensor | None) -> list[Quality]:
    """From sums over the observations of this process: NLLs ``[predictions]``, and what ``Likelihood.hits`` gives."""
    all_reduce(nll, count, *(() if hits is None else (hits,)))
    if not count:
        raise ValueError("there is nothing to choose on: every observation of these data is left out (ignore_index)")
    if hits is None:
        return [Quality(value) for value in (nll / count).tolist()]
    right, bins = hits[:, 0] / count, hits[:, 1:].abs().sum(1) / count
    return [Quality(*row) for row in torch.stack([nll / count, right, bins], 1).tolist()]
