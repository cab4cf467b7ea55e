"""Running a module with given weights over batches: evaluation mode, no gradients, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.states import sample_count, unstack


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; on leaving, every submodule has its own mode back."""
    was_training = {m: m.training for m in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
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
    empty = True
    for batch in dataloader:
        empty = False
        yield (batch[0] if isinstance(batch, (list, tuple)) else batch).to(device)
    if empty:
        raise ValueError(_EMPTY)


def labeled_batches(dataloader: Iterable[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of a loader whose batches are pairs.

    Raises:
        ValueError: an empty loader, or batches that are not pairs.
    """
    empty = True
    for batch in dataloader:
        empty = False
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ValueError(
                f"a loss needs batches (inputs, targets), but the dataloader gave {type(batch).__name__}"
                + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")
            )
        yield batch[0].to(device), batch[1].to(device)
    if empty:
        raise ValueError(_EMPTY)


def reusable(dataloader: Iterable[Any]) -> Iterable[Any]:
    """The loader, or its batches as a list where it is an iterator that can be read only once."""
    return list(dataloader) if iter(dataloader) is dataloader else dataloader


def forward(model: nn.Module, state: Mapping[str, Tensor], inputs: Tensor) -> Any:
    """The module's outputs with other weights."""
    return torch.func.functional_call(model, dict(state), (inputs,), tie_weights=False)


@dataclass(frozen=True)
class Batches:
    """Consecutive batches of resident tensors, in order, as often as they are iterated.

    Attributes:
        x: ``[n, ...]`` inputs.
        y: ``[n]`` class numbers.
        batch_size: the size of all batches but the last.
    """

    x: Tensor
    y: Tensor
    batch_size: int = 1000

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True)


@torch.no_grad()
def logits(model: nn.Module, state: Mapping[str, Tensor], data: Batches) -> Tensor:
    """Logits ``[n, classes]`` of one network on all of the data."""
    return torch.cat([functional_call(model, dict(state), (x,)) for x, _ in data])


def mean_probabilities(
    model: nn.Module, states: Mapping[str, Tensor], data: Batches, each: Callable[[int], None] | None = None
) -> Tensor:
    """The predictive distribution of equally weighted networks, mean of softmax, ``[n, classes]`` in float64.

    Args:
        model: the module that the states belong to.
        states: stacked states.
        data: inputs.
        each: called with the number of networks done, after each.
    """
    total: Tensor | None = None
    for i, state in enumerate(unstack(states)):
        probabilities = logits(model, state, data).double().softmax(-1)
        total = probabilities if total is None else total + probabilities
        if each is not None:
            each(i + 1)
    if total is None:
        raise ValueError("no networks to predict with: the stack of states is empty")
    return total / sample_count(states)


def accuracy(probabilities: Tensor, y: Tensor) -> float:
    """Share of points whose most probable class is right."""
    return (probabilities.argmax(-1) == y).double().mean().item()


def nll(probabilities: Tensor, y: Tensor) -> float:
    """Mean negative log-likelihood in nats."""
    return -probabilities.gather(-1, y.unsqueeze(-1)).clamp_min(1e-300).log().mean().item()


_EMPTY = (
    "the dataloader gave no batch, so there is nothing to measure; an iterator that was used up before looks like "
    "this: pass a DataLoader, or a list of batches"
)
