"""What of a network follows the sizes of its inputs: other ways through it, cuts (``pos[:n]``), and constants.

What differs between two passes of one program may differ in any way for sizes that nobody tried.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tu_symmetry.symmetry.nodes import arguments_of, rule_name_of, traits_of
from tu_symmetry.symmetry.running.probe import Example

_SIZED = frozenset(f"aten.{name}" for name in ("view", "reshape", "_unsafe_view", "unflatten", "expand", "slice"))
FOLLOWS = "the sizes of the inputs tell where it is cut"


@dataclass(frozen=True)
class Following:
    """Nodes that hold other constants, and that cut elsewhere (along which axis), with inputs of other sizes."""

    constants: frozenset[str] = frozenset()
    cuts: tuple[tuple[str, int], ...] = ()

    def __le__(self, other: Following) -> bool:
        return self.constants <= other.constants and {*self.cuts} <= {*other.cuts}

    def __or__(self, other: Following) -> Following:
        return Following(self.constants | other.constants, self.cuts + other.cuts)


NOTHING = Following()


def following(first: dict[torch.fx.Node, Any], second: dict[torch.fx.Node, Any]) -> Following:
    """Compare the nodes of two passes, each with the tensor that it holds where that depends on constants only."""
    called = [[(n, held) for n, held in nodes.items() if n.op == "call_function"] for nodes in (first, second)]
    if [n.target for n, _ in called[0]] != [n.target for n, _ in called[1]]:
        return NOTHING  # two ways: each is followed by itself
    constants: set[str] = set()
    cuts: list[tuple[str, int]] = []
    moved: set[torch.fx.Node] = set()
    for (a, one), (b, two) in zip(*called, strict=True):
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            if one.shape != two.shape or not torch.equal(one, two):
                moved.add(a)
                uniform = all(bool((t == t.flatten()[:1]).all()) for t in (one, two))
                if one.shape == two.shape and not uniform:
                    constants.add(a.name)
        elif moved.intersection(a.all_input_nodes) or _literals(a) != _literals(b):
            cuts += [(a.name, axis) for axis in _cut(a, b)]
    return Following(frozenset(constants), tuple(cuts))


def alike(first: dict[torch.fx.Node, Any], second: dict[torch.fx.Node, Any]) -> bool:
    """Whether two passes are one program, but for sizes that have other names: rules say the same of both.

    Each size has one name in the other pass, 1 and those of parameters their own, and no two the same. All others grow,
    or all shrink, pieces into which views cut axes included: no axis of one length is cut elsewhere. Constants (given
    with the nodes as in :func:`following`) tell apart the same entries along all axes that are equally long.
    """
    if len(first) != len(second) or any(isinstance(held, torch.fx.GraphModule) for held in first.values()):
        return False
    names = {1: 1}
    places: tuple[dict[torch.fx.Node, str], ...] = ({}, {})
    for k, ((a, one), (b, two)) in enumerate(zip(first.items(), second.items(), strict=True)):
        if a.op != b.op or (a.op != "placeholder" and a.target != b.target) or not _told_alike(one, two):
            return False
        sizes = [_sizes(node) for node in (a, b)]
        given: list[list[Any]] = []
        for node, place in zip((a, b), places, strict=True):
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), place.__getitem__)
            given.append([*tree_leaves(arguments), *((t.ndim, t.dtype) for t in _tensors(node))])
            place[node] = f"node {k}"
        if any(len(x) != len(y) for x, y in (sizes, given)):
            return False
        other = [pair for pair in zip(*given, strict=True) if pair[0] != pair[1]]
        if other and a.all_input_nodes and rule_name_of(a.target) not in _SIZED:
            return False
        if any(type(n) is not int or names.setdefault(n, m) != m for n, m in (*zip(*sizes, strict=True), *other)):
            return False
    grows = {m > n for n, m in names.items() if m != n}
    return len({*names.values()}) == len(names) and len(grows) < 2


def _tensors(node: torch.fx.Node) -> list[Tensor]:
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


def _sizes(node: torch.fx.Node) -> list[Any]:
    """The sizes of the results, and for a view the lengths of the pieces that come to stand in other axes."""
    results = _tensors(node)
    sizes: list[Any] = [n for t in results for n in t.shape]
    if results and "same" in traits_of(node):
        shapes = _tensors(node.all_input_nodes[0])[0].shape, results[0].shape
        ends = sorted({math.prod(shape[k:]) for shape in shapes for k in range(len(shape) + 1)})
        sizes += [b // a if a and b % a == 0 else None for a, b in itertools.pairwise(ends)]
    return sizes


def _told_alike(one: Any, two: Any) -> bool:
    """Whether two constants, if they are any, tell apart the same entries along axes that are equally long in both."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return type(one) is type(two)
    if one.layout != torch.strided or one.shape == two.shape:
        return one.layout == two.layout and one.shape == two.shape and torch.equal(one, two)
    kept = [k for k, (n, m) in enumerate(zip(one.shape, two.shape, strict=False)) if n == m > 1]
    told = []
    for held in (one, two):
        plain = (torch.view_as_real(held) if held.is_complex() else held).double()
        alike_along = [plain.unique(dim=k, return_inverse=True)[1].tolist() for k in kept]
        told.append([bool((held == held.flatten()[:1]).all()), *alike_along])
    return one.ndim == two.ndim and told[0] == told[1]


def _literals(node: torch.fx.Node) -> Any:
    return torch.fx.node.map_arg((node.args, node.kwargs), lambda n: None)


def _cut(a: torch.fx.Node, b: torch.fx.Node) -> list[int]:
    """Axes of the first tensor, equally long in both passes, that two calls of an operator cut elsewhere."""
    if not a.all_input_nodes or not isinstance(a.target, torch._ops.OpOverload):
        return []
    shapes = [[getattr(n.meta.get("val"), "shape", ()) for n in node.all_input_nodes] for node in (a, b)]
    one, two = shapes[0][0], shapes[1][0]
    given = arguments_of(a)
    axes: list[Any] = []
    if a.target is torch.ops.aten.index.Tensor:
        axes = [k for k, index in enumerate(given["indices"]) if index is not None]
    elif a.target is torch.ops.aten.embedding.default:
        axes = [0]
    elif "tensors" in given:  # joined: what stands behind a longer piece comes to stand elsewhere
        k, joins = given.get("dim", 0), a.target is torch.ops.aten.cat.default
        axes = [k] if joins and any(x[k:][:1] != y[k:][:1] for x, y in zip(*shapes, strict=True)) else []
    elif "dim" in given:
        axes = [given["dim"]]
    elif one == two:
        result = getattr(a.meta.get("val"), "shape", ())
        axes = [k for k, n in enumerate(one) if len(result) == len(one) and result[k] != n > 1]
    axes = [k % len(one) for k in axes if isinstance(k, int) and len(one) == len(two) > 0]
    return [k for k in axes if one[k] == two[k]]


def left_out(model: nn.Module, example: Example) -> dict[str, Any]:
    """The arguments that an example leaves to the defaults of ``forward``, with these."""
    args, kwargs = example
    signature = list(inspect.signature(model.forward).parameters.values())
    named = [p for p in signature[len(args) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p.default for p in named if p.name not in kwargs and p.default is not p.empty}


def with_defaults(model: nn.Module, example: Example) -> Example:
    """An example that names the integers which it leaves to the defaults of ``forward``."""
    args, kwargs = example
    return args, kwargs | {name: value for name, value in left_out(model, example).items() if type(value) is int}


def resized(example: Example) -> Iterator[tuple[Example, ...]]:
    """Examples with other sizes and numbers: larger ones and smaller ones, of which the first that runs counts.

    All axes of one size change together (a square image); or, but in images, those that stand at the same place.
    """
    leaves, spec = tree_flatten(example)
    axes = [(n, k) for t in leaves if isinstance(t, Tensor) for k, n in enumerate(t.shape)]

    def changed(size: int, to: int, places: tuple[int, ...]) -> Example:
        def change(tensor: Tensor) -> Tensor:
            return tensor.new_zeros([to if n == size and k in places else n for k, n in enumerate(tensor.shape)])

        return tree_map_only(Tensor, change, example)

    for size in dict.fromkeys(n for n, _ in axes):
        everywhere = tuple(dict.fromkeys(k for n, k in axes if n == size))
        places = [everywhere, *((k,) for k in everywhere if len(everywhere) > 1 and max(everywhere) < 3)]
        for sizes in _others(size):
            yield tuple(changed(size, to, p) for to in sizes if to > 0 for p in places)
    for k, number in enumerate(leaves):
        if type(number) is int:
            for numbers in _others(number):
                yield tuple(tree_unflatten([*leaves[:k], to, *leaves[k + 1 :]], spec) for to in numbers)


def _others(size: int) -> tuple[tuple[int, ...], ...]:
    """Larger sizes and smaller ones; what 0 doubled or halved is, is none."""
    every = (2 * size, size + 1), (size // 2, size - 1)
    return tuple(tuple(n for n in dict.fromkeys(some) if n != size) for some in every)


def held_constants(module: torch.fx.GraphModule, inputs: tuple[Any, ...]) -> dict[torch.fx.Node, Any]:
    """The nodes of a pass, with the tensors that those hold which depend on constants only (None for all others)."""
    held: dict[torch.fx.Node, Any] = dict.fromkeys(module.graph.nodes)
    placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
    held |= {n: given for n, given in zip(placeholders, inputs, strict=False) if isinstance(given, Tensor)}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            held[node] = getattr(module, str(node.target), None)
        elif node.target is operator.getitem and held[node.args[0]] is not None:
            held[node] = held[node.args[0]][node.args[1]]
        elif isinstance(node.target, torch._ops.OpOverload):
            known = all(held[n] is not None for n in node.all_input_nodes)
            draws = torch.Tag.nondeterministic_seeded in node.target.tags
            if node.target._schema.is_mutable and node.target is not torch.ops.aten.detach_.default:
                held |= dict.fromkeys(node.all_input_nodes)
            elif known and not draws:
                arguments, options = torch.fx.node.map_arg((node.args, node.kwargs), held.__getitem__)
                held[node] = node.target(*arguments, **options)
    return held
