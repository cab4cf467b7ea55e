"""How alike the units of networks are once they are matched: what a merge can hope for, and what it left."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tu_symmetry.alignment.activations import all_places, observe
from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.assignment import assign_family, family_value
from tu_symmetry.alignment.gram import families
from tu_symmetry.alignment.matching import check_pair, weight_distance
from tu_symmetry.alignment.moves import Move
from tu_symmetry.alignment.networks import Networks, StateSource
from tu_symmetry.alignment.over import Over
from tu_symmetry.evaluation import reusable
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.symmetry.elements import identity_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness

_ALIKE = 0.55  # correlation from which on merges of small networks mostly lost little (see the page on merging)
_PARTS = ("matched", "a better order, at most", "an order for each layer", "no order")


@dataclass(frozen=True)
class Likeness:
    """Mean correlations of the units of one group, and of those nested in it, between two networks.

    Each unit is counted at each place where layers read it; a residual stream has several places.

    Attributes:
        units: number of units.
        places: number of places.
        matched: the correlation of units that stand at equal places in both networks.
        best: the largest that any order of the units has; it is found exactly.
        untied: the same where each place may have an order of its own, which no network has.
    """

    units: int
    places: int
    matched: float
    best: float
    untied: float

    @property
    def parts(self) -> dict[str, float]:
        """The correlation, and what it lacks to be 1."""
        lacks = (self.matched, self.best - self.matched, self.untied - self.best, 1 - self.untied)
        return dict(zip(_PARTS, lacks, strict=True))


@leaves_randomness
def likeness(
    graph: SymmetryGraph,
    model: nn.Module,
    reference_state: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    dataloader: Iterable[Any],
) -> dict[str, Likeness]:
    """How alike the units of two networks are on data, group by group; groups that no module shows are left out.

    Laws: ``matched <= best <= untied <= 1`` up to rounding; all are 1 for a network and itself, and the last two for a
    network and a permuted copy, where no unit is constant.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: an empty loader, or activations that are not finite.
    """
    check_pair(graph, reference_state, state)
    shown = observe(graph, model, reference_state, state, dataloader, all_places(graph, model), "correlation")
    still, found = identity_permutation(graph), dict[str, Likeness]()
    for family in families(graph):
        sizes = {g.name: math.prod(g.shape) for g in family.groups}
        zeros = {name: torch.zeros(n, n, dtype=torch.float64, device="cpu") for name, n in sizes.items()}
        own = {place: gram.double() for place, gram in shown.items() if place[0] in sizes}
        if not own:
            continue
        each = [zeros | {name: gram} for (name, _), gram in own.items()]
        total = {name: torch.stack([grams[name] for grams in each]).sum(0) for name in zeros}
        count = sum(map(len, own.values()))
        best = [family_value(family, grams, assign_family(family, grams))[0] for grams in (total, *each)]
        found[family.root.name] = Likeness(
            units=sum(sizes[name] for name in {name for name, _ in own}),
            places=len({module for _, module in own}),
            matched=family_value(family, total, still)[0] / count,
            best=best[0] / count,
            untied=sum(best[1:]) / count,
        )
    return found


@dataclass(frozen=True, repr=False)
class Preflight(Brief):
    """Whether networks can be merged, told before they are.

    Attributes:
        distance_before: L2 distance of the networks' parameters, the root of the mean square over pairs.
        distance_after: the same after alignment.
        given: how alike their units are as they stand, by groups.
        matched: the same after alignment.
        verdict: what that means for the merged network, in words.
    """

    distance_before: float
    distance_after: float
    given: dict[str, Likeness]
    matched: dict[str, Likeness]

    def facts(self) -> list[tuple[str, str]]:
        """As other results, with one correlation in place of those of each group."""
        own = [fact for fact in super().facts() if fact[0] not in ("given", "matched")]
        return [*own, ("correlation", f"{overall(self.given).matched:.3f}, {self.correlation:.3f} after")]

    @property
    def correlation(self) -> float:
        """The mean correlation of units that stand at equal places after alignment."""
        return overall(self.matched).matched

    @property
    def verdict(self) -> str:
        """Whether a merge can work, by what was seen of the merges of small networks."""
        words = "mostly loses little" if self.correlation >= _ALIKE else "may lose much"
        return f"a merge {words}: measure it (units correlate by {self.correlation:.2f})"

    def groups(self) -> Grid:
        """The correlations of each group of units."""
        header = ["group", "units", "places", "as given", "matched", "best order", "an order for each place"]
        pairs = {name: (self.given[name], one) for name, one in self.matched.items()}
        pairs["all"] = overall(self.given), overall(self.matched)
        rows = [
            [name, f"{one.units}", f"{one.places}"]
            + [f"{value:.3f}" for value in (before.matched, one.matched, one.best, one.untied)]
            for name, (before, one) in pairs.items()
        ]
        return Grid(f"Distance {self.distance_before:.3g} before, {self.distance_after:.3g} after", header, rows)


@leaves_randomness
def preflight(
    graph: SymmetryGraph,
    states: Networks,
    model: nn.Module,
    dataloader: Iterable[Any],
    *,
    over: Sequence[Over] = ("permutations",),
) -> Preflight:
    """Align networks and look at how alike their units are on data, without a merge and without targets.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        states: at least two networks, see :func:`~tu_symmetry.merge`.
        model: the module, left as it is.
        dataloader: batches, tensors or tuples that begin with the inputs; a few hundred inputs are enough.
        over: which symmetries move networks, see :func:`~tu_symmetry.align`.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        TypeError: what is no state dict or file.
        ValueError: fewer than two networks, an empty loader, a network that shows no units, or activations that are
            not finite.
    """
    networks, batches = StateSource(states), reusable(dataloader)
    aligned = align(graph, list(networks), over=over, certify=False)
    return Preflight(**_looked_at(graph, model, networks, aligned.moves, [1.0] * len(networks), batches))


@dataclass(frozen=True, repr=False)
class Explanation(Preflight):
    """Where the barrier of a merge went, and what is left of it.

    The barrier is the loss of the mean above the members' own. What matching and the correction of statistics take off
    it is the mean of what each takes when it comes first and when it comes second; with ``left`` they add up to
    ``barrier``. The correlation of units that stand at equal places says why something is left: it lacks
    ``better_order``, ``ties`` and ``unexplained`` to be 1.

    Attributes:
        barrier: of the mean of the networks as they were given; None without a loss, as the next three.
        matching: what matching took off it.
        statistics: what the correction took off it: what stale statistics of normalizations, or too small variances of
            mean units, had cost.
        left: of the merged network.
    """

    barrier: float | None = None
    matching: float | None = None
    statistics: float | None = None
    left: float | None = None

    @property
    def better_order(self) -> float:
        """The correlation that the best order of units has beyond the one that was found: no other gains more."""
        return overall(self.matched).parts[_PARTS[1]]

    @property
    def ties(self) -> float:
        """The correlation that is lost because a group's units stand in one order at all places where they are read."""
        return overall(self.matched).parts[_PARTS[2]]

    @property
    def unexplained(self) -> float:
        """The correlation that no order of the units brings, at no place: the networks have other units."""
        return overall(self.matched).parts[_PARTS[3]]

    def grid(self) -> Grid:
        """The parts of barrier, distance and correlation; ``markdown()`` and ``to_dict()`` make text and JSON of it."""
        lacks = list(overall(self.matched).parts.items())[1:]
        rows: list[list[Any]] = [
            ["as given", self.barrier, self.distance_before, overall(self.given).matched],
            ["matching", self.matching, self.distance_before - self.distance_after, None],
            ["statistics", self.statistics, None, None],
            ["left", self.left, self.distance_after, self.correlation],
            *([name, None, None, value] for name, value in lacks),
        ]
        cells = [[name, *("" if v is None else f"{v:.3g}" for v in values)] for name, *values in rows]
        return Grid("What is left of the barrier", ["", "barrier", "distance", "correlation"], cells)

    def draw(self, path: Path) -> None:
        """Write a figure: the barrier step by step, and the correlation of each group with what it lacks."""
        from tu_symmetry.reporting import plots  # matplotlib takes a while

        shades = (plots.BLUE, plots.GREEN, plots.ORANGE, plots.GRAY)
        with plots.figure(path, 2) as (left, right):
            steps = {"as given": self.barrier, "matching": self.matching, "statistics": self.statistics}
            heights = [value or 0.0 for value in (*steps.values(), self.left)]
            bottoms = [0.0, heights[0] - heights[1], heights[3], 0.0]
            left.bar([*steps, "left"], heights, bottom=bottoms, color=[plots.GRAY, *shades[:3]])
            left.set(title="Barrier", ylabel="loss above the members'")
            starts = [0.0] * len(self.matched)
            for color, label in zip(shades, _PARTS, strict=True):
                lengths = [one.parts[label] for one in self.matched.values()]
                right.barh(list(self.matched), lengths, left=starts, color=color, label=label)
                starts = [start + length for start, length in zip(starts, lengths, strict=True)]
            right.set(title="Correlation of units", xlim=(min(0.0, *(one.matched for one in self.matched.values())), 1))
            right.legend(loc="lower center", bbox_to_anchor=(0.4, 1.08), ncols=2)


def explain(
    graph: SymmetryGraph,
    networks: StateSource,
    moves: Sequence[Move],
    shares: Sequence[float],
    barriers: Mapping[str, float],
    model: nn.Module,
    dataloader: Iterable[Any],
) -> Explanation:
    """What ``Merged.explain`` returns, of networks, what moved them, and the barriers that were measured."""
    if sum(share > 0 for share in shares) < 2:
        raise ValueError("one network has all the weight, so that nothing was merged, and there is nothing to explain")
    looked = _looked_at(graph, model, networks, moves, shares, reusable(dataloader))
    if not barriers:
        return Explanation(**looked)
    naive, aligned, corrected = (barriers.get(step, barriers["aligned"]) for step in ("naive", "aligned", "corrected"))
    between = barriers.get("naive_corrected", naive if "naive" in barriers else corrected)
    return Explanation(
        **looked,
        barrier=naive,
        matching=(naive - aligned + between - corrected) / 2,
        statistics=(naive - between + aligned - corrected) / 2,
        left=corrected,
    )


def overall(groups: Mapping[str, Likeness]) -> Likeness:
    """All groups together: each unit counts at each of its places."""
    every = list(groups.values())
    mean = _mean(every, [one.units * one.places for one in every])
    return replace(mean, units=sum(one.units for one in every), places=max(one.places for one in every))


def _looked_at(
    graph: SymmetryGraph,
    model: nn.Module,
    networks: StateSource,
    moves: Sequence[Move],
    shares: Sequence[float],
    batches: Iterable[Any],
) -> dict[str, Any]:
    """The attributes of a preflight: means over pairs of networks, each by the product of its shares."""
    every = itertools.combinations([k for k, share in enumerate(shares) if share > 0], 2)
    pairs = {(i, j): shares[i] * shares[j] for i, j in every}
    looked: dict[str, Any] = {}
    for when, alike, states in (("before", "given", networks), ("after", "matched", networks.moved(graph, moves))):
        squares, found = [], []
        for i, j in pairs:
            a, b = states[i], states[j]
            squares.append(weight_distance(graph, a, b) ** 2)
            found.append(likeness(graph, model, a, b, batches))
        if not found[0]:
            raise ValueError(
                f"no layer of {type(model).__name__} shows units that may be permuted: functions read them, no modules "
                "such as nn.Linear and nn.Conv2d, or there are none (print the graph)"
            )
        weights = list(pairs.values())
        looked[f"distance_{when}"] = math.sqrt(np.average(squares, weights=weights))
        looked[alike] = {name: _mean([own[name] for own in found], weights) for name in found[0]}
    return looked


def _mean(every: Sequence[Likeness], weights: Sequence[float]) -> Likeness:
    """The first one with the means of all correlations."""
    found = np.average([(one.matched, one.best, one.untied) for one in every], axis=0, weights=weights)
    return Likeness(every[0].units, every[0].places, *found.tolist())
