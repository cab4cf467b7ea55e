"""Match networks by each method: by weights, activations, the loss of the midpoint, or all at once to a universe.

Units are permuted, or with their signs turned, or with those rotated that matrices may mix (a residual stream among
them, since all networks' norms are folded first).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.activations import Similarity
from tu_symmetry.alignment.align import Over, align
from tu_symmetry.alignment.consensus import Reference
from tu_symmetry.alignment.matching import weight_distance
from tu_symmetry.alignment.straight_through import straight_through_matching
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.study import Study, tracked
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.scaling.folding import fold_norms
from tu_symmetry.states import State, unstack
from tu_symmetry.symmetry.action import apply_linear, apply_signed
from tu_symmetry.symmetry.elements import SignedPermutation, compose, identity_permutation, invert, transposition_count
from tu_symmetry.tables.outcome import Outcome, Parts, digest_tensors

Method = Literal[
    "weights",
    "signed",
    "rotated",
    "activations",
    "straight_through",
    "straight_through_signed",
    "straight_through_rotated",
    "universe",
]
Move = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # a permutation, then signs, then rotations
OVER: dict[str, tuple[Over, ...]] = {
    "signed": ("permutations", "signs"),
    "rotated": ("permutations", "signs", "rotations"),
}
OVER |= {f"straight_through_{name}": over for name, over in OVER.items()}


class Members(Study):
    """Independently trained networks of one architecture, from a sample store, on one device."""

    def __init__(self, model: nn.Module, data: ImageDataModule, samples: Path, device: str) -> None:
        super().__init__(model, data, device)
        store = SampleStore.open(samples, like=self.model.state_dict())
        self.states: list[State] = unstack(store.load(device=self.device))
        if len(self.states) < 2:
            raise ValueError(f"barriers are between networks, but {samples} holds {len(self.states)}: train 2 at least")
        self.networks = digest_tensors(*(t for state in self.states for t in state.values()))
        self.states = [fold_norms(self.graph, state) for state in self.states]
        self.pairs = list(itertools.combinations(range(len(self.states)), 2))

    def first_images(self, count: int, batch_size: int = 1000) -> Batches:
        """The first images of the training set."""
        if not 1 <= count <= len(self.train.x):
            raise ValueError(f"{count} training images are asked for, but there are {len(self.train.x)}")
        return Batches(self.train.x[:count], self.train.y[:count], batch_size)

    def matched(self, moves: Sequence[Move]) -> list[State]:
        """The networks, each moved by its permutation, signs and rotations, of tensors or of lists as in results."""
        found = []
        for (permutation, signs, maps), state in zip(in_tensors(moves), self.states, strict=True):
            moved = apply_signed(self.graph, SignedPermutation(permutation, signs), state)
            found.append(apply_linear(self.graph, maps, moved))
        return found


def in_tensors(moves: Sequence[Move]) -> list[Move]:
    """Moves of tensors, or of lists as in results, in tensors."""

    def part(given: dict[str, Any]) -> dict[str, Tensor]:
        return {name: torch.as_tensor(t, device="cpu") for name, t in given.items()}

    return [(part(permutation), part(signs), part(maps)) for permutation, signs, maps in moves]


def match(
    out: Path,
    model: nn.Module,
    data: ImageDataModule,
    samples: Path,
    methods: list[Method],
    images: int = 2000,
    similarity: Similarity = "correlation",
    batch_size: int = 125,
    epochs: int = 3,
    learning_rate: float = 1e-3,
    device: str = "auto",
) -> Outcome:
    """Match the networks by each method: how they move, transpositions, and the distances between all pairs.

    Args:
        methods: ``weights``, ``activations`` and ``straight_through`` match each network to the first one, ``universe``
            matches all of them at once. ``signed`` is ``weights`` over signs too, ``rotated`` over signs and rotations,
            ``straight_through_signed`` and ``straight_through_rotated`` likewise. Each is kept in the ``parts`` of
            ``out``.
        images: training images, the first ones, for activation and straight-through matching.
    """
    members = Members(model, data, samples, device)
    graph, states = members.graph, members.states
    batches = members.first_images(images, batch_size)

    options = (images, similarity, batch_size, epochs, learning_rate)
    parts = Parts(out / "parts", [members.networks, members.digest(), repr(model), options])

    def moves_of(method: Method) -> dict[str, Sequence[Move]]:
        over = OVER.get(method, ("permutations",))
        if method.startswith("straight_through"):
            how: dict[str, Any] = {"over": over, "epochs": epochs, "learning_rate": learning_rate}
            found = [
                straight_through_matching(graph, model, states[0], state, batches, cross_entropy, **how)
                for state in states[1:]
            ]
            moves = [(one.permutation, one.signs, one.maps) for one in found]
            return {"moves": [(identity_permutation(graph), {}, {}), *moves]}
        if method == "activations":
            how = {"match_on": method, "model": model, "dataloader": batches, "similarity": similarity}
        else:
            reference: Reference = "universe" if method == "universe" else "first"
            how = {"reference": reference, "over": over}
        one = align(graph, states, **how)
        return {"moves": list(zip(one.permutations, one.signs, one.maps, strict=True))}

    found: dict[str, Sequence[Move]] = {"none": [(identity_permutation(graph), {}, {})] * len(states)}
    for method in tracked("matching", methods, str):
        found[method] = in_tensors(parts.take(method, moves_of, method)["moves"])
    results: dict[str, dict[str, Any]] = {}
    for name, given in found.items():
        moved = members.matched(given)
        orders = [p for p, _, _ in given]
        results[name] = {
            "transpositions": [transposition_count(compose(invert(orders[0]), p)) for p in orders],
            "sign_changes": [sum(int((s < 0).sum()) for s in signs.values()) for _, signs, _ in given],
            "distances": [weight_distance(graph, moved[i], moved[j]) for i, j in members.pairs],
        }
    mean = (f"{name} {fmean(own['distances']):.2f}" for name, own in results.items())
    largest = sum(math.prod(group.blocks) * (group.size - 1) for group in graph.permutations)
    return Outcome(
        {"methods": results, "largest_transpositions": largest, "networks": members.networks, "moves": found},
        f"mean distance: {', '.join(mean)}",
    )
