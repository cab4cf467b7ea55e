"""Where the parts of a drawing of a network stand: layers in rows, the groups that connect them in lanes beside them.

A group is an edge between all the layers whose tensors it moves. It is drawn as a line down a lane, with a branch to
each of its layers::

    conv1   ----o          the group begins here: its name stands at the right
    bn1     ----o
    conv2   ----o---o      conv2 reads the first group's units and makes those of the second
    fc      --------o

Lanes are shared by groups that do not meet, as tracks of a railway station, so that a deep network stays narrow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tu_symmetry.symmetry.groups import NormalizationGroup, PermutationGroup, ScaleGroup
from tu_symmetry.symmetry.symmetries import Symmetries

Kind = Literal["permutation", "nested", "scale", "normalization"]
NAME, NEXT = 13.0, 6.0  # heights of a branch with a name at the right, and of another one


@dataclass(frozen=True)
class Branch:
    """Where a group touches a layer.

    Attributes:
        layer: number of the row.
        makes: whether it moves what the layer makes (axis 0; a factor with a positive exponent), or what it reads.
        reads: the other way; both may hold.
        y: height in the drawing.
    """

    layer: int
    makes: bool
    reads: bool
    y: float


@dataclass(frozen=True)
class Lane:
    """One group.

    Attributes:
        name: of the group.
        kind: of symmetry; ``nested`` for a permutation group within the blocks of another.
        size: number of units or factors, as text (``12·64`` for 12 blocks of 64).
        hue: of its color, in degrees; those of nested groups, and of the factors of the same units, are its parent's.
        column: of its line, from the left.
        branches: where it touches layers, from above.
    """

    name: str
    kind: Kind
    size: str
    hue: float
    column: int
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Layer:
    """One module that holds tensors.

    Attributes:
        name: path of the module.
        shape: sizes of its largest tensor.
        top: height of its upper edge.
        height: of its box.
    """

    name: str
    shape: tuple[int, ...]
    top: float
    height: float


@dataclass(frozen=True)
class Layout:
    """A drawing in numbers: rows, lanes, and the height of it all."""

    layers: tuple[Layer, ...]
    lanes: tuple[Lane, ...]
    columns: int
    height: float


def lay_out(graph: Symmetries) -> Layout:
    """Rows and lanes for a graph; layers in the order of the state dict, lanes in the order in which they begin."""
    rows: dict[str, list[str]] = {}
    for name in graph.shapes:
        rows.setdefault(name.rpartition(".")[0] or name, []).append(name)
    number = {parameter: k for k, held in enumerate(rows.values()) for parameter in held}
    touched = [(group, _touched(group, number)) for group in graph.groups()]
    touched = [(group, where) for group, where in touched if where]
    touched.sort(key=lambda pair: min(pair[1]))
    heights: dict[tuple[int, int], float] = {}  # of the branch of a group in a row, from the row's upper edge
    filled = [4.0] * len(rows)
    for k, (_, where) in enumerate(touched):  # first those that begin in a row, whose names need room
        for row in where:
            step = NAME if row == min(where) else NEXT
            heights[k, row] = filled[row] + step / 2
            filled[row] += step
    layers, top = [], 0.0
    for k, (name, held) in enumerate(rows.items()):
        height = max(filled[k] + 4.0, 20.0)
        largest = max(held, key=lambda n: (len(graph.shapes[n]), n.endswith("weight")))
        layers.append(Layer(name, tuple(graph.shapes[largest]), top, height))
        top += height + 6.0
    hues = hues_of(graph)
    ends: list[int] = []
    lanes = []
    for k, (group, where) in enumerate(touched):
        first, last = min(where), max(where)
        column = next((c for c, end in enumerate(ends) if end < first), len(ends))
        ends[column : column + 1] = [last]
        branches = tuple(
            Branch(row, *where[row], layers[row].top + _centered(heights[k, row], filled[row], layers[row].height))
            for row in sorted(where)
        )
        size = "·".join(map(str, (*getattr(group, "blocks", ()), group.size)))
        lanes.append(Lane(group.name, _kind(group), size, hues[group.name], column, branches))
    return Layout(tuple(layers), tuple(lanes), len(ends), top)


def _centered(y: float, filled: float, height: float) -> float:
    return y + (height - filled - 4.0) / 2


def _touched(group: PermutationGroup | ScaleGroup, number: dict[str, int]) -> dict[int, tuple[bool, bool]]:
    found: dict[int, tuple[bool, bool]] = {}
    for member in group.members:
        makes = member.axis == 0 if isinstance(group, PermutationGroup) else getattr(member, "exponent", 1) > 0
        before = found.get(number[member.parameter], (False, False))
        found[number[member.parameter]] = (before[0] or makes, before[1] or not makes)
    return found


def _kind(group: PermutationGroup | ScaleGroup) -> Kind:
    if isinstance(group, PermutationGroup):
        return "permutation" if group.parent is None else "nested"
    return "normalization" if isinstance(group, NormalizationGroup) else "scale"


def hues_of(graph: Symmetries) -> dict[str, float]:
    """Hues by the golden angle, so that neighbors differ; what belongs together has one."""
    hues: dict[str, float] = {}
    for group in graph.groups():
        if group.name not in hues:
            parent = getattr(group, "parent", None)
            hues[group.name] = hues[parent] if parent in hues else len(hues) * 137.508 % 360
    return hues
