"""What a pair of networks says about a group: Gram matrices between the units of one and the units of the other.

The alignment objective is the inner product ``sum_T <reference_T, permuted_T>`` over all parameters T. Seen from one
group with all others held, it is linear in the permutation: ``sum_j G[j, p(j)]``. A family is a root group together
with the groups nested in it (heads with their units).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import largest_entry, permute_axis, permute_tensors
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember
from tu_symmetry.transfer import numbers

if TYPE_CHECKING:
    from typing_extensions import Self


_ORDINARY = 2.0**30


@dataclass(eq=False)
class Family:
    """A root group and the groups nested in it.

    Attributes:
        root: the group without parent.
        children: all groups nested in the root, parents before the groups nested in them.
        tensors: parameters that the family moves.
        coupled: whether one tensor is moved by the family in two ways that do not commute with taking a Gram matrix
            (along two axes, or by two nested groups at the same positions): the objective is then quadratic in the
            family's own permutation.
        neighbors: roots of other families that move a parameter of this one (whose change makes its Gram stale).
    """

    root: PermutationGroup
    children: tuple[PermutationGroup, ...]
    tensors: frozenset[str]
    coupled: bool
    neighbors: set[str] = field(default_factory=set)

    @property
    def groups(self) -> tuple[PermutationGroup, ...]:
        """The root and all groups in it, parents first."""
        return (self.root, *self.children)

    @property
    def names(self) -> frozenset[str]:
        """Names of the root and of all groups in it."""
        return frozenset(g.name for g in self.groups)


def families(graph: SymmetryGraph) -> list[Family]:
    """The families of a graph, in its order, with their neighborhoods. Buffers do not count."""
    found = []
    for group in graph.permutations:
        if group.parent is not None:
            continue
        below = descendants(graph, group)
        names = frozenset(m.parameter for g in (group, *below) for m in trainable_members(graph, g))
        members: dict[str, list[tuple[PermutationGroup, PermutationMember]]] = {}
        for g in (group, *below):
            for member in trainable_members(graph, g):
                members.setdefault(member.parameter, []).append((g, member))
        coupled = any(
            interact(a, b) and not (is_below(h, g) and _carries(a, b)) and not (is_below(g, h) and _carries(b, a))
            for on_tensor in members.values()
            for (g, a), (h, b) in itertools.combinations(on_tensor, 2)
        )
        found.append(Family(group, below, names, coupled))
    for family in found:
        family.neighbors = {o.root.name for o in found if o is not family and o.tensors & family.tensors}
    return found


def descendants(graph: SymmetryGraph, group: PermutationGroup) -> tuple[PermutationGroup, ...]:
    """All groups nested in a group at any depth, parents first."""
    below: list[PermutationGroup] = []
    frontier = [group.name]
    while frontier:
        nested = [c for name in frontier for c in graph.children(name)]
        below += nested
        frontier = [c.name for c in nested]
    return tuple(below)


def is_below(group: PermutationGroup, ancestor: PermutationGroup) -> bool:
    """Whether a group is nested in another one at any depth."""
    return group.name.startswith(f"{ancestor.name}/")


def _carries(outer: PermutationMember, inner: PermutationMember) -> bool:
    """Whether the blocks that ``outer`` moves hold the units of ``inner``: along its axis, or as its rows."""
    return outer.axis in (inner.axis, inner.within_axis)


def trainable_members(graph: SymmetryGraph, group: PermutationGroup) -> list[PermutationMember]:
    """The members of a group that are real parameters: similarities come from these, all other members follow."""
    return [m for m in group.members if m.parameter not in graph.buffers and graph.kinds.get(m.parameter) != "complex"]


def _units_first(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    """``[units, everything else]``: the slices of a tensor that belong to each unit; ``index`` is [units, copies]."""
    moved = tensor.movedim(axis, 0)
    flat = index.reshape(-1)
    if len(flat) != moved.shape[0] or not torch.equal(
        flat, torch.arange(len(flat), device="cpu")
    ):  # else the order is right as it is
        moved = moved.index_select(0, flat.to(tensor.device))
    return moved.reshape(index.shape[0], -1)


def member_gram(member: PermutationMember, reference: Tensor, moved: Tensor) -> Tensor:
    """Inner products between the units of two tensors along one member's axis: ``[*blocks n, *blocks n]`` flattened.

    For a group without blocks this is ``[size, size]``; for a nested one ``[blocks * size, blocks * size]``, all pairs
    of units of all pairs of blocks.
    """
    if member.within_axis is None:
        flat = member.index.reshape(-1, member.index.shape[-1])
        return _units_first(reference, member.axis, flat) @ _units_first(moved, member.axis, flat).T
    assert member.within is not None
    return _within(member, reference) @ _within(member, moved).T


def _within(member: PermutationMember, tensor: Tensor) -> Tensor:
    """As :func:`_units_first`, for positions that hold in some rows of a second axis only."""
    assert member.within is not None and member.within_axis is not None
    index = member.index.reshape(-1, *member.index.shape[-2:])
    rows = member.within.reshape(-1, member.within.shape[-1])
    if index.shape[0] != rows.shape[0]:
        rows = rows.reshape(index.shape[0], -1)
    parts = []
    for block_index, block_rows in zip(index, rows, strict=True):
        block = tensor.index_select(member.within_axis, block_rows.to(tensor.device))
        parts.append(_units_first(block, member.axis, block_index))
    return torch.cat(parts)


def own_member(member: PermutationMember, children: tuple[PermutationGroup, ...]) -> PermutationMember | None:
    """The positions of a group's member that belong to no nested group: they move with the block and keep slots."""
    covered = torch.zeros(int(member.index.max()) + 1, dtype=torch.bool, device="cpu")
    for child in children:
        for other in child.members:
            if other.parameter != member.parameter or not _carries(member, other):
                continue
            held = other.index if other.axis == member.axis else other.within
            if held is not None and (other.axis != member.axis or other.within_axis is None):
                covered[held[held < len(covered)]] = True
    free = ~covered[member.index]
    if not free.any():
        return None
    counts = free.sum(-1)
    if (counts != counts.reshape(-1)[0]).any():
        return None
    index = member.index[free].reshape(*member.index.shape[:-1], -1)
    return PermutationMember(member.parameter, member.axis, index, member.within_axis, member.within)


def interact(a: PermutationMember, b: PermutationMember) -> bool:
    """Whether moving along ``b`` changes what ``a`` compares: another axis of the tensor, or some of the positions."""
    if a.parameter != b.parameter:
        return False
    if a.axis != b.axis or a.within_axis != b.within_axis:
        return True
    return bool(torch.isin(a.index.reshape(-1), b.index.reshape(-1)).any())


def working(graph: SymmetryGraph, state: Mapping[str, Tensor], *, moved: bool = False) -> dict[str, Tensor]:
    """The parameters of a state in the dtype that Gram matrices are computed in, see :func:`each_working`.

    With ``moved`` only those that a permutation group moves (all, where none does).
    """
    names = {m.parameter for g in graph.permutations for m in trainable_members(graph, g)} if moved else set()
    return dict(each_working(graph, state, names))


def each_working(
    graph: SymmetryGraph, state: Mapping[str, Tensor], names: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a state one after the other, some of them if ``names`` has any.

    float64 stays float64, everything else becomes float32 (half precision is too coarse to add up inner products).
    """
    for name in graph.shapes:
        if name in graph.buffers or (names and name not in names):
            continue
        tensor = state[name]
        if tensor.is_floating_point():
            yield name, tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def parameter_sizes(graph: SymmetryGraph, *states: Mapping[str, Tensor]) -> list[float]:
    """The largest magnitude of each parameter that is not zero."""
    tensors = [s[n] for s in states for n in graph.shapes if n not in graph.buffers and s[n].is_floating_point()]
    tensors = [t.detach() for t in tensors if t.numel()]
    ends = numbers([end for t in tensors for end in torch.aminmax(t)])
    pairs = zip(tensors, ends[::2], ends[1::2], strict=True)
    largest = (max(-low, high) if math.isfinite(low - high) else largest_entry(t) for t, low, high in pairs)
    return [size for size in largest if size > 0]


def exponent_of(sizes: Sequence[float]) -> int:
    """0 for weights of ordinary size; else the binary exponent of the largest.

    Single precision holds neither the squares of weights of 1e30 nor those of 1e-30: inner products of such weights are
    infinite, or zero without a word. Weights of this size are divided by this power of two, which is exact, and are
    compared in double precision (:func:`resized`).
    """
    if all(1 / _ORDINARY < size < _ORDINARY for size in sizes):
        return 0
    return math.frexp(max(sizes))[1] or 1


def size_exponent(graph: SymmetryGraph, *states: Mapping[str, Tensor]) -> int:
    """The exponent of :func:`exponent_of` for the parameters of some states."""
    return exponent_of(parameter_sizes(graph, *states))


def resized(graph: SymmetryGraph, state: Mapping[str, Tensor], exponent: int) -> dict[str, Tensor]:
    """A state whose parameters are divided by ``2 ** exponent``, in double precision; buffers as they are."""
    halves = 2.0 ** -(exponent // 2), 2.0 ** -(exponent - exponent // 2)  # the whole may be out of range
    trainable = {a for n in graph.shapes if n not in graph.buffers for a in graph.aliases[n]}
    return {
        n: t.detach().double() * halves[0] * halves[1] if n in trainable and t.is_floating_point() else t
        for n, t in state.items()
    }


def enlarged(value: float, exponent: int) -> float:
    """``value * 2 ** exponent``.

    Raises:
        SymmetryError: if float64 does not hold it.
    """
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        raise SymmetryError(
            "the inner products of these weights leave the range of float64; weights of this size come from a "
            "diverged run or a damaged file"
        ) from None


class WeightSimilarities:
    """Gram matrices of the families for a reference and a state, with the other families' permutations applied."""

    def __init__(self, graph: SymmetryGraph, reference: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Take two sets of parameters as :func:`working` returns them."""
        self.graph, self.reference, self.state = graph, reference, state
        self.prices: dict[str, Tensor] = {}

    @classmethod
    def of(cls, graph: SymmetryGraph, reference: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Self:
        """Take two state dicts; the computation runs on the device and in the dtype of the second."""
        own = working(graph, state, moved=True)
        other = each_working(graph, reference, own)
        return cls(graph, {n: t.to(own[n].device, own[n].dtype) for n, t in other if n in own}, own)

    def moved(
        self, names: frozenset[str], permutation: Mapping[str, Tensor], held: frozenset[str]
    ) -> dict[str, Tensor]:
        """Some tensors of the state with all permutations applied but those of the groups in ``held``."""
        touching = {
            g.name: permutation[g.name]
            for g in self.graph.permutations
            if g.name not in held and any(m.parameter in names for m in g.members)
        }
        for name in [n for n in touching if "/" in n]:
            parts = name.split("/")
            for k in range(1, len(parts)):
                outer = "/".join(parts[:k])
                if outer in permutation and outer not in held:
                    touching[outer] = permutation[outer]
        return permute_tensors(self.graph, touching, {name: self.state[name] for name in names})

    def value(self, family: Family, permutation: Mapping[str, Tensor]) -> float:
        """Inner product of the family's tensors with all permutations applied."""
        moved = self.moved(family.tensors, permutation, frozenset())
        return sum(numbers([(self.reference[n] * moved[n]).sum(dtype=torch.float64) for n in family.tensors]))

    def grams(self, family: Family, permutation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What speaks for pairing units of each group of a family, all other families' permutations applied.

        Returns:
            For each group ``[blocks * size, blocks * size]``, float64 on the host, over the positions that no deeper
            group moves. Where a root moves a tensor along two axes, the other axis is in the order of ``permutation``.
        """
        moved = self.moved(family.tensors, permutation, family.names)
        found: dict[str, Tensor] = {}
        for group in family.groups:
            total: Tensor | None = None
            below = tuple(g for g in family.children if is_below(g, group))
            for member in trainable_members(self.graph, group):
                tensor = moved[member.parameter]
                for other in group.members if not family.children else ():
                    if other.parameter == member.parameter and other.axis != member.axis:
                        ndim = len(self.graph.shapes[other.parameter])
                        tensor = permute_axis(tensor, other, permutation[group.name], ndim)
                part = own_member(member, below) if below else member
                if part is not None:
                    gram = member_gram(part, self.reference[member.parameter], tensor)
                    total = gram if total is None else total + gram
            units = math.prod(group.shape)
            found[group.name] = (
                torch.zeros(units, units, dtype=torch.float64, device="cpu")
                if total is None
                else total.to("cpu", torch.float64)
            )
        return found

    def blocks(
        self, family: Family, moving: str, permutation: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Pieces of a coupled family, float64 on the host; every tensor counts in one piece.

        Returns:
            The root's own part ``[H, H]`` (positions that belong to no nested group), and for each group nested right
            in the root the Gram of all pairs of units of all pairs of blocks, ``[H, n, H, n]``, given the inner
            permutations of the other nested groups. A tensor that several groups move counts for ``moving`` if that
            is among them.
        """
        root = family.root
        moved = self.moved(family.tensors, permutation, family.names)
        own = torch.zeros(root.size, root.size, dtype=torch.float64, device="cpu")
        for member in trainable_members(self.graph, root):
            part = own_member(member, family.children)
            if part is not None:
                gram = member_gram(part, self.reference[member.parameter], moved[member.parameter])
                own += gram.to("cpu", torch.float64)
        inner: dict[str, Tensor] = {}
        direct = sorted((c for c in family.children if c.parent == root.name), key=lambda c: c.name != moving)
        counted: set[str] = set()
        for child in direct:
            heads, size = child.blocks[0], child.size
            total = torch.zeros(heads, size, heads, size, dtype=torch.float64, device="cpu")
            shared: set[str] = set()
            for member in trainable_members(self.graph, child):
                reference, tensor = self.reference[member.parameter], moved[member.parameter]
                partners = [c for c in direct if c is not child and any(interact(member, m) for m in c.members)]
                if not partners:
                    gram = member_gram(member, reference, tensor).to("cpu", torch.float64)
                    total += gram.reshape(heads, size, heads, size)
                    continue
                if member.parameter in counted:
                    continue
                shared.add(member.parameter)
                for h in range(heads):  # the partners' inner order is the one that the block h is to receive
                    held = {c.name: permutation[c.name][h].expand(c.shape).clone() for c in partners}
                    arranged = permute_tensors(self.graph, held, {member.parameter: tensor})[member.parameter]
                    gram = member_gram(member, reference, arranged).to("cpu", torch.float64)
                    total[h] += gram.reshape(heads, size, heads, size)[h]
            counted |= shared
            inner[child.name] = total
        return own, inner

    def inside(self, family: Family, group: PermutationGroup, permutation: Mapping[str, Tensor]) -> Tensor:
        """Inner products ``[blocks, n, n]`` within the blocks of a deeper group, all other groups applied."""
        moved = self.moved(family.tensors, permutation, frozenset((group.name,)))
        blocks = math.prod(group.blocks)
        total = torch.zeros(blocks, group.size, group.size, dtype=torch.float64, device="cpu")
        for member in trainable_members(self.graph, group):
            gram = member_gram(member, self.reference[member.parameter], moved[member.parameter])
            pairs = gram.to("cpu", torch.float64).reshape(blocks, group.size, blocks, group.size)
            total += torch.diagonal(pairs, dim1=0, dim2=2).permute(2, 0, 1)
        return total
