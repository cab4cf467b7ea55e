"""BackPACK as a source of samples' gradients: the same curvature as torch.func, and refusals that name the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tu_symmetry.laplace.layers import UnsupportedLayerError
from tu_symmetry.laplace.model import LinearizedLaplace


class Residual(nn.Module):
    """A residual network with normalization, grouped and transposed convolutions, and an in-place activation."""

    def __init__(self, padding_mode: str = "zeros") -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, padding_mode=padding_mode)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        return self.head(self.up(x + self.conv(x)).tanh().mean((2, 3)))


class Tokens(nn.Module):
    """Outputs at several positions of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(x)))


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))


class Aside(nn.Module):
    """A weight that is read without calling its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(x @ self.a.weight))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for t in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(t)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def fitted(model: nn.Module, x: Tensor, y: Tensor, kind: str = "classification", **options: Any) -> LinearizedLaplace:
    la = LinearizedLaplace(model, kind, prior="single", evaluate_at="map", **options)  # type: ignore[arg-type]
    return la.fit([(x[:4], y[:4]), (x[4:], y[4:])])


def matrix(la: LinearizedLaplace) -> Tensor:
    """The curvature as one matrix."""
    size = la.posterior.size
    found = torch.zeros(size, size, dtype=torch.float64)
    for block in la.posterior.blocks:
        own = slice(block.start, block.stop)
        basis = block.to_basis(torch.eye(block.stop - block.start, dtype=torch.float64))
        found[own, own] = basis @ torch.diag(block.eigenvalues()) @ basis.mT
    return found


CASES = {
    "mlp": (mlp, torch.randn(7, 4).double(), torch.arange(7) % 3, "classification"),
    "mlp, regression": (mlp, torch.randn(7, 4).double(), torch.randn(7, 3).double(), "regression"),
    "residual": (Residual, torch.randn(7, 1, 5, 5).double(), torch.arange(7) % 3, "classification"),
    "positions": (Tokens, torch.randn(7, 4, 4).double(), torch.arange(28).reshape(7, 4) % 3, "classification"),
}
FISHERS = ["type-2", "mc", "empirical"]
CHOICES = [(c, f) for c in CASES for f in FISHERS if (c, f) != ("mlp, regression", "empirical")]  # refused everywhere


@pytest.mark.parametrize("curvature", ["diag", "full"])
@pytest.mark.parametrize(("case", "fisher"), CHOICES)
def test_the_curvature_is_that_of_the_hooks(case: str, curvature: str, fisher: str) -> None:
    build, x, y, kind = CASES[case]
    model = made(build)
    options = {"curvature": curvature, "fisher_type": fisher}
    ours, theirs = (fitted(model, x, y, kind, backend=b, **options) for b in ("hooks", "backpack"))
    expected = matrix(ours)
    assert float(expected.diagonal().min()) >= 0 and float(expected.norm()) > 1e-3
    torch.testing.assert_close(matrix(theirs), expected, rtol=1e-9, atol=1e-11)
    assert theirs.log_marginal_likelihood() == pytest.approx(float(ours.log_marginal_likelihood()), rel=1e-10)


def test_some_parameters_alone_frozen_or_not() -> None:
    model, (_, x, y, _) = made(Residual), CASES["residual"]
    model.conv.weight.requires_grad_(False)
    options = {"curvature": "diag", "parameters": ["conv", "head.bias"]}
    ours, theirs = (fitted(model, x, y, backend=b, **options) for b in ("hooks", "backpack"))
    torch.testing.assert_close(matrix(theirs), matrix(ours), rtol=1e-9, atol=1e-12)
    assert not model.conv.weight.requires_grad


def test_the_network_itself_is_left_alone() -> None:
    model, (_, x, y, _) = made(Residual), CASES["residual"]
    before = {name: sorted(vars(m)) for name, m in model.named_modules()}
    fitted(model, x, y, curvature="diag", backend="backpack")
    assert {name: sorted(vars(m)) for name, m in model.named_modules()} == before
    assert model.act.inplace and all(p.requires_grad and not hasattr(p, "grad_batch") for p in model.parameters())
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())


REFUSED = {
    "no extension": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), r"1 \(LayerNorm\)"),
    "padding": (lambda: Residual("circular"), r"stem \(Conv2d\)"),
    "called twice": (Twice, r"gradient of a \(Linear\)"),
    "read aside": (Aside, r"gradient of a \(Linear\)"),
    "tied": (Tied, r"\['a.weight', 'b.weight'\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_that_backpack_would_get_wrong_is_refused_by_name(case: str) -> None:
    build, words = REFUSED[case]
    model = made(build)
    if case == "read aside":
        model.a.bias.requires_grad_(False)
    x = CASES["residual"][1] if case == "padding" else CASES["mlp"][1]
    y = torch.arange(7) % 3
    with pytest.raises(UnsupportedLayerError, match=words) as caught:
        fitted(model, x, y, curvature="diag", backend="backpack")
    assert "backend='hooks'" in str(caught.value)
    fitted(model, x, y, curvature="diag", backend="hooks")


def test_curvatures_with_hooks_of_their_own_take_no_other_backend() -> None:
    for curvature in ("kfac", "ekfac", "last_layer"):
        with pytest.raises(ValueError, match="'diag' and 'full'"):
            LinearizedLaplace(mlp(), curvature=curvature, backend="backpack")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend='curvlinops' is not known"):
        LinearizedLaplace(mlp(), curvature="diag", backend="curvlinops")  # type: ignore[arg-type]
