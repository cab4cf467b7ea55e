"""From a ledger's linear constraints on log-scales to scale and normalization groups.

Each tensor's log-scale is a sum of variables; operators demand that certain sums vanish. Almost every demand involves
one or two variables and is settled by signed union-find, on whole arrays at once. Sums of three or more (a gate times a
value, a depthwise convolution) are settled by eliminating a variable that stands in no other such sum. Whatever cannot
be settled so is pinned to scale zero: fewer symmetries are claimed, never a wrong one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tu_symmetry.symmetry.algebra import ZERO, Array, Term, among, distinct, distinct_rows, tighten, varies
from tu_symmetry.symmetry.graph import NormalizationGroup, ScaleGroup, ScaleMember, ScaleTerm
from tu_symmetry.symmetry.ledger import Ledger

Floats = NDArray[np.float64]


class ScaleSystem:
    """Solves the constraints of a ledger; afterwards every variable is a combination of free factors."""

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
        """Signed union-find: the nodes are +v and -v; a variable joined with its own negative is zero."""
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
        """Like terms collected: for each set of axes, variables ``[terms, n]`` and their coefficients."""
        by_axes: dict[tuple[int, ...], list[tuple[float, Array]]] = defaultdict(list)
        for coefficient, variable in constraint:
            sign = self.sign[variable].astype(np.int64)
            signed = tighten(np.where(sign == 0, 1, 4 * self.root[variable] + sign + 1))
            by_axes[varies(signed)].append((coefficient, signed))
        # a term that varies along fewer axes joins the terms that vary along more of them: the sum has to vanish
        for few in sorted(by_axes, key=len):
            more = next((axes for axes in by_axes if len(axes) > len(few) and set(few) <= set(axes)), None)
            if more is not None:
                by_axes[more] += by_axes.pop(few)
        reduced = []
        for terms in by_axes.values():
            signed = np.stack([a.reshape(-1) for a in np.broadcast_arrays(*_distinct([a for _, a in terms]))])
            roots = signed // 4
            weights: Floats = np.array([[c] for c, _ in terms]) * (signed % 4 - 1.0)
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
        return _tidy([(c, v.reshape((1,) * (ndim - v.ndim) + v.shape)) for c, v in result])


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


def _tidy(terms: list[tuple[float, Array]]) -> list[tuple[float, Array]]:
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


def scale_groups(
    ledger: Ledger, order: list[str], shapes: Mapping[str, tuple[int, ...]], buffers: frozenset[str]
) -> tuple[tuple[ScaleGroup, ...], tuple[NormalizationGroup, ...], dict[str, tuple[ScaleTerm, ...]]]:
    """Scale groups, normalization groups, and the log-scale of every tensor in their factors.

    Factors that multiply the same axes of the same tensors with the same exponents form one group. A group is a
    normalization group if no parameter shrinks when it grows: something downstream undoes it.
    """
    system = ScaleSystem(ledger)
    expanded = {
        name: system.expand(ledger.parameters[name].scale, len(shapes[name]))
        for name in order
        if name in ledger.parameters
    }
    # what is compared with an epsilon is followed as if it were one more buffer: its factors are inexact
    met_epsilon = {f"epsilon {k}": system.expand(((1.0, v),), v.ndim) for k, v in enumerate(ledger.inexact)}
    expanded |= met_epsilon
    buffers |= met_epsilon.keys()
    alike = _alike(expanded)
    redundant = _redundant(expanded, alike)
    if redundant:
        for name, terms in expanded.items():
            expanded[name] = [(c, np.where(among(a, np.array(redundant)), ZERO, a)) for c, a in terms]
        alike = _alike(expanded)
    if _expose_normalizations(expanded, alike, buffers):
        alike = _alike(expanded)
    inexact = [distinct(array) for name in met_epsilon for _, array in expanded.pop(name)]
    kinds: tuple[list[tuple[Array, bool]], list[tuple[Array, bool]]] = ([], [])
    flipped = []
    for variables, parts, exact in _families(
        alike, set(met_epsilon), np.concatenate([np.empty(0, np.int64), *inexact])
    ):
        trainable = [c for name, _, c in parts if name not in buffers]
        if not trainable:
            continue
        if all(c < 0 for c in trainable):  # orient factors so that parameters grow with them
            flipped.append(variables)
            trainable = [-c for c in trainable]
        kinds[int(all(c > 0 for c in trainable))].append((variables, exact))
    if flipped:
        flip = np.concatenate(flipped)
        for name, terms in expanded.items():
            expanded[name] = [t for c, v in terms for t in _flipped(c, v, flip)]
    number = np.full(system.count, -1, dtype=np.int64)
    start = 0
    for variables, _ in (*kinds[0], *kinds[1]):
        number[variables] = np.arange(start, start + len(variables))
        start += len(variables)
    terms_of = {}
    for name, terms in expanded.items():
        numbered = [(c, np.where(v == ZERO, -1, number[v])) for c, v in terms]
        kept = tuple(ScaleTerm(float(c), torch.from_numpy(v)) for c, v in numbered if (v >= 0).any())
        if kept:
            terms_of[name] = kept
    starts = np.cumsum([0, *(len(variables) for variables, _ in (*kinds[0], *kinds[1]))])
    touched: dict[int, list[tuple[str, ScaleTerm]]] = defaultdict(list)
    for name, scale_terms in terms_of.items():
        for term in scale_terms:
            factors = term.index.numpy()
            for k in distinct(np.searchsorted(starts, factors[factors >= 0], side="right") - 1).tolist():
                touched[k].append((name, term))
    taken: set[str] = set()
    groups: tuple[list[ScaleGroup], list[NormalizationGroup]] = ([], [])
    for k, (variables, exact) in enumerate((*kinds[0], *kinds[1])):
        members = tuple(_members(touched[k], int(starts[k]), len(variables), buffers))
        kind = int(k >= len(kinds[0]))
        cls = NormalizationGroup if kind else ScaleGroup
        groups[kind].append(cls(_name(members, taken), len(variables), members, exact))  # type: ignore[arg-type]
    return tuple(groups[0]), tuple(groups[1]), terms_of


Expanded = dict[str, list[tuple[float, Array]]]
Part = tuple[str, tuple[int, ...], float]
"""What a factor multiplies: a tensor, the axes along which the factors differ there, and the exponent."""


class _Alike(NamedTuple):
    """Free variables that multiply the same parts, in the order in which they are met, and the places of that."""

    parts: tuple[Part, ...]
    variables: Array
    met: Array


def _alike(expanded: Expanded) -> list[_Alike]:
    """The free variables, those that multiply the same parts together."""
    parts: list[Part] = []
    held, owner, met = [], [], []
    start = 0
    for name, terms in expanded.items():
        for coefficient, variable in terms:
            uniques, where = np.unique(variable.reshape(-1), return_index=True)
            free = uniques != ZERO
            held.append(uniques[free])
            owner.append(np.full(int(free.sum()), len(parts)))
            met.append(start + where[free])
            parts.append((name, varies(variable), coefficient))
            start += variable.size
    if not held:
        return []
    numbers = {part: k for k, part in enumerate(dict.fromkeys(parts))}
    number = np.array([numbers[part] for part in parts])
    fingerprints = np.random.default_rng(0).integers(2**63, size=len(numbers), dtype=np.uint64)
    variables, owners, places = np.concatenate(held), np.concatenate(owner), np.concatenate(met)
    free, first, index = np.unique(variables, return_index=True, return_inverse=True)  # first: places grow
    signature = np.zeros(len(free), dtype=np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(signature, index, fingerprints[number[owners]])
    _, kind = np.unique(signature, return_inverse=True)
    order = np.lexsort((places[first], kind))
    found = []
    for own in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1) if len(order) else []:
        multiplied = tuple(parts[k] for k in owners[index == own[0]].tolist())
        found.append(_Alike(multiplied, free[own], places[first[own]]))
    return sorted(found, key=lambda alike: int(alike.met[0]))


def _families(alike: list[_Alike], apart: set[str], inexact: Array) -> Iterator[tuple[Array, tuple[Part, ...], bool]]:
    """Variables of one group: the same parts (those of the names ``apart`` do not count), and all exact or none."""
    families: dict[tuple[tuple[Part, ...], bool], list[tuple[Array, Array]]] = defaultdict(list)
    for parts, variables, met in alike:
        key = tuple(sorted({part for part in parts if part[0] not in apart}))
        rough = among(variables, inexact)
        for exact, own in ((True, ~rough), (False, rough)):
            if own.any():
                families[key, exact].append((variables[own], met[own]))
    ordered = []
    for (parts, exact), pieces in families.items():
        variables, met = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
        order = np.argsort(met)
        ordered.append((int(met[order[0]]), variables[order], parts, exact))
    for _, variables, parts, exact in sorted(ordered, key=lambda family: family[0]):
        yield variables, parts, exact


def _expose_normalizations(expanded: Expanded, alike: list[_Alike], buffers: frozenset[str]) -> bool:
    """Change the basis so that a factor under which nothing shrinks is a factor of its own.

    A single factor may trade off against others, while a combination of them only ever grows weights: a residual stream
    that a normalization reads, with biases on the branch. Such combinations are found by linear programming over the
    groups (each moving as one); the single factor is then redefined as the combination.
    """
    if not any(all(axes == () for _, axes, _ in kind.parts) for kind in alike):
        return False  # no factor multiplies whole tensors
    members = list(_by_parts(alike).values())
    number = np.full(max(int(v.max()) for v in members) + 1, -1, dtype=np.int64)
    for k, variables in enumerate(members):
        number[variables] = k
    rows = np.unique(
        np.array(list(_exponent_rows(expanded, number, len(members), buffers))).reshape(-1, len(members)), axis=0
    )
    changed = False
    for k, variables in enumerate(members):
        if len(variables) != 1 or not (rows[:, k] < 0).any() or not (rows[:, k] > 0).any():
            continue
        n = len(members)
        fixed = np.zeros((1, 2 * n))
        fixed[0, k], fixed[0, n + k] = 1.0, -1.0
        found = linprog(
            np.ones(2 * n), A_ub=-np.hstack([rows, -rows]), b_ub=np.zeros(len(rows)), A_eq=fixed, b_eq=[1.0]
        )
        if not found.success:
            continue
        direction = np.round(found.x[:n] - found.x[n:], 9)
        for name, terms in expanded.items():
            added = []
            for coefficient, array in terms:
                for other in np.flatnonzero(direction).tolist():
                    if other != k:
                        hit = among(array, members[other])
                        if hit.any():
                            added.append((coefficient * direction[other], np.where(hit, variables[0], ZERO)))
            expanded[name] = _tidy([*terms, *added])
        rows = rows @ (np.eye(n) + np.outer(direction, np.eye(n)[k]) - np.outer(np.eye(n)[k], np.eye(n)[k]))
        changed = True
    return changed


def _exponent_rows(
    expanded: Expanded, number: Array, count: int, buffers: frozenset[str]
) -> Iterator[NDArray[np.float64]]:
    """Exponents of every group, for each kind of entry of every parameter."""
    for name, terms in expanded.items():
        if name in buffers:
            continue
        kinds: dict[tuple[int, ...], NDArray[np.float64]] = {}
        for axes in dict.fromkeys(varies(v) for _, v in terms):
            own = [(c, v) for c, v in terms if varies(v) == axes]
            held = np.stack([np.where(v == ZERO, -1, number[v]).reshape(-1) for _, v in own], axis=1)
            held = distinct_rows(held)
            table = np.zeros((len(held), count))
            for column, (c, _) in enumerate(own):
                here = np.flatnonzero(held[:, column] >= 0)
                np.add.at(table, (here, held[here, column]), c)
            kinds[axes] = table
        total = np.zeros((1, count))
        for table in kinds.values():
            total = (total[:, None, :] + table[None]).reshape(-1, count)
        yield from total


def _by_parts(alike: list[_Alike]) -> dict[tuple[Part, ...], Array]:
    """Variables by the set of parts that they multiply, a part that is multiplied twice counting once."""
    found: dict[tuple[Part, ...], list[Array]] = defaultdict(list)
    for kind in alike:
        found[tuple(sorted(set(kind.parts)))].append(kind.variables)
    return {parts: np.concatenate(variables) for parts, variables in found.items()}


def _redundant(expanded: Expanded, alike: list[_Alike]) -> list[int]:
    """Factors that multiply whole tensors, and change nothing or just what the factors of one axis change together."""
    whole: dict[int, dict[str, float]] = {}
    for kind in alike:
        if not all(axes == () for _, axes, _ in kind.parts):
            continue
        for v in kind.variables.tolist():
            net: dict[str, float] = defaultdict(float)
            for name, _, c in kind.parts:
                full = all((a == v).all() for _, a in expanded[name] if (a == v).any())
                net[name] += c if full else np.nan
            whole[v] = {name: c for name, c in net.items() if c != 0}
    by_parts = _by_parts([kind for kind in alike if any(axes != () for _, axes, _ in kind.parts)])
    gone = []
    for v, net in whole.items():
        if not net:
            gone.append(v)
            continue
        for shared, variables in by_parts.items():
            names = [name for name, _, _ in shared]
            if set(names) != set(net) or len(names) != len(net):
                continue
            ratios = {c / net[name] for name, _, c in shared}
            covers = all(any(among(a, variables).all() for c, a in expanded[name]) for name in names)
            if len(ratios) == 1 and covers:
                gone.append(v)
                break
    return gone


def _flipped(coefficient: float, variable: Array, flip: Array) -> list[tuple[float, Array]]:
    hit = among(variable, flip)
    if not hit.any():
        return [(coefficient, variable)]
    parts = [(-coefficient, np.where(hit, variable, ZERO))]
    if (~hit & (variable != ZERO)).any():
        parts.append((coefficient, np.where(hit, ZERO, variable)))
    return parts


def _members(
    touched: list[tuple[str, ScaleTerm]], start: int, size: int, buffers: frozenset[str]
) -> Iterator[ScaleMember]:
    for name, term in touched:
        exponent = term.exponent
        array = term.index.numpy() - start
        array = np.where((array >= 0) & (array < size), array, -1)
        buffer = name in buffers
        axes = varies(array)
        if not axes and array.size == 1:
            yield ScaleMember(name, None, exponent, buffer=buffer)
            continue
        if len(axes) == 1:
            flat = array.reshape(-1)
            yield ScaleMember(name, axes[0], exponent, _positions(flat, size), buffer=buffer)
            continue
        rows_axis, axis = axes[0], axes[-1]
        grid = np.moveaxis(array, (rows_axis, axis), (0, 1)).reshape(array.shape[rows_axis], array.shape[axis])
        held = np.nonzero(grid >= 0)
        within, index = (_lines(grid[held], lines, size) for lines in held)
        if within is None or index is None:  # irregular: the scale terms hold the truth, the member names the axis
            within = index = None
        yield ScaleMember(name, axis, exponent, index, rows_axis, within, buffer)


def _lines(factors: Array, lines: Array, size: int) -> torch.Tensor | None:
    """``[size, lines of each factor]``, ascending; None where factors have more or fewer of them than others."""
    length = int(lines.max(initial=0)) + 1
    pairs = distinct(factors * length + lines)
    counts = np.bincount(pairs // length, minlength=size)
    if (counts != counts[0]).any():
        return None
    return torch.from_numpy((pairs % length).reshape(size, -1))


def _positions(flat: Array, size: int) -> torch.Tensor | None:
    held = np.flatnonzero(flat >= 0)
    counts = np.bincount(flat[held], minlength=size)
    if (counts != counts[0]).any() or counts[0] == 0:
        return None
    return torch.from_numpy(held[np.argsort(flat[held], kind="stable")].reshape(size, -1))


def _name(members: tuple[ScaleMember, ...], taken: set[str]) -> str:
    growing = [m for m in members if m.exponent > 0 and not m.buffer] or list(members)
    base = growing[0].parameter.rpartition(".")[0] or growing[0].parameter
    name, k = base, 2
    while name in taken:
        name, k = f"{base}-{k}", k + 1
    taken.add(name)
    return name
