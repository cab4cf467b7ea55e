"""The squared norm of a network as a function of log-scales, compressed to what the factors can see.

With log-factors ``s`` the mass is ``F(s) = sum_k m_k exp(2 sum_t c_t s[i_kt])``, which is convex. Entries that move
together are summed up first. Most tensors then are matrices with one factor for each row and one for each column,
whose scaled masses ``diag(a) M diag(b)`` never have to be formed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import brentq
from scipy.sparse import csr_array
from torch import Tensor

from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import ScaleTerm
from tu_symmetry.symmetry.running.weights import is_continuous

Terms = tuple[tuple[float, Tensor], ...]
Array = npt.NDArray[np.float64]


def counted_parameters(graph: SymmetryGraph, parameters: Iterable[str] | None = None) -> frozenset[str]:
    """Names of the tensors whose squared norm counts, as the graph calls them; all parameters for None.

    They are given by names or shell patterns (``"*.weight"``); what fits no tensor is a ValueError.
    """
    trainable = [name for name in graph.shapes if name not in graph.buffers]
    if parameters is None:
        return frozenset(trainable)
    found: set[str] = set()
    for pattern in [parameters] if isinstance(parameters, str) else parameters:
        hits = {n for n in graph.shapes if any(a == pattern or fnmatchcase(a, pattern) for a in graph.aliases[n])}
        if not hits:
            raise ValueError(f"no parameters {pattern!r} in this network; it has {trainable[:6]} and others")
        found |= hits
    return frozenset(found)


@dataclass(frozen=True, eq=False)
class Table:
    """Masses (squared weights) and the factors that multiply them."""

    mass: Tensor
    terms: Terms  # exponents and the numbers of their factors, which broadcast against the masses
    sides: tuple[Terms, Terms] | None = None  # of a matrix the same for its rows, [rows], and columns, [columns]

    @classmethod
    def of(cls, mass: Tensor, terms: Terms) -> Table:
        """A matrix if every factor varies along one axis, and the factors along two; rows of equal factors add up."""
        axes = [[a for a, n in enumerate(index.shape) if n > 1] for _, index in terms]
        varying = sorted({a for own in axes for a in own})
        if any(len(own) > 1 for own in axes) or len(varying) > 2:
            return cls(mass, terms)
        first = varying[0] if varying else 0
        matrix = mass.reshape(mass.shape[first], -1)
        rows, columns = [], []
        for (exponent, index), own in zip(terms, axes, strict=True):
            if len(varying) == 2 and own == varying[1:]:
                columns.append((exponent, index.reshape(-1)))
            else:
                rows.append((exponent, index.reshape(-1).expand(len(matrix))))
        if not columns:
            return cls(matrix.reshape(-1), tuple(rows))
        matrix, row_terms = _merged(matrix, rows)
        transposed, column_terms = _merged(matrix.T, columns)
        broadcast = [(c, i.unsqueeze(1)) for c, i in row_terms] + [(c, i.unsqueeze(0)) for c, i in column_terms]
        return cls(transposed.T, tuple(broadcast), (row_terms, column_terms))


def _merged(matrix: Tensor, terms: list[tuple[float, Tensor]]) -> tuple[Tensor, Terms]:
    """Add up rows that have the same factors."""
    if bool((np.diff(terms[0][1].numpy()) > 0).all()):
        return matrix, tuple(terms)
    distinct, where = torch.unique(torch.stack([index for _, index in terms]), dim=1, return_inverse=True)
    merged = matrix.new_zeros(distinct.shape[1], matrix.shape[1]).index_add_(0, where, matrix)
    return merged, tuple((exponent, distinct[k]) for k, (exponent, _) in enumerate(terms))


class MassTables:
    """Tables of squared weights; :meth:`at` gives value, gradient and curvature of the mass at log-factors (float64).

    There are ``count`` factors: of all scale groups and, with ``normalizations``, of all normalization groups. The
    tables lie in one vector of *places*, so that a few operations on long vectors evaluate everything. A place is a
    single entry, or a row or a column of a matrix; first come all entries, then all rows, then all columns. Its scale
    is ``exp(2 c . s)`` with its row of ``exponents``; that of a matrix entry is a product of two.
    """

    def __init__(
        self,
        graph: SymmetryGraph,
        state: Mapping[str, Tensor],
        parameters: Iterable[str] | None = None,
        *,
        normalizations: bool = False,
    ) -> None:
        groups = (*graph.scales, *graph.normalizations) if normalizations else graph.scales
        self.count = sum(g.size for g in groups)
        self.fixed = 0.0  # mass of the tensors that no factor touches
        self.tables: list[Table] = []
        counted = counted_parameters(graph, parameters)
        for name in (name for name in graph.shapes if name in counted and is_continuous(state[name])):
            tensor = state[name].detach().cpu()
            held = [(t.exponent, _numbers(t, self.count)) for t in graph.scale_terms.get(name, ())]
            terms: Terms = tuple((exponent, index) for exponent, index in held if (index < self.count).any())
            spread = {a for _, index in terms for a, n in enumerate(index.shape) if n > 1}
            square = _squares(tensor, [a for a in range(tensor.ndim) if a not in spread])
            if terms:
                self.tables.append(Table.of(square, terms))
            else:
                self.fixed += float(square)
        self._lay_out()

    def _lay_out(self) -> None:
        place, factor, exponent = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
        self.size = 0

        def add(length: int, terms: Terms) -> slice:
            """Places for so many entries, rows or columns."""
            start, self.size = self.size, self.size + length
            for c, index in terms:
                own = index.numpy()
                held = np.flatnonzero(own < self.count)
                place.append(start + held)
                factor.append(own[held])
                exponent.append(np.full(len(held), float(c)))
            return slice(start, self.size)

        singles = [table for table in self.tables if table.sides is None]
        for table in singles:
            shape = table.mass.shape
            add(table.mass.numel(), tuple((c, i.expand(shape).reshape(-1)) for c, i in table.terms))
        self.single = np.concatenate([np.zeros(0), *(table.mass.reshape(-1).numpy() for table in singles)])
        pairs = [(table.mass.numpy(), *table.sides) for table in self.tables if table.sides is not None]
        rows = [add(mass.shape[0], terms) for mass, terms, _ in pairs]
        self.disjoint = self.size  # places up to here hold all mass once
        columns = [add(mass.shape[1], terms) for mass, _, terms in pairs]
        self.matrices = [(mass, r, c) for (mass, _, _), r, c in zip(pairs, rows, columns, strict=True)]
        places, factors, exponents = (np.concatenate(parts) for parts in (place, factor, exponent))
        self.exponents = csr_array((exponents, (places, factors)), (self.size, self.count))
        # sums over places of what grows with each factor, then of what shrinks; the same with squared exponents
        side = np.where(exponents > 0, factors, factors + self.count)
        self.sides = csr_array((np.abs(exponents), (side, places)), (2 * self.count, self.size))
        self.squares = self.sides.multiply(self.sides).tocsr()

    def across(self, vector: Array, single: Array | float) -> Array:
        """Products of the matrices with the other side's part of a vector of places; ``single`` for single entries."""
        out = np.empty(self.size)
        out[: len(self.single)] = single
        for mass, rows, columns in self.matrices:
            out[rows] = mass @ vector[columns]
            out[columns] = mass.T @ vector[rows]
        return out

    def at(self, log_scale: Array) -> MassPoint:
        """The mass at log-factors ``[count]``."""
        return MassPoint(self, log_scale)

    def along(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The exponents ``c`` and masses ``M`` along a direction from factors of one: ``F(t d) = sum M exp(2 c t)``."""
        padded = torch.cat([direction, direction.new_zeros(1)])
        totals, masses = [padded[-1:]], [torch.tensor([self.fixed], dtype=torch.float64, device="cpu")]
        for table in self.tables:
            total = sum((c * padded[index] for c, index in table.terms), torch.zeros_like(table.mass))
            totals.append(total.reshape(-1))
            masses.append(table.mass.reshape(-1))
        exponents, where = torch.unique(torch.cat(totals), return_inverse=True)
        return exponents, torch.zeros_like(exponents).index_add_(0, where, torch.cat(masses))


class MassPoint:
    """The mass at one point: ``value``, and for each factor what ``grows`` and ``shrinks`` with it, by exponents."""

    def __init__(self, tables: MassTables, log_scale: Array) -> None:
        self._tables = tables
        self._scale = np.exp(2 * (tables.exponents @ log_scale))
        with np.errstate(over="ignore"):  # an infinite value is refused by whoever asked for it
            self._masses = self._scale * tables.across(self._scale, tables.single)
        self.value = tables.fixed + float(self._masses[: tables.disjoint].sum())
        self.grows, self.shrinks = np.split(tables.sides @ self._masses, 2)

    def gradient(self) -> Array:
        """Derivative of the mass in each log-factor."""
        return 2 * (self.grows - self.shrinks)

    def curvature_product(self, direction: Array) -> Array:
        """Product of the Hessian with a direction."""
        slope = self._tables.exponents @ direction
        moved = slope * self._masses + self._scale * self._tables.across(self._scale * slope, 0.0)
        grows, shrinks = np.split(self._tables.sides @ moved, 2)
        return 4 * (grows - shrinks)

    def curvature_diagonal(self) -> Array:
        """Diagonal of the Hessian, without what a factor of both a row and a column has of their common entry."""
        grows, shrinks = np.split(self._tables.squares @ self._masses, 2)
        return 4 * (grows + shrinks)


def filter_counts(graph: SymmetryGraph, names: Iterable[str], count: int) -> Tensor:
    """How many filters grow with each of the first ``count`` factors, float64 ``[count]``.

    A filter is what makes one unit: a row of a matrix, a convolution's filter; where a factor multiplies vectors alone
    (gains and biases), each entry.
    """
    filters, entries = (torch.zeros(count + 1, dtype=torch.float64, device="cpu") for _ in range(2))
    for name in names:
        shape = graph.shapes[name]
        matrix = max(shape, default=1) < math.prod(shape)
        for term in (t for t in graph.scale_terms.get(name, ()) if t.exponent > 0):
            index = _numbers(term, count).reshape(-1)
            copies = float((shape[0] if matrix else math.prod(shape)) if len(index) == 1 else 1)
            added = torch.full((len(index),), copies, dtype=torch.float64, device="cpu")
            (filters if matrix else entries).index_add_(0, index, added)
    return torch.where(filters > 0, filters, entries)[:-1]


def _numbers(term: ScaleTerm, count: int) -> Tensor:
    """Numbers of factors, ``count`` for those that are none of the first ``count``."""
    return torch.where((term.index >= 0) & (term.index < count), term.index, count)


def _squares(tensor: Tensor, axes: list[int]) -> Tensor:
    """Squares in float64, summed over some axes, which stay with size one."""
    tensor = tensor.abs() if tensor.is_complex() else tensor
    square = tensor.to(torch.float64, copy=True).square_()  # in place: large layers stand here as they are
    return square.sum(axes, keepdim=True) if axes else square


@dataclass(frozen=True)
class MassProfile:
    """The mass along one scale direction for each group.

    Attributes:
        log_factors: natural-log factors, the same for every group.
        masses: group name to the squared L2 norm when all units of the group are scaled by each factor.
        mass: the squared norm of the network as given (factor one).
        minima: group name to the log-factor of least mass; infinite where the mass lies on one side only.
    """

    log_factors: Tensor
    masses: dict[str, Tensor]
    mass: float
    minima: dict[str, float]


def mass_profile(
    graph: SymmetryGraph, state: Mapping[str, Tensor], log_factors: Sequence[float] | Tensor
) -> MassProfile:
    """Squared L2 norm against a common factor on all units of each scale group (arXiv 2310.08287, section 6).

    Along a plain hidden layer the mass is ``a e^(2s) + b e^(-2s) + c`` for the natural-log factor ``s``, with its
    minimum at ``s = log(b / a) / 4``; a network in ``min_mass`` form has every profile's minimum at ``s = 0``.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights.
        ValueError: for a stack of states.
    """
    if graph.check_state(state):
        raise ValueError("mass_profile takes one state; unstack a stack of samples and profile each")
    tables = MassTables(graph, state)
    points = torch.as_tensor(log_factors, dtype=torch.float64, device="cpu")
    masses, minima, start = {}, {}, 0
    for group in graph.scales:
        direction = torch.zeros(tables.count, dtype=torch.float64, device="cpu")
        direction[start : start + group.size] = 1.0
        exponents, weights = tables.along(direction)
        masses[group.name] = torch.exp(weights.log() + 2 * points.unsqueeze(-1) * exponents).sum(-1)
        minima[group.name] = _minimum(exponents, weights)
        start += group.size
    return MassProfile(points, masses, tables.at(np.zeros(tables.count)).value, minima)


def _minimum(exponents: Tensor, weights: Tensor) -> float:
    """The zero of the derivative of ``sum w exp(2 c s)`` in s."""
    up, down = exponents > 0, exponents < 0
    rises, falls = bool((weights[up] > 0).any()), bool((weights[down] > 0).any())
    if not (rises and falls):
        return float("-inf") if rises else float("inf") if falls else 0.0
    terms = weights.log() + exponents.abs().log()

    def slope(s: float) -> float:
        moved = terms + 2 * exponents * s
        return float(torch.logsumexp(moved[up], 0) - torch.logsumexp(moved[down], 0))

    return float(brentq(slope, -400.0, 400.0, xtol=1e-14))
