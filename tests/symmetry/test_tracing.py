"""What a trace must not miss: branches, random numbers, units selected by position, contexts; and groups by hand."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import judge
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from zoo import Net

import tu_symmetry as tus
from tu_symmetry.symmetry import source
from tu_symmetry.symmetry.operators import RULES
from tu_symmetry.symmetry.sizes import Following
from tu_symmetry.symmetry.tracing import Trace, trace

relu = torch.relu


def sizes(graph: tus.SymmetryGraph) -> dict[str, int]:
    return {g.name: g.size for g in graph.permutations}


def verified(model: nn.Module, x: Any, **options: Any) -> tus.SymmetryGraph:
    """The symmetries of a network, none of which verification pins, and none of whose operators lacks a rule."""
    graph = tus.discover_symmetries(model, x, **options)
    tus.verify_symmetries(graph, model, x, on_failure="raise")
    assert graph.unknown_operators == ()
    return graph


def plain() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(3, 4)


# -- branches ---------------------------------------------------------------------------------------------------------

WAYS = {"a": (4, 8), "b": (8, 6), "c": (6, 3), "d": (8, 3)}


def branching(m: Any, x: Tensor) -> Tensor:
    h = relu(m.a(x))
    if h.sum() > 0:
        return m.c(relu(m.b(h)))
    return m.d(h)


def test_a_branch_is_refused_by_its_line() -> None:
    model, x = Net(branching, **WAYS), torch.randn(2, 4)
    with pytest.raises(tus.SymmetryError, match=r"test_tracing.py:\d+ in branching: if h.sum\(\) > 0:"):
        tus.discover_symmetries(model, x)
    with pytest.raises(ValueError, match="branches must be"):
        tus.discover_symmetries(model, x, branches="guess")  # type: ignore[arg-type]


def test_the_way_of_the_example_is_recorded_on_request() -> None:
    model, x = Net(branching, **WAYS), torch.rand(2, 4)
    with torch.no_grad():
        model.a.bias.fill_(1.0)
    graph = verified(model, x, branches="record")
    assert sizes(graph) == {"b": 6}  # the units of a could meet d, on the other way
    assert graph.unreached == ("d.weight", "d.bias")
    assert graph.branch is not None and "if h.sum() > 0:" in graph.branch
    assert graph.branch in " ".join(str(graph).split())
    assert {p.parameter for p in graph.pinned if "not used" in p.reason} == {"d.weight", "d.bias"}
    assert [g.size for g in graph.scales] == [6]


def counting(m: Any, x: Tensor) -> Tensor:
    """The number of repetitions is read off the data."""
    h = relu(m.a(x))
    for _ in range(int((h > 0).sum().item()) % 3):
        h = 2 * h
    return m.d(h)


def masked(m: Any, x: Tensor) -> Tensor:
    h = relu(m.a(x))
    return m.d(h[h.sum(1) > 0.5])


def toggled(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
    return m.d(relu(h)) if x.sum() > 0 else m.d(h)


def test_programs_that_read_values_without_a_way_of_their_own() -> None:
    graph = verified(Net(counting, **WAYS), torch.randn(3, 4), branches="record")
    assert sizes(graph) == {"a": 8}
    assert sum(g.size for g in graph.scales) == 8  # which units are positive is not changed by positive factors
    graph = verified(Net(masked, **WAYS), torch.randn(9, 4))  # a size that only values tell is no branch
    assert graph.branch is None and sizes(graph) == {"a": 8} and not graph.scales
    graph = verified(Net(toggled, **WAYS), torch.rand(3, 4), branches="record")  # gradients turned off are no operator
    assert sizes(graph) == {"a": 8}


@pytest.mark.parametrize(
    "choose", [lambda h, m: h[m], lambda h, m: m.nonzero(), lambda h, m: h.masked_select(m[:, None])]
)
def test_a_branch_on_a_size_that_only_values_tell_is_one(choose: Callable[[Tensor, Tensor], Tensor]) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        return m.d(h) if len(choose(h, h.sum(1) > 0.5)) > 2 else m.d(h.flip(1))

    model, x = Net(forward, **WAYS), torch.randn(9, 4)
    with pytest.raises(tus.SymmetryError, match="branches on the values"):
        tus.discover_symmetries(model, x)
    assert tus.discover_symmetries(model, x, branches="record").branch


def conditional(m: Any, x: Tensor) -> Tensor:
    h = relu(m.a(x))
    return torch.cond(h.sum() > 0, lambda h: m.c(relu(m.b(h))), lambda h: m.d(h), (h,))


def in_context(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        h = relu(m.b(relu(m.a(x))))
    return m.c(h)


def test_both_ways_of_a_cond_and_what_stands_in_a_context_count() -> None:
    graph = verified(Net(conditional, **WAYS), torch.randn(2, 4))
    assert sizes(graph) == {"a": 8, "b": 6}
    assert {m.parameter for m in graph["a"].members} == {"a.weight", "a.bias", "b.weight", "d.weight"}
    assert sizes(verified(Net(in_context, **WAYS), torch.randn(2, 4))) == {"a": 8, "b": 6}


# -- what is copied and refused ---------------------------------------------------------------------------------------


def test_a_forward_that_reads_the_original_is_refused() -> None:
    """A function on an instance is not copied with it: all axes would be pinned, as of weights that nothing reads."""
    net, x = plain()
    layer = net[0]
    for held in (lambda z: F.linear(z, layer.weight), functools.partial(F.linear, weight=layer.weight)):
        layer.forward = held  # type: ignore[assignment]
        with pytest.raises(tus.SymmetryError, match=r"0\.forward was set on the instance of Linear"):
            tus.discover_symmetries(net, x)
    layer.forward = types.MethodType(lambda self, z: F.linear(z, self.weight, self.bias), layer)  # type: ignore
    assert {m.parameter for m in verified(net, x)["0"].members} == {"0.weight", "0.bias", "2.weight"}


def test_compiled_networks_are_traced_as_what_was_compiled() -> None:
    x, hidden = torch.randn(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    for network in (
        torch.compile(nn.Sequential(hidden, nn.Linear(8, 3))),
        nn.Sequential(torch.compile(hidden), nn.Linear(8, 3)),
    ):
        graph = verified(network, x)
        (group,) = graph.permutations
        assert group.size == 8 and {m.parameter for m in group.members} <= network.state_dict().keys()
        network.load_state_dict(tus.apply_permutation(graph, tus.random_permutation(graph), network.state_dict()))


def test_weights_that_are_no_tensors_are_refused_in_words() -> None:
    class Packed(nn.Linear):
        def get_extra_state(self) -> tuple[int, ...]:
            return (1, 2)

    with pytest.raises(tus.SymmetryError, match=r"0\._extra_state.* no tensor .*quantized"):
        tus.discover_symmetries(nn.Sequential(Packed(4, 3)), torch.randn(2, 4))


# -- units by position, noise, constants ------------------------------------------------------------------------------


def test_units_that_are_selected_by_position_stay() -> None:
    """Unit 2 and unit 4 reach the output on their own, one by a slice and one by an index."""

    def selected(m: Any, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        return m.b(h) + h[:, 2:3] + h[:, 4].unsqueeze(1)

    graph = verified(Net(selected, a=(4, 7), b=(7, 2)), torch.randn(5, 4))
    assert sizes(graph) == {"a": 5}
    assert set(graph["a"].members[0].index.flatten().tolist()) == {0, 1, 3, 5, 6}


def shared_noise(m: Any, x: Tensor) -> Tensor:
    """One draw serves two layers, so their units cannot be permuted apart."""
    noise = torch.randn(6)
    return m.c(torch.cat([torch.tanh(m.a(x) + noise), torch.tanh(m.b(x) * noise)], 1))


def noisy(m: Any, x: Tensor) -> Tensor:
    """Noise in place, and with parameters of its own."""
    h = torch.distributions.Normal(m.a(x), torch.ones(8)).rsample()
    h = h + torch.empty(8).normal_() * m.p
    return m.d(relu(h) * torch.bernoulli(torch.sigmoid(m.p)))


def test_noise_moves_with_what_it_meets() -> None:
    graph = tus.discover_symmetries(Net(shared_noise, a=(4, 6), b=(4, 6), c=(12, 2)), torch.randn(3, 4))
    (group,) = graph.permutations
    assert {m.parameter for m in group.members} == {"a.weight", "a.bias", "b.weight", "b.bias", "c.weight"}
    graph = verified(Net(noisy, **WAYS, p=nn.Parameter(torch.rand(8))), torch.randn(5, 4))
    assert list(sizes(graph).values()) == [8]


def own_constants(m: Any, x: Tensor) -> Tensor:
    """Makes tensors of the default precision, and holds one that is no buffer."""
    state = torch.zeros(len(x), 4)
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    kept = torch.zeros(len(x), 4)
    kept[:, :] = state * m.held[0]
    return m.head(kept) * torch.tensor([0.1, 0.1])


def test_constants_of_single_precision_do_not_round_what_is_verified() -> None:
    model = Net(own_constants, cell=nn.RNNCell(3, 4), head=(4, 2), held=[torch.ones(4)])
    assert list(sizes(verified(model, torch.randn(2, 3, 3))).values()) == [4]
    assert torch.get_default_dtype() == torch.float32


# -- groups by hand ---------------------------------------------------------------------------------------------------


def test_groups_are_left_out_by_name() -> None:
    model, x = plain()
    graph = tus.discover_symmetries(model, x)
    less = graph.without("0")
    assert [g.name for g in less.permutations] == ["2"] and [g.name for g in less.scales] == ["2"]
    assert {(p.parameter, p.axis) for p in less.pinned} >= {("0.weight", 0), ("2.weight", 1)}
    state = {k: v.double() for k, v in model.state_dict().items()}
    scaled = tus.apply_scale(less, tus.random_scale(less), state)
    assert torch.equal(scaled["0.weight"], state["0.weight"])
    assert not torch.equal(scaled["2.weight"], state["2.weight"])
    tus.verify_symmetries(less, model, x)
    with pytest.raises(KeyError, match="no group 'nothing'"):
        graph.without("nothing")


def test_a_group_by_hand_is_verified_before_it_moves_anything() -> None:
    model, x = plain()
    graph = tus.discover_symmetries(model, x).without("0")
    right = graph.with_permutation("mine", {"0.weight": 0, "0.bias": 0, "2.weight": 1})
    tus.apply_permutation(right, tus.random_permutation(right), model.state_dict())
    assert right.verified and not [p for p in right.pinned if p.reason == "left out by hand" and "0." in p.parameter]
    wrong = graph.with_permutation("mine", {"0.weight": 0, "2.weight": 1})  # forgets the bias
    with pytest.raises(tus.SymmetryError, match="'mine' is no symmetry"):
        tus.apply_permutation(wrong, tus.random_permutation(wrong), model.state_dict())


@pytest.mark.parametrize(
    ("name", "axes", "message"),
    [
        ("mine", {"0.weight": 0, "9.weight": 1}, "not in the state dict"),
        ("mine", {}, "not in the state dict"),
        ("mine", {"0.weight": 0, "2.weight": 0}, "must have one size"),
        ("mine", {"2.weight": 1}, "already moved by the group '0'"),
        ("0", {"0.weight": 0}, "is taken"),
    ],
)
def test_groups_by_hand_that_make_no_sense(name: str, axes: dict[str, int], message: str) -> None:
    model, x = plain()
    with pytest.raises(tus.SymmetryError, match=message):
        tus.discover_symmetries(model, x).with_permutation(name, axes)


def test_graphs_are_copied_and_pickled_without_the_model() -> None:
    model, x = plain()
    graph = verified(model, x)
    for copied in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert copied.verified and str(copied) == str(graph)
        tus.apply_permutation(copied, tus.random_permutation(copied), model.state_dict())


# -- networks and rules that break down -------------------------------------------------------------------------------


def test_a_network_that_does_not_run_is_named_by_verification() -> None:
    fails: list[int] = []
    model = Net(lambda m, x: m.d(relu(m.a(x))) if not fails else 1 / 0, **WAYS)
    graph = tus.discover_symmetries(model, torch.randn(2, 4))
    fails.append(1)
    with pytest.raises(tus.SymmetryError, match="does not run on the CPU"):
        graph.require_verified()
    assert not graph.verified


def test_outputs_that_differ_are_never_passed_over() -> None:
    """The network computes something else in its second call: no group is to blame."""
    calls = [0]

    def forgetful(m: Net, x: Tensor) -> Tensor:
        calls[0] += 1
        return m.d(relu(m.a(x))) * (2.0 if calls[0] == 2 else 1.0)

    for start, message in ((0, "does not compute the same twice"), (-2, "all of them together")):
        graph = tus.discover_symmetries(Net(forgetful, a=(4, 8), d=(8, 3)), torch.randn(2, 4))
        calls[0] = start
        with pytest.raises(tus.SymmetryError, match=message):
            graph.require_verified()
        assert not graph.verified


def test_a_rule_that_breaks_down_pins_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Any) -> Any:
        raise IndexError("no such axis")

    def short(call: Any) -> Any:
        return replace(call["self"], shape=call["self"].shape[:-1])

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    for rule, said in ((broken, "IndexError: no such axis"), (short, "ValueError: a value of shape")):
        monkeypatch.setitem(RULES, "aten.tanh", rule)
        graph = tus.discover_symmetries(model, torch.randn(2, 3))
        graph.require_verified()
        assert [g.size for g in graph.permutations] == [4]
        (named,) = graph.unknown_operators
        assert named.startswith("aten.tanh (its rule failed with ") and said in named
        assert any(p.parameter == "2.weight" and "aten.tanh" in p.reason for p in graph.pinned)


# -- recorded programs ------------------------------------------------------------------------------------------------

LEAVES = {
    "tolist": lambda h: torch.tensor(h.tolist()),
    "numpy": lambda h: torch.from_numpy(h.numpy()),
    "a number": lambda h: h.new_tensor([[float(row[0])] for row in h]),
    "data": lambda h: h.data,
}


@pytest.mark.parametrize("leave", LEAVES)
def test_numbers_that_leave_a_recorded_program_are_no_constants(leave: str) -> None:
    """The largest unit is a factor: permutations leave it alone, and positive factors do not."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x)) if x.sum() > 0 else m.a(x)
        return m.d(h * LEAVES[leave](h.amax(1, keepdim=True)).to(h))

    graph = verified(Net(forward, **WAYS), torch.rand(3, 4), branches="record")
    assert sizes(graph) == {"a": 8} and len(graph.scales) == (leave == "data")  # the largest unit and all others alike


def routed(m: Net, x: Tensor) -> Tensor:
    """Hugging Face's experts, in a loop over those that were hit."""
    weights, chosen = m.router(x).softmax(-1).topk(2, -1)
    out, hit = torch.zeros(len(x), 3).to(x), F.one_hot(chosen, 3).permute(2, 1, 0)
    for expert in (hit.sum((-1, -2)) > 0).nonzero():
        rank, token = torch.where(hit[expert[0]])
        up = relu(F.linear(x[token], m.up.weight.view(3, 6, 4)[expert[0]]))
        down = F.linear(up, m.down.weight.view(3, 3, 6)[expert[0]]) * weights[token, rank, None]
        out.index_add_(0, token, down)
    return out


def test_experts_in_a_loop_over_those_that_were_hit_are_recorded() -> None:
    model = Net(routed, router=(4, 3), up=nn.Linear(4, 18, bias=False), down=nn.Linear(6, 9, bias=False))
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(tus.SymmetryError, match="for expert in"):
        tus.discover_symmetries(model, x)
    graph = verified(model, x, branches="record")
    assert any(g.size == 6 for g in graph.permutations)
    assert not judge(graph, model, (x,)).wrong


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_sequence_is_an_input(layer: type[nn.RNNBase], sort: bool) -> None:
    model = Net(lambda m, x: m.c(m.r(x)[0].data), r=layer(5, 6), c=(6, 3))
    lengths = torch.tensor([4, 3, 2] if sort else [3, 4, 2])
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 3, 5), lengths, enforce_sorted=sort)
    with pytest.raises(tus.SymmetryError, match="record"):
        tus.discover_symmetries(model, (x,))
    assert sizes(verified(model, (x,), branches="record")) == {"r": 6}


class Sized(nn.Module):
    """Words of a length; what is done with the length, if anything, is a case."""

    def __init__(self, with_length: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 3)
        self.with_length = with_length

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        scores = h @ h.transpose(1, 2)
        return self.b(self.with_length((scores.tril() @ h).relu()))


def below(h: Tensor) -> Tensor:  # how many units of a constant differ, the length tells
    return h + (torch.arange(h.shape[1])[:, None] > torch.arange(8))


def shifted(h: Tensor) -> Tensor:
    return h + h[..., h.shape[1] - 3 : h.shape[1] - 2]


PROGRAMS = {
    "other lengths": (Sized(), 6, 9, True),
    "the length of a parameter": (Sized(), 6, 8, False),
    "two lengths that become one": (Sized(), 6, 5, False),  # as many as there are sequences
    "length 1": (Sized(), 6, 1, False),
    "another way": (Sized(lambda h: h.relu() if h.shape[1] > 7 else h.tanh()), 6, 9, False),
    "another way, as long": (Sized(lambda h: h * (2 if h.shape[1] > 7 else 3)), 6, 9, False),
    "a constant that tells units apart by the length": (Sized(below), 6, 7, False),
    "a constant that tells none apart": (Sized(lambda h: h + torch.arange(h.shape[1])[:, None]), 6, 7, True),
    "other units by the length": (Sized(shifted), 6, 7, False),
    "other heads by the length": (Sized(lambda h: in_heads(h, 2 if h.shape[1] < 8 else 4)), 6, 9, False),
}


def in_heads(h: Tensor, heads: int) -> Tensor:
    return F.normalize(h.reshape(*h.shape[:2], heads, 8 // heads), dim=-1).reshape(h.shape)


def across_rows(h: Tensor) -> Tensor:  # as long as there are sequences
    return F.normalize(h[:, 0].reshape(-1, len(h)), dim=-1).reshape(len(h), 1, 8)


@pytest.mark.parametrize(
    ("with_length", "batch"),
    [
        (lambda h: in_heads(h, 2 if h.shape[1] < 8 else 4), 5),
        (across_rows, 2),
        (lambda h: F.group_norm(h.mT, len(h)).mT, 2),
        (lambda h: h + h[..., len(h) : len(h) + 1], 2),
    ],
)
def test_sizes_that_cut_units_elsewhere_are_followed(with_length: Callable[[Tensor], Tensor], batch: int) -> None:
    """What would hold of the example's sizes, and is no symmetry at others."""
    network = Sized(with_length).double()
    inputs = [torch.randn(n, length, 3, dtype=torch.float64) for n, length in ((batch, 6), (2 * batch, 6), (batch, 12))]
    graph = tus.discover_symmetries(network, inputs[0])
    for x in inputs:
        tus.verify_symmetries(copy.deepcopy(graph), network, x, on_failure="raise")
    assert not any({"a.weight", "b.weight"} <= {m.parameter for m in g.members} for g in graph.permutations)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_alike_up_to_the_names_of_sizes(name: str) -> None:
    network, one, two, same = PROGRAMS[name]
    first, second = (trace(network, (torch.randn(5, n, 3),), {}) for n in (one, two))
    assert second.says_no_more_than(first) == first.says_no_more_than(second) == same
    assert first.says_no_more_than(first)
    pinned = replace(second, following=Following(frozenset({"relu"})))
    assert not pinned.says_no_more_than(first)


@pytest.mark.parametrize("length", [1, 2, 6])
def test_programs_that_others_stand_for_say_nothing_more(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Sized(lambda h: h.reshape(h.shape[0], -1, 8).relu())
    says, left = Trace.says_no_more_than, list[bool]()
    monkeypatch.setattr(Trace, "says_no_more_than", lambda one, other: left.append(says(one, other)) or left[-1])
    graph = tus.discover_symmetries(network, torch.randn(5, length, 3))
    assert any(left) and sizes(graph)
    monkeypatch.setattr(Trace, "says_no_more_than", lambda one, other: False)
    assert str(tus.discover_symmetries(network, torch.randn(5, length, 3))) == str(graph)


def test_stochastic_depth_asks_for_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = ConvNeXt([CNBlockConfig(4, 6, 1), CNBlockConfig(6, None, 1)], 0.5), torch.randn(2, 3, 16, 16)
    assert not source.asks_for_sizes(network) and source.asks_for_sizes(Sized(lambda h: h[:, : h.shape[1] - 1]))
    graph = tus.discover_symmetries(network, x)
    assert sizes(graph) and graph.training == "followed"
    monkeypatch.setattr(source, "_NOISE", frozenset())
    assert source.asks_for_sizes(network)
    assert str(tus.discover_symmetries(network, x)) == str(graph)
