"""How outputs of a network are compared: each entry on a scale of its own, by what rounding can make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.running.weights import is_continuous


@dataclass(frozen=True)
class Difference:
    """How far two evaluations are apart at the output where they differ most, by what is allowed there.

    Both are relative to that output's own scale (its magnitude and its sensitivity to the weights); ``change`` is inf
    where integer outputs or the places of non-finite ones differ. ``outputs`` counts the entries that were compared.
    """

    change: float
    allowed: float
    outputs: int

    @property
    def holds(self) -> bool:
        """Whether no entry changed by more than is allowed."""
        return self.change <= self.allowed


class Reference:
    """The outputs of one state, and for each entry how much it may change by rounding.

    An entry's sensitivity is measured: the largest change that relative noise on the weights makes, divided by the
    noise. A logit masked to -1e9 has one of rounding size, an entry that is zero by construction has none, and neither
    says anything about the entries beside it. An entry that did not move at all under the noise may move by what the
    noise made of the same entry of the other samples.
    """

    def __init__(self, outputs: list[Tensor]) -> None:
        self.outputs = outputs
        self.sensitivity = [
            torch.zeros(t.shape if is_continuous(t) else (), dtype=torch.float64, device="cpu") for t in outputs
        ]
        self.unstable = [torch.zeros(t.shape, dtype=torch.bool, device="cpu") for t in outputs]
        self.noise = 0.0

    def change(self, before: list[Tensor], after: list[Tensor], noise: float) -> None:
        """Take in how outputs changed when the weights were perturbed by relative noise."""
        self.noise = max(self.noise, noise)
        for k, (a, b) in enumerate(zip(before, after, strict=True)):
            if a.shape != b.shape or a.shape != self.outputs[k].shape:
                raise SymmetryError("the shapes of the network's outputs change with the weights: nothing to compare")
            if not is_continuous(a):
                self.unstable[k] |= a != b
                continue
            change = _distance(a, b).div_(noise)
            change[~torch.isfinite(change)] = 0
            torch.maximum(self.sensitivity[k], change, out=self.sensitivity[k])

    def problem(self, tolerance: float) -> str | None:
        """Why a comparison with these outputs would prove nothing, or None."""
        held = [(t, s) for t, s in zip(self.outputs, self.sensitivity, strict=True) if t.numel()]
        if not held:
            return "the network returns no tensor (or empty ones only), so that nothing can be verified"
        if not all(is_continuous(t) for t, _ in held):
            return None  # integers are compared as they are
        if not any(bool(torch.isfinite(t).any()) for t, _ in held):
            return self.nothing("all NaN or infinite")
        if not any(bool(s.any()) for _, s in held):
            return "the network's outputs do not depend on its weights, so that nothing can be verified"
        if not any(bool((tolerance * s < 1e-2 * t.abs()).logical_and(s > 0).any()) for t, s in held):
            return self.nothing("dominated by rounding") + ", or more of them"
        return None

    def nothing(self, what: str) -> str:
        """The sentence for outputs that say nothing."""
        return (
            f"the network's outputs are {what} for random weights of moderate size, so that nothing can be verified; "
            "pass example inputs of ordinary magnitude"
        )

    def difference(
        self, outputs: list[Tensor], tolerance: float, *, epsilon: float, explained: list[Tensor] | None = None
    ) -> Difference:
        """Compare with the outputs of another state."""
        if len(outputs) != len(self.outputs):
            return Difference(math.inf, 0.0, len(outputs))
        count, worst = 0, -1.0
        change = allowed = 0.0
        for k, (a, b) in enumerate(zip(self.outputs, outputs, strict=True)):
            count += a.numel()
            if a.shape != b.shape:
                return Difference(math.inf, 0.0, count)
            if not is_continuous(a):
                if bool(((a != b) & ~self.unstable[k]).any()):
                    return Difference(math.inf, 0.0, count)
                continue
            if not _same_pattern(a, b):
                return Difference(math.inf, 0.0, count)
            magnitude = a.abs().to(torch.float64)
            limit = tolerance * self.sensitivity[k] + 64 * epsilon * magnitude
            moves = self.noise * self.sensitivity[k]
            if moves.numel():
                others = moves.amax(0, keepdim=True) if moves.ndim and len(moves) > 1 else moves.amax()
                limit = limit + torch.where(moves == 0, 16 * others, 0.0)
            if explained is not None:
                limit = limit + explained[k]
            distance = _distance(a, b)
            moved = torch.isfinite(a) & (distance > 0)
            if not bool(moved.any()):
                continue
            distance, limit = distance[moved], limit[moved]
            excess = distance / limit
            at = int(excess.argmax())
            if float(excess[at]) > worst:
                worst = float(excess[at])
                scale = float((magnitude + self.sensitivity[k])[moved][at]) or float(limit[at])
                if not scale:  # an entry that nothing moves has moved
                    return Difference(math.inf, 0.0, count)
                change, allowed = float(distance[at]) / scale, float(limit[at]) / scale
        return Difference(change, allowed, count)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """``|a - b|`` in float64; NaN or inf where either is not finite."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    return (a.to(wide) - b.to(wide)).abs()


def _same_pattern(a: Tensor, b: Tensor) -> bool:
    """Whether the entries that are NaN, inf and -inf stand at the same places."""
    if a.is_complex():
        return _same_pattern(a.real, b.real) and _same_pattern(a.imag, b.imag)
    x, y = (torch.where(torch.isfinite(t), 0.0, t) for t in (a, b))
    return torch.equal(torch.isnan(x), torch.isnan(y)) and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
