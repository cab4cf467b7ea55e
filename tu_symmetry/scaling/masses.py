"""The squared norm of a network as a function of log-scales, compressed to what the scale groups can see.

Every tensor enters through sums of squares over entries that move together, so that a step of any solver costs one
pass over small tables (a convolution's kernel positions are summed out), never over scaled weights. In the log-factors
``s`` the mass is ``F(s) = sum_k m_k exp(2 sum_t c_t s[i_kt])``, a log-sum-exp without the log: convex, and strictly so
on directions that move mass both up and down (arXiv 2310.08287, section 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tu_symmetry.symmetry.graph import SymmetryGraph


@dataclass(frozen=True, eq=False)
class _Table:
    """One tensor: masses ``[...]`` and, for each term, its exponent and factor numbers that broadcast against them."""

    name: str
    mass: Tensor
    terms: tuple[tuple[float, Tensor], ...]


class MassTables:
    """Tables of squared weights, and value, gradient and curvature of the mass in the log-factors (float64).

    Args:
        graph: the symmetry graph.
        state: state dict.
        parameters: names of the tensors that count; all parameters (no buffers) if left out.
        active: numbers of the factors that may move (the others stay at one); all if left out.
    """

    def __init__(
        self, graph: SymmetryGraph, state: Mapping[str, Tensor], parameters: Iterable[str] | None = None
    ) -> None:
        counted = set(parameters) if parameters is not None else set(graph.shapes) - graph.buffers
        unknown = counted - set(graph.shapes)
        if unknown:
            raise ValueError(f"no parameters {sorted(unknown)[:6]} in this network")
        self.count = sum(g.size for g in (*graph.scales, *graph.normalizations))
        self.fixed = 0.0
        self.tables: list[_Table] = []
        for name in graph.shapes:
            tensor = state[name]
            if name not in counted or not tensor.is_floating_point():
                continue
            square = tensor.detach().to("cpu", torch.float64).square()
            terms = graph.scale_terms.get(name, ())
            if not terms:
                self.fixed += float(square.sum())
                continue
            spread = {a for t in terms for a, n in enumerate(t.index.shape) if n > 1}
            for axis in range(square.ndim):
                if axis not in spread:
                    square = square.sum(axis, keepdim=True)
            self.tables.append(_Table(name, square, tuple((t.exponent, t.index % (self.count + 1)) for t in terms)))

    def entries(self, log_scale: Tensor) -> list[Tensor]:
        """Scaled masses of every table; ``log_scale`` is ``[count]``."""
        padded = torch.cat([log_scale, log_scale.new_zeros(1)])
        zero = padded.new_zeros(())
        return [t.mass * torch.exp(2 * sum((c * padded[i] for c, i in t.terms), zero)) for t in self.tables]

    def value(self, log_scale: Tensor) -> float:
        """The squared L2 norm after scaling."""
        return self.fixed + sum(float(e.sum()) for e in self.entries(log_scale))

    def _scatter(self, table: _Table, weights: Tensor, power: int, out: Tensor) -> None:
        for exponent, index in table.terms:
            reduced = _sum_to(weights, index.shape)
            out.index_add_(0, index.reshape(-1), exponent**power * reduced.reshape(-1))

    def gradient(self, entries: list[Tensor]) -> Tensor:
        """Derivative of the mass in each log-factor."""
        out = torch.zeros(self.count + 1, dtype=torch.float64)
        for table, entry in zip(self.tables, entries, strict=True):
            self._scatter(table, 2 * entry, 1, out)
        return out[:-1]

    def curvature_product(self, entries: list[Tensor], direction: Tensor) -> Tensor:
        """Product of the Hessian with a direction."""
        padded = torch.cat([direction, direction.new_zeros(1)])
        out = torch.zeros(self.count + 1, dtype=torch.float64)
        for table, entry in zip(self.tables, entries, strict=True):
            along = sum(c * padded[i] for c, i in table.terms)
            self._scatter(table, 4 * entry * along, 1, out)
        return out[:-1]

    def curvature_diagonal(self, entries: list[Tensor]) -> Tensor:
        """Diagonal of the Hessian (terms of one tensor that share a factor count separately: an upper bound)."""
        out = torch.zeros(self.count + 1, dtype=torch.float64)
        for table, entry in zip(self.tables, entries, strict=True):
            self._scatter(table, 4 * entry, 2, out)
        return out[:-1]

    def sides(self, entries: list[Tensor]) -> tuple[Tensor, Tensor]:
        """For each factor the mass that grows with it and the mass that shrinks, each weighted by the exponent."""
        grows = torch.zeros(self.count + 1, dtype=torch.float64)
        shrinks = torch.zeros(self.count + 1, dtype=torch.float64)
        for table, entry in zip(self.tables, entries, strict=True):
            for exponent, index in table.terms:
                side = grows if exponent > 0 else shrinks
                side.index_add_(0, index.reshape(-1), abs(exponent) * _sum_to(entry, index.shape).reshape(-1))
        return grows[:-1], shrinks[:-1]


def _sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the axes along which ``shape`` is one."""
    axes = [a for a, n in enumerate(shape) if n == 1 and tensor.shape[a] > 1]
    return tensor.sum(axes, keepdim=True).expand(shape) if axes else tensor.expand(shape)
