"""What the nodes of a traced graph say of themselves: operators, traits, outputs, and what depends on them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.symmetry.rules import TRAITS
from tu_symmetry.symmetry.running.weights import is_continuous


def outputs_of(node: torch.fx.Node) -> list[Any]:
    """What the traced pass made at a node, one for each output."""
    output = node.meta.get("val")
    return list(output) if isinstance(output, (tuple, list)) else [output]


def shapes_of(node: torch.fx.Node) -> list[tuple[int, ...]]:
    """The shapes of the outputs."""
    return [tuple(int(n) for n in o.shape) if isinstance(o, Tensor) else () for o in outputs_of(node)]


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names in the operator's schema."""
    given: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args):
            given[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            given[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            given[argument.name] = argument.default_value
    return given


def live_nodes(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    """The nodes that an output of the network, or what is kept of the pass in a real-valued buffer, depends on.

    A write in place counts where anything live reads the memory that it writes to, or that memory is such a buffer.
    """
    root: dict[torch.fx.Node, torch.fx.Node] = {}
    writers: list[torch.fx.Node] = []
    live: set[torch.fx.Node] = set()
    for node in graph.nodes:
        checks = "_assert" in str(node.target)  # stops a pass, or leaves it as it is (the arguments of a distribution)
        if node.op == "output" or (node.op == "call_function" and not checks and not makes_tensors(node)):
            live.add(node)  # a number that is read off a tensor decides where the pass goes
        if node.target is operator.getitem and node.args[0] in root:  # the parts of a split tensor are views too
            root[node] = root[node.args[0]]
        inputs = node.all_input_nodes
        if not isinstance(node.target, torch._ops.OpOverload) or not inputs:
            continue
        memory = root.get(inputs[0], inputs[0])
        if any(r.alias_info is not None for r in node.target._schema.returns):
            root[node] = memory
        if node.target._schema.is_mutable:
            writers.append(node)
            held = memory.meta.get("val")
            if memory.op == "placeholder" and isinstance(held, Tensor) and is_continuous(held):
                live.add(node)
    before = 0
    while before < len(live):
        before = len(live)
        for node in reversed(graph.nodes):
            if node in live:
                live.update(node.all_input_nodes)
        read = {root.get(node, node) for node in live}
        live.update(writer for writer in writers if root.get(writer, writer) in read)
    return frozenset(live)


def makes_tensors(node: torch.fx.Node) -> bool:
    """Whether all outputs are tensors, and none is a number that was read off one."""
    return all(isinstance(t, Tensor) for t in outputs_of(node))


def traits_of(node: torch.fx.Node) -> frozenset[str]:
    """What is known of the operator that a node calls; nothing of one with arguments that make it another one."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return frozenset()
    given = arguments_of(node)
    if given.get("train") or given.get("negative_slope", 1) == 0:  # a dropout that drops, a leaky ReLU that is a ReLU
        return frozenset()
    return TRAITS.get(rule_name_of(node.target), frozenset())


def rule_name_of(target: Any) -> str:
    """The name that a rule is registered under: that of an operator in place is its name without the underscore."""
    name = target._schema.name.replace("::", ".")
    return name[:-1] if writes(target) and name.endswith("_") else name


def squared(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose entries a node squares, if sums and means along axes are all that reads the squares."""
    name = rule_name_of(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""
    first, *others = (*node.args, None, None)
    twice = (
        (name == "aten.pow" and others[0] == 2) or name == "aten.square" or (name == "aten.mul" and others[0] is first)
    )
    summed = all(
        isinstance(user.target, torch._ops.OpOverload) and rule_name_of(user.target) in ("aten.sum", "aten.mean")
        for user in node.users
    )
    return first if twice and summed and isinstance(first, torch.fx.Node) and not writes(node.target) else None


def sum_of_squares(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node of whose entries a node sums (or averages) the squares."""
    summed = rule_name_of(node.target) in ("aten.sum", "aten.mean") if node.args else False
    return squared(node.args[0]) if summed and isinstance(node.args[0], torch.fx.Node) else None


def centered(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node of whose entries a node subtracts their mean along the last axis."""
    if not isinstance(node.target, torch._ops.OpOverload) or rule_name_of(node.target) != "aten.sub":
        return None
    source, mean = node.args[:2]
    if not isinstance(source, torch.fx.Node) or not isinstance(mean, torch.fx.Node) or node.kwargs.get("alpha", 1) != 1:
        return None
    if mean.target is not torch.ops.aten.mean.dim or mean.args[0] is not source or writes(node.target):
        return None
    given, ndim = arguments_of(mean), source.meta["val"].ndim
    return source if given["keepdim"] and ndim and given["dim"] in ([-1], [ndim - 1]) else None


def centers(node: torch.fx.Node) -> bool:
    """Whether a node is a mean that is subtracted alone from what it is a mean of."""
    return node.target is torch.ops.aten.mean.dim and bool(node.users) and all(map(centered, node.users))


def writes(target: Any) -> bool:
    """Whether an operator writes to its first argument."""
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def enters_as_data(node: torch.fx.Node) -> bool:
    """Whether an integer or boolean tensor enters as a factor, a term or a choice (a pruning mask), never as an index.

    A mask of minus infinity belongs to the architecture: it tells which positions of an attention are seen.
    """

    def as_data(user: torch.fx.Node) -> bool:
        if user.target is operator.getitem:
            return enters_as_data(user)
        infinite = any(isinstance(a, float) and a == -math.inf for a in (*user.args, *user.kwargs.values()))
        if infinite or not traits_of(user) & {"moves", "combines"}:
            return False
        whole = any(isinstance(t, Tensor) and not is_continuous(t) for t in outputs_of(user))
        return not whole or enters_as_data(user)

    return bool(node.users) and all(map(as_data, node.users))


def finds_positions(node: torch.fx.Node) -> bool:
    """Whether an operator returns positions that it finds by comparing numbers."""
    made = (t for t in outputs_of(node) if isinstance(t, Tensor))
    counts = any(not is_continuous(t) and t.dtype != torch.bool for t in made)
    read = (n.meta.get("val") for n in node.all_input_nodes)
    return counts and any(isinstance(t, Tensor) and is_continuous(t) for t in read)


def counted(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """The nodes that count numbers in ascending order, for grouped products alone, by what they count."""
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        chain: list[torch.fx.Node] = []
        source: Any = arguments_of(node).get("offs") if isinstance(node.target, torch._ops.OpOverload) else None
        for name in ("cumsum", "histc", "to"):
            alone = isinstance(source, torch.fx.Node) and len({user.target for user in source.users}) == 1
            if (
                alone
                and isinstance(source.target, torch._ops.OpOverload)
                and rule_name_of(source.target) == f"aten.{name}"
            ):
                chain.append(source)
                source = source.args[0]
        if len(chain) > 1 and source.target is operator.getitem and source.args[1] == 0:
            size = chain[0].meta["val"].shape[0]
            if rule_name_of(source.args[0].target) == "aten.sort" and chain[1].args[1:] == (size, 0, size - 1):
                found |= dict.fromkeys(chain, source)
    return found


def keeps_digits(node: torch.fx.Node, given: Tensor) -> bool:
    """Whether the first output keeps all digits of an operand: numbers that are cut to fewer may become equal."""
    held = [t for t in outputs_of(node) if isinstance(t, Tensor)][:1]
    return all(is_continuous(t) and t.dtype.itemsize >= given.dtype.itemsize for t in held)


def outputs_read(node: torch.fx.Node) -> frozenset[int]:
    """Positions of the outputs that something reads; for a piece, those of all pieces of what it is taken from."""
    if node.target is torch.ops.aten.select.int:
        source, axis, _ = node.args
        assert isinstance(source, torch.fx.Node)
        pieces = (u.args for u in source.users if u.target is node.target)
        size = source.meta["val"].shape[axis]
        return frozenset(k % size for _, a, k in pieces if a == axis and isinstance(k, int))
    positions = (u.args[1] for u in node.users if u.target is operator.getitem and u.users)
    return frozenset(p for p in positions if isinstance(p, int)) or frozenset((0,))
