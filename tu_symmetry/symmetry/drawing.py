"""A symmetry graph as a self-contained HTML page: layers in rows, groups in lanes beside them, tensors and groups.

A group is a line down a lane, with a branch to each of the layers whose tensors it moves. Lanes are shared by groups
that do not meet, as tracks of a railway station, so that a deep network stays narrow.
"""

from __future__ import annotations

import os
from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING

from tu_symmetry.files import write_text
from tu_symmetry.symmetry.groups import Group
from tu_symmetry.symmetry.report import TITLES, member_texts, shape_text, summary

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph

_NAME, _NEXT = 13.0, 6.0  # heights of a branch with a name at the right, and of another one
_BOX, _SPACING = 330, 11  # width of a layer's box, and between lanes
_SHOWN = 34  # characters of a layer's name

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
td.name, td.members { font-family: ui-monospace, monospace; font-size: 12px; overflow-wrap: anywhere; }
td.number { text-align: right; white-space: nowrap; }
tr.nested td.name { padding-left: 2rem; }
@media (prefers-color-scheme: dark) {
  body { background: #17181a; color: #ddd; } th, td { border-color: #333; } .network text { fill: #ddd; }
  .network .layer { fill: #26282b; } .network .made { stroke: #17181a; } .network .read { fill: #17181a; }
}
"""
_PICTURE = """
.network { overflow-x: auto; }
.network text { font: 11px ui-monospace, monospace; }
.network text.size { font-size: 10px; opacity: .65; }
.network .layer { fill: #f4f4f2; stroke: #8a8a86; stroke-width: 1; }
.network .lane path { fill: none; stroke-width: 2; }
.network .lane.nested path { stroke-width: 1; }
.network .lane.scale path { stroke-width: 1.2; stroke-dasharray: 4 3; }
.network .lane.normalization path { stroke-width: 1.2; stroke-dasharray: 1 3; }
.network .lane:hover path { stroke-width: 4; }
.network .made { stroke: #fff; stroke-width: 1; }
.network .read { fill: #fff; stroke-width: 1.5; }
"""

_LEGEND = (
    "A box is a layer, a line is a group. A dot: the group moves what the layer makes. A ring: it moves what the layer "
    "reads. Solid lines are permutations, thin ones permutations within blocks, dashed ones positive scales, dotted "
    "ones normalizations. Hover for names."
)


def to_html(graph: SymmetryGraph, path: str | os.PathLike[str] | None = None) -> str:
    """The network with its groups as a page: a drawing, its tensors, and all groups; also written to ``path``."""
    of = escape(graph.architecture or "a network")
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Symmetries of {of}</title>'
        f"<style>{_PICTURE}{_STYLE}</style></head><body>",
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


def to_picture(graph: SymmetryGraph) -> str:
    """The drawing of :func:`to_html` alone, on a white ground, whatever page it stands in."""
    return f"<style>{_PICTURE}.network {{ background: #fff; }}</style>{_network(graph)}"


def _table(rows: list[str]) -> str:
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _row(*cells: str) -> str:
    kinds = ("name", *["number"] * (len(cells) - 2), "members")
    return "".join(f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))


def _tensors(graph: SymmetryGraph) -> str:
    """What moves each axis of each tensor, or why nothing does, and what multiplies it."""
    told: dict[str, list[str]] = defaultdict(list)
    for pin in graph.pinned:
        told[pin.parameter].append(f"axis {pin.axis}, size {pin.size}: {pin.reason}")
    for group in graph.permutations:
        for member in group.members:
            told[member.parameter].append(f"axis {member.axis}: {group.name}")
    for scale in (*graph.scales, *graph.normalizations):
        for factor in scale.members:
            told[factor.parameter].append(f"{scale.kind} {scale.name}")
    rows = ["<th>tensor</th><th>shape</th><th>what moves its axes</th>"]
    for name, shape in graph.shapes.items():
        shown = " = ".join(graph.aliases.get(name, (name,))) + (" (buffer)" if name in graph.buffers else "")
        texts = "; ".join(sorted(dict.fromkeys(told[name]), key=lambda text: not text.startswith("axis")))
        rows.append(_row(shown, "×".join(map(str, shape)) or "scalar", texts))
    return _table(rows)


def _network(graph: SymmetryGraph) -> str:
    """Layers as boxes in rows, groups as lines in lanes beside them, their names at the right where they begin."""
    rows: dict[str, list[str]] = {}
    for name in graph.shapes:
        rows.setdefault(name.rpartition(".")[0] or name, []).append(name)
    number = {parameter: k for k, held in enumerate(rows.values()) for parameter in held}
    touched = [(group, where) for group in graph.groups() if (where := _touched(group, number))]
    touched.sort(key=lambda pair: min(pair[1]))
    heights: dict[tuple[int, int], float] = {}  # of the branch of a group in a row, from the row's upper edge
    filled = [4.0] * len(rows)
    columns: list[int] = []
    ends: list[int] = []  # the last row of each lane
    for k, (_, where) in enumerate(touched):  # first those that begin in a row, whose names need room
        first = min(where)
        for row in where:
            step = _NAME if row == first else _NEXT
            heights[k, row] = filled[row] + step / 2
            filled[row] += step
        columns.append(next((column for column, end in enumerate(ends) if end < first), len(ends)))
        ends[columns[k] : columns[k] + 1] = [max(where)]
    parts, tops, top = [], [], 0.0
    for (name, held), full in zip(rows.items(), filled, strict=True):
        height = max(full + 4.0, 20.0)
        largest = max(held, key=lambda n: (len(graph.shapes[n]), n.endswith("weight")))
        parts.append(_layer(name, graph.shapes[largest], top, height))
        tops.append(top + (height - full - 4.0) / 2)  # in the middle of a box
        top += height + 6.0
    labels = _BOX + 24 + _SPACING * len(ends)
    hues = _hues(graph)
    for k, (group, where) in enumerate(touched):
        branches = [(tops[row] + heights[k, row], *where[row]) for row in sorted(where)]
        parts.append(_lane(group, hues[group.name], _BOX + 16 + _SPACING * columns[k], labels, branches))
    longest = max((len(f"{group.name} {_size(group)}") for group, _ in touched), default=0)
    width, height = labels + 7 * longest + 16, max(top, 20)
    return (
        f'<div class="network"><svg id="network" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">{"".join(parts)}</svg></div>'
    )


def _touched(group: Group, number: dict[str, int]) -> dict[int, tuple[bool, bool]]:
    """For each row that a group touches: whether it moves what the layer makes, and what it reads."""
    found: dict[int, tuple[bool, bool]] = {}
    for member in group.members:
        makes = member.axis == 0 if group.kind == "permutation" else getattr(member, "exponent", 1) > 0
        before = found.get(number[member.parameter], (False, False))
        found[number[member.parameter]] = (before[0] or makes, before[1] or not makes)
    return found


def _hues(graph: SymmetryGraph) -> dict[str, float]:
    """Hues of names in degrees, by the golden angle, so that neighbors differ; nested groups have their parent's."""
    hues: dict[str, float] = {}
    for group in graph.groups():
        if group.name not in hues:
            parent = getattr(group, "parent", None)
            hues[group.name] = hues[parent] if parent in hues else len(hues) * 137.508 % 360
    return hues


def _layer(name: str, shape: tuple[int, ...], top: float, height: float) -> str:
    shown = name if len(name) <= _SHOWN else f"…{name[1 - _SHOWN :]}"
    middle = top + height / 2 + 4
    sizes = "×".join(map(str, shape)) or "scalar"
    return (
        f'<g><title>{escape(name)}</title><rect class="layer" x="1" y="{top:.1f}" width="{_BOX}" '
        f'height="{height:.1f}" rx="4"/><text x="8" y="{middle:.1f}">{escape(shown)}</text>'
        f'<text class="size" x="{_BOX - 6}" y="{middle:.1f}" text-anchor="end">{sizes}</text></g>'
    )


def _lane(group: Group, hue: float, x: float, labels: float, branches: list[tuple[float, bool, bool]]) -> str:
    """One group: its line, the branches to its layers, and its name."""
    nested = getattr(group, "parent", None) is not None
    color = f"hsl({hue:.0f} 65% {56 if nested else 45}%)"
    first, last = branches[0][0], branches[-1][0]
    path = f"M{x:.1f} {first:.1f}V{last:.1f}" + "".join(f"M{_BOX + 1} {y:.1f}H{x:.1f}" for y, _, _ in branches)
    marks = []
    for y, makes, reads in branches:
        if makes:
            marks.append(f'<circle class="made" cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>')
        if reads:
            left = _BOX + 1 if makes else x
            marks.append(f'<circle class="read" cx="{left:.1f}" cy="{y:.1f}" r="2.8" stroke="{color}"/>')
    name, size = escape(group.name), escape(_size(group))
    return (
        f'<g class="lane {"nested" if nested else group.kind}"><title>{name}, {size}</title>'
        f'<path d="{path}" stroke="{color}"/>{"".join(marks)}'
        f'<path d="M{x:.1f} {first:.1f}H{labels - 4:.1f}" stroke="{color}" style="stroke-width:.5;opacity:.4"/>'
        f'<text class="group" x="{labels:.1f}" y="{first + 4:.1f}" style="fill:{color}">{name} '
        f'<tspan class="size">{size}</tspan></text></g>'
    )


def _size(group: Group) -> str:
    nested = getattr(group, "parent", None) is not None
    return shape_text(group) + (" in each block" if nested else {"permutation": ""}.get(group.kind, f" {group.kind}"))
