"""A readable account of a symmetry graph: a summary, then its groups, with equal groups of repeated layers folded."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember, ScaleGroup, ScaleMember
from tu_symmetry.symmetry.symmetries import Symmetries

WIDTH = 120

Group = PermutationGroup | ScaleGroup
Member = PermutationMember | ScaleMember


def describe(graph: Symmetries) -> str:
    """The graph as text of at most 120 columns: :func:`summary`, then the tables of the three kinds of group.

    Groups that differ only in one number of their path (the layers of a stage, the blocks of an encoder) share a
    line, ``layer1.{0-2}.conv1``; nested groups are indented under the group that moves their blocks.
    """
    lines = [f"Symmetries of {graph.architecture or 'a network'}"]
    facts = summary(graph)
    label = max(len(name) for name, _ in facts)
    for name, text in facts:
        lines += _wrap(f"  {name:<{label}}  ", text)
    lines += _wrap(
        "  ",
        "Below, weight[0] is axis 0 of a weight, ^-1 the exponent of a factor (1 if none stands), {0-2} the equal "
        "groups of repeated layers, and a leading dot the path of such a layer.",
    )
    roots = [g for g in graph.permutations if g.parent is None]
    for title, groups in (
        ("Permutation groups", roots),
        ("Scale groups", graph.scales),
        ("Normalization groups", graph.normalizations),
    ):
        if groups:
            inexact = not any(getattr(g, "exact", True) for g in groups)
            rows = list(_rows(graph, fold(groups), note=not inexact))
            width = min(max(len(name) for name, _, _ in rows), 62)
            sizes = max(len(size) for _, size, _ in rows)
            lines += ["", title + (" (up to the epsilon of a normalization)" if inexact else "")]
            for name, size, members in rows:
                lines += _row(name, size, members, width, sizes)
    return "\n".join(lines)


def summary(graph: Symmetries) -> list[tuple[str, str]]:
    """What the graph holds, as (label, sentence) pairs."""
    units = sum(g.size * math.prod(g.blocks) for g in graph.permutations)
    nested = sum(g.parent is not None for g in graph.permutations)
    facts = [
        ("state", "verified" if graph.verified else "not yet verified (happens before weights are first transformed)"),
        (
            "permutations",
            f"{_count(len(graph.permutations), 'group')}{f' ({nested} nested)' if nested else ''} of {units} units: "
            f"10^{graph.log10_permutations:.1f} equivalent weight vectors",
        ),
        ("scales", f"{_count(len(graph.scales), 'group')}, {_dimensions(graph.scales)}"),
        ("normalizations", f"{_count(len(graph.normalizations), 'group')}, {_dimensions(graph.normalizations)}"),
    ]
    reasons = Counter(p.reason for p in graph.pinned)
    examples = {p.reason: f"{p.parameter}[{p.axis}]" for p in reversed(graph.pinned)}
    pinned = "; ".join(
        f"{n} {'axis' if n == 1 else 'axes'}: {reason} ({'' if n == 1 else 'as '}{examples[reason]})"
        for reason, n in reasons.most_common()
    )
    facts.append(("pinned", pinned or "nothing"))
    if graph.failed:
        facts.append(("failed", "; ".join(f"{name}: {reason}" for name, reason in graph.failed.items())))
    facts.append(("no rule for", ", ".join(graph.unknown_operators) or "none: every operator that was met has one"))
    if graph.branch:
        facts.append(("branch", f"recorded for inputs that go the example's way at {graph.branch}"))
    if graph.unreached:
        facts.append(("not reached", f"{', '.join(graph.unreached)}: pass a list of example inputs that reach them"))
    if graph.left_out:
        facts.append(("left out", f"{', '.join(graph.left_out)}: not seen in use; give them in a list of examples"))
    if graph.training.startswith("not"):
        facts.append(("training mode", graph.training))
    tied = [names for names in graph.aliases.values() if len(names) > 1]
    if tied:
        facts.append(("tied", "; ".join(" = ".join(names) for names in tied)))
    return facts


@dataclass(frozen=True)
class Family:
    """Groups that are equal but for one number in their paths.

    Attributes:
        groups: in the order of the graph.
        stem: the path up to that number, or None for a single group.
        numbers: the number in each group's path.
    """

    groups: tuple[Group, ...]
    stem: str | None = None
    numbers: tuple[int, ...] = ()

    @property
    def layer(self) -> str | None:
        """Path of the first group's repeated layer, None for a single group."""
        return None if self.stem is None else f"{self.stem}{self.numbers[0]}"

    def label(self, text: str) -> str:
        """A name from the first group with the number replaced by all of them."""
        if self.stem is None:
            return text
        return _replace(text, self.stem, self.numbers[0], f"{{{_ranges(self.numbers)}}}")


def fold(groups: Sequence[Group]) -> list[Family]:
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
        open_ = [{n: g for n, g in candidates[k].items() if g.name not in taken} for k in keys[group.name]]
        best = max(range(len(open_)), key=lambda i: len(open_[i]), default=None)
        if best is None or len(open_[best]) < 2:
            families.append(Family((group,)))
            taken.add(group.name)
        else:
            members = open_[best]
            families.append(Family(tuple(members.values()), str(keys[group.name][best][0]), tuple(members)))
            taken.update(g.name for g in members.values())
    return families


def shape_text(group: Group) -> str:
    """``64``, or ``12·64`` for 12 blocks of 64 units."""
    return "·".join(map(str, (*getattr(group, "blocks", ()), group.size)))


def member_text(member: Member) -> str:
    """``conv1.weight[0]``, with the exponent of a factor unless it is one."""
    place = "" if member.axis is None else f"[{member.axis}]"
    exponent = member.exponent if isinstance(member, ScaleMember) else 1
    return f"{member.parameter}{place}" + ("" if exponent == 1 else f"^{exponent:g}")


def _pattern(group: Group, stem: str, number: int) -> tuple[object, ...]:
    """Everything that is shown of a group, with the number left out."""
    own = re.sub(r"-\d+$", "", group.name) if "/" in group.name else group.name
    texts = dict.fromkeys(member_text(m) for m in group.members)
    return (
        _replace(own, stem, number, "*"),
        shape_text(group),
        getattr(group, "exact", True),
        tuple(_replace(t, stem, number, "*") for t in texts),
    )


def _replace(text: str, stem: str, number: int, by: str) -> str:
    return re.sub(rf"^{re.escape(stem)}{number}(?!\d)", lambda _: stem + by, text)


def _rows(
    graph: Symmetries, families: Sequence[Family], *, note: bool, depth: int = 1
) -> Iterator[tuple[str, str, list[str]]]:
    for family in families:
        first = family.groups[0]
        path, _, own = first.name.rpartition("/")
        name = "  " * depth + (f"in each block: {own}" if path else family.label(first.name))
        if note and not getattr(first, "exact", True):
            name += " (up to eps)"
        size = (f"{len(family.groups)} × " if len(family.groups) > 1 else "") + shape_text(first)
        yield name, size, _members(first, family.layer)
        if isinstance(first, PermutationGroup):
            children = [c for g in family.groups for c in graph.children(g.name)]
            yield from _rows(graph, fold(children), note=note, depth=depth + 1)


def _members(group: Group, layer: str | None) -> list[str]:
    """The members, tensors of one module together, without the path of the repeated layer."""
    modules: dict[tuple[str, str], list[str]] = {}
    for text in dict.fromkeys(member_text(m) for m in group.members):
        name, place = re.fullmatch(r"([^\[^]*)(.*)", text).groups()  # type: ignore[union-attr]
        module, _, leaf = name.rpartition(".")
        modules.setdefault((module, place), []).append(leaf)
    result = []
    for (module, place), leaves in modules.items():
        leaf = leaves[0] if len(leaves) == 1 else "{" + ",".join(leaves) + "}"
        text = f"{module}.{leaf}{place}" if module else f"{leaf}{place}"
        result.append(text[len(layer) :] if layer is not None and text.startswith(layer + ".") else text)
    return result


def _row(name: str, size: str, members: list[str], width: int, sizes: int, limit: int = 2) -> list[str]:
    """Name, size and members in at most ``limit`` lines; what does not fit is counted."""
    if len(name) > width:
        stripped = name.lstrip()
        indent = len(name) - len(stripped)
        name = " " * indent + "…" + stripped[indent + 1 - width :]
    head = f"{name:<{width}}  {size:>{sizes}}  "
    room = WIDTH - len(head)
    rows = [""]
    for k, member in enumerate(members):
        left = len(members) - k - 1
        text = member + (", " if left else "")
        text = text if len(text) <= room else "…" + text[1 - room :]
        last = len(rows) == limit
        spare = len(f"+{left} more") if last and left else 0
        if len(rows[-1]) + len(text.rstrip()) + spare > room:
            if last:
                rows[-1] += f"+{left + 1} more"
                break
            rows.append("")
        rows[-1] += text
    return [((head if k == 0 else " " * len(head)) + row).rstrip() for k, row in enumerate(rows)]


def _wrap(head: str, text: str) -> list[str]:
    lines, line = [], head
    for word in text.split(" "):
        if len(line) > len(head) and len(line) + len(word) >= WIDTH:
            lines.append(line.rstrip())
            line = " " * len(head)
        line += word[: WIDTH - len(head) - 1] + " "
    return [*lines, line.rstrip()]


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
