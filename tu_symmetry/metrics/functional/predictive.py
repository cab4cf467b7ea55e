"""Measures of predictives: how far two are apart, and how different the functions of many networks are.

Agreement and total variation are those of arXiv 2104.14421, section 7; the mutual information of pairs is that of arXiv
2310.08287.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.metrics.functional.resampling import percentile_interval
from tu_symmetry.states import check_tensor
from tu_symmetry.symmetry.randomness import own_generator

_ELEMENTS_AT_ONCE = 2**24


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


def pairwise_mutual_information(probs: Tensor) -> Tensor:
    """Mutual information ``(M, M)`` in nats between prediction and network, for every pair, averaged over the points.

    For two networks, ``MI = H((p + q) / 2) - (H(p) + H(q)) / 2`` (arXiv 2310.08287, section on functional diversity):
    their Jensen-Shannon divergence. Differences of entropies lose digits: pass float64 for values below 1e-6 nats.

    Laws: symmetric, zero on the diagonal, in [0, log 2], unchanged when classes are renamed.

    Raises:
        ValueError: no probabilities ``(M, B, C)``.
    """
    if check_tensor(probs, "probs").ndim != 3:
        raise ValueError(f"probs has the shape {tuple(probs.shape)}; expected (members, points, classes)")
    p = checked_probabilities(probs)
    members, points, classes = p.shape
    entropy = torch.special.entr(p).sum(dim=-1).mean(dim=-1)
    information = p.new_zeros(members, members)
    at_once = max(1, _ELEMENTS_AT_ONCE // (points * classes))
    for i in range(members - 1):
        for others in torch.arange(i + 1, members, device=p.device).split(at_once):
            mixture = torch.special.entr((p[i] + p[others]) / 2).sum(dim=-1).mean(dim=-1)
            information[i, others] = (mixture - (entropy[i] + entropy[others]) / 2).clamp_min(0)
    return information + information.T


@dataclass(frozen=True)
class DiversitySummary:
    """Pairwise mutual information in and out of distribution, of the same networks.

    Attributes:
        id_mean: mean mutual information on test data, nats.
        id_dispersion: standard deviation over the pairs divided by the mean.
        ood_mean: mean mutual information on out-of-distribution data, nats.
        ood_dispersion: standard deviation over the pairs divided by the mean.
        correlation: Pearson's, over the pairs.
        correlation_interval: 95 % of it under drawing *networks* with replacement (pairs that share a network are not
            independent).
    """

    id_mean: float
    id_dispersion: float
    ood_mean: float
    ood_dispersion: float
    correlation: float
    correlation_interval: tuple[float, float]


def diversity_summary(
    id_information: Tensor, ood_information: Tensor, *, bootstraps: int = 200, generator: torch.Generator | None = None
) -> DiversitySummary:
    """Dispersion and correlation of :func:`pairwise_mutual_information` ``(M, M)``, on test and on OOD data.

    ``bootstraps`` are the replicates of the interval; 0 for none.
    """
    shape = check_tensor(id_information, "id_information").shape
    if len(shape) != 2 or shape[0] != shape[1] or check_tensor(ood_information, "ood_information").shape != shape:
        raise ValueError(
            f"expected two square matrices of the same networks, got {tuple(shape)} and {tuple(ood_information.shape)}"
        )
    members = shape[0]
    if members < 3:
        raise ValueError(f"dispersion and correlation need at least three networks, got {members}")
    a, b = id_information.double().cpu(), ood_information.double().cpu()
    i, j = torch.triu_indices(members, members, 1, device="cpu")
    inside, outside = a[i, j], b[i, j]

    def dispersion(values: Tensor) -> float:
        return float(values.std() / values.mean()) if float(values.mean()) > 0 else 0.0

    source = own_generator(generator)
    replicates = []
    for _ in range(bootstraps):
        chosen = torch.randint(members, (members,), generator=source, device=source.device).cpu()
        p, q = chosen[i], chosen[j]
        different = p != q  # a pair of equal draws has no information by construction
        replicates.append(_pearson(a[p, q][different], b[p, q][different]))
    return DiversitySummary(
        id_mean=float(inside.mean()),
        id_dispersion=dispersion(inside),
        ood_mean=float(outside.mean()),
        ood_dispersion=dispersion(outside),
        correlation=_pearson(inside, outside),
        correlation_interval=percentile_interval(torch.tensor(replicates, device="cpu")),
    )


def _pearson(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) if len(a) > 1 else math.nan
