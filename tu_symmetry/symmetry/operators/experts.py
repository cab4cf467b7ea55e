"""Rows that are dealt out to experts with stacked weights, so that each expert has units of its own.

Which expert made a row, only numbers tell. What becomes of rows is followed as if all experts made all of them, along
an axis in front, for as long as operators treat each row by itself. Any other operator reads rows of which nothing
tells who made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_map_only

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Value, along, leaves
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.operators.indexing import meet
from tu_symmetry.symmetry.rules import Call, register_rule, unknown

GROUPED = ("_grouped_mm", "transformers.grouped_mm_fallback")
register_rule(*GROUPED, positions="read", traits=("spreads",))(unknown)
_SPELLED = (
    "silu gelu relu sigmoid tanh elu leaky_relu softplus mish quick_gelu hardtanh clamp clamp_min clamp_max square pow "
    "exp neg add sub mul div to _to_copy type_as contiguous clone alias detach dropout"
)
ENTRIES = frozenset(_SPELLED.split())
VIEWS = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"))
PIECES = frozenset(("chunk", "split", "split_with_sizes", "slice", "narrow"))
PRODUCTS = frozenset(("linear", "matmul", "bmm", "mm"))


@dataclass(frozen=True, eq=False)
class Dealt:
    """A tensor of which each position along the first axis was made by one of several experts.

    ``whole`` has the experts along an axis in front; what is dealt out alike has the same ``dealing``. The units of
    experts are those that ``index`` names, if it does.
    """

    whole: Value
    dealing: object
    index: Value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor itself."""
        return self.whole.shape[1:]


def gathered(ledger: Ledger, dealt: Dealt) -> Value:
    """The tensor without the experts: whoever made a row, it has to be the same."""
    value = views.drop(ledger, meet(ledger, dealt.whole, 0, dealt.index, "rows are dealt out to experts"), 0)
    return replace(value, parameter=None, depends=dealt.whole.depends, linear_in=dealt.whole.linear_in)


def dealt(call: Call, dealing: object, apply: Callable[[Call], list[Value]]) -> list[Dealt] | None:
    """What an operator makes of rows that are dealt out, or how it deals them out; None if it does neither."""
    given = [a for a in leaves(list(call.arguments.values())) if isinstance(a, Dealt)]
    if call.name in GROUPED:
        return _by_offsets(call, dealing, apply)
    if call.name == "index" and not given:
        return _by_number(call, dealing)
    if not given or any(d.dealing is not given[0].dealing for d in given) or not _by_rows(call):
        return None
    arguments = tree_map_only(Dealt, lambda d: d.whole, call.arguments)
    if call.name in PIECES:
        arguments["dim"] = call["dim"] % len(given[0].shape) + 1
    outputs = [(given[0].whole.shape[0], *shape) for shape in call.outputs]
    return [replace(given[0], whole=v) for v in apply(replace(call, arguments=arguments, outputs=outputs))]


def _by_rows(call: Call) -> bool:
    """Whether an operator makes each position along the first axis of those of its operands."""
    first, *others = call.arguments.values()
    given = [a.shape for a in (first, *others) if isinstance(a, Dealt)]
    if len({shape[0] for shape in (*given, *call.outputs) if shape}) > 1:
        return False
    if call.name in ENTRIES:
        return all(len(shape) == len(call.shape) for shape in given)
    if call.name in PIECES:
        return call["dim"] % len(first.shape) != 0
    if call.name in PRODUCTS:
        alone = isinstance(first, Dealt) and not any(isinstance(a, Dealt) for a in others)
        batched = all(len(a.shape) == len(call.shape) > 2 for a in (first, others[0]))
        return batched and call.name != "linear" if not alone else len(first.shape) == len(call.shape) > 1
    return call.name in VIEWS


def _by_offsets(call: Call, dealing: object, apply: Callable[[Call], list[Value]]) -> list[Dealt] | None:
    """Rows of one matrix by one matrix of several, which one is decided by offsets."""
    a, b, *_ = call.arguments.values()
    known = isinstance(b, Value) and isinstance(call.get("offs"), Value) and call.get("bias") is None
    if not known or (len(a.shape), len(b.shape)) != (2, 3):
        return None
    if not call["offs"].points:
        call.pin("offs", "offsets of experts")
    if isinstance(a, Dealt) and a.dealing is not dealing:
        a = gathered(call.ledger, a)
    rows = a.whole if isinstance(a, Dealt) else views.expand(call.ledger, a, (b.shape[0], *a.shape))
    product = replace(call.on(rows, b), operator="aten.bmm", outputs=[(b.shape[0], *call.shape)])
    return [Dealt(v, dealing, call["offs"]) for v in apply(product)]


def _by_number(call: Call, dealing: object) -> list[Dealt] | None:
    """One of several matrices for each row, which one is decided by a number."""
    value, (index, *more) = call["self"], call["indices"]
    known = call.constants["indices"][0] is not None or call.dtypes["indices"][0] == torch.bool or more
    weights = (value.sole or value.parameter) and value.ndim > 1
    if known or not weights or not isinstance(index, Value) or index.ndim != 1:
        return None
    for axis in range(1, value.ndim):
        if value.shape[axis] > 1:
            value = call.ledger.nest(value, axis, [0])
    laid = views.laid(value, [0, *range(2, value.ndim + 1)], value.ndim + 1)
    rows = tuple(along(c, 1, laid.ndim) for c in index.labels[0])
    laid = laid.with_axis(1, size=index.shape[0], label=rows, reason=index.reasons[0] or "indexed")
    return [Dealt(replace(laid, sole=value.sole or call.ledger.fresh(value)), dealing, index)]
