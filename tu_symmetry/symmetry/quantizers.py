"""Scale groups, and the rotations of a residual stream, as the mappings that quantizers of llm-compressor read.

A mapping says: what the smooth layer makes is divided by factors, and the columns of the balance layers, which read it,
are multiplied by them. Names are those of modules, or regular expressions after ``re:``.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.groups import ScaleGroup, ScaleMember, some

if TYPE_CHECKING:
    from tu_symmetry.symmetry.graph import SymmetryGraph

Format = Literal["awq", "smoothquant", "spinquant"]
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number


@dataclass(frozen=True)
class Smoothing:
    """One scale group as modules.

    Attributes:
        smooth: the module whose outputs have free factors.
        balance: the modules that read them.
        rows: how many of the last rows of the smooth layer make them, None where all do.
        problem: why no mapping can name this group, or nothing. The symmetry holds all the same.
    """

    smooth: str
    balance: tuple[str, ...]
    rows: int | None = None
    problem: str = ""


def smoothings(graph: SymmetryGraph) -> tuple[Smoothing, ...]:
    """The scale groups that hold exactly and have a factor for each unit, as layers that make and layers that read."""
    starts = [sum(g.size for g in graph.scales[:k]) for k in range(len(graph.scales))]
    held = [(g, s) for g, s in zip(graph.scales, starts, strict=True) if g.exact]
    return tuple(_smoothing(graph, g, s) for g, s in held if g.size > 1 and all(m.axis is not None for m in g.members))


def _smoothing(graph: SymmetryGraph, group: ScaleGroup, start: int) -> Smoothing:
    makes: dict[str, list[ScaleMember]] = defaultdict(list)
    reads: dict[str, list[ScaleMember]] = defaultdict(list)
    members = [m for m in group.members if not m.buffer]
    for member in members:
        module, _, leaf = member.parameter.rpartition(".")
        reader = member.axis == 1 and len(graph.shapes[member.parameter]) == 2 and leaf == "weight"
        (reads if reader else makes)[module].append(member)
    smooth, names = next(iter(makes), ""), tuple(reads)

    def refused(why: str) -> Smoothing:
        return Smoothing(smooth, names, problem=why)

    odd = [m for m in members if m.parameter.rpartition(".")[2] not in ("weight", "bias")]
    odd += [m for m in members if len(graph.shapes[m.parameter]) > 2]
    if odd:
        stem = _stem(odd[0].parameter)
        return refused(f"{stem} is no matrix or vector of a layer (a convolution, or experts in one tensor?)")
    if not reads or not makes:
        return refused("it does not lie between the rows of one layer and the columns of others")
    if len(makes) > 1:
        return refused(f"several layers make these units: {some([*map(_stem, makes)])}")
    exponents = {m.exponent for m in makes[smooth]}, {m.exponent for held in reads.values() for m in held}
    if exponents not in (({1.0}, {-1.0}), ({-1.0}, {1.0})):
        return refused("what a unit makes and what reads it are not scaled by one factor and its inverse")
    made = [_units(graph, m, group.size, start) for m in makes[smooth]]
    first, *others = (_units(graph, m, group.size, start) for held in reads.values() for m in held)
    if any(not torch.equal(units, first) for units in others):
        return refused("the layers that read these units hold them in different orders")
    if len(first) != group.size or bool((first < 0).any()):
        return refused(
            f"{group.size} factors scale {int((first >= 0).sum())} of {len(first)} columns (grouped queries)"
        )
    if any(not torch.equal(units[-len(first) :], first) or int((units >= 0).sum()) != len(first) for units in made):
        return refused("the units are not the last rows of the layer that makes them, in the order of the columns")
    if all(len(units) == len(first) for units in made):
        return Smoothing(smooth, names)
    if len(made) > 1:
        return refused("the layer also makes other units, and all of its bias would be scaled")
    return Smoothing(smooth, names, rows=len(first))


def _units(graph: SymmetryGraph, member: ScaleMember, size: int, start: int) -> Tensor:
    """For each place along a member's axis the number of the unit that scales it, -1 where none or several do."""
    assert member.axis is not None
    found = torch.full((graph.shapes[member.parameter][member.axis],), -1, device="cpu")
    for term in graph.scale_terms[member.parameter]:
        own = term.index.reshape(-1) - start
        if term.exponent == member.exponent and len(own) == len(found) == term.index.shape[member.axis]:
            here = (own >= 0) & (own < size)
            found = torch.where(here & (found < 0), own, torch.where(here, -1, found))
    return found


def export(graph: SymmetryGraph, format: Format) -> list[Any] | dict[str, Any]:
    """See :meth:`~tu_symmetry.SymmetryGraph.export`."""
    if format not in get_args(Format):
        raise SymmetryError(f"format={format!r}: give one of {', '.join(get_args(Format))}")
    graph.require_verified()
    if format == "spinquant":
        return _spinquant(graph)
    usable = [s for s in smoothings(graph) if not s.problem and (format == "awq" or s.rows is None)]
    modules = list(dict.fromkeys(map(_module, graph.shapes)))
    found = list(_written(usable, modules))
    if format == "awq":
        return [{"smooth_layer": smooth, "balance_layers": balance} for smooth, balance in found]
    return [[balance, smooth] for smooth, balance in found]


def left_out(graph: SymmetryGraph, format: Format) -> dict[str, str]:
    """What holds and stands in no mapping of :func:`export`: layers, with ``*`` for numbers, and why."""
    found = smoothings(graph)
    partly = "the smooth layer also makes other units, and all of its rows would be scaled"
    reasons = [(s, s.problem or (partly if s.rows and format == "smoothquant" else "")) for s in found]
    return {
        f"{_stem(s.smooth)} -> {', '.join(dict.fromkeys(map(_stem, s.balance))) or 'nothing'}": why
        for s, why in reasons
        if why and format != "spinquant"
    }


def _written(usable: Sequence[Smoothing], modules: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Mappings by regular expressions where equal layers have equal mappings, by names elsewhere."""
    families: dict[tuple[str, frozenset[str]], list[Smoothing]] = defaultdict(list)
    for s in usable:
        families[_stem(s.smooth), frozenset(map(_stem, s.balance))].append(s)
    for own in families.values():
        smooth = pattern([s.smooth for s in own], modules)
        targets = _patterns(list(dict.fromkeys(name for s in own for name in s.balance)), modules)
        if means(modules, smooth, targets) == {s.smooth: {*s.balance} for s in own}:
            yield smooth, targets
        else:
            yield from ((s.smooth, list(s.balance)) for s in own)


def means(modules: Sequence[str], smooth: str, balance: Sequence[str]) -> dict[str, set[str]] | None:
    """The balance layers of each smooth layer as :func:`match` resolves a mapping; None where it cannot."""
    try:
        sets = match(modules, smooth, balance)
    except SymmetryError:
        return None
    if any(len(makes) > 1 for makes, *_ in sets):
        return None
    return {makes[0]: {name for names in reads for name in names} for makes, *reads in sets}


def _stem(name: str) -> str:
    return _NUMBER.sub("*", name)


def pattern(names: Sequence[str], modules: Iterable[str]) -> str:
    """One name, or a regular expression that matches names which differ in numbers, and no other module."""
    if len(names) == 1:
        return names[0]
    numbers = list(zip(*(_NUMBER.findall(name) for name in names), strict=True))
    pieces = _stem(names[0]).split("*")
    alike = {name for name in modules if _stem(name) == _stem(names[0])} == set(names)
    told = [
        seen[0] if len({*seen}) == 1 else r"\d+" if alike else f"({'|'.join(dict.fromkeys(seen))})" for seen in numbers
    ]
    written = re.escape(pieces[0]) + "".join(t + re.escape(p) for t, p in zip(told, pieces[1:], strict=True))
    return f"re:{written}$"


def match(modules: Iterable[str], smooth: str, balance: Sequence[str]) -> list[list[list[str]]]:
    """What a mapping means: sets of modules, one list for the smooth layer and one for each balance target.

    Modules are taken in their order. A set is complete when every target has a module in it; it ends before the first
    match that lies outside the least common parent of its modules.

    Raises:
        SymmetryError: the last set lacks a target, or a module matches two.
    """
    targets = [smooth, *balance]
    done: list[list[list[str]]] = []
    own: list[list[str]] = [[] for _ in targets]
    parent = ""
    for name in modules:
        hits = [k for k, target in enumerate(targets) if _matches(name, target)]
        if len(hits) > 1:
            raise SymmetryError(f"{name} matches two targets of one mapping: {some([targets[k] for k in hits])}")
        for k in hits:
            above = _common(name, parent) if any(own) else name
            if all(own) and above != parent:
                done.append(own)
                own, above = [[] for _ in targets], name
            own[k].append(name)
            parent = above
    if any(own) and not all(own):
        lacking = [target for target, names in zip(targets, own, strict=True) if not names]
        raise SymmetryError(f"the last set of modules lacks {some(lacking)}")
    return [*done, own] if all(own) else done


def _matches(name: str, target: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else name == target


def _common(a: str, b: str) -> str:
    """The longest path that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split("."), strict=False))
    return ".".join(part for part, _ in pairs)


def _spinquant(graph: SymmetryGraph) -> dict[str, Any]:
    """The layers of rotations R1 (a residual stream) and R2 (values), and the norms that have to be folded before."""
    looked_up = {p.parameter for p in graph.pinned if p.reason == "rows are looked up"}
    streams = [
        (g, m.parameter)
        for g in graph.linears
        for m in g.members
        if m.axis == 1 and m.parameter in looked_up and not g.blocks
    ]
    if not streams:
        raise SymmetryError(
            "spinquant: no embedding makes a stream that matrices may mix here; print(graph) shows the linear groups, "
            "and what keeps from it (gains that nothing takes over, norms that subtract a mean by hand)"
        )
    group, embedding = streams[0]
    modules = list(dict.fromkeys(map(_module, graph.shapes)))
    if group.subgroup != "orthogonal":
        raise SymmetryError(
            f"spinquant: the stream of {embedding} may be mixed by {group.subgroup} matrices only, which a Hadamard "
            "matrix is not, since LayerNorm subtracts a mean: bring the network to RMSNorm first"
        )
    smooth = {s.smooth: s for s in smoothings(graph) if not s.problem}
    norms = [_module(gain) for gain in group.constant]
    stuck = [norm for norm in norms if norm not in smooth]
    if stuck or len(graph.aliases[embedding]) > 1:
        raise SymmetryError(
            f"spinquant: the gains of {some(stuck or graph.aliases[embedding])} cannot be folded into what reads them. "
            "Untie the head from the embedding first, bring norms that multiply by 1 + weight to plain gains, and "
            "stacked experts to layers"
        )
    matrices = [m for m in group.members if len(graph.shapes[m.parameter]) == 2 and m.parameter != embedding]
    writes, reads = ([_module(m.parameter) for m in matrices if m.axis == axis] for axis in (0, 1))
    roles: dict[str, list[str]] = defaultdict(list)
    sizes = set()
    for values in (g for g in graph.linears if g.subgroup == "general" and g.blocks):
        made, read = ({_module(m.parameter) for m in values.members if m.axis == axis} for axis in (0, 1))
        if len(made) == len(read) == 1 and made <= {*reads} and read <= {*writes}:
            (v,), (o,) = made, read
            attention = _common(v, o)
            inside = [r for r in reads if r.startswith(f"{attention}.") and r != v]
            if len(inside) == 2:
                for role, name in zip(
                    ("attn", "attn_q", "attn_k", "attn_v", "attn_o"), (attention, *inside, v, o), strict=True
                ):
                    roles[role].append(name)
                sizes.add(values.size)
    roles |= {"embedding": [_module(embedding)], "lm_head": [r for r in reads if _stem(r) == r]}
    taken = {name for names in roles.values() for name in names}
    lists = {"mlp_in": [r for r in reads if r not in taken], "mlp_out": [w for w in writes if w not in taken]}
    if len(sizes) != 1 or len(roles["lm_head"]) != 1:
        raise SymmetryError(
            "spinquant: its names stand for attention with one layer each of queries, keys and values, of one size of "
            f"heads, and one head of the network; here stand {some(sorted({*map(_stem, (*reads, *writes))}))}"
        )
    containers = [*modules, *roles["attn"]]
    return {
        "mappings": {role: pattern(names, containers) for role, names in roles.items()}
        | {"attn_head_dim": sizes.pop()}
        | {role: _patterns(names, modules) for role, names in lists.items()},
        "norm_mappings": [
            {"norm": norm, "linears": linears} for norm, linears in _written([smooth[n] for n in norms], modules)
        ],
    }


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _patterns(names: Sequence[str], modules: Sequence[str]) -> list[str]:
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_stem(name)].append(name)
    return [pattern(own, modules) for own in alike.values()]
