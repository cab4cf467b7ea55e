"""How outputs of a network are compared: each entry on a scale of its own, by what rounding can make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.running.weights import is_continuous


@dataclass(frozen=True)
class Certificate:
    """The change of a network's outputs from one state to another, and what rounding explains of it.

    Both numbers are of the output entry that fares worst, relative to that entry's own scale: its
    magnitude, or what it changes by when the weights change by their own size.

    Attributes:
        change: relative change; inf where integer outputs, or the places of NaN and infinite outputs, differ.
        allowed: relative change that is explained by the rounding of the weights and of the computation, or by the
            epsilon of a normalization (at most 1e-3).
        dtype: the lowest precision among the weights that were rounded; float64 where weights only changed places.
        outputs: number of output entries that were compared.
    """

    change: float
    allowed: float
    dtype: torch.dtype
    outputs: int

    @property
    def holds(self) -> bool:
        """Whether the change of the outputs is explained."""
        return self.change <= self.allowed

    @property
    def _explains(self) -> str:
        return f"rounding ({str(self.dtype).removeprefix('torch.')}) explains {self.allowed:.1e}"

    def __str__(self) -> str:
        entries = f"{self.outputs} output entr{'y' if self.outputs == 1 else 'ies'}"
        if self.change == 0:
            return f"outputs are the same ({entries})"
        verb = "outputs are the same" if self.holds else "OUTPUTS CHANGED"
        return f"{verb}: relative change {self.change:.1e}, {self._explains} ({entries})"


def _apart(outputs: int) -> Certificate:
    return Certificate(math.inf, 0.0, torch.float64, outputs)


class Reference:
    """The outputs of one state, and for each entry how much it may change by rounding.

    An entry's sensitivity is measured: the largest change that relative noise on the weights makes, divided by the
    noise. An entry that did not move at all may move by what the noise made of the same entry of the other samples.
    """

    def __init__(self, outputs: list[Tensor]) -> None:
        self.outputs = outputs
        self.sensitivity = [
            torch.zeros(t.shape if is_continuous(t) else (), dtype=torch.float64, device="cpu") for t in outputs
        ]
        self.unstable = [torch.zeros(t.shape, dtype=torch.bool, device="cpu") for t in outputs]
        self.noise = 0.0

    def perturbed(self, before: list[Tensor], after: list[Tensor], noise: float) -> None:
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
            return says_nothing("all NaN or infinite")
        if not any(bool(s.any()) for _, s in held):
            return "the network's outputs do not depend on its weights, so that nothing can be verified"
        if not any(bool((tolerance * s < 1e-2 * t.abs()).logical_and(s > 0).any()) for t, s in held):
            return says_nothing("dominated by rounding") + ", or more of them"
        return None

    def difference(
        self, outputs: list[Tensor], tolerance: float, *, epsilon: float, explained: list[Tensor] | None = None
    ) -> Certificate:
        """Compare with the outputs of another state."""
        if len(outputs) != len(self.outputs):
            return _apart(len(outputs))
        count, worst = 0, -1.0
        change = allowed = 0.0
        for k, (a, b) in enumerate(zip(self.outputs, outputs, strict=True)):
            count += a.numel()
            if a.shape != b.shape:
                return _apart(count)
            if not is_continuous(a):
                if bool(((a != b) & ~self.unstable[k]).any()):
                    return _apart(count)
                continue
            if not _same_pattern(a, b):
                return _apart(count)
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
                    return _apart(count)
                change, allowed = float(distance[at]) / scale, float(limit[at]) / scale
        return Certificate(change, allowed, torch.float64, count)


def says_nothing(what: str) -> str:
    """The sentence for outputs that prove nothing."""
    return (
        f"the network's outputs are {what} for random weights of moderate size, so that nothing can be verified; "
        "pass example inputs of ordinary magnitude"
    )


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
