"""Layers of other kinds: exact blocks of whatever a module owns, refusals by name where that cannot be, bad input."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from laplace_oracles import Recurrent, data, dense_covariance, dense_curvature, exact_ggn, jacobian, mlp, randomize
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.laplace.hooks import Watch, watching
from tu_symmetry.laplace.layers import UnsupportedLayerError
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import ReadElsewhereWarning


class FilterResponseNorm(nn.Module):
    """Three parameters of its own, one inside a maximum (arXiv 1911.09737)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("gamma", "beta", "tau"):
            self.register_parameter(name, nn.Parameter(torch.zeros(1, channels, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        normalized = x * (x.square().mean((2, 3), keepdim=True) + 1e-6).rsqrt()
        return torch.maximum(self.gamma * normalized + self.beta, self.tau)


def frn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), FilterResponseNorm(4), nn.Conv2d(4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(3, 3),
    )  # fmt: skip


class Scaled(nn.Module):
    """A residual block with a parameter of its own around layers with theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.inner = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


class VisionTransformer(nn.Module):
    """Class token and positions, owned by the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 4, 4))
        self.embed, self.block = nn.Linear(2, 4), Scaled(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.positions
        x = self.block(x)
        return self.head((x + self.attention(x, x, x, need_weights=False)[0])[:, 0])


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.ConvTranspose1d(2, 3, 2), nn.PReLU(3), nn.Flatten(),
        nn.Linear(15, 3),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "frn": (frn, (2, 5, 5)),
    "vision_transformer": (VisionTransformer, (3, 2)),
    "transposed": (transposed, (4,)),
}


@pytest.mark.parametrize("limit", [4096, 3])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_parameters_of_other_modules_get_exact_blocks(name: str, limit: int) -> None:
    """Dense up to the limit, and a diagonal beyond."""
    build, shape = NETWORKS[name]
    model, (x, y) = randomize(build()), data(*shape, outputs=3)
    la = LinearizedLaplace(model, prior="single", evaluate_at="map", dense_limit=limit)
    la.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    exact, found = exact_ggn(model, la.tangent.names, x, y, "classification"), dense_curvature(la)
    kinds = []
    for block in la.posterior.blocks:
        own = slice(block.start, block.stop)
        if block.kind == "kronecker":
            continue
        wanted = exact[own, own] if block.kind == "dense" else torch.diag(exact[own, own].diagonal())
        torch.testing.assert_close(found[own, own], wanted, rtol=1e-8, atol=1e-10)
        assert (block.kind == "dense") == (block.stop - block.start <= limit)
        if float(wanted.norm()) > 1e-6:  # the bias of an attention's keys has no effect
            kinds.append(block.name)
    assert len(set(kinds)) >= 4
    jac = jacobian(model, la.tangent.names, x)
    expected = torch.einsum("nci,ij,ndj->ncd", jac, dense_covariance(la), jac)
    torch.testing.assert_close(la.function_covariance(x)[1], expected, rtol=1e-8, atol=1e-10)


def test_per_group_with_filter_response_normalization() -> None:
    """Where laplace-torch raises; the convolutions before the normalization are groups of their own."""
    model, (x, y) = randomize(frn()), data(2, 5, 5, outputs=3)
    la = LinearizedLaplace(model, prior="per_group").fit([(x, y)])
    assert len(la.prior_groups) > 1
    assert torch.isfinite(la.predictive(x)).all()


# ---------------------------------------------------------------------- refusals


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, x)


class ByHand(nn.Module):
    """A list of parameters that no module call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(3, 4))])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0].T


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 2)).transpose(0, 1)
        return self.head(self.attention(x, x, x)[0].mean(0))


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Keyword, "'layer'"),
        (Unused, "spare"),
        (SequenceFirst, "attention"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1, add_bias_kv=True)), "1 "),
    ],
)
def test_modules_without_factors_are_refused_by_name_with_a_way_out(build: Callable[[], nn.Module], name: str) -> None:
    model, (x, y) = randomize(build()), data(4, outputs=3)
    with pytest.raises(UnsupportedLayerError) as error:
        LinearizedLaplace(model, prior="single").fit([(x, y)])
    assert name in str(error.value)
    assert "parameters=[...]" in str(error.value)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("build", [TwoArguments, lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), Recurrent(2)), ByHand])
def test_modules_of_any_other_kind_have_the_exact_block(build: Callable[[], nn.Module]) -> None:
    """Called with several arguments, without a vectorized derivative, or not called at all."""
    model, (x, y) = randomize(build()), data(4, outputs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReadElsewhereWarning)
        la = LinearizedLaplace(model, prior="single", evaluate_at="map").fit([(x, y)])
        diagonal = LinearizedLaplace(model, prior="single", evaluate_at="map", curvature="diag").fit([(x, y)])
    names = list(la.tangent.names)
    assert set(names) - set(la.whole) <= {"1.head.weight", "1.head.bias"}
    exact = exact_ggn(model, names, x, y, "classification") if not isinstance(model, nn.Sequential) else None
    for name in la.whole:
        own = slice(*la.tangent.slots[name][:2])
        found = dense_curvature(la)[own, own]
        torch.testing.assert_close(found.diagonal(), dense_curvature(diagonal).diagonal()[own], rtol=1e-9, atol=1e-11)
        if exact is not None:
            torch.testing.assert_close(found, exact[own, own], rtol=1e-9, atol=1e-11)
    assert torch.isfinite(la.predictive(x)).all()


@pytest.mark.parametrize("curvature", ["kfac", "diag", "full", "last_layer"])
def test_normalization_by_the_batch_is_refused(curvature: str) -> None:
    """Each sample's output depends on the others: there is no Jacobian of a sample."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)).double()
    x, y = data(4, outputs=3)
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\).*running statistics"):
        LinearizedLaplace(model, prior="single", curvature=curvature).fit([(x, y)])  # type: ignore[arg-type]


# ---------------------------------------------------------------------- bad input


X, Y = data(4, outputs=3)
REAL = data(4, outputs=3, kind="regression")[1]
NAN = X.clone().index_fill_(0, torch.tensor([4]), torch.nan)
LOADERS: list[tuple[str, Any, type[Exception], str]] = [
    ("classification", [], ValueError, "gave no samples"),
    ("classification", [(X[:0], Y[:0])], ValueError, "gave no samples"),
    ("classification", [X], TypeError, r"\(inputs, targets\)"),
    ("classification", [{"x": X, "y": Y}], TypeError, "one of the names"),
    ("classification", [(X, Y), (NAN, Y)], ValueError, "NaN or infinite"),
    ("classification", [(X / 0, Y)], ValueError, "NaN or infinite"),
    ("classification", [(X, Y + 1)], ValueError, r"targets lie in \[1, 3\].*3 outputs"),
    ("classification", [(X, Y - 100)], ValueError, "ignore_index"),
    ("classification", [(X, Y.double())], ValueError, "class numbers"),
    ("classification", [(X, Y[:4])], ValueError, r"\(4,\)"),
    ("classification", [(X, REAL)], ValueError, "likelihood='regression'"),
    ("regression", [(X, Y)], ValueError, "regression needs them equal"),
    ("regression", [(X, REAL[:, :2])], ValueError, r"\(9, 2\).*\(9, 3\)"),
    ("regression", [(X, REAL * torch.nan)], ValueError, "targets hold NaN"),
]


@pytest.mark.parametrize("curvature", ["kfac", "diag", "full", "last_layer"])
@pytest.mark.parametrize(("kind", "loader", "error", "message"), LOADERS)
def test_bad_data(kind: str, loader: Any, error: type[Exception], message: str, curvature: str) -> None:
    la = LinearizedLaplace(mlp(), kind, prior="single", curvature=curvature)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        la.fit(loader)
    with pytest.raises(RuntimeError, match="call fit"):
        la.predictive(X)


def test_a_failed_fit_leaves_the_earlier_one() -> None:
    la = LinearizedLaplace(mlp(), prior="single", evaluate_at="map").fit([(X, Y)])
    before = la.log_marginal_likelihood()
    with pytest.raises(ValueError, match="NaN"):
        la.fit([(NAN, Y)])
    assert la.log_marginal_likelihood() == before


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_of_a_diverged_run(value: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 0] = value
    with pytest.raises(ValueError, match=r"2\.weight holds NaN or infinite"):
        LinearizedLaplace(model, prior="single").fit([(X, Y)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood": "poisson"}, "'poisson'"),
        ({"prior": "per_weight"}, "'per_tensor'"),
        ({"evaluate_at": "mean"}, "'tangent_mode'"),
        ({"curvature": "low_rank"}, "'last_layer'"),
        ({"fisher_type": "mcmc"}, "'empirical'"),
        ({"kfac_approx": "sum"}, "'reduce'"),
        ({"bias": "none"}, "'shared'"),
        ({"mc_samples": 0}, "mc_samples=0"),
        ({"prior_precision": -1.0}, "positive"),
        ({"prior_precision": {"rest": math.inf}}, "finite"),
        ({"noise_variance": 0.1}, "regression"),
        ({"likelihood": "regression", "noise_variance": -1.0}, "positive"),
        ({"likelihood": "regression", "fisher_type": "empirical"}, "type-2"),
        ({"parameters": ["5.weight"]}, r"5\.weight.*matches no parameter"),
        ({"parameters": []}, "nothing would be left"),
        ({"curvature": "last_layer", "parameters": ["0", "2"]}, "one linear layer"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearizedLaplace(mlp(), **options)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a": ["0.weight"], "b": ["0.weight", "2.bias"]}, "twice"),
        ({"a": ["7.weight"]}, r"7\.weight"),
        ({"a": "0.weight"}, "a list of parameter names"),
    ],
)
def test_groups_that_make_no_sense(groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearizedLaplace(mlp(), groups=groups).fit([(X, Y)])


def test_groups_by_hand() -> None:
    la = LinearizedLaplace(mlp(), groups={"weights": ["0.weight", "2.weight"]}).fit([(X, Y)])
    assert {row.name: row.size for row in la.report()} == {"weights": 35, "rest": 8}


def test_frozen_networks_and_outputs_of_other_shapes() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        LinearizedLaplace(model)
    la = LinearizedLaplace(model, parameters=["2"], prior="single").fit([(X, Y)])  # may be named all the same
    assert la.tangent.names == ("2.weight", "2.bias")
    dense = nn.Conv2d(2, 3, 3).double()
    x = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"\(2, 3, 2\).*outputs \(2, 4, 3\)"):
        LinearizedLaplace(dense, prior="single").fit([(x, torch.zeros(2, 3, 2, dtype=torch.long))])
    with pytest.raises(ValueError, match="likelihood='binary'"):
        LinearizedLaplace(nn.Linear(4, 1).double(), prior="single").fit([(X, Y % 2)])


def test_a_single_output_and_flat_targets() -> None:
    """``[batch]`` outputs and targets of a regression are one column."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).squeeze(-1)

    flat, (x, y) = randomize(Flat()), data(4, outputs=1, kind="regression")
    found = LinearizedLaplace(flat, "regression", prior="single").fit([(x, y[:, 0])])
    column = LinearizedLaplace(flat.layer, "regression", prior="single").fit([(x, y)])  # type: ignore[arg-type]
    assert found.log_marginal_likelihood() == pytest.approx(column.log_marginal_likelihood(), rel=1e-9)
    torch.testing.assert_close(found.predictive(x).variance, column.predictive(x).variance)


class Normalized(nn.Module):
    """Batch normalization in every way that it can be called."""

    def __init__(self, spatial: int) -> None:
        super().__init__()
        self.whole = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[max(0, spatial - 1)](3)
        self.bare = type(self.whole)(3, affine=False, eps=0.1)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.whole.running_mean, self.whole.running_var
        assert mean is not None and variance is not None
        x = F.batch_norm(self.bare(self.whole(x)), mean, variance, bias=self.whole.bias, eps=0.2)
        x = torch.nn.functional.batch_norm(input=x, running_mean=mean, running_var=variance, weight=self.whole.weight)
        return x + F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("spatial", [0, 1, 2, 3])
def test_batch_normalization_is_watched_as_scale_and_shift(spatial: int) -> None:
    model, x = randomize(Normalized(spatial)), data(3, *range(2, 2 + spatial), outputs=3)[0]
    expected = model(x.requires_grad_())
    cotangent = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, x, cotangent, retain_graph=True)
    with watching(model, [], Watch(lambda layer, rows: None)) as forward:
        found = forward(x, len(x))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found, x, cotangent)[0], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", [0, 1, "valid"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 2])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_convolutions_of_single_entries_are_watched_without_their_stride(
    spatial: int, kernel: int, stride: int, padding: int | str
) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1]
    steps = (*[stride] * (spatial - 1), 1) if spatial == 3 else stride
    model = kind(4, 6, kernel, steps, padding, groups=2).double()  # type: ignore[arg-type]
    x = torch.randn(3, 4, *range(5, 5 + spatial), dtype=torch.float64, requires_grad=True)
    expected = model(x)
    cotangent = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, x, cotangent)
    with watching(model, [], Watch(lambda layer, rows: None)) as forward:
        found = forward(x, len(x))
        torch.testing.assert_close(forward(x[0], 1), expected[0], rtol=1e-12, atol=1e-12)  # without a batch
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found, x, cotangent)[0], gradient, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- forward passes of their own


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class Padded(nn.Conv1d):
    """A convolution around a circle with a sign, by the method that ``forward`` calls."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv1d(torch.cat([-input[..., -1:], input], -1), weight, bias)


class Attending(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention, self.head = attention, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def doubled(module: Any) -> Any:
    """The same module with a forward of the object itself, as packages patch it in."""
    module.forward = partial(twice, module)
    return module


def twice(module: nn.Module, *args: Any) -> Any:
    return 2 * type(module).forward(module, *args)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(doubled(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        nn.Sequential(nn.Unflatten(1, (1, 4)), Padded(1, 2, 2), nn.Flatten(), nn.Tanh(), nn.Linear(8, 3)),
        nn.Sequential(nn.Unflatten(1, (1, 4)), doubled(nn.Conv1d(1, 2, 2)), nn.Flatten(), nn.Tanh(), nn.Linear(6, 3)),
        nn.Sequential(nn.Linear(4, 5), doubled(nn.LayerNorm(5)), nn.Linear(5, 3)),
    ],
    ids=["linear", "convolution by a method", "convolution", "norm"],
)
def test_a_forward_of_its_own_has_the_exact_block(model: nn.Module) -> None:
    """Of a class, of the method it calls, or of the object: factors of what the class computes would be of another."""
    model = randomize(model)
    la = LinearizedLaplace(model, prior="single", evaluate_at="map").fit([(X, Y)])
    exact = exact_ggn(model, la.tangent.names, X, Y, "classification")
    found = dense_curvature(la)
    (own,) = [name for name, m in model.named_modules() if isinstance(m, Padded) or "forward" in vars(m)]
    for name in (f"{own}.weight", f"{own}.bias"):
        place = slice(*la.tangent.slots[name][:2])
        torch.testing.assert_close(found[place, place], exact[place, place], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [Doubled, nn.MultiheadAttention])
def test_attention_with_a_forward_of_its_own_is_refused_by_name(kind: type[nn.MultiheadAttention]) -> None:
    x = torch.randn(9, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attention = kind(4, 2, batch_first=True)
    model = randomize(Attending(attention))
    if kind is nn.MultiheadAttention:
        LinearizedLaplace(model, prior="single", evaluate_at="map").fit([(x, Y)])
        attention.forward = partial(kind.forward, attention)  # type: ignore[method-assign]
    own = vars(attention).get("forward")
    with pytest.raises(UnsupportedLayerError, match=rf"attention \({kind.__name__} with a forward of its own\)"):
        LinearizedLaplace(model, prior="single", evaluate_at="map").fit([(x, Y)])
    assert vars(attention).get("forward") is own
    LinearizedLaplace(model, prior="single", evaluate_at="map", curvature="diag").fit([(x, Y)])
    la = LinearizedLaplace(model, prior="single", evaluate_at="map", parameters=["head"]).fit([(x, Y)])
    assert not la.whole
