"""From a ledger's linear constraints on log-scales to scale and normalization groups.

:mod:`.scale_solver` leaves the log-scale of every tensor as a sum of free factors. Factors that multiply the same axes
of the same tensors with the same exponents form one group, oriented so that parameters grow with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog

from tu_symmetry.symmetry.algebra import ZERO, Array, among, distinct, distinct_rows, varies
from tu_symmetry.symmetry.groups import NormalizationGroup, ScaleGroup, ScaleMember, ScaleTerm, SignGroup, unique
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.scale_solver import ScaleSystem, Terms, tidy

Expanded = dict[str, Terms]  # the terms of each tensor's log-scale: exponent, the factor at each entry (ZERO for none)
Part = tuple[str, tuple[int, ...], float]  # what a factor multiplies: tensor, axes along which factors differ, exponent


def scale_groups(
    ledger: Ledger, order: list[str], shapes: Mapping[str, tuple[int, ...]], buffers: frozenset[str]
) -> tuple[tuple[ScaleGroup, ...], tuple[NormalizationGroup, ...], dict[str, tuple[ScaleTerm, ...]]]:
    """Scale groups, normalization groups, and the log-scale of every tensor in their factors."""
    system = ScaleSystem(ledger)
    held = [name for name in order if name in ledger.parameters]
    expanded = {name: system.expand(ledger.parameters[name].scale, len(shapes[name])) for name in held}
    epsilons = {f"epsilon {k}": system.expand(((1.0, v),), v.ndim) for k, v in enumerate(ledger.inexact)}
    idle = buffers | epsilons.keys()  # what meets an epsilon is followed as if it were one more buffer
    expanded = _with_normalizations(_without_redundant(expanded | epsilons, epsilons), idle)
    expanded = _without_redundant(expanded, epsilons)
    alike = _alike(expanded)
    inexact = [distinct(array) for name in epsilons for _, array in expanded.pop(name)]
    scales: list[_Family] = []
    normalizations: list[_Family] = []
    for family in _families(alike, epsilons, np.concatenate([np.empty(0, np.int64), *inexact])):
        exponents = [c for name, _, c in family.parts if name not in idle]
        if exponents:
            one_way = all(c < 0 for c in exponents) or all(c > 0 for c in exponents)
            (normalizations if one_way else scales).append(family._replace(flipped=max(exponents) < 0))
    terms_of = _numbered(expanded, [*scales, *normalizations], system.count)
    kinds = [ScaleGroup] * len(scales) + [NormalizationGroup] * len(normalizations)
    groups = list(_groups([*scales, *normalizations], terms_of, kinds, buffers))
    return tuple(groups[: len(scales)]), tuple(groups[len(scales) :]), terms_of  # type: ignore[arg-type]


def sign_groups(
    ledger: Ledger, order: list[str], shapes: Mapping[str, tuple[int, ...]], buffers: frozenset[str]
) -> tuple[tuple[SignGroup, ...], dict[str, tuple[ScaleTerm, ...]]]:
    """Sign groups of a ledger that follows signs, and the signs that multiply every tensor."""
    system = ScaleSystem(ledger)
    held = [name for name in order if name in ledger.parameters]
    expanded = {name: system.expand(ledger.parameters[name].scale, len(shapes[name])) for name in held}
    families = [
        family if any(axes for _, axes, _ in family.parts) else family._replace(variables=family.variables[:1])
        for family in _families(_alike(expanded), {}, np.empty(0, np.int64))
        if any(name not in buffers for name, _, _ in family.parts)
    ]  # two signs of the same whole tensors are one
    families = _independent(expanded, families, system.count)
    terms_of = _numbered(expanded, families, system.count)
    return tuple(_groups(families, terms_of, [SignGroup] * len(families), buffers)), terms_of  # type: ignore[arg-type]


def _independent(expanded: Expanded, families: Sequence[_Family], count: int) -> list[_Family]:
    """The families without single signs that do what all signs of some other families do together."""
    family_of = np.full(count, -1, dtype=np.int64)
    for k, family in enumerate(families):
        family_of[family.variables] = k
    vectors = [0] * len(families)  # what all signs of a family turn, as bits: for each tensor a constant and the rest
    position = 0
    for terms in expanded.values():
        constant, position = position, position + 1
        for axes in dict.fromkeys(varies(v) for _, v in terms):
            owners = [family_of[v].reshape(-1) for _, v in terms if varies(v) == axes]
            for k in distinct(np.concatenate(owners)).tolist():
                if k >= 0:
                    turned = np.bitwise_xor.reduce([own == k for own in owners])
                    rest = int.from_bytes(np.packbits(turned ^ turned[0]).tobytes(), "big")
                    vectors[k] ^= (int(turned[0]) << constant) | (rest << position)
            position += len(owners[0]) + 8
    basis: dict[int, int] = {}
    gone = set()
    for k in sorted(range(len(families)), key=lambda k: len(families[k].variables) == 1):
        vector = vectors[k]
        while vector and vector.bit_length() in basis:
            vector ^= basis[vector.bit_length()]
        if vector:
            basis[vector.bit_length()] = vector
        elif len(families[k].variables) == 1:
            gone.add(k)
    return [family for k, family in enumerate(families) if k not in gone]


class _Family(NamedTuple):
    """Factors that form one group, in the order in which they are met, and the parts that they multiply."""

    variables: Array
    parts: tuple[Part, ...]
    exact: bool
    flipped: bool = False


class _Alike(NamedTuple):
    """Free variables that multiply the same parts, in the order in which they are met, and the places of that."""

    parts: tuple[Part, ...]
    variables: Array
    met: Array

    @property
    def whole(self) -> bool:
        """Whether they multiply whole tensors only."""
        return all(axes == () for _, axes, _ in self.parts)


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


def _by_parts(alike: list[_Alike]) -> dict[tuple[Part, ...], Array]:
    """Variables by the set of parts that they multiply, a part that is multiplied twice counting once."""
    found: dict[tuple[Part, ...], list[Array]] = defaultdict(list)
    for kind in alike:
        found[tuple(sorted(set(kind.parts)))].append(kind.variables)
    return {parts: np.concatenate(variables) for parts, variables in found.items()}


def _without_redundant(expanded: Expanded, epsilons: Collection[str]) -> Expanded:
    """The log-scales without factors of whole tensors that change nothing, or what those of one axis do together."""
    alike = _alike(expanded)
    whole: dict[int, dict[str, float]] = {}
    for kind in alike:
        for v in kind.variables.tolist() if kind.whole else []:
            net: dict[str, float] = defaultdict(float)
            for name, _, c in kind.parts:
                full = all((a == v).all() for _, a in expanded[name] if (a == v).any())
                net[name] += c if full else np.nan
            whole[v] = {name: c for name, c in net.items() if c != 0}
    by_parts = _by_parts([kind for kind in alike if not kind.whole])

    def together(net: dict[str, float], shared: tuple[Part, ...], variables: Array) -> bool:
        names = [name for name, _, _ in shared]
        if set(names) != set(net) or len(names) != len(net):
            return False
        covers = all(any(among(a, variables).all() for c, a in expanded[name]) for name in names)
        return covers and len({c / net[name] for name, _, c in shared}) == 1

    acts = {v: tuple(item for item in net.items() if item[0] not in epsilons) for v, net in whole.items()}
    once = {acts[v]: v for v in sorted(whole, key=lambda v: len(whole[v]))}  # of several that do the same, one remains
    gone = [
        v
        for v, net in whole.items()
        if not net or once[acts[v]] != v or any(together(net, *other) for other in by_parts.items())
    ]
    if not gone:
        return expanded
    return {
        name: [(c, np.where(among(factors, np.array(gone)), ZERO, factors)) for c, factors in terms]
        for name, terms in expanded.items()
    }


def _with_normalizations(expanded: Expanded, buffers: frozenset[str]) -> Expanded:
    """The log-scales in a basis in which a combination of groups under which nothing shrinks is a factor of its own."""
    # a residual stream that a normalization reads, with biases on the branch: single factors trade off against others
    alike = _alike(expanded)
    if not any(kind.whole for kind in alike):
        return expanded
    members = list(_by_parts(alike).values())
    n = len(members)
    number = np.full(max(int(v.max()) for v in members) + 1, -1, dtype=np.int64)
    for k, variables in enumerate(members):
        number[variables] = k
    rows = np.array(list(_exponent_rows(expanded, number, n, buffers))).reshape(-1, n)
    rows = np.unique(rows, axis=0)
    for k, variables in enumerate(members):
        if len(variables) != 1 or not (rows[:, k] < 0).any() or not (rows[:, k] > 0).any():
            continue
        # the least combination (its positive and its negative part) that holds factor k once and shrinks nothing
        once = np.zeros((1, 2 * n))
        once[0, k], once[0, n + k] = 1.0, -1.0
        found = linprog(np.ones(2 * n), A_ub=-np.hstack([rows, -rows]), b_ub=np.zeros(len(rows)), A_eq=once, b_eq=[1.0])
        if not found.success:
            continue
        direction = np.round(found.x[:n] - found.x[n:], 9)
        others = {other: direction[other] for other in np.flatnonzero(direction).tolist() if other != k}
        redefined: Expanded = {}
        for name, terms in expanded.items():
            added = []
            for coefficient, array in terms:
                for other, weight in others.items():
                    hit = among(array, members[other])
                    if hit.any():
                        added.append((coefficient * weight, np.where(hit, variables[0], ZERO)))
            redefined[name] = tidy([*terms, *added])
        expanded = redefined
        rows = rows @ (np.eye(n) + np.outer(direction, np.eye(n)[k]) - np.outer(np.eye(n)[k], np.eye(n)[k]))
    return expanded


def _exponent_rows(
    expanded: Expanded, number: Array, count: int, buffers: frozenset[str]
) -> Iterator[NDArray[np.float64]]:
    """Exponents of every group, for each kind of entry of every parameter."""
    for name, terms in expanded.items():
        if name in buffers:
            continue
        total = np.zeros((1, count))
        for axes in dict.fromkeys(varies(v) for _, v in terms):
            own = [(c, v) for c, v in terms if varies(v) == axes]
            held = distinct_rows(np.stack([np.where(v == ZERO, -1, number[v]).reshape(-1) for _, v in own], axis=1))
            table = np.zeros((len(held), count))
            for column, (c, _) in enumerate(own):
                here = np.flatnonzero(held[:, column] >= 0)
                np.add.at(table, (here, held[here, column]), c)
            total = (total[:, None, :] + table[None]).reshape(-1, count)
        yield from total


def _families(alike: list[_Alike], apart: Mapping[str, Terms], inexact: Array) -> Iterator[_Family]:
    """Factors of one group: the same parts (those of the names ``apart`` do not count), and all exact or none."""
    families: dict[tuple[tuple[Part, ...], bool], list[Array]] = defaultdict(list)
    for parts, variables, met in alike:
        key = tuple(sorted({part for part in parts if part[0] not in apart}))
        rough = among(variables, inexact)
        for exact, own in ((True, ~rough), (False, rough)):
            if own.any():
                families[key, exact].append(np.stack([met[own], variables[own]]))
    ordered = {key: (pairs := np.hstack(pieces))[:, np.argsort(pairs[0])] for key, pieces in families.items()}
    for (parts, exact), (_, variables) in sorted(ordered.items(), key=lambda item: int(item[1][0, 0])):
        yield _Family(variables, parts, exact)


def _numbered(expanded: Expanded, families: Sequence[_Family], count: int) -> dict[str, tuple[ScaleTerm, ...]]:
    """The log-scale of every tensor in the factors of all groups, numbered one after the other, -1 for none."""
    number = np.full(count, -1, dtype=np.int64)
    flip = np.zeros(count, dtype=bool)
    start = 0
    for family in families:
        number[family.variables] = np.arange(start, start + len(family.variables))
        flip[family.variables] = family.flipped
        start += len(family.variables)
    terms_of = {}
    for name, terms in expanded.items():
        kept = []
        for c, v in terms:
            factors = number[v]
            for sign, own in ((-1, flip[v]), (1, ~flip[v])):
                if (factors[own] >= 0).any():
                    kept.append(ScaleTerm(float(sign * c), torch.from_numpy(np.where(own, factors, -1))))
        if kept:
            terms_of[name] = tuple(kept)
    return terms_of


def _groups(
    families: Sequence[_Family],
    terms_of: Mapping[str, tuple[ScaleTerm, ...]],
    kinds: Sequence[type[ScaleGroup] | type[SignGroup]],
    buffers: frozenset[str],
) -> Iterator[ScaleGroup | SignGroup]:
    """A group for each family."""
    starts = np.cumsum([0, *(len(family.variables) for family in families)])
    touched: dict[int, list[tuple[str, ScaleTerm]]] = defaultdict(list)
    for name, scale_terms in terms_of.items():
        for term in scale_terms:
            factors = term.index.numpy()
            for k in distinct(np.searchsorted(starts, factors[factors >= 0], side="right") - 1).tolist():
                touched[k].append((name, term))
    taken: set[str] = set()
    for k, family in enumerate(families):
        members = []
        for name, term in touched[k]:
            axis = max((axis for axis, size in enumerate(term.index.shape) if size > 1), default=None)
            members.append(ScaleMember(name, axis, term.exponent, name in buffers))
        first = next((m for m in members if m.exponent > 0 and not m.buffer), members[0])
        name = unique(first.parameter.rpartition(".")[0] or first.parameter, taken)
        taken.add(name)
        yield kinds[k](name, len(family.variables), tuple(members), family.exact)
