"""Assignment over wreath products, and the relaxation's numbers against dense matrices."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from cases import CASES
from numpy.polynomial import Polynomial
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from zoo import discovered

import tu_symmetry as tus
from tu_symmetry.alignment import products
from tu_symmetry.alignment.assignment import assign, assign_family, family_value, flat_source
from tu_symmetry.alignment.gram import Family, WeightSimilarities, families, working
from tu_symmetry.alignment.matching import descend, inner_product
from tu_symmetry.alignment.products import KeptSimilarities, plan_moves
from tu_symmetry.alignment.relaxation import (
    _best_ratio,
    _RelaxedNetwork,
    _RelaxedPair,
    _synchronized_step,
    synchronized_frank_wolfe,
)
from tu_symmetry.states import unstack
from tu_symmetry.symmetry.action import permute_tensors
from tu_symmetry.symmetry.elements import identity_permutation
from tu_symmetry.symmetry.running.weights import random_state


def case_of(name: str) -> tuple[nn.Module, tus.SymmetryGraph]:
    return discovered(next(c for c in CASES if c.name == name))


def elements(groups: list[tus.symmetry.PermutationGroup]) -> Iterator[dict[str, Tensor]]:
    """Every element of the product of some groups."""
    options = []
    for g in groups:
        rows = itertools.product(itertools.permutations(range(g.size)), repeat=math.prod(g.blocks))
        options.append([torch.tensor(r).reshape(g.shape) for r in rows])
    for chosen in itertools.product(*options):
        yield {g.name: p for g, p in zip(groups, chosen, strict=True)}


@pytest.mark.parametrize("name", ["GroupedConv", "GroupNormNet", "BlocksInBlocks"])
def test_assignment_over_nested_groups_is_the_brute_force_optimum(name: str) -> None:
    """Also for blocks within blocks; similarities are random, so every level matters."""
    _, graph = case_of(name)
    generator = torch.Generator().manual_seed(0)
    (family,) = families(graph)
    children: list[tus.symmetry.PermutationGroup] = []
    for child in family.children:  # as many as can be tried in all orders
        if math.prod(math.factorial(g.size) ** math.prod(g.blocks) for g in (*children, child)) <= 6000:
            children.append(child)
    family = Family(family.root, tuple(children), family.tensors, False)
    grams = {
        g.name: torch.randn(2 * [math.prod(g.shape)], generator=generator, dtype=torch.float64) for g in family.groups
    }
    best = max(family_value(family, grams, element)[0] for element in elements(list(family.groups)))
    found = assign_family(family, grams)
    assert {n: p.shape for n, p in found.items()} == {g.name: torch.Size(g.shape) for g in family.groups}
    assert family_value(family, grams, found)[0] == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("name", [c.name for c in CASES if c.permutations])
def test_gram_matrices_are_the_objective(name: str) -> None:
    """Differences of the objective between elements of one family are differences of the similarities they pair."""
    model, graph = case_of(name)
    generator = torch.Generator().manual_seed(1)
    a, b = random_state(model, generator), random_state(model, generator)
    base = tus.random_permutation(graph, generator=generator)
    similarities = WeightSimilarities.of(graph, a, b)
    for family in families(graph):
        if family.coupled:
            continue
        grams = similarities.grams(family, base)
        values = []
        for _ in range(2):
            draw = tus.random_permutation(graph, generator=generator)
            element = {**base, **{n: draw[n] for n in family.names}}
            objective = inner_product(graph, a, tus.apply_permutation(graph, element, b))
            values.append(objective - family_value(family, grams, element)[0])
        assert values[0] == pytest.approx(values[1], abs=1e-9), family.root.name


@pytest.mark.parametrize("name", ["GroupedConv", "transformer_grouped_query", "CalledTwice", "PackedConv"])
def test_coupled_families_never_lose(name: str) -> None:
    """Each sweep of a descent raises the objective, from many starts."""
    model, graph = case_of(name)
    generator = torch.Generator().manual_seed(2)
    a, b = random_state(model, generator), random_state(model, generator)
    similarities = WeightSimilarities.of(graph, a, b)
    for _ in range(5):
        permutation = tus.random_permutation(graph, generator=generator)
        before = inner_product(graph, a, tus.apply_permutation(graph, permutation, b))
        for _ in range(20):
            permutation, _, converged = descend(similarities, families(graph), permutation, 1)
            after = inner_product(graph, a, tus.apply_permutation(graph, permutation, b))
            assert after >= before - 1e-9 * abs(before)
            if converged:
                break
            before = after
        assert converged


@pytest.mark.parametrize("name", [c.name for c in CASES if c.permutations])
def test_kept_gram_matrices_are_those_computed_anew(name: str) -> None:
    """After changes of a few units, of many, and of none."""
    model, graph = case_of(name)
    generator = torch.Generator().manual_seed(7)
    a, b = random_state(model, generator), random_state(model, generator)
    kept, anew = KeptSimilarities.of(graph, a, b), WeightSimilarities.of(graph, a, b)
    identity = identity_permutation(graph)
    swap = {n: p.clone() for n, p in identity.items()}
    for p in swap.values():
        p[..., :2] = p[..., :2].flip(-1)
    for permutation in (identity, swap, swap, tus.random_permutation(graph, generator=generator), identity):
        for family in families(graph):
            if family.coupled and family.children:
                continue
            wanted = anew.grams(family, permutation)
            for group, gram in kept.grams(family, permutation).items():
                torch.testing.assert_close(gram, wanted[group], rtol=1e-10, atol=1e-10)


def test_few_changes_cost_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two swapped units of forty are two positions of the sum, and nothing is computed where nothing changed."""
    model = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 3, dtype=torch.float64))
    generator = torch.Generator().manual_seed(8)
    similarities = KeptSimilarities.of(graph, random_state(model, generator), random_state(model, generator))
    rows: list[int] = []
    original = products._add_product

    def counted(total: Tensor, left: Tensor, right: Tensor) -> None:
        rows.append(len(left))
        original(total, left, right)

    monkeypatch.setattr(products, "_add_product", counted)
    permutation = identity_permutation(graph)
    second = next(f for f in families(graph) if f.root.size == 30)
    first = next(f for f in families(graph) if f.root.size == 40)
    similarities.grams(second, permutation)
    assert sorted(rows) == [1, 40]  # the bias and what the next layer reads of it stay: one product for both
    rows.clear()
    similarities.grams(second, permutation)
    assert rows == []
    permutation[first.root.name][:2] = torch.tensor([1, 0])
    similarities.grams(second, permutation)
    assert rows == [2]


@pytest.mark.parametrize("name", ["mlp_relu", "cnn_flatten", "DenseConcat", "resnet_batchnorm", "CalledTwice"])
def test_relaxation_of_a_pair_is_the_one_on_tensors(name: str) -> None:
    """Gradients at the barycenter and along two steps, the steps' values, and the best length of each step."""
    model, graph = case_of(name)
    generator = torch.Generator().manual_seed(10)
    reference, state = (working(graph, random_state(model, generator)) for _ in range(2))
    similarities = KeptSimilarities(graph, reference, state)
    assert all(len(axes) <= 2 for axes in similarities.plan.moves.values())
    pair, network = _RelaxedPair(similarities.products), _RelaxedNetwork(similarities.plan, state)

    def value() -> float:
        return sum(
            float((reference[n] * network.mixed[n][similarities.plan.axes(n)]).sum()) for n in similarities.plan.moves
        )

    for step in range(3):
        for group, wanted in network.gradients(reference).items():
            torch.testing.assert_close(sum(pair.similarities[group]), wanted)
        _, sources, gap, scale = pair.vertex()
        if gap <= 1e-9 * scale:  # it stands on the best vertex, and rounding says on which side
            assert step
            break
        orders = network.orders(sources)
        before = copy.deepcopy(network)
        ratio = pair.advance(sources, gap)
        values = []
        for trial in (ratio, *torch.linspace(0, 1, 21).tolist()):
            network = copy.deepcopy(before)
            network.step(sources, orders, trial)
            values.append(value())
        assert values[0] >= max(values) - 1e-9 * abs(values[0])
        network = before
        network.step(sources, orders, ratio)
        for group, matrix in network.matrices.items():
            torch.testing.assert_close(pair.matrices[group], matrix)


@pytest.mark.parametrize("start", ["none", "good", "random", "far"])
def test_priced_assignment_is_the_optimum(start: str) -> None:
    """Against SciPy's solver on the plain matrix, whatever the prices that it starts with.

    Full rank, low rank, one clear answer, nothing to choose, rows and columns of very different sizes, heavy tails.
    """
    generator = torch.Generator().manual_seed(11)
    size = 300
    full = torch.randn(size, size, generator=generator, dtype=torch.float64)
    low = full[:, :3] @ full[:3]
    planted = full + 20 * torch.eye(size, dtype=torch.float64)[torch.randperm(size, generator=generator)]
    uneven = full + 1e3 * full[0] + 1e3 * full[:, :1]
    for similarities in (full, low, planted, torch.zeros_like(full), uneven, full**9):
        matrix = similarities.numpy()
        prices = {
            "random": {"g": torch.randn(size, generator=generator)},
            "far": {"g": 100 * torch.randn(size, generator=generator)},
        }
        kept = prices.get(start, {})
        if start == "good":
            assign(matrix, kept, "g")
        found = assign(matrix, None if start == "none" else kept, "g")
        assert sorted(found) == list(range(size))
        rows, columns = linear_sum_assignment(matrix, maximize=True)
        best, scale = float(matrix[rows, columns].sum()), float(abs(matrix[rows, columns]).sum())
        assert float(matrix[rows, found].sum()) == pytest.approx(best, rel=1e-12, abs=1e-12 * scale)
        assert all(bool(torch.isfinite(p).all()) for p in kept.values())


@pytest.mark.parametrize("name", ["mlp_relu", "DenseConcat"])
def test_synchronized_step_is_the_best_of_a_line_search(name: str) -> None:
    """The quartic's closed form against the objective itself, evaluated on the tensors at many lengths of the step."""
    model, graph = case_of(name)
    generator = torch.Generator().manual_seed(12)
    plan = plan_moves(graph, families(graph))
    states = [working(graph, random_state(model, generator)) for _ in range(4)]
    networks = [_RelaxedNetwork(plan, s, fixed=k == 0) for k, s in enumerate(states)]
    free = networks[1:]

    def objective() -> float:
        total = 0.0
        for n in plan.moves:
            moved = [network.mixed[n][plan.axes(n)] for network in networks]
            total += float(torch.stack(moved).sum(0).square().sum() - sum(m.square().sum() for m in moved)) / 2
        return total

    inside = 0
    for _ in range(6):
        totals = {n: sum(network.mixed[n][plan.axes(n)] for network in networks) for n in plan.moves}
        sources = [
            network.vertex(network.gradients({n: t - network.mixed[n][plan.axes(n)] for n, t in totals.items()}))[0]
            for network in free
        ]
        orders = [network.orders(s) for network, s in zip(free, sources, strict=True)]
        ratio = _synchronized_step(plan, networks[0], free, orders)
        before = copy.deepcopy(free)
        values = {}
        for trial in (*torch.linspace(0, 1, 11).tolist(), ratio):  # the last one is the step that is kept
            free = copy.deepcopy(before)
            for network, s, o in zip(free, sources, orders, strict=True):
                network.step(s, o, trial)
            networks = [networks[0], *free]
            values[trial] = objective()
        assert values[ratio] >= max(values.values()) - 1e-9 * abs(values[ratio])
        inside += 0 < ratio < 1
    assert inside


def relaxed_pair(name: str) -> tuple[_RelaxedNetwork, dict[str, Tensor], dict[str, Tensor]]:
    """A relaxed network two steps away from the barycenter, its parameters, and a reference."""
    model, graph = case_of(name)
    generator = torch.Generator().manual_seed(3)
    reference, state = (working(graph, random_state(model, generator)) for _ in range(2))
    network = _RelaxedNetwork(plan_moves(graph, families(graph)), state)
    for ratio in (0.3, 0.6):
        element = tus.random_permutation(graph, generator=generator)
        sources = {g.name: flat_source(g, element) for g in graph.permutations}
        network.step(sources, network.orders(sources), ratio)
    return network, state, reference


@pytest.mark.parametrize("name", ["mlp_relu", "cnn_flatten", "DenseConcat", "resnet_batchnorm", "transformer_fused"])
def test_relaxed_tensors_are_dense_matrices_times_tensors(name: str) -> None:
    network, state, reference = relaxed_pair(name)
    gradients = network.gradients(reference)
    expected = {g: torch.zeros_like(m) for g, m in network.matrices.items()}
    for matrix in network.matrices.values():
        for axis in (0, 1):
            torch.testing.assert_close(matrix.sum(axis), torch.ones(len(matrix), dtype=torch.float64))
    for tensor, moves in network.plan.moves.items():
        dense = {}
        for axis, parts in moves.items():
            dense[axis] = torch.eye(state[tensor].shape[axis], dtype=torch.float64)
            for group, index in parts:
                for place in index.T:
                    dense[axis][place[:, None], place] = network.matrices[group]
        for subset, mixed in network.mixed[tensor].items():
            wanted = state[tensor]
            for axis in subset:
                wanted = torch.tensordot(dense[axis], wanted, dims=([1], [axis])).movedim(0, axis)
            torch.testing.assert_close(mixed, wanted)
        for axis, parts in moves.items():
            others = network.mixed[tensor][tuple(a for a in network.plan.axes(tensor) if a != axis)]
            rows = [t.movedim(axis, 0).reshape(t.shape[axis], -1) for t in (reference[tensor], others)]
            pairs = rows[0] @ rows[1].T
            for group, index in parts:
                expected[group] += sum(pairs[c[:, None], c] for c in index.T)
    for group, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[group])


def test_a_step_is_the_polynomial_that_the_line_search_maximizes() -> None:
    network, _, _ = relaxed_pair("resnet_batchnorm")
    _, graph = case_of("resnet_batchnorm")
    element = tus.random_permutation(graph, generator=torch.Generator().manual_seed(9))
    sources = {g.name: flat_source(g, element) for g in graph.permutations}
    orders = network.orders(sources)
    axes = {n: network.plan.axes(n) for n in network.plan.moves}
    parts = {n: [c.clone() for c in network.bernstein(n, orders[n], a)] for n, a in axes.items()}
    network.step(sources, orders, 0.25)
    for name, coefficients in parts.items():
        degree = len(coefficients) - 1
        wanted = sum(math.comb(degree, k) * 0.25**k * 0.75 ** (degree - k) * c for k, c in enumerate(coefficients))
        torch.testing.assert_close(network.mixed[name][axes[name]], wanted)


def test_best_ratio_is_the_best_of_a_fine_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    grid = torch.linspace(0, 1, 10_001, dtype=torch.float64).numpy()
    for _ in range(50):
        objective = Polynomial(torch.randn(5, generator=generator, dtype=torch.float64).numpy())
        assert float(objective(_best_ratio(objective))) >= float(objective(grid).max()) - 1e-12
    assert _best_ratio(Polynomial([1.0, -1.0])) == 0.0


def test_synchronized_matching_recovers_many_planted_copies() -> None:
    """With noise between the copies, and for the first network as the frame that the others are brought to."""
    model, graph = case_of("resnet_frn")
    generator = torch.Generator().manual_seed(4)
    base = working(graph, random_state(model, generator))
    noisy = [
        {n: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in base.items()}
        for _ in range(5)
    ]
    planted = [identity_permutation(graph), *(tus.random_permutation(graph, generator=generator) for _ in range(4))]
    states = [permute_tensors(graph, p, s) for p, s in zip(planted, noisy, strict=True)]
    found, _ = synchronized_frank_wolfe(graph, states, families(graph), threads=2)
    for p, q in zip(planted, found, strict=True):
        assert all(torch.equal(tus.invert(p)[n], q[n]) for n in p)


def test_universe_beats_a_single_reference() -> None:
    """Independent networks: the sum over pairs that the universe maximizes is above what the first network gives."""
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 6, dtype=torch.float64))
    generator = torch.Generator().manual_seed(5)
    states = [random_state(model, generator) for _ in range(5)]

    def objective(aligned: list[dict[str, Tensor]]) -> float:
        return sum(inner_product(graph, a, b) for a, b in itertools.combinations(aligned, 2))

    first, mean, universe = (
        objective(tus.align(graph, states, reference=r).states)  # type: ignore[arg-type]
        for r in ("first", "mean", "universe")
    )
    assert universe > mean > first > objective(states)


@pytest.mark.parametrize("reference", ["first", "mean", "medoid", "universe"])
def test_threads_and_stacks_change_nothing(reference: str) -> None:
    model, graph = case_of("resnet_batchnorm")
    generator = torch.Generator().manual_seed(6)
    states = [random_state(model, generator) for _ in range(3)]
    stack = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    one, two = (
        tus.align(graph, given, reference=reference, threads=threads, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
        for given, threads in ((states, 1), (stack, 3))
    )
    assert one.transpositions == two.transpositions
    for a, b in zip(one.states, unstack(two.states), strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_root_whose_blocks_stay_where_they_are() -> None:
    """Convolutions with other numbers of groups: units move inside fixed blocks, and planted elements are found."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4), nn.LeakyReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Conv2d(12, 6, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert all(g.parent is None and len(g.shape) == 2 for g in graph.permutations)
    generator = torch.Generator().manual_seed(0)
    reference = random_state(model, generator)
    planted = tus.random_permutation(graph, generator=generator)
    moved = tus.apply_permutation(graph, planted, reference)
    found = tus.weight_matching(graph, reference, moved).permutation
    assert all(torch.equal(found[n], p) for n, p in tus.invert(planted).items())
