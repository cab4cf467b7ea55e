"""What resampling says of a statistic: a p-value from relabelings, an interval from replicates."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def p_value(null: Tensor, observed: float, *, rounding: float) -> float:
    """``(1 + #{null >= observed}) / (1 + len(null))``: the observed statistic is counted among the relabelings.

    ``rounding`` is by how much rounding may set equal statistics apart.
    """
    return (1 + int((null >= observed - rounding).sum())) / (1 + len(null))


def percentile_interval(replicates: Tensor) -> tuple[float, float]:
    """The middle 95 % of the finite bootstrap replicates ``[draws]``; NaN where there are none."""
    finite = replicates[torch.isfinite(replicates)].double().cpu()
    if not len(finite):
        return math.nan, math.nan
    low, high = torch.quantile(finite, torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu")).tolist()
    return low, high
