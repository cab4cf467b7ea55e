"""The ledger: everything that the operators of one network demand of its hidden units and of its scales.

The rules write it while the traced network is walked through once; :mod:`.extraction` then reads the demands on units,
and :mod:`.scale_groups` those on scales. Nothing is ever taken back: more demands can only mean fewer symmetries.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from tu_symmetry.symmetry.algebra import (
    Array,
    Label,
    Term,
    Value,
    along,
    among,
    determines,
    distinct,
    distinct_rows,
    merge_fixed,
    nested_in,
    tighten,
    varies,
)

Labels = Sequence[Label]
Nesting = dict[int, tuple[int, ...]]  # axis of a parameter to the axes that it is nested in, outermost first


class Binding(NamedTuple):
    """Units ``[n]`` that stand for several at once (a flattened axis), and for each factor units or codes ``[n]``."""

    units: Array
    parts: Label


class Mark(NamedTuple):
    """Units of a component that are told apart by what they meet, which ``tags`` (broadcast against it) tell."""

    component: Array
    tags: Array
    reason: str


class Seen(NamedTuple):
    """The label of one axis of a tensor that exists, which a symmetry maps onto itself, and those of all its axes."""

    label: Label
    axis: int
    others: tuple[Label, ...]


@dataclass(eq=False)
class Ledger:
    """The demands on units and scales, and the counters that number them.

    It follows one ``kind`` of maps of units: permutations with positive ``"scales"``; with ``"signs"``, log-scales
    being exponents of -1, which count modulo 2; or ``"linear"`` maps, which all but linear operators forbid.
    """

    kind: Literal["scales", "signs", "linear"] = "scales"
    units: int = 0
    variables: int = 1
    places: int = 1 << 32  # the next code of a fixed position that is like no other
    ties: list[tuple[Array, Array]] = field(default_factory=list)  # units that are one unit
    bindings: list[Binding] = field(default_factory=list)
    pins: list[tuple[Array, str]] = field(default_factory=list)  # units that stay where they are, and why
    marks: list[Mark] = field(default_factory=list)
    orders: list[tuple[Array, Array]] = field(default_factory=list)  # rows that stand in the order of other units
    nestings: list[tuple[Array, Array]] = field(default_factory=list)  # units, and blocks that these alone tell
    seen: list[Seen] = field(default_factory=list)
    constraints: list[tuple[Term, ...]] = field(default_factory=list)  # sums of scale terms that vanish
    inexact: list[Array] = field(default_factory=list)  # scales that meet an epsilon
    parameters: dict[str, Value] = field(default_factory=dict)  # those (and buffers) that were met
    used: set[str] = field(default_factory=set)  # those whose labels others have read: these can no longer be replaced
    unknown: list[str] = field(default_factory=list)  # operators without a rule
    step: int = 0  # number of the operator at work, the same in every walk through one network
    turned: frozenset[int] = frozenset()  # steps that nest the other way round, see `nested_order`
    nested: Mapping[str, Nesting] = field(default_factory=dict)  # parameters that are nested from the start
    wishes: dict[str, Nesting] = field(default_factory=dict)  # what `nested` should have held
    choices: list[tuple[int, Array]] = field(default_factory=list)  # steps that nested by a guess, and their blocks
    regrets: list[Array] = field(default_factory=list)  # units of blocks whose contents had to be made alike
    shared: list[Array] = field(default_factory=list)  # units of blocks whose contents met units that all blocks share
    met: dict[tuple[int, str], Value] = field(default_factory=dict)  # tensors that a gain multiplied, or "" a mean left
    partly: frozenset[str] = frozenset()  # parameters of which the example inputs read a part only
    _seen_ids: set[tuple[int, ...]] = field(default_factory=set)
    _origins: list[tuple[int, int, str, int]] = field(default_factory=list)

    @property
    def signs(self) -> bool:
        """Whether log-scales are exponents of -1."""
        return self.kind == "signs"

    @property
    def linear(self) -> bool:
        """Whether units are mixed by linear maps."""
        return self.kind == "linear"

    # -- creating -----------------------------------------------------------------------------------------------

    def fresh_units(self, count: int) -> Array:
        """New hidden units, numbered on."""
        first, self.units = self.units, self.units + count
        return np.arange(first, first + count, dtype=np.int64)

    def fresh_places(self, count: int) -> Array:
        """Codes of fixed positions that are unlike each other and all others."""
        first, self.places = self.places, self.places + count
        return -1 - np.arange(first, first + count, dtype=np.int64)

    def fresh_variables(self, shape: tuple[int, ...]) -> Array:
        """New scale variables in a given shape."""
        first, self.variables = self.variables, self.variables + math.prod(shape)
        return np.arange(first, self.variables, dtype=np.int64).reshape(shape)

    def parameter(self, name: str, shape: tuple[int, ...], *, scales: bool = True) -> Value:
        """A parameter or buffer: free units and, where it ``scales``, a free log-scale on each of its axes."""
        if name not in self.parameters:
            ndim = len(shape)
            frames = [tuple(n if k == j else 1 for k in range(ndim)) for j, n in enumerate(shape)]
            labels = tuple((self._units_of(name, k, f),) if shape[k] > 1 else () for k, f in enumerate(frames))
            scale = tuple((1.0, self.fresh_variables(f)) for f in frames if math.prod(f) > 1)
            scale = scale or ((1.0, self.fresh_variables((1,) * ndim)),)
            self.parameters[name] = Value(shape, labels, ("",) * ndim, scale if scales else (), name)
            for axis, outer in self.nested.get(name, {}).items():
                self.nest(self.parameters[name], axis, outer)
        return self.parameters[name]

    def fresh(self, value: Value) -> bool:
        """Whether a value is a parameter that nothing has read yet."""
        return value.parameter is not None and value.parameter not in self.used

    def relabel(self, value: Value, axis: int, label: Label, reason: str = "") -> Value:
        """Give a fresh parameter's axis a label of the caller's; of any other tensor, tie the old one to it."""
        if not self.fresh(value):
            self.unify(value.labels[axis], label, value.reasons[axis], reason)
            return value
        return self._set(value.with_axis(axis, label=label, reason=reason))

    def rescale(self, value: Value, scale: tuple[Term, ...]) -> Value:
        """Set the log-scale of a fresh parameter; of any other tensor, equate the two."""
        if not self.fresh(value):
            self.equate(value.scale, scale)
            return value
        return self._set(replace(value, scale=scale))

    def _set(self, value: Value) -> Value:
        assert value.parameter is not None
        self.parameters[value.parameter] = value
        return value

    # -- demands on units ---------------------------------------------------------------------------------------

    def observe(self, value: Value, *, nested: bool = True) -> None:
        """Record that this tensor exists: a symmetry has to map its labels onto themselves."""
        for axis, label in enumerate(value.labels):
            if not nested and nested_in(label, axis):
                continue
            key = (axis, *(id(c) for c in label))
            if label and key not in self._seen_ids:
                self._seen_ids.add(key)
                self.seen.append(Seen(label, axis, value.labels))

    def tie(self, x: Array, y: Array) -> None:
        """Make one unit of each two that stand at the same place of two arrays."""
        both = (x >= 0) & (y >= 0)
        if both.any():
            self.ties.append((x[both], y[both]))

    def pin_label(self, label: Iterable[Array], reason: str, axis: int | None = None) -> None:
        """Fix the units of a label where they are; those nested in another axis than its own within their blocks."""
        for component in label:
            units = component[component >= 0]
            if not units.size:
                continue
            if axis is not None and nested_in((component,), axis):
                positions = np.arange(component.shape[axis], dtype=np.int64)
                self.marks.append(Mark(component, along(positions, axis, component.ndim), reason))
            else:
                self.pins.append((units, reason))

    def pin(self, value: Value, reason: str) -> None:
        """Forbid any symmetry, of units and of scales, on a tensor (and on the units that its entries name)."""
        for label in (*value.labels, value.points):
            self.pin_label(label, reason)
        self.pin_scale(value.scale)

    def forget(self, value: Value, axis: int, reason: str) -> None:
        """Fix units that nothing else will read: those that have met no other units yet."""
        met = [u.reshape(-1) for tie in self.ties for u in tie] + [u.reshape(-1) for u, _ in self.bindings]
        for component in value.labels[axis]:
            units = component[component >= 0]
            if units.size and not (met and among(units, np.concatenate(met)).any()):
                self.pins.append((units, reason))

    def unify(
        self, a: Label, b: Label, reason_a: str = "", reason_b: str = "", axis: int | None = None, others: Labels = ()
    ) -> Label:
        """Demand that two axes be indexed by the same units; returns the label to go on with.

        Units that meet are tied. A unit that meets a fixed position is told apart by it (or pinned, where its place in
        a factored axis says which one it is). One component that meets several is bound to them, entry by entry. Where
        the ``axis`` and the labels of all axes of the frame are known, units that blocks share are told apart.
        """
        if a is b or (len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))):
            return a
        if not a or not b:
            self.pin_label(a or b, (reason_b if a else reason_a) or "meets a fixed axis", axis)
            return ()
        if axis is not None and others and len(a) == len(b) == 1:
            shared = self.share(a, b, axis, others) or self.share(b, a, axis, others)
            if shared:
                return shared
            inner = self._common(a, b, axis)
            if inner and self.share(a, inner, axis, others):
                return self.unify(inner, b, reason_a, reason_b, axis, others)
        arrays = [np.asarray(z) for z in np.broadcast_arrays(*a, *b)]
        left, right = arrays[: len(a)], arrays[len(a) :]
        if len(a) == len(b) == 1:
            return self._unify_single(a, b, left[0], right[0], reason_a or reason_b)
        if len(a) == len(b):
            return self._unify_factors(a, b, left, right, reason_a or reason_b)
        if len(a) > 1 and len(b) > 1:
            self.pin_label((*a, *b), "factored in two ways")
            return ()
        single, several = (left[0], right) if len(a) == 1 else (right[0], left)
        met = single < 0
        if len(distinct(single[met])) > 1:
            self.pin_label((*a, *b), "meets fixed positions")
            return ()
        self.pin_label((z[met] for z in several), "meets a fixed position")
        self.bindings.append(Binding(single[~met], tuple(z[~met] for z in several)))
        return b if len(a) == 1 else a

    def _unify_factors(self, a: Label, b: Label, left: list[Array], right: list[Array], reason: str) -> Label:
        """Two labels of as many components, broadcast to ``left`` and ``right``: their factors are unified."""
        right = _in_order(right, left)
        merged: list[Array] = []
        for x, y in zip(left, right, strict=True):
            self.tie(x, y)
            if ((x >= 0).all() and (y < 0).all()) or ((x < 0).all() and (y >= 0).all()):  # copies meet samples
                self.pin_label((x, y), reason or "meets a fixed axis")
                merged.append(tighten(np.minimum(x, y)))
                continue
            clash = (x != y) & ((x < 0) | (y < 0))
            if clash.any():
                self.pin_label((z[clash] for z in (*left, *right)), "meets another position of a factored axis")
            merged.append(tighten(merge_fixed(x, y)) if clash.any() else x)
        if all(x is m for x, m in zip(left, merged, strict=True)):
            return a if sum(z.size for z in a) <= sum(z.size for z in b) else b
        return tuple(merged)

    def _unify_single(self, a: Label, b: Label, x: Array, y: Array, reason: str) -> Label:
        """Two labels of one component each, broadcast to ``x`` and ``y``: what meets constants is told apart."""
        both = (x >= 0) & (y >= 0)
        self.tie(x, y)
        if both.all():
            return self._finer(a, b, x, y)
        merged = merge_fixed(x, y)
        tags = np.where(both, 1, np.where(x >= 0, y, x))
        here = merged >= 0
        if here.any() and (tags[here] != tags[here][0]).any():
            rows = np.stack([merged[here], tags[here]], axis=1)
            if len(distinct_rows(rows)) > len(distinct(merged[here])):  # a unit that meets several: a new one for each
                rows, inverse = np.unique(rows, axis=0, return_inverse=True)
                units = self.fresh_units(len(rows))[inverse.reshape(-1)]
                self.ties.append((units, merged[here]))
                merged = merged.copy()
                merged[here] = units
            self.marks.append(Mark(np.where(here, merged, -1), tags, reason or "meets a fixed position"))
        for label, whole in ((a, x), (b, y)):
            if np.array_equal(merged, whole):
                return label
        return (tighten(merged),)

    def _finer(self, a: Label, b: Label, x: Array, y: Array) -> Label:
        """The one of two labels whose units were tied that tells apart what the other does (or a new one)."""
        if a[0].size != b[0].size:
            return a if a[0].size < b[0].size else b
        count_a, count_b = len(distinct(a[0])), len(distinct(b[0]))
        if count_a == a[0].size:
            return a
        if count_b == b[0].size:
            return b
        rows, inverse = np.unique(np.stack([x.reshape(-1), y.reshape(-1)], axis=1), axis=0, return_inverse=True)
        if len(rows) in (count_a, count_b):
            return a if len(rows) == count_a else b
        units = self.fresh_units(len(rows))
        self.ties += [(units, rows[:, 0]), (units, rows[:, 1])]
        return (tighten(units[inverse.reshape(-1)].reshape(x.shape)),)

    def share(self, own: Label, common: Label, axis: int, others: Labels) -> Label:
        """Bind units of which each block has its own to pairs of a common unit and the block; () if not so.

        ``[[0, 1], [2, 3]]`` in blocks ``[[8], [9]]`` that meets ``[[5, 6]]``: ``0 = (5, 8), 1 = (6, 8), 2 = (5, 9)``...
        Ties of 0 and 2 to 5 would make one unit of them, and blocks could move no more.
        """
        outer = [k for k in varies(own[0]) if k != axis]
        if not outer or any(not others[k] for k in outer):
            return ()
        if (own[0] < 0).any() or (common[0] < 0).any() or len(distinct(own[0])) == len(distinct(common[0])):
            return ()
        blocks = (c for k in outer for c in others[k] if determines(own[0], c))
        parts = self._bind(own[0], common[0], *blocks, one_to_one=True)
        self.shared += parts[1:]
        return common if parts else ()

    def place_in_blocks(self, units: Array, axis: int, labels: Labels) -> bool:
        """Fix units where they are in their blocks, which may still move whole; False where there are no blocks."""
        outer = [k for k in varies(units) if k != axis]
        blocks = [[c for c in labels[k] if determines(units, c)] for k in outer]
        if not outer or any(len(cs) != 1 or (cs[0] < 0).any() for cs in blocks) or (units < 0).any():
            return False
        positions = along(-1 - np.arange(units.shape[axis], dtype=np.int64), axis, units.ndim)
        return bool(self._bind(units, positions, *(cs[0] for cs in blocks)))

    def _bind(self, units: Array, *factors: Array, one_to_one: bool = False) -> Label:
        """Bind each unit to what the factors hold where it stands; () if that differs, or is not its own."""
        flat, *held = (z.reshape(-1) for z in np.broadcast_arrays(units, *factors))
        _, first = np.unique(flat, return_index=True)
        if len(distinct_rows(np.stack((flat, *held), axis=1))) != len(first):
            return ()
        if one_to_one and len(distinct_rows(np.stack(held, axis=1))) != len(first):
            return ()
        parts = tuple(z[first] for z in held)
        self.bindings.append(Binding(flat[first], parts))
        return parts

    def _common(self, a: Label, b: Label, axis: int) -> Label:
        """New units for two labels to share that are nested in different axes; () where it is one axis, or none."""
        outer = [set(varies(label[0])) - {axis} for label in (a, b)]
        if outer[0] <= outer[1] or outer[1] <= outer[0]:
            return ()
        kept = (outer[0] & outer[1]) | {axis}
        wide = np.broadcast_shapes(a[0].shape, b[0].shape)
        shape = tuple(n if k in kept else 1 for k, n in enumerate(wide))
        return (self.fresh_units(math.prod(shape)).reshape(shape),)

    # -- which of two axes is nested in the other -----------------------------------------------------------------

    def nest(self, value: Value, axis: int, outer: Sequence[int], *, guessed: bool = False) -> Value:
        """Give a parameter's axis units and scales of its own for each position along (the last of) the outer axes.

        That can be done until something has read the parameter. Later on it is noted as a wish for another walk through
        the network. ``guessed`` says that it could as well be the other way round.
        """
        names = [self._origin(value.labels[k]) for k in (axis, *outer)]
        held = [found for found in names if found is not None]
        if len(held) < len(names) or len({name for name, _ in held}) > 1 or len(set(held)) < len(held):
            return value
        if guessed:
            self.choices.append((self.step, value.labels[outer[-1]][0]))
        if not self.fresh(value):
            if any(value.labels[axis][0].shape[k] == 1 for k in outer[-1:]):
                name, own = held[0]
                self.wishes[name] = {**self.wishes.get(name, {}), own: tuple(k for _, k in held[1:])}
            return value
        units_shape, shape = (
            tuple(n if k == axis or k in along_too else 1 for k, n in enumerate(value.shape))
            for along_too in (outer[-1:], outer)
        )
        value = self.relabel(value, axis, (self._units_of(held[0][0], axis, units_shape),))
        if not value.scale:
            return value
        self.pin_scale(tuple(t for t in value.scale if set(varies(t[1])) <= set(outer)))
        terms = [(c, v) for c, v in value.scale if v.shape[axis] == 1]
        return self.rescale(value, (*terms, (1.0, self.fresh_variables(shape))))

    def _units_of(self, name: str, axis: int, shape: tuple[int, ...]) -> Array:
        units = self.fresh_units(math.prod(shape))
        self._origins.append((self.units - len(units), self.units, name, axis))
        return units.reshape(shape)

    def _origin(self, label: Label) -> tuple[str, int] | None:
        """The parameter and its axis that the units of a label come from, if these are all."""
        if len(label) != 1 or not (label[0] >= 0).all():
            return None
        at = bisect(self._origins, int(label[0].min()), key=lambda o: o[0]) - 1
        return None if at < 0 or label[0].max() >= self._origins[at][1] else self._origins[at][2:]

    def nested_order(self, axes: Sequence[int]) -> list[int]:
        """Axes that hold units of their own at each pair of positions, outermost first; which is which is a guess."""
        return list(axes) if self.step not in self.turned else list(axes)[::-1]

    def regret(self, component: Array, axis: int, outer: Label) -> None:
        """Record that a component has to be the same all along an axis (of label ``outer``) that it is nested in."""
        if component.shape[axis] > 1 and (component >= 0).any():
            self.regrets += [c[c >= 0] for c in outer if (c >= 0).any()]

    # -- demands on scales --------------------------------------------------------------------------------------

    def constant_along(self, variable: Array, axis: int) -> Array:
        """Demand that a scale variable be the same all along an axis; returns it with size one there."""
        if variable.shape[axis] == 1:
            return variable
        first = variable.take([0], axis)
        self.constraints.append(((1.0, variable), (-1.0, first)))
        return first

    def alike_along(self, value: Value, *axes: int) -> Value:
        """Demand that the log-scale of a tensor be the same all along some axes; returns it with size one there."""
        terms = value.scale
        for axis in axes:
            terms = tuple((c, self.constant_along(v, axis)) for c, v in terms)
        return replace(value, scale=terms)

    def unscaled(self, value: Value) -> Value:
        """Demand that the log-scale of a tensor be zero; returns it without one."""
        self.pin_scale(value.scale)
        return replace(value, scale=())

    def keeps(self, number: float) -> bool:
        """Whether a number is the same whatever the factors of its entries are."""
        return number == 0 or (math.isinf(number) and not self.signs)

    def approximate(self, value: Value) -> None:
        """Record that an epsilon is added to what the log-scale of a tensor multiplies."""
        self.inexact += [v for _, v in value.scale]

    def meet(self, value: Value, gain: str = "") -> None:
        """Record that a gain multiplies a tensor along its last axis, or (without one) that a mean is subtracted."""
        self.met[len(self.met), gain] = replace(value, labels=(*[()] * (value.ndim - 1), value.labels[-1]))

    def pin_scale(self, scale: tuple[Term, ...]) -> None:
        """Demand that a log-scale be zero."""
        if scale:
            self.constraints.append(scale)

    def equate(self, a: tuple[Term, ...], b: tuple[Term, ...]) -> None:
        """Demand that two log-scales (terms in the same frame) be equal."""
        if a is not b:
            self.pin_scale((*a, *((-c, v) for c, v in b)))

    def merge(self, scale: tuple[Term, ...]) -> tuple[Term, ...]:
        """Replace sums of terms that vary along the same axes by one new variable each."""
        merged: list[Term] = []
        for shape in dict.fromkeys(v.shape for _, v in scale):
            terms = tuple(t for t in scale if t[1].shape == shape)
            if len(terms) > 1 and terms[0][1].ndim > 0:
                variable = self.fresh_variables(shape)
                self.equate(((1.0, variable),), terms)
                merged.append((1.0, variable))
            else:
                merged += terms
        return tuple(merged)


def _in_order(components: list[Array], like: list[Array]) -> list[Array]:
    if all(x.shape == y.shape and np.array_equal(x, y) for x, y in zip(components, like, strict=True)):
        return components
    found = {_parts(component): component for component in components}
    order = [_parts(component) for component in like]
    return [found[key] for key in order] if len(found) == len(order) and set(found) == set(order) else components


def _parts(component: Array) -> bytes:
    _, first, inverse = np.unique(component, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)].astype(np.int64).tobytes()
