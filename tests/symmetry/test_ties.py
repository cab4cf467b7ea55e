"""Ties between units and constants, and units on several axes: what is claimed is counted by hand and tried out.

Every module is run twice in float64, with weights of the test's own and after each claimed group acted on them; outputs
are compared entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import Net

import tu_symmetry as tus

relu = torch.relu


def flat(outputs: Any) -> Tensor:
    if isinstance(outputs, (tuple, list)):
        return torch.cat([flat(o) for o in outputs])
    return outputs.double().flatten()


def claims(model: nn.Module, *inputs: Tensor, count: int = 4) -> tus.SymmetryGraph:
    """The symmetry graph of a module; fails if one of its groups changes an output."""
    torch.manual_seed(0)
    model = model.double().eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    graph = tus.discover_symmetries(model, inputs)
    tus.verify_symmetries(graph, model, inputs, on_failure="raise")
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(t.shape, generator=generator, dtype=torch.float64) / max(t.shape[-1:] or (1,)) ** 0.5 + 0.1
        if t.is_floating_point()
        else t
        for name, t in model.state_dict().items()
    }
    state = {name: t.abs() + 0.1 if "var" in name else t for name, t in state.items()}

    def run(weights: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return flat(torch.func.functional_call(model, {n: t.clone() for n, t in weights.items()}, inputs))

    before = run(state)
    for group in graph.permutations:
        for k in range(count):
            element = torch.rand(*group.shape, generator=generator).argsort(-1)
            element = element if k else torch.arange(group.size).roll(1).expand(group.shape).clone()
            moved = tus.apply_permutation(graph, {group.name: element}, state)
            torch.testing.assert_close(run(moved), before, rtol=1e-9, atol=1e-9, msg=f"permutation {group.name}")
    for scale in (*graph.scales, *graph.normalizations):
        factor = 0.3 * torch.randn(scale.size, generator=generator, dtype=torch.float64)
        error = 1e-9 if scale.exact else 2e-2
        moved = tus.apply_scale(graph, {scale.name: factor}, state)
        torch.testing.assert_close(run(moved), before, rtol=error, atol=error, msg=f"scale {scale.name}")
    return graph


def sizes(graph: tus.SymmetryGraph) -> list[tuple[int, ...]]:
    return sorted(g.shape for g in graph.permutations)


def expect(groups: Sequence[Any], model: nn.Module, *inputs: Tensor) -> None:
    assert sizes(claims(model, *inputs)) == sorted((g,) if isinstance(g, int) else tuple(g) for g in groups)


X = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
SEQUENCE = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(3))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def linear(*widths: int) -> dict[str, nn.Linear]:
    """``a``, ``b``, ... from five inputs to these widths."""
    return {name: nn.Linear(5, width) for name, width in zip("abdefg", widths, strict=False)}


# -- constants beside units ---------------------------------------------------------------------------------------

BESIDE: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "pad": lambda h, low, high: F.pad(h, (low, high)),
    "pad_ones": lambda h, low, high: F.pad(h, (low, high), value=1.0),
    "cat_zeros": lambda h, low, high: torch.cat([h.new_zeros(3, low), h, h.new_zeros(3, high)], -1),
    "cat_tensors": lambda h, low, high: torch.cat([torch.zeros(3, low).to(h), h, torch.zeros(3, high).to(h)], -1),
    "cat_full": lambda h, low, high: torch.cat([torch.full((3, low), 2.0).to(h), h, h.new_full((3, high), 2.0)], -1),
    "write": lambda h, low, high: _written(h, low, high),
}


def _written(h: Tensor, low: int, high: int) -> Tensor:
    whole = h.new_zeros(3, low + h.shape[1] + high)
    whole[:, low : low + h.shape[1]] = h
    return whole


@pytest.mark.parametrize("swap", [False, True], ids=["constants first", "constants last"])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("kind", BESIDE)
def test_units_that_meet_constants_keep_their_ties(kind: str, low: int, high: int, swap: bool) -> None:
    width = 4 + low + high

    def forward(m: Net, x: Tensor) -> Tensor:
        padded, other = BESIDE[kind](relu(m.a(x)), low, high), m.b(x)
        return m.c(relu(other + padded if swap else padded + other))

    expect([4, low + high], Net(forward, c=nn.Linear(width, 3), **linear(4, width)), X)


@pytest.mark.parametrize("swap", [False, True])
def test_constants_that_differ_tell_apart_what_they_meet(swap: bool) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        padded, other = torch.cat([x.new_zeros(3, 2), relu(m.a(x)), x.new_ones(3, 3)], -1), m.b(x)
        return m.c(relu(other + padded if swap else padded + other))

    expect([2, 3, 4], Net(forward, c=nn.Linear(9, 3), **linear(4, 9)), X)


def test_statistics_of_zeros_are_tied_to_each_other() -> None:
    """The mean, variance, factor and shift of a channel that is always zero move together."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.c(m.norm(torch.cat([relu(m.a(x)), x.new_zeros(3, 2)], 1)))

    expect([8, 2], Net(forward, norm=nn.BatchNorm1d(10), c=nn.Linear(10, 3), **linear(8)).eval(), X)


@pytest.mark.parametrize("swap", [False, True])
def test_constants_that_meet_constants_stay_apart(swap: bool) -> None:
    """[1, 1, 2, 2, 2] + zeros_like(h), times [1, 2, 2, 3, 3]: units 3 and 4 have met the same."""

    first, second = torch.tensor([1, 1, 2, 2, 2]), torch.tensor([1, 2, 2, 3, 3])

    def forward(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        k = torch.zeros_like(h)
        k = first + k if swap else k + first
        return m.c(h * (second * k if swap else k * second))

    expect([2], Net(forward, c=nn.Linear(5, 3), **linear(5)), X)


def test_two_paddings_overlap() -> None:
    """Units 0 and 1 of ``a`` meet zeros, 2 to 7 the units 0 to 5 of ``b``, whose last two meet zeros."""
    pads = {"first": ((0, 2), (2, 0)), "last": ((2, 0), (0, 2))}
    for low, high in pads.values():

        def forward(m: Net, x: Tensor, low: tuple[int, int] = low, high: tuple[int, int] = high) -> Tensor:
            return m.c(relu(F.pad(m.a(x), low) + F.pad(m.b(x), high)))

        expect([2, 2, 6], Net(forward, c=nn.Linear(10, 3), **linear(8, 8)), X)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_three_terms_in_any_order(order: tuple[int, ...]) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        terms = [F.pad(relu(m.a(x)), (0, 4)), F.pad(relu(m.b(x)), (4, 0)), m.d(x)]
        return m.c(relu(terms[order[0]] + terms[order[1]] + terms[order[2]]))

    expect([4, 4], Net(forward, c=nn.Linear(8, 3), **linear(4, 4, 8)), X)


def test_inputs_beside_units_are_no_more_alike_for_standing_in_two_pieces() -> None:
    beside = Net(lambda m, x: m.c(torch.cat([x[:, :2], relu(m.a(x)), x[:, 2:4]], -1)), c=nn.Linear(12, 3), **linear(8))
    expect([8], beside, X)
    single = Net(lambda m, x: m.c(torch.cat([m.b(x), m.d(x), relu(m.a(x))], -1)), c=nn.Linear(10, 3), **linear(8, 1, 1))
    expect([8], single, X)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_option_a_shortcuts(swap: bool, stages: int) -> None:
    """A ResNet for CIFAR: the channels that a shortcut adds as zeros are alike, the others are those before."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        for block in m.blocks:
            extra = h.shape[1] // 2
            shortcut, out = F.pad(h[:, :, ::2, ::2], (0, 0, 0, 0, extra, extra)), block(h)
            h = relu(out + shortcut if swap else shortcut + out)
        return m.c(h.mean((2, 3)))

    blocks = nn.ModuleList(
        nn.Sequential(nn.Conv2d(n, 2 * n, 3, 2, padding=1, bias=False), nn.BatchNorm2d(2 * n)) for n in (4, 8)[:stages]
    )
    model = Net(forward, a=nn.Conv2d(3, 4, 3, padding=1), blocks=blocks, c=nn.Linear(4 * 2**stages, 3))
    expect([4, 4, 8][: stages + 1], model, IMAGE)


@pytest.mark.parametrize("swap", [False, True])
def test_units_in_slots_beside_constants(swap: bool) -> None:
    """Two streams share their units; flattened, each unit stands in two slots, and zeros follow."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = torch.stack([relu(m.a(x)), relu(m.b(x))], 1) + relu(m.d(x))[:, None]
        h, other = torch.cat([h.flatten(1), x.new_zeros(3, 2)], -1), m.e(x)
        return m.c(relu(other + h if swap else h + other))

    graph = claims(Net(forward, c=nn.Linear(10, 3), **linear(4, 4, 4, 10)), X)
    assert (4,) in sizes(graph)


# -- copies of a unit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1, 3, 4, 5])
def test_copies_of_a_unit_follow_their_tensor(shift: int) -> None:
    """``h + g`` ties; in ``roll(cat([h, g]))`` each unit has a column for ``h`` and one for ``g``, in either order."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h, g = relu(m.a(x)), relu(m.b(x))
        return m.c(h + g) + m.out(relu(torch.roll(torch.cat([h, g], -1), shift, -1)))

    expect([4], Net(forward, c=nn.Linear(4, 3), out=nn.Linear(8, 3), **linear(4, 4)), X)


def test_copies_of_a_unit_follow_what_they_meet() -> None:
    def units(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        return m.c(torch.roll(torch.cat([h, h], -1) + torch.cat([m.b(x), m.d(x)], -1), 1, -1))

    expect([4], Net(units, c=nn.Linear(8, 3), **linear(4, 4, 4)), X)

    def padded(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        return m.c(torch.roll(torch.cat([h, h], -1) + F.pad(m.b(x), (0, 4)), 1, -1))

    expect([4], Net(padded, c=nn.Linear(8, 3), **linear(4, 4)), X)
    for numbers, groups in (([1, 2, 2, 1], [2]), ([1, 1, 2, 2], [2]), ([1, 1, 2, 1], [])):
        constants = torch.tensor(numbers)

        def beside(m: Net, x: Tensor, constants: Tensor = constants) -> Tensor:
            return m.c(relu(torch.cat([relu(m.a(x))] * 2, -1) + constants))

        expect(groups, Net(beside, c=nn.Linear(4, 3), **linear(2)), X)


# -- units on several axes ------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "gram": (lambda h: h.transpose(1, 2) @ h, SEQUENCE),
    "gram_einsum": (lambda h: torch.einsum("bti,btj->bij", h, h), SEQUENCE),
    "outer": (lambda h: h[:, :, None] * h[:, None, :], X),
    "outer_sum": (lambda h: h.unsqueeze(2) + h.unsqueeze(1), X),
    "outer_einsum": (lambda h: torch.einsum("bi,bj->bij", h, h), X),
    "triple": (lambda h: h[:, :, None, None] * h[:, None, :, None] * h[:, None, None], X),
}


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("kind", PAIRS)
def test_units_on_two_axes_flattened(kind: str, width: int) -> None:
    pair, x = PAIRS[kind]
    entries = width ** (3 if kind == "triple" else 2)

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out(relu(m.c(pair(relu(m.a(x))).flatten(1))))

    expect([width, 6], Net(forward, c=nn.Linear(entries, 6), out=nn.Linear(6, 3), **linear(width)), x)


def test_units_on_two_axes_of_a_sum_and_of_heads() -> None:
    def biased(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        return m.c(relu((h[:, :, None] * h[:, None, :]).flatten(1) + m.b(x)))

    expect([4], Net(biased, c=nn.Linear(16, 3), **linear(4, 16)), X)

    def heads(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x)).view(2, 7, 2, 3)
        return m.c(torch.einsum("bthi,bthj->bhij", h, h).flatten(1))

    expect([2, (2, 3)], Net(heads, c=nn.Linear(18, 3), **linear(6)), SEQUENCE)


@pytest.mark.parametrize(
    ("equation", "shape", "width"),
    [("bi,ij,bj->bi", (4, 4), 4), ("bi,oij,bj->bo", (6, 4, 4), 6), ("bi,ij,bj->bj", (4, 4), 4)],
)  # fmt: skip
def test_bilinear_forms(equation: str, shape: tuple[int, ...], width: int) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        return m.c(relu(torch.einsum(equation, h, m.w, h)))

    model = Net(forward, w=nn.Parameter(torch.randn(shape)), c=nn.Linear(width, 3), **linear(4))
    expect([4] if len(shape) == 2 else [4, 6], model, X)


def test_a_parameter_that_an_operator_reads_twice() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.c(relu(torch.bmm(m.w, m.w)).flatten() + x.sum())

    # two matrices, of which each has rows and columns in an order of its own: P w P^T squared is P (w w) P^T
    expect([2, (2, 4)], Net(forward, w=nn.Parameter(torch.randn(2, 4, 4)), c=nn.Linear(32, 3)), X)


class Attention(nn.Module):
    """Self-attention on eight channels in two heads; queries and keys normalized in one of several ways."""

    def __init__(self, norm: str, layout: str) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.c = nn.Linear(5, 8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.layout = norm, layout
        if norm in ("LayerNorm", "RMSNorm"):
            self.q_norm, self.k_norm = getattr(nn, norm)(4), getattr(nn, norm)(4)

    def heads(self, x: Tensor) -> Sequence[Tensor]:
        b, t, _ = x.shape
        qkv = self.qkv(x)
        if self.layout == "3hd":
            return qkv.view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        if self.layout == "h3d":
            return qkv.view(b, t, 2, 3, 4).permute(3, 0, 2, 1, 4).unbind(0)
        if self.layout == "3dh":
            return qkv.view(b, t, 3, 4, 2).permute(2, 0, 4, 1, 3).unbind(0)
        return [part.view(b, t, 4, 2).permute(0, 3, 1, 2) for part in qkv.chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = self.heads(x)
        if self.norm == "F.layer_norm":
            q, k = F.layer_norm(q, (4,)), F.layer_norm(k, (4,))
        elif self.norm == "F.rms_norm":
            q, k = F.rms_norm(q, (4,)), F.rms_norm(k, (4,))
        elif self.norm == "F.normalize":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        elif self.norm:
            q, k = self.q_norm(q), self.k_norm(k)
        y = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        y = y.transpose(1, 2) if self.layout in ("3hd", "h3d") else y.permute(0, 2, 3, 1)
        return self.c(self.out(y.reshape(x.shape)))


@pytest.mark.parametrize("norm", ["", "F.layer_norm", "F.rms_norm", "F.normalize", "LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("layout", ["3hd", "h3d"])
def test_normalized_queries_and_keys(norm: str, layout: str) -> None:
    """An affine normalization shares its weights between the heads, and so the dimensions of queries and keys."""
    shared = norm in ("LayerNorm", "RMSNorm")
    expect([2, (2, 4), 4 if shared else (2, 4), 8, 8], Attention(norm, layout), SEQUENCE)


# -- channels of grouped convolutions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "multiplier", "expected"),
    [
        (2, 1, [4, 4, 4]),  # the channels of each group, and the sums of two outputs
        (4, 2, [2, (2, 2), (2, 2), (2, 4)]),  # the first two groups with the last two; inputs and outputs of each pair
        (8, 1, [4]),
        (8, 2, [4, (4, 2)]),
    ],
)
def test_halves_of_a_grouped_convolution(groups: int, multiplier: int, expected: list[Any]) -> None:
    for combine in (lambda a, b: relu(a + b), lambda a, b: a * torch.sigmoid(b), lambda a, b: torch.maximum(b, a)):

        def forward(m: Net, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor] = combine) -> Tensor:
            return m.c(combine(*m.g(relu(m.a(x))).chunk(2, 1)).mean((2, 3)))

        parts = {"a": nn.Conv2d(3, 8, 3), "g": nn.Conv2d(8, 8 * multiplier, 3, groups=groups)}
        expect(expected, Net(forward, c=nn.Linear(4 * multiplier, 3), **parts), IMAGE)


# -- parameters without axes ------------------------------------------------------------------------------------------

SCALARS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "rezero": lambda m, h: h + m.s * relu(m.b(h)),
    "added": lambda m, h: h + m.s + m.b(h),
    "product": lambda m, h: m.s * m.t * h + m.b(h),
    "gate": lambda m, h: torch.sigmoid(m.s) * h + (1 - torch.sigmoid(m.s)) * m.b(h),
    "stacked": lambda m, h: h * torch.stack([m.s, m.t]).sum() + m.b(h),
    "expanded": lambda m, h: h * m.s.expand(4) + m.b(h),
    "power": lambda m, h: (h + 1) ** m.s / m.t + m.b(h),
    "slope": lambda m, h: relu(h) - m.s * relu(-h) + m.b(h),
    "lerp": lambda m, h: torch.lerp(h, m.b(h), m.s),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", SCALARS)
def test_parameters_without_axes(kind: str, trained: bool) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.c(SCALARS[kind](m, relu(m.a(x))))

    scalars = {n: nn.Parameter(torch.tensor(v)) if trained else torch.tensor(v) for n, v in (("s", 0.5), ("t", 0.7))}
    expect([4], Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3), **scalars), X)


# -- writes through views ---------------------------------------------------------------------------------------------

WRITES: dict[str, tuple[Callable[[Tensor], Any], list[Any]]] = {
    "chunk": (lambda h: h.chunk(2, -1)[0].relu_(), [4, 4]),
    "both chunks": (lambda h: [part.mul_(k + 2).sin_() for k, part in enumerate(h.chunk(2, -1))], [4, 4]),
    "split": (lambda h: h.split([3, 5], -1)[1].relu_(), [3, 5]),
    "unbind": (lambda h: h.view(3, 2, 4).unbind(1)[1].relu_(), [4, 4]),
    "slice of a view": (lambda h: h.view(3, 2, 4)[:, 0].relu_(), [4, 4]),
    "every other": (lambda h: h[:, ::2].relu_(), [4, 4]),
    "select": (lambda h: h[:, 0].relu_(), [7]),
    "last": (lambda h: h[:, -1:].relu_(), [7]),
    "constant": (lambda h: h[:, 0].fill_(1.0), [7]),
    "constants": (lambda h: h[:, 2:5].zero_(), [5]),
    "transposed": (lambda h: h.transpose(0, 1)[2:].relu_(), [2, 6]),
    "whole, through a view": (lambda h: h.view(3, 8, 1).relu_(), [8]),
}


@pytest.mark.parametrize("kind", WRITES)
def test_writes_through_views_reach_the_whole(kind: str) -> None:
    write, expected = WRITES[kind]

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        write(h)
        return m.c(h)

    graph = claims(Net(forward, c=nn.Linear(8, 3), **linear(8)), X)
    for shape in expected:
        assert shape in [n for n, *_ in sizes(graph)], sizes(graph)


COPIES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "slices": lambda o, h, g: (o[:, :4].copy_(h), o[:, 4:].copy_(g)),
    "chunks": lambda o, h, g: [part.copy_(v) for part, v in zip(o.chunk(2, 1), (h, g), strict=True)],
    "interleaved": lambda o, h, g: (o[:, ::2].copy_(h), o[:, 1::2].copy_(g)),
    "transposed": lambda o, h, g: (o.t()[4:].copy_(h.t()), o.t()[:4].copy_(g.t())),
    "added": lambda o, h, g: (o[:, :4].add_(h), o[:, 4:].sub_(g)),
}


@pytest.mark.parametrize("empty", [lambda x: x.new_zeros(3, 8), lambda x: torch.zeros(3, 8).to(x)])
@pytest.mark.parametrize("kind", COPIES)
def test_parts_written_into_an_empty_tensor(kind: str, empty: Callable[[Tensor], Tensor]) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        whole = empty(x)
        COPIES[kind](whole, relu(m.a(x)), relu(m.b(x)))
        return m.c(whole)

    expect([4, 4], Net(forward, c=nn.Linear(8, 3), **linear(4, 4)), X)


def test_views_see_what_is_written_later_and_copies_do_not() -> None:
    def later(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        view = h.unsqueeze(-1)
        h.add_(m.b(x))
        return m.c(view.flatten(1))

    expect([8], Net(later, c=nn.Linear(8, 3), **linear(8, 8)), X)

    def copied(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        copy = h.transpose(1, 2).reshape(2, -1)
        copy.relu_()
        return m.c(h).mean(1) + m.out(copy)

    expect([4], Net(copied, c=nn.Linear(4, 3), out=nn.Linear(28, 3), **linear(4)), SEQUENCE)


# -- what reaches no output -------------------------------------------------------------------------------------------

UNUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cumsum": lambda h, g: h.cumsum(-1),
    "sum": lambda h, g: h + g,
    "cat": lambda h, g: torch.cat([h, g], -1).sort(-1),
    "written copy": lambda h, g: h.clone().add_(g),
    "written view of a copy": lambda h, g: h.clone()[:, :4].add_(g[:, 4:]),
    "norms": lambda h, g: F.layer_norm(h + g, (8,)).argmax(-1),
}


@pytest.mark.parametrize("kind", UNUSED)
def test_what_is_not_used_demands_nothing(kind: str) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h, g = relu(m.a(x)), relu(m.b(x))
        UNUSED[kind](h, g)
        return m.c(h) + m.out(g)

    expect([8, 8], Net(forward, c=nn.Linear(8, 3), out=nn.Linear(8, 3), **linear(8, 8)), X)


def test_what_is_written_or_kept_in_a_buffer_is_used() -> None:
    def written(m: Net, x: Tensor) -> Tensor:
        h, g = relu(m.a(x)), relu(m.b(x))
        h[:, :8].add_(g)
        return m.c(h) + m.out(g)

    expect([8], Net(written, c=nn.Linear(8, 3), out=nn.Linear(8, 3), **linear(8, 8)), X)

    def updated(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        m.mean.mul_(0.9).add_(0.1 * h.mean(0))
        return m.c(h - m.mean)

    expect([8], Net(updated, c=nn.Linear(8, 3), mean=torch.zeros(8), **linear(8)), X)


# -- constants with two axes ------------------------------------------------------------------------------------------

SQUARES: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
    "W + I": (lambda w: w + torch.eye(4, dtype=w.dtype), [4]),
    "I - W": (lambda w: torch.eye(4, dtype=w.dtype) - w, [4]),
    "no diagonal": (lambda w: w * (1 - torch.eye(4, dtype=w.dtype)), [4]),
    "masked": (lambda w: w.masked_fill(torch.eye(4).bool(), 0.0), [4]),
    "I + J": (lambda w: w * (torch.eye(4, dtype=w.dtype) + 1), [4]),
    "diagonal": (lambda w: w + torch.diag(torch.tensor([1.0, 1, 2, 2], dtype=w.dtype)), [2, 2]),
    "all different": (lambda w: w + torch.arange(16, dtype=w.dtype).view(4, 4), []),
    "causal": (lambda w: w * torch.ones(4, 4, dtype=w.dtype).tril(), []),
    "ones": (lambda w: w + torch.ones(4, 4, dtype=w.dtype), [4, 4]),
}


@pytest.mark.parametrize("kind", SQUARES)
def test_constants_that_two_axes_share(kind: str) -> None:
    """The identity ties rows and columns: units of ``a`` are those of ``c``; a matrix of ones leaves them apart."""
    change, expected = SQUARES[kind]

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.c(relu(relu(m.a(x)) @ change(m.w)))

    expect(expected, Net(forward, w=nn.Parameter(torch.randn(4, 4)), c=nn.Linear(4, 3), **linear(4)), X)


def test_constants_that_two_axes_share_beside_gram_matrices() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = relu(m.a(x))
        return m.c((h.transpose(1, 2) @ h - torch.eye(4, dtype=x.dtype)).flatten(1))

    expect([4], Net(forward, c=nn.Linear(16, 3), **linear(4)), SEQUENCE)
