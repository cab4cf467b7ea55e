"""How far two predictive distributions are apart: agreement and total variation.

Both measures are those of arXiv 2104.14421, section 7, which compare an approximate posterior with HMC.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tu_symmetry.states import check_tensor


def predictive_agreement(probs_a: Tensor, probs_b: Tensor) -> Tensor:
    """Share of points on which two predictives have the same most probable class.

    Both are probabilities ``(B, C)``, or those of members ``(M, B, C)``, which are averaged over ``M`` first. Laws:
    symmetric; 1 for equal arguments; unchanged when members are reordered.
    """
    a, b = _two_predictives(probs_a, probs_b)
    return (a.argmax(dim=-1) == b.argmax(dim=-1)).to(a.dtype).mean()


def predictive_total_variation(probs_a: Tensor, probs_b: Tensor) -> Tensor:
    """Mean over the points of the total variation between two predictives, half of their L1 distance.

    Arguments are those of :func:`predictive_agreement`. Laws: a metric on predictives; 1 for disjoint support.
    """
    a, b = _two_predictives(probs_a, probs_b)
    return (a - b).abs().sum(dim=-1).mean() / 2


def checked_probabilities(probs: Tensor, name: str = "probs") -> Tensor:
    """Probabilities ``(..., C)`` in float32 at least."""
    check_tensor(probs, name)
    if probs.ndim == 0 or 0 in probs.shape:
        raise ValueError(f"{name} has the shape {tuple(probs.shape)}; expected at least one of each axis")
    if not probs.is_floating_point():
        raise ValueError(f"{name} is of {probs.dtype}; expected floating-point probabilities, not class labels")
    # Half-precision softmax sums to 1 only within one unit in the last place per class.
    tolerance = max(1e-4, probs.shape[-1] ** 0.5 * torch.finfo(probs.dtype).eps)
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    if not torch.isfinite(probs).all():
        raise ValueError(f"{name} holds NaN or infinite values: look at the logits that it was computed from")
    total = probs.sum(dim=-1)
    if (probs < 0).any() or (total - 1).abs().max() > tolerance:
        raise ValueError(
            f"{name} holds no probabilities: the least value is {float(probs.min()):.4g} and the sums over the classes "
            f"lie in [{float(total.min()):.4g}, {float(total.max()):.4g}]. For logits, apply softmax(-1) first"
        )
    return probs


def _mean_predictive(probs: Tensor, name: str) -> Tensor:
    if check_tensor(probs, name).ndim not in (2, 3):
        raise ValueError(
            f"{name} has the shape {tuple(probs.shape)}; expected (points, classes), or (members, points, classes)"
        )
    probs = checked_probabilities(probs, name)
    return probs.mean(dim=0) if probs.ndim == 3 else probs


def _two_predictives(probs_a: Tensor, probs_b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = _mean_predictive(probs_a, "probs_a"), _mean_predictive(probs_b, "probs_b")
    if a.shape != b.shape:
        raise ValueError(
            f"probs_a and probs_b describe different points or classes: (points, classes) is {tuple(a.shape)} "
            f"and {tuple(b.shape)}"
        )
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)
