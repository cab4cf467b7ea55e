"""The groups of a symmetry graph: which axes of which parameters and buffers one kind of units owns.

Every index tensor is a position along an axis of a named parameter or buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PermutationMember:
    """One axis of one parameter or buffer that a permutation group moves.

    Attributes:
        parameter: name in the state dict.
        axis: the axis that moves.
        index: ``[*blocks, size, copies]``; ``index[b, j]`` are the positions along ``axis`` of unit ``j`` in block
            ``b``. ``copies`` is above one where one unit owns several positions (a channel after a flatten, a head
            with all its units). ``blocks`` is empty unless the group is nested.
        within_axis: None, or a second axis of the same tensor: the positions then hold only in the rows ``within``
            of that axis (the input axis of a grouped convolution, whose meaning differs from group to group).
        within: None, or ``[*blocks, rows]`` positions along ``within_axis``.
    """

    parameter: str
    axis: int
    index: Tensor
    within_axis: int | None = None
    within: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ScaleMember:
    """One parameter or buffer that a scale or normalization group multiplies; which entries, :class:`ScaleTerm` says.

    Attributes:
        parameter: name in the state dict.
        axis: the (last) axis along which the factor varies, None where one factor multiplies the whole tensor.
        exponent: the tensor is multiplied by ``factor ** exponent``.
        buffer: whether it is a buffer (a running statistic), which no optimizer or regularizer counts.
    """

    parameter: str
    axis: int | None
    exponent: float
    buffer: bool = False


@dataclass(frozen=True, eq=False)
class PermutationGroup:
    """Units that may be permuted freely: the symmetric group on ``size`` units, once for each block.

    A group may be nested in another one (the units of one attention head in the heads): the parent moves whole blocks,
    the nested group, which is called ``parent/own``, moves units inside each block.

    Attributes:
        size: number of units that are permuted (in each block).
        members: every axis of every parameter and buffer that moves.
        parent: name of the group whose units are the blocks, or None.
        blocks: shape of the blocks, ``()`` for a group without parent.
    """

    kind: ClassVar[str] = "permutation"
    name: str
    size: int
    members: tuple[PermutationMember, ...] = field(repr=False)
    parent: str | None = None
    blocks: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an element of the group: ``(*blocks, size)``."""
        return (*self.blocks, self.size)

    @property
    def log10_order(self) -> float:
        """log10 of the number of permutations in the group (``blocks * log10(size!)``)."""
        return math.prod(self.blocks) * math.lgamma(self.size + 1) / math.log(10)


@dataclass(frozen=True, eq=False)
class ScaleGroup:
    """``size`` independent positive factors that can be moved between the producers and the consumers of units.

    It is not ``exact`` where the symmetry holds up to the epsilon of a normalization only.
    """

    kind: ClassVar[str] = "scale"
    name: str
    size: int
    members: tuple[ScaleMember, ...] = field(repr=False)
    exact: bool = True


@dataclass(frozen=True, eq=False)
class NormalizationGroup(ScaleGroup):
    """``size`` positive factors on parameters that a following normalization undoes (no parameter shrinks for it).

    Running statistics that must move along are among the members, as buffers.
    """

    kind: ClassVar[str] = "normalization"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trainable tensors of the group, without the buffers that move along."""
        return tuple(dict.fromkeys(m.parameter for m in self.members if not m.buffer))


@dataclass(frozen=True, eq=False)
class SignGroup:
    """``size`` independent signs that can be moved between the producers and the consumers of units.

    What its members hold is multiplied by a sign, 1 or -1, for each unit: of networks of odd functions (tanh), and of
    what a normalization by a mean of squares reads. Exponents of members are 1, and the symmetry is exact.
    """

    kind: ClassVar[str] = "sign"
    name: str
    size: int
    members: tuple[ScaleMember, ...] = field(repr=False)
    exact: bool = True


Subgroup = Literal["general", "orthogonal", "centered", "complex"]


@dataclass(frozen=True, eq=False)
class LinearMember(PermutationMember):
    """One axis of one parameter that a linear group mixes: by a map (exponent 1), or by its inverse transposed (-1)."""

    exponent: float = 1.0


@dataclass(frozen=True, eq=False)
class LinearGroup:
    """Units that nothing but linear maps makes and reads: an invertible matrix may mix them, another one in each block.

    Attributes:
        size: number of units that are mixed (in each block).
        members: every axis of every parameter that is mixed.
        blocks: shape of the blocks, which stay where they are.
        subgroup: which matrices may mix them. ``"general"``: all invertible ones. ``"orthogonal"``: where one tensor
            makes and reads the units, or their mean square is read. ``"centered"``: orthogonal ones that leave the
            vector of ones where it is, or turn its sign, since LayerNorm subtracts a mean. ``"complex"``: one complex
            number for each pair of units that rotary positions rotate.
        constant: gains that the units meet on their way, of which all entries have to be equal: the group acts on
            weights whose norms are folded (:func:`~tu_symmetry.fold_norms`).
    """

    kind: ClassVar[str] = "linear"
    name: str
    size: int
    members: tuple[LinearMember, ...] = field(repr=False)
    blocks: tuple[int, ...] = ()
    subgroup: Subgroup = "general"
    constant: tuple[str, ...] = ()
    exact: bool = True

    @property
    def orthogonal(self) -> bool:
        """Whether its matrices are orthogonal."""
        return self.subgroup in ("orthogonal", "centered")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an element of the group: ``(*blocks, size, size)``."""
        return (*self.blocks, self.size, self.size)


Group = PermutationGroup | ScaleGroup | SignGroup | LinearGroup


class Pin(NamedTuple):
    """A parameter axis on which no permutation symmetry is claimed, and why."""

    parameter: str
    axis: int
    size: int
    reason: str


@dataclass(frozen=True, eq=False)
class ScaleTerm:
    """One term of the log-scale of a tensor: ``exponent * log_factor[index]``.

    ``index`` broadcasts against the tensor; its values number the factors of all scale groups, then of all
    normalization groups, one after the other, and -1 means no factor.
    """

    exponent: float
    index: Tensor


def numbers_at(index: Tensor, member: PermutationMember) -> Tensor | None:
    """What an index tensor of :class:`ScaleTerm` holds at a member's positions; None where these do not tell.

    Returns ``[blocks * size, copies]``.
    """
    axes = [axis for axis, size in enumerate(index.shape) if size > 1]
    positions = member.index.reshape(-1, *member.index.shape[-2:])
    if axes == [member.axis]:
        return index.reshape(-1)[positions].flatten(0, 1)
    if member.within is None or member.within_axis is None or set(axes) != {member.axis, member.within_axis}:
        return None
    table = index.movedim((member.within_axis, member.axis), (0, 1)).reshape(-1, index.shape[member.axis])
    pairs = zip(member.within.reshape(len(positions), -1), positions, strict=True)
    found = torch.stack([table[rows][:, at] for rows, at in pairs])  # [blocks, rows, size, copies]
    return found[:, 0].flatten(0, 1) if bool((found == found[:, :1]).all()) else None


def some(names: Sequence[str], between: str = ", ", show: Callable[[str], str] = repr) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return between.join(map(show, names[:6])) + more if names else "nothing"


def unique(base: str, taken: Collection[str]) -> str:
    """A name for a group that no other one has: the base, with a number where it is taken."""
    name, k = base, 2
    while name in taken:
        name, k = f"{base}-{k}", k + 1
    return name
