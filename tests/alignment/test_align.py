"""Matching finds planted permutations, and its numbers are what they say."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from cases import CASES, Case
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from zoo import discovered, planted, some_cases, tied_resnet

import tu_symmetry as tus
from tu_symmetry.alignment.activations import Similarity
from tu_symmetry.alignment.barrier import interpolate, mean_loss
from tu_symmetry.alignment.consensus import Reference
from tu_symmetry.alignment.matching import Solver, inner_product, weight_distance
from tu_symmetry.symmetry.running.weights import random_state


@some_cases
def test_planted_permutations_are_found_in_every_architecture(case: Case) -> None:
    graph, reference, state = planted(case, 11)
    found = tus.weight_matching(graph, reference, state)
    assert found.converged
    assert found.distance_after <= 1e-7 * found.distance_before
    moved = tus.apply_permutation(graph, found.permutation, state)
    assert found.objective == pytest.approx(inner_product(graph, reference, moved), rel=1e-12)
    assert found.distance_after == pytest.approx(weight_distance(graph, reference, moved), abs=1e-12)


@some_cases
def test_descent_never_loses(case: Case) -> None:
    """From the identity, and from the planted solution, where it has to stay."""
    graph, reference, state = planted(case, 12, noise=0.3)
    found = tus.weight_matching(graph, reference, state, solver="descent")
    assert found.converged
    assert found.objective >= inner_product(graph, reference, state) - 1e-9
    copy = planted(case, 12)[2]
    solution = tus.weight_matching(graph, reference, copy)
    again = tus.weight_matching(graph, reference, copy, solver="descent", init=solution.permutation)
    assert again.permutation.keys() == solution.permutation.keys()
    assert all(torch.equal(again.permutation[n], p) for n, p in solution.permutation.items())


def perceptron(widths: list[int], seed: int) -> tuple[tus.SymmetryGraph, dict[str, Tensor], dict[str, Tensor]]:
    """Two networks that have a part in common."""
    layers = [m for n, out in itertools.pairwise([20, *widths]) for m in (nn.Linear(n, out), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 5)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 20, dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    a, b = random_state(model, generator), random_state(model, generator)
    return graph, a, {n: b[n] + 0.3 * a[n] for n in a}


def gram_of(
    graph: tus.SymmetryGraph, a: dict[str, Tensor], b: dict[str, Tensor], name: str, p: dict[str, Tensor]
) -> Tensor:
    """What speaks for pairing the units of one group, the others in their order: by permuting whole networks."""
    (group,) = (g for g in graph.permutations if g.name == name)
    moved = tus.apply_permutation(graph, {**p, name: torch.arange(group.size)}, b)
    rows = [[s[m.parameter].movedim(m.axis, 0).flatten(1) if s[m.parameter].ndim > 1 else s[m.parameter][:, None]
             for s in (a, moved)] for m in group.members]  # fmt: skip
    return sum(x @ y.T for x, y in rows)  # type: ignore[return-value]


def peers_loop(
    graph: tus.SymmetryGraph, a: dict[str, Tensor], b: dict[str, Tensor], generator: torch.Generator | None
) -> dict[str, Tensor]:
    """As git-re-basin-pytorch has it: sweeps over the groups in random order (or ours), from the identity."""
    names = [g.name for g in graph.permutations]
    p = {g.name: torch.arange(g.size) for g in graph.permutations}
    while True:
        progress = False
        order = range(len(names)) if generator is None else torch.randperm(len(names), generator=generator).tolist()
        for name in (names[k] for k in order):
            gram = gram_of(graph, a, b, name, p)
            found = torch.tensor(linear_sum_assignment(gram.numpy(), maximize=True)[1])
            rows = torch.arange(len(gram))
            progress |= bool(gram[rows, found].sum() > gram[rows, p[name]].sum() + 1e-12)
            p[name] = found
        if not progress:
            return p


def test_descent_ends_where_no_group_gains_and_not_below_a_peer() -> None:
    """Not below one in the same order of groups, and hardly ever below one in a random order."""
    below, compared = 0, 0
    for widths, seed in itertools.product([[12], [12, 12], [24, 12, 24], [16, 16, 16, 16]], range(3)):
        graph, a, b = perceptron(widths, seed)
        found = tus.weight_matching(graph, a, b, solver="descent")
        for name, p in found.permutation.items():
            gram, rows = gram_of(graph, a, b, name, found.permutation), torch.arange(len(p))
            best = torch.from_numpy(linear_sum_assignment(gram.numpy(), maximize=True)[1])
            assert float(gram[rows, p].sum()) >= float(gram[rows, best].sum()) - 1e-6 * float(gram.abs().sum())
        orders = [None, *(torch.Generator().manual_seed(s) for s in range(5))]
        peers = [tus.apply_permutation(graph, peers_loop(graph, a, b, order), b) for order in orders]
        less = [found.objective < inner_product(graph, a, peer) - 1e-6 * abs(found.objective) for peer in peers]
        assert not less[0]
        below, compared = below + sum(less), compared + len(less) - 1
    assert below <= 0.05 * compared


def brute_force(graph: tus.SymmetryGraph, reference: dict[str, Tensor], state: dict[str, Tensor]) -> float:
    """The largest objective over all permutations of small plain groups."""
    choices = [[torch.tensor(p) for p in itertools.permutations(range(g.size))] for g in graph.permutations]
    names = [g.name for g in graph.permutations]
    return max(
        inner_product(graph, reference, tus.apply_permutation(graph, dict(zip(names, element, strict=True)), state))
        for element in itertools.product(*choices)
    )


def test_frank_wolfe_reaches_the_brute_force_optimum() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    graph = tus.discover_symmetries(model, torch.randn(2, 3, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    reached = 0
    for _ in range(5):
        a, b = random_state(model, generator), random_state(model, generator)
        best = brute_force(graph, a, b)
        found = tus.weight_matching(graph, a, b).objective
        assert found <= best + 1e-9
        reached += found >= best - 1e-9
    assert reached >= 4


def recovered(plants: int, noise: float, solver: str) -> int:
    model = tied_resnet(16, 3).double()
    graph = tus.discover_symmetries(model, torch.randn(1, 3, 8, 8, dtype=torch.float64))
    hits = 0
    for seed in range(plants):
        generator = torch.Generator().manual_seed(seed)
        reference = {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in model.state_dict().items()}
        p = tus.random_permutation(graph, generator=generator)
        noisy = {n: t + noise * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in reference.items()}
        found = tus.weight_matching(graph, reference, tus.apply_permutation(graph, p, noisy), solver=solver)  # type: ignore[arg-type]
        hits += all(torch.equal(found.permutation[n], q) for n, q in tus.invert(p).items())
    return hits


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_frank_wolfe_recovers_residual_streams(noise: float) -> None:
    assert recovered(4, noise, "frank_wolfe") == 4


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_frank_wolfe_recovers_fifty_of_fifty(noise: float) -> None:
    assert recovered(50, noise, "frank_wolfe") == 50


@pytest.mark.parametrize("reference", ["first", "universe"])
@pytest.mark.parametrize("stacked", [False, True])
def test_aligning_many_networks_recovers_all(reference: str, stacked: bool) -> None:
    case = next(c for c in CASES if c.name == "resnet_batchnorm")
    model, graph = discovered(case)
    generator = torch.Generator().manual_seed(2)
    base = random_state(model, generator)
    states = [tus.apply_permutation(graph, tus.random_permutation(graph, generator=generator), base) for _ in range(4)]
    given = {n: torch.stack([s[n] for s in states]) for n in base} if stacked else states
    found = tus.align(graph, given, reference=reference)  # type: ignore[arg-type]
    assert len(found.transpositions) == 4
    assert max(found.distances_after) <= 1e-6 * max(found.distances_before)
    if found.reference is not None:
        assert found.transpositions[found.reference] == 0
    aligned = [{n: t[k] for n, t in found.states.items()} for k in range(4)] if stacked else found.states
    for state in aligned[1:]:
        for name in base:
            torch.testing.assert_close(state[name], aligned[0][name])


def independent(count: int) -> tuple[tus.SymmetryGraph, list[dict[str, Tensor]]]:
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    generator = torch.Generator().manual_seed(2)
    graph = tus.discover_symmetries(model, torch.zeros(1, 4, dtype=torch.float64))
    return graph, [random_state(model, generator) for _ in range(count)]


def test_the_universe_climbs_the_sum_of_all_pairs() -> None:
    """Beyond matching each network to the mean of those before it, and no network can improve."""
    graph, states = independent(8)
    running = states[:1]
    for state in states[1:]:
        permutation = tus.weight_matching(graph, tus.mean_state(running), state).permutation
        running.append(tus.apply_permutation(graph, permutation, state))
    universe = tus.align(graph, states, reference="universe").states
    values = [sum(inner_product(graph, a, b) for a, b in itertools.combinations(s, 2)) for s in (running, universe)]
    assert values[1] > 1.01 * values[0] and all(torch.equal(universe[0][n], t) for n, t in states[0].items())
    for k, own in enumerate(universe):
        others = tus.mean_state([u for j, u in enumerate(universe) if j != k])
        assert tus.transposition_count(tus.weight_matching(graph, others, own, solver="descent").permutation) == 0


def test_barriers_are_exact_on_a_quadratic() -> None:
    """For a linear model and squared error the excess over the chord is -a (1 - a) |difference of outputs|^2."""
    model = nn.Linear(3, 2).double()
    generator = torch.Generator().manual_seed(0)
    a, b = random_state(model, generator), random_state(model, generator)
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 2, dtype=torch.float64)

    def concave(out: Tensor, target: Tensor) -> Tensor:
        return -(out - target).square().sum(1).mean()

    found = tus.loss_barrier(model, a, b, [(x[:4], y[:4]), (x[4:], y[4:])], concave, points=5)
    difference = x @ (a["weight"] - b["weight"]).T + a["bias"] - b["bias"]
    assert found.barrier == pytest.approx(float(0.25 * difference.square().sum(1).mean()), rel=1e-12)
    assert tus.loss_barrier(model, a, b, [(x, y)], lambda o, t: (o - t).square().mean()).barrier == 0.0
    middle = interpolate(a, b, 0.5)
    expected = float(concave(x @ middle["weight"].T + middle["bias"], y))
    assert mean_loss(model, tus.mean_state([a, b]), [(x, y)], concave) == pytest.approx(expected)


@pytest.mark.parametrize("solver", get_args(Solver))
@pytest.mark.parametrize("reference", [*get_args(Reference), "given"])
def test_networks_never_end_farther_apart_than_they_were(reference: str, solver: Solver) -> None:
    """Those that lie near each other already: the relaxation, and the mean of the first few, move them away."""
    torch.manual_seed(0)
    widths = [nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)]
    plain = nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in widths))[:-1]
    graph = tus.discover_symmetries(plain, torch.zeros(2, 6))
    base, moved = plain.state_dict(), 0
    for noise in (0.3, 1.0, 1.5, 2.0):
        for _ in range(3):
            states = [{n: t + noise * t.std() * torch.randn_like(t) for n, t in base.items()} for _ in range(5)]
            target: Any = states.pop(0) if reference == "given" else reference
            found = tus.align(graph, states, reference=target, solver=solver, certify=False)
            for before, after in zip(found.distances_before, found.distances_after, strict=True):
                assert after <= before * (1 + 1e-6)
            if reference in ("mean", "universe"):
                pairs = (itertools.combinations(networks, 2) for networks in (states, found.states))
                before, after = (sum(weight_distance(graph, a, b) ** 2 for a, b in p) for p in pairs)
                assert after <= before * (1 + 1e-6)
            moved += sum(found.transpositions)
    assert moved > 50


@pytest.mark.parametrize("similarity", get_args(Similarity))
def test_matched_activations_are_never_less_alike_than_they_were(similarity: Similarity) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4)).double()
    x = torch.randn(50, 6, dtype=torch.float64)
    graph, base = tus.discover_symmetries(model, x[:2]), model.state_dict()

    def hidden(state: dict[str, Tensor]) -> list[Tensor]:
        model.load_state_dict(state)
        found = [model[:2](x).detach(), model[:4](x).detach()]
        if similarity == "product":
            return found
        return [torch.nan_to_num((a - a.mean(0)) / (a - a.mean(0)).norm(dim=0)) for a in found]

    for noise in (0.1, 1.0, 2.0):
        first, second = ({n: t + noise * t.std() * torch.randn_like(t) for n, t in base.items()} for _ in range(2))
        found = tus.activation_matching(graph, model, first, second, [x], similarity=similarity)
        moved = tus.apply_permutation(graph, found.permutation, second)
        alike = [
            sum(float((a * b).sum()) for a, b in zip(hidden(first), hidden(state), strict=True))
            for state in (second, moved)
        ]
        assert alike[1] >= alike[0] - 1e-9 and found.objective == pytest.approx(alike[1])
