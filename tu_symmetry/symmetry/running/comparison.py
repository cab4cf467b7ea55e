"""How outputs of a network are compared: each entry on a scale of its own, by what rounding can make of it.

As an example, two logits of a masked classifier, 2.5 and -1e9, and a third output that is zero by construction::

    entry    sensitivity (change per relative change of the weights)    may change by (tolerance 1e-9)
     2.5     7.0                                                        7e-9  + 64 eps * 2.5
    -1e9     1.3  (the logit below the mask)                            1e-9  + 64 eps * 1e9
     0.0     0.0                                                        0

One tolerance for all three, relative to the largest of them, would allow the first to change by 1.
"""

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

    Attributes:
        change: the change of that output, relative to its own scale (its magnitude and its sensitivity to the weights);
            inf where integer outputs or the places of non-finite ones differ.
        allowed: on the same scale.
        outputs: number of entries that were compared.
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

    An entry's sensitivity is measured: the weights are perturbed a few times by relative noise, and the largest change
    of the entry, divided by the noise, is what it would change by (linearly) if all weights changed by their own size.
    That is an entry's own scale: a logit masked to -1e9 has one of rounding size, an entry that is zero by construction
    has none, and neither says anything about the entries beside it. An entry may change by ``tolerance`` times its
    scale, and by a few units in its own last place. An entry that did not move at all under the noise (a mean that is
    zero by construction, but for the last place) may move by what the noise itself made of the same entry of the other
    samples.
    """

    def __init__(self, outputs: list[Tensor]) -> None:
        self.outputs = outputs
        self.sensitivity = [
            torch.zeros(t.shape, dtype=torch.float64, device="cpu")
            if is_continuous(t)
            else torch.zeros((), device="cpu")
            for t in outputs
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
        if not self.outputs or not any(t.numel() for t in self.outputs):
            return "the network returns no tensor (or empty ones only), so that nothing can be verified"
        floating = [
            (t, s) for t, s in zip(self.outputs, self.sensitivity, strict=True) if is_continuous(t) and t.numel()
        ]
        if len(floating) < sum(t.numel() > 0 for t in self.outputs):
            return None  # integers are compared as they are
        if not any(bool(torch.isfinite(t).any()) for t, _ in floating):
            return self.nothing("all NaN or infinite")
        if not any(bool(s.any()) for _, s in floating):
            return "the network's outputs do not depend on its weights, so that nothing can be verified"
        if not any(bool((tolerance * s < 1e-2 * t.abs()).logical_and(s > 0).any()) for t, s in floating):
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
        """Compare with the outputs of another state.

        Args:
            outputs: the outputs of the other state.
            tolerance: allowed change of each entry relative to its sensitivity.
            epsilon: rounding of the precision that was computed in.
            explained: further change allowed for each entry, absolute.
        """
        worst, change, allowed, count = -1.0, 0.0, 0.0, 0
        if len(outputs) != len(self.outputs):
            return Difference(math.inf, 0.0, len(outputs))
        for k, (a, b) in enumerate(zip(self.outputs, outputs, strict=True)):
            count += a.numel()
            if a.shape != b.shape:
                return Difference(math.inf, 0.0, count)
            if not is_continuous(a):
                if bool(((a != b) & ~self.unstable[k]).any()):
                    return Difference(math.inf, 0.0, count)
                continue
            finite = torch.isfinite(a)
            if not _same_pattern(a, b):
                return Difference(math.inf, 0.0, count)
            distance = _distance(a, b)
            magnitude = a.abs().to(torch.float64)
            limit = tolerance * self.sensitivity[k] + 64 * epsilon * magnitude
            moves = self.noise * self.sensitivity[k]
            if moves.numel():
                others = moves.amax(0, keepdim=True) if moves.ndim and len(moves) > 1 else moves.amax()
                limit = limit + torch.where(moves == 0, 16 * others, 0.0)
            if explained is not None:
                limit = limit + explained[k]
            distance, limit = distance[finite], limit[finite]
            moved = distance > 0
            if not bool(moved.any()):
                continue
            distance, limit = distance[moved], limit[moved]
            own = (magnitude + self.sensitivity[k])[finite][moved]
            excess = distance / limit
            at = int(excess.argmax())
            if float(excess[at]) > worst:
                worst = float(excess[at])
                scale = float(own[at]) or float(limit[at])
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
