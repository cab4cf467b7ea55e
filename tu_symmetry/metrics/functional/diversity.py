"""Functional diversity of networks: the mutual information of every pair."""

from __future__ import annotations

import torch
from torch import Tensor

from tu_symmetry.metrics.functional.predictive import checked_probabilities
from tu_symmetry.states import check_tensor

_ELEMENTS_AT_ONCE = 2**24


def pairwise_mutual_information(probs: Tensor) -> Tensor:
    """Mutual information between prediction and network, for every pair of networks, averaged over the points.

    For two networks, ``MI = H((p + q) / 2) - (H(p) + H(q)) / 2`` (arXiv 2310.08287, section on functional diversity):
    their Jensen-Shannon divergence. Differences of entropies lose digits: pass float64 for values below 1e-6 nats.

    Laws: symmetric, zero on the diagonal, in [0, log 2], unchanged when classes are renamed.

    Args:
        probs: probabilities ``(M, B, C)`` of ``M`` networks.

    Returns:
        Matrix ``(M, M)`` in nats.

    Raises:
        ValueError: for other shapes, or values that are no probabilities.
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
