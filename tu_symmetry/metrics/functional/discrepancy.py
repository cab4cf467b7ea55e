"""Maximum mean discrepancy between two sets of networks, of their weights as they are or without symmetries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.alignment.removal import removal_element, remove_symmetries
from tu_symmetry.processes import add_up, count, dealt, in_step, rank
from tu_symmetry.scaling.canonical import Method
from tu_symmetry.states import States, SymmetryError, as_stack, check_tensor, require_state
from tu_symmetry.symmetry.action import largest_entry
from tu_symmetry.symmetry.elements import LogScale, Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

KERNELS = ("laplace", "gaussian")  # of the L1 and of the L2 distance
BANDWIDTHS = 10  # of each kernel
_BANDWIDTH_SAMPLES = 500
_PIECE = {"cpu": 1024, "cuda": 2**16}  # columns of a piece of the distances between long rows
RemovalName = Literal["paper", "min_mass", "signed"]


def maximum_mean_discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """Unbiased squared MMD of two sets of samples ``(S, D)`` and ``(T, D)``, mean over kernels and bandwidths.

    The estimate is the U-statistic

        mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j),

    whose mean is 0 for equal distributions, so that single values may be negative. The kernels are
    ``exp(-||x - y||_1 / b)`` and ``exp(-||x - y||_2^2 / b^2)``, the bandwidths those of MMDAgg (Schrab et al., JMLR
    2023), as in the code of arXiv 2310.08287; the plain mean is our choice.

    Laws: symmetric in ``x`` and ``y``; unchanged when samples or coordinates are permuted, when both sets are
    translated, and, as long as the bandwidths' floors do not act, when both are scaled.
    """
    return mean_discrepancy([(x, y)])


def mean_discrepancy(sets: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean of :func:`maximum_mean_discrepancy` over pairs of sets, one for each tensor of a network."""

    def pooled() -> Iterator[Tensor]:
        for x, y in sets:
            x, y = checked_samples(x, y)
            if max(largest_entry(x), largest_entry(y)) > 1e12:  # its squares are too large for single precision
                x, y = x.double(), y.double()
            yield torch.cat([x, y])

    values = torch.zeros(len(sets), dtype=torch.float64, device="cpu")
    for k, distances in enumerate(all_distances(pooled())):
        values = values.to(distances[0].device)
        if k % count() == rank():
            kernel = mean_kernel(distances, len(sets[k][0]))
            is_first = torch.arange(len(kernel), device=kernel.device) < len(sets[k][0])
            values[k] = u_statistics(kernel, torch.stack([is_first, ~is_first], dim=1).to(kernel))[0]
    add_up(values)
    return values.mean()


def network_discrepancy(
    x: States, y: States, *, graph: SymmetryGraph | None = None, removed: RemovalName | Removal = "paper"
) -> Tensor:
    """Squared MMD of two lists or stacks of networks, mean over their tensors; without symmetries it is NS.

    "MMD computed after the removal of the symmetries" is what arXiv 2310.08287 calls NS. How that paper makes one
    number of its layers' values is not published; the mean over tensors is our choice. With a ``graph`` only parameters
    are compared, tied ones once, and not the running statistics, after the paper's :func:`removal` or another one.

    Raises:
        ValueError: for states of different architectures, too few samples, NaN or infinite values.
        SymmetryError: for states that the graph does not fit.
    """
    a, b = (weight_vectors(s, graph=graph, removed=removed) for s in (x, y))
    require_same_names(a, b)
    return mean_discrepancy([(vectors, b[name]) for name, vectors in a.items()])


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
    return x.detach().to(dtype), y.detach().to(x.device, dtype)


def weight_vectors(
    states: States, *, graph: SymmetryGraph | None = None, removed: RemovalName | Removal = "paper"
) -> dict[str, Tensor]:
    """The vectors ``(S, D)`` that :func:`network_discrepancy` compares, by the names of the tensors."""
    stack = require_state(as_stack(states), "states")
    if graph is not None:  # a form in half precision would be rounded once more
        wide = {n: t.float() if t.is_floating_point() and t.itemsize < 4 else t for n, t in stack.items()}
        form = removal(removed).apply(graph, wide)
        stack = {name: form[name] for name in graph.shapes if name not in graph.buffers}
    if stack and not any(t.is_floating_point() for t in stack.values()):
        kinds = sorted({str(t.dtype) for t in stack.values()})
        raise SymmetryError(f"the states hold no real floating-point weights to compare, only {kinds}")
    return {name: t.detach().flatten(1) for name, t in stack.items() if t.is_floating_point()}


def mean_kernel(distances: Sequence[Tensor], count_x: int) -> Tensor:
    """The mean of all kernels from L1 and L2 distances of the pooled samples ``(N, N)``, with 0 on the diagonal."""
    mean = torch.zeros_like(distances[0])
    for power, matrix in enumerate(distances, start=1):
        between = matrix[:count_x, count_x:][:_BANDWIDTH_SAMPLES, :_BANDWIDTH_SAMPLES]
        for bandwidth in _bandwidths(between):
            mean += (-((matrix / bandwidth) ** power)).exp_().fill_diagonal_(0)
    return mean / (BANDWIDTHS * len(KERNELS))


def u_statistics(kernel: Tensor, weights: Tensor, runs: Tensor | None = None) -> Tensor:
    """U-statistics for many pairs of weights: ``(N, 2 K)``, two columns for each, over a kernel with zero diagonal.

    With weights 0 and 1 this is the usual one; with multiplicities, the mean over pairs of different networks. With
    ``runs`` ``(N,)``, whose networks have equal weights, pairs of two draws of one run are left out as pairs of two
    draws of one network are: drawn ``m`` times, a run of ``n`` networks has ``m n (n - 1)`` pairs within, not ``m n (m
    n - 1)``.
    """
    w = weights.view(len(kernel), -1, 2)
    a, b = w[..., 0], w[..., 1]
    ka, kb = kernel @ a, kernel @ b
    runs = torch.arange(len(kernel), device=kernel.device) if runs is None else runs.to(kernel.device)
    same = (runs.unsqueeze(1) == runs).to(kernel)
    alike, sizes = (kernel * same).sum(1, keepdim=True), same.sum(1, keepdim=True)  # sums over the own run, (N, 1)

    def within(x: Tensor, kx: Tensor) -> Tensor:
        pairs = x.sum(0).square() - (x.square() * sizes).sum(0) + (x * (sizes - 1)).sum(0)
        return ((x * kx).sum(0) - ((x.square() - x) * alike).sum(0)) / pairs

    # no network is in both sets
    return within(a, ka) + within(b, kb) - 2 * (b * ka).sum(0) / (a.sum(0) * b.sum(0))


def _bandwidths(between: Tensor) -> Tensor:
    """MMDAgg's bandwidths, ascending in geometric progression from ``lambda_min / 2`` to ``2 lambda_max``, float64.

    ``lambda_min`` is the smallest distance or, where that is below 0.1, the larger of the 5 % quantile and 0.1;
    ``lambda_max`` is the largest, 0.3 at least. Distances of 0 are first replaced by the median.
    """
    d = between.flatten().double().sort().values
    median = (d[(len(d) - 1) // 2] + d[len(d) // 2]) / 2
    d = torch.where(d == 0, median, d).sort().values
    smallest = torch.where(d[0] >= 0.1, d[0], d[int(0.05 * len(d))].clamp_min(0.1))
    largest = d[-1].clamp_min(0.3)
    exponents = torch.arange(BANDWIDTHS, dtype=torch.float64, device=d.device) / (BANDWIDTHS - 1)
    return smallest / 2 * (4 * largest / smallest) ** exponents


def all_distances(sets: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """:func:`both_distances` of each set. Of several processes each computes its share of so many sets at a time."""
    every = iter(sets)
    while some := list(islice(every, count())):
        for x, sums in zip(some, _shared_sums(some), strict=True):
            yield _square(x, sums[0], 1), _square(x, sums[1], 2)


def _shared_sums(sets: Sequence[Tensor]) -> list[Tensor]:
    """For each set the sums ``(2, pairs)`` of which L1 and L2 distances are made, of all processes."""
    sums = [x.new_zeros(2, len(x) * (len(x) - 1) // 2, dtype=torch.float64) for x in sets]
    work = [(k, power, piece) for k, x in enumerate(sets) for power in (1, 2) for piece in _pieces(x)]
    owners = dealt([len(piece) ** 2 * piece.shape[1] for _, _, piece in work])

    def add() -> None:
        for (k, power, piece), owner in zip(work, owners, strict=True):
            if owner == rank():
                sums[k][power - 1] += _summands(sets[k], piece, power)

    in_step(add)
    add_up(*sums)
    return sums


def both_distances(x: Tensor) -> tuple[Tensor, Tensor]:
    """L1 and L2 distances between all rows of a set, as :func:`pairwise_distances` gives them."""
    return pairwise_distances(x, 1), pairwise_distances(x, 2)


def pairwise_distances(x: Tensor, power: int) -> Tensor:
    """L1 or L2 distances in float64 between all rows ``(N, D)`` of a set: ``(N, N)``, symmetric, 0 on the diagonal.

    ``pdist`` takes each pair once, and is several times as fast for a pair as ``cdist``, also between two sets.
    """
    first, *others = _pieces(x)
    sums = _summands(x, first, power)
    for piece in others:
        sums += _summands(x, piece, power)
    return _square(x, sums, power)


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """Columns that stay in the cache; long rows would be read from memory again for every pair."""
    return x.split(_PIECE[x.device.type], dim=1)


def _summands(x: Tensor, piece: Tensor, power: int) -> Tensor:
    """The distances of all pairs where the piece is the whole set, else their powers, which add up; float64."""
    pairs = torch.pdist(piece.contiguous(), p=float(power)).double()
    return pairs if piece.shape == x.shape else pairs.pow_(power)


def _square(x: Tensor, sums: Tensor, power: int) -> Tensor:
    """The distances ``(N, N)`` that were added up for all pairs."""
    count = len(x)
    pairs = sums if len(_pieces(x)) == 1 else sums.pow_(1 / power)
    above = torch.ones(count, count, dtype=torch.bool, device=x.device).triu_(1)  # row by row, as pdist's pairs are
    upper = torch.zeros(count, count, dtype=torch.float64, device=x.device).masked_scatter(above, pairs)
    return upper + upper.T


@dataclass(frozen=True)
class Removal:
    """A canonical form of networks: a ``scale`` of the units (see :func:`~tu_symmetry.canonicalize`), then an order.

    With ``signs``, units have canonical signs before they are ordered.
    Units are matched to those of the ``reference``, or else sorted by their largest weight.
    """

    name: str
    scale: Method
    signs: bool = False
    reference: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def element(self, graph: SymmetryGraph, state: Mapping[str, Tensor]) -> tuple[LogScale, Permutation]:
        """Log-factors and permutation that bring one network to its canonical form, which is not one over signs."""
        if self.signs:
            raise ValueError("a removal over signs has no element of factors and a permutation; apply it")
        return removal_element(graph, state, **self._options())

    def apply(self, graph: SymmetryGraph, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The canonical form of a network, or of each of a stack."""
        with torch.no_grad():
            return remove_symmetries(graph, states, certify=False, signs=self.signs, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "reference": self.reference}


def removal(name: RemovalName | Removal, *, align_to: Mapping[str, Tensor] | None = None) -> Removal:
    """A removal by its name: ``paper`` (arXiv 2310.08287: unit norm of every hidden filter), ``min_mass``, ``signed``.

    The last one is ``paper`` with canonical signs of units, for networks of odd activations and of normalizations.

    Units are then sorted by their largest weight, or with ``align_to`` matched to those of that network (sorting tears
    apart units whose keys are almost equal).
    """
    if isinstance(name, Removal):
        return name
    scales: dict[str, Method] = {"paper": "unit_norm", "min_mass": "min_mass", "signed": "unit_norm"}
    if name not in scales:
        raise ValueError(f"removal must be one of {', '.join(map(repr, scales))} or a Removal, got {name!r}")
    signs = name == "signed"
    told = f"{scales[name]}{', signs' if signs else ''}"
    if align_to is not None:
        return Removal(f"{told}, aligned", scales[name], signs, dict(align_to))
    return Removal(f"{told}, sorted by the largest weight", scales[name], signs)
