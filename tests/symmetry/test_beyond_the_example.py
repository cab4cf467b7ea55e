"""What an example does not show: rows beyond its length, training mode, other experts, optional inputs, equal numbers.

Every network is discovered and verified on its example. The groups are counted by hand, and the oracle, which shares no
code with discovery, tries them on inputs that the example does not show.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import judge
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Net

import tu_symmetry as tus
from tu_symmetry.symmetry.operators.pointwise import elementwise
from tu_symmetry.symmetry.rules import TRAITS

relu = torch.relu


def tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 4, generator=torch.Generator().manual_seed(length))


def rows(batch: int) -> Tensor:
    return torch.randn(batch, 4, generator=torch.Generator().manual_seed(batch))


@dataclass
class Shown:
    """A network, its example, and inputs that the example does not show (in evaluation and in training mode)."""

    network: nn.Module
    example: tuple[Any, ...]
    others: Sequence[tuple[Any, ...]]
    groups: Sequence[tuple[int, ...]]
    scales: int | None = None
    training: bool = False


CASES: dict[str, Shown] = {}
LONGER = [(tokens(3),), (tokens(9),), (tokens(16),)]


def show(
    name: str, forward: Callable[..., Any], groups: Sequence[int], scales: int | None = None, *,
    example: tuple[Any, ...] = (tokens(5),), others: Sequence[tuple[Any, ...]] = LONGER, training: bool = False,
    **parts: Any,
) -> None:  # fmt: skip
    """Add a case; pairs are linear layers."""
    CASES[name] = Shown(Net(forward, **parts), example, others, [(g,) for g in groups], scales, training)


def table(name: str, read: Callable[[Net, Tensor], Tensor], groups: Sequence[int] = (8,), **parts: Any) -> None:
    """A table of sixteen rows beside tokens, of which the example has five."""
    parts = {"table": nn.Embedding(16, 8), "a": (4, 8), "b": (8, 3), **parts}
    show(name, lambda m, x: m.b(relu(m.a(x) + read(m, x))), groups, **parts)


def sized(name: str, hidden: Callable[[Tensor, int], Tensor], groups: Sequence[int], scales: int) -> None:
    """What becomes of eight hidden units follows the number of tokens, five in the example."""
    show(name, lambda m, x: m.b(hidden(m.a(x), x.shape[1])), groups, scales, a=(4, 8), b=(8, 3))


table("rows cut by the length", lambda m, x: m.table.weight[: x.shape[1]])
table("rows looked up in order", lambda m, x: m.table(torch.arange(x.shape[1])))
table("rows through a layer", lambda m, x: m.map(m.table.weight)[: x.shape[1]], [8, 6], table=nn.Embedding(16, 6),
      map=(6, 8))  # fmt: skip
table("normalized rows", lambda m, x: F.normalize(m.table.weight[: x.shape[1]], dim=-1))
table("the sum of rows", lambda m, x: m.table.weight[: x.shape[1]].sum(0))
table("one row", lambda m, x: m.table.weight[x.shape[1] - 1])
table("rows cut, and all of them", lambda m, x: m.table.weight[: x.shape[1]].sum(0) + m.table.weight.mean(0))
table("rows masked by the length", lambda m, x: (torch.arange(16) < x.shape[1]).float() @ m.table.weight)
table("rows padded by less than nothing", lambda m, x: F.pad(m.table.weight, (0, 0, 0, x.shape[1] - 16)).sum(0))
table("one row by its number", lambda m, x: F.one_hot(torch.tensor(x.shape[1] - 1), 16).float() @ m.table.weight)
sized("units masked by the length", lambda h, n: relu(h) * (torch.arange(8) < n), [], 8)
sized("units in larger blocks when long",
      lambda h, n: relu(h).unflatten(-1, (-1, 2 if n < 8 else 4)).softmax(-1).flatten(2), [], 0)  # fmt: skip
sized("units summed up when long", lambda h, n: relu(h).cumsum(-1) if n > 6 else relu(h), [], 1)
sized("units sorted when short", lambda h, n: relu(h).sort(-1)[0] if n < 4 else relu(h), [], 1)
sized("no scales when long", lambda h, n: h.tanh() if n > 6 else relu(h), [8], 0)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, n: int = 2) -> Tensor:
        h: Tensor = self.b(relu(self.a(x)) * (torch.arange(8) < n))
        return h


class FromZero(Counted):
    def forward(self, x: Tensor, n: int = 0) -> Tensor:
        h: Tensor = self.b(relu(self.a(x)) * (torch.arange(8) >= n))
        return h


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None, sort: bool = False, *, whole: bool = True) -> Tensor:
        h = relu(self.a(x)) if scale is None else relu(self.a(x)) * scale
        h = relu(self.b(h.sort(-1)[0] if sort else h))
        out: Tensor = self.c(h) if whole else h
        return out


def conditioned(m: Net, x: Tensor, given: Tensor | None = None) -> Tensor:
    h = m.a(x)
    if given is not None:
        gain, shift = m.both(given).chunk(2, -1)
        h = gain * h + shift
    return m.b(relu(h))


def shifted(m: Net, x: Tensor, given: Tensor | None = None) -> Tensor:
    return m.b(relu(m.a(x) + (0 if given is None else m.shift.weight[0])))


def gated(m: Net, x: Tensor) -> Tensor:
    n = x.shape[1]
    return m.b(relu(m.mix.weight[:n, :n] @ m.a(x)))


def variational(m: Net, x: Tensor) -> Tensor:
    h = relu(m.a(x))
    mean = m.mean(h)
    if m.training:
        mean = mean + m.deviation(h).exp() * torch.randn_like(mean)
    return m.c(relu(mean))


def halves(m: Net, x: Tensor) -> Tensor:
    mean, deviation = m.both(relu(m.a(x))).chunk(2, -1)
    return m.c(relu(mean + deviation.exp() * torch.randn_like(mean) if m.training else mean))


def auxiliary(m: Net, x: Tensor) -> Any:
    h = relu(m.a(x))
    return (m.c(relu(m.b(h))), m.head(h)) if m.training else m.c(relu(m.b(h)))


def experts(m: Net, x: Tensor) -> Tensor:
    return m.c(relu(m.first(relu(m.a(x))) if x.shape[0] < 4 else m.second(relu(m.a(x)))))


def optional(m: Net, x: Tensor, mask: Tensor | None = None) -> Tensor:
    h = m.a(x) if mask is None else torch.where(mask[:, None], m.token.weight[0], m.a(x))
    return m.c(relu(m.b(relu(h))))


two, more = {"example": (rows(2),)}, {"example": (rows(2),), "others": [(rows(6),)]}
CASES["an integer that is left out"] = Shown(Counted(), (rows(2),), [(rows(2), 1), (rows(2), 5)], [], 8)
CASES["an integer that is left out, none"] = Shown(FromZero(), (rows(2),), [(rows(2), 1), (rows(2), 5)], [], 8)
show("a layer of gains and shifts that is left out", conditioned, [], 0, **two, others=[(rows(2), rows(2)[:, :2])],
     both=(2, 16), a=(4, 8), b=(8, 3))  # fmt: skip
show("a number that is left out", shifted, [8], 0, **two, others=[(rows(2), rows(2))], shift=nn.Embedding(1, 1),
     a=(4, 8), b=(8, 3))  # fmt: skip
show("dropout before positions", lambda m, x: m.codes(m.drop(m.a(x)).argmax(-1)), [], example=(rows(5),),
     others=[(rows(2),)], training=True, drop=nn.Dropout(0.3), codes=nn.Embedding(8, 3), a=(4, 8))  # fmt: skip
show("rows and columns", gated, [8], mix=(16, 16), a=(4, 8), b=(8, 3))
show("a head of training", variational, [8, 5], 8, training=True, **more, mean=(8, 5), deviation=(8, 5), c=(5, 3),
     a=(4, 8))  # fmt: skip
show("a half for training", halves, [8, 5], 8, training=True, **more, both=(8, 10), c=(5, 3), a=(4, 8))
show("an auxiliary output", auxiliary, [8, 6], 14, training=True, **more, head=(8, 3), a=(4, 8), b=(8, 6), c=(6, 3))
show("an expert that is not called", experts, [], 0, **two, others=[(rows(5),)], first=(8, 6), second=(8, 6), a=(4, 8),
     c=(6, 3))  # fmt: skip
show("an argument that is left out", optional, [6], 6, **two, others=[(rows(2), torch.tensor([True, False]))],
     token=nn.Embedding(1, 8), a=(4, 8), b=(8, 6), c=(6, 3))  # fmt: skip


def test_flags_that_no_example_gives_are_followed_both_ways_and_other_arguments_are_named() -> None:
    network, x = Flagged(), rows(2)
    graph = tus.discover_symmetries(network, x)
    assert sizes(graph) == [] and graph.left_out == ("scale",) and "scale: not seen in use" in str(graph)
    assert {p.reason for p in graph.pinned if p.parameter == "b.weight" and p.axis == 0} == {
        "output of the network with whole=False"
    }
    given = tus.discover_symmetries(network, x, example_kwargs={"sort": False, "whole": True})
    assert sizes(given) == [(6,), (8,)] and given.left_out == ("scale",)
    several = tus.discover_symmetries(
        network, [(x,), (x, torch.rand(8))], example_kwargs=[{"whole": True}, {"whole": True, "sort": False}]
    )
    assert sizes(several) == [(6,)] and several.left_out == ()


def sizes(graph: tus.SymmetryGraph) -> list[tuple[int, ...]]:
    return sorted(g.shape for g in graph.permutations)


@pytest.mark.parametrize("name", CASES)
def test_what_is_claimed_holds_on_what_the_example_does_not_show(name: str) -> None:
    case = CASES[name]
    graph = tus.discover_symmetries(case.network, case.example)
    assert sizes(graph) == sorted(case.groups)
    if case.scales is not None:
        assert sum(g.size for g in (*graph.scales, *graph.normalizations)) == case.scales
    tus.verify_symmetries(graph, case.network, case.example, on_failure="raise")
    for inputs in (case.example, *case.others):
        for training in (False, True) if case.training else (False,):
            assert not judge(graph, case.network, inputs, training=training).wrong


@pytest.mark.parametrize("name", ["an expert that is not called", "an argument that is left out"])
def test_what_is_not_reached_is_named_and_found_with_examples_that_reach_it(name: str) -> None:
    case = CASES[name]
    graph = tus.discover_symmetries(case.network, case.example)
    assert graph.unreached and all(n in " ".join(str(graph).split()) for n in graph.unreached)
    assert any("could meet" in p.reason for p in graph.pinned)
    examples = [case.example, *case.others]
    whole = tus.discover_symmetries(case.network, examples)
    assert not whole.unreached and sizes(whole) == [(6,), (8,)]
    tus.verify_symmetries(whole, case.network, examples, on_failure="raise")
    for inputs in examples:
        assert not judge(whole, case.network, inputs).wrong


def test_verification_runs_all_examples_and_training_mode() -> None:
    """A group that holds on the first example, and on no other, is found out."""
    case = CASES["an argument that is left out"]
    whole = tus.discover_symmetries(case.network, [case.example, *case.others])
    name = next(g.name for g in whole.permutations if g.size == 8)
    wrong = whole.without(name).with_permutation("half", {"a.weight": 0, "a.bias": 0, "b.weight": 1})
    tus.verify_symmetries(wrong, case.network, case.example, on_failure="raise")
    with pytest.raises(tus.SymmetryError, match="half"):
        tus.verify_symmetries(wrong, case.network, [case.example, *case.others])
    case = CASES["a head of training"]
    found = tus.discover_symmetries(case.network, case.example)
    assert found.training == "followed"
    name = next(g.name for g in found.permutations if g.size == 8)
    wrong = found.without(name).with_permutation("h", {"a.weight": 0, "a.bias": 0, "mean.weight": 1})
    for given in (wrong, pickle.loads(pickle.dumps(wrong))):
        with pytest.raises(tus.SymmetryError, match="'h'"):
            tus.verify_symmetries(given, case.network, case.example)


def test_lists_of_examples_are_checked() -> None:
    network = CASES["an argument that is left out"].network
    with pytest.raises(ValueError, match="at least one"):
        tus.discover_symmetries(network, [])
    with pytest.raises(ValueError, match="2 example_inputs and 1 example_kwargs"):
        tus.discover_symmetries(network, [rows(2), rows(3)], example_kwargs=[{}])
    layer = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x = tokens(3)
    given = [{"query": x, "key": x, "value": x}, {"query": x, "key": x, "value": x, "need_weights": False}]
    graph = tus.discover_symmetries(layer, (), example_kwargs=given)
    tus.verify_symmetries(graph, layer, (), example_kwargs=given, on_failure="raise")
    assert not graph.unreached and graph.probe is not None and len(graph.probe.others) == 1


def test_parameters_that_no_code_names_pin_nothing() -> None:
    network = Net(lambda m, x: m.b(relu(m.a(x))), unnamed=(8, 8), a=(4, 8), b=(8, 3))
    graph = tus.discover_symmetries(network, rows(2))
    assert sizes(graph) == [(8,)] and not graph.unreached


def test_training_mode_that_cannot_be_followed_is_told() -> None:
    def forward(m: Net, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if m.training:
            assert targets is not None, "targets"
        return m.b(relu(m.a(x)))

    graph = tus.discover_symmetries(Net(forward, a=(4, 8), b=(8, 3)), rows(2))
    assert graph.training.startswith("not followed") and "training mode" in str(graph)


# -- equal numbers --------------------------------------------------------------------------------------------------

APART: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "as they are": (lambda h: h, True),
    "dropout in evaluation": (lambda h: F.dropout(h, 0.5, False), True),
    "leaky ReLU": (F.leaky_relu, True),
    "negative": (lambda h: -h, True),
    "softmax": (lambda h: h.softmax(-1), True),
    "ReLU": (relu, False),
    "sigmoid": (torch.sigmoid, False),
    "ELU without a slope": (lambda h: F.elu(h, 0.0), False),
    "the rest of a ReLU": (lambda h: h - relu(h), False),
    "exponential": (torch.exp, False),
    "largest alone": (lambda h: h * (h >= h.amax(-1, keepdim=True)), False),
    "product with a ReLU": (lambda h: h * relu(h), False),
    "layer norm": (lambda h: F.layer_norm(h, (8,)), True),
    "softmax over the batch": (lambda h: h.softmax(0), False),
    "instance norm over the batch": (lambda h: F.instance_norm(h.T[None])[0].T, False),
    "leaky ReLU without a slope": (lambda h: F.leaky_relu(h, 0.0), False),
    "cut to integers": (lambda h: h.int(), False),
    "half precision": (lambda h: h.bfloat16(), False),
}
FOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda h: h.argmax(-1),
    "max": lambda h: h.max(-1).indices,
    "topk": lambda h: h.topk(1).indices[:, 0],
    "sort": lambda h: h.sort(-1).indices[:, 1],
}


LAYERS = ("linear", "without", "behind a ReLU", "without, behind a ReLU", "conv")


@pytest.mark.parametrize(
    ("layer", "act", "find"),
    [
        *(("linear", act, find) for act in APART for find in FOUND),
        *((layer, act, "argmax") for layer in LAYERS[1:] for act in APART),
    ],
)
def test_positions_pass_only_where_no_two_numbers_are_equal(layer: str, act: str, find: str) -> None:
    """A layer with or without a bias, tried on blank inputs and on large ones."""
    bias = "without" not in layer
    first = {"linear": nn.Linear(4, 8), "conv": nn.Conv2d(1, 8, 2)}.get(layer, nn.Linear(4, 8, bias=bias))
    if "behind" in layer:
        first = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8, bias=bias))
    apply, keeps = APART[act]

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x.reshape(-1, 1, 2, 2))[:, :, 0, 0] if layer == "conv" else m.a(x)
        return m.codes(FOUND[find](apply(h)))

    network = Net(forward, a=first, codes=nn.Embedding(8, 3))
    graph = tus.discover_symmetries(network, rows(5))
    tus.verify_symmetries(graph, network, rows(5), on_failure="raise")
    assert ((8,) in sizes(graph)) == (keeps and bias)
    # equal rows need not have equal products: what compares them would leave it to rounding which unit is the first
    blank = torch.zeros(1 if act == "softmax over the batch" else 5, 4)
    for inputs in (rows(5), 30 * rows(5), *(() if act == "instance norm over the batch" else (blank,))):
        assert not judge(graph, network, (inputs,)).wrong


@torch.library.custom_op("beyond::half_relu", mutates_args=())
def half_relu(x: Tensor) -> Tensor:
    return torch.relu(x) / 2


@half_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_rule_of_ones_own_is_taken_to_make_equal_numbers_unless_it_says_otherwise() -> None:
    network = Net(lambda m, x: m.codes(half_relu(m.a(x)).argmax(-1)), a=(4, 8), codes=nn.Embedding(8, 3))
    tus.register_rule("beyond.half_relu")(lambda call: elementwise(call, homogeneous=True))
    assert not TRAITS["beyond.half_relu"]
    assert sizes(tus.discover_symmetries(network, rows(3))) == []
    tus.register_rule("beyond.half_relu", traits=("injective",))(lambda call: elementwise(call, homogeneous=True))
    assert sizes(tus.discover_symmetries(network, rows(3))) == [(8,)]
    wrong = tus.discover_symmetries(network, rows(3))
    with pytest.raises(tus.SymmetryError, match="is no symmetry"):  # tried with dead units
        tus.verify_symmetries(wrong, network, rows(3), on_failure="raise")
    with pytest.raises(ValueError, match="no traits \\['monotone'\\]"):
        tus.register_rule("beyond.half_relu", traits=("monotone",))(lambda call: elementwise(call))


# -- masks that forward makes -----------------------------------------------------------------------------------------


def test_a_branch_on_a_constant_mask_is_no_branch_on_values() -> None:
    """PyTorch's own encoder compares a given mask with the causal one, and branches."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.c(m.encoder(m.a(x), mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1])))

    layer = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True)
    network = Net(forward, encoder=nn.TransformerEncoder(layer, 1), a=(4, 8), c=(8, 3)).eval()
    graph = tus.discover_symmetries(network, tokens(5))
    assert graph.branch is None and sizes(graph) == [(2,), (2, 4), (2, 4), (6,), (8,)]
    tus.verify_symmetries(graph, network, tokens(5), on_failure="raise")


class ReadInTraining(nn.Module):
    """A table whose rows only training reads, as many as an argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Parameter(torch.randn(6, 4)), nn.Linear(5, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor, rows: int = 2) -> Tensor:
        if not self.training:
            return self.a(x)
        return self.a(x) + self.b(torch.relu(self.table[:rows].sum(0) + self.table.mean(0)))


def test_numbers_are_followed_where_weights_are_read_in_training_alone() -> None:
    graph = tus.discover_symmetries(ReadInTraining(), torch.randn(4, 5))
    assert [[(m.parameter, m.axis) for m in g.members] for g in graph.permutations] == [[("table", 1), ("b.weight", 1)]]
