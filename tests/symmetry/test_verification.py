"""Verification: wrong claims are refused or pinned by name, right ones never, whatever else the outputs hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Net, discovered, named

import tu_symmetry as tus
from tu_symmetry.symmetry.groups import PermutationGroup, PermutationMember, ScaleGroup, ScaleTerm
from tu_symmetry.symmetry.running import precision
from tu_symmetry.symmetry.running.weights import random_state

FAST = {"mlp_relu", "mlp_mixed", "cnn_flatten", "GroupedConv", "CellLoop", "InterleavedRotary", "AffineAfterActivation",
        "MultiScaleLinearAttention"}  # fmt: skip
zoo = pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.name in FAST else [pytest.mark.slow]) for c in CASES]
)


def in_parts(graph: tus.SymmetryGraph, group: ScaleGroup, *parts: ScaleGroup) -> tus.SymmetryGraph:
    """Only parts of one scale group, each with factors of its own."""
    start = sum(g.size for g in graph.scales[: graph.scales.index(group)])
    terms: dict[str, tuple[ScaleTerm, ...]] = {}
    for k, member in ((k, member) for k, part in enumerate(parts) for member in part.members):
        for term in graph.scale_terms[member.parameter]:
            own = (term.index >= start) & (term.index < start + group.size) & (term.exponent == member.exponent)
            index = torch.where(own, term.index - start + k * group.size, -1)
            terms[member.parameter] = (*terms.get(member.parameter, ()), ScaleTerm(term.exponent, index))
    return replace(graph, permutations=(), scales=parts, normalizations=(), scale_terms=terms, verified=False)


def split(group: PermutationGroup) -> tuple[PermutationGroup, PermutationGroup]:
    """One symmetry, claimed as two: what makes its units, and what reads them."""
    made = tuple(m for m in group.members if m.axis == 0) or group.members[:1]
    read = tuple(m for m in group.members if m not in made) or made[1:]
    return replace(group, name="one", members=made or read), replace(group, name="two", members=read)


def only(graph: tus.SymmetryGraph, *groups: PermutationGroup) -> tus.SymmetryGraph:
    return replace(graph, permutations=groups, scales=(), normalizations=(), scale_terms={}, verified=False)


def refused(graph: tus.SymmetryGraph, model: nn.Module, inputs: Any) -> str:
    with pytest.raises(tus.SymmetryError, match="is no symmetry of this network") as info:
        tus.verify_symmetries(graph, model, inputs, on_failure="raise")
    assert not graph.verified
    return str(info.value)


# -- the subgroups that are tried ---------------------------------------------------------------------------------


def test_two_halves_of_a_symmetry_of_two_units_are_refused_by_name() -> None:
    model, x = nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 3)), torch.randn(3, 5)
    graph = tus.discover_symmetries(model, x).without("0")
    halves = graph.with_permutation("in", {"0.weight": 0, "0.bias": 0}).with_permutation("out", {"2.weight": 1})
    choices: tuple[Any, ...] = ("raise", "pin")  # groups given by hand are never pinned
    for on_failure in choices:
        with pytest.raises(tus.SymmetryError, match=r"'in' is no symmetry.*'out' is no symmetry.*given by hand"):
            tus.verify_symmetries(halves, model, x, on_failure=on_failure)
        assert not halves.verified and [g.name for g in halves.permutations] == ["in", "out"]


@zoo
def test_a_permutation_group_that_is_split_in_two_is_refused(case: Case) -> None:
    model, graph = discovered(case)
    for group in graph.permutations:
        if len(group.members) < 2:
            continue
        one, two = split(group)
        message = refused(only(graph, replace(one, parent=None), replace(two, parent=None)), model, case.inputs())
        assert "'one'" in message or "'two'" in message


@zoo
def test_a_scale_group_that_is_split_in_two_or_has_a_wrong_exponent_is_refused(case: Case) -> None:
    model, graph = discovered(case)
    for group in (g for g in graph.scales if len(g.members) > 1):
        half, first = len(group.members) // 2, group.members[0].parameter
        one = replace(group, name="one", members=group.members[:half])
        two = replace(group, name="two", members=group.members[half:])
        bent = in_parts(graph, group, group)
        bent.scale_terms[first] = tuple(replace(t, exponent=2 * t.exponent) for t in bent.scale_terms[first])
        for wrong in (in_parts(graph, group, one, two), bent):
            refused(wrong, model, case.inputs())


def test_blocks_of_a_nested_group_are_moved_apart_from_each_other() -> None:
    def products_pass(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return (h[:, :2] * h[:, 2:]).sum(-1)

    model, x = Net(products_pass, a=nn.Linear(5, 4)), torch.randn(3, 5)
    graph = tus.discover_symmetries(model, x)
    blocks = torch.tensor([[[0], [1]], [[2], [3]]])  # right only if both move alike
    members = tuple(PermutationMember(n, 0, blocks) for n in ("a.weight", "a.bias"))
    assert "'apart'" in refused(only(graph, PermutationGroup("apart", 2, members, None, (2,))), model, x)
    together = tuple(replace(m, index=torch.tensor([[0, 2], [1, 3]])) for m in members)
    tus.verify_symmetries(only(graph, PermutationGroup("alike", 2, together)), model, x, on_failure="raise")


def wide(units: int, layers: int = 3) -> tuple[nn.Module, Tensor]:
    """Layers of so many units each with a normalization, whose scales hold up to its epsilon."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.LazyLinear(units), nn.BatchNorm1d(units), nn.ReLU()]
    model = nn.Sequential(*parts, nn.LazyLinear(3)).eval()
    x = torch.randn(4, 5)
    model(x)
    return model, x


@pytest.mark.parametrize("units", [7, 8, 40])
def test_halves_of_symmetries_of_many_units_are_refused_by_name_however_many_they_are(units: int) -> None:
    model, x = wide(units)
    graph = tus.discover_symmetries(model, x)
    every = [half for g in graph.permutations for half in split(g)]
    named = [replace(half, name=f"{half.name}-{k}") for k, half in enumerate(every)]
    claim = only(graph, *named)
    with pytest.warns(tus.SymmetryWarning):
        tus.verify_symmetries(claim, model, x)
    assert not claim.permutations and set(claim.failed) == {half.name for half in named}


class TwoHeads(nn.Module):
    """Another way in training, through batch norm, which leaves nothing of a sample that comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6))
        self.a, self.b = (nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return (self.a(y), self.b(y)) if self.training else self.a(y) + self.b(y)


def test_one_sample_is_enough_for_batch_norm_in_training() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(1, 5)
    graph = tus.discover_symmetries(model, x)
    tus.verify_symmetries(graph, model, x, on_failure="raise")
    assert graph.training == "followed" and [g.size for g in graph.permutations] == [8, 6]


# -- what becomes of groups that fail -----------------------------------------------------------------------------


def chain(layers: int) -> tuple[nn.Module, Tensor]:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(4, 4), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(4, 3)), torch.randn(3, 4)


def planted(graph: tus.SymmetryGraph, wrong: set[str]) -> tus.SymmetryGraph:
    """The graph with some permutation groups that forget the bias."""
    groups = [
        replace(g, members=tuple(m for m in g.members if g.name not in wrong or not m.parameter.endswith("bias")))
        for g in graph.permutations
    ]
    return replace(graph, permutations=tuple(groups), verified=False)


@pytest.mark.parametrize("wrong", [{"8"}, {"0", "2"}, {"4", "6", "22"}, {str(2 * k) for k in range(12)}], ids=len)
def test_bisection_finds_exactly_the_wrong_groups(wrong: set[str]) -> None:
    model, x = chain(12)
    graph = planted(tus.discover_symmetries(model, x), wrong)
    right = {g.name for g in graph.permutations} - wrong
    with pytest.warns(tus.SymmetryWarning) as told:
        tus.verify_symmetries(graph, model, x)
    named = [name for name in wrong if f"permutation group {name!r}" in str(told[0].message)]
    assert len(told) == 1 and len(named) == min(len(wrong), 6)
    assert f"{len(wrong)} of the 24 symmetry groups" in str(told[0].message)
    assert graph.verified and graph.failed.keys() == wrong
    assert {g.name for g in graph.permutations} == right and len(graph.scales) == 12  # scales of these names hold
    report = " ".join(str(graph).split())
    assert all(f"{name}: failed verification: outputs changed by" in report for name in wrong)
    state = dict(model.state_dict())
    assert tus.certify(graph, state, tus.apply_permutation(graph, tus.random_permutation(graph), state)).holds
    with pytest.raises(tus.SymmetryError, match=r"was taken out of this graph.*failed verification"):
        tus.apply_permutation(graph, {min(wrong): torch.tensor([1, 0, 2, 3])}, state)


def test_a_scale_group_that_fails_is_taken_out_with_its_terms() -> None:
    model, x = chain(3)
    graph = tus.discover_symmetries(model, x)
    less = tuple(t for t in graph.scale_terms["2.weight"] if t.exponent < 0)  # of the group before
    claim = replace(graph, scale_terms=graph.scale_terms | {"2.weight": less}, verified=False)
    with pytest.warns(tus.SymmetryWarning, match="1 of the 6 symmetry groups .* scale group '2'"):
        claim.require_verified()
    assert [g.name for g in claim.scales] == ["0", "4"] and [g.name for g in claim.permutations] == ["0", "2", "4"]
    state = {n: t.double() for n, t in model.state_dict().items()}
    one = tus.random_scale(graph, generator=torch.Generator().manual_seed(0))
    expected, found = (tus.apply_scale(g, {n: one[n] for n in ("0", "4")}, state) for g in (graph, claim))
    assert all(torch.equal(expected[n], found[n]) for n in state)
    with pytest.raises(tus.SymmetryError, match="'2' was taken out of this graph"):
        tus.apply_scale(claim, one, state)


def test_children_of_a_parent_that_fails_stay_and_hold() -> None:
    _, graph, state = named("GroupedConv")
    (parent,) = (g for g in graph.permutations if graph.children(g.name))
    children = {g.name for g in graph.children(parent.name)}
    wrong = replace(parent, members=parent.members[:1])
    claim = replace(graph, permutations=tuple(wrong if g is parent else g for g in graph.permutations), verified=False)
    with pytest.warns(tus.SymmetryWarning, match=f"permutation group '{parent.name}'"):
        claim.require_verified()
    assert {g.name for g in claim.permutations} == children and all(g.parent is None for g in claim.permutations)
    assert tus.certify(claim, state, tus.apply_permutation(claim, tus.random_permutation(claim), state)).holds
    with pytest.raises(tus.SymmetryError, match="as the parent of one"):
        claim.with_permutation(parent.name, {"a.bias": 0})


# -- what is compared ---------------------------------------------------------------------------------------------


def outputs(of: Callable[[Tensor], object]) -> nn.Module:
    """A layer of hidden units, and some function of what is made of them."""
    return Net(lambda self, x: of(self.b(torch.relu(self.a(x)))), a=nn.Linear(5, 8), b=nn.Linear(8, 4))


FIRST = torch.tensor([True, False, False, False])
OUTPUTS: dict[str, Callable[[Tensor], object]] = {
    "a logit masked to -1e9": lambda y: y.masked_fill(FIRST, -1e9),
    "a large offset": lambda y: y + torch.tensor([-1e6, 0.0, 0.0, 0.0]),
    "minus infinity": lambda y: y.masked_fill(FIRST, -torch.inf),
    "infinite where the weights say so": lambda y: torch.log(torch.relu(y)),
    "zero by construction": lambda y: (y - y, y),
    "a sum of one": lambda y: (y.softmax(-1).sum(-1), y),
    "a mean of zero": lambda y: (F.layer_norm(y, (4,)).mean(-1), y),
    "NaN by construction": lambda y: (torch.full((2,), torch.nan, dtype=y.dtype) * y[0, 0], y),
    "integers beside numbers": lambda y: (y.argmax(-1), y > 0, y.topk(2, -1).indices, y),
    "integers alone": lambda y: y.argmax(-1),
    "in a dictionary": lambda y: {"logits": y.masked_fill(FIRST, -1e9), "classes": [y.argmax(-1)]},
    "complex": lambda y: torch.complex(y[:, :2], y[:, 2:]),
    "tiny": lambda y: y * 1e-30,
    "of very different sizes": lambda y: y * torch.tensor([1e12, 1.0, 1e-12, 1e-30]),
    "squashed": lambda y: torch.tanh(100 * y),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_right_groups_pass_and_wrong_ones_do_not_whatever_the_outputs(name: str) -> None:
    torch.manual_seed(0)
    model, x = outputs(OUTPUTS[name]), torch.randn(32, 5)
    graph = tus.discover_symmetries(model, x)
    tus.verify_symmetries(graph, model, x, on_failure="raise")
    (group,) = (g for g in graph.permutations if g.name == "a")
    less = only(graph, replace(group, members=tuple(m for m in group.members if m.parameter != "a.bias")))
    assert "'a'" in refused(less, model, x)


def test_an_error_in_one_entry_beside_large_ones_is_seen() -> None:
    """The second output alone sees the units' order; the first is a billion times as large."""

    def two_pass(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return torch.cat([1e12 * (1 + self.b(h).exp()), h @ self.c[:, None]], 1)

    model, x = Net(two_pass, a=nn.Linear(5, 2), b=nn.Linear(2, 1), c=nn.Parameter(torch.randn(2))), torch.randn(3, 5)
    graph = only(tus.discover_symmetries(model, x))
    wrong = graph.with_permutation("mine", {"a.weight": 0, "a.bias": 0, "b.weight": 1})  # c is left behind
    assert "'mine'" in refused(wrong, model, x)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (lambda y: y * torch.nan, "NaN for random weights|all NaN or infinite"),
        (lambda y: (1000 + y.abs()).mul(1000).exp(), "all NaN or infinite"),
        (lambda y: torch.zeros_like(y), "do not depend on its weights"),
    ],
)
def test_outputs_that_prove_nothing_are_refused(of: Callable[[Tensor], object], message: str) -> None:
    model, x = outputs(of), torch.randn(3, 5)
    graph = tus.discover_symmetries(model, x)
    if not list(graph.groups()):
        graph = graph.with_permutation("mine", {"a.weight": 0, "a.bias": 0, "b.weight": 1})
    with pytest.raises(tus.SymmetryError, match=message):
        tus.verify_symmetries(graph, model, x)
    assert not graph.verified


# -- networks that keep something, or write to it -----------------------------------------------------------------


def test_weights_that_are_kept_in_evaluation_mode_do_not_disturb() -> None:
    def keeps(self: Any, x: Tensor) -> Tensor:
        weight = self.a.weight / self.a.weight.norm()
        weight = weight if self.training else self.store.setdefault("weight", weight)
        return self.b(torch.relu(F.linear(x, weight, self.a.bias)))

    model, x = Net(keeps, a=nn.Linear(5, 8), b=nn.Linear(8, 3), store={}).eval(), torch.randn(3, 5)
    graph = tus.discover_symmetries(model, x)
    tus.verify_symmetries(graph, model, x, on_failure="raise")
    assert [g.name for g in graph.permutations] == ["a"] and not model.store
    model(x)  # with the history of a gradient, which no deep copy takes
    stuck = tus.discover_symmetries(model, x)  # what is kept is a constant: nothing is claimed beside it
    tus.verify_symmetries(stuck, model, x, on_failure="raise")
    assert not stuck.permutations


class Merged(nn.Linear):
    """An adapter that is merged into the weights in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(5, 8)
        self.added, self.merged = nn.Parameter(torch.randn(8, 5)), False

    def train(self, mode: bool = True) -> Merged:
        if mode == self.merged:
            self.weight.data += -self.added.data if mode else self.added.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.merged else self.weight + self.added, self.bias)


def test_weights_that_are_merged_in_evaluation_mode_are_neither_damaged_nor_misread() -> None:
    model = nn.Sequential(Merged(), nn.ReLU(), nn.Linear(8, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(tus.SymmetryError, match=r"changes '0.weight' when it is switched to evaluation mode"):
        tus.discover_symmetries(model, torch.randn(3, 5))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_weights_that_the_forward_pass_writes_to_are_written_to_on_copies() -> None:
    def clamps(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-1, 1)
        return self.b(torch.relu(self.a(x)))

    model, x = Net(clamps, a=nn.Linear(5, 8), b=nn.Linear(8, 3)), torch.randn(3, 5)
    graph = tus.discover_symmetries(model, x)
    tus.verify_symmetries(graph, model, x, on_failure="raise")
    assert [g.size for g in graph.permutations] == [8]
    state = random_state(model, torch.Generator().manual_seed(0))
    given = {n: t.clone() for n, t in state.items()}
    assert tus.certify(graph, state, tus.apply_permutation(graph, tus.random_permutation(graph), state)).holds
    assert all(torch.equal(state[n], given[n]) for n in state)


def test_buffers_decide_by_their_values_only_where_an_output_reads_them() -> None:
    def counts(self: Any, x: Tensor) -> Tensor:
        self.steps += 1
        return self.b(torch.relu(self.adjacency @ self.a(x)[:, self.chosen]))

    buffers = {"chosen": torch.tensor([0, 2, 4, 5]), "steps": torch.tensor(0), "never": torch.zeros(3).long()}
    buffers["adjacency"] = torch.eye(4).roll(1, 0).to_sparse()
    model, x = Net(counts, a=nn.Linear(5, 8), b=nn.Linear(4, 3), **buffers), torch.randn(4, 5)
    graph = tus.discover_symmetries(model, x)
    tus.verify_symmetries(graph, model, x, on_failure="raise")
    state = dict(model.state_dict())
    graph.check_state(state | {"steps": torch.tensor(7), "never": torch.ones(3, dtype=torch.long)})
    with pytest.raises(tus.SymmetryError, match=r"'adjacency'\] differs from the one that the symmetries were"):
        graph.check_state(state | {"adjacency": torch.eye(4).to_sparse()})
    other = state | {"chosen": torch.tensor([0, 2, 4, 6])}
    with pytest.raises(tus.SymmetryError, match=r"'chosen'\] differs from the one that the symmetries were discovered"):
        tus.apply_permutation(graph, tus.random_permutation(graph), other)
    stacks = [{n: torch.stack([t.to_dense(), o[n].to_dense()]) for n, t in state.items()} for o in (state, other)]
    assert graph.check_state(stacks[0]) == 1
    with pytest.raises(tus.SymmetryError, match="differs"):
        graph.check_state(stacks[1])


def test_a_product_without_double_precision_is_verified_in_the_best_that_it_has() -> None:
    def experts(self: Any, x: Tensor) -> Tensor:
        offsets = torch.tensor([3, 8], dtype=torch.int32)
        h = torch.relu(torch._grouped_mm(torch.relu(self.a(x)), self.up, offs=offsets))
        return self.c(torch._grouped_mm(h, self.down, offs=offsets))

    up, down = (nn.Parameter(torch.randn(2, *shape)) for shape in ((16, 8), (8, 8)))
    model = Net(experts, a=nn.Linear(8, 16), c=nn.Linear(8, 3), up=up, down=down)
    x = torch.randn(8, 8)
    graph = tus.discover_symmetries(model, x)  # recorded, where torch runs grouped products and cannot export them
    graph = graph.without(*{g.name for g in graph.groups()})
    right = graph.with_permutation("a", {"a.weight": 0, "a.bias": 0, "up": 1})
    state = dict(model.state_dict())
    assert tus.certify(right, state, tus.apply_permutation(right, tus.random_permutation(right), state)).holds
    assert "'mine'" in refused(graph.with_permutation("mine", {"a.weight": 0, "up": 1}), model, x)  # forgets the bias


# -- what cannot be run ---------------------------------------------------------------------------------------------


def test_a_tensor_that_would_fill_the_memory_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def durations(self: Any, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.length(hidden).exp().mean() * hidden.new_ones(2000).sum()

    model, x = Net(durations, first=nn.Linear(3, 8), length=nn.Linear(8, 1)), torch.randn(4, 3)
    graph = tus.discover_symmetries(model, x)
    monkeypatch.setattr(precision, "free_memory", lambda device: 4 * 8 * 1999)
    with pytest.raises(tus.SymmetryError, match=r"makes a tensor of shape \(2000,\).*were free"):
        tus.verify_symmetries(graph, model, x)
    monkeypatch.setattr(precision, "free_memory", lambda device: 4 * 8 * 2000)
    tus.verify_symmetries(graph, model, x, on_failure="raise")


def test_a_network_with_batch_norm_may_be_on_the_meta_device() -> None:
    model, x = wide(6)
    real = tus.discover_symmetries(model, x)
    graph = tus.discover_symmetries(copy.deepcopy(model).to("meta"), x.to("meta"))
    assert str(graph) == str(real)
    state = random_state(model, torch.Generator().manual_seed(0))
    assert tus.certify(graph, state, tus.apply_permutation(graph, tus.random_permutation(graph), state)).holds

    def indexed(self: Any, x: Tensor) -> Tensor:
        return self.head(x[:, self.index])

    lost = Net(indexed, index=torch.tensor([0, 2]), head=nn.Linear(2, 2)).to("meta")
    with pytest.raises(tus.SymmetryError, match=r"shape \(2,\) and dtype torch.int64.*no weight.*meta device"):
        tus.discover_symmetries(lost, x.to("meta"))


class _Turned(nn.Module):
    """Positions turn the hidden units by a table that is no weight; it has its own way into evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(3, 6), nn.Linear(6, 3)
        self.outside.weight = nn.Parameter(torch.randn(3, 6))
        self.register_buffer("table", torch.linspace(1, 2, 6), persistent=False)

    def train(self, mode: bool = True) -> _Turned:
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[:, None]
        return self.outside(self.inside(x).tanh() * (positions * self.table).cos())


@pytest.mark.parametrize("inputs", ["cpu", "meta"])
def test_weights_alone_may_be_on_the_meta_device(inputs: str) -> None:
    model, x = _Turned(), torch.randn(2, 5, 3)
    real = tus.discover_symmetries(model, x)
    light = copy.deepcopy(model)
    for part in light.modules():  # accelerate.init_empty_weights(include_buffers=False)
        for name, held in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(held.detach().to("meta")))
    graph = tus.discover_symmetries(light, x.to(inputs))
    assert str(graph) == str(real)
    assert all(p.is_meta for p in light.parameters())
    tus.verify_symmetries(graph, model, x, on_failure="raise")


def test_weights_on_the_meta_device_that_a_mode_writes_to_are_refused() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> Merging:
            if not mode and self.training:
                self.weight.data.mul_(2)
            return super().train(mode)

    with pytest.raises(tus.SymmetryError, match=r"changes its weights when it is switched to training or"):
        tus.discover_symmetries(Merging(3, 3, device="meta"), torch.randn(2, 3))
