"""A self-contained HTML page of a symmetry graph: the network's tensors with their axes colored by group."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from tu_symmetry.files import write_text
from tu_symmetry.symmetry.groups import PermutationGroup, ScaleGroup
from tu_symmetry.symmetry.report import member_text, shape_text, summary

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph

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
}
"""

_PINNED = "#b9b9b9"
_PLAIN = "#ffffff"


def to_html(graph: SymmetryGraph, path: str | os.PathLike[str] | None = None) -> str:
    """Draw the network's tensors in order, each axis a bar colored by the group that moves it, and list all groups.

    A bar is as long as the logarithm of its axis; an axis that several groups share (fused projections, concatenated
    features) is divided among them. Gray is pinned, white moves with no group. Hovering names the group or the reason.

    Args:
        graph: the symmetry graph.
        path: where to write the page too (whole or not at all), or None.

    Returns:
        The page, which needs no network.
    """
    title = f"Symmetries of {escape(graph.architecture or 'a network')}"
    colors = _colors(graph)
    facts = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in summary(graph))
    page = "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>',
            f"<h1>{title}</h1>",
            f"<table>{facts}</table>",
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


def _colors(graph: SymmetryGraph) -> dict[str, str]:
    """Hues by the golden angle, so that neighbors differ; a nested group is a shade of its parent."""
    colors, hues, shades = {}, dict[str, float](), defaultdict[str, int](int)
    for group in graph.permutations:
        if group.parent is None:
            hues[group.name] = len(hues) * 137.508 % 360
            light = 62
        else:
            hues[group.name] = hues[group.parent]
            shades[group.parent] += 1
            light = 62 + (18 if shades[group.parent] % 2 else -18)
        colors[group.name] = f"hsl({hues[group.name]:.0f} 65% {light}%)"
    return colors


def _tensors(graph: SymmetryGraph, colors: dict[str, str]) -> str:
    owners: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(dict)
    for group in graph.permutations:
        for member in group.members:
            spots = owners[member.parameter, member.axis].setdefault(group.name, [])
            spots += member.index.flatten().tolist()
    reasons = {(p.parameter, p.axis): p.reason for p in graph.pinned}
    factors: dict[str, list[ScaleGroup]] = defaultdict(list)
    for scale in (*graph.scales, *graph.normalizations):
        for parameter in dict.fromkeys(m.parameter for m in scale.members):
            factors[parameter].append(scale)
    rows = []
    for name, shape in graph.shapes.items():
        bars, x = [], 0.0
        for axis, size in enumerate(shape):
            width = 14 + 12 * math.log2(max(size, 1))
            bars += _axis(x, width, size, axis, owners.get((name, axis), {}), reasons.get((name, axis)), colors)
            x += width + 8
        drawing = f'<svg width="{max(x, 1):.0f}" height="18" role="img">{"".join(bars)}</svg>'
        kind = '<span class="badge">buffer</span>' if name in graph.buffers else ""
        badges = "".join(
            f'<span class="badge" title="{escape(", ".join(g.name for g in found), quote=True)}">{label}</span>'
            for label, kinds in (("scale", graph.scales), ("normalization", graph.normalizations))
            if (found := [g for g in factors[name] if any(g is k for k in kinds)])
        )
        shown = " = ".join(graph.aliases.get(name, (name,)))
        sizes = "×".join(map(str, shape)) or "scalar"
        rows.append(
            f'<tr><td class="name">{escape(shown)}</td><td class="number">{sizes}</td><td>{drawing}</td>'
            f"<td>{kind}{badges}</td></tr>"
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
    """The bar of one axis, in runs of positions with the same innermost group."""
    rest = reason if reason is not None else "moves with no permutation group"
    owner: list[str | None] = [None] * size
    for name, spots in owners.items():  # parents come before the groups nested in them
        for spot in spots:
            owner[spot] = name
    runs = [(name, len(list(same))) for name, same in groupby(owner)]
    if len(runs) > 64:  # interleaved: shares instead of places
        runs = list(Counter(owner).items())
    bars, start = [], 0
    for holder, count in runs:
        fill = (_PLAIN if reason is None else _PINNED) if holder is None else colors[holder]
        text = f"axis {axis}, size {size}: {rest if holder is None else holder}"
        if len(runs) > 1:
            text += f" ({count} positions)"
        bars.append(
            f'<rect x="{x + width * start / size:.1f}" y="2" width="{width * count / size:.1f}" height="14" '
            f'fill="{fill}"><title>{escape(text)}</title></rect>'
        )
        start += count
    return bars


def _tables(graph: SymmetryGraph, colors: dict[str, str]) -> list[str]:
    parts = []
    for title, groups in (
        ("Permutation groups", graph.permutations),
        ("Scale groups", graph.scales),
        ("Normalization groups", graph.normalizations),
    ):
        if not groups:
            continue
        rows = []
        for group in groups:
            members = ", ".join(dict.fromkeys(member_text(m) for m in group.members))
            swatch, row, note = "", "<tr>", ""
            if isinstance(group, PermutationGroup):
                swatch = f'<span class="swatch" style="background: {colors[group.name]}"></span>'
                row = '<tr class="nested">' if group.parent else "<tr>"
                note = f"10^{group.log10_order:.1f}"
            else:
                note = "exact" if group.exact else "up to eps"
            rows.append(
                f'{row}<td class="name">{swatch}{escape(group.name)}</td><td class="number">{shape_text(group)}</td>'
                f'<td class="number">{note}</td><td class="members">{escape(members)}</td></tr>'
            )
        last = "orderings" if groups is graph.permutations else "holds"
        parts.append(
            f"<h2>{title}</h2><table><tr><th>group</th><th>size</th><th>{last}</th><th>members</th></tr>"
            f"{''.join(rows)}</table>"
        )
    return parts
