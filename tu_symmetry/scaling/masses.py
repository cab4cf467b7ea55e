"""The squared norm of a network as a function of log-scales, compressed to what the factors can see.

With log-factors ``s`` the mass is ``F(s) = sum_k m_k exp(2 sum_t c_t s[i_kt])``: convex, and strictly so on directions
that move mass both up and down (arXiv 2310.08287, section 6). Entries that move together are summed up first (a
kernel's positions, whatever no factor tells apart). Most tensors then are matrices with one factor for each row and
one for each column, whose scaled masses ``diag(a) M diag(b)`` never have to be formed: value, gradient and products
with the Hessian are matrix-vector products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tu_symmetry.symmetry.graph import SymmetryGraph

Parameters = Iterable[str] | Callable[[str], bool]
Terms = tuple[tuple[float, Tensor], ...]
Array = npt.NDArray[np.float64]
PlacedTerms = tuple[tuple[float, "Places"], ...]


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


class Places:
    """Positions in the vector of all factors, read and added to at once where they follow one another.

    Args:
        index: int64 of any shape.
    """

    def __init__(self, index: Tensor) -> None:
        flat = index.reshape(-1).numpy()
        steps = np.diff(flat)
        consecutive = flat.size > 0 and bool((steps == 1).all())
        self._at = slice(int(flat[0]), int(flat[-1]) + 1) if consecutive else flat
        self._distinct = bool((steps > 0).all())
        self._shape = tuple(index.shape)

    def read(self, vector: Array) -> Array:
        """The vector's entries at these positions, in the index's shape."""
        return vector[self._at].reshape(self._shape)

    def add(self, vector: Array, values: Array) -> None:
        """Add values of the index's shape to a vector, in place."""
        if self._distinct:
            vector[self._at] += values.reshape(-1)
        else:
            vector += np.bincount(self._at, values.reshape(-1), minlength=len(vector))


class Powers:
    """``exp(2 c s)`` for the exponents ``c`` that occur, each made once; a one follows the last factor."""

    def __init__(self, log_scale: Array) -> None:
        self._padded = np.append(log_scale, 0.0)
        self._powers: dict[float, Array] = {}

    def product(self, terms: PlacedTerms) -> Array:
        """What some terms multiply the masses by."""
        total: Array | None = None
        for exponent, places in terms:
            if exponent not in self._powers:
                self._powers[exponent] = np.exp(2 * exponent * self._padded)
            power = places.read(self._powers[exponent])
            total = power if total is None else total * power
        return np.ones(1) if total is None else total


class Point(Protocol):
    """One table's masses at one point, ready for products."""

    value: float

    def sides(self, grows: Array, shrinks: Array) -> None:
        """Add up the masses that grow and that shrink with each factor, weighted by the exponents' size."""

    def curvature(self, direction: Array, out: Array) -> None:
        """Add the product of the Hessian with a direction."""

    def diagonal(self, out: Array) -> None:
        """Add the diagonal of the Hessian (or an upper bound)."""


@dataclass(frozen=True, eq=False)
class MatrixTable:
    """Masses ``[rows, columns]`` whose factors belong to rows or to columns; a term's index is ``[rows]`` or so.

    There is one column if no factor belongs to columns.
    """

    mass: Tensor
    rows: Terms
    columns: Terms

    @cached_property
    def placed(self) -> tuple[PlacedTerms, PlacedTerms]:
        """The terms of the rows and those of the columns."""
        return _placed(self.rows), _placed(self.columns)

    def at(self, powers: Powers) -> MatrixPoint:
        """The masses at one point."""
        return MatrixPoint(self, powers)

    def entries(self) -> tuple[Tensor, Terms]:
        """The masses, and terms that broadcast against them."""
        rows = tuple((c, i.unsqueeze(1)) for c, i in self.rows)
        return self.mass, rows + tuple((c, i.unsqueeze(0)) for c, i in self.columns)

    def times(self, column: Array) -> Array:
        """Product with a vector over the columns."""
        return torch.mv(self.mass, torch.from_numpy(column)).numpy()

    def transposed_times(self, row: Array) -> Array:
        """Product of the transpose with a vector over the rows."""
        return torch.mv(self.mass.T, torch.from_numpy(row)).numpy()


class MatrixPoint:
    """A :class:`MatrixTable` at one point: the sums of its rows and columns are all that is formed."""

    def __init__(self, table: MatrixTable, powers: Powers) -> None:
        self.table = table
        rows, columns = table.placed
        self.row, self.column = powers.product(rows), powers.product(columns)
        self.row_mass = self.row * table.times(self.column)
        self.sums = [(rows, self.row_mass)]
        if columns:
            self.column_mass = self.column * table.transposed_times(self.row)
            self.sums.append((columns, self.column_mass))
        self.value = float(self.row_mass.sum())

    def sides(self, grows: Array, shrinks: Array) -> None:
        """See :class:`Point`."""
        for terms, mass in self.sums:
            for exponent, places in terms:
                places.add(grows if exponent > 0 else shrinks, abs(exponent) * mass)

    def curvature(self, direction: Array, out: Array) -> None:
        """See :class:`Point`."""
        rows, columns = self.table.placed
        rho = _along(rows, direction)
        by_row = rho * self.row_mass
        if columns:
            kappa = _along(columns, direction)
            by_row += self.row * self.table.times(self.column * kappa)
            by_column = kappa * self.column_mass + self.column * self.table.transposed_times(self.row * rho)
            for exponent, places in columns:
                places.add(out, 4 * exponent * by_column)
        for exponent, places in rows:
            places.add(out, 4 * exponent * by_row)

    def diagonal(self, out: Array) -> None:
        """See :class:`Point`."""
        for terms, mass in self.sums:
            for exponent, places in terms:
                places.add(out, 4 * exponent * exponent * mass)


@dataclass(frozen=True, eq=False)
class GeneralTable:
    """Masses of any shape, and terms whose indices broadcast against them (grouped convolutions, packed heads)."""

    mass: Tensor
    terms: Terms

    @cached_property
    def placed(self) -> PlacedTerms:
        """The terms."""
        return _placed(self.terms)

    def at(self, powers: Powers) -> GeneralPoint:
        """The masses at one point."""
        return GeneralPoint(self, self.mass.numpy() * powers.product(self.placed))

    def entries(self) -> tuple[Tensor, Terms]:
        """The masses, and terms that broadcast against them."""
        return self.mass, self.terms


class GeneralPoint:
    """A :class:`GeneralTable` at one point."""

    def __init__(self, table: GeneralTable, mass: Array) -> None:
        self.table, self.mass = table, mass
        self.value = float(mass.sum())

    def _add(self, weights: Array, term: int, out: Array) -> None:
        shape = self.table.terms[term][1].shape
        axes = tuple(a for a, n in enumerate(shape) if n == 1 and weights.shape[a] > 1)
        self.table.placed[term][1].add(out, weights.sum(axes))

    def sides(self, grows: Array, shrinks: Array) -> None:
        """See :class:`Point`."""
        for k, (exponent, _) in enumerate(self.table.placed):
            self._add(abs(exponent) * self.mass, k, grows if exponent > 0 else shrinks)

    def curvature(self, direction: Array, out: Array) -> None:
        """See :class:`Point`."""
        product = 4 * self.mass * _along(self.table.placed, direction)
        for k, (exponent, _) in enumerate(self.table.placed):
            self._add(exponent * product, k, out)

    def diagonal(self, out: Array) -> None:
        """See :class:`Point`."""
        for k, (exponent, _) in enumerate(self.table.placed):
            self._add(4 * exponent * exponent * self.mass, k, out)


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

    def at(self, log_scale: Array) -> MassPoint:
        """The mass at log-factors ``[count]``."""
        powers = Powers(log_scale)
        return MassPoint(self, [table.at(powers) for table in self.tables])

    def along(self, direction: Tensor) -> dict[float, float]:
        """The mass along one direction from factors of one: ``F(t d) = sum_c M_c exp(2 c t)``, as ``{c: M_c}``."""
        padded = torch.cat([direction, direction.new_zeros(1)])
        masses = {0.0: self.fixed} if self.fixed else {}
        for table in self.tables:
            mass, terms = table.entries()
            total = sum((c * padded[index] for c, index in terms), padded.new_zeros(()))
            exponents, where = torch.unique(total, return_inverse=True)
            sums = torch.zeros(len(exponents), dtype=torch.float64)
            sums.index_add_(0, where.reshape(-1), sum_to(mass, where.shape).reshape(-1))
            for c, total in zip(exponents.tolist(), sums.tolist(), strict=True):
                masses[c] = masses.get(c, 0.0) + total
        return masses


class MassPoint:
    """The mass at one point.

    Attributes:
        value: the squared L2 norm.
        grows: for each factor the mass that grows with it, weighted by the exponent.
        shrinks: the same for the mass that shrinks.
    """

    def __init__(self, tables: MassTables, points: Sequence[Point]) -> None:
        self._points = points
        self.value = tables.fixed + sum(p.value for p in points)
        grows, shrinks = np.zeros((2, tables.count + 1))
        for point in points:
            point.sides(grows, shrinks)
        self.grows, self.shrinks = grows[:-1], shrinks[:-1]

    def gradient(self) -> Array:
        """Derivative of the mass in each log-factor."""
        return 2 * (self.grows - self.shrinks)

    def curvature_product(self, direction: Array) -> Array:
        """Product of the Hessian with a direction."""
        padded = np.append(direction, 0.0)
        out = np.zeros_like(padded)
        for point in self._points:
            point.curvature(padded, out)
        return out[:-1]

    def curvature_diagonal(self) -> Array:
        """Diagonal of the Hessian (terms of one tensor that share a factor count separately)."""
        out = np.zeros(len(self.grows) + 1)
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


def _placed(terms: Terms) -> PlacedTerms:
    return tuple((exponent, Places(index)) for exponent, index in terms)


def _along(terms: PlacedTerms, padded: Array) -> Array:
    total = np.zeros(1)
    for exponent, places in terms:
        total = total + exponent * places.read(padded)
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
