"""How far to trust a posterior: its temperature, chosen on held-out data.

With temperature ``T`` the posterior covariance is ``T Sigma``: in the eigenbasis of the curvature every variance
``1 / (s + lambda)`` is multiplied by ``T``. The outputs then have the covariance ``T J Sigma J^T``, so that one pass
over the held-out data serves all temperatures. ``T = 1`` is the posterior of the evidence, and ``T = 0`` the network
itself, which is among the candidates: by the metric that chooses, what is chosen is never worse than the network there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.laplace import prediction
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
    drawer: prediction.Drawer,
    loader: Iterable[Any],
    *,
    metric: Metric | None,
    maximize: bool,
    temperatures: Sequence[float],
    link_approx: LinkApprox | Literal["auto"],
    num_samples: int,
    covariance: prediction.Covariance,
    seed: int,
    held_out: bool,
    progress: Progress | None,
) -> tuple[FittedLaplace, Calibration]:
    """The approximation with the temperature that is best on held-out data, and a report; see
    :meth:`tu_symmetry.LinearizedLaplace.calibrate`.
    """  # noqa: D205
    candidates = sorted({0.0, 1.0, *(float(t) for t in temperatures)})
    if not all(t >= 0 and math.isfinite(t) for t in candidates):
        raise ValueError(f"temperatures={list(temperatures)} have to be finite and not negative")
    if link_approx == "mean":
        raise ValueError("link_approx='mean' is the network's own prediction, whatever the temperature")
    links: tuple[LinkApprox, ...] = ("mc", "probit") if link_approx == "auto" else (link_approx,)
    tried = [(link, t) for link in links for t in candidates]
    judge = _Judge(fitted, loader, metric, maximize, progress, "calibration")
    qualities, scores, samples = judge.of(
        lambda inputs: prediction.tempered_predictives(
            fitted,
            drawer,
            inputs,
            candidates,
            num_samples=num_samples,
            link_approx=links,
            covariance=covariance,
            seed=seed,
        )
    )
    if not math.isfinite(scores[0]):
        raise ValueError("the metric of the network itself is not finite on these data")
    best = _lowest(scores)
    link, temperature = tried[best]
    report = Calibration(
        temperature=temperature,
        samples=samples,
        network=qualities[0],
        evidence=qualities[tried.index((link, 1.0))],
        calibrated=qualities[best],
        held_out=held_out,
        link_approx=link,
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
    num_samples: int,
    covariance: prediction.Covariance,
    seed: int,
    progress: Progress | None,
) -> tuple[FittedLaplace, PrecisionSearch]:
    """The approximation with the precisions that are best on held-out data, and a report; see
    :meth:`tu_symmetry.LinearizedLaplace.search_precision`.
    """  # noqa: D205
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
        qualities, scores, samples = judge.of(
            partial(_at_precision, other, num_samples=num_samples, link_approx=link, covariance=covariance, seed=seed)
        )
        network = qualities[0]
        found.append((other, qualities[1], scores[1]))
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
    return prediction.tempered_predictives(fitted, prediction.Drawer(), inputs, [0.0, 1.0], **options)


def _lowest(scores: Sequence[float]) -> int:
    """The place of the lowest score, the first of equal ones; what is no number is no candidate."""
    return min(range(len(scores)), key=lambda i: (math.isnan(scores[i]), scores[i]))


@dataclass(frozen=True)
class _Judge:
    """Predictions on held-out data, and how good they are, over all processes."""

    fitted: FittedLaplace
    loader: Iterable[Any]
    metric: Metric | None
    maximize: bool
    progress: Progress | None
    stage: str

    def of(self, predict: Callable[[Any], list[Any]]) -> tuple[list[Quality], list[float], int]:
        """Quality and score (the lower the better) of each of the predictions of a batch, and the number of samples."""
        found: list[list[Any]] = []
        targets: list[Tensor] = []
        device = self.fitted.tangent.point().device
        with together(device):
            for number, (inputs, own) in enumerate(batches(self.loader, device), start=1):
                with evaluating(self.fitted.model):
                    observed = self.fitted.likelihood.observed(self.fitted.tangent.outputs(inputs), own)
                rows = predict(inputs)
                found = found or [[] for _ in rows]
                for kept, each in zip(found, rows, strict=True):
                    kept.append(each)
                targets.append(observed)
                if self.progress is not None:
                    seen, total = sum(map(len, targets)), count_of(self.loader)
                    self.progress({"stage": self.stage, "batch": number, "batches": total, "samples": seen})
        labels = torch.cat(targets)
        predictions = [_joined(kept) for kept in found]
        qualities = [_quality(self.fitted.likelihood.scores(p, labels)) for p in predictions]
        scores = [q.nll for q in qualities]
        if self.metric is not None:
            sign = -1 if self.maximize else 1
            values = [float(self.metric(p, labels)) for p in predictions]
            scores = [sign * _mean_over_processes(value, len(labels), device) for value in values]
        samples = torch.tensor(float(len(labels)), device=device)
        all_reduce(samples)
        return qualities, scores, int(samples)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], GaussianPredictive):
        return GaussianPredictive(*(torch.cat(own) for own in zip(*parts, strict=True)))
    return torch.cat(parts)


def _mean_over_processes(value: float, count: int, device: torch.device) -> float:
    sums = torch.tensor([value * count, count], dtype=torch.float64, device=device)
    all_reduce(sums)
    return float(sums[0] / sums[1])


def _quality(sums: Tensor) -> Quality:
    """From the sums of :meth:`tu_symmetry.laplace.likelihood.Likelihood.scores`, over all processes."""
    all_reduce(sums)
    nll, count, *rest = sums.tolist()
    if not rest:
        return Quality(nll / count)
    right, *bins = rest
    return Quality(nll / count, right / count, sum(abs(b) for b in bins) / count)
