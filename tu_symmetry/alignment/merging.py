"""Merging networks: align them, average their weights, correct the statistics, and measure what each step is worth.

The average of trained networks is a poor network, since their hidden units stand in different orders. After alignment
it lies in one basin; what is left is mostly the variance of its activations, which collapses under averaging, and which
re-estimated BatchNorm statistics or REPAIR restore. Each step is a function of its own: :func:`~tu_symmetry.align`,
:func:`average`, :func:`.correct` and :func:`.measure`; :func:`merge` is all of them.

Networks may be given by their files or in a sample store. Then two of them are in memory at a time: the one that is
read and the reference (while matching), or the sum (while averaging) and, in a greedy soup, the one that is tried.
While averaging, safetensors files are read tensor by tensor.

Laws (tests/alignment/test_merge.py, float64): copies of one network with permuted units merge into a network of the
same function; a weight of one gives the aligned member itself; networks from files merge into the same as from memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tu_symmetry.alignment.align import UNMOVED, MatchOn, Reference, is_identity, matcher
from tu_symmetry.alignment.barrier import Loss, LossBarrier, barrier_of, between, mean_loss, measure
from tu_symmetry.alignment.consensus import Kept, Match, find_target, once, read
from tu_symmetry.alignment.matching import Progress, Solver
from tu_symmetry.alignment.networks import Network, Networks, StateSource, read_network
from tu_symmetry.alignment.repair import Correction, correct
from tu_symmetry.evaluation import reusable
from tu_symmetry.reporting.brief import Brief, span
from tu_symmetry.states import State, as_given, check_number, require_alike
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.certificate import Certificate, measured
from tu_symmetry.symmetry.elements import Permutation, identity_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness

Weights = Literal["equal", "greedy"] | Sequence[float] | Mapping[str, Sequence[float]]
Scores = dict[str, float]


@dataclass(frozen=True, repr=False)
class Merged(Brief):
    """A merged network, and what each step towards it was worth.

    Attributes:
        state: the merged network, on the device and in the dtypes of the first network that is part of it.
        weights: the weight of each network in it; they sum to one. Where tensors have weights of their own, those of
            all the others.
        permutations: one for each network; identities where they were merged as they are.
        transpositions: number of transpositions (NoT) of each.
        correction: what was done about the statistics.
        members: scores of each network by itself: ``loss``, and further metrics by name. Empty without a loss.
        scores: the same of the merged network: ``naive`` (averaged as the networks were given), ``aligned``, and
            ``corrected``. Only those that differ are there; the last one is that of :attr:`state`.
        lines: the losses along the straight lines from the first network of the merged one to each of the others, for
            the steps of :attr:`scores`; empty unless ``points`` was given.
        certificates: for each permuted network, by how much its outputs on the graph's example inputs changed.
        uncertified: why nothing was measured; empty where something was.
    """

    state: State
    weights: list[float]
    permutations: list[Permutation]
    transpositions: list[int]
    correction: Correction
    members: list[Scores] = field(default_factory=list)
    scores: dict[str, Scores] = field(default_factory=dict)
    lines: dict[str, list[LossBarrier]] = field(default_factory=dict)
    certificates: list[Certificate] = field(default_factory=list)
    uncertified: str = ""

    def facts(self) -> list[tuple[str, str]]:
        """The networks' shares, and the scores of each step."""
        facts = [
            ("networks", str(len(self.weights))),
            ("weights", ", ".join(f"{w:.3g}" for w in self.weights[:8]) + (", ..." if len(self.weights) > 8 else "")),
            ("NoT", span(self.transpositions)),
            ("correction", self.correction),
        ]
        facts += [(f"{name} of the networks", span([one[name] for one in self.members])) for name in _names(self)]
        for step, found in self.scores.items():
            facts.append((step, ", ".join(f"{name} {value:.4g}" for name, value in found.items())))
        facts += [(f"barrier, {step}", span([one.barrier for one in found])) for step, found in self.lines.items()]
        return facts

    @property
    def barriers(self) -> dict[str, float]:
        """By how much the loss exceeds the weighted mean of the networks' own, for each of :attr:`scores`.

        This is the excess at the merged network alone. The barrier of the literature is the largest excess over a line,
        which :attr:`lines` hold where they were asked for.
        """
        chord = sum(w * one["loss"] for w, one in zip(self.weights, self.members, strict=False) if w > 0)
        return {step: found["loss"] - chord for step, found in self.scores.items()}


def _names(merged: Merged) -> list[str]:
    return list(merged.members[0]) if merged.members else []


@leaves_randomness
def merge(
    graph: SymmetryGraph,
    states: Networks,
    model: nn.Module,
    dataloader: Iterable[Any] | None = None,
    *,
    correction: Correction = "none",
    weights: Weights = "equal",
    reference: Reference | Network | None = "first",
    match_on: MatchOn = "weights",
    solver: Solver = "frank_wolfe",
    only: Sequence[str] = (),
    loss: Loss | None = None,
    metrics: Mapping[str, Loss] | None = None,
    validation: Iterable[Any] | None = None,
    points: int = 0,
    certify: bool = True,
    resume: Kept | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Align networks of one architecture, average them, and correct the statistics of the average.

    Args:
        graph: the architecture's symmetry graph (verified on first use, where networks are aligned).
        states: at least two networks: state dicts, files that :func:`~tu_symmetry.load_state` reads, a
            :class:`~tu_symmetry.SampleStore`, or a stack with a leading sample axis. Files and stores are read one
            network at a time, two or three times each. A LightningModule (a routine of TorchUncertainty) stands for
            the network that it has trained, one with a deep ensemble for its members.
        model: the module, left as it is.
        dataloader: batches, tensors or tuples that begin with the inputs: for ``correction`` and for activations.
        correction: ``batchnorm``: running statistics are re-estimated. ``repair``: they are, and every other hidden
            unit gets the mean and standard deviation of the networks', see :func:`~tu_symmetry.repair`. A network that
            is merged of a single one stays as it is.
        weights: the share of each network. ``equal``; numbers that are at least 0, which are divided by their sum; or
            ``greedy``, the soup of Wortsman et al. 2022: the networks are added in the order of their losses, each if
            it does not make the (corrected) mean of those in the soup worse. Or numbers for patterns of tensors' names,
            ``{"*": [0.7, 0.3], "down_blocks.*": [0.8, 0.2]}``: the last pattern that a name matches counts, equal
            weights where none does; not for ``repair``, which is of one ratio.
        reference: what the networks are aligned to, see :func:`~tu_symmetry.align`; or a network, also as a file; or
            None to average them as they are (they are aligned already). ``medoid``, ``mean`` and ``universe`` hold all
            networks in memory.
        match_on: match units by ``weights``, or by ``activations`` on ``dataloader``.
        solver: how weights are matched, see :func:`~tu_symmetry.align`.
        only: patterns of tensors' names: align partially, by the groups alone all of whose tensors match one of them
            (``["down_blocks.*"]``); everything is aligned without any.
        loss: mean loss over a batch of (outputs, targets). With it the networks, and what is merged of them after each
            step, are measured.
        metrics: further means over a batch, by name (``{"accuracy": ...}``), measured beside the loss.
        validation: batches ``(inputs, targets)`` to measure on; if left out, ``dataloader``.
        points: with 3 or more, also measure the loss at that many points of the line from the first network of the
            merged one to each of the others, the ends included.
        certify: measure that the outputs of each permuted network stay the same.
        resume: takes the permutations and scores as they are found, and gives them back: a merge that was interrupted
            goes further where it is called again with the same mapping and arguments. Permutations that come from it
            are certified again.
        progress: called with ``{"step", "done", "total"}``; steps are ``measure``, ``align`` and ``average``.

    Returns:
        The merged network with its scores.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights, outputs that a permutation changed.
        SampleFileError: a file that cannot be used.
        TypeError: weights or points that are no numbers.
        ValueError: fewer than two networks, weights that do not fit, a correction without data, greedy weights or
            points without a loss and data, one or two points, a network without the statistics to be corrected; a
            network whose loss is NaN, or statistics that are NaN or infinite (the message names the batch).
    """
    graph = permutations_alone(graph, only) if only else graph
    networks = StateSource(states)
    _check(len(networks), correction, weights, dataloader, loss, metrics, validation, points)
    kept: Kept = {} if resume is None else resume
    plan = None if weights == "greedy" else _plan(graph, weights, len(networks))
    data = [] if dataloader is None else reusable(dataloader)
    held = data if validation is None else reusable(validation)
    functions = {} if loss is None else {"loss": loss, **(metrics or {})}

    def tell(step: str, done: int) -> None:
        if progress is not None:
            progress({"step": step, "done": done, "total": len(networks)})

    def score(state: Mapping[str, Tensor]) -> Scores:
        return measure(model, state, held, functions)

    def score_member(k: int) -> Scores:
        state = read(graph, networks, k)
        found = score(state)
        if math.isnan(found["loss"]):
            raise ValueError(f"states[{k}]: {_nan_batch(model, state, held, functions['loss'])}")
        return found

    def finish(state: State, ends: Sequence[State], ratios: Sequence[float]) -> State:
        return state if len(ends) == 1 else correct(model, ends, ratios, state, data, correction)

    own: list[Scores] = []
    for k in range(len(networks) if functions else 0):  # before the long work: the data may be of no use
        own.append(once(kept, f"scores/{k}", partial(score_member, k)))
        tell("measure", k + 1)
    if reference is None:  # nothing is permuted, and so nothing is verified
        for k in range(len(networks)):
            read(graph, networks, k)
            tell("align", k + 1)
        found = _Found([identity_permutation(graph)] * len(networks), [], "the networks were merged as they are")
    else:
        match = matcher(graph, match_on, solver, "product", model, dataloader, None)
        found = _find(graph, networks, reference, match, certify, kept, tell)
    aligned = networks.permuted(graph, found.permutations)
    if plan is None:
        order = sorted(range(len(networks)), key=lambda i: own[i]["loss"])
        soup = _greedy(aligned, order, own, lambda state, *rest: score(finish(state, *rest)), kept)
        plan = _plan(graph, soup, len(networks))
    chosen = [i for i in range(len(networks)) if any(part.weights[i] > 0 for part in plan)]
    fixed = plan[0].weights
    counts = [transposition_count(p) for p in found.permutations]
    moved = any(counts[i] for i in chosen)
    scores: dict[str, Scores] = {}
    if functions and moved and len(chosen) > 1:
        scores["naive"] = score(_average(networks, plan))
    state = _average(aligned, plan, lambda done: tell("average", done))
    if functions:
        scores["aligned"] = score(state)
    if correction != "none" and len(chosen) > 1:
        state = finish(state, aligned.only(chosen), [fixed[i] for i in chosen])
        if functions:
            scores["corrected"] = score(state)
    lines: dict[str, list[LossBarrier]] = {}
    if points:
        walk = partial(_lines, model, held, functions["loss"], points, chosen)
        lines = {"naive": walk(networks)} if moved else {}
        lines["aligned"] = walk(aligned)
        if correction != "none":
            lines["corrected"] = walk(aligned, finish)
    certificates, uncertified = found.certificates, found.uncertified
    return Merged(state, fixed, found.permutations, counts, correction, own, scores, lines, certificates, uncertified)


class _Found(NamedTuple):
    permutations: list[Permutation]
    certificates: list[Certificate]
    uncertified: str


def _find(
    graph: SymmetryGraph,
    networks: StateSource,
    reference: Reference | Network,
    match: Match,
    certify: bool,
    kept: Kept,
    tell: Callable[[str, int], None],
) -> _Found:
    """Permutations of all networks; one of them is in memory beside what it is matched to."""
    graph.require_verified()
    word = isinstance(reference, str) and reference in get_args(Reference)
    anchor: Any = reference if word else read_network(reference, "reference")
    if not word:
        graph.check_state(anchor, name="reference")
    target = find_target(graph, networks, anchor, match, kept=kept)
    certificates: list[Certificate] = []
    reasons: list[str] = []

    def one(k: int) -> Permutation:
        state = read(graph, networks, k)
        permutation: Permutation = (
            target.permutations[k]
            if k in target.permutations
            else once(kept, f"permutation/{k}", lambda: match(target.state, state, target.jobs + k).permutation)
        )
        if reference == "first" and k == 0:
            return permutation
        if certify and graph.probe is not None and is_identity(graph, permutation):
            certificates.append(UNMOVED)
            return permutation
        moved = permute_tensors(graph, permutation, state)
        certificate, why = measured(graph, state, moved, f"states[{k}], aligned", wanted=certify, rounded=False)
        certificates.extend([] if certificate is None else [certificate])
        reasons.extend([why] if why else [])
        return permutation

    permutations = []
    for k in range(len(networks)):
        permutations.append(one(k))
        tell("align", k + 1)
    return _Found(permutations, certificates, next(iter(reasons), ""))


def _lines(
    model: nn.Module,
    data: Iterable[Any],
    loss: Loss,
    points: int,
    chosen: Sequence[int],
    networks: StateSource,
    finish: Callable[[State, Sequence[State], Sequence[float]], State] | None = None,
) -> list[LossBarrier]:
    """Losses along the lines from the first of the chosen networks to the others; inner points are corrected."""
    found = []
    for k in chosen[1:]:
        ends, line = networks.only([chosen[0], k]), []
        for number in range(points):
            ratio = number / (points - 1)
            shares = [1 - ratio, ratio]
            state = _average(ends, [_Part(None, shares)])
            if finish is not None and 0 < ratio < 1:
                state = finish(state, ends, shares)
            line.append((ratio, mean_loss(model, state, data, loss), 1.0))
            del state
        found.append(barrier_of(line))
    return found


def permutations_alone(graph: SymmetryGraph, only: Sequence[str] = ()) -> SymmetryGraph:
    """What a merge uses of a graph: its permutation groups, or those all of whose tensors match a pattern.

    Scales are left out, so that a graph that is not verified yet is verified for what is used of it alone, which takes
    a large network a quarter of the memory.

    Raises:
        ValueError: no group has all its tensors there.
    """
    inside = {name for name, names in graph.aliases.items() if any(fnmatchcase(n, p) for n in names for p in only)}
    out = [g.name for g in graph.permutations if only and not {m.parameter for m in g.members} <= inside]
    if out and len(out) == len(graph.permutations):
        near = sorted({m.parameter for m in g.members} & inside for g in graph.permutations)[-1:] if inside else []
        why = f"groups that touch them reach beyond, as those of {min(near[0])!r}" if near and near[0] else ""
        raise ValueError(
            f"only={list(only)}: no permutation group has all its tensors there" + (f"; {why}" if why else "")
        )
    return replace(graph.without(*out), scales=(), normalizations=(), scale_terms={})


def _check(
    count: int,
    correction: str,
    weights: Weights,
    dataloader: Iterable[Any] | None,
    loss: Loss | None,
    metrics: Mapping[str, Loss] | None,
    validation: Iterable[Any] | None,
    points: int,
) -> None:
    check_number(points, "points", whole=True)
    if points < 0 or 0 < points < 3:
        raise ValueError(f"points={points}: a line has at least 3 points, its ends included; 0 measures none")
    if count < 2:
        raise ValueError(f"merging needs at least two networks, got {count}")
    if correction not in get_args(Correction):
        raise ValueError(f"correction must be one of {', '.join(get_args(Correction))}; got {correction!r}")
    if isinstance(weights, str) and weights not in ("equal", "greedy"):
        raise ValueError(f"weights must be 'equal', 'greedy' or numbers, got {weights!r}")
    if isinstance(weights, Mapping) and correction == "repair":
        raise ValueError("repair is of one ratio for the whole network; weights by name go with 'none' or 'batchnorm'")
    if correction != "none" and dataloader is None:
        raise ValueError(f"correction={correction!r} measures activations: pass a dataloader of training inputs")
    measures = loss is not None or metrics or weights == "greedy" or points
    if measures and (loss is None or (dataloader is None and validation is None)):
        raise ValueError("scores, points and greedy weights need a loss, and validation= (or dataloader) to measure on")


class _Part(NamedTuple):
    """Tensors that are averaged with the same weights; None stands for all that no other part names."""

    names: frozenset[str] | None
    weights: list[float]


def _plan(graph: SymmetryGraph, weights: Weights, count: int) -> list[_Part]:
    """Which tensors are averaged how: first the weights of the network at large, then those of single tensors.

    A tensor that has several names (tied weights) is matched by any of them.
    """
    if not isinstance(weights, Mapping):
        return [_Part(None, _normalized(weights, count))]
    by_pattern = {pattern: _normalized(numbers, count) for pattern, numbers in weights.items()}
    found: dict[str, list[str]] = {}
    matched = set()
    for names in graph.aliases.values():
        hits = [p for p in by_pattern if any(fnmatchcase(name, p) for name in names)]
        matched |= set(hits)
        if hits and hits[-1] != "*":
            found.setdefault(hits[-1], []).extend(names)
    idle = [pattern for pattern in by_pattern if pattern != "*" and pattern not in matched]
    if idle:
        known = ", ".join(list(graph.aliases)[:3])
        raise ValueError(f"the pattern {idle[0]!r} matches no tensor of the network; its names are like {known}")
    largest = by_pattern.get("*", _normalized("equal", count))
    return [_Part(None, largest), *(_Part(frozenset(names), by_pattern[p]) for p, names in found.items())]


def _normalized(weights: Any, count: int) -> list[float]:
    if isinstance(weights, str):
        return [1 / count] * count
    for number in (weights := list(weights)):
        check_number(number, "a weight")
    numbers = [float(w) for w in weights]
    if len(numbers) != count or not all(math.isfinite(w) and w >= 0 for w in numbers) or not any(numbers):
        raise ValueError(f"weights must be {count} finite numbers, none below 0 and not all 0; got {numbers}")
    if math.isinf(sum(numbers)):
        numbers = [w / max(numbers) for w in numbers]
    return [w / sum(numbers) for w in numbers]


def average(
    states: Networks,
    weights: Sequence[float] | Mapping[str, Sequence[float]] | Literal["equal"] = "equal",
    *,
    graph: SymmetryGraph | None = None,
) -> State:
    """The weighted mean of networks, computed in single precision at least.

    Args:
        states: at least one network, as for :func:`merge`; files are read one by one, or tensor by tensor.
        weights: a share of each, or shares for patterns of tensors' names, as for :func:`merge`.
        graph: the architecture's symmetry graph, for shares by name.

    Returns:
        A state on the device and in the dtypes of the first network that is part of it.

    Raises:
        TypeError: what is no state dict or file.
        ValueError: no networks, networks of several architectures, weights that do not fit, or weights by name without
            a graph.
        SymmetryError: values that are no tensors, or of several kinds; with a graph also NaN and infinite weights.
    """
    networks = StateSource(states)
    if not len(networks):
        raise ValueError("there is no network to take a mean of: the list of states is empty")
    first = networks[0]
    for k in range(len(networks)):
        state = networks[k] if k else first
        require_alike(state, first, f"states[{k}]", "states[0]")
        if graph is not None:
            graph.check_state(state, name=f"states[{k}]")
    del first, state
    if isinstance(weights, Mapping) and graph is None:
        raise ValueError("weights for patterns of names need graph=, which knows the names of tied tensors")
    if graph is None:
        return _average(networks, [_Part(None, _normalized(weights, len(networks)))])
    return _average(networks, _plan(graph, weights, len(networks)))


def _average(networks: StateSource, plan: Sequence[_Part], tell: Callable[[int], None] = lambda done: None) -> State:
    """The weighted mean: the sum so far moves towards each network by its share in both, in single precision at least.

    Weights ``1/2, 1/4, 1/4`` move it by 1, then by a third of the distance, then by a quarter. Networks that can be
    read tensor by tensor are, so that the mean alone is in memory. Others are read one after the other, beside the sum.
    """
    part_of = {name: part for part in plan for name in part.names or ()}
    chosen = [k for k in range(len(networks)) if any(part.weights[k] > 0 for part in plan)]

    def share(name: str, k: int) -> float:
        weights = part_of.get(name, plan[0]).weights
        return weights[k] / sum(weights[: k + 1]) if weights[k] > 0 else 0.0

    opened = {k: networks.open(k) for k in chosen}
    first = opened[chosen[0]]
    mean: State = {} if first is None else as_given(first, {})
    if first is not None and all(network is not None for network in opened.values()):
        for name in first:
            dtype, total = None, None
            for k, network in opened.items():
                if share(name, k) or dtype is None:
                    assert network is not None
                    tensor = network[name]
                    dtype = dtype or tensor.dtype
                    total = _towards(total, tensor, share(name, k)) if share(name, k) else total
                    del tensor
            assert total is not None and dtype is not None
            mean[name] = total.to(dtype)
            del total
        tell(len(networks))
        return mean
    like: dict[str, torch.dtype] = {}
    for k in range(len(networks)):
        if k in chosen:
            network = networks[k]
            mean = mean or as_given(network, {})
            for name in list(network):
                tensor = network.pop(name)
                like.setdefault(name, tensor.dtype)
                if share(name, k):
                    mean[name] = _towards(mean.get(name), tensor, share(name, k))
                del tensor
            del network  # before the next one is read
        tell(k + 1)
    narrow = as_given(mean, {})
    for name, dtype in like.items():
        narrow[name] = mean.pop(name).to(dtype)
    return narrow


def _towards(mean: Tensor | None, tensor: Tensor, ratio: float) -> Tensor:
    """One step of a running mean, written into ``mean`` a piece at a time; the first one is a copy of the tensor."""
    if mean is None:
        wide = torch.float32 if tensor.dtype in _HALF else tensor.dtype
        return tensor.detach().to(wide, memory_format=torch.contiguous_format, copy=True)
    if mean.is_floating_point() or mean.is_complex():
        for piece, other in zip(mean.view(-1).split(_PIECE), tensor.reshape(-1).split(_PIECE), strict=True):
            piece.copy_(between(piece, other.to(piece), ratio))
    return mean


_HALF = (torch.float16, torch.bfloat16)
_PIECE = 2**18  # entries that are worked on at a time


def _nan_batch(model: nn.Module, state: Mapping[str, Tensor], data: Iterable[Any], loss: Loss) -> str:
    """The first batch on which the loss is NaN, in words."""
    for k, batch in enumerate(data):
        if math.isnan(mean_loss(model, state, [batch], loss)):
            finite = all(bool(torch.isfinite(t).all()) for t in tree_leaves(batch) if isinstance(t, Tensor))
            why = "its numbers are finite: the network diverges" if finite else "it holds such numbers itself"
            return f"the loss is NaN on batch {k} of the data (counted from 0), and {why}"
    return "the loss is NaN"


def _greedy(
    aligned: StateSource,
    order: Sequence[int],
    own: Sequence[Scores],
    score: Callable[[State, Sequence[State], Sequence[float]], Scores],
    kept: Kept,
) -> list[float]:
    """Equal weights for the networks of a greedy soup, zero for the others.

    In memory are the mean of those inside and the one that is tried. In half precision the mean would be twice as
    large as the networks: there it is made again for each trial, from the networks inside.
    """
    best, chosen = own[order[0]]["loss"], [order[0]]
    soup: State | None = None
    for k in order[1:]:
        trial = [*chosen, k]
        share, key = 1 / len(trial), f"soup/{'+'.join(map(str, trial))}"
        if key in kept and kept[key]["loss"] > best:
            continue  # known to be worse: it is not even read
        if soup is None or any(t.dtype in _HALF for t in soup.values()):
            soup = None
            candidate = _average(aligned.only(trial), [_Part(None, [share] * len(trial))])
        else:
            candidate = _step(soup, aligned, k, share)
        found = once(kept, key, partial(score, candidate, aligned.only(trial), [share] * len(trial)))
        if math.isnan(found["loss"]):
            warnings.warn(f"the mean of the networks {trial} has a loss of NaN: {k} is left out", stacklevel=3)
        if found["loss"] <= best:
            best, soup, chosen = found["loss"], candidate, trial
        del candidate
    return [1 / len(chosen) if k in chosen else 0.0 for k in range(len(aligned))]


def _step(mean: State, networks: StateSource, k: int, share: float) -> State:
    """The mean with one more network, which is let go tensor by tensor."""
    network = networks.open(k)
    if network is not None:
        return as_given(mean, {n: _towards(_towards(None, t, 1.0), network[n], share) for n, t in mean.items()})
    whole = networks[k]
    return as_given(mean, {n: _towards(_towards(None, t, 1.0), whole.pop(n), share) for n, t in mean.items()})
