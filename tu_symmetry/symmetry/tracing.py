"""From a module to its graph of operators, by torch.export."""

from __future__ import annotations

import contextlib
import io
import operator
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.algebra import pinned_value
from tu_symmetry.symmetry.copies import copied, to_trace
from tu_symmetry.symmetry.nodes import enters_as_data, finds_positions, live_nodes, makes_tensors
from tu_symmetry.symmetry.running.probe import Example, tensors_of
from tu_symmetry.symmetry.running.weights import is_continuous
from tu_symmetry.symmetry.sizes import NOTHING, Following, alike, following, held_constants, resized

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
    """A forward pass as a graph of operators."""

    module: torch.fx.GraphModule
    inputs: tuple[Any, ...]  # for each placeholder a Parameter, a pinned value, a constant tensor, or a plain number
    branch: str | None = None  # where it branched on values: it holds for inputs that take the same way
    constants: dict[str, Tensor] = field(default_factory=dict)  # integers of the state dict that are read by value
    example: int = 0  # number of the example inputs among several
    following: Following = NOTHING  # what of the pass follows the sizes of its inputs
    flags: str = ""  # the flags that it turns against their defaults, as they are typed

    @cached_property
    def held(self) -> dict[torch.fx.Node, Any]:
        """The nodes, with the tensors that those hold which depend on constants only."""
        return held_constants(self.module, self.inputs)

    def says_no_more_than(self, other: Trace) -> bool:
        """Whether another pass is the same program, and follows already what of it this one has otherwise."""
        if len(self.inputs) != len(other.inputs) or self.following not in (NOTHING, other.following):
            return False
        entered = zip(self.inputs, other.inputs, strict=True)
        if any(type(a) is not type(b) or (isinstance(a, Parameter) and a != b) for a, b in entered):
            return False
        return alike(self.held, other.held) and following(other.held, self.held) <= other.following

    @property
    def positions(self) -> bool:
        """Whether some operator returns positions that it finds by comparing numbers."""
        return any(map(finds_positions, self.module.graph.nodes))

    def names(self, *, live: bool) -> frozenset[str]:
        """Names of the tensors that the pass computes with, or of those that its outputs (or its state) depend on."""
        nodes = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        kept = live_nodes(self.module.graph) if live else frozenset(node for node in nodes if node.users)
        entered = (held for held, node in zip(self.inputs, nodes, strict=True) if node in kept)
        return frozenset((*(h.name for h in entered if isinstance(h, Parameter)), *self.constants))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, record: bool = False, training: bool = False
) -> Trace:
    """Trace a copy of the model, in training or evaluation mode.

    Where ``forward`` branches on values of tensors, ``record`` the way that the example inputs take.

    Raises:
        SymmetryError: if the model cannot be exported, naming the branch or the operator that is in the way.
    """
    model = _with_known_outputs(model).train(training)
    with _quiet():
        try:
            program = _program(model, args, kwargs)
            if _has_open_shapes(program):  # boolean masks, nonzero: no branch, but sizes that only values tell
                return _recorded(model, args, kwargs, None)
            if any("_vmap_increment_nesting" in str(n.target) for n in program.graph.nodes):
                return _recorded(model, args, kwargs, None, batched=True)
            return _exported(model, program)
        except Exception as error:
            return _recorded_instead(model, args, kwargs, error, record=record)


def _with_known_outputs(model: nn.Module) -> nn.Module:
    """A copy to trace; of outputs that torch cannot take apart it returns the tensors that verification compares."""

    def known(_: nn.Module, args: Any, output: Any) -> Any:
        strange = any(not isinstance(x, (Tensor, int, float, complex, str, type(None))) for x in tree_leaves(output))
        return tensors_of(output) if strange else output

    copied = to_trace(model)
    copied.register_forward_hook(known)
    return copied


def _program(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.export.ExportedProgram:
    """The exported program, without the checks that ``torch.distributions`` makes of its arguments."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return torch.export.export(model, args, dict(kwargs), strict=False)
    finally:
        Distribution.set_default_validate_args(before)


def with_other_sizes(
    model: nn.Module,
    example: Example,
    first: Trace,
    flags: Mapping[str, bool],
    *,
    sizes: bool,
    training: bool = False,
) -> tuple[Trace, ...]:
    """A pass, with what of it follows the sizes of its inputs, and passes of other ``sizes`` and ``flags``."""
    model = _with_known_outputs(model).train(training)
    found: list[Trace] = []
    turned = [((example[0], example[1] | {name: not value}),) for name, value in flags.items()]
    with _quiet():
        for others in (*(resized(example) if sizes else ()), *turned):
            for args, kwargs in others:
                try:
                    program = _program(model, args, kwargs)
                except Exception:  # whatever a network raises on sizes that it was not made for
                    continue
                if not _has_open_shapes(program):
                    turns = ", ".join(f"{name}={kwargs[name]}" for name in flags if name in kwargs)
                    found.append(replace(_exported(model, program), flags=turns))
                    seen = following(first.held, found[-1].held)
                    first = replace(first, following=first.following | seen)
                break
    return (first, *found)


def _recorded_instead(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception, *, record: bool
) -> Trace:
    """The way that the example inputs take, where export fails: if it is the only one, or is asked for."""
    place, name = _place(error), type(model).__name__
    branches = isinstance(error, GuardOnDataDependentSymNode)  # else gradients, or packed sequences
    recorded = None
    try:
        recorded = _recorded(model, args, kwargs, place, batched=not branches)
    except Exception:  # whatever stops the network on these inputs; asked to record it, the user is told
        if branches and record:
            raise
    if recorded and not _reads_values(recorded.module.graph):  # a mask that forward makes: always the same way
        return replace(recorded, branch=None)
    if recorded and record:
        return recorded
    if recorded or branches:
        reason = (
            f"the forward pass of {name} branches on the values of a tensor, at {place}. Its symmetries may differ "
            'from branch to branch. discover_symmetries(..., branches="record") finds those of the way that the '
            "example inputs take; torch.where or torch.cond in place of the branch makes both ways count."
        )
    elif batch_axis_missing(model, args, kwargs):
        shapes = ", ".join(str(tuple(a.shape)) for a in args if isinstance(a, Tensor))
        reason = (
            f"batch axis missing? {name} does not run on example inputs of shape {shapes}, and does with an axis of "
            "length 1 in front of each: pass x.unsqueeze(0)"
        )
    else:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = (
            f"torch.export cannot trace {name}: {said} (at {place})\nLikely cause: the example inputs do not fit, or "
            "forward does something that no graph can hold. Check that model(*example_inputs) runs, or discover the "
            "symmetries of the submodules."
        )
    raise SymmetryError(reason) from error


class _Whole(TorchFunctionMode):
    """Notes where numbers leave a program that is recorded, which would come back as constants; views stay views."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__" and func.__self__ is Tensor.data:
            return args[0].detach()
        if name in ("tolist", "numpy", "__array__", "__dlpack__") or func in (torch.tensor, torch.as_tensor):
            for held in tree_leaves(args):
                if isinstance(held, Tensor) and held.numel() > 0:
                    torch.equal(held, held)  # a number that is read off it: see the rule of ``equal``
        return func(*args, **kwargs)


def batch_axis_missing(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a network that fails on inputs runs once each tensor among the positional ones has one axis more."""

    def runs(inputs: tuple[Any, ...]) -> bool:
        try:
            with _quiet(), torch.random.fork_rng(devices=[]):
                to_trace(model).eval()(*inputs, **kwargs)
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
    live = live_nodes(program.graph)
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
    continuous = is_continuous(tensor)
    if tensor.layout == torch.strided and (continuous or enters_as_data(node)):
        return Parameter(name, tuple(tensor.shape), continuous, isinstance(tensor, nn.Parameter))
    if live:  # a counter that is only counted on is free to differ
        constants[name] = tensor.detach().clone() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return tensor


def _has_open_shapes(program: torch.export.ExportedProgram) -> bool:
    held = (leaf for node in program.graph.nodes for leaf in tree_leaves(node.meta.get("val")))
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

    record = make_fx(forward, pre_dispatch=not batched, _allow_non_fake_inputs=True, _error_on_data_dependent_ops=False)
    graph_module = record(tensors, given)
    constants: dict[str, Tensor] = {}
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    live = live_nodes(graph_module.graph)
    inputs: list[Any] = [
        _enter(name, state[name], node, node in live, constants) for name, node in zip(tensors, nodes, strict=False)
    ]
    inputs += [pinned_value(leaf.shape, INPUT) for leaf in given]
    return Trace(graph_module, tuple(inputs), place, constants)


def _reads_values(graph: torch.fx.Graph) -> bool:
    """Whether the program has read a number that inputs, weights or chance decide."""
    decided: set[torch.fx.Node] = set()
    for node in graph.nodes:
        tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
        packed = node.args[0] if node.target is operator.getitem else None
        if isinstance(packed, torch.fx.Node) and packed.target is torch.ops.aten._pack_padded_sequence.default:
            if packed.args[node.args[1]] in decided:
                decided.add(node)  # the steps, by the input; how many sequences each has, by their lengths alone
            continue
        chance = torch.Tag.nondeterministic_seeded in tags
        if node.op == "placeholder" or chance or decided.intersection(node.all_input_nodes):
            decided.add(node)
            kinds = [getattr(n.meta.get("val"), "dtype", None) for n in node.all_input_nodes[1:]]
            masks = "index" not in str(node.target) or torch.bool in kinds or torch.uint8 in kinds
            # values may tell how long a result is (what is chosen by a mask), so that its shape tells values
            long_by_values = torch.Tag.dynamic_output_shape in tags and masks
            if node.op == "call_function" and (not makes_tensors(node) or long_by_values):
                return True
    return False


def _place(error: BaseException) -> str:
    """The innermost line of an error's traceback that is not PyTorch's: ``file.py:12 in forward: code``."""
    library, here = (f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((library, here, "<"))]
    if not frames:
        return "an unknown place"
    frame = frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """State dict names grouped by the tensor that they hold: first name to all names."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in groups.values()}
