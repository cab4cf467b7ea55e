"""Discovery: the symmetry graph of any module, from one traced forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tu_symmetry.modules import uncopyable
from tu_symmetry.states import SymmetryError, kind_of
from tu_symmetry.symmetry.extraction import permutation_groups
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import NormalizationGroup, PermutationGroup, Pin, ScaleGroup, ScaleTerm
from tu_symmetry.symmetry.ledger import Ledger
from tu_symmetry.symmetry.nesting import Nestings
from tu_symmetry.symmetry.probe import Probe
from tu_symmetry.symmetry.scales import scale_groups
from tu_symmetry.symmetry.tracing import Trace, interpret, tied_names, trace

Shapes = dict[str, tuple[int, ...]]


def discover_symmetries(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    branches: Literal["refuse", "record"] = "refuse",
) -> SymmetryGraph:
    """Find the permutation, positive-scale and normalization symmetries of a module.

    The module is traced in evaluation mode by ``torch.export`` (its weights play no role), and a table of rules, one
    for each operator, follows which hidden units index the axes of every parameter and buffer. An operator without a
    rule pins what it touches and is named in the graph's report. The module itself is left as it is.

    Args:
        model: any module; also one on the meta device (with inputs there), which holds no weights at all.
        example_inputs: an input tensor, or the tuple of positional arguments of ``forward``.
        example_kwargs: keyword arguments of ``forward``.
        branches: what to do where ``forward`` branches on the values of a tensor: ``"refuse"``, with an error that
            names the line, or ``"record"`` the way that the example inputs take. What is found then holds for all
            inputs that take the same way (which way is taken does not change under the symmetries), and parameters
            that it does not meet are pinned.

    Returns:
        The symmetry graph. It is verified numerically (see :func:`verify_symmetries`) before weights are first
        transformed with it.

    Raises:
        SymmetryError: if the module cannot be traced, naming the line of the branch that is in the way, or cannot be
            copied, since its ``forward`` is a function that holds the original.
        TypeError: for something else than a module, a state dict for example.
        ValueError: for another ``branches``.
    """
    if branches not in ("refuse", "record"):
        raise ValueError(f"branches must be 'refuse' or 'record', got {branches!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module. A checkpoint is no architecture: build the "
            "network that its weights belong to, and pass that; weights play no role in discovery"
        )
    if reason := uncopyable(model):
        raise SymmetryError(f"discovery works on a copy of {type(model).__name__}, and {reason}")
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    kwargs = dict(example_kwargs or {})
    aliases = tied_names(model)
    probe = Probe.of(model, args, kwargs, generator=torch.Generator().manual_seed(0))
    traced = trace(model, args, kwargs, record=branches == "record")
    state = model.state_dict()
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = frozenset(name for name in aliases if name not in trained)
    shapes = {name: tuple(state[name].shape) for name in aliases}
    order = list(aliases)
    found = _Reading.best(traced, order, shapes, buffers)
    unused = [
        n for n in order if n not in found.ledger.parameters and (state[n].is_floating_point() or state[n].is_complex())
    ]
    idle = [Pin(n, k, s, "not used in the forward pass") for n in unused for k, s in enumerate(shapes[n]) if s > 1]
    return SymmetryGraph(
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
        branch=traced.branch,
        constants=traced.constants,
        kinds={name: kind_of(state[name].dtype) for name in aliases},
        probe=probe,
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
    def best(cls, traced: Trace, order: list[str], shapes: Shapes, buffers: frozenset[str]) -> _Reading:
        """The one that finds most, over nestings that are guessed and, where a guess was regretted, others."""
        nestings = Nestings()
        best = cls.by(traced, nestings, order, shapes, buffers)
        while (others := nestings.reconsidered(best.ledger)) != nestings:
            reading, nestings = cls.by(traced, others, order, shapes, buffers), others
            if reading.size <= best.size:
                break
            best = reading
        return best

    @classmethod
    def by(
        cls, traced: Trace, nestings: Nestings, order: list[str], shapes: Shapes, buffers: frozenset[str]
    ) -> _Reading:
        """What one walk with these nestings finds."""
        ledger = interpret(traced, nestings)
        permutations, pinned = permutation_groups(ledger, order)
        return cls(ledger, tuple(permutations), tuple(pinned), *scale_groups(ledger, order, shapes, buffers))

    @property
    def size(self) -> tuple[float, int]:
        """log10 of the number of permutations, and the number of positive factors."""
        return sum(g.log10_order for g in self.permutations), sum(g.size for g in (*self.scales, *self.normalizations))
