"""Planted permutations on a residual network with tied streams: how often does each method find them?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tu_symmetry as tus
from benchmarks._measure import Stopwatch, figure, times
from benchmarks._report import Goal, Section, Settings
from tu_symmetry.reporting.grid import Grid

NOISES = (0.0, 0.5)
METHODS: dict[str, dict[str, Any]] = {
    "Frank-Wolfe, then descent (default)": {},
    "descent from the identity": {"solver": "descent"},
    "descent, best of 10 starts": {"solver": "descent", "restarts": 10},
}


class ResidualBlock(nn.Module):
    """``x + W2 relu(W1 x)``: the stream is tied over all blocks."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to the stream."""
        return x + self.second(torch.relu(self.first(x)))


def residual_network(width: int, blocks: int) -> nn.Module:
    """A residual multilayer perceptron: one tied stream and one hidden layer for each block."""
    inner = (ResidualBlock(width, width) for _ in range(blocks))
    return nn.Sequential(nn.Linear(4, width), *inner, nn.Linear(width, 4))


def run(settings: Settings) -> Section:
    """Plant permutations, match, and count."""
    width, blocks, plants = (8, 2, 2) if settings.quick else (64, 4, 50)
    model = residual_network(width, blocks).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 4, dtype=torch.float64))
    graph.require_verified()
    rows, data, goals = [], [], []
    for noise in NOISES:
        hits = dict.fromkeys(METHODS, 0)
        seconds = dict.fromkeys(METHODS, 0.0)
        for seed in range(plants):
            reference, state, inverse = _plant(graph, model, noise, seed)
            for name, options in METHODS.items():
                found, spent = _match(graph, reference, state, seed, options)
                hits[name] += all(torch.equal(found.permutation[g], p) for g, p in inverse.items())
                seconds[name] += spent
        default = next(iter(METHODS))
        for name in METHODS:
            mean = seconds[name] / plants
            relative = times(seconds[name], seconds[default])
            rows.append([name, figure(noise), f"{hits[name]} of {plants}", figure(1000 * mean), relative])
            data.append({"method": name, "noise": noise, "hits": hits[name], "plants": plants, "seconds": mean})
        settings.say(f"noise {noise}: " + ", ".join(f"{n}: {h} of {plants}" for n, h in hits.items()))
        goals.append(
            Goal(
                f"all planted permutations found at noise {noise}",
                hits[default] == plants,
                f"{hits[default]} of {plants}",
            )
        )
    grid = Grid(
        "Planted permutations that were found", ["method", "noise", "found", "cpu ms each", "against the default"], rows
    )
    text = (
        f"A residual network (one stream of {width} units, tied over {blocks} blocks, {width} hidden units in each, 4 "
        "inputs and 4 outputs) with independent standard normal weights. Its copy gets Gaussian noise, whose standard "
        "deviation is given relative to that of the weights, and then a uniformly random permutation of every group. "
        "Found means: every unit of every group is back in its place. float64; the three methods run in turn on each "
        "pair."
    )
    return Section("Planted permutations on a residual network", text, [grid], goals, data)


def _plant(
    graph: tus.SymmetryGraph, model: nn.Module, noise: float, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> dict[str, Tensor]:
        return {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in model.state_dict().items()}

    reference, disturbance = draw(), draw()
    permutation = tus.random_permutation(graph, generator=generator)
    noisy = {n: t + noise * disturbance[n] for n, t in reference.items()}
    return reference, tus.apply_permutation(graph, permutation, noisy), tus.invert(permutation)


def _match(
    graph: tus.SymmetryGraph,
    reference: dict[str, Tensor],
    state: dict[str, Tensor],
    seed: int,
    options: dict[str, Any],
) -> tuple[tus.alignment.Matching, float]:
    options = dict(options)
    more = options.pop("restarts", 1) - 1
    generator = torch.Generator().manual_seed(seed) if more else None
    with Stopwatch() as watch:
        found = tus.weight_matching(graph, reference, state, generator=generator, **options)
        for _ in range(more):
            start = tus.random_permutation(graph, generator=generator)
            again = tus.weight_matching(graph, reference, state, init=start, generator=generator, **options)
            found = max(found, again, key=lambda one: one.objective)
    return found, watch.cpu
