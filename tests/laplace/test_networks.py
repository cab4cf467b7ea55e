"""Networks of any modules, parameters that are read in several ways, and random networks, against dense oracles.

Everywhere: exact curvatures are exact, blocks that are no Kronecker products are the exact blocks, Kronecker factors
are exact for one sample where no position shares a weight, and covariances of outputs are ``J Sigma J^T``.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import FilterResponseNorm
from laplace_oracles import (
    Recurrent,
    SelfAttention,
    Tokens,
    cnn,
    dense_covariance,
    dense_curvature,
    exact_ggn,
    fitted,
    jacobian,
    mlp,
    randomize,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tu_symmetry.laplace.layers import UnsupportedLayerError
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import ReadElsewhereWarning

RTOL, ATOL = 1e-7, 1e-9
TOKENS = torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(2))


def inputs(*shape: int, samples: int = 6) -> Tensor:
    return torch.randn(samples, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def labels(outputs: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, outputs.shape[-1], outputs.shape[:-1], generator=generator)


def whole_of(la: LinearizedLaplace) -> set[str]:
    """Parameters with an exact block in place of Kronecker factors."""
    return set(la.fitted.curvature.whole)


def compare(model: nn.Module, x: Tensor, y: Tensor, *, one: bool = False) -> LinearizedLaplace:
    """All laws of this file for one network; ``one``: one sample, no position shares a weight, so all blocks exact."""
    full = fitted(model, x, y, curvature="full")
    exact = exact_ggn(model, full.tangent.names, x, y, "classification")
    scale = float(exact.abs().max())
    torch.testing.assert_close(dense_curvature(full), exact, rtol=RTOL, atol=ATOL * scale)
    diagonal = fitted(model, x, y, curvature="diag")
    torch.testing.assert_close(dense_curvature(diagonal).diagonal(), exact.diagonal(), rtol=RTOL, atol=ATOL * scale)
    la = fitted(model, x, y)
    found, covered = dense_curvature(la), 0
    for block in la.posterior.blocks:
        assert block.start == covered
        covered, own = block.stop, slice(block.start, block.stop)
        if block.kind == "kronecker" and not one:
            continue
        wanted = torch.diag(exact[own, own].diagonal()) if block.kind == "diagonal" else exact[own, own]
        torch.testing.assert_close(found[own, own], wanted, rtol=RTOL, atol=ATOL * scale)
    assert covered == la.tangent.size
    jac = jacobian(model, la.tangent.names, x)
    flat = jac.reshape(len(x), -1, jac.shape[-1])
    expected = torch.einsum("nci,ij,ndj->ncd", flat, dense_covariance(la), flat)
    covariance = la.function_covariance(x)[1]
    torch.testing.assert_close(covariance, expected, rtol=1e-6, atol=1e-8 * float(expected.abs().max()))
    return la


class ByHand(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(3, width))])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0].T


def doubled(module: Any) -> Any:
    """The same module with a forward of the object itself, as packages patch it in."""
    module.forward = partial(twice, module)
    return module


def twice(module: nn.Module, *args: Any) -> Any:
    return 2 * type(module).forward(module, *args)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "mlp": (mlp, (4,), set()),
    "cnn": (cnn, (2, 6, 6), set()),
    "tokens": (Tokens, (), set()),
    "attention": (lambda: SelfAttention(False), (3, 4), set()),
    "tagger": (lambda: Tokens(False), (), set()),
    "per_position": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), (4, 3), set()),
    "frn": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), FilterResponseNorm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                              nn.Linear(4, 3)),
        (2, 5, 5), {"1.gamma", "1.beta", "1.tau"},
    ),
    "transposed": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.ConvTranspose1d(2, 3, 2), nn.PReLU(3),
                              nn.Flatten(), nn.Linear(15, 3)),
        (4,), {"2.weight", "2.bias", "3.weight"},
    ),
    "by_hand": (ByHand, (4,), {"weights.0"}),
    "linear": (lambda: nn.Sequential(doubled(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)), (4,),
               {"0.weight", "0.bias"}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MODULES))
def test_curvatures_and_covariances_of_modules(name: str) -> None:
    """Modules of any kind, called in any way, or with a forward of their own, have exact blocks in place of factors."""
    build, shape, whole = MODULES[name]
    model, x = randomize(build()), inputs(*shape) if shape else TOKENS
    assert whole_of(compare(model, x, labels(model(x)))) == whole


def test_a_parameter_of_many_entries_gets_the_diagonal_of_its_block() -> None:
    model, x = randomize(ByHand(1400)), inputs(1400)
    y = labels(model(x))
    (found,), (expected,) = (fitted(model, x, y, curvature=c).posterior.blocks for c in ("kfac", "diag"))
    assert found.kind == "diagonal"
    torch.testing.assert_close(found.eigenvalues(), expected.eigenvalues())


def test_modules_without_a_vectorized_derivative() -> None:
    model, x = randomize(Recurrent()), inputs(3, 4)
    y = labels(model(x))
    la, diagonal = fitted(model, x, y), fitted(model, x, y, curvature="diag")
    assert whole_of(la) == {name for name in la.tangent.names if name.startswith("memory")}
    found = dense_curvature(la).diagonal()[: -3 * 5 - 3]
    torch.testing.assert_close(found, dense_curvature(diagonal).diagonal()[: len(found)], rtol=1e-9, atol=1e-11)
    assert torch.isfinite(la.predictive(x)).all()


class Inner(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Tensor], first: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b, self.read = first or nn.Linear(5, 5), nn.Linear(5, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.read(self, x)))


def hooked() -> nn.Module:
    """A hook of the user's that changes what a layer gives belongs to the network."""
    model = Inner(lambda m, x: m.a(x))
    model.a.register_forward_hook(lambda module, args, output: output * 3)
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.again, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.again.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x) + self.again(x * x)))


READS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "weight_transposed": (lambda: Inner(lambda m, x: m.a(x) + x @ m.a.weight.T), {"a.weight"}),
    "bias": (lambda: Inner(lambda m, x: m.a(x) * m.a.bias), {"a.bias"}),
    "penalty": (lambda: Inner(lambda m, x: m.a(x) / (1 + m.a.weight.square().sum())), {"a.weight"}),
    "normalization": (lambda: Inner(lambda m, x: m.a(x) + m.a.weight, nn.LayerNorm(5)), {"a.weight"}),
    "hook": (hooked, {"a.weight", "a.bias"}),
    "tied": (Tied, {"a.weight"}),
    "called_twice": (lambda: Inner(lambda m, x: m.a(torch.tanh(m.a(x)))), {"a.weight", "a.bias"}),
}


@pytest.mark.parametrize("name", list(READS))
def test_a_parameter_that_is_read_besides_gets_its_exact_block(name: str) -> None:
    build, read = READS[name]
    model, x = randomize(build()), inputs(5)
    with pytest.warns(ReadElsewhereWarning, match=sorted(read)[0]):
        la = compare(model, x, labels(model(x)))
    assert whole_of(la) == read


def test_another_axis_as_long_as_the_batch_is_no_batch() -> None:
    """A layer behind a transposition sees positions first; with as many of them as samples no length tells."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x.transpose(0, 1))).transpose(0, 1).mean(1))

    for length in (2, 4, 8):
        model, x = randomize(Turned()), inputs(length, 3, samples=length)
        with pytest.raises(UnsupportedLayerError, match=r"'a'.*first axis has to be the batch"):
            fitted(model, x, labels(model(x)), kfac_approx="reduce")


def linear(change: Callable[[Any], Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    change(model[0])
    return model


norm: Any = parametrizations.weight_norm
PARAMETRIZED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(norm(nn.Linear(4, 5)), nn.Tanh(), norm(nn.Linear(5, 3))), (4,)),
    "convolution": (
        lambda: nn.Sequential(norm(nn.Conv1d(2, 4, 3, padding=1)), nn.ReLU(),
                              norm(nn.Conv1d(4, 4, 2, groups=2), dim=None), nn.Flatten(), nn.Linear(12, 3)),
        (2, 4),
    ),
    "old": (lambda: linear(nn.utils.weight_norm), (4,)),
    "embedding": (lambda: nn.Sequential(norm(nn.Embedding(5, 4)), norm(nn.Linear(4, 3))), ()),
    "spectral": (lambda: linear(parametrizations.spectral_norm), (4,)),
    "orthogonal": (lambda: linear(parametrizations.orthogonal), (4,)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("kind", list(PARAMETRIZED))
def test_parametrized_weights_have_the_exact_blocks_of_their_originals(kind: str) -> None:
    """For ``W = g v / ||v||`` by the chain rule through ``W``; all other parameters as ever."""
    build, shape = PARAMETRIZED[kind]
    model = build().double().eval() if kind in ("orthogonal", "spectral") else randomize(build())
    x = inputs(*shape) if shape else TOKENS
    la = compare(model, x, labels(model(x)))
    assert whole_of(la) >= {name for name in la.tangent.names if "original" in name or name.endswith(("_g", "_v"))}


class Random(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.kind = rng.choice(["vector", "tokens", "image"])
        self.per_position = self.kind == "tokens" and rng.random() < 0.5
        self.layers: Any = nn.ModuleList()
        self.reads: list[str] = []
        width = rng.randint(2, 4)
        self.size = width
        if self.kind == "tokens":
            self.layers.append(nn.Embedding(5, width))
            self.reads.append("")
        for _ in range(rng.randint(1, 3)):
            new = rng.choice([width, rng.randint(2, 4)])
            if self.kind == "image":
                groups = 2 if width % 2 == 0 and new % 2 == 0 and rng.random() < 0.3 else 1
                layer: nn.Module = nn.Conv2d(width, new, rng.choice([1, 3]), padding="same", groups=groups,
                                             bias=rng.random() < 0.7)  # fmt: skip
            else:
                layer = nn.Linear(width, new, bias=rng.random() < 0.7)
            if rng.random() < 0.3:
                layer = parametrizations.weight_norm(layer)
            reads = self.kind != "image" and width == new and rng.random() < 0.4
            self.layers.append(layer)
            self.reads.append(rng.choice(["plus", "gram", "scale"]) if reads else "")
            if rng.random() < 0.5:
                self.layers.append(self._norm(rng, new))
                self.reads.append("")
            width = new
        self.head = nn.Linear(width, 3)
        self.width, self.tied_head = width, rng.random() < 0.2

    def _norm(self, rng: random.Random, width: int) -> nn.Module:
        if self.kind == "image":
            return rng.choice([nn.BatchNorm2d(width), nn.GroupNorm(1, width), nn.PReLU(width)])
        return rng.choice([nn.LayerNorm(width), nn.RMSNorm(width)])

    def example(self, samples: int) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        if self.kind == "tokens":
            return torch.randint(0, 5, (samples, 3), generator=generator)
        shape = (self.size,) if self.kind == "vector" else (self.size, 3, 2)
        return torch.randn(samples, *shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer, read in zip(self.layers, self.reads, strict=True):
            y = layer(x)
            if read == "plus":
                y = y + x @ layer.weight
            elif read == "gram":
                y = y @ (layer.weight @ layer.weight.T)
            elif read == "scale":
                y = y * layer.weight.abs().mean()
            x = torch.tanh(y)
        if self.kind == "image":
            x = x.mean((2, 3))
        elif self.kind == "tokens" and not self.per_position:
            x = x.mean(1)
        if self.tied_head:
            return self.head(x) + F.linear(x, self.head.weight)
        return self.head(x)


def planted(model: Random) -> set[str]:
    """The parameters that are read besides: known from how the network was made."""
    names = set()
    for i, (layer, read) in enumerate(zip(model.layers, model.reads, strict=True)):
        if read:
            names |= {f"layers.{i}.{n}" for n, _ in layer.named_parameters() if n != "bias"}
    return names | ({"head.weight"} if model.tied_head else set())


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 400))])
def test_random_networks(seed: int) -> None:
    model = Random(seed)
    randomize(model, seed)
    x = model.example(5)
    y = labels(model(x).detach(), seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReadElsewhereWarning)
        la = compare(model, x, y)
        prelu = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.PReLU)]
        others = {name for name in la.tangent.names if "original" in name or name.startswith(tuple(prelu))}
        assert whole_of(la) == planted(model) | others
        if model.kind == "vector":
            compare(model, x[:1], y[:1], one=True)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("curvature", ["kfac", "full"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused_in_clear_words(reentrant: bool, curvature: str) -> None:
    """What runs again in the backward pass is neither watched nor known to ``torch.func``."""
    model, x = randomize(Checkpointed(reentrant)), inputs(4)
    refused = r"switch off activation checkpointing|inner\.0\.weight, but it gets no gradient"
    with pytest.raises(ValueError, match=refused):
        fitted(model, x, labels(model(x)), curvature=curvature)


class Last(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(5, 3 if kind == "tied" else 5), kind
        self.last: Any = Normalized(5, 3) if kind == "scaled" else nn.Linear(5, 3)
        if kind == "tied":
            self.last.weight = self.first.weight
        elif kind == "parametrized":
            self.last = parametrizations.weight_norm(self.last)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.kind == "read":
            h = h + x @ self.last.weight.T @ self.last.weight
        elif self.kind == "tied":
            h = h @ self.first.weight
        return self.last(h)


class Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["read", "scaled", "tied", "parametrized"])
def test_last_layers_without_a_closed_form_are_refused(kind: str, dtype: torch.dtype) -> None:
    model, x = randomize(Last(kind)).to(dtype), inputs(5).to(dtype)
    y = labels(model(x).detach())
    message = "'last' are read elsewhere" if kind in ("read", "scaled") else r"'last' does not own its last\.weight"
    with pytest.raises(ValueError, match=message):
        fitted(model, x, y, curvature="last_layer")
    if kind != "tied" and dtype == torch.float64:
        la = fitted(model, x, y, curvature="full", parameters=["last"])  # the way out that the message names
        exact = exact_ggn(model, la.tangent.names, x, y, "classification")
        torch.testing.assert_close(dense_curvature(la), exact, rtol=1e-8, atol=1e-10)
    fitted(randomize(Last("plain")).to(dtype), x, y, curvature="last_layer")
