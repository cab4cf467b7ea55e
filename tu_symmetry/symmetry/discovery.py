"""Discovery: the symmetry graph of any module, from one traced forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tu_symmetry.modules import uncopyable
from tu_symmetry.states import SymmetryError, kind_of
from tu_symmetry.symmetry.extraction import permutation_groups
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import NormalizationGroup, PermutationGroup, Pin, ScaleGroup, ScaleTerm
from tu_symmetry.symmetry.interpreter import interpret
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.nesting import Nestings
from tu_symmetry.symmetry.reading import could_meet, pin_what_could_meet
from tu_symmetry.symmetry.running.inputs import Example, ExampleInputs, ExampleKwargs, doubled, examples_of
from tu_symmetry.symmetry.running.probe import Probe
from tu_symmetry.symmetry.scale_groups import scale_groups
from tu_symmetry.symmetry.sizes import left_out, with_defaults
from tu_symmetry.symmetry.source import asks_for_mode, asks_for_sizes, never_named
from tu_symmetry.symmetry.tracing import Trace, tied_names, trace, with_other_sizes

Shapes = dict[str, tuple[int, ...]]


def discover_symmetries(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    example_kwargs: ExampleKwargs = None,
    branches: Literal["refuse", "record"] = "refuse",
) -> SymmetryGraph:
    """Find the permutation, positive-scale and normalization symmetries of a module.

    The module is traced in evaluation mode by ``torch.export`` (its weights play no role), and a table of rules, one
    for each operator, follows which hidden units index the axes of every parameter and buffer. An operator without a
    rule pins what it touches. Where the module's own code asks for training mode, or evaluation leaves parameters out,
    it is traced in training mode too. The module itself is left as it is.

    What is found holds beyond the example: units that the example does not read (the rows of a table of positions
    beyond its length) are pinned, and so are all that parameters which it does not reach could meet. A flag of
    ``forward`` that no example gives is followed both ways. More examples reach more.

    Args:
        model: any module; also one on the meta device (with inputs there), which holds no weights at all.
        example_inputs: an input tensor, or the tuple of positional arguments of ``forward``. A list holds several
            examples, of other lengths or with other optional arguments: what all of them allow is found. (A module
            whose one argument is a list takes it in a tuple, ``([image],)``.)
        example_kwargs: keyword arguments of ``forward``; a list of them for several examples.
        branches: what to do where ``forward`` branches on the values of a tensor: ``"refuse"``, with an error that
            names the line, or ``"record"`` the way that the example inputs take. What is found then holds for all
            inputs that take the same way.

    Returns:
        The symmetry graph, which is verified (see :func:`verify_symmetries`) before weights are first transformed.

    Raises:
        SymmetryError: if the module cannot be traced, naming the line of the branch that is in the way, or cannot be
            copied; if inputs lie on another device.
        TypeError: for something else than a module, a state dict for example.
    """
    if branches not in ("refuse", "record"):
        raise ValueError(f"branches must be 'refuse' or 'record', got {branches!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module. A checkpoint is no architecture: build the "
            "network that its weights belong to, and pass that; weights play no role in discovery"
        )
    if reason := uncopyable(model, compiled=True):
        raise SymmetryError(f"discovery works on a copy of {type(model).__name__}, and {reason}")
    packed = [name for name, held in model.state_dict().items() if not isinstance(held, Tensor)]
    if packed:
        raise SymmetryError(
            f"the state dict of {type(model).__name__} holds {packed[0]!r}, which is no tensor (a quantized layer "
            "packs its weights, for example); discover the symmetries of the network before it was quantized, and "
            "transform that one"
        )
    examples = examples_of(example_inputs, example_kwargs)
    for example in examples:
        _require_one_device(model, example)
    probe = Probe.of(model, example_inputs, example_kwargs, generator=torch.Generator().manual_seed(0))
    passes = _Passes.of(model, examples, record=branches == "record")
    aliases = tied_names(model)
    state = model.state_dict()
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = frozenset(name for name in aliases if name not in trained)
    shapes = {name: tuple(state[name].shape) for name in aliases}
    order = list(aliases)
    floating = [n for n in order if state[n].is_floating_point() or state[n].is_complex()]
    unused = passes.unused(floating, live=False)
    unreached = [n for n in unused if n not in never_named(model, unused)]
    sized = with_defaults(model, examples[0])
    sizes = asks_for_sizes(model) or any(type(leaf) is int for leaf in tree_leaves(sized))
    left = [left_out(model, example) for example in examples]
    never = {name: value for name, value in left[0].items() if all(name in more for more in left)}
    flags = {name: value for name, value in never.items() if type(value) is bool}
    followed = passes.with_other_sizes(model, sized, flags, sizes=sizes)
    tried = {t.flags.partition("=")[0] for t in followed} | {n for n, value in never.items() if type(value) is int}
    found = _Reading.best(followed, order, shapes, buffers, unreached)
    idle = [
        Pin(n, k, s, "not used in the forward pass")
        for n in passes.unused(floating, live=True)
        for k, s in enumerate(shapes[n])
        if s > 1
    ]
    graph = SymmetryGraph(
        permutations=found.permutations,
        scales=found.scales,
        normalizations=found.normalizations,
        shapes=shapes,
        aliases=aliases,
        buffers=buffers,
        pinned=(*found.pinned, *idle),
        unknown_operators=tuple(found.ledger.unknown),
        scale_terms=found.terms,
        architecture=type(model).__name__,
        branch=next((t.branch for t in passes.traces if t.branch), None),
        constants={name: tensor for t in passes.traces for name, tensor in t.constants.items()},
        kinds={name: kind_of(state[name].dtype) for name in aliases},
        positions=any(t.positions for t in passes.traces),
        unreached=tuple(unreached),
        left_out=tuple(name for name in never if name not in tried),
        training=passes.training,
        probe=probe.trained(passes.trained_on, generator=torch.Generator().manual_seed(0)),
    )
    unknown: dict[PermutationGroup | ScaleGroup, str] = {
        group: "rescales what the example inputs do not read"
        for group in (*graph.scales, *graph.normalizations)
        if {m.parameter for m in group.members if not m.buffer} <= found.ledger.partly
        or any(_could_meet(group, shapes, shapes[name]) for name in unreached)
    }
    return graph._without(unknown) if unknown else graph


def _could_meet(group: ScaleGroup, shapes: Shapes, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of some shape could meet what a group rescales; a number could be added to anything."""
    lengths = (
        n
        for m in group.members
        for n in (shapes[m.parameter] if m.axis is None else shapes[m.parameter][m.axis : m.axis + 1])
    )
    return math.prod(shape) == 1 or any(could_meet(n, shape) for n in lengths)


@dataclass(frozen=True)
class _Passes:
    """The traced passes of a network through all examples, in evaluation and, where that may differ, in training.

    ``training`` says whether training mode was followed, see :class:`SymmetryGraph`, and ``trained_on`` on what.
    """

    traces: tuple[Trace, ...]
    training: str
    trained_on: tuple[Example, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, examples: Sequence[Example], *, record: bool) -> _Passes:
        evaluated = (trace(model, args, kwargs, record=record) for args, kwargs in examples)
        passes = cls(tuple(replace(t, example=k) for k, t in enumerate(evaluated)), "as evaluation")
        floating = [n for n, t in model.state_dict().items() if t.is_floating_point() or t.is_complex()]
        idle = set(passes.unused(floating, live=True))
        ties = any(t.positions for t in passes.traces)  # dropout makes equal numbers
        if not asks_for_mode(model) and not idle - never_named(model, idle) and not ties:
            return passes
        found: list[Trace] = []
        taken: list[Example] = []
        for args, kwargs in examples:
            try:
                found.append(trace(model, args, kwargs, record=record, training=True))
            except SymmetryError as error:
                two = doubled((args, kwargs))
                try:
                    found.append(trace(model, *two, record=record, training=True))
                except SymmetryError:
                    return replace(passes, training=f"not followed: {str(error).splitlines()[0]}")
                args, kwargs = two
            taken.append((args, kwargs))
        found = [replace(t, example=k) for k, t in enumerate(found)]
        return cls((*passes.traces, *found), "followed", tuple(taken))

    def with_other_sizes(
        self, model: nn.Module, example: Example, flags: dict[str, bool], *, sizes: bool
    ) -> tuple[Trace, ...]:
        """The passes, and those through the first example with other sizes or flags, in evaluation mode."""
        first, *more = self.traces
        if first.branch or not (sizes or flags):
            return self.traces
        first, *found = with_other_sizes(model, example, first, flags, sizes=sizes)
        count = len(self.traces)
        return (first, *more, *(replace(t, example=count + k) for k, t in enumerate(found)))

    def unused(self, names: Sequence[str], *, live: bool) -> list[str]:
        """Names of tensors that no pass computes with, or that no output depends on."""
        used = {name for t in self.traces for name in t.names(live=live)}
        return [name for name in names if name not in used]


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


@dataclass(frozen=True)
class _Reading:
    """The symmetries that one walk through a network finds."""

    ledger: Ledger
    permutations: tuple[PermutationGroup, ...]
    pinned: tuple[Pin, ...]
    scales: tuple[ScaleGroup, ...]
    normalizations: tuple[NormalizationGroup, ...]
    terms: dict[str, tuple[ScaleTerm, ...]]

    @classmethod
    def best(
        cls,
        traces: Sequence[Trace],
        order: list[str],
        shapes: Shapes,
        buffers: frozenset[str],
        unreached: Sequence[str],
    ) -> _Reading:
        """The one that finds most, over nestings that are guessed and, where a guess was regretted, others."""

        def by(nestings: Nestings) -> _Reading:
            ledger = interpret(traces, nestings)
            for name in unreached:
                pin_what_could_meet(ledger, name, shapes[name])
            permutations, pinned = permutation_groups(ledger, order)
            return cls(ledger, tuple(permutations), tuple(pinned), *scale_groups(ledger, order, shapes, buffers))

        nestings = Nestings()
        best = by(nestings)
        while (others := nestings.reconsidered(best.ledger)) != nestings:
            reading, nestings = by(others), others
            if reading.size <= best.size:
                break
            best = reading
        return best

    @property
    def size(self) -> tuple[float, int]:
        """log10 of the number of permutations, and the number of positive factors."""
        return sum(g.log10_order for g in self.permutations), sum(g.size for g in (*self.scales, *self.normalizations))
