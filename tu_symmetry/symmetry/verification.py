"""Numerical verification: every claimed group acts on random weights, and the outputs have to stay the same.

Groups, and blocks of nested groups, move in subsets that separate every two of them: the two halves of one symmetry
that always move together would hide each other.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from tu_symmetry.states import SymmetryError
from tu_symmetry.states import SymmetryWarning as SymmetryWarning
from tu_symmetry.symmetry.action import (
    mix_tensors,
    permute_tensors,
    permute_tensors_,
    scale_tensors,
    scale_tensors_,
    sign_tensors,
    sign_tensors_,
)
from tu_symmetry.symmetry.elements import random_matrices
from tu_symmetry.symmetry.groups import Group, LinearGroup, PermutationGroup, ScaleGroup, SignGroup, some
from tu_symmetry.symmetry.running.comparison import Certificate, Reference, says_nothing
from tu_symmetry.symmetry.running.probe import ExampleInputs, ExampleKwargs, Probe, doubled, examples_of
from tu_symmetry.symmetry.running.weights import perturb_

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph

Element = dict[
    Group, Tensor
]  # permutations, log-scales, signs, matrices (groups of different kinds may have the same name)
# which blocks of which groups move, as masks; whether by one cycle each; whether this is one of the first two passes
Plan = tuple[dict[Group, Tensor], bool, bool]
NOISE = 64  # relative noise of the weights that measures sensitivities, in units of the last place
FEW = 8  # units of a block; two blocks of so many move alike by chance in one of 5,040 passes at most
TOLERANCE = 1e-9  # largest accepted change of an output entry, relative to its own scale


def verify_symmetries(
    graph: SymmetryGraph,
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    example_kwargs: ExampleKwargs = None,
    on_failure: Literal["pin", "raise"] = "pin",
) -> None:
    """Check in float64 that random elements of every group leave the outputs unchanged.

    The weights are random, running statistics, affine parameters and zero-initialized heads included. Groups that hold
    up to a normalization's epsilon are checked with the epsilons set to (almost) zero. Every entry of every output is
    compared on its own scale, which is measured: what it changes by when the weights change by their own size. Integer
    and boolean outputs have to be the same, NaN and infinite ones have to stand at the same places.

    Args:
        graph: ``graph.verified`` is set on success; a graph without a probe (an unpickled one) is given this one.
        model: the module, left untouched (a copy without its weights is used).
        example_inputs: as for discovery.
        example_kwargs: as for discovery.
        on_failure: ``"pin"``: groups that fail are found by bisection, taken out of the graph, which is changed in
            place (see ``graph.failed``), and named in a :class:`SymmetryWarning`; the rest is verified again.
            ``"raise"``: the graph stays as it is. Groups given by hand (:meth:`SymmetryGraph.with_permutation`) raise
            in both cases.

    Raises:
        SymmetryError: naming the groups that do not hold (see ``on_failure``), if the network does not run or does not
            compute the same twice, or if its outputs are no numbers or do not depend on the weights.
    """
    graph.check_state(model.state_dict(), finite=False, name="the model's state dict")
    probe = Probe.of(model, example_inputs, example_kwargs)
    if graph.training == "followed" and graph.probe is not None:
        probe.trained([(p.args, p.kwargs) for p in graph.probe.others if p.module.training])
    elif graph.training == "followed":  # an unpickled graph
        probe.trained([doubled(e) for e in examples_of(example_inputs, example_kwargs)])
    verify(graph, probe, on_failure=on_failure)
    if graph.probe is None:
        graph.probe = probe


def verify(graph: SymmetryGraph, probe: Probe, *, on_failure: Literal["pin", "raise"] = "pin") -> None:
    """As :func:`verify_symmetries`, with the network and the inputs of a probe."""
    if on_failure not in ("pin", "raise"):
        raise ValueError(f"on_failure must be 'pin' or 'raise', got {on_failure!r}")
    claimed = list(graph.groups())
    failed: dict[Group, Certificate] = {}
    folded = {name for g in graph.linears for name in g.constant}
    always = [g for g in claimed if not (isinstance(g, LinearGroup) and g.constant)]
    for groups, network in (always, probe), ([g for g in claimed if g not in always], probe.folded(folded)):
        while left := [g for g in groups if g not in failed]:
            found = _failures(graph, network, left, 1000 * len(failed))
            if not found:
                break
            failed |= found
    failed = {g: failed[g] for g in claimed if g in failed}
    by_hand = {g: d for g, d in failed.items() if isinstance(g, PermutationGroup) and g.name in graph.by_hand}
    advice = (
        "Either the model or its inputs are not those that the graph was discovered on, or a rule is wrong: please "
        "report the architecture."
    )
    if failed and (on_failure == "raise" or by_hand):
        told = [
            f"the {g.kind} group {g.name!r} is no symmetry of this network: the outputs change by {d.change:.1e} "
            f"(relative to an output's own scale; {d.allowed:.0e} is allowed)"
            for g, d in (by_hand or failed).items()
        ]
        advice = "The group was given by hand: check the axes that it names." if by_hand else advice
        raise SymmetryError(f"{some(told, '; ', str)}. {advice}")
    graph._take_out({g: f"failed verification: outputs changed by {d.change:.0e}" for g, d in failed.items()})
    graph._take_in(_proven(graph, probe))
    graph.verified = True
    if failed:
        gone = [f"{g.kind} group {g.name!r} (outputs changed by {d.change:.0e})" for g, d in failed.items()]
        warnings.warn(
            f"{len(gone)} of the {len(claimed)} symmetry groups that were claimed for "
            f"{graph.architecture or 'this network'} failed verification and were taken out of the graph: "
            f"{some(gone, show=str)}. The others are verified and can be used. {advice}",
            SymmetryWarning,
            stacklevel=3,
        )


def verify_as(graph: SymmetryGraph, narrow: SymmetryGraph) -> None:
    """Take for verified what a narrow network has too, in which groups move the same axes of the same tensors.

    Groups of a graph without a counterpart are taken out, with a :class:`SymmetryWarning`.
    """
    narrow.require_verified()
    verified = {_claim(group) for group in narrow.groups()}
    lost = {g: "no such group in the narrow network" for g in graph.groups() if _claim(g) not in verified}
    graph._take_out(lost)
    graph.verified = True
    if lost:
        told = some([f"{g.kind} group {g.name!r}" for g in lost], show=str)
        warnings.warn(
            f"the narrow network has no counterpart of {len(lost)} groups, which are left out: "
            f"{told}. Where it has a single one of these units, make it a little wider",
            SymmetryWarning,
            stacklevel=3,
        )


def _claim(group: Group) -> tuple[object, ...]:
    """What a group moves, whatever its size."""
    moved = {(m.parameter, m.axis, getattr(m, "exponent", 0), getattr(m, "within_axis", None)) for m in group.members}
    return group.kind, len(getattr(group, "blocks", ())), frozenset(moved)


def _proven(graph: SymmetryGraph, probe: Probe) -> list[LinearGroup]:
    """The guesses that hold, where others that hold as little as these should do not: the inputs tell them apart."""
    left = [g for g in graph.guesses if g not in graph.linears]
    if left and not _failures(graph, probe, [replace(g, subgroup="general") for g in left], 1, bisected=False):
        return []
    while left and (failed := _failures(graph, probe, left, 2000)):
        left = [g for g in left if g not in failed]
    return left


def _passes(groups: Sequence[Group], generator: torch.Generator) -> Iterator[Plan]:
    """Everything at once, the subsets that separate every two, and random subsets."""
    shapes = {g: g.blocks if isinstance(g, PermutationGroup) else () for g in groups}
    few = [g for g in groups if isinstance(g, PermutationGroup) and g.size < FEW]
    numbers: dict[Group, Tensor] = {}
    count = 0
    for group in (*few, *(g for g in groups if g not in few)):
        numbers[group] = torch.arange(count, count + math.prod(shapes[group]), device="cpu").reshape(shapes[group])
        count += math.prod(shapes[group])
    separate = sum(math.prod(shapes[g]) for g in few)
    everything = {g: torch.ones(shape, dtype=torch.bool, device="cpu") for g, shape in shapes.items()}
    yield everything, True, True
    yield everything, False, True
    for number, on in enumerate(_halves(separate).T):  # all others borrow their numbers
        yield {g: on[k % separate] for g, k in numbers.items()}, number % 2 == 0, False
    for cycles in (True, False):
        drawn = {g: torch.rand(shape, generator=generator, device="cpu") < 0.5 for g, shape in shapes.items()}
        yield drawn if count > 1 else everything, cycles, False


def _halves(count: int) -> Tensor:
    """For each of ``count`` blocks half of the passes, ``[count, passes]``: no block's are a part of another's."""
    passes = 0
    while math.comb(passes, passes // 2) < count:
        passes += 1
    part = torch.zeros(count, passes, dtype=torch.bool, device="cpu")
    for k, chosen in zip(range(count), itertools.combinations(range(passes), passes // 2), strict=False):
        part[k, list(chosen)] = True
    return part


def _draw(groups: Sequence[Group], plan: Plan, generator: torch.Generator) -> Element:
    """A random element that moves every block of a pass, and no other."""
    element: Element = {}
    masks, cycles, paired = plan
    for group in groups:
        moving = masks[group]
        if not bool(moving.any()):
            continue
        if isinstance(group, PermutationGroup):
            order = torch.rand(group.shape, generator=generator, dtype=torch.float64, device="cpu").argsort(-1)
            cycle = torch.empty_like(order).scatter_(-1, order, order.roll(1, dims=-1))
            still = torch.arange(group.size, device="cpu").expand(group.shape)
            if not cycles:
                cycle = torch.where((order == still).all(-1, keepdim=True), cycle, order)
            element[group] = torch.where(moving.unsqueeze(-1), cycle, still)
        elif isinstance(group, LinearGroup):
            element[group] = random_matrices(group, generator)
        elif isinstance(group, SignGroup):
            source = torch.Generator().manual_seed(group.size) if paired else generator
            turned = torch.randint(2, (group.size,), generator=source, device="cpu")
            turned = 1 - turned if paired and not cycles else turned  # what the first pass leaves, the second turns
            element[group] = 1 - 2 * turned
        else:
            size = 0.1 + 0.4 * torch.rand(group.size, generator=generator, dtype=torch.float64, device="cpu")
            sign = torch.randint(2, (group.size,), generator=generator, device="cpu") * 2 - 1
            element[group] = size * sign
    return element


def _split(element: Element) -> tuple[list[dict[str, Tensor]], dict[LinearGroup, Tensor]]:
    """The permutations, the log-scales and the signs of an element, by name, and the matrices."""
    named = [
        {g.name: e for g, e in element.items() if isinstance(g, kind)}
        for kind in (PermutationGroup, ScaleGroup, SignGroup)
    ]
    return named, {g: e for g, e in element.items() if isinstance(g, LinearGroup)}


def _failures(
    graph: SymmetryGraph, probe: Probe, claimed: Sequence[Group], seed: int, *, bisected: bool = True
) -> dict[Group, Certificate]:
    """The groups that change the outputs, all that the first failing pass holds; none if everything holds.

    Where they are not ``bisected``, all groups of that pass are returned, which one or more of them fails.
    """
    faithful = tuple(g for g in claimed if isinstance(g, PermutationGroup) or g.exact)
    generator = torch.Generator().manual_seed(seed + 1)
    for given in (probe, *probe.others):
        exact = given if len(faithful) == len(claimed) else given.without_epsilons()
        plans = list(_passes(claimed, generator))
        if given is not probe:  # which groups belong together shows on the first example
            plans = [plans[0], plans[-1]]
        networks = [(exact, tuple(claimed))]
        if given is probe or exact is not given:
            networks.append((given, faithful) if faithful else (exact, tuple(claimed)))
        for k, (network, groups) in enumerate(networks):
            other = k == 1 and not graph.branch
            failed = _try(  # one set of weights at a time
                graph,
                _base(network, seed + 500 * k, graph.constants, repeat=k == 0, other=other),
                groups,
                plans[k :: len(networks)],
                generator,
                bisected=bisected,
            )
            if failed:
                return failed
    moved = tuple(g for g in faithful if isinstance(g, PermutationGroup))
    if graph.positions and moved and not graph.branch:
        generator = torch.Generator().manual_seed(seed + 2)
        try:
            base = _base(probe.blank(), seed, graph.constants)
        except SymmetryError:  # a network that makes no numbers of a blank input, or always the same
            return {}
        return _try(graph, base, moved, list(_passes(moved, generator))[:2], generator)
    return {}


def _try(
    graph: SymmetryGraph,
    base: _Base,
    groups: Sequence[Group],
    plans: Sequence[Plan],
    generator: torch.Generator,
    *,
    bisected: bool = True,
) -> dict[Group, Certificate]:
    """Move one set of weights again and again, of which no copy is kept, until the outputs change."""
    for plan in plans:
        element = _draw(groups, plan, generator)
        (permutation, log_scale, signs), maps = _split(element)
        permute_tensors_(graph, permutation, base.state)
        scale_tensors_(graph, log_scale, base.state)
        sign_tensors_(graph, signs, base.state)
        base.state.update(mix_tensors(maps, graph, base.state))
        if base.keeps_its_outputs():
            continue
        if not bisected:
            return dict.fromkeys(element, base.difference(base.probe.run(base.state)))
        failed = _bisect(graph, _Base(base.probe, base.seed, graph.constants, draws=4), element)
        if not failed:
            raise SymmetryError(
                "each group on its own leaves the outputs of this network unchanged, but all of them together change "
                "them: a rule is wrong, or the network does not compute the same twice; please report the architecture"
            )
        return failed
    return {}


def _bisect(graph: SymmetryGraph, base: _Base, element: Element) -> dict[Group, Certificate]:
    """The groups of an element that change the outputs on their own."""
    (permutation, log_scale, signs), maps = _split(element)
    moved = scale_tensors(graph, log_scale, permute_tensors(graph, permutation, base.state))
    moved = mix_tensors(maps, graph, sign_tensors(graph, signs, moved))
    found = base.difference(base.probe.run(moved))
    if found.holds:
        return {}
    if len(element) == 1:
        return dict.fromkeys(element, found)
    groups = list(element)
    failed: dict[Group, Certificate] = {}
    for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
        failed |= _bisect(graph, base, {g: element[g] for g in half})
    return failed


class _Base:
    """Random weights, their outputs, and how much each of these may change."""

    def __init__(self, probe: Probe, seed: int, constants: Container[str], *, draws: int = 1) -> None:
        self.probe, self.seed = probe, seed
        generator = torch.Generator().manual_seed(seed)
        self.state = probe.random_state(generator, constants)
        self.reference = Reference(probe.run(self.state))
        draws = draws if probe.epsilon < 1e-12 else 8
        self.reference.outputs = self._perturb(self.reference.outputs, draws, generator)

    @property
    def allowed(self) -> float:
        mixed = 4 if self.probe.gains else 1  # what a stream's rotation rounds, all layers round again
        return max(TOLERANCE, 256 * mixed * self.probe.epsilon)

    def _perturb(self, outputs: list[Tensor], draws: int, generator: torch.Generator) -> list[Tensor]:
        """Measure sensitivities by noise on the weights; returns the outputs of the weights as they are in the end."""
        noise = NOISE * self.probe.epsilon
        for _ in range(draws):
            perturb_(self.state, noise, generator)
            before, outputs = outputs, self.probe.run(self.state)
            self.reference.perturbed(before, outputs, noise)
        return outputs

    def difference(self, outputs: list[Tensor]) -> Certificate:
        return self.reference.difference(outputs, self.allowed, epsilon=self.probe.epsilon)

    def keeps_its_outputs(self) -> bool:
        """Whether weights that were moved give the outputs of before."""
        outputs = self.probe.run(self.state)
        if self.difference(outputs).holds:
            return True
        self._perturb(self.probe.run(self.state), 3, torch.Generator().manual_seed(self.seed + 1))
        return self.difference(outputs).holds

    def require_repeatable(self) -> None:
        """Run the weights again, which are those behind the reference's outputs."""
        outputs = self.probe.run(self.state)
        if not Reference(self.reference.outputs).difference(outputs, 0.0, epsilon=self.probe.epsilon).holds:
            raise SymmetryError(
                "the network does not compute the same twice for the same weights and inputs, so that no symmetry of "
                "it can be verified; likely cause: it counts its calls, or draws random numbers of its own (noise from "
                "torch is replaced by constants, noise from numpy or random is not)"
            )


def _base(probe: Probe, seed: int, constants: Container[str], *, repeat: bool = False, other: bool = False) -> _Base:
    """Weights with which the outputs are numbers that say something, the first of a few attempts."""
    if other:
        try:
            return _base(probe.drawn(torch.Generator().manual_seed(seed)), seed, constants)
        except SymmetryError:  # inputs that have to be related (boxes, lengths, sorted numbers)
            pass
    problem = None
    patterns: list[list[Tensor]] = []
    for attempt in range(4):
        base = _Base(probe, seed + 7 * attempt, constants)
        if repeat and attempt == 0:
            base.require_repeatable()
        nans = [torch.isnan(t) for t in base.reference.outputs]
        # places that are NaN whatever the weights are so by construction (a row that is masked altogether)
        told = any(all(map(torch.equal, nans, seen)) for seen in patterns) or not any(bool(n.any()) for n in nans)
        patterns.append(nans)
        problem = base.reference.problem(base.allowed) if told else says_nothing("NaN")
        if problem is None:
            return base
    raise SymmetryError(problem)
