"""Maximum mean discrepancy between two sets of weight vectors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KERNELS: dict[str, int] = {"laplace": 1, "gaussian": 2}
_LIMIT = 500


def maximum_mean_discrepancy(
    x: Tensor, y: Tensor, *, num_bandwidths: int = 10, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Unbiased squared MMD of two sets of samples, over Laplace and Gaussian kernels of several bandwidths.

    The estimate is the U-statistic

        mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j),

    whose mean is 0 for equal distributions, so that single values may be negative. The kernels are
    ``exp(-||x - y||_1 / b)`` and ``exp(-||x - y||_2^2 / b^2)``, the bandwidths those of :func:`mmd_bandwidths`, as in
    MMDAgg (Schrab et al., JMLR 2023) and in the code of arXiv 2310.08287. How that paper makes one number of the
    values is not published; the plain mean here is our choice.

    Laws: symmetric in ``x`` and ``y``; unchanged when samples or coordinates are permuted, when both sets are
    translated, and, as long as the bandwidths' floors do not act, when both are scaled.

    Args:
        x: samples ``(S, D)``.
        y: samples ``(T, D)``.
        num_bandwidths: for each of the two kernels.
        reduction: ``"mean"`` over kernels and bandwidths, or ``"none"``.

    Returns:
        A scalar, or ``(2, num_bandwidths)``: Laplace, then Gaussian, bandwidths ascending.

    Raises:
        ValueError: for fewer than two samples, shapes that do not fit, NaN or infinite values.
    """
    for name, samples in (("x", x), ("y", y)):
        if samples.ndim != 2 or len(samples) < 2 or samples.shape[1] == 0:
            raise ValueError(f"{name} has the shape {tuple(samples.shape)}; expected (samples, features), samples >= 2")
        if not torch.isfinite(samples).all():
            raise ValueError(f"{name} holds NaN or infinite values: a network among the samples has diverged")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and y {y.shape[1]}: they are not of one architecture")
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    x, y = x.to(dtype), y.to(dtype)
    values = []
    for power in KERNELS.values():
        within_x, within_y, cross = (_distances(a, b, power) for a, b in ((x, x), (y, y), (x, y)))
        within_x, within_y = _off_diagonal(within_x), _off_diagonal(within_y)
        for b in mmd_bandwidths(cross[:_LIMIT, :_LIMIT], num_bandwidths):
            kxx, kyy, kxy = ((-((d / b) ** power)).exp().mean() for d in (within_x, within_y, cross))
            values.append(kxx + kyy - 2 * kxy)
    table = torch.stack(values).view(len(KERNELS), num_bandwidths)
    return table.mean() if reduction == "mean" else table


def mmd_bandwidths(distances: Tensor, count: int = 10) -> Tensor:
    """MMDAgg's bandwidths, in geometric progression from ``lambda_min / 2`` to ``2 lambda_max``.

    ``lambda_min`` is the smallest distance or, where that is below 0.1, the larger of the 5 % quantile and 0.1;
    ``lambda_max`` is the largest, 0.3 at least. Distances of 0 are first replaced by the median.

    Args:
        distances: between the samples of the two sets, of any shape.
        count: number of bandwidths, at least 2.

    Returns:
        Bandwidths ``(count,)``, ascending, float64.
    """
    if count < 2:
        raise ValueError(f"there must be at least two bandwidths, got {count}")
    d = distances.flatten().double()
    median = torch.stack([d.sort().values[(len(d) - 1) // 2], d.sort().values[len(d) // 2]]).mean()
    d = torch.where(d == 0, median, d).sort().values
    smallest = d[0] if d[0] >= 0.1 else d[int(0.05 * len(d))].clamp_min(0.1)
    largest = d[-1].clamp_min(0.3)
    exponents = torch.arange(count, dtype=torch.float64, device=d.device) / (count - 1)
    return smallest / 2 * (4 * largest / smallest) ** exponents


def _distances(a: Tensor, b: Tensor, power: int) -> Tensor:
    # The matmul form of the L2 distance cancels for samples that are close to each other, such as aligned networks.
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(a, b, p=float(power), compute_mode=mode).double()


def _off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)]
