"""Merging networks: align them, average their weights, correct the statistics, and measure what each step is worth.

Networks may be given by their files or in a sample store. Then two of them are in memory at a time: the one that is
read and the reference (while matching), or the sum (while averaging, where safetensors are read tensor by tensor). Of
networks that are large, a few tensors are.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from tu_symmetry.alignment.align import Reference, certified
from tu_symmetry.alignment.barrier import Loss, between, mean_loss, measure
from tu_symmetry.alignment.consensus import Progress, find_target, read
from tu_symmetry.alignment.explaining import Explanation, explain
from tu_symmetry.alignment.moves import Move, Moves, moved
from tu_symmetry.alignment.networks import Network, Networks, StateSource
from tu_symmetry.alignment.over import Over, check_over
from tu_symmetry.alignment.repair import Correction, batchnorm_layers, correct
from tu_symmetry.evaluation import reusable
from tu_symmetry.files import Views, layouts_of
from tu_symmetry.processes import by_first, gathered, rank, shared
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.states import State, as_given, check_number, open_state, read_state, require_alike
from tu_symmetry.symmetry.certificate import Certificate, measured
from tu_symmetry.symmetry.elements import transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness

Weights = Literal["equal"] | Sequence[float]
Scores = dict[str, float]
Kept = MutableMapping[str, Any]
_HALF = (torch.float16, torch.bfloat16)
_PIECE = 2**18  # entries that are worked on at a time


class StaleStatisticsWarning(UserWarning):
    """A merged network normalizes by averages of the statistics that its networks had apart."""


@dataclass(frozen=True, repr=False)
class Merged(Moves, Brief):
    """A merged network, and what each step towards it was worth.

    ``log_scales``, ``balances``, ``permutations``, ``signs`` and ``maps`` moved each network, in this order.

    Attributes:
        state: the merged network, on the device and in the dtypes of the first network that is part of it.
        weights: the weight of each network in it; they sum to one.
        moves: all elements that moved each network.
        transpositions: number of transpositions (NoT) of each.
        correction: what was done about the statistics.
        members: scores of each network by itself: ``loss``, and further metrics by name. Empty without a loss.
        ensemble: the same of the weighted mean of the outputs of all networks, with a cross entropy that of their class
            probabilities. Empty without a loss, for outputs that are no tensor, and where the batches to measure on
            come in another order each time.
        scores: the same of the merged network: ``naive`` (averaged as the networks were given), ``naive_corrected``
            (this one with the statistics corrected), ``aligned``, and ``corrected``. Only those that differ are there;
            the last one is that of :attr:`state`.
        certificates: for each permuted network, by how much its outputs on the graph's example inputs changed.
        uncertified: why nothing was measured; empty where something was.
        over: which symmetries moved networks.
        given: what :meth:`explain` reads: the networks and what they were merged with.
    """

    state: State
    weights: list[float]
    moves: list[Move]
    transpositions: list[int]
    correction: Correction
    members: list[Scores] = field(default_factory=list)
    scores: dict[str, Scores] = field(default_factory=dict)
    certificates: list[Certificate] = field(default_factory=list)
    uncertified: str = ""
    ensemble: Scores = field(default_factory=dict)
    over: tuple[Over, ...] = ("permutations",)
    given: tuple[SymmetryGraph, StateSource, nn.Module, Iterable[Any]] | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"given": None}  # the networks are not part of a file

    def facts(self) -> list[tuple[str, str]]:
        """As other results, without the networks."""
        return [fact for fact in super().facts() if fact[0] != "given"]

    def explain(self, dataloader: Iterable[Any] | None = None) -> Explanation:
        """What is left of the barrier, and why: matching, statistics, units that are tied, or not alike.

        The networks are read again, and each pair of them is run on the batches, as given and aligned.

        Args:
            dataloader: batches of inputs; if left out, those of :func:`merge`.

        Raises:
            ValueError: no batches here or there, a result that was pickled, one network with all the weight, or a
                network that shows no units.
        """
        if self.given is None:
            raise ValueError("the networks are not kept in a pickled result: call explain() where merge() was called")
        graph, networks, model, data = self.given
        batches = data if dataloader is None else dataloader
        if isinstance(batches, list) and not batches:
            raise ValueError("explaining a merge compares what units compute: pass batches, merged.explain(dataloader)")
        return explain(graph, networks, self.moves, self.weights, self.barriers, model, batches)

    @property
    def verdict(self) -> str:
        """Whether the merged network pays: its loss beside those of its rivals, in words; empty without a loss."""
        if not self.scores:
            return ""
        losses = {f"network {k} alone": one["loss"] for k, one in enumerate(self.members)}
        rivals = dict([min(losses.items(), key=lambda item: item[1])])
        rivals |= {f"the {k.replace('_', ', ')} mean": one["loss"] for k, one in self.scores.items() if "naive" in k}
        rival, own = min(rivals, key=lambda name: rivals[name]), list(self.scores.values())[-1]["loss"]
        shown = {"merged": own, **rivals, **({"the ensemble": self.ensemble["loss"]} if self.ensemble else {})}
        better = "the merged network is the best of one network's size" if own < rivals[rival] else f"take {rival}"
        return f"loss of {', '.join(f'{name} {value:.4g}' for name, value in shown.items())}: {better}"

    @property
    def barriers(self) -> dict[str, float]:
        """By how much the loss exceeds the weighted mean of the networks' own, for each of :attr:`scores`.

        This is the excess at the merged network alone; :func:`~tu_symmetry.loss_barrier` has the largest over a line.
        """
        chord = sum(w * one["loss"] for w, one in zip(self.weights, self.members, strict=False) if w > 0)
        return {step: found["loss"] - chord for step, found in self.scores.items()}


@leaves_randomness
def merge(
    graph: SymmetryGraph,
    states: Networks,
    model: nn.Module,
    dataloader: Iterable[Any] | None = None,
    *,
    correction: Correction = "none",
    weights: Weights = "equal",
    reference: Reference | Network = "first",
    over: Sequence[Over] = ("permutations",),
    loss: Loss | None = None,
    metrics: Mapping[str, Loss] | None = None,
    validation: Iterable[Any] | None = None,
    resume: Kept | None = None,
    progress: Progress = lambda at: None,
) -> Merged:
    """Align networks of one architecture, average them, and correct the statistics of the average.

    Laws: copies of one network that were moved by what ``over`` names merge into a network of the same function (with
    permuted units; with rotations where matching finds them); a weight of one gives the
    aligned member itself; networks from files merge into the same as from memory.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        states: at least two networks: state dicts, files that :func:`~tu_symmetry.load_state` reads, a
            :class:`~tu_symmetry.SampleStore`, or a stack with a leading sample axis, or routines as for
            :func:`~tu_symmetry.align`. Files and stores are read one network at a time, two or three times each.
        model: the module, left as it is.
        dataloader: batches, tensors or tuples that begin with the inputs: for ``correction``.
        correction: ``batchnorm``: :func:`~tu_symmetry.reestimate_batchnorm`. ``repair``: :func:`~tu_symmetry.repair`.
            A network that is merged of a single one stays as it is.
        weights: the share of each network: ``equal``, or numbers that are at least 0, which are divided by their sum.
        reference: what the networks are aligned to, see :func:`~tu_symmetry.align`; or a network, also as a file.
        over: which symmetries move networks, see :func:`~tu_symmetry.align`. The mean of networks over ``"scales"`` is
            that of networks at their least mass.
        loss: mean loss over a batch of (outputs, targets), by which the networks and each step are measured.
        metrics: further means over a batch, by name, measured beside the loss.
        validation: batches ``(inputs, targets)`` to measure on; if left out, ``dataloader``.
        resume: takes scores and permutations as they are found, and gives them back to a call with the same arguments.
        progress: called with ``{"step", "done", "total"}``; steps are ``measure``, ``align`` and ``average``.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights, outputs that a move changed.
        SampleFileError: a file that cannot be used.
        TypeError: weights that are no numbers.
        ValueError: fewer than two networks, weights that do not fit, a correction without data, a network without the
            statistics to be corrected; a network whose loss is NaN, or statistics that are NaN or infinite (the message
            names the batch).

    Warns:
        StaleStatisticsWarning: the network has BatchNorm, and nothing corrects the statistics.
    """
    networks = StateSource(states)
    if len(networks) < 2:
        raise ValueError(f"merging needs at least two networks, got {len(networks)}")
    if correction not in get_args(Correction):
        raise ValueError(f"correction must be one of {', '.join(get_args(Correction))}; got {correction!r}")
    if correction != "none" and dataloader is None:
        raise ValueError(f"correction={correction!r} measures activations: pass a dataloader of training inputs")
    if (loss is not None or metrics) and (loss is None or (dataloader is None and validation is None)):
        raise ValueError("scores need a loss, and validation= (or dataloader) to measure on")
    over = check_over(over)
    kept: Kept = {} if resume is None else resume
    shares = _normalized(weights, len(networks))
    chosen = [k for k, share in enumerate(shares) if share > 0]
    data = [] if dataloader is None else reusable(dataloader)
    held = data if validation is None else reusable(validation)
    functions = {} if loss is None else {"loss": loss, **(metrics or {})}

    def tell(step: str, done: int) -> None:
        progress({"step": step, "done": done, "total": len(networks)})

    together = _Ensemble(functions)

    def score_member(k: int) -> Scores:
        state = read(graph, networks, k)
        found = measure(model, state, held, functions | together.of(shares[k]))
        if math.isnan(found["loss"]):
            raise ValueError(f"states[{k}]: {_nan_batch(model, state, held, functions['loss'])}")
        del found["_seen"]
        return found

    members: list[Scores] = []
    if functions and "scores/ensemble" not in kept:  # before the long work: the data may be of no use
        members = shared(len(networks), score_member, progress=lambda done: tell("measure", done))
        together.gather()
        for key, found in [
            *((f"scores/{k}", one) for k, one in enumerate(members)),
            ("scores/ensemble", together.scores()),
        ]:
            if rank() == 0:
                kept[key] = found
    elif functions:
        members = [kept[f"scores/{k}"] for k in range(len(networks))]
    moves, certificates, uncertified = _align(graph, networks, reference, over, kept, tell)

    def finished() -> Merged:
        aligned = networks.moved(graph, moves)
        counts = [transposition_count(move.permutation) for move in moves]
        scores: dict[str, Scores] = {}
        changed = any(counts[k] or moves[k].rounds or moves[k].counts()["sign_changes"] for k in chosen)
        if functions and len(chosen) > 1 and changed:
            naive = _average(networks, shares)
            scores["naive"] = measure(model, naive, held, functions)
            if correction != "none":
                given = networks.only(chosen)
                naive = correct(model, given, [shares[k] for k in chosen], naive, data, correction)
                scores["naive_corrected"] = measure(model, naive, held, functions)
            del naive
        alone = networks.lazily and not functions and correction == "none"
        state: Any = Mean(aligned, shares) if alone else _average(aligned, shares, lambda done: tell("average", done))
        if functions:
            scores["aligned"] = measure(model, state, held, functions)
        if correction != "none" and len(chosen) > 1:
            state = correct(model, aligned.only(chosen), [shares[k] for k in chosen], state, data, correction)
            if functions:
                scores["corrected"] = measure(model, state, held, functions)
        elif len(chosen) > 1 and batchnorm_layers(model):
            warnings.warn(
                f"{type(model).__name__} has BatchNorm, whose running statistics are stale (averages of {len(chosen)} "
                "networks'); pass correction='batchnorm' and a dataloader (--data NAME --correction batchnorm)",
                StaleStatisticsWarning,
                stacklevel=5,
            )
        ensemble = kept.get("scores/ensemble", {})
        seen = graph, networks, model, held if dataloader is None else data
        return Merged(
            state, shares, moves, counts, correction, members, scores, certificates, uncertified, ensemble, over, seen
        )

    return by_first(finished)


class _Ensemble:
    """What networks predict together, added up while each is measured; batches come in the same order for all."""

    def __init__(self, functions: Mapping[str, Loss]) -> None:
        self.functions, loss = functions, functions.get("loss")
        self.classes = loss is cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
        self.sums: list[Tensor] = []
        self.data: list[tuple[Tensor, torch.dtype]] = []
        self.ordered = True

    def of(self, share: float) -> dict[str, Loss]:
        """What :func:`measure` calls with each batch of a network, beside the metrics."""
        places = itertools.count()

        def add(outputs: Any, targets: Tensor) -> Any:
            k = next(places)
            if k == len(self.sums):
                self.data.append((targets, getattr(outputs, "dtype", torch.float64)))
                self.sums.append(torch.zeros((), dtype=torch.float64, device=targets.device))
            self.ordered &= isinstance(outputs, Tensor) and torch.equal(self.data[k][0], targets)
            if self.ordered:
                self.sums[k] = self.sums[k] + share * (
                    outputs.double().softmax(1) if self.classes else outputs.double()
                )
            return 0.0

        return {"_seen": add}

    def gather(self) -> None:
        """Add up what all processes have seen, each of its share of the networks."""
        every = gathered((self.sums, self.data, self.ordered))
        seen = [one for one in every if one[0]]  # some have no network
        if len(every) > 1 and seen:
            _, self.data, _ = first = seen[0]
            self.ordered = all(ordered for _, _, ordered in every) and all(
                len(data) == len(first[1])
                and all(torch.equal(a, b) for (a, _), (b, _) in zip(data, first[1], strict=True))
                for _, data, _ in seen
            )
            self.sums = [torch.stack(parts).sum(0) for parts in zip(*(sums for sums, _, _ in seen), strict=False)]

    def scores(self) -> Scores:
        """Means over the samples; none where outputs are no tensors, or the order of the batches changed."""
        if not self.ordered:
            return {}
        found, count = dict.fromkeys(self.functions, 0.0), sum(len(y) for y, _ in self.data)
        for total, (targets, dtype) in zip(self.sums, self.data, strict=True):
            outputs = (total.log() if self.classes else total).to(dtype)
            for name, function in self.functions.items():
                found[name] += float(function(outputs, targets)) * len(targets) / count
        return found


def _align(
    graph: SymmetryGraph,
    networks: StateSource,
    reference: Reference | Network,
    over: Sequence[Over],
    kept: Kept,
    tell: Callable[[str, int], None],
) -> tuple[list[Move], list[Certificate], str]:
    """What moves all networks; one of them is in memory beside what it is matched to."""
    graph.require_verified()
    anchor: Any = reference
    if not (isinstance(reference, str) and reference in get_args(Reference)):
        if isinstance(reference, (str, os.PathLike)):
            anchor = open_state(reference)
        elif not hasattr(reference, "layouts"):  # which a view of files has
            anchor = read_state(reference, "reference")
        graph.check_state(anchor, name="reference")
    target = find_target(graph, networks, anchor, over)

    def aligned(k: int) -> tuple[Move, tuple[Certificate | None, str] | None]:
        state = networks.open(k)
        graph.check_state(state, name=f"states[{k}]")
        if f"move/{k}" not in kept:
            kept[f"move/{k}"] = target.move(k, state).flat()
        move = Move.of(kept[f"move/{k}"])
        if reference == "first" and k == 0 and not move.rounds:
            return move, None
        there = moved(graph, move, state)
        return move, measured(graph, state, there, f"states[{k}], aligned", rounded=move.rounds)

    found = shared(len(networks), aligned, progress=lambda done: tell("align", done))
    return [move for move, _ in found], *certified(told for _, told in found if told is not None)


def _normalized(weights: Any, count: int) -> list[float]:
    if isinstance(weights, (str, Mapping)):
        if weights != "equal":
            raise ValueError(f"weights must be 'equal' or numbers, got {weights!r}")
        return [1 / count] * count
    for number in (weights := list(weights)):
        check_number(number, "a weight")
    numbers = [float(w) for w in weights]
    if len(numbers) != count or not all(math.isfinite(w) and w >= 0 for w in numbers) or not any(numbers):
        raise ValueError(f"weights must be {count} finite numbers, none below 0 and not all 0; got {numbers}")
    if math.isinf(sum(numbers)):
        numbers = [w / max(numbers) for w in numbers]
    return [w / sum(numbers) for w in numbers]


def average(states: Networks, weights: Weights = "equal") -> State:
    """The weighted mean of networks (given as for :func:`merge`), computed in single precision at least.

    It is on the device and in the dtypes of the first network that is part of it.

    Raises:
        TypeError: what is no state dict or file.
        ValueError: no networks, networks of several architectures, or weights that do not fit.
        SymmetryError: values that are no tensors, or of several kinds.
    """
    networks = StateSource(states)
    if not len(networks):
        raise ValueError("there is no network to take a mean of: the list of states is empty")
    first = networks[0]
    for k in range(len(networks)):
        require_alike(networks[k] if k else first, first, f"states[{k}]", "states[0]")
    del first
    return _average(networks, _normalized(weights, len(networks)))


def _average(networks: StateSource, shares: Sequence[float], tell: Callable[[int], None] = lambda done: None) -> State:
    """The weighted mean: the sum so far moves towards each network by its share in both, in single precision at least.

    Weights ``1/2, 1/4, 1/4`` move it by 1, then by a third of the distance, then by a quarter.
    """
    mean: State = {}
    dtypes: dict[str, torch.dtype] = {}
    for k, share in enumerate(shares):
        if share > 0:
            network, ratio = networks.open(k), share / sum(shares[: k + 1])
            mean = mean or as_given(network, {})
            for name in network:
                tensor = network[name]
                dtypes.setdefault(name, tensor.dtype)
                mean[name] = _towards(mean.get(name), tensor, ratio)
                del tensor
            del network  # before the next one is read
        tell(k + 1)
    for name, dtype in dtypes.items():
        mean[name] = mean[name].to(dtype)
    return mean


class Mean(Views):
    """The mean of :func:`_average`, of which each tensor is made when it is asked for."""

    def __init__(self, networks: StateSource, shares: Sequence[float]) -> None:
        ratios = [share / sum(shares[: k + 1]) for k, share in enumerate(shares)]
        self._parts = [(networks.open(k), ratio) for k, ratio in enumerate(ratios) if shares[k] > 0]
        first = self._parts[0][0]
        self.as_given, self.layouts = as_given(first, {}), layouts_of(first)
        self._held = self.layouts

    def __getitem__(self, name: str) -> Tensor:
        mean: Tensor | None = None
        for network, ratio in self._parts:
            mean = _towards(mean, network[name], ratio)
        assert mean is not None
        return mean.to(self.layouts[name][1])


def _towards(mean: Tensor | None, tensor: Tensor, ratio: float) -> Tensor:
    """One step of a running mean, written into ``mean`` a piece at a time; the first one is a copy of the tensor."""
    if mean is None:
        wide = torch.float32 if tensor.dtype in _HALF else tensor.dtype
        return tensor.detach().to(wide, memory_format=torch.contiguous_format, copy=True)
    if mean.is_floating_point() or mean.is_complex():
        for piece, other in zip(mean.view(-1).split(_PIECE), tensor.reshape(-1).split(_PIECE), strict=True):
            piece.copy_(between(piece, other.to(piece), ratio))
    return mean


def _nan_batch(model: nn.Module, state: Mapping[str, Tensor], data: Iterable[Any], loss: Loss) -> str:
    """The first batch on which the loss is NaN, in words."""
    for k, batch in enumerate(data):
        if math.isnan(mean_loss(model, state, [batch], loss)):
            finite = all(bool(torch.isfinite(t).all()) for t in tree_leaves(batch) if isinstance(t, Tensor))
            why = "its numbers are finite: the network diverges" if finite else "it holds such numbers itself"
            return f"the loss is NaN on batch {k} of the data (counted from 0), and {why}"
    return "the loss is NaN"
