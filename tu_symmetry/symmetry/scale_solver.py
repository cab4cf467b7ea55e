"""Solving a ledger's linear constraints on log-scales: every variable becomes a combination of free factors.

Each tensor's log-scale is a sum of variables, and operators demand that certain sums vanish. Almost every demand
involves one or two variables and is settled by signed union-find, on whole arrays at once. Sums of three or more (a
gate times a value, a depthwise convolution) are settled by eliminating a variable that stands in no other such sum.
Whatever cannot be settled so is pinned to scale zero: fewer symmetries are claimed, never a wrong one.

As an example, ``c(relu(a(x)))`` with hidden units ``i``. A parameter has a variable for each position of each axis, so
``a.weight`` has the log-scale ``r_i + k_j``, ``a.bias`` ``t_i``, and ``c.weight`` ``m_o + s_i``. Operators demand

========================================  ==============  ==================================================
the input of ``a`` does not scale         ``k_j = 0``     one variable: joined with zero
the bias is added                         ``t_i - r_i``   two of opposite sign: ``+t ~ +r`` and ``-t ~ -r``
``c`` sums over ``i``, of scale ``r_i``   ``r_i + s_i``   two of equal sign: ``+s ~ -r`` and ``-s ~ +r``
the output does not scale                 ``m_o = 0``     one variable
========================================  ==============  ==================================================

and what is left is one free factor ``r_i`` for each unit: ``a`` grows with it, ``c.weight`` shrinks. In a gated
network, ``c(a(x) * b(x))``, the sum ``r_i + q_i + s_i`` of three remains: ``s_i`` is defined as ``-r_i - q_i``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tu_symmetry.symmetry.algebra import ZERO, Array, Term, distinct, tighten, varies
from tu_symmetry.symmetry.ledger import Ledger

Floats = NDArray[np.float64]


class ScaleSystem:
    """Solves the constraints of a ledger; afterwards every variable is a combination of free factors.

    Attributes:
        count: number of variables; variable 0 is always zero.
        root: for each variable the one that stands for all that are equal to it up to sign.
        sign: for each variable 1.0 or -1.0, times its root; 0.0 where it is zero.
        derived: roots that are defined by sums of others: root to (coefficient, root).
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.count = ledger.variables
        self.root: Array = np.arange(self.count)
        self.sign: Floats = np.ones(self.count)
        self.sign[ZERO] = 0.0
        self._left: list[Array] = []
        self._right: list[Array] = []
        self._same: list[NDArray[np.bool_]] = []
        self._zero: list[Array] = []
        self.derived: dict[int, list[tuple[float, int]]] = {}
        self._users: defaultdict[int, set[int]] = defaultdict(set)
        self._solve()
        depth = max((len(terms) for terms in self.derived.values()), default=0)
        self._is_derived = np.zeros(self.count, dtype=bool)
        self._part = np.zeros((depth, self.count), dtype=np.int64)
        self._factor = np.zeros((depth, self.count))
        for variable, terms in self.derived.items():
            self._is_derived[variable] = True
            for k, (coefficient, other) in enumerate(terms):
                self._part[k, variable], self._factor[k, variable] = other, coefficient

    def _tie(self, x: Array, y: Array, same: NDArray[np.bool_]) -> None:
        self._left.append(x)
        self._right.append(y)
        self._same.append(same)

    def _update(self) -> None:
        """Signed union-find: the nodes are +v (number v) and -v (number v + count).

        ``x = y`` joins +x with +y and -x with -y, ``x = -y`` joins +x with -y and -x with +y. A variable that is joined
        with its own negative is zero: ``x = y`` and ``x = -y`` together make one component of +x, -x, +y and -y.
        """
        n = self.count
        rows, columns = [], []
        for x, y, same in zip(self._left, self._right, self._same, strict=True):
            rows += [x, x + n]
            columns += [np.where(same, y, y + n), np.where(same, y + n, y)]
        for z in (*self._zero, np.array([ZERO])):
            rows.append(z)
            columns.append(z + n)
            rows.append(z)
            columns.append(np.full_like(z, ZERO))
        a, b = np.concatenate(rows), np.concatenate(columns)
        graph = coo_array((np.ones(len(a), dtype=bool), (a, b)), shape=(2 * n, 2 * n))
        _, label = connected_components(graph, directed=False)
        positive, negative = label[:n], label[n:]
        nodes = np.arange(2 * n)
        smallest = np.full(label.max() + 1, 2 * n)
        np.minimum.at(smallest, label, nodes)
        low_p, low_n = smallest[positive], smallest[negative]
        self.root = np.minimum(low_p % n, low_n % n)
        self.sign = np.where(low_p < low_n, 1.0, -1.0)
        zero = positive == negative
        self.root[zero] = ZERO
        self.sign[zero] = 0.0
        np.negative(self.sign, where=(low_p >= n) & (low_n >= n), out=self.sign)

    def _reduced(self, constraint: tuple[Term, ...]) -> list[tuple[Array, Floats]]:
        """Like terms collected: for each set of axes, variables ``[terms, n]`` and their coefficients.

        A constraint on a tensor ``[n, m]`` may hold terms along its first axis, along its second one, and along both;
        ``r_i + k_j = 0`` for all i and j is taken as ``r_i = 0`` and ``k_j = 0``, which demands a little more.
        """
        by_axes: dict[tuple[int, ...], list[tuple[float, Array]]] = defaultdict(list)
        for coefficient, variable in constraint:
            signed = tighten(_packed(self.root[variable], self.sign[variable]))
            by_axes[varies(signed)].append((coefficient, signed))
        # a term that varies along fewer axes joins the terms that vary along more of them: the sum has to vanish
        for few in sorted(by_axes, key=len):
            more = next((axes for axes in by_axes if len(axes) > len(few) and set(few) <= set(axes)), None)
            if more is not None:
                by_axes[more] += by_axes.pop(few)
        reduced = []
        for terms in by_axes.values():
            signed = np.stack([a.reshape(-1) for a in np.broadcast_arrays(*_distinct([a for _, a in terms]))])
            roots, signs = _unpacked(signed)
            weights: Floats = np.array([[c] for c, _ in terms]) * signs
            for i in range(len(terms)):
                for j in range(i + 1, len(terms)):
                    like = (roots[i] == roots[j]) & (weights[j] != 0)
                    weights[i][like] += weights[j][like]
                    weights[j][like] = 0.0
            weights[np.abs(weights) < 1e-9] = 0.0
            reduced.append((roots, weights))
        return reduced

    def _solve(self) -> None:
        self._update()
        open_constraints = list(self.ledger.constraints)
        while True:
            remaining, progress = [], False
            for constraint in open_constraints:
                solved, acted = self._settle(constraint)
                progress |= acted
                if not solved:
                    remaining.append(constraint)
            open_constraints = remaining
            if not progress:
                break
            self._update()
        self._eliminate(open_constraints)

    def _settle(self, constraint: tuple[Term, ...]) -> tuple[bool, bool]:
        """Use what a constraint says about one or two variables; returns (nothing is left of it, it said something)."""
        solved, acted = True, False
        for roots, weights in self._reduced(constraint):
            nonzero = (weights != 0).sum(axis=0)
            one = nonzero == 1
            if one.any():
                self._zero.append(roots[:, one][weights[:, one] != 0])
                acted = True
            two = nonzero == 2
            if two.any():
                order = np.argsort(weights[:, two] == 0, axis=0, kind="stable")[:2]
                pair = np.take_along_axis(roots[:, two], order, 0)
                weight = np.take_along_axis(weights[:, two], order, 0)
                equal = np.abs(weight[0]) == np.abs(weight[1])
                self._tie(pair[0][equal], pair[1][equal], (weight[0] == -weight[1])[equal])
                if not equal.all():
                    self._zero += [pair[0][~equal], pair[1][~equal]]
                acted = True
            solved &= not (nonzero > 2).any()
        return solved, acted

    def _eliminate(self, constraints: list[tuple[Term, ...]]) -> None:
        """Express one variable of each remaining sum by the others, or pin the sum."""
        rows: list[dict[int, float]] = []
        for constraint in constraints:
            for roots, weights in self._reduced(constraint):
                for position in np.flatnonzero((weights != 0).sum(axis=0) > 2).tolist():
                    column = weights[:, position]
                    row: dict[int, float] = defaultdict(float)
                    for k in np.flatnonzero(column).tolist():
                        row[int(roots[k, position])] += float(column[k])
                    rows.append(row)
        if not rows:
            return
        members = np.bincount(self.root, minlength=self.count)
        for row in rows:
            current = self._substitute(row)
            if not current:
                continue
            pivots = [v for v, w in current.items() if abs(w) == 1.0 and v not in self.derived]
            if not pivots:
                for v in current:
                    self._define(v, [])
                continue
            pivot = min(pivots, key=lambda v: (int(members[v]), -v))
            weight = current.pop(pivot)
            self._define(pivot, [(-w / weight, v) for v, w in current.items()])

    def _substitute(self, row: Mapping[int, float]) -> dict[int, float]:
        terms: list[tuple[float, int]] = []
        for variable, weight in row.items():
            if variable in self.derived:
                terms += [(weight * c, v) for c, v in self.derived[variable]]
            elif variable != ZERO:
                terms.append((weight, variable))
        return {v: c for c, v in _collect(terms)}

    def _define(self, variable: int, expression: list[tuple[float, int]]) -> None:
        """Replace a variable by an expression in free ones, in every expression that uses it."""
        for known in self._users.pop(variable, ()):
            terms = self.derived[known]
            self.derived[known] = _collect(
                [(c, v) for c, v in terms if v != variable]
                + [(c * w, u) for c, v in terms if v == variable for w, u in expression]
            )
            for _, u in expression:
                self._users[u].add(known)
        self.derived[variable] = expression
        for _, u in expression:
            self._users[u].add(variable)

    def expand(self, scale: tuple[Term, ...], ndim: int) -> list[tuple[float, Array]]:
        """A log-scale in free variables only: terms (coefficient, roots; ZERO where there is none)."""
        result: list[tuple[float, Array]] = []
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
        return tidy([(c, v.reshape((1,) * (ndim - v.ndim) + v.shape)) for c, v in result])


def _packed(root: Array, sign: Floats) -> Array:
    """One integer for a root and its sign -1, 0 or 1, so that arrays of both are compared and thinned out at once."""
    whole = sign.astype(np.int64)
    return np.where(whole == 0, 4 * ZERO + 1, 4 * root + whole + 1)


def _unpacked(packed: Array) -> tuple[Array, Floats]:
    """Roots and signs."""
    return packed // 4, (packed % 4 - 1).astype(np.float64)


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


def tidy(terms: list[tuple[float, Array]]) -> list[tuple[float, Array]]:
    """Terms that fill each other's gaps become one, and what multiplies the whole tensor is added up."""
    merged: list[tuple[float, Array]] = []
    for coefficient, array in terms:
        for k, (other_coefficient, other) in enumerate(merged):
            if coefficient == other_coefficient and not ((array != ZERO) & (other != ZERO)).any():
                merged[k] = (coefficient, array + other)
                break
        else:
            merged.append((coefficient, array))
    whole: dict[int, float] = defaultdict(float)
    kept = []
    for coefficient, array in merged:
        array = tighten(array)
        if array.size == 1:
            whole[int(array.reshape(()))] += coefficient
        else:
            kept.append((coefficient, array))
    ndim = terms[0][1].ndim if terms else 0
    added = [(c, np.full((1,) * ndim, v, dtype=np.int64)) for v, c in whole.items() if v != ZERO and abs(c) > 1e-9]
    return kept + added


def _collect(terms: list[tuple[float, int]]) -> list[tuple[float, int]]:
    total: dict[int, float] = defaultdict(float)
    for c, v in terms:
        total[v] += c
    return [(c, v) for v, c in total.items() if abs(c) > 1e-9]
