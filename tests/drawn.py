"""Random numbers that tests share: each from a generator of its own, the same on every call."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=dtype, device="cpu")


def probabilities(*shape: int, seed: int = 0) -> Tensor:
    """Distributions over the last axis."""
    return (2 * normal(*shape, seed=seed)).softmax(-1)
