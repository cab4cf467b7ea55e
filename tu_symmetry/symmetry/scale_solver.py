"""Solving a ledger's linear constraints on log-scales: every variable becomes a combination of free factors.

Operators demand that sums of variables vanish. A demand on one or two variables is settled by signed union-find, a
longer sum (a gate times a value) by eliminating a variable. What cannot be settled so is pinned to scale zero.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tu_symmetry.symmetry.algebra import ZERO, Array, Term, distinct, tighten, varies
from tu_symmetry.symmetry.ledger import Ledger

Floats = NDArray[np.float64]
Terms = list[tuple[float, Array]]
Expression = list[tuple[float, int]]  # coefficients and variables
_FEW = 4096  # positions that are computed sooner than it is found which of them are alike
_PIECE = 1 << 18  # sums that are collected at once


class _Sums(NamedTuple):
    """Sums of as many terms each: the constraint that each is of ``[n]``, variables and coefficients ``[terms, n]``."""

    number: Array
    variables: Array
    weights: Floats


class ScaleSystem:
    """Solves the constraints of a ledger; afterwards every variable is a combination of free factors.

    Coefficients of a ledger that follows signs count modulo 2.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.count = ledger.variables
        self.signs = ledger.signs
        self.root: Array = np.arange(self.count)
        self.sign: Floats = np.ones(self.count)
        self._ties: list[tuple[Array, Array, NDArray[np.bool_]]] = []  # roots that are equal, or each other's minus
        self._zero: list[Array] = []
        self._solve(ledger.constraints)

    def _update(self) -> None:
        """Signed union-find over the roots that were tied: the nodes are +r and -r (as many numbers behind it)."""
        zero = np.concatenate([[ZERO], *self._zero])
        met = np.zeros(self.count, dtype=bool)
        for roots in (zero, *(tie[k] for tie in self._ties for k in (0, 1))):
            met[roots] = True
        held = np.flatnonzero(met)
        n = len(held)
        place = np.cumsum(met) - 1
        rows, columns = [place[zero], place[zero]], [place[zero] + n, np.zeros_like(zero)]
        for x, y, same in self._ties:
            x, y = place[x], place[y]
            rows += [x, x + n]
            columns += [np.where(same, y, y + n), np.where(same, y + n, y)]
        a, b = np.concatenate(rows), np.concatenate(columns)
        graph = coo_array((np.ones(len(a), dtype=bool), (a, b)), shape=(2 * n, 2 * n))
        _, label = connected_components(graph, directed=False)
        smallest = np.empty(label.max() + 1, dtype=np.int64)
        smallest[label[::-1]] = np.arange(2 * n)[::-1]  # of several the last one stays
        plus, minus = smallest[label[:n]], smallest[label[n:]]
        root, sign = np.arange(self.count), np.ones(self.count)
        root[held], sign[held] = held[np.minimum(plus, minus % n)], np.where(plus < minus, 1.0, -1.0)
        gone = held[label[:n] == label[n:]]
        root[gone], sign[gone] = ZERO, 0.0
        self.sign *= sign[self.root]
        self.root = root[self.root]
        self._ties, self._zero = [], []

    def _reduced(self, constraint: tuple[Term, ...]) -> Iterator[tuple[Array, Floats]]:
        """Like terms collected: for each set of axes, variables ``[terms, n]`` and their coefficients."""
        by_axes: dict[tuple[int, ...], Terms] = defaultdict(list)
        for coefficient, variable in constraint:
            signed = tighten(_packed(self.root[variable], self.sign[variable]))
            by_axes[varies(signed)].append((coefficient, signed))
        # a term that varies along fewer axes joins the terms that vary along more of them: the sum has to vanish
        for few in sorted(by_axes, key=len):
            more = next((axes for axes in by_axes if len(axes) > len(few) and set(few) <= set(axes)), None)
            if more is not None:
                by_axes[more] += by_axes.pop(few)
        for terms in by_axes.values():
            laid = [a for _, a in terms]
            many = math.prod(np.broadcast_shapes(*(a.shape for a in laid))) > _FEW
            signed = np.stack([a.reshape(-1) for a in np.broadcast_arrays(*(_distinct(laid) if many else laid))])
            roots, signs = signed // 4, (signed % 4 - 1).astype(np.float64)
            yield roots, self._collected(roots, np.array([[c] for c, _ in terms]) * signs)

    def _collected(self, roots: Array, weights: Floats) -> Floats:
        """The coefficients ``[terms, n]`` of sums, each root's at its first place."""
        for i, j in itertools.combinations(range(len(roots)), 2):
            like = (roots[i] == roots[j]) & (weights[j] != 0)
            weights[i][like] += weights[j][like]
            weights[j][like] = 0.0
        weights[np.abs(weights) < 1e-9] = 0.0
        return weights % 2 if self.signs else weights

    def _solve(self, constraints: Sequence[tuple[Term, ...]]) -> None:
        self._update()
        plain = [len({(v.ndim - k, n) for _, v in c for k, n in enumerate(v.shape) if n > 1}) < 2 for c in constraints]
        others = [(k, c) for k, c in enumerate(constraints) if not plain[k]]
        sums: Iterable[_Sums] = _written_out([(k, c) for k, c in enumerate(constraints) if plain[k]])
        progress = True
        while progress:
            progress, left, later = False, [], []
            for own in sums:
                roots = self.root[own.variables]
                weights = self._collected(roots, own.weights * self.sign[own.variables])
                longer, acted = self._settle(roots, weights)
                left.append(_Sums(own.number[longer], roots[:, longer], weights[:, longer]))
                progress |= acted
            for k, constraint in others:
                found = [self._settle(*reduced) for reduced in self._reduced(constraint)]
                later += [(k, constraint)] if any(longer.any() for longer, _ in found) else []
                progress |= any(acted for _, acted in found)
            sums, others = [own for own in left if len(own.number)], later
            if progress:
                self._update()
        longer_ones = ((k, reduced) for k, constraint in others for reduced in self._reduced(constraint))
        self._eliminate([*sums, *(_Sums(np.full(roots.shape[1], k), roots, own) for k, (roots, own) in longer_ones)])

    def _settle(self, roots: Array, weights: Floats) -> tuple[NDArray[np.bool_], bool]:
        """Use what sums of one or two variables say; returns (which sums have more, whether some said something)."""
        nonzero = (weights != 0).sum(axis=0)
        one, two = nonzero == 1, nonzero == 2
        if one.any():
            self._zero.append(roots[:, one][weights[:, one] != 0])
        if two.any():
            order = np.argsort(weights[:, two] == 0, axis=0, kind="stable")[:2]
            pair = np.take_along_axis(roots[:, two], order, 0)
            weight = np.take_along_axis(weights[:, two], order, 0)
            equal = np.abs(weight[0]) == np.abs(weight[1])
            alike = (weight[0] == -weight[1]) | self.signs
            self._ties.append((pair[0][equal], pair[1][equal], alike[equal]))
            self._zero += [pair[0][~equal], pair[1][~equal]]
        return nonzero > 2, bool(one.any() or two.any())

    def _eliminate(self, sums: Sequence[_Sums]) -> None:
        """Express one variable of each remaining sum by the others, or pin the sum.

        Sums fall into parts that share no variable, which are often alike but for its number (one unit's and the next
        one's): one of those is solved for all.
        """
        self._is_derived = np.zeros(self.count, dtype=bool)
        found: list[tuple[Array, Array, Array, Floats]] = []  # numbers of terms, what is derived, its terms
        for variables, few, rank in self._parts(*_entries(sums)):
            derived = _Elimination(few, rank, self.signs).derived
            self._is_derived[variables[:, list(derived)]] = True
            terms = [(k, own, other, c) for own, held in derived.items() for k, (c, other) in enumerate(held)]
            if terms:
                k, own, other, factor = map(np.array, zip(*terms, strict=True))
                found.append((k, variables[:, own], variables[:, other], factor))
        depth = max((int(k.max()) + 1 for k, *_ in found), default=0)
        self._part = np.zeros((depth, self.count), dtype=np.int64)
        self._factor = np.zeros((depth, self.count))
        for k, own, other, factor in found:
            self._part[k, own], self._factor[k, own] = other, factor

    def _parts(
        self, number: Array, variable: Array, weight: Floats
    ) -> Iterator[tuple[Array, list[dict[int, float]], Array]]:
        """Parts of sums that are alike: their variables ``[parts, n]``, the sums of columns of these, and their ranks.

        Of a sum that variable is to go first which the fewest others equal.
        """
        held, entry = np.unique(variable, return_inverse=True)
        if not len(held):
            return
        first = entry[np.searchsorted(number, number)]  # of the sum that an entry belongs to
        edges = coo_array((np.ones(len(entry), dtype=bool), (entry, first)), shape=(len(held), len(held)))
        _, part = connected_components(edges, directed=False)
        order = np.argsort(part[entry], kind="stable")
        number, entry, weight = number[order], entry[order], weight[order]
        met = np.argsort(np.unique(entry, return_index=True)[1])  # by first entries: those of a part stand together
        column, rank = np.empty_like(met), np.empty_like(met)
        column[met] = np.arange(len(met))
        part, held, entry = part[met], held[met], column[entry]
        equal = np.bincount(self.root, minlength=self.count)[held]
        rank[np.lexsort((-held, equal, part))] = np.arange(len(met))
        starts = np.flatnonzero(np.diff(part, prepend=-1))
        begin = np.repeat(starts, np.diff(starts, append=len(part)))  # for each variable, of its part
        cuts = np.flatnonzero(np.diff(begin[entry], prepend=-1)).tolist()
        begins = np.diff(number, prepend=-1) != 0
        entry, rank = entry - begin[entry], rank - begin
        alike: dict[bytes, list[int]] = defaultdict(list)
        bounds = list(
            zip(starts.tolist(), [*starts[1:].tolist(), len(part)], cuts, [*cuts[1:], len(entry)], strict=True)
        )
        for k, (a, b, c, d) in enumerate(bounds):
            told = sha256(np.array((b - a, d - c)).data)
            for piece in (rank[a:b], entry[c:d], weight[c:d], begins[c:d]):
                told.update(piece.data)
            alike[told.digest()].append(k)
        for same in alike.values():
            a, b, c, d = bounds[same[0]]
            sums: list[dict[int, float]] = [{} for _ in range(int(begins[c:d].sum()))]
            which = (np.cumsum(begins[c:d]) - 1).tolist()
            for k, own, coefficient in zip(which, entry[c:d].tolist(), weight[c:d].tolist(), strict=True):
                sums[k][own] = coefficient
            yield held[starts[same][:, None] + np.arange(b - a)], sums, rank[a:b]

    def expand(self, scale: tuple[Term, ...], ndim: int) -> Terms:
        """A log-scale in free variables only: terms (coefficient, roots; ZERO where there is none)."""
        if self.signs:
            scale = tuple((1.0, v) for c, v in scale if c % 2)
        result: Terms = []
        for coefficient, variable in scale:
            roots = np.where(self.sign[variable] == 0, ZERO, self.root[variable])
            weight = coefficient * self.sign[variable]
            is_derived = self._is_derived[roots]
            for value in distinct(weight[(roots != ZERO) & ~is_derived]).tolist():
                result.append((value, np.where((weight == value) & ~is_derived, roots, ZERO)))
            if is_derived.any():
                for part, factor in zip(self._part[:, roots], self._factor[:, roots], strict=True):
                    total = np.where(is_derived, factor * weight, 0.0)
                    for value in distinct(total[total != 0]).tolist():
                        result.append((value, np.where(total == value, part, ZERO)))
        laid = [(c, v.reshape((1,) * (ndim - v.ndim) + v.shape)) for c, v in result]
        return [(c, v) for c, v in tidy(_cancelled(laid)) if c % 2] if self.signs else tidy(laid)


class _Elimination:
    """Sums of few variables, of which each expresses one by the others; those of which none can go are zero."""

    def __init__(self, sums: Sequence[Mapping[int, float]], rank: Array, signs: bool) -> None:
        self.signs = signs
        self.derived: dict[int, Expression] = {}
        self._users: defaultdict[int, set[int]] = defaultdict(set)
        for row in sums:
            current = self._substitute(row)
            pivots = [v for v, w in current.items() if abs(w) == 1.0 and v not in self.derived]
            if pivots:
                pivot = min(pivots, key=rank.__getitem__)
                weight = current.pop(pivot)
                self._define(pivot, self._collect([(-w / weight, v) for v, w in current.items()]))
            else:
                for v in current:
                    self._define(v, [])

    def _substitute(self, row: Mapping[int, float]) -> dict[int, float]:
        if not self.derived.keys() & row.keys():
            return dict(row)
        terms: Expression = []
        for variable, weight in row.items():
            if variable in self.derived:
                terms += [(weight * c, v) for c, v in self.derived[variable]]
            else:
                terms.append((weight, variable))
        return {v: c for c, v in self._collect(terms)}

    def _define(self, variable: int, expression: Expression) -> None:
        """Replace a variable by an expression in free ones, in every expression that uses it."""
        for known in self._users.pop(variable, ()):
            terms = self.derived[known]
            self.derived[known] = self._collect(
                [(c, v) for c, v in terms if v != variable]
                + [(c * w, u) for c, v in terms if v == variable for w, u in expression]
            )
            for _, u in expression:
                self._users[u].add(known)
        self.derived[variable] = expression
        for _, u in expression:
            self._users[u].add(variable)

    def _collect(self, terms: Expression) -> Expression:
        collected = _collect(terms)
        return [(1.0, v) for c, v in collected if c % 2] if self.signs else collected


def _written_out(constraints: Sequence[tuple[int, tuple[Term, ...]]]) -> Iterator[_Sums]:
    """Numbered constraints that vary along one axis at most, each as a sum for each of its positions; in pieces."""
    by_terms: dict[int, list[_Sums]] = defaultdict(list)
    held = 0
    for number, constraint in constraints:
        laid = np.broadcast_arrays(*(v for _, v in constraint))
        variables = np.stack([v.reshape(-1) for v in laid])
        weights = np.repeat([[c] for c, _ in constraint], variables.shape[1], axis=1)
        by_terms[len(constraint)].append(_Sums(np.full(variables.shape[1], number), variables, weights))
        held += variables.shape[1]
        if held > _PIECE:
            yield from map(_joined, by_terms.values())
            by_terms, held = defaultdict(list), 0
    yield from map(_joined, by_terms.values())


def _joined(sums: Sequence[_Sums]) -> _Sums:
    return _Sums(*(np.concatenate(parts, axis=-1) for parts in zip(*sums, strict=True)))


def _entries(sums: Sequence[_Sums]) -> tuple[Array, Array, Floats]:
    """The sums of more than two variables: of each entry the number of its sum, its variable, its coefficient."""
    most = max((len(own.weights) for own in sums), default=0)

    def padded(array: NDArray[Any]) -> NDArray[Any]:
        return np.pad(array, ((0, most - len(array)), (0, 0)))

    kept = [_Sums(np.empty(0, np.int64), np.empty((most, 0), np.int64), np.empty((most, 0)))]
    kept += [
        _Sums(own.number, padded(np.where(own.weights == 0, ZERO, own.variables)), padded(own.weights)) for own in sums
    ]
    number, variables, weights = _joined(kept)
    order = np.flatnonzero((weights != 0).sum(axis=0) > 2)
    order = order[np.argsort(number[order], kind="stable")]
    told = np.concatenate([variables, weights.view(np.int64)])[:, order]
    by_content = np.lexsort(told) if order.size else order
    new = np.append(True, (np.diff(told[:, by_content]) != 0).any(axis=0))[: order.size]
    first = order[np.sort(by_content[new])]  # passes say the same of the same weights
    rows, weights = variables[:, first].T, weights[:, first].T
    here = weights != 0
    return np.nonzero(here)[0], rows[here], weights[here]


def _cancelled(terms: Terms) -> Terms:
    """Terms of signs, of which the same one at the same place twice is none."""
    arrays = [v for _, v in terms]
    for i, j in itertools.combinations(range(len(arrays)), 2):
        if arrays[i].shape == arrays[j].shape:
            twice = arrays[i] == arrays[j]
            arrays[i], arrays[j] = (np.where(twice, ZERO, arrays[k]) for k in (i, j))
    return [(1.0, v) for v in arrays if (v != ZERO).any()]


def _packed(root: Array, sign: Floats) -> Array:
    """One integer for a root and its sign -1, 0 or 1, so that arrays of both are compared and thinned out at once."""
    whole = sign.astype(np.int64)
    return np.where(whole == 0, 4 * ZERO + 1, 4 * root + whole + 1)


def _distinct(arrays: list[Array]) -> list[Array]:
    """Keep one of the positions along an axis at which all of the arrays are alike."""
    for axis in range(arrays[0].ndim):
        varying = [a for a in arrays if a.shape[axis] > 1]
        if not varying:
            continue
        rows = np.concatenate([np.moveaxis(a, axis, 0).reshape(a.shape[axis], -1) for a in varying], axis=1)
        _, first = np.unique(rows, axis=0, return_index=True)
        if len(first) < len(rows):
            arrays = [a.take(np.sort(first), axis) if a.shape[axis] > 1 else a for a in arrays]
    return arrays


def tidy(terms: Terms) -> Terms:
    """Terms that fill each other's gaps become one, and what multiplies the whole tensor is added up."""
    merged: Terms = []
    for coefficient, array in terms:
        for k, (other_coefficient, other) in enumerate(merged):
            if coefficient == other_coefficient and not ((array != ZERO) & (other != ZERO)).any():
                merged[k] = (coefficient, array + other)
                break
        else:
            merged.append((coefficient, array))
    whole: Expression = []
    kept = []
    for coefficient, array in merged:
        array = tighten(array)
        if array.size == 1:
            whole.append((coefficient, int(array.reshape(()))))
        else:
            kept.append((coefficient, array))
    ndim = terms[0][1].ndim if terms else 0
    return kept + [(c, np.full((1,) * ndim, v, dtype=np.int64)) for c, v in _collect(whole) if v != ZERO]


def _collect(terms: Expression) -> Expression:
    total: dict[int, float] = defaultdict(float)
    for c, v in terms:
        total[v] += c
    return [(c, v) for v, c in total.items() if abs(c) > 1e-9]
