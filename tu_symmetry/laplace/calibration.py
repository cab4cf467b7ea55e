"""How far to trust a posterior: its temperature, chosen on held-out data.

With temperature ``T`` the posterior covariance is ``T Sigma``: in the eigenbasis of the curvature every variance
``1 / (s + lambda)`` is multiplied by ``T``. The outputs then have the covariance ``T J Sigma J^T``, so that one pass
over the held-out data serves all temperatures. ``T = 1`` is the posterior of the evidence, and ``T = 0`` the network
itself, which is among the candidates: by the metric that chooses, what is chosen is never worse than the network there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.laplace import prediction
from tu_symmetry.laplace.data import all_reduce, batches, together
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.predictive import GaussianPredictive, LinkApprox
from tu_symmetry.laplace.report import Calibration, Quality

TEMPERATURES = (0.0, *(10 ** (i / 4) for i in range(-24, 9)))  # 0, and 1e-6 to 100 in quarters of a decade
_BINS = 15

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
    link_approx: LinkApprox,
    num_samples: int,
    covariance: prediction.Covariance,
    seed: int,
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
    found: list[list[Any]] = [[] for _ in candidates]
    targets: list[Tensor] = []
    device = fitted.tangent.point().device
    with together(device):
        for number, (inputs, own) in enumerate(batches(loader, device), start=1):
            rows = prediction.tempered_predictives(
                fitted,
                drawer,
                inputs,
                candidates,
                num_samples=num_samples,
                link_approx=link_approx,
                covariance=covariance,
                seed=seed,
            )
            for kept, each in zip(found, rows, strict=True):
                kept.append(each)
            targets.append(fitted.likelihood.targets(rows[0][0] if isinstance(rows[0], tuple) else rows[0], own))
            if progress is not None:
                progress({"stage": "calibration", "batch": number, "samples": sum(map(len, targets))})
    labels = torch.cat(targets)
    measure = _classified if fitted.classification else _regressed
    predictions = [_joined(kept) for kept in found]
    qualities = [measure(p, labels) for p in predictions]
    if metric is None:
        scores = [q.nll for q in qualities]
    else:
        scores = [_mean_over_processes(float(metric(p, labels)), len(labels), device) for p in predictions]
        if maximize:
            scores = [-s for s in scores]
    if not math.isfinite(scores[0]):
        raise ValueError("the metric of the network itself is not finite on these data")
    best = min(range(len(candidates)), key=lambda i: (math.isnan(scores[i]), scores[i]))  # the lowest of equal ones
    samples = torch.tensor(float(len(labels)), device=device)
    all_reduce(samples)
    report = Calibration(
        temperature=candidates[best],
        samples=int(samples),
        network=qualities[0],
        evidence=qualities[candidates.index(1.0)],
        calibrated=qualities[best],
    )
    return replace(fitted, temperature=candidates[best]), report


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], GaussianPredictive):
        return GaussianPredictive(*(torch.cat(own) for own in zip(*parts, strict=True)))
    return torch.cat(parts)


def _mean_over_processes(value: float, count: int, device: torch.device) -> float:
    sums = torch.tensor([value * count, count], dtype=torch.float64, device=device)
    all_reduce(sums)
    return float(sums[0] / sums[1])


def _classified(p: Tensor, labels: Tensor) -> Quality:
    """NLL, accuracy, and expected calibration error over equal bins of the confidence (L1)."""
    p, labels = p.double().flatten(0, -2), labels.flatten()
    confidence, predicted = p.max(-1)
    right = (predicted == labels).double()
    nll = -p.gather(-1, labels.unsqueeze(-1)).clamp(min=1e-300).log().sum()
    bins = torch.zeros(_BINS, dtype=torch.float64, device=p.device)
    bins.index_add_(0, (confidence * _BINS).long().clamp(max=_BINS - 1), right - confidence)
    sums = torch.cat([torch.stack([nll, right.sum(), right.new_tensor(len(right))]), bins])
    all_reduce(sums)
    count = float(sums[2])
    return Quality(float(sums[0]) / count, float(sums[1]) / count, float(sums[3:].abs().sum()) / count)


def _regressed(p: GaussianPredictive, targets: Tensor) -> Quality:
    """NLL of one observed value (nats)."""
    mean, variance = p.mean.double(), p.variance.double()
    each = 0.5 * ((targets.double() - mean).square() / variance + variance.log() + math.log(2 * math.pi))
    return Quality(_mean_over_processes(float(each.mean()), each.numel(), each.device))
