"""Walking through traced passes: each operator's rule makes its demands, and a ledger writes them down."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tu_symmetry.symmetry import distinct, nodes, views
from tu_symmetry.symmetry.algebra import Array, Label, Proof, Value, along, among, kinds, leaves, pinned_value, units_of
from tu_symmetry.symmetry.extraction.classes import joined
from tu_symmetry.symmetry.ledger import Ledger, Mark, Nesting
from tu_symmetry.symmetry.nodes import arguments_of, finds_positions, rule_name_of, shapes_of, writes
from tu_symmetry.symmetry.operators import experts
from tu_symmetry.symmetry.operators.experts import Dealt
from tu_symmetry.symmetry.operators.indexing import picked
from tu_symmetry.symmetry.operators.scattering import overwritten
from tu_symmetry.symmetry.reading import Reading, pin_unseen
from tu_symmetry.symmetry.rules import POSITIONS, TRAITS, Call, apply_rule, unknown
from tu_symmetry.symmetry.running.weights import is_continuous
from tu_symmetry.symmetry.sizes import FOLLOWS, NOTHING, Following
from tu_symmetry.symmetry.tracing import Parameter, Trace

Node = torch.fx.Node
_CUTS = frozenset(("slice", "narrow", "select", "unbind", "chunk", "split", "split_with_sizes", "tensor_split"))
OVERWRITTEN = "written to in place through a view"


@dataclass(frozen=True)
class Nestings:
    """How one walk through a network nests axes, where that is open: ``turned`` steps take the first for the innermost.

    What regrets such a guess, or wishes that a parameter had been ``nested`` when it was too late for it, is noted by
    the ledger: the network is walked through once more with the other nesting.
    """

    turned: frozenset[int] = frozenset()
    nested: Mapping[str, Nesting] = field(default_factory=dict)

    def reconsidered(self, ledger: Ledger) -> Nestings:
        """The nestings to try after a walk with these: the same ones where nothing was regretted or wished for."""
        nested = {**self.nested, **ledger.wishes}
        if not ledger.regrets or not ledger.choices:
            return Nestings(self.turned, nested)
        _, of = joined(ledger.units, ledger.ties)
        regretted = np.concatenate([of[units.reshape(-1)] for units in ledger.regrets])
        steps = [(step, of[blocks.reshape(-1)]) for step, blocks in ledger.choices]
        if not any(among(blocks, regretted).any() for _, blocks in steps):
            return Nestings(self.turned, nested)
        met = np.concatenate([regretted, *(of[units[units >= 0]] for units in ledger.shared)])
        return Nestings(self.turned | {step for step, blocks in steps if among(blocks, met).any()}, nested)


def interpret(
    traces: Sequence[Trace], nestings: Nestings, kind: Literal["scales", "signs", "linear"] = "scales"
) -> Ledger:
    """Run the rules over traced passes, which make their demands on the same units, those of the parameters.

    What they follow beside permutations, :class:`~.ledger.Ledger` says.
    """
    ledger = Ledger(kind, turned=nestings.turned, nested=nestings.nested)
    readings: dict[int, list[Reading]] = {}
    for traced in traces:
        reading = Reading()
        readings.setdefault(traced.example, []).append(reading)
        for result in _Interpreter(ledger, traced.module, reading, traced.following).run(traced.inputs):
            if isinstance(result, Value):
                ledger.pin(result, f"output of the network{traced.flags and f' with {traced.flags}'}")
    ledger.partly = frozenset[str]().union(*(pin_unseen(ledger, passes) for passes in readings.values()))
    for name, value in ledger.parameters.items():
        # what operators nested they have seen in blocks; of what was nested from the start, they may have seen views
        ledger.observe(value, nested=name in nestings.nested)
    return ledger


class _Interpreter:
    def __init__(
        self, ledger: Ledger, module: torch.fx.GraphModule, reading: Reading, following: Following = NOTHING
    ) -> None:
        self.ledger, self.module, self.reading, self.following = ledger, module, reading, following
        self.env: dict[Node, Any] = {}  # what stands for a node: values, a Parameter, a constant tensor, or a number
        self.root: dict[Node, Node] = {}  # for a view the node whose memory it shares
        self.order = {node: k for k, node in enumerate(module.graph.nodes)}
        self.compares = any(map(finds_positions, module.graph.nodes))
        self.counted = nodes.counted(module.graph)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        *before, output = self.module.graph.nodes
        live = nodes.live_nodes(self.module.graph)
        self.env.update(zip((node for node in before if node.op == "placeholder"), inputs, strict=False))
        for node in before:
            if node in live and node.op == "get_attr":
                self.env[node] = getattr(self.module, str(node.target), None)
            elif node in live and node.op == "call_function":
                self._call(node)
        self._read(output)
        return [self._value(self.env[r]) if isinstance(r, Node) else r for r in tree_leaves(output.args[0])]

    # -- what stands for tensors --------------------------------------------------------------------------------

    def _value(self, held: Any) -> Any:
        """What a rule sees: parameters and constant tensors as values."""
        if isinstance(held, Parameter):
            return self.ledger.parameter(held.name, held.shape, scales=held.scales)
        if isinstance(held, Dealt):
            return experts.gathered(self.ledger, held)
        return self._constant(held) if isinstance(held, Tensor) else held

    def _known(self, node: Node) -> Any:
        """What a rule sees of a node; of a constant that follows sizes, nothing."""
        held = self.env[node]
        if isinstance(held, Dealt):
            return held
        value = self._value(held.to("meta") if node.name in self.following.constants else held)
        if isinstance(held, Parameter) and held.trained and self.compares:  # its entries are different numbers
            witness = 1 << list(self.ledger.parameters).index(held.name)
            proofs = (Proof(units_of(value.labels), witness),)
            return replace(value, proofs=proofs, depends=witness, linear_in=witness, nonzero=True)
        if isinstance(value, Value) and value.sole and len(node.users) > 1:
            return replace(value, sole=False)
        return value

    def _constant(self, tensor: Tensor) -> Value:
        """A constant, whose slices along an axis have equal codes where they hold equal numbers."""
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        known = not tensor.is_meta  # without values, any two entries may differ
        own = tensor.detach().cpu() if known else torch.arange(tensor.numel(), device="cpu").reshape(tensor.shape)
        array: NDArray[Any] = (own.float() if own.dtype == torch.bfloat16 else own).numpy()
        alike = known and array.size > 0 and array.dtype.kind in "fiub" and bool((array == array.flat[0]).all())
        value = views.uniform(array.shape, float(array.flat[0]) if alike else None)
        value = replace(value, zero=known and array.size > 0 and not array.any())
        if self.ledger.linear and not value.zero:
            return pinned_value(array.shape, "a constant")
        for axis, size in enumerate(array.shape):
            if size > 1 and array.size and not (array == array.take([0], axis)).all():
                codes = kinds(np.moveaxis(array, axis, 0).reshape(size, -1))
                value = value.with_axis(axis, label=(along(codes, axis, array.ndim),), reason="meets a constant")
        return self._paired(array, value)

    def _paired(self, array: NDArray[Any], value: Value) -> Value:
        """Units for a constant that stays the same when two of its axes are permuted alike, as the identity does."""
        sizes = [n for n in array.shape if n > 1]
        twice = {n for n in sizes if sizes.count(n) == 2}
        if len(twice) != 1 or max(twice) > 512 or array.size > 1 << 20:
            return value
        (n,) = twice
        first, second = (k for k, size in enumerate(array.shape) if size == n)
        alike = interchangeable(np.moveaxis(array, (first, second), (0, 1)).reshape(n, n, -1))
        if len(np.unique(alike)) >= min(len(np.unique(value.labels[axis][0])) for axis in (first, second)):
            return value  # its rows (or columns) are as alike for themselves
        units = self.ledger.fresh_units(n)
        self.ledger.marks.append(Mark(units, alike, "meets a constant"))
        for axis in (first, second):
            value = value.with_axis(axis, label=(along(units, axis, array.ndim),))
        value = replace(value, fill=None)
        self.ledger.observe(value)
        return value

    # -- calls --------------------------------------------------------------------------------------------------

    def _call(self, node: Node) -> None:
        target = node.target
        self.ledger.step += 1
        if target is operator.getitem:
            self._piece(node)
            return
        if not isinstance(target, torch._ops.OpOverload):
            self._read(node)
            self.env[node] = self._opaque(node)
            return
        read: list[Node] = []
        torch.fx.node.map_arg((node.args, node.kwargs), read.append)
        traits = nodes.traits_of(node)
        if node in self.counted:  # it tells no more than what it counts
            self.env[node] = self.env[self.counted[node]]
            return
        draws = torch.Tag.nondeterministic_seeded in target.tags and "same" not in traits
        held = leaves([self.env[a] for a in read])
        if not draws and not any(isinstance(h, (Value, Parameter, Dealt)) for h in held):
            arguments, options = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.env[n])
            with torch.no_grad():
                self.env[node] = target(*arguments, **options)
            self._alias(node)
            return
        given = arguments_of(node)
        known = {n: self._known(n) for n in node.all_input_nodes}
        bound = _each(given, known.__getitem__)
        name = rule_name_of(target)
        if self.ledger.linear:
            if nodes.squared(node) or nodes.centers(node):  # only its sums are read, or what it is subtracted from
                self._read(node)
                self._keep(node, [pinned_value(shape, "squares or a mean") for shape in shapes_of(node)])
                return
            if source := nodes.centered(node):
                whole = self._value(self._known(source))
                self.ledger.meet(whole)
                self.ledger.used |= {whole.parameter} - {None}
                self._read(node)
                self._keep(node, [replace(whole, parameter=None)])
                return
            if source := nodes.sum_of_squares(node):
                whole = self._known(source)
                whole = self._value(whole) if isinstance(whole, Dealt) else whole
                name, bound = "aten.linalg_vector_norm", bound | {"self": whole}
        self._note(node, traits)
        for axis in (axis for name, axis in self.following.cuts if name == node.name):
            whole = self._value(self.env[node.all_input_nodes[0]])  # nothing is known of where other inputs cut
            self.ledger.pin_label(whole.labels[axis], FOLLOWS, axis)
            self.ledger.alike_along(whole, axis)
        points = self._points(name, bound)
        # a parameter that comes twice is no longer free to be nested as one of its places asks
        parameters = [self.env[a].name for a in read if isinstance(self.env[a], Parameter)]
        self.ledger.used |= {name for name in parameters if parameters.count(name) > 1}
        call = Call(
            self.ledger,
            name,
            bound,
            shapes_of(node),
            used=nodes.outputs_read(node),
            constants=_each(given, lambda n: self.env[n] if isinstance(self.env[n], Tensor) else None),
            dtypes=_each(given, lambda n: getattr(n.meta.get("val"), "dtype", None)),
        )
        told = [n for n in leaves([given.get("offs"), given.get("indices")]) if isinstance(n, Node)]
        if (dealt := experts.dealt(call, self.env[told[0]] if told else None, _apply)) is not None:
            self.ledger.used |= set(parameters)
            wholes = tree_map_only(Dealt, lambda held: held.whole, known)
            facts = self._facts(node, traits, given, wholes, [rows.whole for rows in dealt])
            self._deal(node, dealt, {name: facts[name] for name in ("depends", "linear_in")})
            return
        if gathered := {held: self._value(held) for held in known.values() if isinstance(held, Dealt)}:
            bound, known = tree_map_only(Dealt, gathered.__getitem__, (bound, known))
            call = replace(call, arguments=bound)
        marked = len(self.ledger.marks)
        values = _apply(call)
        self.reading.select(node, [m.component for m in self.ledger.marks[marked:] if m.reason == views.SELECTED])
        for k, tensor in enumerate(nodes.outputs_of(node)):
            if values[k].scale and isinstance(tensor, Tensor) and not is_continuous(tensor):
                values[k] = self.ledger.unscaled(values[k])  # what is cut to integers follows no factor
            if self.ledger.linear and isinstance(tensor, Tensor) and not is_continuous(tensor):
                self.ledger.pin(values[k], "cut to integers")
        facts = self._facts(node, traits, given, known, values)
        facts |= {"points": points} if points else {}
        if "fills" not in traits:  # what is computed from constants is no longer the number that they hold
            facts["fill"] = None
        self._keep(node, [_with(v, facts) for v in values])
        self.ledger.used |= set(parameters)
        self._alias(node)
        if writes(target):
            self._write(node, node.args[0])

    def _keep(self, node: Node, values: list[Value]) -> None:
        for value in values:
            self.ledger.observe(value)
        self.env[node] = values if isinstance(node.meta.get("val"), (tuple, list)) else values[0]

    def _deal(self, node: Node, dealt: list[Dealt], facts: dict[str, Any]) -> None:
        """Keep what is dealt out; all that shares memory with what is written to has to have been read already."""
        dealt = [replace(rows, whole=_with(rows.whole, facts)) for rows in dealt]
        for rows in dealt:
            self.ledger.observe(rows.whole)
        self.env[node] = dealt if isinstance(node.meta.get("val"), (tuple, list)) else dealt[0]
        self._alias(node)
        written = node.args[0]
        if writes(node.target) and isinstance(written, Node):
            root = self.root.get(written, written)
            alike = [n for n in self.env if n is root or self.root.get(n) is root]
            if any(self.order[u] > self.order[node] for n in alike if n not in (written, node) for u in n.users):
                self.env[node] = self._value(dealt[0])
                self._write(node, written)
            else:
                self.env[written] = self.env[node]

    def _piece(self, node: Node) -> None:
        source, position = node.args
        assert isinstance(source, Node)
        self.env[node] = self.env[source][position]
        if source in self.reading.origins:
            self.reading.move(node, source, "")
        if source in self.root:  # a piece of what was cut
            self.root[node] = self.root[source]

    def _opaque(self, node: Node) -> Any:
        """A higher-order operator or a Python function: inlined or evaluated where possible, else pinned and named."""
        held: list[Any] = list(torch.fx.node.map_arg(node.args, lambda n: self.env[n]))
        output = node.meta.get("val")
        name = getattr(node.target, "__name__", str(node.target))
        if output is None and not node.users and not node.all_input_nodes:  # turns gradients on or off
            return None
        bodies = [k for k, h in enumerate(held) if isinstance(h, torch.fx.GraphModule)]
        if name.startswith("wrap_with") and len(bodies) == 1:  # a context manager: autocast, no_grad, ...
            return self._inner(held[bodies[0]], held[bodies[0] + 1 :])
        if name == "cond" and bodies == [1, 2]:  # both ways are followed; results have to agree like `torch.where`'s
            found = []
            ways = [self._inner(held[k], held[3]) for k in (1, 2)]
            for a, b, shape in zip(*ways, shapes_of(node), strict=True):
                chosen = {"condition": self._value(held[0]), "self": a, "other": b}
                found += _listed(apply_rule(Call(self.ledger, "aten.where", chosen, [shape])))
            return found
        arguments = [self._value(h) for h in leaves([self.env[a] for a in node.all_input_nodes])]
        values = [v for v in arguments if isinstance(v, Value)]
        if not values and output is not None:
            return output
        found = _listed(unknown(Call(self.ledger, name, {"arguments": values}, shapes_of(node))))
        return found if isinstance(output, (tuple, list)) else (found[0] if found else None)

    def _inner(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        found = _Interpreter(self.ledger, module, self.reading).run(inputs)
        return [replace(v, depends=distinct.ANYTHING, linear_in=0) if isinstance(v, Value) else v for v in found]

    # -- what is known of tensors beside their labels -----------------------------------------------------------

    def _note(self, node: Node, traits: frozenset[str]) -> None:
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        found = "picks" in traits and len(tensors) == 2 and picked(self.env[tensors[1]], 0) is not None
        if tensors and ("moves" in traits or found):
            held = self.env[tensors[0]]
            if isinstance(held, (Parameter, Value)):
                self.reading.move(node, tensors[0], held.name if isinstance(held, Parameter) else held)
        else:
            self._read(node)

    def _read(self, node: Node) -> None:
        for n in node.all_input_nodes:
            for held in leaves(self.env[n]):
                if isinstance(held, (Parameter, Value)):
                    self.reading.read(n, held.name if isinstance(held, Parameter) else held)

    def _points(self, name: str, bound: dict[str, Any]) -> Label:
        """Settle what the arguments name: units are pinned where numbers are read; what is kept goes to the outputs."""
        policy = POSITIONS.get(name, "pin")
        named = [v for v in leaves(list(bound.values())) if isinstance(v, Value) and v.points]
        if policy == "read" or not named:
            return ()
        for value in named if policy == "pin" else ():
            self.ledger.pin_label(value.points, "its position is read as a number")
        bound |= tree_map_only(Value, lambda v: replace(v, points=()) if v.points else v, bound)
        return named[-1].points if policy == "keep" else ()

    def _facts(
        self, node: Node, traits: frozenset[str], given: dict[str, Any], known: dict[Node, Any], outputs: list[Value]
    ) -> dict[str, Any]:
        inputs = [n for n in known if isinstance(n.meta.get("val"), Tensor)]
        seen = [known[n] for n in inputs]
        moves = "moves" in traits
        follows = moves or "of_statistics" in traits
        apart = len(outputs) == 1 or node.target is torch.ops.aten.unbind.int  # each piece has scales of its own
        facts: dict[str, Any] = {
            "zero": "zeros" in traits or (moves and any(v.zero for v in seen[:1])),
            "statistic": "statistic" in traits or (follows and bool(seen) and all(v.statistic for v in seen)),
            "sole": moves and apart and len(inputs) == 1 and self._is_sole(node, inputs[0]),
            "proofs": (),
            "depends": distinct.dependence(v for v in known.values() if isinstance(v, Value)),
            "linear_in": 0,
        }
        if self.compares and outputs:
            floats = [n for n in inputs if is_continuous(n.meta["val"])]
            kept = all(nodes.keeps_digits(node, n.meta["val"]) for n in floats)
            operands = {name: known[n] for name, n in _named(given) if n in floats}
            name = rule_name_of(node.target).removeprefix("aten.")
            dim, normalized = given.get("dim"), given.get("normalized_shape") or ()
            axes = [*([dim] if isinstance(dim, int) else []), *range(-len(normalized), 0)] if outputs[0].ndim else []
            facts["proofs"] = distinct.proven(name, traits if kept else frozenset(), operands, outputs, axes)
            facts["linear_in"] = distinct.linear_in(name, traits, operands, seen)
            facts["nonzero"] = bool(operands and outputs[0].ndim) and distinct.nonzero(
                name, traits, operands, given, outputs[0].shape[-1]
            )
        return facts

    def _is_sole(self, node: Node, source: Node) -> bool:
        held = self.env[source]
        alone = len(source.users) == 1 or _is_own_piece(node)
        return alone and (isinstance(held, Parameter) or (isinstance(held, Value) and held.sole))

    # -- aliases and in-place writes ----------------------------------------------------------------------------

    def _alias(self, node: Node) -> None:
        returns = node.target._schema.returns  # type: ignore[union-attr]
        source = node.args[0] if node.args else None
        if returns and returns[0].alias_info is not None and isinstance(source, Node) and _same_memory(node, source):
            self.root[node] = self.root.get(source, source)  # reshape, to and contiguous copy where they have to

    def _write(self, node: Node, written: Any) -> None:
        """An in-place write: whoever else reads the same memory later sees the new content."""
        if not isinstance(written, Node):
            return
        root = self.root.get(written, written)
        others = [n for n in self.env if (n is root or self.root.get(n) is root) and n not in (written, node)]
        before = {n: distinct.dependence(v for v in leaves(self.env[n]) if isinstance(v, Value)) for n in others}
        new: Value = self.env[node]
        chain = self._put_back(written, new)
        self.env[written] = new
        read = [n for n in others if any(self.order[u] > self.order[node] for u in n.users)]
        if chain is None:
            for other in read:
                self.env[other] = _mapped(self._gone, self.env[other])
            if read:
                self.ledger.pin(new, OVERWRITTEN)
        for other in others:
            if chain is not None and other not in chain:
                self._refresh(other)
        for other in others:
            changed = partial(_changed, zero=new.zero, depends=before[other] | new.depends)
            self.env[other] = _mapped(changed, self.env[other])

    def _gone(self, held: Any) -> Value:
        self.ledger.pin(value := self._value(held), OVERWRITTEN)
        return pinned_value(value.shape, OVERWRITTEN)

    def _put_back(self, view: Node, new: Value) -> list[Node] | None:
        """Write new content of a view into what it is a view of, and so on; the nodes that were updated, or None."""
        updated = [view]
        while view in self.root:
            found = self._behind(view, new)
            if found is None:
                return None
            view, new = found
            self.env[view] = new
            updated.append(view)
        return updated

    def _behind(self, view: Node, new: Value) -> tuple[Node, Value] | None:
        """What a view was taken of, with the view's new content in it; None for a view that does not tell."""
        piece: Any = None
        if view.target is operator.getitem:
            view, piece = view.args  # type: ignore[assignment]
        source: Any = view.args[0]
        old = self._value(self.env[source])
        rule = rule_name_of(view.target)
        name = rule.removeprefix("aten.")
        if name in ("fill", "copy") or writes(view.target):
            return source, new  # what an earlier write returned
        if "same" in TRAITS.get(rule, ()):
            return source, views.reshape(self.ledger, new, old.shape)
        if name not in _CUTS or len(view.all_input_nodes) > 1:
            return None
        axis = arguments_of(view).get("dim", 0) % old.ndim
        positions = _positions(view, piece, old.shape, axis)
        content = views.reshape(self.ledger, new, old.with_axis(axis, size=len(positions)).shape)
        return source, overwritten(self.ledger, replace(old, parameter=None), axis, positions, content)

    def _refresh(self, node: Node) -> None:
        source: Any = node.args[0]
        if node.target is operator.getitem:
            self.env[node] = self.env[source][node.args[1]]
        elif writes(node.target):  # what a write returned
            self.env[node] = self.env[source]
        else:
            bound = tree_map_only(Dealt, self._value, _each(arguments_of(node), self._known))
            call = Call(self.ledger, rule_name_of(node.target), bound, shapes_of(node), nodes.outputs_read(node))
            self._keep(node, _apply(call))


def _positions(view: Node, piece: int | None, shape: tuple[int, ...], axis: int) -> Array:
    """The positions along an axis that a cut takes, which are found by cutting an array of them."""
    index = torch.arange(shape[axis], device="cpu").reshape([-1 if k == axis else 1 for k in range(len(shape))])
    cut: Any = view.target(index.expand(shape), *view.args[1:], **view.kwargs)  # type: ignore[operator]
    taken: Tensor = cut if piece is None else cut[piece]
    if taken.ndim < len(shape):
        taken = taken.unsqueeze(axis)
    return np.asarray(taken.movedim(axis, 0).reshape(taken.shape[axis], -1)[:, 0])


def _each(given: dict[str, Any], read: Callable[[Node], Any]) -> dict[str, Any]:
    """Arguments with what ``read`` says of each node in its place."""
    return {name: torch.fx.node.map_arg(argument, read) for name, argument in given.items()}


def _named(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, argument in given.items():
        if isinstance(argument, list):
            yield from ((f"{name} {k}", item) for k, item in enumerate(argument))
        else:
            yield name, argument


def _same_memory(view: Node, source: Node) -> bool:
    """Whether two nodes hold the same memory, as far as the tensors of the traced pass tell."""
    held = [tree_leaves(n.meta.get("val"))[0] for n in (view, source)]
    if not all(isinstance(t, Tensor) and t.layout == torch.strided for t in held):
        return True
    (first, second), target = held, view.target
    if first.untyped_storage()._cdata == second.untyped_storage()._cdata or writes(target):
        return True
    with FakeTensorMode():
        fresh = {
            n: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
            for n in view.all_input_nodes
            if isinstance(t := n.meta["val"], Tensor)
        }
        args, kwargs = torch.fx.node.map_arg((view.args, view.kwargs), fresh.__getitem__)
        again: Tensor = tree_leaves(target(*args, **kwargs))[0]  # type: ignore[operator]
    return again.untyped_storage()._cdata == fresh[source].untyped_storage()._cdata


def interchangeable(square: NDArray[Any]) -> Array:
    """For each index of a matrix ``[n, n, ...]`` a kind: those of one kind may be permuted, rows and columns alike."""
    n = len(square)
    found = np.full(n, -1, dtype=np.int64)
    firsts: list[int] = []

    def alike(i: int, j: int) -> bool:
        others = np.ones(n, dtype=bool)
        others[[i, j]] = False
        return (
            np.array_equal(square[i, i], square[j, j])
            and np.array_equal(square[i, j], square[j, i])
            and np.array_equal(square[i, others], square[j, others])
            and np.array_equal(square[others, i], square[others, j])
        )

    for j in range(n):
        found[j] = next((kind for kind, i in enumerate(firsts) if alike(i, j)), len(firsts))
        if found[j] == len(firsts):
            firsts.append(j)
            if len(firsts) > 32 and len(firsts) > j // 2:
                return np.arange(n)  # hardly any two are alike
    return found


def _mapped(function: Callable[[Any], Any], held: Any) -> Any:
    return list(map(function, held)) if isinstance(held, list) else function(held)


def _changed(held: Any, *, zero: bool, depends: int) -> Any:
    """What stands for memory that was written to elsewhere (with zeros): less is known of it."""
    if not isinstance(held, Value):
        return held
    return replace(held, zero=held.zero and zero, proofs=(), depends=depends, linear_in=0, nonzero=False)


def _with(value: Value, facts: dict[str, Any]) -> Value:
    return value if all(getattr(value, k) == fact for k, fact in facts.items()) else replace(value, **facts)


def _listed(result: Value | Sequence[Value]) -> list[Value]:
    return [result] if isinstance(result, Value) else list(result)


def _apply(call: Call) -> list[Value]:
    """What its rule says of an operator; nothing, if it breaks down on a form of the operator that it does not know."""
    try:
        values = _listed(apply_rule(call))
        for value, shape in zip(values, call.outputs, strict=True):
            if value.shape != shape:
                raise ValueError(f"a value of shape {value.shape} for an output of shape {shape}")
    except Exception as error:
        broken = f"{call.operator} (its rule failed with {type(error).__name__}: {error})"
        values = _listed(unknown(replace(call, operator=broken)))
    return values


def _is_own_piece(node: Node) -> bool:
    """Whether a tensor is read in pieces along one axis only, and the node is the first to read its piece."""
    source = node.args[0]
    if node.target is not torch.ops.aten.select.int or not isinstance(source, Node):
        return False
    axis, index = node.args[1:]
    if any(u.target is not node.target or u.args[1] != axis for u in source.users):
        return False
    size = source.meta["val"].shape[axis]
    return next(u for u in source.users if (u.args[2] - index) % size == 0) is node  # type: ignore[operator]
