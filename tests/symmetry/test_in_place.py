"""Networks that are moved where they are: the function, the gradients, and what follows the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.symmetry.action import permute_tensors, scale_tensors, sign_tensors
from tu_symmetry.symmetry.in_place import permute_in_place, scale_in_place, sign_in_place

NAMES = ("mlp_relu", "TinyLlama", "resnet_batchnorm", "BlocksInBlocks", "transformer_fused", "TiedAutoencoder",
         "weight_norm", "unet_add")  # fmt: skip
SOME = [c for c in CASES if c.name in NAMES]


def backward(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs; the gradients of a loss are left in the model."""
    model.zero_grad()
    out = model(*inputs)
    outputs = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, Tensor)]
    weights = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).reshape(o.shape) for o in outputs]
    torch.stack([(w * o).sum() for w, o in zip(weights, outputs, strict=True)]).sum().backward()
    return [o.detach() for o in outputs]


@pytest.mark.parametrize("kind", ["permutation", "scale", "signs"])
@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_function_gradients_and_averages_follow(case: Case, kind: str) -> None:
    torch.manual_seed(0)
    model, inputs = case.build().double().eval(), case.inputs()
    graph = tus.discover_symmetries(model, inputs)
    average = copy.deepcopy(model)
    for p in average.parameters():
        p.data += 0.1
    generator = torch.Generator().manual_seed(1)
    before = backward(model, inputs)
    identities = {n: id(t) for n, t in model.state_dict(keep_vars=True).items()}
    weights, averages = ({n: t.clone() for n, t in m.state_dict().items()} for m in (model, average))
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if kind == "permutation":
        p = tus.random_permutation(graph, generator=generator)
        permute_in_place(graph, p, model, mirrors=[average])
        expected = [permute_tensors(graph, p, t) for t in (weights, averages, gradients)]
    elif kind == "signs":
        signs = tus.random_signs(graph, generator=generator)
        sign_in_place(graph, signs, model, mirrors=[average])
        expected = [sign_tensors(graph, signs, t) for t in (weights, averages, gradients)]
    else:
        s = tus.random_scale(graph, generator=generator)
        scale_in_place(graph, s, model, mirrors=[average])
        expected = [scale_tensors(graph, s, t, power=k) for t, k in ((weights, 1), (averages, 1), (gradients, -1))]
    moved = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for found, wanted in zip((model.state_dict(), average.state_dict(), moved), expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[name])
    assert identities == {n: id(t) for n, t in model.state_dict(keep_vars=True).items()}
    loose = kind == "scale" and any(not g.exact for g in graph.groups() if isinstance(g, tus.symmetry.ScaleGroup))
    if not loose:  # what holds up to an epsilon is compared with what the pure action gives, above
        kept = {n: g.clone() for n, g in moved.items()}
        for a, b in zip(before, backward(model, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, kept[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["permutation", "scale", "range"])
def test_nothing_is_changed_where_a_module_cannot_follow(kind: str) -> None:
    """A module of another architecture, or an average that would leave the range of its dtype."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    graph = tus.discover_symmetries(model, torch.randn(2, 4))
    other: nn.Module = nn.Linear(4, 5)
    if kind == "range":
        other = copy.deepcopy(model)
        nn.init.constant_(other[0].weight, 1e38)
    before = [copy.deepcopy(m.state_dict()) for m in (model, other)]
    message = r"range of torch\.float32" if kind == "range" else "the state of Linear is not a state dict of Sequential"
    with pytest.raises(tus.SymmetryError, match=message):
        if kind == "permutation":
            permute_in_place(graph, {"0": torch.arange(5).flip(0)}, model, mirrors=[other])
        else:
            scale_in_place(graph, {"0": torch.full((5,), 3.0)}, model, mirrors=[other])
    for module, state in zip((model, other), before, strict=True):
        assert all(torch.equal(t, state[n]) for n, t in module.state_dict().items())


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop", "Adagrad"])
def test_a_step_after_a_change_of_signs_is_the_moved_step(optimizer: str) -> None:
    options = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}, "RMSprop": {"momentum": 0.9}}.get(optimizer, {})
    case = next(c for c in CASES if c.name == "TinyLlama")
    torch.manual_seed(0)
    model, inputs = case.build().double(), case.inputs()
    graph = tus.discover_symmetries(model, inputs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    twin = copy.deepcopy(model)
    pair = [(m, getattr(torch.optim, optimizer)(m.parameters(), lr=0.01, **options)) for m in (model, twin)]
    signs = tus.random_signs(graph, generator=generator)
    for step in range(4):
        for network, stepping in pair:
            backward(network, inputs)
            stepping.step()
        if step == 1:
            sign_in_place(graph, signs, twin, optimizers=[pair[1][1]])
    expected = tus.apply_signs(graph, signs, model.state_dict())
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-10)
