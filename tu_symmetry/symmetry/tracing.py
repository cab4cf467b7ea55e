"""From a module to its graph of operators, by torch.export, and through the table of rules to a ledger of demands."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tu_symmetry.symmetry.algebra import Ledger, Value, along, code, pinned_value
from tu_symmetry.symmetry.graph import SymmetryError
from tu_symmetry.symmetry.operators import RULES
from tu_symmetry.symmetry.rules import Call, unknown

RANDOM = ("rand", "normal", "bernoulli", "multinomial", "poisson", "exponential", "uniform")


def export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.export.ExportedProgram:
    """Export an evaluation-mode copy of the model.

    Raises:
        SymmetryError: if the model cannot be exported (its forward branches on values of tensors, mostly).
    """
    model = copy.deepcopy(model).eval()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(model, args, dict(kwargs), strict=False)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise SymmetryError(
            f"torch.export cannot trace {type(model).__name__}: {text[0] if text else type(error).__name__}\n"
            "Likely causes: the forward pass branches on the values of a tensor, or the example inputs do not fit. "
            "Check that model(*example_inputs) runs; replace `if tensor...:` by torch.where or torch.cond, or discover "
            "the symmetries of the submodules without the branch."
        ) from error


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """State dict names grouped by the tensor that they hold: first name to all names."""
    state = model.state_dict(keep_vars=True)
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in groups.values()}


def interpret(program: torch.export.ExportedProgram, aliases: Mapping[str, tuple[str, ...]]) -> Ledger:
    """Run the rules over an exported program.

    Args:
        program: the exported program.
        aliases: first name to all names of each tensor of the state dict.
    """
    return _Interpreter(program, aliases).run()


class _Interpreter:
    def __init__(self, program: torch.export.ExportedProgram, aliases: Mapping[str, tuple[str, ...]]) -> None:
        self.ledger = Ledger()
        self.program = program
        self.first_name = {name: first for first, names in aliases.items() for name in names}
        self.env: dict[torch.fx.Node, Any] = {}
        self.root: dict[torch.fx.Node, torch.fx.Node] = {}
        self.order = {node: k for k, node in enumerate(program.graph.nodes)}

    def run(self) -> Ledger:
        targets = {}
        for spec in self.program.graph_signature.input_specs:
            targets[getattr(spec.arg, "name", None)] = spec
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node, targets[node.name])
            elif node.op == "get_attr":
                self.env[node] = getattr(self.program.graph_module, str(node.target), None)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                for result in _flatten(node.args[0]):
                    if isinstance(result, torch.fx.Node):
                        value = self._value(self.env[result])
                        if isinstance(value, Value):
                            self.ledger.pin(value, "output of the network")
        for value in self.ledger.parameters.values():
            self.ledger.observe(value, nested=False)  # the operators that nested them have seen them in blocks
        return self.ledger

    def _placeholder(self, node: torch.fx.Node, spec: Any) -> Any:
        kind = spec.kind.name
        tensor = node.meta.get("val")
        if kind in ("PARAMETER", "BUFFER"):
            name = self.first_name.get(spec.target)
            held = self.program.state_dict.get(spec.target, self.program.constants.get(spec.target))
            if name is not None and held is not None and held.is_floating_point():
                return _Parameter(name, tuple(held.shape))
            return held
        if kind in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
            return self.program.constants[spec.target]
        if isinstance(tensor, Tensor):
            return pinned_value(tensor.shape, "input of the network")
        return tensor

    def _value(self, held: Any) -> Any:
        """What a rule sees: parameters and constant tensors as values."""
        if isinstance(held, _Parameter):
            return self.ledger.parameter(held.name, held.shape)
        if isinstance(held, Tensor):
            return self._constant(held)
        return held

    def _constant(self, tensor: Tensor) -> Value:
        array = (
            tensor.detach().cpu().numpy() if tensor.dtype != torch.bfloat16 else tensor.detach().float().cpu().numpy()
        )
        value = self.ledger.uniform(array.shape)
        for axis, size in enumerate(array.shape):
            if size == 1 or bool((array == array.take([0], axis)).all()):
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
        if not any(isinstance(h, (Value, _Parameter)) for h in _flatten(held)) and not any(r in name for r in RANDOM):
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
        result = RULES.get(rule_name, unknown)(call)
        values = [result] if isinstance(result, Value) else list(result)
        for value in values:
            self.ledger.observe(value)
        for h in _flatten(held):
            if isinstance(h, _Parameter):
                self.ledger.used.add(h.name)
        output = node.meta.get("val")
        self.env[node] = values if isinstance(output, (tuple, list)) else values[0]
        self._alias(node, target)
        if writes:
            self._write(node, node.args[0])

    def _opaque(self, node: torch.fx.Node) -> Any:
        """A higher-order operator or a Python function: evaluated on plain numbers, otherwise pinned and named."""
        arguments = [self.env[a] for a in _flatten((node.args, node.kwargs)) if isinstance(a, torch.fx.Node)]
        output = node.meta.get("val")
        if not any(isinstance(h, (Value, _Parameter, Tensor)) for h in _flatten(arguments)) and output is not None:
            return output
        name = getattr(node.target, "__name__", str(node.target))
        values = [v for v in map(self._value, _flatten(arguments)) if isinstance(v, Value)]
        call = Call(self.ledger, name, {"arguments": values}, _shapes(output), node.name)
        found = unknown(call)
        values = [found] if isinstance(found, Value) else list(found)
        return values if isinstance(output, (tuple, list)) else (values[0] if values else None)

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
        for other in stale:
            value = self._value(self.env[other])
            if isinstance(value, Value):
                self.ledger.pin(value, reason)
                self.env[other] = pinned_value(value.shape, reason)
        if stale:
            self.ledger.pin(self.env[node], reason)
        self.env[written] = self.env[node]


@dataclass(frozen=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]


def _flatten(nested: Any) -> list[Any]:
    if isinstance(nested, (list, tuple)):
        return [leaf for item in nested for leaf in _flatten(item)]
    if isinstance(nested, dict):
        return [leaf for item in nested.values() for leaf in _flatten(item)]
    return [nested]


def _read_outputs(node: torch.fx.Node) -> frozenset[int]:
    """Positions of the outputs that something reads."""
    positions = (u.args[1] for u in node.users if u.target is operator.getitem and u.users)
    return frozenset(p for p in positions if isinstance(p, int)) or frozenset((0,))


def _shapes(output: Any) -> list[tuple[int, ...]]:
    outputs = output if isinstance(output, (tuple, list)) else [output]
    return [tuple(int(n) for n in o.shape) if isinstance(o, Tensor) else () for o in outputs]


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
