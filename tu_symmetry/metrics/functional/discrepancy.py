"""Maximum mean discrepancy between two sets of weight vectors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from tu_symmetry.metrics.functional.removal import Removal, RemovalName, removal
from tu_symmetry.states import SymmetryError, check_tensor, require_state
from tu_symmetry.symmetry.action import largest_entry
from tu_symmetry.symmetry.graph import SymmetryGraph

Level = Literal["tensor", "layer", "network"]
KERNELS: dict[str, int] = {"laplace": 1, "gaussian": 2}
BANDWIDTHS = 10  # of each kernel
BANDWIDTH_SAMPLES = 500
_PIECE = {"cpu": 1024, "cuda": 2**16}  # columns of a piece of the distances between long rows


def maximum_mean_discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """Unbiased squared MMD of two sets of samples ``(S, D)`` and ``(T, D)``: the mean of :func:`kernel_discrepancies`.

    The estimate is the U-statistic

        mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j),

    whose mean is 0 for equal distributions, so that single values may be negative. The kernels are
    ``exp(-||x - y||_1 / b)`` and ``exp(-||x - y||_2^2 / b^2)``, the bandwidths those of :func:`mmd_bandwidths`, as in
    MMDAgg (Schrab et al., JMLR 2023) and in the code of arXiv 2310.08287; the plain mean is our choice.

    Laws: symmetric in ``x`` and ``y``; unchanged when samples or coordinates are permuted, when both sets are
    translated, and, as long as the bandwidths' floors do not act, when both are scaled.
    """
    return kernel_discrepancies(x, y).mean()


def kernel_discrepancies(x: Tensor, y: Tensor) -> Tensor:
    """The value of each kernel ``(2, bandwidths)``: Laplace, then Gaussian, bandwidths ascending."""
    x, y = checked_samples(x, y)
    largest = max(largest_entry(x), largest_entry(y))
    unit = 1.0
    if largest > 0 and not 1e-12 < largest < 1e12:  # single precision does not hold the squares of distances
        exponent = math.frexp(largest)[1]
        halves = 2.0 ** -(exponent // 2), 2.0 ** -(exponent - exponent // 2)
        x, y = (samples.double() * halves[0] * halves[1] for samples in (x, y))
        unit = halves[0] * halves[1]  # of distances, and so of the bandwidths' floors
    values = []
    for power in KERNELS.values():
        pooled = pairwise_distances(torch.cat([x, y]), power)
        within_x, within_y = _off_diagonal(pooled[: len(x), : len(x)]), _off_diagonal(pooled[len(x) :, len(x) :])
        cross = pooled[: len(x), len(x) :]
        for b in mmd_bandwidths(cross[:BANDWIDTH_SAMPLES, :BANDWIDTH_SAMPLES], unit=unit):
            kxx, kyy, kxy = ((-((d / b) ** power)).exp().mean() for d in (within_x, within_y, cross))
            values.append(kxx + kyy - 2 * kxy)
    return torch.stack(values).view(len(KERNELS), BANDWIDTHS)


def network_discrepancy(
    x: Mapping[str, Tensor],
    y: Mapping[str, Tensor],
    *,
    graph: SymmetryGraph | None = None,
    removed: RemovalName | Removal = "paper",
    level: Level = "tensor",
) -> Tensor:
    """Squared MMD of two sets of networks, mean over their tensors; after the removal of symmetries it is NS.

    "MMD computed after the removal of the symmetries" is what arXiv 2310.08287 calls NS. How that paper makes one
    number of its layers' values is not published; the mean over tensors is our choice.

    Args:
        x: stacked states ``(S, ...)``.
        y: stacked states ``(T, ...)``.
        graph: the symmetry graph; plain MMD without it. Then only parameters are compared, tied ones once, and not the
            running statistics.
        removed: what is removed with a graph, see :func:`removal`: by default what the paper removes (unit norm, then
            sorting); ``removal("min_mass", align_to=state)`` is this package's choice.
        level: what is one vector: ``"tensor"``, ``"layer"`` (the tensors of one module together) or ``"network"``.

    Raises:
        ValueError: for states of different architectures, too few samples, NaN or infinite values.
        SymmetryError: for states that the graph does not fit.
    """
    a, b = (weight_vectors(s, graph=graph, removed=removed, level=level) for s in (x, y))
    require_same_names(a, b)
    return torch.stack([maximum_mean_discrepancy(vectors, b[name]) for name, vectors in a.items()]).mean()


def require_same_names(a: Collection[str], b: Collection[str]) -> None:
    """Raise a ValueError that names what only one of two architectures has."""
    if differing := set(a) ^ set(b):
        raise ValueError(f"the states are of two architectures; they differ in {sorted(differing)}")


def checked_samples(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two sets of vectors ``(S, D)`` and ``(T, D)`` in one precision, float32 at least, where the first one is."""
    for name, samples in (("x", x), ("y", y)):
        check_tensor(samples, name, "real")
        if samples.ndim != 2 or len(samples) < 2 or samples.shape[1] == 0:
            raise ValueError(f"{name} has the shape {tuple(samples.shape)}; expected (samples, features), samples >= 2")
        if not torch.isfinite(samples).all():
            raise ValueError(f"{name} holds NaN or infinite values: a network among the samples has diverged")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and y {y.shape[1]}: they are not of one architecture")
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype), y.to(x.device, dtype)


def weight_vectors(
    states: Mapping[str, Tensor],
    *,
    graph: SymmetryGraph | None = None,
    removed: RemovalName | Removal = "paper",
    level: Level = "tensor",
) -> dict[str, Tensor]:
    """The vectors ``(S, D)`` that :func:`network_discrepancy` compares, by the name of the tensor or layer."""
    if level not in get_args(Level):
        raise ValueError(f"level must be 'tensor', 'layer' or 'network', got {level!r}")
    if graph is not None:
        given = require_state(states, "states")  # a form in half precision would be rounded once more
        wide = {n: t.float() if t.is_floating_point() and t.itemsize < 4 else t for n, t in given.items()}
        form = removal(removed).apply(graph, wide)
        states = {name: form[name] for name in graph.shapes if name not in graph.buffers}
    if states and not any(t.is_floating_point() for t in require_state(states, "states").values()):
        kinds = sorted({str(t.dtype) for t in states.values()})
        raise SymmetryError(f"the states hold no real floating-point weights to compare, only {kinds}")
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in states.items():
        if tensor.is_floating_point():
            parts.setdefault(part_of(name, level), []).append(tensor.detach().flatten(1))
    return {part: torch.cat(tensors, dim=1) for part, tensors in parts.items()}


def part_of(name: str, level: Level) -> str:
    """Name of the vector that a tensor belongs to."""
    return {"tensor": name, "layer": name.rpartition(".")[0] or name, "network": "network"}[level]


def mmd_bandwidths(between: Tensor, *, unit: float = 1.0) -> Tensor:
    """MMDAgg's bandwidths, ascending in geometric progression from ``lambda_min / 2`` to ``2 lambda_max``, float64.

    ``lambda_min`` is the smallest distance or, where that is below 0.1, the larger of the 5 % quantile and 0.1;
    ``lambda_max`` is the largest, 0.3 at least. Distances of 0 are first replaced by the median. ``unit`` is what the
    distances were multiplied by.
    """
    d = between.flatten().double()
    median = torch.stack([d.sort().values[(len(d) - 1) // 2], d.sort().values[len(d) // 2]]).mean()
    d = torch.where(d == 0, median, d).sort().values
    smallest = torch.where(d[0] >= 0.1 * unit, d[0], d[int(0.05 * len(d))].clamp_min(0.1 * unit))
    largest = d[-1].clamp_min(0.3 * unit)
    exponents = torch.arange(BANDWIDTHS, dtype=torch.float64, device=d.device) / (BANDWIDTHS - 1)
    return smallest / 2 * (4 * largest / smallest) ** exponents


def pairwise_distances(x: Tensor, power: int) -> Tensor:
    """L1 or L2 distances in float64 between all rows ``(N, D)`` of a set: ``(N, N)``, symmetric, 0 on the diagonal.

    ``pdist`` takes each pair once, and is several times as fast for a pair as ``cdist``, also between two sets.
    """
    count = len(x)
    if x.device.type not in ("cpu", "cuda"):  # pdist is missing on other devices
        # The matmul form of the L2 distance cancels for samples that are close to each other, such as aligned networks.
        return torch.cdist(x, x, p=float(power), compute_mode="donot_use_mm_for_euclid_dist").double()
    if x.requires_grad or x.shape[1] <= _PIECE[x.device.type]:  # a root of a sum has no gradient at 0
        pairs = torch.pdist(x, p=float(power)).double()
    else:  # pieces of rows stay in the cache; long rows would be read from memory again for every pair
        sums = torch.zeros(count * (count - 1) // 2, dtype=torch.float64, device=x.device)
        for columns in x.split(_PIECE[x.device.type], dim=1):
            sums += torch.pdist(columns.contiguous(), p=float(power)).double().pow_(power)
        pairs = sums.pow_(1 / power)
    above = torch.ones(count, count, dtype=torch.bool, device=x.device).triu_(1)  # row by row, as pdist's pairs are
    upper = torch.zeros(count, count, dtype=torch.float64, device=x.device).masked_scatter(above, pairs)
    return upper + upper.T


def _off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)]
