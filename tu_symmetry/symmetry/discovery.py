"""Discovery: the symmetry graph of any module, from one traced forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tu_symmetry.modules import uncopyable
from tu_symmetry.states import SymmetryError, kind_of
from tu_symmetry.symmetry.extraction import permutation_groups
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import Group, LinearGroup, Pin, ScaleGroup, SignGroup
from tu_symmetry.symmetry.interpreter import Nestings, interpret
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.linear_groups import linear_groups, rotary_groups
from tu_symmetry.symmetry.reading import could_meet, pin_what_could_meet
from tu_symmetry.symmetry.running.probe import (
    Example,
    ExampleInputs,
    ExampleKwargs,
    Probe,
    doubled,
    examples_of,
    hollow,
)
from tu_symmetry.symmetry.running.weights import is_continuous
from tu_symmetry.symmetry.scale_groups import scale_groups, sign_groups
from tu_symmetry.symmetry.sizes import left_out, with_defaults
from tu_symmetry.symmetry.source import asks_for_mode, asks_for_sizes, never_named
from tu_symmetry.symmetry.tracing import Trace, tied_names, trace, with_other_sizes


def discover_symmetries(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    example_kwargs: ExampleKwargs = None,
    branches: Literal["refuse", "record"] = "refuse",
) -> SymmetryGraph:
    """Find the permutation, positive-scale and normalization symmetries of a module.

    The module is traced by ``torch.export`` in evaluation mode, and in training mode where that may differ; its weights
    play no role, and it is left as it is. A table of rules, one for each operator, follows which hidden units index the
    axes of every parameter and buffer; an operator without a rule pins what it touches. What the example does not read
    (rows of a table of positions beyond its length, parameters that it does not reach) is pinned, and a flag of
    ``forward`` that no example gives is followed both ways.

    Args:
        model: any module; also one on the meta device, which holds no weights (indices and masks stay on the CPU).
            Its outputs are the tensors in what it returns: in mappings, dataclasses, sequences; not in caches of keys
            and values.
        example_inputs: an input tensor, or the tuple of positional arguments of ``forward``. A list holds several
            examples, of other lengths or with other optional arguments: what all of them allow is found. (A module
            whose one argument is a list takes it in a tuple, ``([image],)``.)
        example_kwargs: keyword arguments of ``forward``; a list of them for several examples.
        branches: where ``forward`` branches on the values of a tensor, ``"refuse"`` with an error that names the line,
            or ``"record"`` the way that the example inputs take; what is found then holds for inputs of the same way.

    Raises:
        SymmetryError: if the module cannot be traced or copied, or inputs lie on another device.
    """
    if branches not in ("refuse", "record"):
        raise ValueError(f"branches must be 'refuse' or 'record', got {branches!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module. A checkpoint is no architecture: build the "
            "network that its weights belong to, and pass that"
        )
    if reason := uncopyable(model, compiled=True):
        raise SymmetryError(f"discovery works on a copy of {type(model).__name__}, and {reason}")
    packed = [name for name, held in model.state_dict().items() if not isinstance(held, Tensor)]
    if packed:
        raise SymmetryError(
            f"the state dict of {type(model).__name__} holds {packed[0]!r}, which is no tensor (a quantized layer "
            "packs its weights, for example); discover the symmetries of the network before it was quantized"
        )
    examples = examples_of(example_inputs, example_kwargs)
    probe = Probe.of(model, example_inputs, example_kwargs)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        model = hollow(model, None)
        examples = tree_map_only(
            Tensor, lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t.cpu(), examples
        )
    for example in examples:
        _require_one_device(model, example)
    traces, training, trained_on = _passes(model, examples, record=branches == "record")
    aliases, state = tied_names(model), model.state_dict()
    shapes = {name: tuple(state[name].shape) for name in aliases}
    floating = [name for name in aliases if is_continuous(state[name])]
    unused = _unused(traces, floating, live=False)
    unreached = tuple(n for n in unused if n not in never_named(model, unused))
    sized = with_defaults(model, examples[0])
    sizes = asks_for_sizes(model) or any(type(leaf) is int for leaf in tree_leaves(sized))
    left = [left_out(model, example) for example in examples]
    never = {name: value for name, value in left[0].items() if all(name in more for more in left)}
    flags = {name: value for name, value in never.items() if type(value) is bool}
    followed = traces
    if not traces[0].branch and (sizes or flags):  # the first example with other sizes or flags, in evaluation mode
        ways = [(0, sized)]
        alone = len(traces) > len(examples) and traces[-1].names(live=True) - frozenset[str]().union(
            *(t.names(live=True) for t in traces[: len(examples)])
        )
        if alone:  # some weights are read in training alone
            ways.append((len(examples), with_defaults(model, trained_on[0])))
        found: list[Trace] = []
        several = list(traces)
        for at, given in ways:
            several[at], *more = with_other_sizes(model, given, traces[at], flags, sizes=sizes, training=at > 0)
            found += more
        followed = (*several, *(replace(t, example=len(traces) + k) for k, t in enumerate(found)))
    tried = {t.flags.partition("=")[0] for t in followed} | {n for n, value in never.items() if type(value) is int}
    programs: list[Trace] = []  # without those that others stand for
    for one in followed:
        if not any(one.says_no_more_than(other) for other in programs):
            programs.append(one)
    idle = [
        Pin(n, k, s, "not used in the forward pass")
        for n in _unused(traces, floating, live=True)
        for k, s in enumerate(shapes[n])
        if s > 1
    ]
    buffers = frozenset(aliases) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    facts: dict[str, Any] = {
        "shapes": shapes,
        "aliases": aliases,
        "buffers": buffers,
        "architecture": type(model).__name__,
        "branch": next((t.branch for t in traces if t.branch), None),
        "constants": {name: tensor for t in traces for name, tensor in t.constants.items()},
        "kinds": {name: kind_of(state[name].dtype) for name in aliases},
        "positions": any(t.positions for t in traces),
        "unreached": unreached,
        "left_out": tuple(name for name in never if name not in tried),
        "training": training,
        "probe": probe.trained(trained_on),
    }

    def walk(nestings: Nestings, kind: Literal["scales", "signs", "linear"] = "scales") -> Ledger:
        ledger = interpret(programs, nestings, kind)
        for name in unreached:
            pin_what_could_meet(ledger, name, shapes[name])
        return ledger

    def read(nestings: Nestings) -> tuple[SymmetryGraph, Ledger]:
        ledger = walk(nestings)
        permutations, pinned = permutation_groups(ledger, list(aliases))
        scales, normalizations, terms = scale_groups(ledger, list(aliases), shapes, buffers)
        groups, pins, unknown = (tuple(permutations), scales, normalizations), (*pinned, *idle), tuple(ledger.unknown)
        return SymmetryGraph(*groups, pinned=pins, scale_terms=terms, unknown_operators=unknown, **facts), ledger

    graph, ledger, nestings = _best(read)
    signs, sign_terms = sign_groups(walk(nestings, "signs"), list(aliases), shapes, buffers)
    linears = linear_groups(walk(nestings, "linear"), list(aliases), buffers)
    graph = replace(graph, signs=signs, sign_terms=sign_terms, linears=linears)
    reasons: dict[Group, str] = {}
    rescaled: tuple[ScaleGroup | SignGroup | LinearGroup, ...]
    rescaled = (*graph.scales, *graph.normalizations, *graph.signs, *graph.linears)
    for group in rescaled:
        own = {m.parameter for m in group.members} - buffers
        if own <= ledger.partly or any(_could_meet(group, shapes, shapes[name]) for name in unreached):
            reasons[group] = "rescales what the example inputs do not read"
    graph = graph._without(reasons)
    return replace(graph, guesses=rotary_groups(graph))


def _best(read: Callable[[Nestings], tuple[SymmetryGraph, Ledger]]) -> tuple[SymmetryGraph, Ledger, Nestings]:
    """The reading that finds most, over nestings that are guessed and, where that was regretted, others."""

    def size(graph: SymmetryGraph) -> tuple[float, int]:
        return graph.log10_permutations, sum(g.size for g in (*graph.scales, *graph.normalizations))

    nestings = Nestings()
    graph, ledger = read(nestings)
    while (others := nestings.reconsidered(ledger)) != nestings:
        other = read(others)
        if size(other[0]) <= size(graph):
            break
        nestings, (graph, ledger) = others, other
    return graph, ledger, nestings


def _could_meet(
    group: ScaleGroup | SignGroup | LinearGroup, shapes: dict[str, tuple[int, ...]], shape: tuple[int, ...]
) -> bool:
    """Whether a tensor of some shape could meet what a group rescales; a number could be added to anything."""
    lengths = set[int]()
    for member in group.members:
        own = shapes[member.parameter]
        lengths.update(own if member.axis is None else (own[member.axis],))
    return math.prod(shape) == 1 or any(could_meet(n, shape) for n in lengths)


def _unused(traces: Sequence[Trace], names: Sequence[str], *, live: bool) -> list[str]:
    """Names of tensors that no pass computes with, or that no output depends on."""
    used = {name for t in traces for name in t.names(live=live)}
    return [name for name in names if name not in used]


def _passes(
    model: nn.Module, examples: Sequence[Example], *, record: bool
) -> tuple[tuple[Trace, ...], str, tuple[Example, ...]]:
    """The traced passes through all examples, in evaluation and, where that may differ, in training."""

    def numbered(found: Sequence[Trace]) -> tuple[Trace, ...]:
        return tuple(replace(t, example=k) for k, t in enumerate(found))

    evaluated = numbered([trace(model, args, kwargs, record=record) for args, kwargs in examples])
    floating = [name for name, tensor in model.state_dict().items() if is_continuous(tensor)]
    idle = set(_unused(evaluated, floating, live=True))
    ties = any(t.positions for t in evaluated)  # dropout makes equal numbers
    if not asks_for_mode(model) and not idle - never_named(model, idle) and not ties:
        return evaluated, "as evaluation", ()
    found: list[Trace] = []
    taken: list[Example] = []
    for example in examples:
        try:
            found.append(trace(model, *example, record=record, training=True))
        except SymmetryError as error:
            example = doubled(example)
            try:
                found.append(trace(model, *example, record=record, training=True))
            except SymmetryError:
                return evaluated, f"not followed: {str(error).splitlines()[0]}", ()
        taken.append(example)
    return (*evaluated, *numbered(found)), "followed", tuple(taken)


def _require_one_device(model: nn.Module, inputs: Example) -> None:
    """Refuse inputs none of which lies on a network's device (some may lie elsewhere, as lengths do)."""
    places = {t.device for t in (*model.parameters(), *model.buffers())}
    given = {t.device for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim > 0}
    if len(places) == 1 and given and not given & places:
        place, other = str(places.pop()), given.pop()
        raise SymmetryError(
            f"the example inputs lie on {other}, {type(model).__name__} on {place}: move one of them, for example "
            f"inputs.to({place!r})"
        )
