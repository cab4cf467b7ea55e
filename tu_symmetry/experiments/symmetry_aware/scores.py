"""Accuracy, calibration, OOD detection and diversity of one predictive distribution, each with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch_uncertainty.metrics import FPR95, BrierScore, CalibrationError
from torchmetrics.functional.classification import binary_average_precision

from tu_symmetry.states import sample_count

_BINS = 15  # of calibration errors, as in TorchUncertainty's routine


class Interval(NamedTuple):
    """A number with its percentile interval.

    Attributes:
        value: the value of all points.
        low: lower end.
        high: upper end.
    """

    value: float
    low: float
    high: float


@torch.no_grad()
def member_probabilities(model: nn.Module, states: Mapping[str, Tensor], x: Tensor, batch_size: int = 1000) -> Tensor:
    """Class probabilities ``(S, B, C)`` of every network of a stack, on its device, where the model has to be."""
    model.eval()
    device = next(iter(states.values())).device
    names = [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]
    known = {n: t for n, t in states.items() if n in names}

    def one(state: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(model, state, (inputs,), tie_weights=False).softmax(-1)

    parts = [vmap(one, (0, None), chunk_size=25)(known, inputs.to(device)) for inputs in x.split(batch_size)]
    return torch.cat(parts, dim=1)


def mutual_information(probs: Tensor) -> Tensor:
    """Mutual information ``(B,)`` in nats between prediction and network, of ``(S, B, C)``."""
    entropy = torch.special.entr(probs.mean(0)).sum(-1)
    return (entropy - torch.special.entr(probs).sum(-1).mean(0)).clamp_min(0)


def scores(
    probs: Tensor,
    targets: Tensor,
    ood: Mapping[str, Tensor],
    *,
    resamples: int = 100,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """All columns of the table that are of predictions, with a bootstrap over the points.

    OOD scores are one minus the largest class probability, as in TorchUncertainty's routine. Where there are several
    OOD sets, AUPR, FPR95 and OOD MI are means over them. All but mutual information (nats) are shares in [0, 1], the
    Brier score lies in [0, 2].

    Args:
        probs: ``(S, B, C)`` of all networks on test points.
        targets: classes ``(B,)``.
        ood: name of each OOD set to ``(S, B', C)``.
        resamples: number of bootstrap replicates.
        confidence: level of the intervals.
        seed: seed of the replicates.

    Raises:
        ValueError: no OOD set.
    """
    if not ood:
        raise ValueError("there is no out-of-distribution set: AUPR, FPR95 and OOD MI are of one")
    mean = probs.mean(0)
    means = {name: p.mean(0) for name, p in ood.items()}
    inside = mutual_information(probs)
    outside = {name: mutual_information(p) for name, p in ood.items()}

    def of(rows: Tensor, others: Mapping[str, Tensor]) -> dict[str, float]:
        p, y = mean[rows], targets[rows]
        found = {"accuracy": float((p.argmax(-1) == y).double().mean()), **_calibration(p, y)}
        aupr, fpr, information = [], [], []
        for name, q in means.items():
            score = torch.cat([1 - p.amax(-1), 1 - q[others[name]].amax(-1)])
            is_ood = (
                torch.cat([torch.zeros(len(rows), device="cpu"), torch.ones(len(others[name]), device="cpu")])
                .long()
                .to(score.device)
            )
            aupr.append(float(binary_average_precision(score, is_ood)))
            fpr.append(_fpr95(score, is_ood))
            information.append(float(outside[name][others[name]].mean()))
        found |= {"aupr": fmean(aupr), "fpr95": fmean(fpr)}
        return found | {"id_mi": float(inside[rows].mean()), "ood_mi": fmean(information)}

    def drawn(count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(count, (count,), generator=generator, device="cpu")

    whole = of(
        torch.arange(len(targets), device="cpu"),
        {name: torch.arange(len(q), device="cpu") for name, q in means.items()},
    )
    generator = torch.Generator().manual_seed(seed)
    replicates = [
        of(drawn(len(targets), generator), {name: drawn(len(q), generator) for name, q in means.items()})
        for _ in range(resamples)
    ]
    tail = (1 - confidence) / 2
    made = {}
    for name, value in whole.items():
        low, high = math.nan, math.nan
        if replicates:
            column = torch.tensor([r[name] for r in replicates], dtype=torch.float64, device="cpu")
            low, high = torch.quantile(
                column, torch.tensor([tail, 1 - tail], dtype=torch.float64, device="cpu")
            ).tolist()
        made[name] = Interval(value, low, high)
    return made


def _calibration(p: Tensor, y: Tensor) -> dict[str, float]:
    metrics: dict[str, Callable[[], float]] = {
        "ece": lambda: _once(CalibrationError(task="multiclass", num_classes=p.shape[-1], num_bins=_BINS), p, y),
        "ace": lambda: _once(
            CalibrationError(task="multiclass", adaptive=True, num_classes=p.shape[-1], num_bins=_BINS), p, y
        ),
        "brier": lambda: _once(BrierScore(num_classes=p.shape[-1]), p, y),
    }
    return {name: metric() for name, metric in metrics.items()}


def _once(metric: Callable[..., Tensor], p: Tensor, y: Tensor) -> float:
    return float(metric(p, y))


def _fpr95(score: Tensor, is_ood: Tensor) -> float:
    metric = FPR95(pos_label=1)
    metric.update(score, is_ood)
    return float(metric.compute())


def require_finite_networks(states: Mapping[str, Tensor], what: str) -> None:
    """Refuse a stack of fewer than two networks, or with NaN or infinite weights.

    Raises:
        ValueError: either.
    """
    if sample_count(states) < 2:
        raise ValueError(f"{what} holds {sample_count(states)} network; a posterior needs at least two")
    bad = [n for n, t in states.items() if t.is_floating_point() and not torch.isfinite(t).all()]
    if bad:
        raise ValueError(f"{what} holds NaN or infinite values in {bad[0]!r}: a member has diverged, train it again")
