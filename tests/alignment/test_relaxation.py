"""Assignment over wreath products, and the relaxation's numbers against dense matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from cases import CASES
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from zoo import discovered

import tu_symmetry as tus
from tu_symmetry.alignment.assignment import assign, assign_family, family_value
from tu_symmetry.alignment.gram import Family, each_working, families
from tu_symmetry.alignment.matching import inner_product
from tu_symmetry.alignment.products import WeightSimilarities
from tu_symmetry.alignment.relaxation import RelaxedPair
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
    """Differences of the objective between elements of one family are differences of the similarities they pair.

    Others move between the calls: not at all, a few units, all, and back.
    """
    model, graph = case_of(name)
    generator = torch.Generator().manual_seed(1)
    a, b = random_state(model, generator), random_state(model, generator)
    identity = identity_permutation(graph)
    swap = {n: torch.cat([p[..., :2].flip(-1), p[..., 2:]], -1) for n, p in identity.items()}
    similarities = WeightSimilarities.of(graph, a, b)
    for base in (identity, swap, swap, tus.random_permutation(graph, generator=generator), identity):
        for family in (f for f in families(graph) if not f.coupled):
            values = []
            grams = similarities.grams(family, base)
            for _ in range(2):
                draw = tus.random_permutation(graph, generator=generator)
                element = {**base, **{n: draw[n] for n in family.names}}
                objective = inner_product(graph, a, tus.apply_permutation(graph, element, b))
                values.append(objective - family_value(family, grams, element)[0])
            assert values[0] == pytest.approx(values[1], abs=1e-9), family.root.name


@pytest.mark.parametrize("name", ["mlp_relu", "cnn_flatten", "DenseConcat", "resnet_batchnorm", "CalledTwice"])
def test_the_relaxation_is_the_dense_one(name: str) -> None:
    """Gradients and best steps are those of the objective with matrices on every axis, by automatic differentiation."""
    model, graph = case_of(name)
    generator = torch.Generator().manual_seed(10)
    reference, state = (dict(each_working(graph, random_state(model, generator))) for _ in range(2))
    similarities = WeightSimilarities(graph, reference, state)
    plan, pair = similarities.plan, RelaxedPair(similarities.products)

    def objective(matrices: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for tensor, moves in plan.moves.items():
            moved = state[tensor]
            for axis, parts in moves.items():
                dense = torch.eye(moved.shape[axis], dtype=torch.float64)
                for group, index in parts:
                    for copy in index.T:
                        place = torch.meshgrid(copy, copy, indexing="ij")
                        dense = dense.index_put(place, matrices[group])
                moved = torch.tensordot(dense, moved, dims=([1], [axis])).movedim(0, axis)
            total = total + (reference[tensor] * moved).sum()
        return total

    for step in range(3):
        matrices = {g: pair.matrix(g).requires_grad_() for g in plan.sizes}
        gradients = torch.autograd.grad(objective(matrices), list(matrices.values()), allow_unused=True)
        for (group, matrix), gradient in zip(matrices.items(), gradients, strict=True):
            wanted = torch.zeros_like(matrix) if gradient is None else gradient
            torch.testing.assert_close(sum(pair.similarities[group]), wanted)
        _, sources, gap, scale = pair.vertex()
        if gap <= 1e-9 * scale:  # it stands on the best vertex, and rounding says on which side
            assert step
            break
        ratio = pair.advance(sources, gap)
        ends = {g: torch.eye(len(source), dtype=torch.float64)[source] for g, source in sources.items()}
        values = [
            float(objective({g: torch.lerp(m.detach(), ends[g], trial) for g, m in matrices.items()}))
            for trial in (ratio, *torch.linspace(0, 1, 21).tolist())
        ]
        assert values[0] >= max(values) - 1e-9 * abs(values[0])
        for group, matrix in matrices.items():
            torch.testing.assert_close(pair.matrix(group), torch.lerp(matrix.detach(), ends[group], ratio))


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
