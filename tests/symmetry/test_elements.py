"""Laws of group elements, against permutations of single units written out one by one."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.elements import (
    compose,
    identity_permutation,
    invert,
    random_permutation,
    random_scale,
    transposition_count,
)
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.groups import NormalizationGroup, PermutationGroup, ScaleGroup

Element = dict[str, Tensor]
Flat = tuple[int, ...]


def graph_of(*permutations: PermutationGroup) -> SymmetryGraph:
    scales, normalizations = (ScaleGroup("s", 2000, ()),), (NormalizationGroup("n", 3, ()),)
    return SymmetryGraph(permutations, scales, normalizations, shapes={}, aliases={}, verified=True)


def chain(*sizes: int) -> SymmetryGraph:
    """Wreath product of symmetric groups: blocks of blocks of ... units, outermost first."""
    names = [None, *("/".join("abc"[: depth + 1]) for depth in range(len(sizes)))]
    groups = [PermutationGroup(str(names[k + 1]), size, (), names[k], sizes[:k]) for k, size in enumerate(sizes)]
    return graph_of(*groups)


def flatten(p: Element) -> Flat:
    """The permutation of single units that a chain's element is: unit ``i`` comes from unit ``flat[i]``."""
    levels = [p[name] for name in sorted(p, key=len)]
    shape = levels[-1].shape
    flat = []
    for place in itertools.product(*map(range, shape)):
        source = [int(level[place[: depth + 1]]) for depth, level in enumerate(levels)]
        number = 0
        for size, index in zip(shape, source, strict=True):
            number = number * size + index
        flat.append(number)
    return tuple(flat)


def after(p: Flat, q: Flat) -> Flat:
    """First ``q``, then ``p``: ``new[i] = moved[p[i]]`` and ``moved[j] = old[q[j]]``."""
    return tuple(q[i] for i in p)


def inverse(p: Flat) -> Flat:
    inverted = [0] * len(p)
    for i, source in enumerate(p):
        inverted[source] = i
    return tuple(inverted)


def all_elements(*sizes: int) -> list[Element]:
    """Every element of a chain."""
    choices = []
    for depth, size in enumerate(sizes):
        rows = itertools.product(itertools.permutations(range(size)), repeat=math.prod(sizes[:depth]))
        choices.append([torch.tensor(row).reshape(sizes[: depth + 1]) for row in rows])
    names = [group.name for group in chain(*sizes).permutations]
    return [dict(zip(names, levels, strict=True)) for levels in itertools.product(*choices)]


def swaps(*sizes: int) -> list[tuple[int, Flat]]:
    """The generators: (depth, exchange of two siblings at that depth, what is inside them matched in any way)."""
    size, *inner = sizes
    width = math.prod(inner)
    matchings = {flatten(e) for e in all_elements(*inner)} if inner else {(0,)}
    found = []
    for first, second in itertools.combinations(range(size), 2):
        for matching in matchings:
            flat = list(range(size * width))
            for slot, partner in enumerate(matching):
                flat[first * width + slot] = second * width + partner
                flat[second * width + partner] = first * width + slot
            found.append((0, tuple(flat)))
    for block in range(size):
        for depth, swap in swaps(*inner) if inner else []:
            flat = list(range(size * width))
            flat[block * width : (block + 1) * width] = [block * width + s for s in swap]
            found.append((depth + 1, tuple(flat)))
    return found


def fewest_swaps(*sizes: int) -> dict[Flat, tuple[int, ...]]:
    """How many swaps of each depth make each element, with as few as possible of the outermost (Dijkstra)."""
    identity = tuple(range(math.prod(sizes)))
    costs = [(tuple(int(depth == d) for d in range(len(sizes))), swap) for depth, swap in swaps(*sizes)]
    best, queue = {identity: (0,) * len(sizes)}, [((0,) * len(sizes), identity)]
    while queue:
        spent, element = heapq.heappop(queue)
        if spent > best[element]:
            continue
        for cost, swap in costs:
            reached, total = after(swap, element), tuple(map(sum, zip(spent, cost, strict=True)))
            if reached not in best or total < best[reached]:
                best[reached] = total
                heapq.heappush(queue, (total, reached))
    return best


CHAINS = [(7,), (4, 5), (3, 2, 4), (1, 6), (6, 1)]


@pytest.fixture(params=CHAINS, ids=str)
def elements(request: pytest.FixtureRequest, generator: torch.Generator) -> list[Element]:
    graph = chain(*request.param)
    return [random_permutation(graph, generator=generator) for _ in range(6)]


def same(p: Element, q: Element) -> bool:
    return p.keys() == q.keys() and all(torch.equal(p[name], q[name]) for name in p)


def test_composing_and_inverting_are_those_of_single_units(elements: list[Element]) -> None:
    for p, q in itertools.product(elements, repeat=2):
        assert flatten(compose(p, q)) == after(flatten(p), flatten(q))
        assert same(invert(compose(p, q)), compose(invert(q), invert(p)))
    for p, q, r in itertools.combinations(elements, 3):
        assert same(compose(compose(p, q), r), compose(p, compose(q, r)))
    for p in elements:
        assert sorted(flatten(p)) == list(range(len(flatten(p))))
        identity = identity_permutation(chain(*[level.shape[-1] for level in p.values()]))
        assert same(compose(p, invert(p)), identity) and same(compose(invert(p), p), identity)
        assert flatten(identity) == tuple(range(len(flatten(p)))) and transposition_count(identity) == 0
        assert flatten(invert(p)) == inverse(flatten(p)) and same(invert(invert(p)), p)


def test_a_nested_element_by_hand() -> None:
    p = {"heads/units": torch.tensor([[0, 2, 1], [2, 0, 1]]), "heads": torch.tensor([1, 0])}
    assert flatten(p) == (3, 5, 4, 2, 0, 1)
    # Undone: unit (0, 0) went to (1, 1), so it has to come from there; and so on.
    inverted = invert(p)
    assert list(inverted) == list(p)
    assert inverted["heads"].tolist() == [1, 0]
    assert inverted["heads/units"].tolist() == [[1, 2, 0], [0, 2, 1]]
    # One cycle of two blocks, whose inner product is [0, 2, 1] after [2, 0, 1]: one swap and one more.
    assert transposition_count(p) == 2


def test_blocks_that_nothing_moves_compose_apart(generator: torch.Generator) -> None:
    graph = graph_of(PermutationGroup("stack", 6, (), None, (4,)))
    p, q = (random_permutation(graph, generator=generator) for _ in range(2))
    composed, inverted = compose(p, q)["stack"].tolist(), invert(p)["stack"].tolist()
    for k, (a, b) in enumerate(zip(p["stack"].tolist(), q["stack"].tolist(), strict=True)):
        assert tuple(composed[k]) == after(a, b) and tuple(inverted[k]) == inverse(a)
    assert transposition_count(p) == sum(transposition_count(row) for row in p["stack"])


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (3, 2), (4, 2), (3, 3), (2, 2, 2), (1, 4), (4, 1)], ids=str)
def test_transposition_count_is_the_fewest_swaps_outermost_first(sizes: tuple[int, ...]) -> None:
    fewest = fewest_swaps(*sizes)
    elements = all_elements(*sizes)
    assert len(fewest) == len(elements)  # swaps reach the whole group
    for p in elements:
        assert transposition_count(p) == sum(fewest[flatten(p)]), p


def test_transposition_count_is_invariant_under_inversion_and_conjugation(elements: list[Element]) -> None:
    for p, q in itertools.permutations(elements, 2):
        assert transposition_count(invert(p)) == transposition_count(p)
        assert transposition_count(compose(compose(q, p), invert(q))) == transposition_count(p)


def test_transposition_count_of_one_cycle_and_of_rows() -> None:
    n = 512
    assert transposition_count(torch.arange(n).roll(1)) == n - 1
    assert transposition_count(torch.arange(n).flip(0)) == n // 2
    assert transposition_count(torch.stack([torch.arange(n).roll(1), torch.arange(n)])) == n - 1
    assert transposition_count({"a": torch.arange(4).roll(1), "b": torch.tensor([1, 0])}) == 4


def test_random_permutation_is_uniform_reproducible_and_leaves_the_global_state() -> None:
    graph = chain(2, 3)
    state = torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    draws = Counter(flatten(random_permutation(graph, generator=generator)) for _ in range(7200))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(draws) == 72  # 2! * 3!^2
    chi_squared = sum((count - 100) ** 2 / 100 for count in draws.values())
    assert chi_squared < 112  # 99.9 % quantile with 71 degrees of freedom
    first, second = (random_permutation(graph, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_random_scale_draws_every_factor_in_float64(generator: torch.Generator) -> None:
    drawn = random_scale(graph_of(), generator=generator, std=0.5)
    assert {name: len(value) for name, value in drawn.items()} == {"s": 2000, "n": 3}
    assert drawn["s"].std().item() == pytest.approx(0.5, rel=0.1) and abs(drawn["s"].mean().item()) < 0.05


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([[0, 1], [0, 0]]), "missing or repeated"),
        (torch.tensor([0, 1, 3]), "missing or repeated"),
        (torch.tensor([0.0, 1.0]), "integer tensor, got torch.float32"),
        (torch.tensor(0), "integer tensor"),
    ],
)
def test_what_is_no_permutation_is_refused(value: Tensor, message: str) -> None:
    with pytest.raises(SymmetryError, match=f"fc1.*{message}"):
        invert({"fc1": value})


@pytest.mark.parametrize("other", [{"b": torch.arange(3)}, {"a": torch.arange(4)}])
def test_elements_of_different_groups_do_not_compose(other: Element) -> None:
    with pytest.raises(SymmetryError, match="different groups"):
        compose({"a": torch.arange(3)}, other)


def test_a_level_that_is_left_out_stays_where_it_is() -> None:
    """A graph may lose the group between two others: elements act as if it were the identity."""
    graph = chain(3, 2, 3)
    generator = torch.Generator().manual_seed(0)
    for gone in ("a", "a/b"):
        still = {gone: identity_permutation(graph)[gone]}
        p, q = (random_permutation(graph, generator=generator) | still for _ in range(2))

        def less(element: Element, gone: str = gone) -> Element:
            return {name: index for name, index in element.items() if name != gone}

        assert same(compose(less(p), less(q)), less(compose(p, q))) and same(invert(less(p)), less(invert(p)))
        assert transposition_count(less(p)) == transposition_count(p)
