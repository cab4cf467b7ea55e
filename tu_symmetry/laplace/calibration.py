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
from tu_symmetry.laplace.links import GaussianPredictive, LinkApprox
from tu_symmetry.laplace.report import Calibration, Quality
from tu_symmetry.laplace.tangent import evaluating

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
            with evaluating(fitted.model):
                observed = fitted.likelihood.observed(fitted.tangent.outputs(inputs), own)
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
            targets.append(observed)
            if progress is not None:
                progress({"stage": "calibration", "batch": number, "samples": sum(map(len, targets))})
    labels = torch.cat(targets)
    predictions = [_joined(kept) for kept in found]
    qualities = [_quality(fitted.likelihood.scores(p, labels)) for p in predictions]
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


def _quality(sums: Tensor) -> Quality:
    """From the sums of :meth:`tu_symmetry.laplace.likelihood.Likelihood.scores`, over all processes."""
    all_reduce(sums)
    nll, count, *rest = sums.tolist()
    if not rest:
        return Quality(nll / count)
    right, *bins = rest
    return Quality(nll / count, right / count, sum(abs(b) for b in bins) / count)
