"""From a module to its graph of operators, by torch.export, and through the table of rules to a ledger of demands."""

from __future__ import annotations

import contextlib
import io
import operator
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tu_symmetry.symmetry.algebra import Ledger, Value, along, code, pinned_value
from tu_symmetry.symmetry.graph import SymmetryError
from tu_symmetry.symmetry.operators import RULES
from tu_symmetry.symmetry.probe import copied, own_copy
from tu_symmetry.symmetry.rules import Call, Rule, unknown

RANDOM = ("rand", "normal", "bernoulli", "multinomial", "poisson", "exponential", "uniform")
INPUT = "input of the network"
FILLS = tuple(f"aten.{n}" for n in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer that enters the traced graph."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """A forward pass as a graph of operators.

    Attributes:
        module: the graph, with the constants that it holds.
        inputs: what stands for each placeholder, in order: a :class:`Parameter`, a pinned value for an input of the
            network, a tensor for a constant, or a plain number.
        branch: where the pass branched on values of tensors, or None. The graph then holds for the inputs that take
            the same way as the example.
    """

    module: torch.fx.GraphModule
    inputs: tuple[Any, ...]
    branch: str | None = None


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, record: bool = False) -> Trace:
    """Trace an evaluation-mode copy of the model.

    Args:
        model: any module.
        args: positional arguments of ``forward``.
        kwargs: keyword arguments of ``forward``.
        record: where ``forward`` branches on values of tensors, record the way that the example inputs take.

    Raises:
        SymmetryError: if the model cannot be exported, naming the branch or the operator that is in the way.
    """
    model = own_copy(model).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                program = torch.export.export(model, args, dict(kwargs), strict=False)
            if _has_open_shapes(program):  # boolean masks, nonzero: no branch, but sizes that only values tell
                return _recorded(model, args, kwargs, None)
            return _exported(model, program)
        except GuardOnDataDependentSymNode as error:
            place = _place(error)
            if record:
                return _recorded(model, args, kwargs, place)
            raise SymmetryError(
                f"the forward pass of {type(model).__name__} branches on the values of a tensor, at {place}. Its "
                'symmetries may differ from branch to branch. discover_symmetries(..., branches="record") finds '
                "those of the way that the example inputs take; torch.where or torch.cond in place of the branch makes "
                "both ways count."
            ) from error
        except Exception as error:
            text = str(error).strip().splitlines()
            raise SymmetryError(
                f"torch.export cannot trace {type(model).__name__}: {text[0] if text else type(error).__name__} (at "
                f"{_place(error)})\nLikely cause: the example inputs do not fit, or forward does something that no "
                "graph can hold. Check that model(*example_inputs) runs, or discover the symmetries of the submodules."
            ) from error


def _exported(model: nn.Module, program: torch.export.ExportedProgram) -> Trace:
    first_name = {name: first for first, names in tied_names(model).items() for name in names}
    specs = {getattr(spec.arg, "name", None): spec for spec in program.graph_signature.input_specs}
    inputs = []
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec, tensor = specs[node.name], node.meta.get("val")
        if spec.kind.name in ("PARAMETER", "BUFFER"):
            held = program.state_dict.get(spec.target, program.constants.get(spec.target))
            name = first_name.get(spec.target)
            floating = held is not None and held.is_floating_point()
            inputs.append(held if name is None or not floating else Parameter(name, tuple(held.shape)))
        elif spec.kind.name in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
            inputs.append(program.constants[spec.target])
        else:
            inputs.append(pinned_value(tensor.shape, INPUT) if isinstance(tensor, Tensor) else tensor)
    return Trace(program.graph_module, tuple(inputs))


def _has_open_shapes(program: torch.export.ExportedProgram) -> bool:
    held = (leaf for node in program.graph.nodes for leaf in _flatten(node.meta.get("val")))
    return any(isinstance(size, torch.SymInt) for t in held if isinstance(t, Tensor) for size in t.shape)


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: str | None) -> Trace:
    model = copied(model)
    state = model.state_dict(keep_vars=True)
    tensors = {first: state[first].detach() for first in tied_names(model)}

    def forward(tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.func.functional_call(model, tensors, args, kwargs)

    graph_module = make_fx(
        forward,
        tracing_mode="real",
        pre_dispatch=True,
        _allow_non_fake_inputs=True,
        _error_on_data_dependent_ops=False,
    )(tensors, args, dict(kwargs))
    inputs: list[Any] = [Parameter(name, tuple(t.shape)) if t.is_floating_point() else t for name, t in tensors.items()]
    for leaf in _flatten((args, dict(kwargs))):
        inputs.append(pinned_value(leaf.shape, INPUT) if isinstance(leaf, Tensor) else leaf)
    return Trace(graph_module, tuple(inputs), branch=place)


def _place(error: BaseException) -> str:
    """The innermost line of an error's traceback that is not PyTorch's: ``file.py:12 in forward: code``."""
    library = str(Path(torch.__file__).parent)
    here = str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((library, here))]
    if not frames:
        return "an unknown place"
    frame = frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """State dict names grouped by the tensor that they hold: first name to all names."""
    state = model.state_dict(keep_vars=True)
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in groups.values()}


def interpret(traced: Trace) -> Ledger:
    """Run the rules over a traced forward pass."""
    ledger = Ledger()
    for result in _Interpreter(ledger, traced.module).run(traced.inputs):
        if isinstance(result, Value):
            ledger.pin(result, "output of the network")
    for value in ledger.parameters.values():
        ledger.observe(value, nested=False)  # the operators that nested them have seen them in blocks
    return ledger


class _Interpreter:
    def __init__(self, ledger: Ledger, module: torch.fx.GraphModule) -> None:
        self.ledger = ledger
        self.module = module
        self.env: dict[torch.fx.Node, Any] = {}
        self.root: dict[torch.fx.Node, torch.fx.Node] = {}
        self.order = {node: k for k, node in enumerate(module.graph.nodes)}

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Results of the graph for the given inputs, as values."""
        remaining = iter(inputs)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(remaining)
            elif node.op == "get_attr":
                self.env[node] = getattr(self.module, str(node.target), None)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                return [self._value(self.env[r]) if isinstance(r, torch.fx.Node) else r for r in _flatten(node.args[0])]
        return []

    def _value(self, held: Any) -> Any:
        """What a rule sees: parameters and constant tensors as values."""
        if isinstance(held, Parameter):
            return self.ledger.parameter(held.name, held.shape)
        if isinstance(held, Tensor):
            return self._constant(held)
        return held

    def _constant(self, tensor: Tensor) -> Value:
        array = (
            tensor.detach().cpu().numpy() if tensor.dtype != torch.bfloat16 else tensor.detach().float().cpu().numpy()
        )
        alike = array.size > 0 and array.dtype.kind in "fiub" and bool((array == array.flat[0]).all())
        value = self.ledger.uniform(array.shape, float(array.flat[0]) if alike else None)
        for axis, size in enumerate(array.shape):
            if size == 1 or array.size == 0 or bool((array == array.take([0], axis)).all()):
                continue
            _, kinds = np.unique(np.moveaxis(array, axis, 0).reshape(size, -1), axis=0, return_inverse=True)
            label = (along(code(kinds.reshape(-1).astype(np.int64)), axis, array.ndim),)
            value = replace(
                value,
                labels=(*value.labels[:axis], label, *value.labels[axis + 1 :]),
                reasons=(*value.reasons[:axis], "meets a constant", *value.reasons[axis + 1 :]),
            )
        return value

    def _call(self, node: torch.fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            source, position = node.args
            assert isinstance(source, torch.fx.Node)
            self.env[node] = self.env[source][position]
            return
        if not isinstance(target, torch._ops.OpOverload):
            self.env[node] = self._opaque(node)
            return
        nodes = [a for a in _flatten((node.args, node.kwargs)) if isinstance(a, torch.fx.Node)]
        held = [self.env[a] for a in nodes]
        name = target._schema.name.replace("::", ".")
        if not any(isinstance(h, (Value, Parameter)) for h in _flatten(held)) and not any(r in name for r in RANDOM):
            self.env[node] = self._evaluate(node)
            self._alias(node, target)
            return
        writes = bool(target._schema.arguments) and _writes(target._schema.arguments[0])
        rule_name = name[:-1] if writes and name.endswith("_") else name
        call = Call(
            self.ledger,
            rule_name,
            self._bind(node, target),
            _shapes(node.meta.get("val")),
            node.name,
            _read_outputs(node),
        )
        # a parameter that comes twice is no longer free to be nested as one of its places asks
        places = [a for a in nodes if isinstance(self.env[a], Parameter)]
        self.ledger.used |= {self.env[a].name for a in places if nodes.count(a) > 1}
        values = _apply(RULES.get(rule_name, unknown), call)
        if rule_name not in FILLS:  # what is computed from constants is no longer the number that they hold
            values = [v if v.fill is None else replace(v, fill=None) for v in values]
        for value in values:
            self.ledger.observe(value)
        for h in _flatten(held):
            if isinstance(h, Parameter):
                self.ledger.used.add(h.name)
        output = node.meta.get("val")
        self.env[node] = values if isinstance(output, (tuple, list)) else values[0]
        self._alias(node, target)
        if writes:
            self._write(node, node.args[0])

    def _opaque(self, node: torch.fx.Node) -> Any:
        """A higher-order operator or a Python function: inlined or evaluated where possible, else pinned and named."""
        held: list[Any] = list(torch.fx.node.map_arg(node.args, lambda n: self.env[n]))
        output = node.meta.get("val")
        name = getattr(node.target, "__name__", str(node.target))
        bodies = [k for k, h in enumerate(held) if isinstance(h, torch.fx.GraphModule)]
        if name.startswith("wrap_with") and len(bodies) == 1:  # a context manager: autocast, no_grad, ...
            return _Interpreter(self.ledger, held[bodies[0]]).run(held[bodies[0] + 1 :])
        if name == "cond" and bodies == [1, 2]:
            return self._branches(node, held)
        arguments = [self.env[a] for a in _flatten((node.args, node.kwargs)) if isinstance(a, torch.fx.Node)]
        if not any(isinstance(h, (Value, Parameter, Tensor)) for h in _flatten(arguments)) and output is not None:
            return output
        values = [v for v in map(self._value, _flatten(arguments)) if isinstance(v, Value)]
        call = Call(self.ledger, name, {"arguments": values}, _shapes(output), node.name)
        found = unknown(call)
        values = [found] if isinstance(found, Value) else list(found)
        return values if isinstance(output, (tuple, list)) else (values[0] if values else None)

    def _branches(self, node: torch.fx.Node, held: list[Any]) -> list[Value]:
        """``torch.cond``: both ways are followed, and their results have to agree like those of ``torch.where``."""
        condition = self._value(held[0])
        ways = [_Interpreter(self.ledger, held[k]).run(held[3]) for k in (1, 2)]
        results = []
        for a, b, shape in zip(*ways, _shapes(node.meta.get("val")), strict=True):
            call = Call(self.ledger, "aten.where", {"condition": condition, "self": a, "other": b}, [shape], node.name)
            result = RULES["aten.where"](call)
            assert isinstance(result, Value)
            results.append(result)
        return results

    def _evaluate(self, node: torch.fx.Node) -> Any:
        """Compute a node that depends on constants only."""
        arguments, options = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.env[n])
        with torch.no_grad():
            return node.target(*arguments, **options)  # type: ignore[operator]

    def _bind(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        for position, argument in enumerate(target._schema.arguments):
            if position < len(node.args):
                given = node.args[position]
            elif argument.name in node.kwargs:
                given = node.kwargs[argument.name]
            elif argument.has_default_value():
                given = argument.default_value
            else:
                continue
            bound[argument.name] = self._bound(given)
        return bound

    def _bound(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self._value(self.env[argument])
        if isinstance(argument, (list, tuple)):
            return [self._bound(a) for a in argument]
        return argument

    # -- aliases and in-place writes ----------------------------------------------------------------------------

    def _alias(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        returns = target._schema.returns
        if returns and returns[0].alias_info is not None and node.args and isinstance(node.args[0], torch.fx.Node):
            self.root[node] = self.root.get(node.args[0], node.args[0])

    def _write(self, node: torch.fx.Node, written: Any) -> None:
        """An in-place write: whoever else reads the same memory later sees the new content."""
        if not isinstance(written, torch.fx.Node):
            return
        root = self.root.get(written, written)
        others = [n for n in self.env if (n is root or self.root.get(n) is root) and n not in (written, node)]
        now = self.order[node]
        stale = [n for n in others if any(self.order[u] > now for u in n.users)]
        reason = "written to in place through a view"
        if stale == [root] and written is not root and written.args[0] is root:
            whole = self._overwritten(root, written, self.env[node])
            if whole is not None:
                self.env[root], self.env[written] = whole, self.env[node]
                return
        for other in stale:
            value = self._value(self.env[other])
            if isinstance(value, Value):
                self.ledger.pin(value, reason)
                self.env[other] = pinned_value(value.shape, reason)
        if stale:
            self.ledger.pin(self.env[node], reason)
        self.env[written] = self.env[node]

    def _overwritten(self, base: torch.fx.Node, view: torch.fx.Node, new: Value) -> Value | None:
        """A tensor of which a run of positions along one axis was written to; None if the view is another one."""
        assert isinstance(view.target, torch._ops.OpOverload)
        old = self._value(self.env[base])
        given = self._bind(view, view.target)
        if view.target._schema.name not in ("aten::slice", "aten::narrow") or given.get("step", 1) != 1:
            return None
        axis, start = given.get("dim", 0), given.get("start") or 0
        if not isinstance(old, Value) or not isinstance(axis, int) or not isinstance(start, int):
            return None
        axis %= old.ndim
        first = start + old.shape[axis] if start < 0 else start
        last = first + new.shape[axis]
        self.ledger.forget(self.ledger.take(old, axis, np.arange(first, last)), axis, "overwritten")
        kept = (np.arange(first), np.arange(last, old.shape[axis]))
        around = [self.ledger.take(old, axis, positions) for positions in kept if len(positions)]
        around.insert(int(first > 0), new)
        return self.ledger.concatenate(around, axis)


def _flatten(nested: Any) -> list[Any]:
    if isinstance(nested, (list, tuple)):
        return [leaf for item in nested for leaf in _flatten(item)]
    if isinstance(nested, dict):
        return [leaf for item in nested.values() for leaf in _flatten(item)]
    return [nested]


def _apply(rule: Rule, call: Call) -> list[Value]:
    """What a rule says of an operator; nothing, if it breaks down on a form of the operator that it does not know.

    Demands that it made until then stay: there can only be too many of them, which pins.
    """
    try:
        result = rule(call)
        values = [result] if isinstance(result, Value) else list(result)
        for value, shape in zip(values, call.outputs, strict=True):
            if value.shape != shape:
                raise ValueError(f"a value of shape {value.shape} for an output of shape {shape}")
    except Exception as error:
        broken = f"{call.operator} (its rule failed with {type(error).__name__}: {error})"
        result = unknown(replace(call, operator=broken))
        values = [result] if isinstance(result, Value) else list(result)
    return values


def _read_outputs(node: torch.fx.Node) -> frozenset[int]:
    """Positions of the outputs that something reads."""
    positions = (u.args[1] for u in node.users if u.target is operator.getitem and u.users)
    return frozenset(p for p in positions if isinstance(p, int)) or frozenset((0,))


def _shapes(output: Any) -> list[tuple[int, ...]]:
    outputs = output if isinstance(output, (tuple, list)) else [output]
    return [tuple(int(n) for n in o.shape) if isinstance(o, Tensor) else () for o in outputs]


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
