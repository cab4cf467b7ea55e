"""How sure a discrepancy of two sets of networks is: permutation p-value, bootstrap interval, control of the sizes.

All statistics here are linear in one kernel matrix of the pooled networks, which is made part by part (a tensor, a
layer) from distances. Distances add up over entries, so that neither set ever has to be in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from tu_symmetry.metrics.functional.discrepancy import (
    BANDWIDTHS,
    KERNELS,
    all_distances,
    both_distances,
    mean_kernel,
    removal,
    require_same_names,
    u_statistics,
    weight_vectors,
)
from tu_symmetry.metrics.functional.resampling import p_value, percentile_interval
from tu_symmetry.processes import add_up, by_first, count, in_step, rank, shared
from tu_symmetry.states import States, SymmetryError, require_state
from tu_symmetry.symmetry.action import permute_tensors, scale_tensors
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import own_generator
from tu_symmetry.transfer import numbers

Sizes = Literal["given", "equal"]
# from the places of the networks that are kept of both sets to the distances of all pairs, for each tensor
Parts = Callable[[Tensor, Tensor], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class DiscrepancyTest:
    """A squared MMD with its p-value and the 95 % interval of a bootstrap over networks.

    ``sizes`` are the numbers of networks that were compared; ``aggregation`` and ``removed`` say in words what was made
    one number, and what was removed before.
    """

    value: float
    p_value: float
    interval: tuple[float, float]
    sizes: tuple[int, int]
    aggregation: str
    removed: str


class _Store(Protocol):
    """Networks that are read one tensor at a time, as a ``SampleStore`` reads them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...
    def tensor(self, index: int, name: str) -> Tensor: ...


def discrepancy_test(
    x: States | _Store,
    y: States | _Store,
    *,
    graph: SymmetryGraph | None = None,
    permutations: int = 199,
    bootstraps: int = 200,
    generator: torch.Generator | None = None,
    memory: int = 2**30,
) -> DiscrepancyTest:
    """:func:`~tu_symmetry.metrics.functional.network_discrepancy` with p-value and confidence interval.

    *p-value*: networks of both sets are relabeled at random, bandwidths held as MMDAgg holds them. It tests whether
    the *networks* are exchangeable; several from one run are not independent. *Interval*: networks of both sets are
    drawn with replacement. A pair of equal draws counts nothing, so that each replicate is an unbiased estimate as
    well. Near zero, where the estimate is degenerate, the interval is too wide.

    Args:
        x: a list of states, stacked ones ``(S, ...)``, or a store such as
            :class:`~tu_symmetry.posterior.samples.SampleStore`, which is read tensor after tensor.
        y: the reference ``(T, ...)``, of the same kind.
        graph: removes symmetries; see :func:`~tu_symmetry.metrics.functional.network_discrepancy`.
        permutations: number of relabelings; the least p-value is ``1 / (permutations + 1)``.
        bootstraps: number of replicates; 0 for none, the interval is then NaN.
        generator: source of all random choices; without one they cannot be repeated.
        memory: bytes of weights of stores that are held at a time.

    Raises:
        ValueError: states of different architectures, too few networks, NaN or infinite values, arguments out of range.
        SymmetryError: states that the graph does not fit.
    """
    options: dict[str, Any] = {"permutations": permutations, "bootstraps": bootstraps, "generator": generator}
    options["removed"] = "nothing" if graph is None else removal("paper").name
    if isinstance(x, (Mapping, list, tuple)) and isinstance(y, (Mapping, list, tuple)):
        sets = [weight_vectors(s, graph=graph) for s in (x, y)]
        require_same_names(*sets)
        return vectors_test(*sets, **options)
    if isinstance(x, (Mapping, list, tuple)) or isinstance(y, (Mapping, list, tuple)):
        raise ValueError("one set is a stack and the other a store: give both as stores, or both as stacks")

    def parts(keep_x: Tensor, keep_y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        members: list[Any] = [(x, int(i)) for i in keep_x] + [(y, int(i)) for i in keep_y]
        return streamed_distances(members, graph=graph, memory=memory)

    return _test((len(x), len(y)), parts, **options)


def vectors_test(x: Mapping[str, Tensor], y: Mapping[str, Tensor], **options: Any) -> DiscrepancyTest:
    """:func:`discrepancy_test` of vectors ``(S, D)`` and ``(T, D)`` by their names, with the options of :func:`_test`.

    ``sizes="equal"`` draws from the larger set as many networks as the smaller one has: a control, since the spread of
    the estimate, not its mean, depends on the sizes. ``groups`` has for each set the number of the run that each
    network comes from: the interval then draws whole runs, and pairs of two draws of one run count nothing.
    """
    finite: dict[str, Tensor] = {}

    def pooled(keep_x: Tensor, keep_y: Tensor) -> Iterator[Tensor]:
        for name, own in x.items():
            if own.shape[1:] != y[name].shape[1:]:
                raise ValueError(f"{name!r} has {own.shape[1]} features in one set and {y[name].shape[1]} in the other")
            dtype = torch.promote_types(torch.promote_types(own.dtype, y[name].dtype), torch.float32)
            both = torch.cat([own.to(dtype)[keep_x], y[name].to(own.device, dtype)[keep_y]])
            finite[name] = torch.isfinite(both).all()
            yield both

    def parts(keep_x: Tensor, keep_y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield from all_distances(pooled(keep_x, keep_y))
        for name, flag in zip(finite, numbers(list(finite.values())), strict=True):
            if not flag:
                raise ValueError(f"{name!r} holds NaN or infinite values: a network has diverged")

    counts = len(next(iter(x.values()), ())), len(next(iter(y.values()), ()))
    return _test(counts, parts, **options)


def distances_test(distances: Sequence[tuple[Tensor, Tensor]], count_x: int, **options: Any) -> DiscrepancyTest:
    """:func:`vectors_test` from the distances of all pooled networks ``(S + T, S + T)``, those of ``x`` first."""

    def parts(keep_x: Tensor, keep_y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        keep = torch.cat([keep_x, count_x + keep_y])
        for one, two in distances:
            rows = keep.to(one.device)
            yield one[rows][:, rows], two[rows][:, rows]

    return _test((count_x, len(distances[0][0]) - count_x), parts, **options)


def streamed_distances(
    members: Sequence[tuple[_Store, int]],
    *,
    graph: SymmetryGraph | None = None,
    names: Sequence[str] | None = None,
    memory: int = 2**30,
    device: torch.device | None = None,
    each: Callable[[Tensor], None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """L1 and L2 distances of all pairs of networks ``(N, N)`` for each tensor, which is read from their stores.

    Args:
        members: stores, and the place of a network in each.
        graph: removes symmetries by the paper's :func:`removal`.
        names: of the tensors; by default all parameters, or without a graph all floating-point tensors.
        memory: bytes of columns ``(N, columns)`` in float32 that are held at a time.
        device: where distances are computed; the CPU by default.
        each: is called with all columns, on the device.

    Raises:
        ValueError: tensors of different shapes, NaN or infinite values.
        SymmetryError: nothing to compare.
    """
    elements = []
    first = members[0][0][members[0][1]]
    if graph is not None:
        names = [n for n in graph.shapes if n not in graph.buffers and first[n].is_floating_point()]
        with torch.no_grad():
            elements = shared(len(members), lambda k: removal("paper").element(graph, members[k][0][members[k][1]]))
    elif names is None:
        require_state(first, "states")
        names = [name for name, t in first.items() if t.is_floating_point()]
        require_same_names(first, members[-1][0][members[-1][1]])
    if not names:
        raise SymmetryError("the states hold no real floating-point weights to compare")
    place = device or torch.device("cpu")

    def pieces(name: str) -> Iterator[Tensor]:
        shape = first[name].shape
        entries = math.prod(shape)
        width = max(1, memory // (4 * len(members)))
        for start in range(0, entries, width):
            stop = min(start + width, entries)
            block = torch.empty(len(members), stop - start, dtype=torch.float32, device="cpu")
            for row, (held, i) in enumerate(members):
                t = held.tensor(i, name)
                if t.shape != shape:
                    raise ValueError(f"{name!r} has the shapes {tuple(t.shape)} and {tuple(shape)} in two networks")
                if graph is not None:
                    log_scale, permutation = elements[row]
                    t = permute_tensors(graph, permutation, scale_tensors(graph, log_scale, {name: t.float()}))[name]
                block[row] = t.reshape(-1)[start:stop]
            if not torch.isfinite(block).all():
                raise ValueError(f"{name!r} holds NaN or infinite values: a network has diverged")
            yield block.to(place)
            del block  # before the next one is made; whoever takes them lets go of them likewise

    def summed(some: Sequence[str], places: Sequence[int]) -> list[Tensor]:
        """For each tensor the sums of L1 distances and of squared L2 ones; only of those at ``places``."""
        sums = [torch.zeros(2, len(members), len(members), dtype=torch.float64, device=place) for _ in some]
        for k in places:
            for block in pieces(some[k]):
                distances = both_distances(block)
                sums[k][0] += distances[0]
                sums[k][1] += distances[1].square_()
                if each is not None:
                    each(block)
                del block
        return sums

    every = iter(names)
    while some := list(islice(every, count() if each is None else 1)):  # each process takes one, or all, to be called
        if each is None:
            sums = in_step(partial(summed, some, range(len(some))[rank() : rank() + 1]))
            add_up(*sums)
        else:
            sums = summed(some, [0])
        for one, two in sums:
            yield one, two.sqrt_()


def _test(
    counts: tuple[int, int],
    parts: Parts,
    *,
    removed: str = "nothing",
    sizes: Sizes = "given",
    permutations: int = 199,
    bootstraps: int = 200,
    groups: tuple[Tensor | None, Tensor | None] = (None, None),
    generator: torch.Generator | None = None,
) -> DiscrepancyTest:
    """The test, from the distances between the networks of both sets that ``sizes`` keeps."""
    if permutations < 1 or bootstraps < 0:
        raise ValueError(f"permutations must be at least 1 and bootstraps 0, got {permutations} and {bootstraps}")
    if min(counts) < 2:
        raise ValueError(
            f"the sets hold {counts[0]} and {counts[1]} networks; a discrepancy needs at least two of each"
        )
    source = own_generator(generator) if generator or count() == 1 else by_first(lambda: own_generator(None))
    kept = _kept(counts, sizes, source)
    runs = [_runs(own, keep, count) for own, keep, count in zip(groups, kept, counts, strict=True)]
    count_x, count_y = map(len, kept)
    observed = torch.zeros(count_x + count_y, 2, dtype=torch.float64, device="cpu")
    observed[:count_x, 0] = observed[count_x:, 1] = 1
    relabeled = torch.stack([_permuted(len(observed), source) for _ in range(permutations)])
    drawn = _bootstrap_weights(runs, bootstraps, source)
    kernels, total = 0, torch.zeros(len(observed), len(observed), dtype=torch.float64, device="cpu")
    for distances in parts(*kept):
        total = total.to(distances[0].device)
        if kernels % count() == rank():
            total += mean_kernel(distances, count_x)
        kernels += 1
    add_up(total)
    if not kernels:
        raise ValueError("there is nothing to compare: no tensors")
    overall = total / kernels

    def statistics(weights: Tensor, own: Tensor | None = None) -> Tensor:
        return u_statistics(overall, weights.to(overall.device), own).cpu()

    value = float(statistics(observed)[0])
    null = statistics(observed[relabeled].movedim(0, 1).reshape(len(observed), -1))
    interval = (math.nan, math.nan)
    if bootstraps:
        first, second = (g.unique(return_inverse=True)[1] for g in runs)
        interval = percentile_interval(statistics(drawn, torch.cat([first, second + len(first)])))
    return DiscrepancyTest(
        value=value,
        p_value=p_value(null, value, rounding=1e-12 + 1e-9 * abs(value)),
        interval=interval,
        sizes=(count_x, count_y),
        aggregation=(
            f"mean over {kernels} tensors of the mean over {len(KERNELS) * BANDWIDTHS} kernels "
            f"({', '.join(KERNELS)}, {BANDWIDTHS} bandwidths each)"
        ),
        removed=removed,
    )


def _permuted(count: int, source: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=source, device=source.device).cpu()


def _bootstrap_weights(groups: Sequence[Tensor], draws: int, source: torch.Generator) -> Tensor:
    """Multiplicities ``(N, 2 draws)`` of all networks when whole runs of each set are drawn with replacement."""
    columns = []
    for runs in groups:
        numbers, index = runs.unique(return_inverse=True)
        chosen = torch.randint(len(numbers), (draws, len(numbers)), generator=source, device=source.device).cpu()
        times = torch.zeros(draws, len(numbers), dtype=torch.float64, device="cpu")
        times.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
        columns.append(times[:, index].T)
    x, y = columns
    made = torch.zeros(len(x) + len(y), draws, 2, dtype=torch.float64, device="cpu")
    made[: len(x), :, 0], made[len(x) :, :, 1] = x, y
    return made.flatten(1)


def _kept(counts: tuple[int, int], sizes: Sizes, source: torch.Generator) -> list[Tensor]:
    """The places of the networks of each set that are compared."""
    if sizes not in ("given", "equal"):
        raise ValueError(f"sizes must be 'given' or 'equal', got {sizes!r}")
    if sizes == "given" or counts[0] == counts[1]:
        return [torch.arange(count, device="cpu") for count in counts]
    return [_permuted(count, source)[: min(counts)].sort().values for count in counts]


def _runs(groups: Tensor | None, keep: Tensor, count: int) -> Tensor:
    """The number of the run of each network that is kept; of one run each network is its own."""
    if groups is None:
        return keep
    if groups.shape != (count,):
        raise ValueError(f"groups has the shape {tuple(groups.shape)} for {count} networks")
    own = groups.cpu()[keep]
    return keep if bool((own == own[0]).all()) else own
