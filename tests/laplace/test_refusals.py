"""What cannot be approximated says so in one clear line: models, outputs, weights, options and batches.

Every refusal holds at the fit, in both modes and for every curvature: nothing wrong is approximated in silence.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace_oracles import data, fitted, mlp, randomize
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.laplace.layers import UnsupportedLayerError
from tu_symmetry.laplace.linearized import LinearizedLaplace

X, Y = data(4, outputs=3)
REAL = data(4, outputs=3, kind="regression")[1]
NAN = X.clone().index_fill_(0, torch.tensor([4]), torch.nan)
CURVATURES = ["kfac", "full", "last_layer"]
every_curvature = pytest.mark.parametrize("curvature", CURVATURES)


class Around(nn.Module):
    def __init__(
        self, between: Callable[[Tensor], Tensor] = torch.tanh, after: Callable[[Tensor], Any] = lambda h: h
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.second(self.between(self.first(x))))


class Backbone(Around):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.second(h)


def fit(model: nn.Module, x: Any = X, y: Tensor = Y, **options: Any) -> LinearizedLaplace:
    return fitted(model, (x,) if isinstance(x, Tensor) else x, y, **options)


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "tuple": (lambda h: (h, h), TypeError, "returns a tuple"),
    "dictionary": (lambda h: {"scores": h}, TypeError, "returns a dict"),
    "none": (lambda h: None, TypeError, "returns a NoneType"),
    "integer": (lambda h: h.argmax(-1), TypeError, "int64.*logits"),
    "complex": (lambda h: h.to(torch.complex128), TypeError, "complex128"),
    "bfloat16": (lambda h: h.bfloat16(), TypeError, r"bfloat16.*model\.float\(\)"),
    "scalar": (lambda h: h.sum(), ValueError, r"shape \(\) for a batch of 4"),
    "one_for_the_batch": (lambda h: h.mean(0, keepdim=True), ValueError, r"\(1, 3\) for a batch of 4"),
    "batch_last": (lambda h: h.T, ValueError, r"\(3, 4\) for a batch of 4"),
    "nothing": (lambda h: h[:, :0], ValueError, "no values"),
}


@every_curvature
@pytest.mark.parametrize("name", list(OUTPUTS))
def test_outputs_that_are_no_tensor_of_real_numbers(name: str, curvature: str) -> None:
    after, error, message = OUTPUTS[name]
    with pytest.raises(error, match=message):
        fit(randomize(Around(after=after)), curvature=curvature)


BETWEEN: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda h: F.dropout(h, 0.3), "change from call to call"),
    (lambda h: h - h.mean(0), "depends on the other samples"),
    (lambda h: F.batch_norm(h, None, None, training=True), "depends on the other samples"),
    (lambda h: h.cumsum(0), "depends on the other samples"),
    (nn.BatchNorm1d(5, track_running_stats=False).double(), r"between \(BatchNorm1d\).*running statistics"),
]


@every_curvature
@pytest.mark.parametrize(("between", "message"), BETWEEN)
def test_networks_that_are_no_function_of_a_sample(
    between: Callable[[Tensor], Tensor], message: str, curvature: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(randomize(Around(between=between)), curvature=curvature)
    fit(randomize(Around(between=nn.Dropout(0.3))), curvature=curvature)  # which evaluation mode switches off


@pytest.mark.parametrize("curvature", ["kfac", "full"])
def test_backbones_without_a_gradient_are_named(curvature: str) -> None:
    model = randomize(Backbone(), scale=1.5)
    with pytest.raises(ValueError, match=r"depend on first\.weight, but it gets no gradient"):
        fit(model, curvature=curvature)
    model.first.requires_grad_(False)  # the way out that the message names
    fit(model, curvature=curvature)


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


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


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)[0]


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Keyword, "'layer'"),
        (Unused, "spare"),
        (SequenceFirst, "attention"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1, add_bias_kv=True)), "1 "),
        (lambda: nn.Sequential(nn.Linear(4, 4), Doubled(4, 1)), r"1 \(Doubled with a forward of its own\)"),
    ],
)
def test_modules_without_factors_are_refused_by_name_with_a_way_out(build: Callable[[], nn.Module], name: str) -> None:
    model = randomize(build())
    with pytest.raises(UnsupportedLayerError, match=rf"{name}(?s:.*)parameters=\[\.\.\.\]"):
        fit(model)
    assert not any(m._forward_hooks for m in model.modules())


def closed_over(model: nn.Module) -> nn.Module:
    method = model.forward
    model.forward = lambda x: 2 * method(x)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda m: m.forward, "a method, and no torch.nn.Module"),
        (lambda m: None, "NoneType"),
        (lambda m: type(m), "a type"),
        (nn.DataParallel, r"DataParallel.*model\.module"),
        (lambda m: torch.jit.trace(m, X), "TorchScript"),
        (closed_over, r"forward was set on the instance of .*MethodType"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_models_that_are_no_modules_of_their_own(wrap: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LinearizedLaplace(wrap(mlp()))


@every_curvature
def test_weights_of_which_no_curvature_can_be_taken(curvature: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TypeError, match=r"weight \(torch\.b?float16\).*model\.float"):
            fit(mlp().to(dtype), X.to(dtype), curvature=curvature)
    model = mlp()
    model[0].float()  # type: ignore[index]
    with pytest.raises(TypeError, match="all in single or all in double"):
        fit(model)
    for value in (torch.nan, torch.inf):
        model = mlp()
        model[2].weight.data[0, 0] = value  # type: ignore[index, union-attr, operator]
        with pytest.raises(ValueError, match=r"2\.weight holds NaN or infinite"):
            fit(model, curvature=curvature)
    for moved in (False, True):
        with torch.inference_mode():
            model = mlp()
        model = model.float() if moved else model  # whose weights no longer say so
        with pytest.raises(ValueError, match=r"0\.weight was made within torch\.inference_mode"):
            fit(model, curvature=curvature)


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
@every_curvature
def test_contexts_around_a_fit_change_nothing(context: Callable[[], Any], curvature: str) -> None:
    """no_grad, inference mode and autocast: weights, evidence and predictions are those without, and go on after."""
    model = mlp().float()
    x = X.float()

    def everything(context: Any) -> list[Tensor]:
        with context:
            la = fit(model, x, evaluate_at="tangent_mode", curvature=curvature)
            la.set_precision(0.7)
            evidence = la.log_marginal_likelihood()
            found = [la.predictive(x), la.predictive(x, covariance="samples"), la.function_samples(x, 3)]
        again = [la.predictive(x), la.theta, la.function_covariance(x)[1]]
        return [*found, *again, torch.tensor(evidence)]

    for plain, other in zip(everything(contextlib.nullcontext()), everything(context()), strict=True):
        assert other.dtype == plain.dtype
        assert not other.is_inference()
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-6)


OPERATORS: Any = (
    torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
)  # fmt: skip


def float32_precisions() -> list[str]:
    return [own.fp32_precision for own in OPERATORS]


@pytest.mark.parametrize("interface", ["default", "older", "newer"])
@every_curvature
def test_single_precision_has_all_its_digits(curvature: str, interface: str) -> None:
    """The network runs without TF32, code in it may ask by torch's older interface, and the caller's choice stays."""
    seen: list[list[str]] = []

    def says(x: Tensor) -> Tensor:
        seen.append(float32_precisions())
        if interface != "newer":  # with which torch refuses the older one in any case
            assert not torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
        return torch.tanh(x)

    default, model = float32_precisions(), Around(between=says).float()
    try:
        if interface == "older":
            torch.set_float32_matmul_precision("high")
        elif interface == "newer":
            torch.backends.cudnn.rnn.fp32_precision = "ieee"
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        before = float32_precisions()
        la = fit(model, X.float(), curvature=curvature)
        la.predictive(X.float())
        after = float32_precisions()
    finally:
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        for own, precision in zip(OPERATORS, default, strict=True):  # other tests may have left "ieee"
            own.fp32_precision = precision
    assert "tf32" in before and after == before and float32_precisions() == default
    assert seen and all(precisions == ["ieee"] * 4 for precisions in seen)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data_in_place": lambda m: m.first.weight.data.mul_(1.5),
    "one_entry": lambda m: m.first.weight.data[2, 1].mul_(1 + 1e-15),
    "buffer": lambda m: m.between.running_mean.data[3].add_(0.1),
    "replaced": lambda m: setattr(m.first, "weight", nn.Parameter(m.first.weight.detach() + 0.1)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_weights_that_change_after_the_fit_are_noticed_however_it_is_done(change: str) -> None:
    model = randomize(Around(between=nn.BatchNorm1d(5)))
    la = fit(model)
    before, kept = la.predictive(X), {n: t.clone() for n, t in model.state_dict().items()}
    CHANGES[change](model)
    uses: list[Callable[[], Any]] = [
        lambda: la.predictive(X),
        lambda: la.function_samples(X, 2),
        lambda: la.function_covariance(X),
        lambda: LinearizedLaplace.from_fitted(la.fitted, [(X, Y)]).predictive(X),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="weights have changed"):
            use()
    model.load_state_dict(kept)
    assert torch.equal(la.predictive(X), before)


LOADERS: list[tuple[str, Any, type[Exception], str]] = [
    ("classification", [], ValueError, "gave no samples"),
    ("classification", [(X[:0], Y[:0])], ValueError, "gave no samples"),
    ("classification", [X], TypeError, r"\(inputs, targets\)"),
    ("classification", [{"x": X, "y": Y}], TypeError, "one of the names"),
    ("classification", [{"x": X, "labels": Y, "targets": Y}], TypeError, "one of the names"),
    ("classification", [{"x": "words", "labels": Y}], TypeError, "is a str"),
    ("classification", [(X, Y), (NAN, Y)], ValueError, "NaN or infinite"),
    ("classification", [(X, Y + 1)], ValueError, r"targets lie in \[1, 3\].*classes 0 to 2"),
    ("classification", [(X, Y - 100)], ValueError, "ignore_index"),
    ("classification", [(X, Y.double())], ValueError, "class numbers"),
    ("classification", [(X, Y[:4])], ValueError, r"\(4,\)"),
    ("classification", [(X, REAL)], ValueError, "likelihood='regression'"),
    ("regression", [(X, Y)], ValueError, "regression needs them equal"),
    ("regression", [(X, REAL[:, :2])], ValueError, r"\(9, 2\).*\(9, 3\)"),
    ("regression", [(X, REAL * torch.nan)], ValueError, "targets hold NaN"),
    ("classification", [(torch.tensor(1.0), Y)], ValueError, "first axis"),
    ("classification", [((X, X[:4]), Y)], ValueError, r"\(9, 4\), \(4, 4\)"),
    ("classification", [((), Y)], ValueError, "of none"),
    ("classification", [([X, None], Y)], TypeError, "NoneType"),
]


@every_curvature
@pytest.mark.parametrize(("kind", "loader", "error", "message"), LOADERS)
def test_bad_data(kind: str, loader: Any, error: type[Exception], message: str, curvature: str) -> None:
    la = LinearizedLaplace(mlp(), kind, prior="single", curvature=curvature)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        la.fit(loader)
    with pytest.raises(RuntimeError, match="call fit"):
        la.predictive(X)
    la.fit([(X, REAL if kind == "regression" else Y)])
    before = la.fitted
    with pytest.raises(error, match=message):
        la.fit(loader)
    assert la.fitted is before


def test_empty_batches() -> None:
    """A fit passes them over; a prediction has nothing to say."""
    la = LinearizedLaplace(mlp(), prior="single", evaluate_at="map").fit([(X[:0], Y[:0]), (X, Y), (X[:0], Y[:0])])
    assert la.summary.samples == len(X)
    for call in (la.predictive, la.function_covariance, la.function_samples):
        with pytest.raises(ValueError, match="no samples"):
            call(X[:0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood": "poisson"}, "'poisson'"),
        ({"prior": "per_weight"}, "'per_tensor'"),
        ({"evaluate_at": "mean"}, "'tangent_mode'"),
        ({"curvature": "low_rank"}, "'last_layer'"),
        ({"fisher_type": "mcmc"}, "'type-2'"),
        ({"kfac_approx": "sum"}, "'reduce'"),
        ({"bias": "none"}, "'shared'"),
        ({"noise_variance": 0.1}, "regression"),
        ({"likelihood": "regression", "noise_variance": -1.0}, "positive"),
        ({"parameters": ["5.weight"]}, r"5\.weight.*matches no parameter"),
        ({"parameters": []}, "nothing would be left"),
        ({"curvature": "last_layer", "parameters": ["0", "2"]}, "one linear layer"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearizedLaplace(mlp(), **options).fit([(X, Y)])


@pytest.mark.parametrize(
    ("precision", "message"),
    [(-1.0, "positive"), ({"all": math.inf}, "finite"), ({"head": 1.0}, "'head'"), (torch.ones(2), r"\(2,\)")],
)
def test_precisions_that_make_no_sense(precision: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(mlp()).set_precision(precision)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"link_approx": "mean"}, "'probit'"),
        ({"covariance": "all"}, "'samples'"),
    ],
)
def test_predictions_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(mlp()).predictive(X, **options)


def test_frozen_networks_and_outputs_of_other_shapes() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="requires a gradient"):
        LinearizedLaplace(model)
    assert fit(model, parameters=["2"]).tangent.names == ("2.weight", "2.bias")  # may be named all the same
    x = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"\(2, 3, 2\).*outputs \(2, 4, 3\)"):
        fit(nn.Conv2d(2, 3, 3).double(), x, torch.zeros(2, 3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="likelihood='binary'"):
        fit(nn.Linear(4, 1).double(), y=Y % 2)


def test_a_single_output_and_flat_targets() -> None:
    """``[batch]`` outputs and targets of a regression are one column."""
    x, y = data(4, outputs=1, kind="regression")
    model = randomize(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))
    found = LinearizedLaplace(model, "regression", prior="single").fit([(x, y[:, 0])])
    column = LinearizedLaplace(model[0], "regression", prior="single").fit([(x, y)])  # type: ignore[index]
    assert found.log_marginal_likelihood() == pytest.approx(column.log_marginal_likelihood(), rel=1e-9)
    torch.testing.assert_close(found.predictive(x).variance, column.predictive(x).variance)
