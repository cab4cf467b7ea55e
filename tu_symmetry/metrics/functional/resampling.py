"""What resampling says of a statistic: a p-value from relabelings, an interval from replicates."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def p_value(null: Tensor, observed: float, *, rounding: float) -> float:
    """``(1 + #{null >= observed}) / (1 + len(null))``, the observed statistic counted among the relabelings.

    Args:
        null: statistics under random relabelings.
        observed: the statistic itself.
        rounding: by how much rounding may set equal statistics apart, so that it does not break ties.
    """
    return (1 + int((null >= observed - rounding).sum())) / (1 + len(null))


def percentile_interval(replicates: Tensor, confidence: float) -> tuple[float, float]:
    """The middle share ``confidence`` of the finite bootstrap replicates ``[draws]``; NaN where there are none."""
    finite = replicates[torch.isfinite(replicates)].double().cpu()
    if not len(finite):
        return math.nan, math.nan
    tail = (1 - confidence) / 2
    low, high = torch.quantile(finite, torch.tensor([tail, 1 - tail], dtype=torch.float64, device="cpu")).tolist()
    return low, high
