"""The table of rules: how the outputs of an operator are indexed and scaled, given its inputs.

A rule turns a :class:`Call` into a :class:`~tu_symmetry.symmetry.algebra.Value` for each output and makes its demands
through the call's ledger. An operator without a rule pins everything that it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from torch.utils._pytree import tree_map_only

from tu_symmetry.symmetry.algebra import Value, pinned_value
from tu_symmetry.symmetry.ledger import Ledger

Rule = Callable[["Call"], "Value | Sequence[Value]"]
R = TypeVar("R", bound=Rule)
Parity = Literal["pin", "follow", "odd", "even", "positive"]  # see `register_rule`
RULES: dict[str, Rule] = {}
SMALL = 1e-3  # a number below this that is added to a statistic is taken for a normalization's epsilon
GUARD = 1e-5  # and one below this to which a norm is clamped; if it is below INACTIVE, no factor in practice meets it
INACTIVE = 1e-9
POSITIONS: dict[str, str] = {}  # what a rule makes of tensors that hold positions; "pin" where nothing is said
TRAITS: dict[str, frozenset[str]] = {}
PARITIES: dict[str, Parity | Callable[[Call], Parity]] = {}  # what becomes of a change of sign
LINEAR: dict[
    str, bool | Callable[[Call], Value | Sequence[Value] | None]
] = {}  # whether linear maps of units pass, see `register_rule`
# What is said of an operator beside its rule; what is not said is not relied on.
TRAIT_NAMES = {
    "moves": "the entries of its one tensor stand at other places, some at several or at none (views, slices, expand)",
    "same": "of these: the same entries in the same order (casts and views, but no transposition and no slice)",
    "picks": "entries of its first tensor, found by positions (look-ups)",
    "combines": "integers and booleans enter as factors, terms or choices, never as positions",
    "injective": "entry by entry, ascending or descending throughout, without flat parts, in floating point as well",
    "distinct": "what differs along `dim` or `normalized_shape` still does (softmax); a tensor `bias` is added",
    "shifts": "sums and differences of two tensors, or of a tensor and a number",
    "spreads": "linear in each of its tensors, all of which it multiplies; a tensor named `bias` is added",
    "pools": "sums, means or extrema of entries (along an axis, over windows)",
    "statistic": "norms, deviations, means: what normalizations add their epsilon to",
    "of_statistics": "makes statistics of statistics (square root)",
    "fills": "every entry is one number, which `Value.fill` tells",
    "zeros": "that number is zero",
}


def register_rule(
    *operators: str,
    positions: Literal["pin", "keep", "read"] = "pin",
    traits: Collection[str] = (),
    signs: Parity | Callable[[Call], Parity] | None = None,
    linear: bool | Callable[[Call], Value | Sequence[Value] | None] | None = None,
) -> Callable[[R], R]:
    """Register a rule for one or more operators.

    Args:
        operators: names such as ``"aten.relu"`` or ``"mylib.swish"`` (namespace and name; in-place variants are
            covered too), also several of them in one text.
        positions: what becomes of a tensor whose entries are positions of hidden units (what ``argmax`` returns). By
            default the units are pinned; ``"keep"`` is for operators that only move or copy the entries of their one
            tensor; a rule with ``"read"`` looks at ``Value.points``.
        traits: what else is known of the operators, see ``TRAIT_NAMES``; what is not said is not relied on.
        signs: what becomes of factors -1 of entries. ``"follow"``: what the rule says of positive factors holds for
            them too, as it does of linear operators; ``"odd"``: f(-x) = -f(x), entry by entry; ``"even"``: f(-x) =
            f(x); ``"positive"``: the demands of ``"follow"``, and a result that never changes its sign (a deviation).
            By default no entry that the operator reads may change its sign, unless the operator ``"moves"``,
            ``"picks"`` or ``"spreads"``: then signs follow. A function tells it for each call.
        linear: whether the operator is linear in each of its tensors along every axis that the rule does not pin, so
            that linear maps of units pass; a function pins the axes on which it is not, or returns what stands in
            place of the rule's result. By default those that ``"move"``, ``"pick"`` or ``"spread"`` are, others pin all
            that they read.

    Raises:
        ValueError: for a trait that does not exist.

    Returns:
        A decorator for a function from a :class:`Call` to the output's value, or a list of values: for example
        ``lambda call: elementwise(call, homogeneous=True)``.
    """
    unheard = sorted(set(traits) - TRAIT_NAMES.keys())
    if unheard:
        raise ValueError(f"there are no traits {unheard}; known are {sorted(TRAIT_NAMES)}")

    def add(rule: R) -> R:
        for operator in " ".join(operators).split():
            name = operator if "." in operator else f"aten.{operator}"
            RULES[name], POSITIONS[name], TRAITS[name] = rule, positions, frozenset(traits)
            carries = bool({"moves", "picks", "spreads"} & set(traits))
            PARITIES[name] = signs or ("follow" if carries else "pin")
            LINEAR[name] = carries if linear is None else linear
        return rule

    return add


@dataclass
class Call:
    """One operator call of the traced graph."""

    ledger: Ledger  # where demands are made
    operator: str  # name, for example ``aten.relu``
    arguments: dict[str, Any]  # by the schema's names; tensors are :class:`Value`, all else is as in the graph
    outputs: list[tuple[int, ...]]  # shapes
    used: frozenset[int] = frozenset((0,))  # outputs that something reads; of ``select``, pieces that any call takes
    constants: dict[str, Any] = field(default_factory=dict)  # as ``arguments``: tensors that are known by value
    dtypes: dict[str, Any] = field(default_factory=dict)  # as ``arguments``: the types of tensors

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or the default where it is absent or None."""
        value = self.arguments.get(name, default)
        return default if value is None else value

    @property
    def name(self) -> str:
        """The operator's name without the namespace of PyTorch's own."""
        return self.operator.removeprefix("aten.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first output."""
        return self.outputs[0]

    @property
    def tensors(self) -> list[Value]:
        """All tensor arguments, lists flattened, in order."""
        lists = (a if isinstance(a, (list, tuple)) else (a,) for a in self.arguments.values())
        return [value for held in lists for value in held if isinstance(value, Value)]

    def axis(self, name: str = "dim", *, of: Value | None = None, default: int | None = None) -> int:
        """An axis argument, counted from the front."""
        axis = self.arguments.get(name, default)
        assert isinstance(axis, int), f"{self.operator} was called without {name}"
        return axis % max((of or self.tensors[0]).ndim, 1)

    def on(self, *values: Value, shape: Sequence[int] | None = None) -> Call:
        """The same call with these tensors as its only arguments (and another shape of its output)."""
        outputs = self.outputs if shape is None else [tuple(shape)]
        return replace(self, arguments={str(k): v for k, v in enumerate(values)}, outputs=outputs)

    def pin(self, name: str, reason: str) -> None:
        """Pin an argument, if it is a tensor."""
        if isinstance(value := self.arguments.get(name), Value):
            self.ledger.pin(value, reason)


def apply_rule(call: Call) -> Value | Sequence[Value]:
    """What the operator's rule says; where the ledger follows signs or linear maps, with what it says of them."""
    rule = RULES.get(call.operator, unknown)
    if call.ledger.linear:
        linear = LINEAR.get(call.operator, False)
        if not linear and "zeros" not in TRAITS.get(call.operator, ()):
            for value in call.tensors:
                call.ledger.pin(value, f"operator {call.operator} is not linear")
            return [pinned_value(shape, f"operator {call.operator} is not linear") for shape in call.outputs]
        found = linear(call) if callable(linear) else None
        return rule(call) if found is None else found
    if not call.ledger.signs:
        return rule(call)
    parity = PARITIES.get(call.operator, "pin")
    parity = parity if isinstance(parity, str) else parity(call)
    if parity == "follow":
        return rule(call)
    if parity == "positive":
        return tree_map_only(Value, lambda v: replace(v, scale=()), rule(call))
    given = call.tensors
    if parity == "pin":
        for value in given:
            call.ledger.pin_scale(value.scale)
    keep = {} if parity == "pin" else {"parameter": None}  # what a rule sets of a parameter holds for its signs as well
    bare = tree_map_only(Value, lambda v: replace(v, scale=(), **keep), call.arguments)
    found = rule(replace(call, arguments=bare))
    return tree_map_only(Value, lambda v: replace(v, scale=given[0].scale), found) if parity == "odd" else found


def pin_axes(call: Call, value: Value, axes: Iterable[int], reason: str) -> None:
    """Pin the units along some axes of a tensor."""
    for axis in axes:
        call.ledger.pin_label(value.labels[axis], reason)


def unknown(call: Call) -> Any:
    """Claim nothing: everything that the operator touches is pinned."""
    reason = f"operator {call.operator} has no rule"
    if call.operator not in call.ledger.unknown:
        call.ledger.unknown.append(call.operator)
    for value in call.tensors:
        call.ledger.pin(value, reason)
    values = [pinned_value(s, reason) for s in call.outputs]
    return values[0] if len(values) == 1 else values
