"""Loss barriers: how much worse the networks between two networks are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.evaluation import evaluating, forward, labeled_batches, on_device, reusable
from tu_symmetry.processes import shared
from tu_symmetry.states import State, as_given, check_number, require_alike, require_state
from tu_symmetry.symmetry.randomness import leaves_randomness

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossBarrier:
    """The loss along a segment in weight space.

    Attributes:
        barrier: the largest excess of the loss over the chord between the ends (0 at least: the ends have none), in the
            units of the loss; infinite where a network on the path has no finite loss.
        ratios: positions along the path, 0 at ``state_a`` and 1 at ``state_b``.
        losses: mean loss at each of them.
    """

    barrier: float
    ratios: list[float]
    losses: list[float]


def interpolate(state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor], ratio: float) -> State:
    """``(1 - ratio) a + ratio b`` for floating-point tensors (running statistics too); others come from ``a``.

    The result is on the device and in the dtypes of ``a``.

    Raises:
        ValueError: states of different networks.
    """
    check_number(ratio, "ratio")
    require_state(state_a, "state_a")
    require_state(state_b, "state_b")
    require_alike(state_b, state_a, "state_b", "state_a")
    mixed = {n: a for n, a in state_a.items() if a.is_floating_point() or a.is_complex()}
    return as_given(state_a, {**state_a, **{n: between(a, state_b[n].to(a), ratio) for n, a in mixed.items()}})


def between(a: Tensor, b: Tensor, ratio: float) -> Tensor:
    """``lerp``, whose difference ``b - a`` overflows for 3e38 and -3e38, with the mean in range where that happens."""
    found = torch.lerp(a, b, ratio)
    if not torch.isfinite(found).all():
        found = torch.where(torch.isfinite(found), found, (1 - ratio) * a + ratio * b)
    return found


def mean_loss(model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any], loss: Loss) -> float:
    """Mean of ``loss(outputs, targets)`` over the samples of a loader, see :func:`measure`."""
    return measure(model, state, dataloader, {"loss": loss})["loss"]


@leaves_randomness
def measure(
    model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any], metrics: Mapping[str, Loss]
) -> dict[str, float]:
    """Means of functions of (outputs, targets), each a mean over the batch, over the samples of a loader in one pass.

    Raises:
        ValueError: an empty loader, batches without targets, or a value that is no single number.
    """
    weights, device = on_device(require_state(state, "state", like=model.state_dict()))
    totals, count = dict.fromkeys(metrics, 0.0), 0
    with evaluating(model):
        for inputs, targets in labeled_batches(dataloader, device):
            outputs = forward(model, weights, inputs)
            for name, function in metrics.items():
                value = function(outputs, targets)
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise ValueError(
                        f"the {name} of a batch of {len(inputs)} has shape {tuple(value.shape)}, but it has to be the "
                        "mean over the batch, one number (reduction='mean')"
                    )
                totals[name] += float(value) * len(inputs)
            count += len(inputs)
    return {name: total / count for name, total in totals.items()}


@leaves_randomness
def loss_barrier(
    model: nn.Module,
    state_a: Mapping[str, Tensor],
    state_b: Mapping[str, Tensor],
    dataloader: Iterable[Any],
    loss: Loss,
    *,
    points: int = 11,
    merge: Callable[[State, float], Mapping[str, Tensor]] | None = None,
) -> LossBarrier:
    """Excess of the mean loss over the chord, at its maximum over the straight path between two networks.

    The batches ``(inputs, targets)`` are read once for each of the evenly spaced ``points``, the ends included. Running
    statistics are interpolated; ``merge(state, ratio)`` may correct the states between the ends (by
    ``reestimate_batchnorm``, for example).

    Raises:
        ValueError: fewer than three points, an empty loader, states of different networks, a loss that is NaN or
            infinite at an end.
    """
    if points < 3:
        raise ValueError(f"a barrier needs at least three points on the path, got {points}")
    own = model.state_dict()
    require_state(state_a, "state_a", like=own)
    require_state(state_b, "state_b", like=own)
    batches = reusable(dataloader)
    ratios, losses = [k / (points - 1) for k in range(points)], []
    for k, ratio in enumerate(ratios):
        state: Mapping[str, Tensor] = interpolate(state_a, state_b, ratio)
        if merge is not None and 0 < k < points - 1:
            state = merge(dict(state), ratio)
        losses.append(mean_loss(model, state, batches, loss))
    if not (math.isfinite(losses[0]) and math.isfinite(losses[-1])):
        raise ValueError(
            f"the losses at the ends of the path are {losses[0]} and {losses[-1]}, so there is no barrier to speak of; "
            "look for NaN or infinite weights, inputs or running variances"
        )
    losses = [math.inf if math.isnan(value) else value for value in losses]  # it overflowed on the path
    curve = torch.tensor(losses, dtype=torch.float64, device="cpu")
    return LossBarrier(float(chord_excess(curve)), ratios, losses)


@leaves_randomness
def loss_barriers(
    model: nn.Module,
    states: Sequence[Mapping[str, Tensor]],
    dataloader: Iterable[Any],
    loss: Loss,
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> dict[tuple[int, int], LossBarrier]:
    """:func:`loss_barrier` between all pairs of networks ``(i, j)`` with ``i < j``, or between some.

    Processes that work :func:`~tu_symmetry.processes.together` each take a share of the pairs; a loader has to give
    them the same batches in the same order.

    Args:
        model: the architecture.
        states: the networks, such as a list or a ``StateSource``, which reads two at a time.
        dataloader: batches ``(inputs, targets)``.
        loss: of outputs and targets, a mean over the batch.
        pairs: places of networks; None for all pairs.
        options: ``points`` and ``merge`` of :func:`loss_barrier`.
    """
    chosen = list(combinations(range(len(states)), 2)) if pairs is None else list(pairs)
    batches = reusable(dataloader)

    def barrier(k: int) -> LossBarrier:
        first, second = (states[place] for place in chosen[k])
        return loss_barrier(model, first, second, batches, loss, **options)

    return dict(zip(chosen, shared(len(chosen), barrier), strict=True))


def chord_excess(losses: Tensor) -> Tensor:
    """The barriers ``[...]`` of curves ``[..., points]``: the largest excess over the line between their ends."""
    ratios = torch.linspace(0, 1, losses.shape[-1], dtype=losses.dtype, device=losses.device)
    chord = torch.lerp(losses[..., :1], losses[..., -1:], ratios)
    return (losses - chord).amax(-1).clamp(min=0)


@dataclass(frozen=True)
class ClassifierScores:
    """How one classifier does on labeled samples."""

    loss: float  # mean cross-entropy in nats
    accuracy: float
    temperature: float  # of the softmax, tuned
    tempered_loss: float  # mean cross-entropy in nats at that temperature


@leaves_randomness
def classifier_scores(
    model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any], *, calibration: Iterable[Any]
) -> ClassifierScores:
    """Loss and accuracy of a classifier that returns logits, and its loss at a temperature fitted on ``calibration``.

    An interpolated network is often right in its order of classes but far too sure or unsure, so a barrier in the loss
    may be gone once its logits are rescaled: without any permutation that is the control of an alignment.
    """
    logits, labels = _logits(model, state, dataloader)
    temperature = fit_temperature(*_logits(model, state, calibration))
    return ClassifierScores(
        loss=float(F.cross_entropy(logits, labels)),
        accuracy=float((logits.argmax(1) == labels).double().mean()),
        temperature=temperature,
        tempered_loss=float(F.cross_entropy(logits / temperature, labels)),
    )


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The softmax temperature of least cross-entropy, between exp(-10) and exp(10) (Guo et al. 2017, section 4.2)."""
    wide = logits.double()

    def nll(log_temperature: float) -> float:
        return float(F.cross_entropy(wide * math.exp(-log_temperature), labels))

    return math.exp(float(minimize_scalar(nll, bounds=(-10, 10), method="bounded", options={"xatol": 1e-8}).x))


def _logits(model: nn.Module, state: Mapping[str, Tensor], dataloader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    weights, device = on_device(require_state(state, "state", like=model.state_dict()))
    with evaluating(model):
        pairs = [(forward(model, weights, x), y) for x, y in labeled_batches(dataloader, device)]
    return torch.cat([p[0] for p in pairs]).double(), torch.cat([p[1] for p in pairs])
