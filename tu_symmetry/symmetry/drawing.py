"""A symmetry graph as a picture: layers in rows, groups in lanes beside them, and a self-contained HTML page of it.

A group is a line down a lane, with a branch to each of the layers whose tensors it moves. Lanes are shared by groups
that do not meet, as tracks of a railway station, so that a deep network stays narrow.
"""

from __future__ import annotations

import os
from collections import defaultdict
from html import escape
from typing import Literal, NamedTuple

from tu_symmetry.files import write_text
from tu_symmetry.symmetry.groups import NormalizationGroup, PermutationGroup, ScaleGroup
from tu_symmetry.symmetry.report import TITLES, member_texts, shape_text, summary
from tu_symmetry.symmetry.symmetries import Symmetries

Kind = Literal["permutation", "nested", "scale", "normalization"]
NAME, NEXT = 13.0, 6.0  # heights of a branch with a name at the right, and of another one


class Branch(NamedTuple):
    """Where a group touches a layer: the layer's row, whether it moves what it makes and what it reads, the height."""

    layer: int
    makes: bool
    reads: bool
    y: float


class Lane(NamedTuple):
    """One group: its size as text (``12·64`` for 12 blocks of 64), its hue in degrees, its column from the left."""

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
    touched = [(group, where) for group in graph.groups() if (where := _touched(group, number))]
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
    hues: dict[str, float] = {}  # by the golden angle, so that neighbors differ
    for group in graph.groups():
        if group.name not in hues:
            parent = getattr(group, "parent", None)
            hues[group.name] = hues[parent] if parent in hues else len(hues) * 137.508 % 360
    ends: list[int] = []
    lanes = []
    for k, (group, where) in enumerate(touched):
        column = next((c for c, end in enumerate(ends) if end < min(where)), len(ends))
        ends[column : column + 1] = [max(where)]
        branches = []
        for row in sorted(where):
            lower = (layers[row].height - filled[row] - 4.0) / 2  # in the middle of a box
            branches.append(Branch(row, *where[row], layers[row].top + heights[k, row] + lower))
        lanes.append(Lane(group.name, _kind(group), shape_text(group), hues[group.name], column, tuple(branches)))
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


# -- the page ----------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
td.name, td.members { font-family: ui-monospace, monospace; font-size: 12px; overflow-wrap: anywhere; }
td.number { text-align: right; white-space: nowrap; }
tr.nested td.name { padding-left: 2rem; }
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

_LEGEND = (
    "A box is a layer, a line is a group. A dot: the group moves what the layer makes. A ring: it moves what the layer "
    "reads. Solid lines are permutations, thin ones permutations within blocks, dashed ones positive scales, dotted "
    "ones normalizations. Hover for names."
)


def to_html(graph: Symmetries, path: str | os.PathLike[str] | None = None) -> str:
    """The network with its groups as a page that needs no network: a drawing, its tensors, and all groups.

    Args:
        graph: the symmetry graph.
        path: where to write the page too (whole or not at all), or None.
    """
    of = escape(graph.architecture or "a network")
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Symmetries of {of}</title>'
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Symmetries of {of}</h1>",
        _table([f"<th>{escape(k)}</th><td>{escape(v)}</td>" for k, v in summary(graph)]),
        f"<h2>Network</h2><p>{_LEGEND}</p>",
        _network(graph),
        "<h2>Tensors</h2>",
        _tensors(graph),
    ]
    for kind, title in TITLES.items():
        rows = []
        for group in getattr(graph, kind):
            note = f"10^{group.log10_order:.1f}" if kind == "permutations" else "exact" if group.exact else "up to eps"
            rows.append(_row(group.name, shape_text(group), note, ", ".join(member_texts(group))))
        if rows:
            last = "orderings" if kind == "permutations" else "holds"
            heads = f"<th>group</th><th>size</th><th>{last}</th><th>members</th>"
            parts.append(f"<h2>{title}</h2>{_table([heads, *rows])}")
    page = "\n".join([*parts, "</body></html>", ""])
    if path is not None:
        write_text(path, page)
    return page


def _table(rows: list[str]) -> str:
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _row(*cells: str) -> str:
    kinds = ("name", *["number"] * (len(cells) - 2), "members")
    return "".join(f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))


def _tensors(graph: Symmetries) -> str:
    """What moves each axis of each tensor, or why nothing does, and what multiplies it."""
    told: dict[str, list[str]] = defaultdict(list)
    for pin in graph.pinned:
        told[pin.parameter].append(f"axis {pin.axis}, size {pin.size}: {pin.reason}")
    for group in graph.permutations:
        for member in group.members:
            told[member.parameter].append(f"axis {member.axis}: {group.name}")
    for scale in (*graph.scales, *graph.normalizations):
        for factor in scale.members:
            told[factor.parameter].append(f"{_kind(scale)} {scale.name}")
    rows = ["<th>tensor</th><th>shape</th><th>what moves its axes</th>"]
    for name, shape in graph.shapes.items():
        shown = " = ".join(graph.aliases.get(name, (name,))) + (" (buffer)" if name in graph.buffers else "")
        texts = "; ".join(sorted(dict.fromkeys(told[name]), key=lambda text: not text.startswith("axis")))
        rows.append(_row(shown, "×".join(map(str, shape)) or "scalar", texts))
    return _table(rows)


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
