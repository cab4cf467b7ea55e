"""From a module to its graph of operators, by torch.export, and through the table of rules to a ledger of demands."""

from __future__ import annotations

import contextlib
import io
import math
import operator
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry import moving
from tu_symmetry.symmetry.algebra import Array, Label, Value, along, code, distinct, pinned_value
from tu_symmetry.symmetry.distinct import Distinct
from tu_symmetry.symmetry.ledger import Ledger, Mark
from tu_symmetry.symmetry.nesting import Nestings
from tu_symmetry.symmetry.operators import RULES
from tu_symmetry.symmetry.operators.indexing import picked
from tu_symmetry.symmetry.operators.scattering import overwritten
from tu_symmetry.symmetry.probe import Example, copied, own_copy
from tu_symmetry.symmetry.reading import Reading, pin_unseen
from tu_symmetry.symmetry.rules import POSITIONS, TRAITS, Call, Rule, unknown
from tu_symmetry.symmetry.sizes import FOLLOWS, NOTHING, Following, following, held_constants, resized

INPUT = "input of the network"


@dataclass(frozen=True)
class Parameter:
    """A parameter (what is trained) or buffer that enters the traced graph; integers and booleans do not scale."""

    name: str
    shape: tuple[int, ...]
    scales: bool = True
    trained: bool = False


@dataclass(frozen=True)
class Trace:
    """A forward pass as a graph of operators.

    Attributes:
        module: the graph, with the constants that it holds.
        inputs: what stands for each placeholder, in order: a :class:`Parameter`, a pinned value for an input of the
            network, a tensor for a constant, or a plain number.
        branch: where the pass branched on values of tensors, or None. The graph then holds for the inputs that take
            the same way as the example.
        constants: the integer and boolean tensors of the state dict that the pass reads by value (indices, attention
            masks): what is found holds for these values.
        example: number of the example inputs among several.
        following: what of the pass follows the sizes of its inputs.
    """

    module: torch.fx.GraphModule
    inputs: tuple[Any, ...]
    branch: str | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)
    example: int = 0
    following: Following = NOTHING

    @property
    def positions(self) -> bool:
        """Whether some operator returns positions that it finds by comparing numbers."""
        return any(map(_orders, self.module.graph.nodes))

    def names(self, *, live: bool) -> frozenset[str]:
        """Names of the tensors that the pass computes with, or of those that its outputs (or its state) depend on."""
        nodes = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        kept = _live(self.module.graph) if live else frozenset(node for node in nodes if node.users)
        entered = (held for held, node in zip(self.inputs, nodes, strict=True) if node in kept)
        return frozenset((*(h.name for h in entered if isinstance(h, Parameter)), *self.constants))


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    record: bool = False,
    training: bool = False,
) -> Trace:
    """Trace a copy of the model.

    Args:
        model: any module.
        args: positional arguments of ``forward``.
        kwargs: keyword arguments of ``forward``.
        record: where ``forward`` branches on values of tensors, record the way that the example inputs take.
        training: trace it in training mode; in evaluation mode otherwise.

    Raises:
        SymmetryError: if the model cannot be exported, naming the branch or the operator that is in the way.
    """
    model = own_copy(model).train(training)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = _program(model, args, kwargs)
            if _has_open_shapes(program):  # boolean masks, nonzero: no branch, but sizes that only values tell
                return _recorded(model, args, kwargs, None)
            if any("_vmap_increment_nesting" in str(n.target) for n in program.graph.nodes):
                return _recorded(model, args, kwargs, None, batched=True)
            return _exported(model, program)
        except GuardOnDataDependentSymNode as error:
            return _recorded_instead(model, args, kwargs, error, record=record, batched=False)
        except Exception as error:
            text = str(error).strip().splitlines()
            with contextlib.suppress(_Unrecorded):  # gradients, packed sequences: what no exported program holds
                return _recorded_instead(model, args, kwargs, error, record=record, batched=True)
            if batch_axis_missing(model, args, kwargs):
                shapes = ", ".join(str(tuple(a.shape)) for a in args if isinstance(a, Tensor))
                raise SymmetryError(
                    f"batch axis missing? {type(model).__name__} does not run on example inputs of shape {shapes}, and "
                    "does with an axis of length 1 in front of each: pass x.unsqueeze(0)"
                ) from error
            raise SymmetryError(
                f"torch.export cannot trace {type(model).__name__}: {text[0] if text else type(error).__name__} (at "
                f"{_place(error)})\nLikely cause: the example inputs do not fit, or forward does something that no "
                "graph can hold. Check that model(*example_inputs) runs, or discover the symmetries of the submodules."
            ) from error


def _program(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.export.ExportedProgram:
    silence = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with silence[0], silence[1], _unchecked_distributions():
        return torch.export.export(model, args, dict(kwargs), strict=False)


def with_other_sizes(model: nn.Module, example: Example, first: Trace) -> tuple[Trace, ...]:
    """A pass in evaluation mode, with what of it follows the sizes of its inputs, and passes of other sizes."""
    model = own_copy(model).eval()
    held = held_constants(first.module, first.inputs)
    found: list[Trace] = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for others in resized(example):
            for args, kwargs in others:
                try:
                    program = _program(model, args, kwargs)
                except Exception:  # whatever a network raises on sizes that it was not made for
                    continue
                if not _has_open_shapes(program):
                    found.append(_exported(model, program))
                    seen = following(held, held_constants(found[-1].module, found[-1].inputs))
                    first = replace(first, following=first.following | seen)
                break
    return (first, *found)


class _Unrecorded(SymmetryError):
    """A program could not be recorded either."""


def _recorded_instead(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: Exception,
    *,
    record: bool,
    batched: bool,
) -> Trace:
    """The way that the example inputs take, where a module cannot be exported: if it is the only one, or is asked for.

    Raises:
        SymmetryError: if the way depends on values, and is not to be recorded, naming the line.
        _Unrecorded: if it cannot be recorded; in place of a branch on values that was to be recorded, what is raised.
    """
    place = _place(error)
    try:
        recorded = _recorded(model, args, kwargs, place, batched=batched)
    except Exception as stopped:  # whatever stops the network on these inputs; asked to record it, the user is told
        if batched:
            raise _Unrecorded(str(stopped)) from stopped
        if record:
            raise
        recorded = None
    if recorded and not _reads_values(recorded.module.graph):  # a mask that forward makes: always the same way
        return replace(recorded, branch=None)
    if recorded and record:
        return recorded
    raise SymmetryError(
        f"the forward pass of {type(model).__name__} branches on the values of a tensor, at {place}. Its "
        'symmetries may differ from branch to branch. discover_symmetries(..., branches="record") finds '
        "those of the way that the example inputs take; torch.where or torch.cond in place of the branch makes "
        "both ways count."
    ) from error


class _Whole(TorchFunctionMode):
    """Notes where numbers leave a program that is recorded, which would come back as constants; views stay views."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__" and func.__self__ is Tensor.data:
            return args[0].detach()
        if name in ("tolist", "numpy", "__array__", "__dlpack__") or func in (torch.tensor, torch.as_tensor):
            for held in _flatten(args):
                if isinstance(held, Tensor) and held.numel() > 0:
                    torch.equal(held, held)  # a number that is read off it: see the rule of ``equal``
        return func(*args, **kwargs)


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Leave out the checks that ``torch.distributions`` makes of its arguments.

    They branch on values, which older releases of torch.export refuse, and decide nothing but whether an error is
    raised. Verification runs the network with them.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def batch_axis_missing(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a network that fails on inputs runs once each tensor among the positional ones has one axis more."""

    def runs(inputs: tuple[Any, ...]) -> bool:
        try:
            with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                own_copy(model).eval()(*inputs, **kwargs)
        except Exception:  # whatever a network raises on inputs that it was not made for
            return False
        return True

    batched = tuple(a.unsqueeze(0) if isinstance(a, Tensor) else a for a in args)
    return any(isinstance(a, Tensor) for a in args) and not runs(args) and runs(batched)


def _exported(model: nn.Module, program: torch.export.ExportedProgram) -> Trace:
    first_name = {name: first for first, names in tied_names(model).items() for name in names}
    specs = {getattr(spec.arg, "name", None): spec for spec in program.graph_signature.input_specs}
    inputs: list[Any] = []
    constants: dict[str, Tensor] = {}
    live = _live(program.graph)
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec, tensor = specs[node.name], node.meta.get("val")
        if spec.kind.name in ("PARAMETER", "BUFFER"):
            held = program.state_dict.get(spec.target, program.constants.get(spec.target))
            name = first_name.get(spec.target)
            inputs.append(held if name is None or held is None else _enter(name, held, node, node in live, constants))
        elif spec.kind.name in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
            inputs.append(program.constants[spec.target])
        else:
            inputs.append(pinned_value(tensor.shape, INPUT) if isinstance(tensor, Tensor) else tensor)
    return Trace(program.graph_module, tuple(inputs), constants=constants)


def _enter(
    name: str, tensor: Tensor, node: torch.fx.Node, live: bool, constants: dict[str, Tensor]
) -> Parameter | Tensor:
    """What stands for a tensor of the state dict: a parameter, or a constant that is read by value."""
    continuous = _is_continuous(tensor)
    if tensor.layout == torch.strided and (continuous or _is_data(node)):
        return Parameter(name, tuple(tensor.shape), continuous, isinstance(tensor, nn.Parameter))
    if live:  # a counter that is only counted on is free to differ
        constants[name] = tensor.detach().clone() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return tensor


def _live(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    """The nodes that an output of the network, or what is kept of the pass in a real-valued buffer, depends on.

    What is computed and thrown away asks nothing of the units (but numbers that are read off tensors do). A write in
    place counts where anything live reads the memory that it writes to, or where that memory is a buffer of the state:
    only integers (counters) are not followed.
    """
    root: dict[torch.fx.Node, torch.fx.Node] = {}
    writers: list[torch.fx.Node] = []
    live: set[torch.fx.Node] = set()
    for node in graph.nodes:
        checks = "_assert" in str(node.target)  # stops a pass, or leaves it as it is (the arguments of a distribution)
        if node.op == "output" or (node.op == "call_function" and not checks and not _makes_tensors(node)):
            live.add(node)  # a number that is read off a tensor decides where the pass goes
        if node.target is operator.getitem and node.args[0] in root:  # the parts of a split tensor are views too
            root[node] = root[node.args[0]]
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema, inputs = node.target._schema, node.all_input_nodes
        aliased = any(r.alias_info is not None for r in schema.returns)
        if aliased and inputs:
            root[node] = root.get(inputs[0], inputs[0])
        if schema.is_mutable and inputs:
            writers.append(node)
            value = root.get(inputs[0], inputs[0])
            held = value.meta.get("val")
            if value.op == "placeholder" and isinstance(held, Tensor) and _is_continuous(held):
                live.add(node)
    while True:
        before = len(live)
        for node in reversed(graph.nodes):
            if node in live:
                live.update(node.all_input_nodes)
        read = {root.get(node, node) for node in live}
        live.update(writer for writer in writers if root.get(writer, writer) in read)
        if len(live) == before:
            return frozenset(live)


def _makes_tensors(node: torch.fx.Node) -> bool:
    output = node.meta.get("val")
    held = output if isinstance(output, (tuple, list)) else [output]
    return all(isinstance(t, Tensor) for t in held)


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _traits(node: torch.fx.Node) -> frozenset[str]:
    """What is known of the operator that a node calls; nothing of one with arguments that make it another one."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return frozenset()
    name = _rule_name(node.target)
    names = [a.name for a in node.target._schema.arguments]
    if "train" in names or "negative_slope" in names:  # a dropout that drops, a leaky ReLU that is a ReLU
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        if given.get("train") or given.get("negative_slope", 1) == 0:
            return frozenset()
    return TRAITS.get(name, frozenset())


def _rule_name(target: torch._ops.OpOverload) -> str:
    """The name that a rule is registered under: that of an operator in place is its name without the underscore."""
    name = target._schema.name.replace("::", ".")
    writes = bool(target._schema.arguments) and _writes(target._schema.arguments[0])
    return name[:-1] if writes and name.endswith("_") else name


def _is_data(node: torch.fx.Node) -> bool:
    """Whether an integer or boolean tensor enters as a factor, a term or a choice (a pruning mask), never as an index.

    Such a tensor may have other values in another state, and moves with the units. A mask that sets entries to minus
    infinity is not taken for one: which positions of an attention are seen belongs to the architecture.
    """
    for user in node.users:
        if user.target is operator.getitem:
            if not _is_data(user):
                return False
            continue
        if not isinstance(user.target, torch._ops.OpOverload):
            return False
        if not _traits(user) & {"moves", "combines"}:
            return False
        if any(isinstance(a, float) and a == -math.inf for a in (*user.args, *user.kwargs.values())):
            return False
        output = user.meta.get("val")
        held = output if isinstance(output, (tuple, list)) else [output]
        whole = any(isinstance(t, Tensor) and not _is_continuous(t) for t in held)
        if whole and not _is_data(user):
            return False
    return bool(node.users)


def _has_open_shapes(program: torch.export.ExportedProgram) -> bool:
    held = (leaf for node in program.graph.nodes for leaf in _flatten(node.meta.get("val")))
    return any(isinstance(size, torch.SymInt) for t in held if isinstance(t, Tensor) for size in t.shape)


def _recorded(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: str | None, *, batched: bool = False
) -> Trace:
    """The operators that the example inputs pass through; with ``batched`` those of vmap and autograd."""
    model = copied(model)
    state = model.state_dict(keep_vars=True)
    tensors = {first: state[first].detach() for first in tied_names(model)}

    leaves, spec = tree_flatten((args, dict(kwargs)))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def forward(tensors: dict[str, Tensor], given: list[Tensor]) -> Any:
        remaining = iter(given)
        again = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with _Whole():
            return torch.func.functional_call(model, tensors, *tree_unflatten(again, spec))

    graph_module = make_fx(
        forward,
        tracing_mode="real",
        pre_dispatch=not batched,
        _allow_non_fake_inputs=True,
        _error_on_data_dependent_ops=False,
    )(tensors, given)
    constants: dict[str, Tensor] = {}
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    live = _live(graph_module.graph)
    inputs: list[Any] = [
        _enter(name, state[name], node, node in live, constants) for name, node in zip(tensors, nodes, strict=False)
    ]
    inputs += [pinned_value(leaf.shape, INPUT) for leaf in given]
    return Trace(graph_module, tuple(inputs), place, constants)


def _reads_values(graph: torch.fx.Graph) -> bool:
    """Whether the program has read a number that inputs, weights or chance decide."""
    decided: set[torch.fx.Node] = set()
    for node in graph.nodes:
        overload = node.target if isinstance(node.target, torch._ops.OpOverload) else None
        chance = overload is not None and torch.Tag.nondeterministic_seeded in overload.tags
        packed = node.args[0] if node.target is operator.getitem else None
        if isinstance(packed, torch.fx.Node) and packed.target is torch.ops.aten._pack_padded_sequence.default:
            if packed.args[node.args[1]] in decided:
                decided.add(node)  # the steps, by the input; how many sequences each has, by their lengths alone
            continue
        if node.op == "placeholder" or chance or decided.intersection(node.all_input_nodes):
            decided.add(node)
            if node.op == "call_function" and (not _makes_tensors(node) or _has_length_by_values(node)):
                return True
    return False


def _has_length_by_values(node: torch.fx.Node) -> bool:
    """Whether the values of a tensor tell how long a result is (what is chosen by a mask), so that its shape does."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in node.target.tags:
        return False
    kinds = [getattr(n.meta.get("val"), "dtype", None) for n in node.all_input_nodes[1:]]
    return "index" not in str(node.target) or torch.bool in kinds or torch.uint8 in kinds


def _place(error: BaseException) -> str:
    """The innermost line of an error's traceback that is not PyTorch's: ``file.py:12 in forward: code``.

    Compiled code (``<string>``) is no line of the model; torchvision's is.
    """
    library, here = (f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((library, here, "<"))]
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


def interpret(traces: Sequence[Trace], nestings: Nestings | None = None) -> Ledger:
    """Run the rules over traced forward passes, with axes nested as told where that is open.

    All passes make their demands on the same units, those of the parameters: what is left holds for each of them.
    """
    nestings = nestings or Nestings()
    ledger = Ledger(turned=nestings.turned, nested=nestings.nested)
    readings: dict[int, list[Reading]] = {}
    for traced in traces:
        reading = Reading()
        readings.setdefault(traced.example, []).append(reading)
        for result in _Interpreter(ledger, traced.module, reading, traced.following).run(traced.inputs):
            if isinstance(result, Value):
                ledger.pin(result, "output of the network")
    ledger.partly = frozenset[str]().union(*(pin_unseen(ledger, passes) for passes in readings.values()))
    for name, value in ledger.parameters.items():
        # what operators nested they have seen in blocks; of what was nested from the start, they may have seen views
        ledger.observe(value, nested=name in nestings.nested)
    return ledger


class _Interpreter:
    def __init__(
        self, ledger: Ledger, module: torch.fx.GraphModule, reading: Reading, following: Following = NOTHING
    ) -> None:
        self.ledger, self.reading, self.following = ledger, reading, following
        self.module = module
        self.env: dict[torch.fx.Node, Any] = {}
        self.root: dict[torch.fx.Node, torch.fx.Node] = {}
        self.order = {node: k for k, node in enumerate(module.graph.nodes)}
        self.orders = any(map(_orders, module.graph.nodes))
        self.zero: set[torch.fx.Node] = set()
        self.distinct = Distinct()
        self.sole: set[torch.fx.Node] = set()
        self.statistic: set[torch.fx.Node] = set()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Results of the graph for the given inputs, as values."""
        remaining = iter(inputs)
        live = _live(self.module.graph)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(remaining)
            elif node not in live:
                continue
            elif node.op == "get_attr":
                self.env[node] = getattr(self.module, str(node.target), None)
            elif node.op == "call_function" and node in live:
                self._call(node)
            elif node.op == "output":
                self._read(node.all_input_nodes)
                return [self._value(self.env[r]) if isinstance(r, torch.fx.Node) else r for r in _flatten(node.args[0])]
        return []

    def _value(self, held: Any) -> Any:
        """What a rule sees: parameters and constant tensors as values."""
        if isinstance(held, Parameter):
            return self.ledger.parameter(held.name, held.shape, scales=held.scales)
        if isinstance(held, Tensor):
            return self._constant(held)
        return held

    def _known(self, node: torch.fx.Node) -> Any:
        """What a rule sees of a node; of a constant that follows sizes, nothing."""
        held = self.env[node]
        return self._value(held.to("meta") if node.name in self.following.constants else held)

    def _constant(self, tensor: Tensor) -> Value:
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_meta:  # no values: any two entries may differ
            array: NDArray[Any] = np.arange(tensor.numel()).reshape(tuple(tensor.shape))
        elif tensor.dtype == torch.bfloat16:
            array = tensor.detach().float().cpu().numpy()
        else:
            array = tensor.detach().cpu().numpy()
        known = array.size > 0 and array.dtype.kind in "fiub" and not tensor.is_meta
        alike = known and bool((array == array.flat[0]).all())
        value = moving.uniform(array.shape, float(array.flat[0]) if alike else None)
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
        return self._paired(array, value)

    def _paired(self, array: NDArray[Any], value: Value) -> Value:
        """Units for a constant that stays the same when two of its axes are permuted alike, as the identity does.

        No two rows of the identity are alike, but if its rows and columns change places together, it is the same: it
        has one unit for each index, on both axes. In ``h @ (W + I)`` these tie the rows of ``W`` to its columns.
        """
        sizes = [n for n in array.shape if n > 1]
        twice = {n for n in sizes if sizes.count(n) == 2}
        if len(twice) != 1 or max(twice) > 512 or array.size > 1 << 20:
            return value
        (n,) = twice
        first, second = (k for k, size in enumerate(array.shape) if size == n)
        square = np.moveaxis(array, (first, second), (0, 1)).reshape(n, n, -1)
        kinds = interchangeable(square)
        rows = -value.labels[first][0].reshape(-1), -value.labels[second][0].reshape(-1)
        if len(distinct(kinds)) >= min(len(distinct(r)) for r in rows):
            return value  # its rows (or columns) are as alike for themselves
        units = self.ledger.fresh_units(n)
        self.ledger.marks.append(Mark(units, kinds, "meets a constant"))
        labels = tuple(
            (along(units, k, array.ndim),) if k in (first, second) else label for k, label in enumerate(value.labels)
        )
        value = replace(value, labels=labels, fill=None)
        self.ledger.observe(value)
        return value

    def _call(self, node: torch.fx.Node) -> None:
        target = node.target
        self.ledger.step += 1
        if target is operator.getitem:
            source, position = node.args
            assert isinstance(source, torch.fx.Node)
            self.env[node] = self.env[source][position]
            self.distinct.piece(node, source)
            if source in self.statistic:
                self.statistic.add(node)
            if source in self.sole and source.target is torch.ops.aten.unbind.int:  # each piece has scales of its own
                self.sole.add(node)
            if source in self.reading.origins:
                self.reading.move(node, source, "")
            if source in self.root:  # a piece of what was cut
                self.root[node] = self.root[source]
            return
        if not isinstance(target, torch._ops.OpOverload):
            self._read(node.all_input_nodes)
            self.env[node] = self._opaque(node)
            return
        nodes = [a for a in _flatten((node.args, node.kwargs)) if isinstance(a, torch.fx.Node)]
        held = [self.env[a] for a in nodes]
        rule_name, traits = _rule_name(target), _traits(node)
        draws = torch.Tag.nondeterministic_seeded in target.tags and "same" not in traits
        if not draws and not any(isinstance(h, (Value, Parameter)) for h in _flatten(held)):
            self.env[node] = self._evaluate(node)
            self._alias(node, target)
            self._remember(node, traits, {})
            return
        writes = bool(target._schema.arguments) and _writes(target._schema.arguments[0])
        output = node.meta.get("val")
        bound = self._bind(node, target)
        self._note(node, traits, bound)
        for axis in (axis for name, axis in self.following.cuts if name == node.name):
            self._cut_by_sizes(self._value(self.env[node.all_input_nodes[0]]), axis)
        points = self._points(rule_name, bound)
        call = Call(
            self.ledger,
            rule_name,
            bound,
            _shapes(output),
            node.name,
            _read_outputs(node),
            self._bind(node, target, lambda n: self.env[n] if isinstance(self.env[n], Tensor) else None),
            self._bind(node, target, lambda n: getattr(n.meta.get("val"), "dtype", None)),
            self._ids(node, target, bound, self.zero),
            self._apart(node, target, bound) if self.orders else {},
            self._ids(node, target, bound, {n for n in self.sole if len(n.users) == 1}),
            self._ids(node, target, bound, self.statistic),
        )
        # a parameter that comes twice is no longer free to be nested as one of its places asks
        places = [a for a in nodes if isinstance(self.env[a], Parameter)]
        self.ledger.used |= {self.env[a].name for a in places if nodes.count(a) > 1}
        marked = len(self.ledger.marks)
        values = _apply(RULES.get(rule_name, unknown), call)
        self.reading.select(node, [m.component for m in self.ledger.marks[marked:] if m.reason == moving.SELECTED])
        if "fills" not in traits:  # what is computed from constants is no longer the number that they hold
            values = [v if v.fill is None else replace(v, fill=None) for v in values]
        for k, tensor in enumerate(output if isinstance(output, (tuple, list)) else [output]):
            if values[k].scale and isinstance(tensor, Tensor) and not _is_continuous(tensor):
                self.ledger.pin_scale(values[k].scale)  # what is cut to integers follows no factor
                values[k] = replace(values[k], scale=())
        if points:
            values = [replace(v, points=points) for v in values]
        for value in values:
            self.ledger.observe(value)
        for h in _flatten(held):
            if isinstance(h, Parameter):
                self.ledger.used.add(h.name)
        self.env[node] = values if isinstance(output, (tuple, list)) else values[0]
        self._remember(node, traits, bound)
        self._alias(node, target)
        if writes:
            self._write(node, node.args[0])

    def _inner(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Results of a graph within the graph."""
        return _Interpreter(self.ledger, module, self.reading).run(inputs)

    def _note(self, node: torch.fx.Node, traits: frozenset[str], bound: dict[str, Any]) -> None:
        """What an operator reads, and what it only moves; and parameters, whose entries are different numbers."""
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        found = "picks" in traits and len(tensors) == 2 and picked(self.env[tensors[1]], 0) is not None
        if tensors and ("moves" in traits or found):
            held = self.env[tensors[0]]
            if isinstance(held, (Parameter, Value)):
                self.reading.move(node, tensors[0], held.name if isinstance(held, Parameter) else held)
        else:
            self._read(node.all_input_nodes)
        if self.orders:
            for n in tensors:
                held = self.env[n]
                if isinstance(held, Parameter) and held.trained:
                    self.distinct.source(n, self._value(held), held.name)

    def _cut_by_sizes(self, value: Value, axis: int) -> None:
        """Nothing is known of where other inputs cut: units are pinned, and factors along the axis are equal."""
        self.ledger.pin_label(value.labels[axis], FOLLOWS, axis)
        for _, variable in value.scale:
            self.ledger.constant_along(variable, axis)

    def _read(self, nodes: Sequence[torch.fx.Node]) -> None:
        for n in nodes:
            for held in _flatten(self.env[n]):
                if isinstance(held, (Parameter, Value)):
                    self.reading.read(n, held.name if isinstance(held, Parameter) else held)

    def _opaque(self, node: torch.fx.Node) -> Any:
        """A higher-order operator or a Python function: inlined or evaluated where possible, else pinned and named."""
        held: list[Any] = list(torch.fx.node.map_arg(node.args, lambda n: self.env[n]))
        output = node.meta.get("val")
        name = getattr(node.target, "__name__", str(node.target))
        if output is None and not node.users and not node.all_input_nodes:  # turns gradients on or off
            return None
        bodies = [k for k, h in enumerate(held) if isinstance(h, torch.fx.GraphModule)]
        if name.startswith("wrap_with") and len(bodies) == 1:  # a context manager: autocast, no_grad, ...
            return self._inner(held[bodies[0]], held[bodies[0] + 1 :])
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
        ways = [self._inner(held[k], held[3]) for k in (1, 2)]
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

    def _bind(
        self, node: torch.fx.Node, target: torch._ops.OpOverload, read: Callable[[torch.fx.Node], Any] | None = None
    ) -> dict[str, Any]:
        """The arguments by name; what stands for each tensor is its value for a rule, or what ``read`` says of it."""
        read = read or self._known
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
            bound[argument.name] = _bound(given, read)
        return bound

    def _ids(
        self, node: torch.fx.Node, target: torch._ops.OpOverload, bound: dict[str, Any], marked: set[torch.fx.Node]
    ) -> frozenset[int]:
        """Ids of the bound values whose nodes are in a set."""
        if not any(n in marked for n in node.all_input_nodes):
            return frozenset()
        flags = _flatten(list(self._bind(node, target, lambda n: n in marked).values()))
        held = _flatten(list(bound.values()))
        return frozenset(id(v) for v, flag in zip(held, flags, strict=True) if isinstance(v, Value) and flag is True)

    def _points(self, rule_name: str, bound: dict[str, Any]) -> Label:
        """Settle what the arguments name: units are pinned where numbers are read; what is kept goes to the outputs."""
        policy = POSITIONS.get(rule_name, "pin")
        if policy == "read":
            return ()
        kept: Label = ()
        for name, argument in bound.items():
            for value in argument if isinstance(argument, list) else [argument]:
                if isinstance(value, Value) and value.points:
                    if policy == "pin":
                        self.ledger.pin_label(value.points, "its position is read as a number")
                    kept = value.points if policy == "keep" else ()
            if isinstance(argument, list):
                bound[name] = [replace(v, points=()) if isinstance(v, Value) and v.points else v for v in argument]
            elif isinstance(argument, Value) and argument.points:
                bound[name] = replace(argument, points=())
        return kept

    def _apart(self, node: torch.fx.Node, target: torch._ops.OpOverload, bound: dict[str, Any]) -> dict[int, Array]:
        """For each of the bound values the units that its entries are different at."""
        nodes = _flatten(list(self._bind(node, target, lambda n: n).values()))
        held = _flatten(list(bound.values()))
        return {
            id(v): self.distinct.units(n)
            for v, n in zip(held, nodes, strict=True)
            if isinstance(v, Value) and isinstance(n, torch.fx.Node)
        }

    def _remember(self, node: torch.fx.Node, traits: frozenset[str], bound: dict[str, Any]) -> None:
        """Which tensors are zero throughout, which are statistics, and where entries are different numbers."""
        held = self.env.get(node)
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if isinstance(held, Tensor):
            if held.layout == torch.strided and held.numel() and not held.is_meta and not held.any():
                self.zero.add(node)
            return
        moves = "moves" in traits
        if "zeros" in traits or (moves and inputs and inputs[0] in self.zero):
            self.zero.add(node)
        follows = moves or "of_statistics" in traits
        if "statistic" in traits or (follows and inputs and all(n in self.statistic for n in inputs)):
            self.statistic.add(node)
        alone = moves and len(inputs) == 1 and (len(inputs[0].users) == 1 or _is_own_piece(node))
        if alone and (inputs[0] in self.sole or isinstance(self.env[inputs[0]], Parameter)):
            self.sole.add(node)
        outputs = [v for v in (held if isinstance(held, (list, tuple)) else [held]) if isinstance(v, Value)]
        if self.orders and outputs:
            operands = self._operands(node, bound)
            kept = all(_keeps_digits(node.meta.get("val"), n.meta["val"]) for n, _ in operands.values())
            held_axes = [bound["dim"]] if isinstance(bound.get("dim"), int) else []
            held_axes += range(-len(bound.get("normalized_shape") or ()), 0)
            axes = [k % max(outputs[0].ndim, 1) for k in held_axes if outputs[0].ndim]
            self.distinct.follow(node, traits if kept else frozenset(), operands, node.all_input_nodes, outputs, axes)

    def _operands(self, node: torch.fx.Node, bound: dict[str, Any]) -> dict[str, tuple[torch.fx.Node, Value]]:
        """The floating-point tensors among the arguments; those of a list by the argument's name and their number."""
        assert isinstance(node.target, torch._ops.OpOverload)
        found: dict[str, tuple[torch.fx.Node, Value]] = {}
        for name, given in self._bind(node, node.target, lambda n: n).items():
            several = isinstance(given, list)
            nodes, values = (given, bound[name]) if several else ([given], [bound[name]])
            for k, (n, v) in enumerate(zip(nodes, values, strict=True)):
                if isinstance(n, torch.fx.Node) and isinstance(v, Value) and _is_continuous(n.meta["val"]):
                    found[f"{name} {k}" if several else name] = n, v
        return found

    # -- aliases and in-place writes ----------------------------------------------------------------------------

    def _alias(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        returns = target._schema.returns
        source = node.args[0] if node.args else None
        if not returns or returns[0].alias_info is None or not isinstance(source, torch.fx.Node):
            return
        if _same_memory(node, source):  # reshape, to and contiguous copy where they have to
            self.root[node] = self.root.get(source, source)

    def _write(self, node: torch.fx.Node, written: Any) -> None:
        """An in-place write: whoever else reads the same memory later sees the new content."""
        if not isinstance(written, torch.fx.Node):
            return
        root = self.root.get(written, written)
        others = [n for n in self.env if (n is root or self.root.get(n) is root) and n not in (written, node)]
        if node not in self.zero:
            self.zero -= {root, written, *others}
        for other in {root, written, *others}:
            if other is not node:
                self.distinct.overwrite(other, node, whole=other is written and written is root)
        now = self.order[node]
        reason = "written to in place through a view"
        chain = self._put_back(written, self.env[node]) if written is not root else [written]
        self.env[written] = self.env[node]
        stale = [n for n in others if any(self.order[u] > now for u in n.users) and n not in (chain or ())]
        if chain is not None and all(map(self._refresh, sorted(set(others) - set(chain), key=self.order.__getitem__))):
            return
        for other in stale:
            held = self.env[other]
            values = [self._value(v) for v in (held if isinstance(held, list) else [held])]
            for value in values:
                self.ledger.pin(value, reason)
            gone = [pinned_value(v.shape, reason) for v in values]
            self.env[other] = gone if isinstance(held, list) else gone[0]
        if stale:
            self.ledger.pin(self.env[node], reason)

    def _put_back(self, view: torch.fx.Node, new: Value) -> list[torch.fx.Node] | None:
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

    def _behind(self, view: torch.fx.Node, new: Value) -> tuple[torch.fx.Node, Value] | None:
        """What a view was taken of, with the view's new content in it; None for a view that does not tell."""
        piece = None
        if view.target is operator.getitem:
            view, piece = view.args  # type: ignore[assignment]
        source = view.args[0]
        if not isinstance(source, torch.fx.Node) or not isinstance(view.target, torch._ops.OpOverload):
            return None
        old = self._value(self.env[source])
        if not isinstance(old, Value):
            return None
        name = view.target._schema.name.partition("::")[2]
        given = self._bind(view, view.target)
        if name in ("fill_", "copy_") or (view.target._schema.arguments and _writes(view.target._schema.arguments[0])):
            return source, new  # what an earlier write returned
        if "same" in TRAITS.get(_rule_name(view.target), ()):
            return source, moving.reshape(self.ledger, new, old.shape)
        if name in ("transpose", "t", "swapaxes", "swapdims", "mT", "numpy_T", "adjoint"):
            back = Call(self.ledger, f"aten.{name}", {**given, "self": new}, [old.shape], view.name)
            return source, RULES[f"aten.{name}"](back)  # type: ignore[return-value]
        if name == "permute":
            return source, moving.permute(new, np.argsort([d % old.ndim for d in given["dims"]]).tolist())
        axis = given.get("dim", 0)
        if not isinstance(axis, int):
            return None
        axis %= max(old.ndim, 1)
        size = old.shape[axis]
        positions: Any = None
        if name == "slice":
            start, end, step = (given.get(k) for k in ("start", "end", "step"))
            positions = np.arange(size)[start:end:step]
        elif name == "narrow" and isinstance(given["start"], int):
            positions = (given["start"] % size) + np.arange(given["length"])
        elif name == "select" and isinstance(given["index"], int):
            positions = np.array([given["index"] % size])
        elif name == "unbind" and isinstance(piece, int):
            positions = np.array([piece])
        elif name in ("chunk", "split", "split_with_sizes", "tensor_split") and isinstance(piece, int):
            lengths = [shape[axis] for shape in _shapes(view.meta.get("val"))]
            positions = sum(lengths[:piece]) + np.arange(lengths[piece])
        if positions is None:
            return None
        frame = (*old.shape[:axis], len(positions), *old.shape[axis + 1 :])
        content = new if new.shape == frame else moving.reshape(self.ledger, new, frame)
        return source, overwritten(self.ledger, replace(old, parameter=None), axis, positions, content)

    def _refresh(self, node: torch.fx.Node) -> bool:
        """Look again at memory that was written to elsewhere; whether that could be done."""
        if node.target is operator.getitem:
            source, position = node.args
            assert isinstance(source, torch.fx.Node)
            self.env[node] = self.env[source][position]
            return True
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.args[0], torch.fx.Node):
            return False
        schema = node.target._schema
        if _writes(schema.arguments[0]):  # what a write returned
            self.env[node] = self.env[node.args[0]]
            return True
        name = schema.name.replace("::", ".")
        output = node.meta.get("val")
        bound = self._bind(node, node.target)
        call = Call(self.ledger, name, bound, _shapes(output), node.name, _read_outputs(node))
        values = _apply(RULES.get(name, unknown), call)
        for value in values:
            self.ledger.observe(value)
        self.env[node] = values if isinstance(output, (tuple, list)) else values[0]
        return True


def _orders(node: torch.fx.Node) -> bool:
    """Whether an operator returns positions that it finds by comparing numbers."""
    output = node.meta.get("val")
    held = [t for t in (output if isinstance(output, (tuple, list)) else [output]) if isinstance(t, Tensor)]
    counts = any(not _is_continuous(t) and t.dtype != torch.bool for t in held)
    read = (n.meta.get("val") for n in node.all_input_nodes)
    return counts and any(isinstance(t, Tensor) and _is_continuous(t) for t in read)


def _keeps_digits(output: Any, given: Tensor) -> bool:
    """Whether a result keeps all digits of an operand: numbers that are cut to fewer may become equal."""
    held = [t for t in (output if isinstance(output, (tuple, list)) else [output]) if isinstance(t, Tensor)][:1]
    return all(_is_continuous(t) and t.dtype.itemsize >= given.dtype.itemsize for t in held)


def _same_memory(view: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Whether two nodes hold the same memory, as far as the tensors of the traced pass tell.

    In a recorded pass each node has one of its own, so that the operator is run once more, without numbers.
    """
    held = [_flatten(n.meta.get("val"))[0] for n in (view, source)]
    if not all(isinstance(t, Tensor) and t.layout == torch.strided for t in held):
        return True
    (first, second), target = held, view.target
    if first.untyped_storage()._cdata == second.untyped_storage()._cdata:
        return True
    modes = [t.fake_mode for t in (first, second) if isinstance(t, FakeTensor)]
    if not isinstance(target, torch._ops.OpOverload) or len(modes) < 2 or modes[0] is modes[1]:
        return False
    if _writes(target._schema.arguments[0]):
        return True
    with FakeTensorMode():
        fresh = {
            n: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
            for n in view.all_input_nodes
            if isinstance(t := n.meta["val"], Tensor)
        }
        args, kwargs = torch.fx.node.map_arg((view.args, view.kwargs), fresh.__getitem__)
        again: Tensor = _flatten(target(*args, **kwargs))[0]
    return again.untyped_storage()._cdata == fresh[source].untyped_storage()._cdata


def interchangeable(square: NDArray[Any]) -> Array:
    """For each index of a matrix ``[n, n, ...]`` a kind: those of one kind may be permuted, rows and columns alike."""
    n = len(square)
    kinds = np.full(n, -1, dtype=np.int64)
    firsts: list[int] = []
    for j in range(n):
        for kind, i in enumerate(firsts):
            others = np.ones(n, dtype=bool)
            others[[i, j]] = False
            if (
                np.array_equal(square[i, i], square[j, j])
                and np.array_equal(square[i, j], square[j, i])
                and np.array_equal(square[i, others], square[j, others])
                and np.array_equal(square[others, i], square[others, j])
            ):
                kinds[j] = kind
                break
        else:
            kinds[j] = len(firsts)
            firsts.append(j)
            if len(firsts) > 32 and len(firsts) > j // 2:
                return np.arange(n)  # hardly any two are alike
    return kinds


def _bound(argument: Any, read: Callable[[torch.fx.Node], Any]) -> Any:
    if isinstance(argument, torch.fx.Node):
        return read(argument)
    if isinstance(argument, (list, tuple)):
        return [_bound(a, read) for a in argument]
    return argument


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


def _is_own_piece(node: torch.fx.Node) -> bool:
    """Whether a tensor is read in pieces along one axis only, and the node is the first to read its piece."""
    source = node.args[0]
    if node.target is not torch.ops.aten.select.int or not isinstance(source, torch.fx.Node):
        return False
    axis, index = node.args[1:]
    if any(u.target is not node.target or u.args[1] != axis for u in source.users):
        return False
    size = source.meta["val"].shape[axis]
    return next(u for u in source.users if (u.args[2] - index) % size == 0) is node  # type: ignore[operator]


def _read_outputs(node: torch.fx.Node) -> frozenset[int]:
    """Positions of the outputs that something reads; for a piece, those of all pieces of what it is taken from."""
    if node.target is torch.ops.aten.select.int:
        source, axis, _ = node.args
        assert isinstance(source, torch.fx.Node)
        pieces = (u.args for u in source.users if u.target is node.target)
        size = source.meta["val"].shape[axis]
        return frozenset(k % size for _, a, k in pieces if a == axis and isinstance(k, int))
    positions = (u.args[1] for u in node.users if u.target is operator.getitem and u.users)
    return frozenset(p for p in positions if isinstance(p, int)) or frozenset((0,))


def _shapes(output: Any) -> list[tuple[int, ...]]:
    outputs = output if isinstance(output, (tuple, list)) else [output]
    return [tuple(int(n) for n in o.shape) if isinstance(o, Tensor) else () for o in outputs]


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
