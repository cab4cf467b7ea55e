"""A readable account of a symmetry graph."""

from __future__ import annotations

from collections import Counter

from tu_symmetry.symmetry.graph import SymmetryGraph


def describe(graph: SymmetryGraph) -> str:
    """Summary first (groups, sizes, equivalent weight vectors, what is pinned and why), then one line a group."""
    lines = [f"symmetries of {graph.architecture} ({'verified' if graph.verified else 'not yet verified'})"]
    units = sum(g.size * max(1, _product(g.blocks)) for g in graph.permutations)
    lines.append(
        f"  permutations    {len(graph.permutations)} groups, {units} units, "
        f"10^{graph.log10_permutations:.0f} equivalent weight vectors"
    )
    lines.append(f"  scales          {len(graph.scales)} groups, {sum(g.size for g in graph.scales)} positive factors")
    lines.append(
        f"  normalizations  {len(graph.normalizations)} groups, "
        f"{sum(g.size for g in graph.normalizations)} positive factors"
    )
    reasons = Counter(p.reason for p in graph.pinned)
    if reasons:
        lines.append("  pinned          " + "; ".join(f"{n} axes: {r}" for r, n in reasons.most_common()))
    if graph.unknown_operators:
        lines.append("  no rule for     " + ", ".join(graph.unknown_operators))
    for title, groups in (
        ("permutation", graph.permutations),
        ("scale", graph.scales),
        ("normalization", graph.normalizations),
    ):
        if not groups:
            continue
        width = max(len(g.name) for g in groups)
        lines.append(f"{title} groups")
        for g in groups:
            shape = "x".join(map(str, (*getattr(g, "blocks", ()), g.size)))
            members = []
            for m in g.members:
                exponent = getattr(m, "exponent", None)
                power = "" if exponent is None else f"^{exponent:+g}"
                place = "" if m.axis is None else f"[{m.axis}]"
                members.append(f"{m.parameter}{place}{power}")
            shown = ", ".join(members[:4]) + (f", ... ({len(members)} in all)" if len(members) > 4 else "")
            note = "" if getattr(g, "exact", True) else "  (up to eps)"
            lines.append(f"  {g.name:<{width}}  {shape:>9}  {shown}{note}")
    return "\n".join(lines)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
