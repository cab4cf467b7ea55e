"""What stacked states predict: class probabilities and losses, one network after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.tables.data import Batches

States = Mapping[str, Tensor]


def sample_count(states: States) -> int:
    """Number of networks in a stack."""
    return len(next(iter(states.values())))


def evenly(count: int, wanted: int | None) -> Tensor:
    """Indices of ``wanted`` evenly spaced ones out of ``count`` (all where there are no more), both ends included."""
    if wanted is None or wanted >= count:
        return torch.arange(count)
    return torch.linspace(0, count - 1, wanted, dtype=torch.float64).round().long()


def unstack(states: States) -> Iterator[dict[str, Tensor]]:
    """The single states of a stack."""
    for i in range(sample_count(states)):
        yield {name: tensor[i] for name, tensor in states.items()}


@torch.no_grad()
def logits(model: nn.Module, state: States, data: Batches) -> Tensor:
    """Logits ``[n, classes]`` of one network on all of the data."""
    return torch.cat([functional_call(model, dict(state), (x,)) for x, _ in data])


def mean_probabilities(
    model: nn.Module, states: States, data: Batches, each: Callable[[int], None] | None = None
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
