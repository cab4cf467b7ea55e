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
        partly: whether the last rows of the smooth layer make them, and others make something else.
        problem: why no mapping can name this group, or nothing. The symmetry holds all the same.
    """

    smooth: str
    balance: tuple[str, ...]
    partly: bool = False
    problem: str = ""


def smoothings(graph: SymmetryGraph) -> tuple[Smoothing, ...]:
    """The scale groups that hold exactly and have a factor for each unit, as layers that make and layers that read."""
    starts = itertools.accumulate((g.size for g in graph.scales), initial=0)
    groups = [(g, s) for g, s in zip(graph.scales, starts, strict=False) if g.exact and g.size > 1]
    return tuple(_smoothing(graph, g, s) for g, s in groups if all(m.axis is not None for m in g.members))


def _smoothing(graph: SymmetryGraph, group: ScaleGroup, start: int) -> Smoothing:
    sides: tuple[dict[str, list[ScaleMember]], ...] = defaultdict(list), defaultdict(list)
    members = [m for m in group.members if not m.buffer]
    for member in members:
        module, _, leaf = member.parameter.rpartition(".")
        sides[member.axis == 1 and len(graph.shapes[member.parameter]) == 2 and leaf == "weight"][module].append(member)
    makes, reads = sides
    made, read = ([m for held in side.values() for m in held] for side in sides)
    smooth, balance = next(iter(makes), ""), tuple(reads)

    def refused(why: str) -> Smoothing:
        return Smoothing(smooth, balance, problem=why)

    odd = [m for m in members if m.parameter.rpartition(".")[2] not in ("weight", "bias")]
    odd += [m for m in members if len(graph.shapes[m.parameter]) > 2]
    if odd:
        stem = _stem(odd[0].parameter)
        return refused(f"{stem} is no matrix or vector of a layer (a convolution, or experts in one tensor?)")
    if len(makes) != 1 or not reads:
        told = "it does not lie between the rows of one layer and the columns of others: these units are made by"
        return refused(f"{told} {some([*map(_stem, makes)])}")
    if ({m.exponent for m in made}, {m.exponent for m in read}) not in (({1.0}, {-1.0}), ({-1.0}, {1.0})):
        return refused("what a unit makes and what reads it are not scaled by one factor and its inverse")
    rows, (columns, *others) = ([_units(graph, m, group.size, start) for m in side] for side in (made, read))
    if any(not torch.equal(units, columns) for units in others):
        return refused("the layers that read these units hold them in different orders")
    if len(columns) != group.size or bool((columns < 0).any()):
        scaled = int((columns >= 0).sum())
        return refused(f"{group.size} factors scale {scaled} of {len(columns)} columns (grouped queries)")
    if any(not torch.equal(u[-group.size :], columns) or int((u >= 0).sum()) != group.size for u in rows):
        return refused("the units are not the last rows of the layer that makes them, in the order of the columns")
    partly = any(len(units) > group.size for units in rows)
    if partly and len(rows) > 1:
        return refused("the layer also makes other units, and all of its bias would be scaled")
    return Smoothing(smooth, balance, partly)


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
    modules = list(dict.fromkeys(map(_module, graph.shapes)))
    if format == "spinquant":
        return _spinquant(graph, modules)
    found = _written([s for s, why in _told(graph, format) if not why], modules)
    if format == "awq":
        return [{"smooth_layer": smooth, "balance_layers": balance} for smooth, balance in found]
    return [[balance, smooth] for smooth, balance in found]


def left_out(graph: SymmetryGraph, format: Format) -> dict[str, str]:
    """What holds and stands in no mapping of :func:`export`: layers, with ``*`` for numbers, and why."""
    return {
        f"{_stem(s.smooth)} -> {', '.join(dict.fromkeys(map(_stem, s.balance))) or 'nothing'}": why
        for s, why in _told(graph, format)
        if why and format != "spinquant"
    }


def _told(graph: SymmetryGraph, format: Format) -> list[tuple[Smoothing, str]]:
    """All groups, each with why no mapping of a format names it, or nothing."""
    partly = "the smooth layer also makes other units, and all of its rows would be scaled"
    return [(s, s.problem or partly * (s.partly and format == "smoothquant")) for s in smoothings(graph)]


def _written(usable: Sequence[Smoothing], modules: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Mappings by regular expressions where equal layers have equal mappings, by names elsewhere."""
    families: dict[tuple[str, frozenset[str]], list[Smoothing]] = defaultdict(list)
    for s in usable:
        families[_stem(s.smooth), frozenset(map(_stem, s.balance))].append(s)
    for own in families.values():
        smooth = pattern([s.smooth for s in own], modules)
        targets = _patterns(list(dict.fromkeys(name for s in own for name in s.balance)), modules)
        try:
            means = {tuple(makes): {*itertools.chain(*reads)} for makes, *reads in match(modules, smooth, targets)}
        except SymmetryError:
            means = {}
        if means == {(s.smooth,): {*s.balance} for s in own}:
            yield smooth, targets
        else:
            yield from ((s.smooth, list(s.balance)) for s in own)


def _stem(name: str) -> str:
    return _NUMBER.sub("*", name)


def pattern(names: Sequence[str], modules: Iterable[str]) -> str:
    """One name, or a regular expression that matches names which differ in numbers, and no other module."""
    if len(names) == 1:
        return names[0]
    numbers = [list(dict.fromkeys(seen)) for seen in zip(*map(_NUMBER.findall, names), strict=True)]
    first, *pieces = map(re.escape, _stem(names[0]).split("*"))
    alike = {name for name in modules if _stem(name) == _stem(names[0])} == set(names)
    told = [seen[0] if len(seen) == 1 else r"\d+" if alike else f"({'|'.join(seen)})" for seen in numbers]
    written = f"re:{first}{''.join(itertools.chain(*zip(told, pieces, strict=True)))}$"
    exact = {name for name in modules if named_by(name, written)} <= set(names)
    return written if exact else f"re:({'|'.join(map(re.escape, names))})$"


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
        hits = [k for k, target in enumerate(targets) if named_by(name, target)]
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


def named_by(name: str, target: str) -> bool:
    """Whether a target of a mapping, a name or an expression, means a module."""
    return re.match(target[3:], name) is not None if target.startswith("re:") else name == target


def _common(a: str, b: str) -> str:
    """The longest path that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split("."), strict=False))
    return ".".join(part for part, _ in pairs)


def _spinquant(graph: SymmetryGraph, modules: Sequence[str]) -> dict[str, Any]:
    """The layers of rotations R1 (a residual stream) and R2 (values), and the norms that have to be folded before."""
    looked_up = {p.parameter for p in graph.pinned if p.reason == "rows are looked up"}
    streams = [(g, m.parameter) for g in graph.linears for m in g.members if m.axis == 1 and m.parameter in looked_up]
    group, embedding = next(((g, name) for g, name in streams if not g.blocks), (None, ""))
    if group is None:
        raise SymmetryError(
            "spinquant: no embedding makes a stream that matrices may mix here; print(graph) shows the linear groups, "
            "and what keeps from it (gains that nothing takes over, norms that subtract a mean by hand)"
        )
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
    heads = []
    for values in (g for g in graph.linears if g.subgroup == "general" and g.blocks):
        made, read = ({_module(m.parameter) for m in values.members if m.axis == axis} for axis in (0, 1))
        if len(made) == len(read) == 1 and made <= {*reads} and read <= {*writes}:
            (v,), (o,) = made, read
            attention = _common(v, o)
            inside = [r for r in reads if r.startswith(f"{attention}.") and r != v]
            heads += [(values.size, attention, *inside, v, o)] if len(inside) == 2 else []
    sizes, *layers = zip(*heads, strict=True) if heads else [()]
    roles = dict(zip(("attn", "attn_q", "attn_k", "attn_v", "attn_o"), layers, strict=False))
    roles |= {"embedding": (_module(embedding),), "lm_head": tuple(r for r in reads if _stem(r) == r)}
    if len(set(sizes)) != 1 or len(roles["lm_head"]) != 1:
        raise SymmetryError(
            "spinquant: its names stand for attention with one layer each of queries, keys and values, of one size of "
            f"heads, and one head of the network; here stand {some(sorted({*map(_stem, (*reads, *writes))}))}"
        )
    taken = {*itertools.chain(*roles.values())}
    lists = {"mlp_in": [r for r in reads if r not in taken], "mlp_out": [w for w in writes if w not in taken]}
    containers = [*modules, *roles["attn"]]
    return {
        "mappings": {role: pattern(names, containers) for role, names in roles.items()}
        | {"attn_head_dim": sizes[0]}
        | {role: _patterns(names, modules) for role, names in lists.items()},
        "norm_mappings": [
            {"norm": norm, "linears": linears} for norm, linears in _written([smooth[n] for n in norms], modules)
        ],
    }


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _patterns(names: Sequence[str], modules: Sequence[str]) -> list[str]:
    return [pattern([n for n in names if _stem(n) == stem], modules) for stem in dict.fromkeys(map(_stem, names))]
