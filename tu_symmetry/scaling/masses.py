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

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import csr_array
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import largest_entry
from tu_symmetry.symmetry.graph import SymmetryGraph

Parameters = Iterable[str] | Callable[[str], bool]
Terms = tuple[tuple[float, Tensor], ...]
Array = npt.NDArray[np.float64]
_PIECE = 65536  # entries
FAR = 100.0  # log-factors up to here multiply squares of single-precision weights within the range of float64
_SQUARED = 1e140  # entries whose squares, and sums of them, float64 holds with room to spare


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


@dataclass(frozen=True, eq=False)
class MatrixTable:
    """Masses ``[rows, columns]`` whose factors belong to rows or to columns; a term's index is ``[rows]`` or so.

    There is one column if no factor belongs to columns.
    """

    mass: Tensor
    rows: Terms
    columns: Terms

    def entries(self) -> tuple[Tensor, Terms]:
        """The masses, and terms that broadcast against them."""
        rows = tuple((c, i.unsqueeze(1)) for c, i in self.rows)
        return self.mass, rows + tuple((c, i.unsqueeze(0)) for c, i in self.columns)


@dataclass(frozen=True, eq=False)
class GeneralTable:
    """Masses of any shape, and terms whose indices broadcast against them (grouped convolutions, packed heads)."""

    mass: Tensor
    terms: Terms

    def entries(self) -> tuple[Tensor, Terms]:
        """The masses, and terms that broadcast against them."""
        return self.mass, self.terms


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
        tables: the others, as squared weights and the factors that multiply them.
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
        largest: dict[str, float] = {}
        for name in graph.shapes:
            if name not in counted or not (state[name].is_floating_point() or state[name].is_complex()):
                continue
            held = ((t.exponent, _held(t.index, self.count)) for t in graph.scale_terms.get(name, ()))
            terms: Terms = tuple((exponent, index) for exponent, index in held if index is not None)
            tensor = state[name].detach().cpu()
            if tensor.is_complex():
                tensor = tensor.abs()
            if tensor.dtype == torch.float64:
                largest[name] = largest_entry(tensor)
            spread = {a for _, index in terms for a, n in enumerate(index.shape) if n > 1}
            summed = [a for a in range(tensor.ndim) if a not in spread]
            square = _squares(tensor, summed)
            if not terms:
                self.fixed += float(square)
            else:
                self.tables.append(_table(square, terms))
        self.tables = _joined(self.tables)
        _require_squares(largest)

    @cached_property
    def layout(self) -> Layout:
        """The tables, laid out for fast evaluation."""
        return Layout(self.tables, self.count)

    def at(self, log_scale: Array) -> MassPoint:
        """The mass at log-factors ``[count]``."""
        return MassPoint(self.layout, log_scale, self.fixed)

    def log_grows(self, log_scale: Array) -> Array:
        """Logarithms of :attr:`MassPoint.grows`, where the masses themselves would leave the range of float64.

        Example: behind ten layers of weights 1e-40 a unit's factor is about 1e400, and its weights times the factors
        of the units that feed it are about 1e-440; no float64 holds either, but their logarithms are 921 and -1013.
        """
        padded = torch.cat([torch.from_numpy(log_scale), torch.zeros(1, dtype=torch.float64, device="cpu")])
        largest = torch.full((self.count + 1,), -math.inf, dtype=torch.float64, device="cpu")
        parts = []
        for table in self.tables:
            mass, terms = table.entries()
            logs: Tensor = sum((2 * c * padded[index] for c, index in terms), mass.log())
            for c, index in terms:
                if c > 0:
                    own = index.expand(logs.shape).reshape(-1)
                    parts.append((own, logs.reshape(-1) + math.log(c)))
                    largest.scatter_reduce_(0, own, parts[-1][1], "amax")
        total = torch.zeros_like(largest)
        for own, logs in parts:
            total.index_add_(0, own, torch.exp(logs - torch.where(largest.isfinite(), largest, 0.0)[own]))
        return (total.log() + largest)[:-1].numpy()

    def value_at(self, log_scale: Array) -> float:
        """The squared L2 norm at log-factors, also where a factor, but not its product with a weight, overflows."""
        if np.abs(log_scale).max(initial=0.0) <= FAR:
            return self.at(log_scale).value
        padded = torch.cat([torch.from_numpy(log_scale), torch.zeros(1, dtype=torch.float64, device="cpu")])
        total = self.fixed
        for table in self.tables:
            mass, terms = table.entries()
            total += float(torch.exp(sum((2 * c * padded[index] for c, index in terms), mass.log())).sum())
        return total

    def along(self, direction: Tensor) -> dict[float, float]:
        """The mass along one direction from factors of one: ``F(t d) = sum_c M_c exp(2 c t)``, as ``{c: M_c}``."""
        padded = torch.cat([direction, direction.new_zeros(1)])
        masses = {0.0: self.fixed} if self.fixed else {}
        for table in self.tables:
            mass, terms = table.entries()
            total = sum((c * padded[index] for c, index in terms), padded.new_zeros(()))
            exponents, where = torch.unique(total, return_inverse=True)
            sums = torch.zeros(len(exponents), dtype=torch.float64, device="cpu")
            sums.index_add_(0, where.reshape(-1), sum_to(mass, where.shape).reshape(-1))
            for c, total in zip(exponents.tolist(), sums.tolist(), strict=True):
                masses[c] = masses.get(c, 0.0) + total
        return masses


class Layout:
    """All tables in one vector of *places*, so that a few operations on long vectors evaluate everything.

    A place is a single entry, or a row or a column of a matrix. Its scale is ``exp(2 c . s)`` with the exponents in its
    row of ``exponents``; a matrix entry's scale is that of its row times that of its column.

    Args:
        tables: the tables.
        count: number of factors.

    Attributes:
        exponents: ``[places, count]``, sparse.
        sides: ``[2 count, places]``, sparse: adds up what grows with each factor, then what shrinks.
        squares: the same with squared exponents; None if all exponents are one or minus one.
        single: masses of the places that are single entries; these come first, then all rows, then all columns.
        matrices: squared weights with the places of their rows and those of their columns.
        disjoint: the number of places, from the first on, that hold all mass once: all but the columns.
    """

    def __init__(self, tables: Sequence[MatrixTable | GeneralTable], count: int) -> None:
        places: list[tuple[int, Terms]] = []
        single: list[Array] = []
        paired = []
        for table in tables:
            if isinstance(table, MatrixTable) and table.columns:
                paired.append(table)
                continue
            mass, terms = table.entries()
            places.append((mass.numel(), tuple((c, i.expand(mass.shape).reshape(-1)) for c, i in terms)))
            single.append(mass.reshape(-1).numpy())
        places += [(len(table.mass), table.rows) for table in paired]
        places += [(table.mass.shape[1], table.columns) for table in paired]
        ends = np.cumsum([n for n, _ in places]).tolist()
        slices = [slice(end - n, end) for (n, _), end in zip(places, ends, strict=True)][
            len(places) - 2 * len(paired) :
        ]
        self.single = np.concatenate(single) if single else np.zeros(0)
        self.matrices = [
            (table.mass.numpy(), rows, columns)
            for table, rows, columns in zip(paired, slices[: len(paired)], slices[len(paired) :], strict=True)
        ]
        self.count, self.size = count, ends[-1] if ends else 0
        self.disjoint = slices[len(paired)].start if paired else self.size
        parts = [
            (start, c, i)
            for (n, terms), end in zip(places, ends, strict=True)
            for c, i in terms
            for start in (end - n,)
        ]
        place = np.concatenate([np.arange(start, start + len(i)) for start, _, i in parts] or [np.zeros(0, np.int64)])
        factor = np.concatenate([i.numpy() for _, _, i in parts] or [np.zeros(0, np.int64)])
        exponent = np.repeat([float(c) for _, c, _ in parts], [len(i) for _, _, i in parts])
        held = factor < count
        place, factor, exponent = place[held], factor[held], exponent[held]
        self.exponents = csr_array((exponent, (place, factor)), (self.size, count))
        side = np.where(exponent > 0, factor, factor + count)
        self.sides = csr_array((np.abs(exponent), (side, place)), (2 * count, self.size))
        self.squares = self.sides.multiply(self.sides).tocsr() if (self.sides.data != 1).any() else None

    def across(self, vector: Array, single: Array | float) -> Array:
        """Products of the matrices with the other side's part of a vector of places; ``single`` for single entries."""
        out = np.empty(self.size)
        out[: len(self.single)] = single
        for mass, rows, columns in self.matrices:
            out[rows] = mass @ vector[columns]
            out[columns] = mass.T @ vector[rows]
        return out


class MassPoint:
    """The mass at one point.

    Attributes:
        value: the squared L2 norm.
        grows: for each factor the mass that grows with it, weighted by the exponent.
        shrinks: the same for the mass that shrinks.
    """

    def __init__(self, layout: Layout, log_scale: Array, fixed: float) -> None:
        self._layout = layout
        self._scale = np.exp(2 * (layout.exponents @ log_scale))
        with np.errstate(over="ignore"):  # an infinite value is refused by whoever asked for it
            self._masses = self._scale * layout.across(self._scale, layout.single)
        self.value = fixed + float(self._masses[: layout.disjoint].sum())
        both = layout.sides @ self._masses
        self.grows, self.shrinks = both[: layout.count], both[layout.count :]

    def gradient(self) -> Array:
        """Derivative of the mass in each log-factor."""
        return 2 * (self.grows - self.shrinks)

    def curvature_product(self, direction: Array) -> Array:
        """Product of the Hessian with a direction."""
        slope = self._layout.exponents @ direction
        both = self._layout.sides @ (slope * self._masses + self._scale * self._layout.across(self._scale * slope, 0.0))
        return 4 * (both[: self._layout.count] - both[self._layout.count :])

    def curvature_diagonal(self) -> Array:
        """Diagonal of the Hessian, without what a factor of both a row and a column has of their common entry."""
        if self._layout.squares is None:
            return 4 * (self.grows + self.shrinks)
        both = self._layout.squares @ self._masses
        return 4 * (both[: self._layout.count] + both[self._layout.count :])


def filter_counts(graph: SymmetryGraph, names: Iterable[str], count: int) -> Tensor:
    """How many filters grow with each of the first ``count`` factors, float64 ``[count]``.

    A filter is what makes one unit: a row of a matrix, a convolution's filter; where a factor multiplies vectors alone
    (gains and biases), each entry.
    """
    filters, entries = (torch.zeros(count + 1, dtype=torch.float64, device="cpu") for _ in range(2))
    for name in names:
        shape = graph.shapes[name]
        matrix = max(shape, default=1) < math.prod(shape)
        for term in graph.scale_terms.get(name, ()):
            if term.exponent <= 0:
                continue
            index = torch.where((term.index < 0) | (term.index >= count), count, term.index).reshape(-1)
            copies = (shape[0] if matrix else math.prod(shape)) if len(index) == 1 else 1
            (filters if matrix else entries).index_add_(
                0, index, torch.full((len(index),), float(copies), device="cpu").double()
            )
    return torch.where(filters > 0, filters, entries)[:-1]


def _require_squares(largest: Mapping[str, float]) -> None:
    """Raise if float64 does not hold the squares of weights (only double-precision tensors hold such).

    Tensors so small that their squares are zero count as zero beside tensors of ordinary size: dead biases that weight
    decay has shrunk for long enough are of this kind.

    Args:
        largest: name to the largest entry of each double-precision tensor.

    Raises:
        SymmetryError: naming a tensor and its largest entry.
    """
    top = max(largest.values(), default=0.0)
    for name, size in largest.items():
        lost = 0 < size < 1 / _SQUARED and not 1 / _SQUARED < top < _SQUARED**0.5
        if size > _SQUARED or lost:
            raise SymmetryError(
                f"the largest entry of {name!r} is {size:.1e}: such squares leave the range of float64. Weights of "
                "this size come from a diverged run or a damaged file; multiply them by one number to measure them"
            )


def sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the axes along which ``shape`` is one."""
    axes = [a for a, n in enumerate(shape) if n == 1 and tensor.shape[a] > 1]
    return tensor.sum(axes, keepdim=True).expand(shape) if axes else tensor.expand(shape)


def _held(index: Tensor, count: int) -> Tensor | None:
    """Numbers of factors, ``count`` for those that are none of the first ``count``; None if there are no others."""
    numbers = index.numpy()
    inside = (numbers >= 0) & (numbers < count)
    return torch.from_numpy(np.where(inside, numbers, count)) if inside.any() else None


def _squares(tensor: Tensor, axes: list[int]) -> Tensor:
    """Squares in float64, summed over some axes, which stay with size one."""
    if len(axes) == tensor.ndim:
        return torch.linalg.vector_norm(tensor, dtype=torch.float64).square().reshape([1] * tensor.ndim)
    if not axes:
        return tensor.to(torch.float64, copy=True).square_()
    kept = [a for a in range(tensor.ndim) if a not in axes]
    shape = [1 if a in axes else n for a, n in enumerate(tensor.shape)]
    if max(kept) < min(axes):  # a kernel's positions come last: piece by piece, within the cache
        entries = tensor.reshape(math.prod(tensor.shape[: len(kept)]), -1)
        length = max(1, _PIECE // max(1, entries.shape[1]))
        square, sums = (
            entries.new_empty(length, entries.shape[1], dtype=torch.float64),
            entries.new_empty(len(entries), dtype=torch.float64),
        )
        ones = torch.ones(entries.shape[1], dtype=torch.float64, device="cpu")
        for piece, out in zip(entries.split(length), sums.split(length), strict=True):
            torch.mv(square[: len(piece)].copy_(piece).square_(), ones, out=out)
        return sums.reshape(shape)
    return tensor.to(torch.float64, copy=True).square_().sum(axes, keepdim=True)


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
    if not columns:
        return MatrixTable(matrix, tuple(rows), ())
    matrix, row_terms = _merged(matrix, rows)
    transposed, column_terms = _merged(matrix.T, columns)
    return MatrixTable(transposed.T, row_terms, column_terms)


def _merged(matrix: Tensor, terms: list[tuple[float, Tensor]]) -> tuple[Tensor, Terms]:
    """Add up rows that have the same factors."""
    first = terms[0][1]
    if bool((np.diff(first.numpy()) > 0).all()):
        return matrix, tuple(terms)
    if len(terms) == 1:
        values, where = torch.unique(first, return_inverse=True)
        distinct = values.unsqueeze(0)
    else:
        distinct, where = torch.unique(torch.stack([index for _, index in terms]), dim=1, return_inverse=True)
    merged = matrix.new_zeros(distinct.shape[1], matrix.shape[1]).index_add_(0, where, matrix)
    return merged, tuple((exponent, distinct[k]) for k, (exponent, _) in enumerate(terms))


def _joined(tables: list[MatrixTable | GeneralTable]) -> list[MatrixTable | GeneralTable]:
    """One table for all that have a single term, for each exponent, and then the others.

    Most tensors between normalizations have a single term, and so do biases, inputs and outputs, where signs are known.
    """
    single: dict[float, list[tuple[Tensor, Tensor]]] = {}
    others: list[MatrixTable | GeneralTable] = []
    for table in tables:
        if isinstance(table, MatrixTable) and not table.columns and len(table.rows) == 1:
            ((exponent, index),) = table.rows
            single.setdefault(exponent, []).append((index, table.mass))
        else:
            others.append(table)
    joined: list[MatrixTable | GeneralTable] = []
    for exponent, parts in single.items():
        index, mass = (torch.cat(x) for x in zip(*parts, strict=True))
        joined.append(MatrixTable(mass, ((exponent, index),), ()))
    return joined + others
