"""Running a module with given weights over batches: evaluation mode, no gradients, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.modules import as_one_network
from tu_symmetry.states import sample_count, unstack


@contextmanager
def evaluating(model: nn.Module, hooks: Mapping[str, Callable[..., None]] | None = None) -> Iterator[None]:
    """Evaluation mode without gradients, with forward hooks on some submodules by their paths; undone on leaving."""
    was_training = {m: m.training for m in model.modules()}
    modules = dict(model.named_modules())
    handles = [modules[path].register_forward_hook(hook) for path, hook in (hooks or {}).items()]
    try:
        model.eval()
        with torch.no_grad(), as_one_network(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, training in was_training.items():
            module.training = training


def chosen_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is a GPU where there is one, else the CPU."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def on_device(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], torch.device]:
    """A state with all its tensors where its first one is, and that device."""
    device = next(iter(state.values())).device
    return {name: t.to(device) for name, t in state.items()}, device


def input_batches(dataloader: Iterable[Any], device: torch.device) -> Iterator[Tensor]:
    """Inputs of a loader whose batches are tensors, or tuples that begin with the inputs.

    Raises:
        ValueError: an empty loader.
    """
    for batch in _not_empty(dataloader):
        yield (batch[0] if isinstance(batch, (list, tuple)) else batch).to(device)


def labeled_batches(dataloader: Iterable[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of a loader whose batches are pairs.

    Raises:
        ValueError: an empty loader, or batches that are not pairs.
    """
    for batch in _not_empty(dataloader):
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            of = f" of {len(batch)}" if isinstance(batch, (list, tuple)) else ""
            raise ValueError(f"a loss needs batches (inputs, targets), but the loader gave {type(batch).__name__}{of}")
        yield batch[0].to(device), batch[1].to(device)


def _not_empty(dataloader: Iterable[Any]) -> Iterator[Any]:
    empty = True
    for batch in dataloader:
        empty = False
        yield batch
    if empty:
        raise ValueError(
            "the dataloader gave no batch, so there is nothing to measure; an iterator that was used up before looks "
            "like this: pass a DataLoader, or a list of batches"
        )


def reusable(dataloader: Iterable[Any]) -> Iterable[Any]:
    """The loader, or its batches as a list where it is an iterator that can be read only once."""
    return list(dataloader) if iter(dataloader) is dataloader else dataloader


def forward(model: nn.Module, state: Mapping[str, Tensor], inputs: Tensor) -> Any:
    """The module's outputs with other weights."""
    return functional_call(model, dict(state), (inputs,), tie_weights=False)


class Moments:
    """Means of units and sums of their squared deviations, float64 (Chan's update, exact for any split in batches).

    For two sets of units, the last one of the sums is of the products of both, ``[units, units]``.
    """

    def __init__(self) -> None:
        self.count = 0
        self.means: list[Tensor] = []
        self.sums: list[Tensor] = []

    def add(self, *sets: Tensor) -> None:
        """Add samples ``[units, samples]`` of one or two sets of units."""
        count = sets[0].shape[1]
        means = [t.mean(1, dtype=torch.float64) for t in sets]
        rest = [t - m.to(t.dtype)[:, None] for t, m in zip(sets, means, strict=True)]
        sums = [t.square().sum(1).double() for t in rest] + ([(rest[0] @ rest[1].T).double()] if len(rest) > 1 else [])
        if self.count:
            total = self.count + count
            steps = [new - old for new, old in zip(means, self.means, strict=True)]
            shifts = [d.square() for d in steps] + ([torch.outer(*steps)] if len(steps) > 1 else [])
            weight = self.count * count / total
            sums = [s + n + weight * d for s, n, d in zip(self.sums, sums, shifts, strict=True)]
            means = [old + d * (count / total) for old, d in zip(self.means, steps, strict=True)]
        self.count, self.means, self.sums = self.count + count, means, sums


@dataclass(frozen=True)
class Batches:
    """Consecutive batches of resident tensors, in order, as often as they are iterated."""

    x: Tensor  # [n, ...]
    y: Tensor  # class numbers, [n, ...]
    batch_size: int = 1000

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True)


@torch.no_grad()
def logits(model: nn.Module, state: Mapping[str, Tensor], data: Batches) -> Tensor:
    """Logits ``[n, classes, ...]`` of one network on all of the data, whose targets are ``[n, ...]``."""
    return torch.cat([functional_call(model, dict(state), (x,)) for x, _ in data])


def mean_probabilities(
    model: nn.Module, states: Mapping[str, Tensor], data: Batches, each: Callable[[int], None] = lambda done: None
) -> Tensor:
    """The predictive distribution of stacked, equally weighted networks, ``[n, classes, ...]`` in float64.

    After each network ``each`` is called with the number of those done.
    """
    total: Tensor | None = None
    for i, state in enumerate(unstack(states)):
        probabilities = logits(model, state, data).double().softmax(1)
        total = probabilities if total is None else total + probabilities
        each(i + 1)
    if total is None:
        raise ValueError("no networks to predict with: the stack of states is empty")
    return total / sample_count(states)


def accuracy(probabilities: Tensor, y: Tensor) -> float:
    """Share of points whose most probable class is right."""
    return (probabilities.argmax(1) == y).double().mean().item()
