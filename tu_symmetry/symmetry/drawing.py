"""A symmetry graph as a picture: layers in rows, groups in lanes beside them, and a self-contained HTML page of it.

A group is an edge between all the layers whose tensors it moves. It is drawn as a line down a lane, with a branch to
each of its layers::

    conv1   ----o          the group begins here: its name stands at the right
    bn1     ----o
    conv2   ----o---o      conv2 reads the first group's units and makes those of the second
    fc      --------o

Lanes are shared by groups that do not meet, as tracks of a railway station, so that a deep network stays narrow.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from html import escape
from typing import Literal, NamedTuple

from tu_symmetry.files import write_text
from tu_symmetry.symmetry.groups import NormalizationGroup, PermutationGroup, ScaleGroup
from tu_symmetry.symmetry.report import member_text, shape_text, summary
from tu_symmetry.symmetry.symmetries import Symmetries

Kind = Literal["permutation", "nested", "scale", "normalization"]
NAME, NEXT = 13.0, 6.0  # heights of a branch with a name at the right, and of another one


class Branch(NamedTuple):
    """Where a group touches a layer, by the layer's row and the height in the drawing.

    It moves what the layer makes (axis 0; a factor with a positive exponent), what the layer reads, or both.
    """

    layer: int
    makes: bool
    reads: bool
    y: float


class Lane(NamedTuple):
    """One group: its size as text (``12·64`` for 12 blocks of 64), its hue in degrees, its column from the left.

    Nested groups, and the factors of the same units, have their parent's hue. Branches are listed from above.
    """

    name: str
    kind: Kind
    size: str
    hue: float
    column: int
    branches: tuple[Branch, ...]


class Layer(NamedTuple):
    """One module that holds tensors: its path, the shape of its largest tensor, and where its box stands."""

    name: str
    shape: tuple[int, ...]
    top: float
    height: float


class Layout(NamedTuple):
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
        lower = {row: (layers[row].height - filled[row] - 4.0) / 2 for row in where}  # in the middle of a box
        branches = tuple(
            Branch(row, *where[row], layers[row].top + heights[k, row] + lower[row]) for row in sorted(where)
        )
        lanes.append(Lane(group.name, _kind(group), shape_text(group), hues[group.name], column, branches))
    return Layout(tuple(layers), tuple(lanes), len(ends), top)


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


# -- the page ----------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
td.name, td.members { font-family: ui-monospace, monospace; font-size: 12px; overflow-wrap: anywhere; }
td.number { text-align: right; white-space: nowrap; }
tr.nested td.name { padding-left: 2rem; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border: 1px solid #666; }
.badge { font-size: 11px; border: 1px solid #999; border-radius: .6em; padding: 0 .5em; margin-right: .3em; }
rect { stroke: #555; stroke-width: .5; }
rect:hover { stroke: #000; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  body { background: #17181a; color: #ddd; } th, td { border-color: #333; } text { fill: #ddd; }
  .layer { fill: #26282b; } .made { stroke: #17181a; } .read { fill: #17181a; }
}
.network { overflow-x: auto; }
.network text { font: 11px ui-monospace, monospace; }
.network text.size { font-size: 10px; opacity: .65; }
.layer { fill: #f4f4f2; stroke: #8a8a86; stroke-width: 1; }
.lane path { fill: none; stroke-width: 2; }
.lane.nested path { stroke-width: 1; }
.lane.scale path { stroke-width: 1.2; stroke-dasharray: 4 3; }
.lane.normalization path { stroke-width: 1.2; stroke-dasharray: 1 3; }
.lane:hover path { stroke-width: 4; }
.made { stroke: #fff; stroke-width: 1; }
.read { fill: #fff; stroke-width: 1.5; }
"""

_HEAD = "<!DOCTYPE html>"
_TITLE = "<title>Symmetries of "
_PINNED = "#b9b9b9"
_PLAIN = "#ffffff"


def is_drawing(content: bytes) -> bool:
    """Whether a file is a page that :func:`to_html` has made."""
    return content.startswith(_HEAD.encode()) and _TITLE.encode() in content[:200]


def to_html(graph: Symmetries, path: str | os.PathLike[str] | None = None) -> str:
    """Draw the network with its groups, then its tensors, and list all groups.

    How to read the drawings is said on the page. Hovering names the group or the reason.

    Args:
        graph: the symmetry graph.
        path: where to write the page too (whole or not at all), or None.

    Returns:
        The page, which needs no network.
    """
    of = escape(graph.architecture or "a network")
    colors = _colors(graph)
    facts = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in summary(graph))
    page = "\n".join(
        [
            _HEAD,
            f'<html lang="en"><head><meta charset="utf-8">{_TITLE}{of}</title><style>{_STYLE}</style></head><body>',
            f"<h1>Symmetries of {of}</h1>",
            f"<table>{facts}</table>",
            "<h2>Network</h2>",
            "<p>A box is a layer, a line is a group. A dot: the group moves what the layer makes. A ring: it moves "
            "what the layer reads. Solid lines are permutations, thin ones permutations within blocks, dashed ones "
            "positive scales, dotted ones normalizations.</p>",
            _network(graph),
            "<h2>Tensors</h2>",
            "<p>In the order of the state dict. Each bar is an axis, colored by the permutation group that moves it; "
            "gray is pinned. Hover for names.</p>",
            _tensors(graph, colors),
            *_tables(graph, colors),
            "</body></html>",
            "",
        ]
    )
    if path is not None:
        write_text(path, page)
    return page


_BOX, _SPACING = 330, 11  # width of a layer's box, and between lanes
_SHOWN = 34  # characters of a layer's name


def _network(graph: Symmetries) -> str:
    """Layers as boxes in rows, groups as lines in lanes beside them, their names at the right where they begin."""
    layout = lay_out(graph)
    labels = _BOX + 24 + _SPACING * layout.columns
    longest = max((len(f"{lane.name} {_size(lane)}") for lane in layout.lanes), default=0)
    parts = []
    for layer in layout.layers:
        name = layer.name if len(layer.name) <= _SHOWN else f"…{layer.name[1 - _SHOWN :]}"
        middle = layer.top + layer.height / 2 + 4
        sizes = "×".join(map(str, layer.shape)) or "scalar"
        parts.append(
            f'<g><title>{escape(layer.name)}</title><rect class="layer" x="1" y="{layer.top:.1f}" width="{_BOX}" '
            f'height="{layer.height:.1f}" rx="4"/><text x="8" y="{middle:.1f}">{escape(name)}</text>'
            f'<text class="size" x="{_BOX - 6}" y="{middle:.1f}" text-anchor="end">{sizes}</text></g>'
        )
    for lane in layout.lanes:
        parts.append(_lane(lane, _BOX + 16 + _SPACING * lane.column, labels))
    width, height = labels + 7 * longest + 16, max(layout.height, 20)
    return (
        f'<div class="network"><svg id="network" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">{"".join(parts)}</svg></div>'
    )


def _lane(lane: Lane, x: float, labels: float) -> str:
    """One group: its line, the branches to its layers, and its name."""
    color = f"hsl({lane.hue:.0f} 65% {56 if lane.kind == 'nested' else 45}%)"
    first, last = lane.branches[0], lane.branches[-1]
    path = f"M{x:.1f} {first.y:.1f}V{last.y:.1f}" + "".join(f"M{_BOX + 1} {b.y:.1f}H{x:.1f}" for b in lane.branches)
    marks = []
    for branch in lane.branches:
        if branch.makes:
            marks.append(f'<circle class="made" cx="{x:.1f}" cy="{branch.y:.1f}" r="3.2" fill="{color}"/>')
        if branch.reads:
            left = _BOX + 1 if branch.makes else x
            marks.append(f'<circle class="read" cx="{left:.1f}" cy="{branch.y:.1f}" r="2.8" stroke="{color}"/>')
    return (
        f'<g class="lane {lane.kind}"><title>{escape(f"{lane.name}, {_size(lane)}")}</title>'
        f'<path d="{path}" stroke="{color}"/>{"".join(marks)}'
        f'<path d="M{x:.1f} {first.y:.1f}H{labels - 4:.1f}" stroke="{color}" style="stroke-width:.5;opacity:.4"/>'
        f'<text class="group" x="{labels:.1f}" y="{first.y + 4:.1f}" style="fill:{color}">{escape(lane.name)} '
        f'<tspan class="size">{escape(_size(lane))}</tspan></text></g>'
    )


def _size(lane: Lane) -> str:
    return lane.size + {"permutation": "", "nested": " in each block"}.get(lane.kind, f" {lane.kind}")


def _colors(graph: Symmetries) -> dict[str, str]:
    """The hues of the drawing of the network; groups nested in one parent are lighter and darker by turns."""
    colors, shades = {}, defaultdict[str, int](int)
    hues = hues_of(graph)
    for group in graph.permutations:
        light = 62
        if group.parent is not None:
            shades[group.parent] += 1
            light = 62 + (18 if shades[group.parent] % 2 else -18)
        colors[group.name] = f"hsl({hues[group.name]:.0f} 65% {light}%)"
    return colors


def _tensors(graph: Symmetries, colors: dict[str, str]) -> str:
    owners: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(dict)
    for group in graph.permutations:
        for member in group.members:
            spots = owners[member.parameter, member.axis].setdefault(group.name, [])
            spots += member.index.flatten().tolist()
    reasons = {(p.parameter, p.axis): p.reason for p in graph.pinned}
    factors: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for kind, groups in (("scale", graph.scales), ("normalization", graph.normalizations)):
        for scale in groups:
            for factor in scale.members:
                factors[factor.parameter, kind][scale.name] = None
    rows = []
    for name, shape in graph.shapes.items():
        bars, x = [], 0.0
        for axis, size in enumerate(shape):
            width = 14 + 12 * math.log2(max(size, 1))
            bars += _axis(x, width, size, axis, owners.get((name, axis), {}), reasons.get((name, axis)), colors)
            x += width + 8
        drawing = f'<svg width="{max(x, 1):.0f}" height="18" role="img">{"".join(bars)}</svg>'
        badges = '<span class="badge">buffer</span>' if name in graph.buffers else ""
        for kind in ("scale", "normalization"):
            if held := factors.get((name, kind)):
                badges += f'<span class="badge" title="{escape(", ".join(held), quote=True)}">{kind}</span>'
        shown = " = ".join(graph.aliases.get(name, (name,)))
        sizes = "×".join(map(str, shape)) or "scalar"
        rows.append(
            f'<tr><td class="name">{escape(shown)}</td><td class="number">{sizes}</td><td>{drawing}</td>'
            f"<td>{badges}</td></tr>"
        )
    return f"<table><tr><th>tensor</th><th>shape</th><th>axes</th><th></th></tr>{''.join(rows)}</table>"


def _axis(
    x: float,
    width: float,
    size: int,
    axis: int,
    owners: dict[str, list[int]],
    reason: str | None,
    colors: dict[str, str],
) -> list[str]:
    """The bar of one axis, divided among the innermost groups of its positions."""
    owner: list[str | None] = [None] * size
    for name, spots in owners.items():  # parents come before the groups nested in them
        for spot in spots:
            owner[spot] = name
    shares, bars, start = Counter(owner), [], 0
    rest = reason if reason is not None else "moves with no permutation group"
    for holder, count in shares.items():
        fill = (_PLAIN if reason is None else _PINNED) if holder is None else colors[holder]
        text = f"axis {axis}, size {size}: {rest if holder is None else holder}"
        text += f" ({count} positions)" if len(shares) > 1 else ""
        bars.append(
            f'<rect x="{x + width * start / size:.1f}" y="2" width="{width * count / size:.1f}" height="14" '
            f'fill="{fill}"><title>{escape(text)}</title></rect>'
        )
        start += count
    return bars


def _tables(graph: Symmetries, colors: dict[str, str]) -> list[str]:
    parts = []
    for title, groups in (
        ("Permutation groups", graph.permutations),
        ("Scale groups", graph.scales),
        ("Normalization groups", graph.normalizations),
    ):
        rows = []
        for group in groups:
            swatch, row = "", "<tr>"
            if isinstance(group, PermutationGroup):
                swatch = f'<span class="swatch" style="background: {colors[group.name]}"></span>'
                row = '<tr class="nested">' if group.parent else "<tr>"
                note = f"10^{group.log10_order:.1f}"
            else:
                note = "exact" if group.exact else "up to eps"
            members = ", ".join(dict.fromkeys(member_text(m) for m in group.members))
            rows.append(
                f'{row}<td class="name">{swatch}{escape(group.name)}</td><td class="number">{shape_text(group)}</td>'
                f'<td class="number">{note}</td><td class="members">{escape(members)}</td></tr>'
            )
        last = "orderings" if title.startswith("Permutation") else "holds"
        heads = f"<tr><th>group</th><th>size</th><th>{last}</th><th>members</th></tr>"
        parts += [f"<h2>{title}</h2><table>{heads}{''.join(rows)}</table>"] if rows else []
    return parts
