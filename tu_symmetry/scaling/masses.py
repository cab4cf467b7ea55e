"""The squared norm of a network as a function of log-scales, compressed to what the factors can see.

With log-factors ``s`` the mass is ``F(s) = sum_k m_k exp(2 sum_t c_t s[i_kt])``: convex, and strictly so on directions
that move mass both up and down (arXiv 2310.08287, section 6). Entries that move together are summed up first (a
kernel's positions, whatever no factor tells apart). Most tensors then are matrices with one factor for each row and
one for each column, whose scaled masses ``diag(a) M diag(b)`` never have to be formed: value, gradient and products
with the Hessian are matrix-vector products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from tu_symmetry.symmetry.graph import SymmetryGraph

Parameters = Iterable[str] | Callable[[str], bool]
Terms = tuple[tuple[float, Tensor], ...]


def counted_parameters(graph: SymmetryGraph, parameters: Parameters | None = None) -> frozenset[str]:
    """Names of the tensors whose squared norm counts, as the graph calls them.

    Args:
        graph: the symmetry graph.
        parameters: what the regularizer counts: names or shell patterns (``"*.weight"``), or a predicate of the name.
            All parameters, and no buffers, if left out. For a tied tensor any of its names will do.

    Raises:
        ValueError: for a name or pattern that fits no tensor.
    """
    trainable = [name for name in graph.shapes if name not in graph.buffers]
    if parameters is None:
        return frozenset(trainable)
    if callable(parameters):
        return frozenset(name for name in trainable if parameters(name))
    found: set[str] = set()
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    for pattern in patterns:
        hits = {
            name
            for name in graph.shapes
            if any(alias == pattern or fnmatchcase(alias, pattern) for alias in graph.aliases[name])
        }
        if not hits:
            raise ValueError(f"no parameters {pattern!r} in this network; it has {trainable[:6]} and others")
        found |= hits
    return frozenset(found)


class Point(Protocol):
    """One table's masses at one point, ready for products."""

    value: float

    def sides(self, grows: Tensor, shrinks: Tensor) -> None:
        """Add up the masses that grow and that shrink with each factor, weighted by the exponents' size."""

    def curvature(self, direction: Tensor, out: Tensor) -> None:
        """Add the product of the Hessian with a direction."""

    def diagonal(self, out: Tensor) -> None:
        """Add the diagonal of the Hessian (or an upper bound)."""


@dataclass(frozen=True, eq=False)
class MatrixTable:
    """Masses ``[rows, columns]`` whose factors belong to rows or to columns; a term's index is ``[rows]`` or so."""

    mass: Tensor
    rows: Terms
    columns: Terms

    def at(self, padded: Tensor) -> _MatrixPoint:
        """The masses at log-factors ``padded`` (a zero follows the last)."""
        row, column = (torch.exp(2 * _along(terms, padded)) for terms in (self.rows, self.columns))
        return _MatrixPoint(self, row.expand(len(self.mass)), column.expand(self.mass.shape[1]))

    def entries(self) -> tuple[Tensor, Terms]:
        """The masses, and terms that broadcast against them."""
        rows = tuple((c, i.unsqueeze(1)) for c, i in self.rows)
        return self.mass, rows + tuple((c, i.unsqueeze(0)) for c, i in self.columns)


class _MatrixPoint:
    def __init__(self, table: MatrixTable, row: Tensor, column: Tensor) -> None:
        self.table, self.row, self.column = table, row, column
        self.row_mass = row * (table.mass @ column)
        self.column_mass = column * (table.mass.T @ row)
        self.value = float(self.row_mass.sum())

    def sides(self, grows: Tensor, shrinks: Tensor) -> None:
        for terms, mass in ((self.table.rows, self.row_mass), (self.table.columns, self.column_mass)):
            for exponent, index in terms:
                (grows if exponent > 0 else shrinks).index_add_(0, index, abs(exponent) * mass)

    def curvature(self, direction: Tensor, out: Tensor) -> None:
        table = self.table
        rho, kappa = (_along(terms, direction) for terms in (table.rows, table.columns))
        by_row, by_column = rho * self.row_mass, kappa * self.column_mass
        if table.columns:
            by_row = by_row + self.row * (table.mass @ (self.column * kappa))
        if table.rows:
            by_column = by_column + self.column * (table.mass.T @ (self.row * rho))
        for terms, product in ((table.rows, by_row), (table.columns, by_column)):
            for exponent, index in terms:
                out.index_add_(0, index, 4 * exponent * product)

    def diagonal(self, out: Tensor) -> None:
        for terms, mass in ((self.table.rows, self.row_mass), (self.table.columns, self.column_mass)):
            for exponent, index in terms:
                out.index_add_(0, index, 4 * exponent * exponent * mass)


@dataclass(frozen=True, eq=False)
class GeneralTable:
    """Masses of any shape, and terms whose indices broadcast against them (grouped convolutions, packed heads)."""

    mass: Tensor
    terms: Terms

    def at(self, padded: Tensor) -> _GeneralPoint:
        """The masses at log-factors ``padded`` (a zero follows the last)."""
        return _GeneralPoint(self, self.mass * torch.exp(2 * _along(self.terms, padded)))

    def entries(self) -> tuple[Tensor, Terms]:
        """The masses, and terms that broadcast against them."""
        return self.mass, self.terms


class _GeneralPoint:
    def __init__(self, table: GeneralTable, mass: Tensor) -> None:
        self.table, self.mass = table, mass
        self.value = float(mass.sum())

    def _add(self, out: Tensor, index: Tensor, weights: Tensor) -> None:
        out.index_add_(0, index.reshape(-1), sum_to(weights, index.shape).reshape(-1))

    def sides(self, grows: Tensor, shrinks: Tensor) -> None:
        for exponent, index in self.table.terms:
            self._add(grows if exponent > 0 else shrinks, index, abs(exponent) * self.mass)

    def curvature(self, direction: Tensor, out: Tensor) -> None:
        product = 4 * self.mass * _along(self.table.terms, direction)
        for exponent, index in self.table.terms:
            self._add(out, index, exponent * product)

    def diagonal(self, out: Tensor) -> None:
        for exponent, index in self.table.terms:
            self._add(out, index, 4 * exponent * exponent * self.mass)


class MassTables:
    """Tables of squared weights; :meth:`at` gives value, gradient and curvature of the mass at log-factors (float64).

    Args:
        graph: the symmetry graph.
        state: state dict.
        parameters: names of the tensors that count, see :func:`counted_parameters`.
        normalizations: whether the factors of normalization groups are variables too; they are one otherwise, and
            ``count`` covers the scale groups alone.

    Attributes:
        count: number of factors: of all scale groups, then of all normalization groups.
        fixed: mass of the tensors that no factor touches.
        tables: the others.
    """

    def __init__(
        self,
        graph: SymmetryGraph,
        state: Mapping[str, Tensor],
        parameters: Parameters | None = None,
        *,
        normalizations: bool = False,
    ) -> None:
        groups = (*graph.scales, *graph.normalizations) if normalizations else graph.scales
        self.count = sum(g.size for g in groups)
        self.fixed = 0.0
        self.tables: list[MatrixTable | GeneralTable] = []
        counted = counted_parameters(graph, parameters)
        for name in graph.shapes:
            if name not in counted or not state[name].is_floating_point():
                continue
            terms: Terms = tuple(
                (t.exponent, torch.where((t.index < 0) | (t.index >= self.count), self.count, t.index))
                for t in graph.scale_terms.get(name, ())
                if bool(((t.index >= 0) & (t.index < self.count)).any())
            )
            tensor = state[name].detach().cpu()
            spread = {a for _, index in terms for a, n in enumerate(index.shape) if n > 1}
            summed = [a for a in range(tensor.ndim) if a not in spread]
            square = _squares(tensor, summed)
            if not terms:
                self.fixed += float(square)
            else:
                self.tables.append(_table(square, terms))
        self.tables = _joined(self.tables)

    def at(self, log_scale: Tensor) -> MassPoint:
        """The mass at log-factors ``[count]``."""
        padded = torch.cat([log_scale, log_scale.new_zeros(1)])
        return MassPoint(self, [table.at(padded) for table in self.tables])

    def along(self, direction: Tensor) -> dict[float, float]:
        """The mass along one direction from factors of one: ``F(t d) = sum_c M_c exp(2 c t)``, as ``{c: M_c}``."""
        padded = torch.cat([direction, direction.new_zeros(1)])
        masses = {0.0: self.fixed} if self.fixed else {}
        for table in self.tables:
            mass, terms = table.entries()
            exponents, where = torch.unique(_along(terms, padded), return_inverse=True)
            sums = torch.zeros(len(exponents), dtype=torch.float64)
            sums.index_add_(0, where.reshape(-1), sum_to(mass, where.shape).reshape(-1))
            for c, total in zip(exponents.tolist(), sums.tolist(), strict=True):
                masses[c] = masses.get(c, 0.0) + total
        return masses


class MassPoint:
    """The mass at one point.

    Attributes:
        value: the squared L2 norm.
    """

    def __init__(self, tables: MassTables, points: list[_MatrixPoint | _GeneralPoint]) -> None:
        self._count, self._points = tables.count, points
        self.value = tables.fixed + sum(p.value for p in points)

    def sides(self) -> tuple[Tensor, Tensor]:
        """For each factor the mass that grows with it and the mass that shrinks, each weighted by the exponent."""
        grows, shrinks = (torch.zeros(self._count + 1, dtype=torch.float64) for _ in range(2))
        for point in self._points:
            point.sides(grows, shrinks)
        return grows[:-1], shrinks[:-1]

    def gradient(self) -> Tensor:
        """Derivative of the mass in each log-factor."""
        grows, shrinks = self.sides()
        return 2 * (grows - shrinks)

    def curvature_product(self, direction: Tensor) -> Tensor:
        """Product of the Hessian with a direction."""
        padded = torch.cat([direction, direction.new_zeros(1)])
        out = torch.zeros(self._count + 1, dtype=torch.float64)
        for point in self._points:
            point.curvature(padded, out)
        return out[:-1]

    def curvature_diagonal(self) -> Tensor:
        """Diagonal of the Hessian (terms of one tensor that share a factor count separately)."""
        out = torch.zeros(self._count + 1, dtype=torch.float64)
        for point in self._points:
            point.diagonal(out)
        return out[:-1]


def filter_counts(graph: SymmetryGraph, names: Iterable[str], count: int) -> Tensor:
    """How many filters grow with each of the first ``count`` factors, float64 ``[count]``.

    A filter is what makes one unit: a row of a matrix, a convolution's filter; where a factor multiplies vectors alone
    (gains and biases), each entry.
    """
    filters, entries = (torch.zeros(count + 1, dtype=torch.float64) for _ in range(2))
    for name in names:
        shape = graph.shapes[name]
        matrix = max(shape, default=1) < math.prod(shape)
        for term in graph.scale_terms.get(name, ()):
            if term.exponent <= 0:
                continue
            index = torch.where((term.index < 0) | (term.index >= count), count, term.index).reshape(-1)
            copies = (shape[0] if matrix else math.prod(shape)) if len(index) == 1 else 1
            (filters if matrix else entries).index_add_(0, index, torch.full((len(index),), float(copies)).double())
    return torch.where(filters > 0, filters, entries)[:-1]


def sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the axes along which ``shape`` is one."""
    axes = [a for a, n in enumerate(shape) if n == 1 and tensor.shape[a] > 1]
    return tensor.sum(axes, keepdim=True).expand(shape) if axes else tensor.expand(shape)


def _along(terms: Terms, padded: Tensor) -> Tensor:
    total = padded.new_zeros(())
    for exponent, index in terms:
        total = total + exponent * padded[index]
    return total


def _squares(tensor: Tensor, axes: list[int]) -> Tensor:
    """Squares in float64, summed over some axes, which stay with size one."""
    if not axes or tensor.numel() == 0:
        return tensor.double().square()
    if len(axes) == tensor.ndim:
        return torch.linalg.vector_norm(tensor, dtype=torch.float64).square().reshape([1] * tensor.ndim)
    trailing = tensor.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes))
    norm = torch.linalg.vector_norm(trailing, dim=-1, dtype=torch.float64)
    for axis in axes:
        norm = norm.unsqueeze(axis)
    return norm.square()


def _table(mass: Tensor, terms: Terms) -> MatrixTable | GeneralTable:
    """The matrix form if every factor varies along one axis, and the factors along two axes at most."""
    axes = [[a for a, n in enumerate(index.shape) if n > 1] for _, index in terms]
    varying = sorted({a for own in axes for a in own})
    if any(len(own) > 1 for own in axes) or len(varying) > 2:
        return GeneralTable(mass, terms)
    first = varying[0] if varying else 0
    last = varying[1] if len(varying) == 2 else None
    matrix = mass.reshape(mass.shape[first], -1)
    rows, columns = [], []
    for (exponent, index), own in zip(terms, axes, strict=True):
        if own and own[0] == last:
            columns.append((exponent, index.reshape(-1)))
        else:
            rows.append((exponent, index.reshape(-1).expand(matrix.shape[0])))
    matrix, row_terms = _merged(matrix, rows)
    transposed, column_terms = _merged(matrix.T, columns)
    return MatrixTable(transposed.T, row_terms, column_terms)


def _merged(matrix: Tensor, terms: list[tuple[float, Tensor]]) -> tuple[Tensor, Terms]:
    """Add up rows that have the same factors."""
    if not terms:
        return matrix, ()
    first = terms[0][1]
    if bool((first[1:] > first[:-1]).all()):
        return matrix, tuple(terms)
    if len(terms) == 1:
        values, where = torch.unique(first, return_inverse=True)
        distinct = values.unsqueeze(0)
    else:
        distinct, where = torch.unique(torch.stack([index for _, index in terms]), dim=1, return_inverse=True)
    merged = matrix.new_zeros(distinct.shape[1], matrix.shape[1]).index_add_(0, where, matrix)
    return merged, tuple((exponent, distinct[k]) for k, (exponent, _) in enumerate(terms))


def _joined(tables: list[MatrixTable | GeneralTable]) -> list[MatrixTable | GeneralTable]:
    """One table for all that have a single term, for each exponent: most tensors between normalizations do."""
    kept: list[MatrixTable | GeneralTable] = []
    single: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for table in tables:
        if isinstance(table, MatrixTable) and not table.columns and len(table.rows) == 1:
            ((exponent, index),) = table.rows
            single.setdefault(exponent, []).append((index, table.mass))
        else:
            kept.append(table)
    for exponent, parts in single.items():
        index, mass = (torch.cat(x) for x in zip(*parts, strict=True))
        merged, terms = _merged(mass, [(exponent, index)])
        kept.append(MatrixTable(merged, terms, ()))
    return kept
