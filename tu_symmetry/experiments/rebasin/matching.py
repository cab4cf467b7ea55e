"""Match networks by each method: by weights, activations, the loss of the midpoint, or all at once to a universe."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tu_symmetry.alignment.activations import Similarity
from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.matching import weight_distance
from tu_symmetry.alignment.straight_through import straight_through_matching
from tu_symmetry.datamodules import ImageDataModule
from tu_symmetry.evaluation import Batches
from tu_symmetry.experiments.study import Study, tracked
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import State, unstack
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.elements import Permutation, compose, identity_permutation, invert, transposition_count
from tu_symmetry.tables.outcome import Outcome, digest_tensors

Method = Literal["weights", "activations", "straight_through", "universe"]


class Members(Study):
    """Independently trained networks of one architecture, from a sample store, on one device."""

    def __init__(self, model: nn.Module, data: ImageDataModule, samples: Path, device: str) -> None:
        super().__init__(model, data, device)
        store = SampleStore.open(samples, like=self.model.state_dict())
        self.states: list[State] = unstack(store.load(device=self.device))
        if len(self.states) < 2:
            raise ValueError(f"barriers are between networks, but {samples} holds {len(self.states)}: train 2 at least")
        self.networks = digest_tensors(*(t for state in self.states for t in state.values()))
        self.pairs = list(itertools.combinations(range(len(self.states)), 2))

    def first_images(self, count: int, batch_size: int = 1000) -> Batches:
        """The first images of the training set."""
        if not 1 <= count <= len(self.train.x):
            raise ValueError(f"{count} training images are asked for, but there are {len(self.train.x)}")
        return Batches(self.train.x[:count], self.train.y[:count], batch_size)

    def matched(self, permutations: Sequence[Mapping[str, Any]]) -> list[State]:
        """The networks, each with its units in the order of its permutation, of tensors or of lists as in results."""
        made = [{group: torch.as_tensor(order, device="cpu") for group, order in p.items()} for p in permutations]
        return [apply_permutation(self.graph, p, state) for p, state in zip(made, self.states, strict=True)]


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
    """Match the networks by each method: their permutations, transpositions, and the distances between all pairs.

    Args:
        methods: ``weights``, ``activations`` and ``straight_through`` match each network to the first one,
            ``universe`` matches all of them at once.
        images: training images, the first ones, for activation and straight-through matching.
    """
    members = Members(model, data, samples, device)
    graph, states = members.graph, members.states
    batches = members.first_images(images, batch_size)

    def permutations_of(method: Method) -> Sequence[Permutation]:
        if method == "straight_through":
            options: dict[str, Any] = {"epochs": epochs, "learning_rate": learning_rate}
            found = [
                straight_through_matching(graph, model, states[0], state, batches, cross_entropy, **options)
                for state in states[1:]
            ]
            return [identity_permutation(graph), *(one.permutation for one in found)]
        if method == "activations":
            how: dict[str, Any] = {"match_on": method, "model": model, "dataloader": batches, "similarity": similarity}
            return align(graph, states, reference="first", **how).permutations
        return align(graph, states, reference="universe" if method == "universe" else "first").permutations

    found: dict[str, Sequence[Permutation]] = {"none": [identity_permutation(graph)] * len(states)}
    found |= {method: permutations_of(method) for method in tracked("matching", methods, str)}
    results: dict[str, dict[str, Any]] = {}
    for name, given in found.items():
        own = [{group: indices.cpu() for group, indices in p.items()} for p in given]
        moved = members.matched(own)
        results[name] = {
            "transpositions": [transposition_count(compose(invert(own[0]), p)) for p in own],
            "distances": [weight_distance(graph, moved[i], moved[j]) for i, j in members.pairs],
        }
    mean = (f"{name} {fmean(own['distances']):.2f}" for name, own in results.items())
    largest = sum(group.size - 1 for group in graph.permutations)
    return Outcome(
        {"methods": results, "largest_transpositions": largest, "networks": members.networks, "permutations": found},
        f"mean distance: {', '.join(mean)}",
    )
