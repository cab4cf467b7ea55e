"""Least mass over scales and linear maps, and networks that are aligned and merged over all symmetries together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import discovered, llama, named, outputs, relative, scale_only, small, vit, weights

import tu_symmetry as tus
from tu_symmetry.alignment import balanced, canonical_linear
from tu_symmetry.scaling.folding import folding_element
from tu_symmetry.symmetry import SignedPermutation, apply_linear, apply_signed, random_linear
from tu_symmetry.symmetry.running.weights import random_state

State = dict[str, Tensor]
ALL: Any = ("permutations", "signs", "scales", "rotations")
REFERENCES: Any = ["first", "medoid", "mean", "universe"]
# units that are read, or made, by fewer than they are: their mass has no minimum (see BalancedForm.degenerate)
DEGENERATE = ("EinsumAttention", "HeadsLast", "StackedExperts", "PooledHeads", "OverwrittenBias")
MIXED = [
    case for case in CASES if case.linears and case.name not in (*DEGENERATE, "PatchesOfPixels")
]  # one stream alone


def general(graph: tus.SymmetryGraph, generator: torch.Generator, condition: float = 100.0) -> dict[str, Tensor]:
    """Matrices of a condition number, orthogonal from left and right."""
    found = random_linear(graph, generator=generator, std=0.0)
    for group in (g for g in graph.linears if g.name in found):
        if group.subgroup == "complex":
            found[group.name] = found[group.name] * 10.0
            continue
        right = torch.linalg.qr(torch.randn(group.shape, generator=generator, dtype=torch.float64)).Q
        exponents = torch.linspace(0, 0.0 if group.orthogonal else 1.0, group.size, dtype=torch.float64)
        found[group.name] = found[group.name] * condition**exponents @ right
    return found


def moved(graph: tus.SymmetryGraph, state: State, seed: int, over: Sequence[str] = ALL) -> State:
    """A network that was moved by random elements of these symmetries, of matrices the general ones."""
    generator = torch.Generator().manual_seed(seed)
    if "scales" in over:
        state = tus.apply_scale(graph, scale_only(graph, seed), state)
    if "rotations" in over:
        given = general(graph, generator) if "scales" in over else random_linear(graph, generator=generator, std=0.0)
        state = apply_linear(graph, given, state)
    signs = tus.random_signs(graph, generator=generator) if "signs" in over else {}
    element = SignedPermutation(tus.random_permutation(graph, generator=generator), signs)
    return apply_signed(graph, element, state)


def apart(graph: tus.SymmetryGraph, a: State, b: State) -> float:
    """The distance of two networks, relative to the norm of the first."""
    names = [n for n in graph.shapes if n not in graph.buffers]
    squares = ((a[n] - b[n]).square().sum() for n in names)
    return float((sum(squares) / sum(a[n].square().sum() for n in names)) ** 0.5)


def found_again(build: Callable[[], tuple[nn.Module, Any]], seeds: range) -> int:
    model, inputs = build()
    graph = tus.discover_symmetries(model.double().eval(), inputs if inputs.dtype == torch.int64 else inputs.double())
    count = 0
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        drawn = {n: torch.randn(graph.shapes[n], generator=generator, dtype=torch.float64) for n in graph.shapes}
        tied = {n: names[0] for names in graph.aliases.values() for n in names}
        state = {n: drawn[tied[n]] if t.is_floating_point() else t for n, t in model.state_dict().items()}
        result = tus.align(graph, [state, moved(graph, state, seed)], over=ALL, certify=False)
        count += apart(graph, *result.states) < 1e-7
    return count


@pytest.mark.parametrize("build", [llama, vit])
def test_planted_elements_of_all_groups_are_found(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    """Heads in another order, units that turned, scales, and matrices of a condition number of 100."""
    assert found_again(build, range(2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("build", [llama, vit])
def test_planted_elements_of_all_groups_are_always_found(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    assert found_again(build, range(50)) == 50


def least_by_gradients(graph: tus.SymmetryGraph, state: State) -> float:
    """The least squared norm over scales and linear maps: by a general method, from the formulas of both actions."""
    logs = {g.name: torch.zeros(g.size, dtype=torch.float64, requires_grad=True) for g in graph.scales}
    general = [g for g in graph.linears if g.subgroup == "general"]
    generators = {g.name: torch.zeros(g.shape, dtype=torch.float64, requires_grad=True) for g in general}
    optimizer = torch.optim.LBFGS(
        [*logs.values(), *generators.values()], max_iter=2000, line_search_fn="strong_wolfe", tolerance_grad=1e-11
    )

    def mass() -> Tensor:
        flat = torch.cat([*logs.values(), torch.zeros(10**4, dtype=torch.float64)])
        count = sum(len(own) for own in logs.values())
        current = {n: state[n] for n in graph.shapes if n not in graph.buffers}
        for name, terms in graph.scale_terms.items():
            for term in terms if name in current else ():
                own = (term.index >= 0) & (term.index < count)
                current[name] = current[name] * torch.exp(torch.where(own, term.exponent * flat[term.index], 0.0))
        for group in general:
            for member in group.members:
                a = generators[group.name]
                a = torch.linalg.matrix_exp(a if member.exponent > 0 else -a.mT).reshape(-1, group.size, group.size)
                assert member.within is None
                rows = current[member.parameter].movedim(member.axis, -1)
                index = member.index.reshape(len(a), group.size, -1)
                out = rows.clone()
                out[..., index] = torch.einsum("bjk,...bkc->...bjc", a, rows[..., index])
                current[member.parameter] = out.movedim(-1, member.axis)
        return torch.stack([t.square().sum() for t in current.values()]).sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = mass()
        value.backward()
        return value

    optimizer.step(closure)
    return float(mass())


@pytest.mark.parametrize("name", ["transformer_separate", "grouped_query", "EncoderLayer"])
def test_the_balanced_form_has_the_least_mass(name: str) -> None:
    _, graph, state = named(name)
    form = balanced(graph, state, certify=False)
    assert form.converged and not form.degenerate
    assert form.mass_after == pytest.approx(least_by_gradients(graph, state), rel=1e-7)
    assert form.mass_after < 0.95 * form.mass_before
    assert tus.representation_cost(graph, form.state) == pytest.approx(form.mass_after, rel=1e-9)


@pytest.mark.parametrize("case", MIXED, ids=lambda c: c.name)
def test_laws_of_the_balanced_form(case: Case) -> None:
    """The function stays; what differs by scales and matrices differs by rotations, which singular vectors tell."""
    model, graph, state = weights(case)
    form = balanced(graph, state)
    assert relative(outputs(model, state, case.inputs()), outputs(model, form.state, case.inputs())) < 1e-4
    again = apply_linear(graph, form.maps, tus.apply_scale(graph, form.log_scale, state))
    assert all(torch.equal(again[n], form.state[n]) for n in state)
    other = balanced(graph, apply_linear(graph, general(graph, torch.Generator().manual_seed(1)), form.state))
    assert other.mass_after == pytest.approx(form.mass_after, rel=1e-9)
    result = tus.alignment.rotation_matching(graph, form.state, other.state)
    assert result.distance_after < 1e-6 * form.mass_after**0.5
    twice = balanced(graph, form.state)
    assert apart(graph, form.state, twice.state) < 1e-8

    mixed = apply_linear(graph, random_linear(graph, generator=torch.Generator().manual_seed(2)), state)
    one, two = (apply_linear(graph, canonical_linear(graph, s), s) for s in (state, mixed))
    for name in one:
        torch.testing.assert_close(one[name].abs(), two[name].abs(), rtol=1e-6, atol=1e-7)
    turned = (tus.apply_signs(graph, tus.scaling.canonical_signs(graph, s), s) for s in (one, two))
    assert apart(graph, *turned) < 1e-7


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, as PEFT makes it."""

    def __init__(self, rank: int = 3) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(7, 8), nn.Linear(8, 3)
        self.lora_a, self.lora_b = nn.Linear(7, rank, bias=False), nn.Linear(rank, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.gelu(self.base(x) + 2.0 * self.lora_b(self.lora_a(x))))
        return out


def adapters() -> tuple[nn.Module, tus.SymmetryGraph, State, State]:
    """One base with two adapters of the same product, whose factors differ by a matrix."""
    torch.manual_seed(0)
    model = Adapted().double()
    graph = tus.discover_symmetries(model, torch.randn(2, 7, dtype=torch.float64))
    (group,) = graph.linears
    state = model.state_dict()
    mixed = apply_linear(graph, general(graph, torch.Generator().manual_seed(4)), state)
    assert group.size == 3 and apart(graph, state, mixed) > 1
    product = state["lora_b.weight"] @ state["lora_a.weight"]
    torch.testing.assert_close(mixed["lora_b.weight"] @ mixed["lora_a.weight"], product)
    return model, graph, state, mixed


def test_adapters_of_one_product_become_equal() -> None:
    """Rotations alone do not bring factors together, and the mean of factors is no mean of products."""
    model, graph, state, mixed = adapters()
    only = tus.align(graph, [state, mixed], over=("permutations", "rotations"))
    both = tus.align(graph, [state, mixed], over=("permutations", "scales", "rotations"))
    assert apart(graph, *only.states) > 0.1
    assert apart(graph, *both.states) < 1e-9 and all(c.holds for c in both.certificates)
    x = torch.randn(5, 7, dtype=torch.float64)
    merged = tus.merge(graph, [state, mixed], model, over=("permutations", "scales", "rotations"))
    naive = tus.mean_state([state, mixed])
    assert relative(outputs(model, state, (x,)), outputs(model, merged.state, (x,))) < 1e-9
    assert relative(outputs(model, state, (x,)), outputs(model, naive, (x,))) > 1e-2


def test_what_has_no_least_mass_stays_and_is_named() -> None:
    _, graph, state, mixed = adapters()
    state["lora_b.weight"] = torch.zeros(8, 3, dtype=torch.float64)  # as adapters begin
    form = balanced(graph, state)
    assert {name: lost.tolist() for name, lost in form.degenerate.items()} == {graph.linears[0].name: [0]}
    assert apart(graph, state, form.state) < 1e-12 and form.certificate is not None  # moved by the identity
    assert torch.equal(canonical_linear(graph, state)[graph.linears[0].name], torch.eye(3, dtype=torch.float64))
    assert apart(graph, balanced(graph, mixed).state, mixed) > 0.1
    stack = {n: torch.stack([t, t]) for n, t in state.items()}
    for call in (balanced, canonical_linear):
        with pytest.raises(ValueError, match="call it for each"):
            call(graph, stack)  # type: ignore[operator]


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("over", [("permutations", "scales"), ALL], ids=len)
def test_networks_are_aligned_over_scales(reference: Any, over: Any) -> None:
    """Moved copies with noise come together; what is told of them moves them again, as public functions do."""
    _, graph, state = named("transformer_separate")
    generator = torch.Generator().manual_seed(5)
    near = [
        {n: t + 0.01 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in state.items()}
        for _ in "abc"
    ]
    given = [near[0], *(moved(graph, one, k, over) for k, one in enumerate(near[1:]))]
    plain = tus.align(graph, given, reference=reference)
    result = tus.align(graph, given, reference=reference, over=over)
    assert sum(result.distances_after) < 0.2 * sum(plain.distances_after)
    assert len(result.certificates) == 3 and len(result.log_scales) == 3
    parts = zip(given, result.states, result.log_scales, result.balances, result.permutations, strict=True)
    for k, (one, there, log_scale, balance, permutation) in enumerate(parts):
        again = apply_linear(graph, balance, tus.apply_scale(graph, log_scale, one))
        before = again
        again = apply_signed(graph, SignedPermutation(permutation, result.signs[k]), again)
        again = apply_linear(graph, result.maps[k], again)
        assert all(torch.equal(again[n], there[n]) for n in there)
        assert bool(balance) == ("rotations" in over)
        if reference == "first":
            form = balanced(graph, tus.fold_norms(graph, one)) if balance else tus.canonicalize(graph, one)
            before = tus.apply_signs(graph, folding_element(graph, one)[1], before) if balance else before
            assert apart(graph, form.state, before) < 1e-9
            norm = tus.align(graph, [result.states[0], before]).distances_before[1]
            assert result.distances_before[k] == pytest.approx(norm)
            assert result.distances_after[k] <= result.distances_before[k] * (1 + 1e-9)
    stack = {n: torch.stack([s[n] for s in given]) for n in state}
    stacked = tus.align(graph, stack, reference=reference, over=over, certify=False).states
    for k, there in enumerate(result.states):  # sums of stacks are added in another order
        assert apart(graph, {n: t[k] for n, t in stacked.items()}, there) < 1e-9


def test_norms_are_folded_before_streams_are_rotated() -> None:
    """Networks as they are trained, whose gains differ: a rotated copy, of which some are negative, is met again."""
    model, tokens = llama()
    graph = tus.discover_symmetries(model.double().eval(), tokens)
    generator = torch.Generator().manual_seed(3)
    state = {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in model.state_dict().items()}
    folded = tus.fold_norms(graph, state)
    turned = apply_linear(graph, random_linear(graph, generator=generator, std=0.0, folded=True), folded)
    other = tus.apply_signs(graph, tus.random_signs(graph, generator=generator), turned)
    over: Any = ("permutations", "signs", "rotations")
    result = tus.align(graph, [state, other], over=over)
    assert apart(graph, *result.states) < 1e-7 and all(c.holds for c in result.certificates)
    assert apart(graph, result.states[0], folded) < 1e-12 and apart(graph, state, folded) > 0.1
    for reference in ("medoid", "mean"):
        assert apart(graph, *tus.align(graph, [state, other], over=over, reference=reference).states) < 1e-7


def test_a_given_reference_goes_to_its_least_mass_too() -> None:
    graph, state = small(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3))
    scales: Any = ("permutations", "scales")
    reference, other = (moved(graph, state, k, scales) for k in (1, 2))
    result = tus.align(graph, [other], reference=reference, over=scales)
    assert apart(graph, tus.canonicalize(graph, reference).state, result.states[0]) < 1e-7
    assert result.distances_after[0] < 1e-6 < 1e-3 < result.distances_before[0]
    with pytest.raises(ValueError, match="are matched by weights"):
        tus.align(graph, [state, other], over=scales, match_on="activations")


@pytest.mark.parametrize("over", [("permutations", "scales"), ("permutations", "signs", "scales"), ALL], ids=len)
def test_moved_copies_merge_into_the_same_function(over: Any) -> None:
    for name in ("transformer_separate", "mlp_mixed"):
        case = next(c for c in CASES if c.name == name)
        model, graph = discovered(case)
        state = random_state(model, torch.Generator().manual_seed(5))
        copies = [state, *(moved(graph, state, k, over) for k in range(2))]
        result = tus.merge(graph, copies, model, over=over, weights=[0.2, 0.5, 0.3])
        aligned = tus.align(graph, copies, over=over)
        assert apart(graph, aligned.states[0], result.state) < 1e-7
        first = result.moves[0]
        assert first.log_scale and result.over == over and not first.maps
        tus.symmetry.require_certificate(tus.certify(graph, aligned.states[0], result.state), "the merged network")
        one = tus.merge(graph, copies, model, over=over, weights=[0, 1, 0])
        assert all(torch.equal(t, aligned.states[1][n]) for n, t in one.state.items())


def test_unknown_words_are_named() -> None:
    graph, state = small(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    for call in (
        lambda over: tus.align(graph, [state, state], over=over),
        lambda over: tus.merge(graph, [state, state], model, over=over),
        lambda over: tus.callbacks.Rebasin(over=over),
    ):
        for over, message in (
            ("permutation", "'scale' is none of them"),
            (("permutations", "scale"), "'scale' is none"),
        ):
            with pytest.raises(ValueError, match=message if isinstance(over, tuple) else "as over="):
                call(over)
