"""A readable account of a symmetry graph: a summary, then its groups, with equal groups of repeated layers folded."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tu_symmetry.symmetry.groups import Group, LinearGroup, PermutationGroup, ScaleGroup

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph

WIDTH = 120
TITLES = {
    "permutations": "Permutation groups",
    "scales": "Scale groups",
    "normalizations": "Normalization groups",
    "signs": "Sign groups",
    "linears": "Linear groups",
}
_LEGEND = (
    "Below, weight[0] is axis 0 of a weight, ^-1 the exponent of a factor (1 if none stands), {0-2} the equal "
    "groups of repeated layers, and a leading dot the path of such a layer."
)


def describe(graph: SymmetryGraph) -> str:
    """The graph as text of at most 120 columns: :func:`summary`, then a table for each kind of group."""
    lines = [f"Symmetries of {graph.architecture or 'a network'}"]
    facts = summary(graph)
    label = max(len(name) for name, _ in facts)
    for name, text in facts:
        lines += _wrap(f"  {name:<{label}}  ", text)
    lines += _wrap("  ", _LEGEND)
    for kind, title in TITLES.items():
        groups = [g for g in getattr(graph, kind) if getattr(g, "parent", None) is None]
        if groups:
            inexact = not any(getattr(g, "exact", True) for g in groups)
            rows = list(_rows(graph, _fold(groups), note=not inexact))
            width = min(max(len(name) for name, _, _ in rows), 62)
            sizes = max(len(size) for _, size, _ in rows)
            lines += ["", title + (" (up to the epsilon of a normalization)" if inexact else "")]
            for name, size, members in rows:
                head = f"{_cut(name, width):<{width}}  {size:>{sizes}}  "
                cut = ", ".join(_cut(member, WIDTH - len(head) - 1) for member in members)
                lines += _wrap(head, cut, WIDTH, max_lines=2, placeholder=f" … {len(members)} in all")
    return "\n".join(lines)


def summary(graph: SymmetryGraph) -> list[tuple[str, str]]:
    """What the graph holds, as (label, sentence) pairs."""
    units = sum(math.prod(g.shape) for g in graph.permutations)
    nested = sum(g.parent is not None for g in graph.permutations)
    reasons = Counter(p.reason for p in graph.pinned)
    examples = {p.reason: f"{p.parameter}[{p.axis}]" for p in reversed(graph.pinned)}
    pinned = "; ".join(
        f"{n} {'axis' if n == 1 else 'axes'}: {reason} ({'' if n == 1 else 'as '}{examples[reason]})"
        for reason, n in reasons.most_common()
    )
    facts = {
        "state": "verified" if graph.verified else "not yet verified (happens before weights are first transformed)",
        "permutations": f"{_count(len(graph.permutations), 'group')}{f' ({nested} nested)' if nested else ''} of "
        f"{units} units: 10^{graph.log10_permutations:.1f} equivalent weight vectors",
        "scales": f"{_count(len(graph.scales), 'group')}, {_dimensions(graph.scales)}",
        "normalizations": f"{_count(len(graph.normalizations), 'group')}, {_dimensions(graph.normalizations)}",
        "signs": f"{_count(len(graph.signs), 'group')}, {_count(sum(g.size for g in graph.signs), 'sign')}",
        "linears": f"{_count(len(graph.linears), 'group')}, {_count(sum(map(_freedom, graph.linears)), 'dimension')}",
        "pinned": pinned or "nothing",
        "failed": "; ".join(f"{name}: {reason}" for name, reason in graph.failed.items()),
        "no rule for": ", ".join(graph.unknown_operators) or "none: every operator that was met has one",
        "branch": f"recorded for inputs that go the example's way at {graph.branch}" if graph.branch else "",
        "not reached": _with(graph.unreached, "pass a list of example inputs that reach them"),
        "left out": _with(graph.left_out, "not seen in use; give them in a list of examples"),
        "training mode": graph.training if graph.training.startswith("not") else "",
        "tied": "; ".join(" = ".join(names) for names in graph.aliases.values() if len(names) > 1),
    }
    return [(name, text) for name, text in facts.items() if text]


def _freedom(group: LinearGroup) -> int:
    """Dimensions of a linear group."""
    n = group.size
    own = {"general": n * n, "orthogonal": n * (n - 1) // 2, "centered": (n - 1) * (n - 2) // 2, "complex": 2}
    return math.prod(group.blocks) * own[group.subgroup]


def _with(names: Sequence[str], advice: str) -> str:
    return f"{', '.join(names)}: {advice}" if names else ""


class _Family(NamedTuple):
    """Groups that are equal but for one number in their paths, which follows the ``stem`` (None for a single group)."""

    groups: tuple[Group, ...]
    stem: str | None = None
    numbers: tuple[int, ...] = ()


def _fold(groups: Sequence[Group]) -> list[_Family]:
    """Collect groups whose shapes and members agree up to one number of the path; the largest families win."""
    candidates: dict[tuple[object, ...], dict[int, Group]] = defaultdict(dict)
    keys: dict[str, list[tuple[object, ...]]] = {}
    for group in groups:
        keys[group.name] = []
        path = group.name.split("/")[0]
        for match in re.finditer(r"\d+(?=\.|$|/|-)", path):
            stem, number = path[: match.start()], int(match.group())
            key: tuple[object, ...] = (stem, _pattern(group, stem, number))
            while number in candidates[key]:  # twice in one layer: two families
                key = (*key, "again")
            candidates[key][number] = group
            keys[group.name].append(key)
    families = []
    taken: set[str] = set()
    for group in groups:
        if group.name in taken:
            continue
        best = _Family((group,))
        for key in keys[group.name]:
            free = {n: g for n, g in candidates[key].items() if g.name not in taken}
            if len(free) > len(best.groups):
                best = _Family(tuple(free.values()), str(key[0]), tuple(free))
        families.append(best)
        taken.update(g.name for g in best.groups)
    return families


def shape_text(group: Group) -> str:
    """``64``, or ``12·64`` for 12 blocks of 64 units."""
    return "·".join(map(str, (*getattr(group, "blocks", ()), group.size)))


def member_texts(group: Group) -> list[str]:
    """``conv1.weight[0]`` for each member, with the exponent of a factor unless it is one."""
    texts = []
    for member in group.members:
        exponent = getattr(member, "exponent", 1)
        place = "" if member.axis is None else f"[{member.axis}]"
        texts.append(f"{member.parameter}{place}" + ("" if exponent == 1 else f"^{exponent:g}"))
    return list(dict.fromkeys(texts))


def _pattern(group: Group, stem: str, number: int) -> tuple[object, ...]:
    """Everything that is shown of a group, with the number left out."""
    own = re.sub(r"-\d+$", "", group.name) if "/" in group.name else group.name
    texts = tuple(_replace(t, stem, number, "*") for t in (own, *member_texts(group)))
    return texts, shape_text(group), getattr(group, "exact", True)


def _replace(text: str, stem: str, number: int, by: str) -> str:
    return re.sub(rf"^{re.escape(stem)}{number}(?!\d)", lambda _: stem + by, text)


def _rows(
    graph: SymmetryGraph, families: Sequence[_Family], *, note: bool, depth: int = 1
) -> Iterator[tuple[str, str, list[str]]]:
    """The name, size and members of each line; nested groups are indented under the group that moves their blocks."""
    for family in families:
        first = family.groups[0]
        path, _, own = first.name.rpartition("/")
        name = f"in each block: {own}" if path else first.name
        if not path and family.stem is not None:
            name = _replace(name, family.stem, family.numbers[0], f"{{{_ranges(family.numbers)}}}")
        kind = getattr(first, "subgroup", "general")
        kind += " once norms are folded" if getattr(first, "constant", ()) else ""
        name = "  " * depth + name + (f" ({kind})" if kind != "general" else "")
        if note and not getattr(first, "exact", True):
            name += " (up to eps)"
        size = (f"{len(family.groups)} × " if len(family.groups) > 1 else "") + shape_text(first)
        yield name, size, _members(family)
        if isinstance(first, PermutationGroup):
            children = [c for g in family.groups for c in graph.children(g.name)]
            yield from _rows(graph, _fold(children), note=note, depth=depth + 1)


def _members(family: _Family) -> list[str]:
    """The members, tensors of one module together, without the path of the repeated layer."""
    modules: dict[tuple[str, str], list[str]] = {}
    for text in member_texts(family.groups[0]):
        name, place = re.fullmatch(r"([^\[^]*)(.*)", text).groups()  # type: ignore[union-attr]
        module, _, leaf = name.rpartition(".")
        modules.setdefault((module, place), []).append(leaf)
    layer = "" if family.stem is None else f"{family.stem}{family.numbers[0]}"
    result = []
    for (module, place), leaves in modules.items():
        leaf = leaves[0] if len(leaves) == 1 else "{" + ",".join(leaves) + "}"
        text = f"{module}.{leaf}{place}" if module else f"{leaf}{place}"
        result.append(text.removeprefix(layer) if text.startswith(f"{layer}.") else text)
    return result


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _wrap(head: str, text: str, width: int = WIDTH - 1, **options: Any) -> list[str]:
    after = " " * len(head)
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=after, break_on_hyphens=False, **options)


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _dimensions(groups: Sequence[ScaleGroup]) -> str:
    inexact = sum(g.size for g in groups if not g.exact)
    return _count(sum(g.size for g in groups), "dimension") + (f" ({inexact} of them up to eps)" if inexact else "")
