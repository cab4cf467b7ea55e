"""Loss barriers: how much worse the networks between two networks are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossBarrier:
    """The loss along a segment in weight space.

    Attributes:
        barrier: the largest excess of the loss over the chord between the ends (0 at least: the ends have none), in the
            units of the loss.
        ratios: positions along the path, 0 at ``state_a`` and 1 at ``state_b``.
        losses: mean loss at each of them.
    """

    barrier: float
    ratios: list[float]
    losses: list[float]

    def __float__(self) -> float:
        return self.barrier


def interpolate(state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """``(1 - ratio) a + ratio b`` for floating-point tensors (running statistics too); others come from ``a``."""
    if state_a.keys() != state_b.keys():
        raise ValueError(f"the two states have different names: {sorted(state_a.keys() ^ state_b.keys())[:6]}")
    return {
        name: torch.lerp(a, state_b[name].to(a.device), ratio) if a.is_floating_point() else a
        for name, a in state_a.items()
    }


def mean_loss(model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any], loss: Loss) -> float:
    """Mean of ``loss(outputs, targets)`` over the samples of a loader, in evaluation mode.

    Args:
        model: the module, left as it is.
        state: its weights.
        dataloader: batches ``(inputs, targets)``.
        loss: a function whose value is the mean over the batch.

    Raises:
        ValueError: an empty loader.
    """
    was_training = {m: m.training for m in model.modules()}
    device = next(iter(state.values())).device
    total, count = 0.0, 0
    try:
        model.eval()
        with torch.no_grad():
            for inputs, targets in dataloader:
                outputs = torch.func.functional_call(model, dict(state), (inputs.to(device),), tie_weights=False)
                total += float(loss(outputs, targets.to(device))) * len(inputs)
                count += len(inputs)
    finally:
        for module, training in was_training.items():
            module.training = training
    if count == 0:
        raise ValueError("the dataloader gave no batch, so there is no loss to measure; pass a DataLoader or a list")
    return total / count


def loss_barrier(
    model: nn.Module,
    state_a: Mapping[str, Tensor],
    state_b: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    loss: Loss,
    *,
    points: int = 11,
    merge: Callable[[dict[str, Tensor], float], Mapping[str, Tensor]] | None = None,
) -> LossBarrier:
    """Excess of the loss over the chord, at its maximum over the straight path between two networks.

    Args:
        model: the module.
        state_a: one end.
        state_b: the other end.
        dataloader: batches ``(inputs, targets)``, read once for each point.
        loss: mean loss over a batch, for example ``torch.nn.functional.cross_entropy`` (nats).
        points: evenly spaced points on the path, the ends included.
        merge: applied to each interpolated state and its ratio before evaluation (re-estimated statistics, REPAIR).

    Raises:
        ValueError: fewer than three points, an empty loader, states of different networks.
    """
    if points < 3:
        raise ValueError(f"a barrier needs at least three points on the path, got {points}")
    batches = list(dataloader) if iter(dataloader) is dataloader else dataloader
    ratios = [k / (points - 1) for k in range(points)]
    losses = []
    for ratio in ratios:
        state: Mapping[str, Tensor] = interpolate(state_a, state_b, ratio)
        if merge is not None and 0 < ratio < 1:
            state = merge(dict(state), ratio)
        losses.append(mean_loss(model, state, batches, loss))
    excess = [value - ((1 - r) * losses[0] + r * losses[-1]) for r, value in zip(ratios, losses, strict=True)]
    return LossBarrier(max(0.0, *excess), ratios, losses)


def barrier_matrix(
    model: nn.Module, states: Sequence[Mapping[str, Tensor]], dataloader: Iterable[Any], loss: Loss, *, points: int = 11
) -> Tensor:
    """Loss barriers between all pairs, ``[M, M]``, symmetric with a zero diagonal."""
    batches = list(dataloader) if iter(dataloader) is dataloader else dataloader
    matrix = torch.zeros(len(states), len(states), dtype=torch.float64)
    for i in range(len(states)):
        for j in range(i + 1, len(states)):
            matrix[i, j] = matrix[j, i] = loss_barrier(
                model, states[i], states[j], batches, loss, points=points
            ).barrier
    return matrix


def mean_state(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean network: mean of floating-point tensors, other tensors from the first."""
    return {
        name: torch.stack([s[name] for s in states]).mean(0) if t.is_floating_point() else t.clone()
        for name, t in states[0].items()
    }


def mean_model_loss(
    model: nn.Module, states: Sequence[Mapping[str, Tensor]], dataloader: Iterable[Any], loss: Loss
) -> float:
    """Loss of the network whose weights are the mean of all."""
    return mean_loss(model, mean_state(states), dataloader, loss)
