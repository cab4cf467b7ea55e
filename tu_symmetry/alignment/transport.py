"""Task vectors and adapters, moved from the network that they were trained on to another one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.matching import inner_product
from tu_symmetry.alignment.moves import Move, move_tensors, undo_tensors
from tu_symmetry.alignment.networks import Network, StateSource
from tu_symmetry.alignment.over import Over, compared
from tu_symmetry.reporting.brief import Brief
from tu_symmetry.states import State, SymmetryError, as_given, check_number, require_state
from tu_symmetry.symmetry.action import apply_linear, scale_tensors
from tu_symmetry.symmetry.certificate import Certificate, measured
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.randomness import leaves_randomness
from tu_symmetry.symmetry.running.weights import as_computed, is_continuous

_FACTOR = re.compile(r"(?P<path>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight")


@dataclass(frozen=True, repr=False)
class Transported(Brief):
    """A fine-tuned network, or an adapter, for another base.

    Attributes:
        state: the new base with the moved task vector; for an adapter the adapter, with the names that it was given by.
        move: what moved the old base, and the task vector with it, onto the new base; over scales and rotations it
            leads to the form in which both bases are compared, from which the task vector is brought back.
        transpositions: number of transpositions (NoT) of the move.
        distance_before: L2 distance of the two bases, over scales and rotations in the form in which they are compared.
        distance_after: the same after the move. Where it is hardly less, the bases share little that could be moved.
        task_norm: L2 norm of what was added to the new base (of what an adapter adds to it, at its scaling 1).
        certificates: by how much the outputs of the old base, and of the fine-tuned network, changed by the move.
        uncertified: why nothing was measured; empty where something was.
    """

    state: State
    move: Move
    transpositions: int
    distance_before: float
    distance_after: float
    task_norm: float
    certificates: list[Certificate]
    uncertified: str


@leaves_randomness
def transport(
    graph: SymmetryGraph,
    base: Network,
    finetuned: Network,
    new_base: Network,
    *,
    weight: float = 1.0,
    over: Sequence[Over] = ("permutations",),
) -> Transported:
    """Move what fine-tuning added to one network to another network of the same architecture.

    The element that aligns ``base`` to ``new_base`` acts on all that lies beside ``base`` in the same way, so that it
    moves the task vector ``finetuned - base`` too. Running means move as parameters do, running variances by
    factors, which keep them positive; counters are those of the new base.

    Laws: where ``new_base`` is ``base`` moved by what ``over`` names (and matching finds it), the result is
    ``finetuned`` moved by the same, and computes what it computes; without fine-tuning it is ``new_base``; to a third
    base over a second one is as good as directly, where all are one network moved. Between networks that were trained
    apart nothing is promised: measure the result.

    Args:
        graph: the architecture's symmetry graph (verified on first use).
        base: the network that was fine-tuned: a state dict, a file, or a LightningModule.
        finetuned: what became of it; or a LoRA adapter of linear layers, with ``lora_A.weight`` and ``lora_B.weight``
            behind the names of the layers, as PEFT saves it. The new factors have the same rank and product.
        new_base: the network that the task vector is added to.
        weight: what the task vector is multiplied by.
        over: which symmetries may move it, see :func:`~tu_symmetry.align`.

    Raises:
        SymmetryError: a state of another architecture, NaN or infinite weights; a fine-tuned network that the move
            changes, as a rotation does where fine-tuning changed the gains of norms; adapters of other kinds.
        TypeError: what is no state dict or file, or a weight that is no number.
        ValueError: an unknown word, or a weight that is NaN or infinite.
    """
    check_number(weight, "weight")
    if not math.isfinite(weight):
        raise ValueError(f"weight={weight!r}: a task vector is multiplied by a finite number, 1 for all of it")
    given = StateSource([base, finetuned, new_base])
    old, tuned, new = (require_state(given[k], name) for k, name in enumerate(("base", "finetuned", "new_base")))
    adapter = tuned if any(_FACTOR.fullmatch(n) for n in tuned) and not tuned.keys() <= old.keys() else {}
    factors = _factors(graph, adapter)
    products = {name: adapter[b].double() @ adapter[a].double() for name, (a, b) in factors.items()}
    _require_one(graph, old, "base")
    _require_one(graph, new, "new_base")
    if adapter:
        tuned = {n: t.double() + products[n].to(t.device) if n in products else t for n, t in old.items()}
    _require_one(graph, tuned, "finetuned")
    aligned = align(graph, [old], reference=new, over=over)
    move, form = aligned.moves[0], compared(graph, new, over)

    def moved(tensors: Mapping[str, Tensor]) -> State:
        wide = {n: t.to(new[n].device, as_computed(t.dtype, torch.float64)) for n, t in tensors.items()}
        return undo_tensors(graph, form, move_tensors(graph, move, wide))

    if move.maps:  # behind gains that fine-tuning changed no units may be rotated
        apply_linear(graph, move.maps, scale_tensors(graph, move.log_scale, tuned))
    here, there = moved(old), moved(tuned)
    certificate, uncertified = measured(graph, tuned, there, "finetuned, moved as its base is")
    if adapter:
        result = as_given(adapter, {})
        added = {n: weight * t for n, t in moved(products).items()}
        for name, (a, b) in factors.items():
            for factor, tensor in zip((a, b), _refactored(added[name], len(adapter[a])), strict=True):
                result[factor] = tensor.to(adapter[factor])
        squares = sum(float(t.square().sum()) for t in added.values())
    else:
        result = as_given(new, {n: _added(graph, n, t, here[n], there[n], weight) for n, t in new.items()})
        added = {n: result[n].to(here[n]) - t.to(here[n]) for n, t in new.items()}
        squares = inner_product(graph, added, added)
    return Transported(
        state=result,
        move=move,
        transpositions=aligned.transpositions[0],
        distance_before=aligned.distances_before[0],
        distance_after=aligned.distances_after[0],
        task_norm=squares**0.5,
        certificates=[*aligned.certificates, *([] if certificate is None else [certificate])],
        uncertified=uncertified,
    )


def _require_one(graph: SymmetryGraph, state: Mapping[str, Tensor], name: str) -> None:
    if graph.check_state(state, name=name):
        raise SymmetryError(f"{name} is a stack of networks with leading sample axes; pass one network of it")


def _added(graph: SymmetryGraph, name: str, new: Tensor, old: Tensor, tuned: Tensor, weight: float) -> Tensor:
    """One tensor of the new base with the change from ``old`` to ``tuned``, in the dtype of the new base."""
    if not is_continuous(new):  # a count, indices or a mask
        return new
    wide = new.to(old)
    found = wide + weight * (tuned - old)
    if name in graph.buffers and name.endswith("running_var"):
        found = torch.where(old > 0, wide * (tuned / old.clamp(min=1e-300)) ** weight, found.clamp(min=0))
    held = found.to(new.dtype)
    if not bool(torch.isfinite(held).all()):
        raise SymmetryError(
            f"{name!r} with {weight} times the task vector leaves the range of {new.dtype}; lower weight="
        )
    return held


def _factors(graph: SymmetryGraph, adapter: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """The names of both factors of each adapted weight, by its name in the graph."""
    modules = {} if graph.probe is None else dict(graph.probe.module.named_modules())
    linear = {
        alias: graph.shapes[key]
        for key, names in graph.aliases.items()
        for alias in names
        if len(graph.shapes[key]) == 2
        and (not modules or isinstance(modules.get(alias.removesuffix(".weight")), nn.Linear))
    }
    found: dict[str, dict[str, str]] = {}
    for name in adapter:
        parts = _FACTOR.fullmatch(name)
        fits = [alias for alias in linear if parts and f".{parts['path']}.weight".endswith(f".{alias}")]
        if not parts or not fits:
            raise SymmetryError(
                f"finetuned holds {name!r}, which is no factor of a linear layer of {graph.architecture}; adapters are "
                "moved whose tensors are LAYER.lora_A.weight and LAYER.lora_B.weight: merge others into their base, "
                "and pass the whole network"
            )
        held = found.setdefault(max(fits, key=len), {}).setdefault(parts["factor"], name)
        if held != name:
            raise SymmetryError(f"finetuned holds two adapters of one layer, {held!r} and {name!r}: pass one of them")
    for weight, pair in found.items():
        shapes = {name: tuple(adapter[name].shape) for name in pair.values()}
        rank = shapes.get(pair.get("A", ""), ())[:1]
        rows, columns = linear[weight]
        if [shapes.get(pair.get(f, "")) for f in "AB"] != [(*rank, columns), (rows, *rank)]:
            raise SymmetryError(f"finetuned has {shapes} for {weight!r}, whose shape {rows, columns} is not theirs")
    return {weight: (pair["A"], pair["B"]) for weight, pair in found.items()}


def _refactored(product: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors ``[rank, columns]`` and ``[rows, rank]`` of a product of that rank, of equal size."""
    torch.manual_seed(0)  # of its draws, which decide on signs
    u, s, v = torch.svd_lowrank(product, min(rank, *product.shape))
    root, pad = s.sqrt(), (0, rank - len(s))  # of an adapter with a higher rank than its weight
    return nn.functional.pad(v * root, pad).mT, nn.functional.pad(u * root, pad)
