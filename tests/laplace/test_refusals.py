"""What cannot be approximated says so in one clear line: models, outputs, weights and batches of the wrong kind.

Every refusal holds at the fit, in both modes and for every curvature: nothing wrong is approximated in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace_oracles import data, dense_curvature, exact_ggn, mlp, randomize
from torch import Tensor, nn
from torch.nn import functional as F

from tu_symmetry.laplace.linearized import LinearizedLaplace

X, Y = data(4, outputs=3)
CURVATURES = ["kfac", "full", "last_layer"]


class Around(nn.Module):
    """Two layers with a function between, or after."""

    def __init__(
        self, between: Callable[[Tensor], Tensor] = torch.tanh, after: Callable[[Tensor], Any] = lambda h: h
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.second(self.between(self.first(x))))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.backbone(x))
        return self.head(h)


def fit(model: nn.Module, x: Any = X, y: Tensor = Y, **options: Any) -> LinearizedLaplace:
    return LinearizedLaplace(model, **({"prior": "single", "evaluate_at": "map"} | options)).fit([(x, y)])


# ---------------------------------------------------------------------- outputs


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "tuple": (lambda h: (h, h), TypeError, "returns a tuple"),
    "dictionary": (lambda h: {"scores": h}, TypeError, "returns a dict"),
    "none": (lambda h: None, TypeError, "returns a NoneType"),
    "integer": (lambda h: h.argmax(-1), TypeError, "int64.*logits"),
    "boolean": (lambda h: h > 0, TypeError, "bool"),
    "complex": (lambda h: h.to(torch.complex128), TypeError, "complex128"),
    "half": (lambda h: h.half(), TypeError, r"float16.*model\.float\(\)"),
    "bfloat16": (lambda h: h.bfloat16(), TypeError, "bfloat16.*half precision"),
    "scalar": (lambda h: h.sum(), ValueError, r"shape \(\) for a batch of 4"),
    "one_for_the_batch": (lambda h: h.mean(0, keepdim=True), ValueError, r"\(1, 3\) for a batch of 4"),
    "batch_last": (lambda h: h.T, ValueError, r"\(3, 4\) for a batch of 4"),
    "nothing": (lambda h: h[:, :0], ValueError, "no values"),
}


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", list(OUTPUTS))
def test_outputs_that_are_no_tensor_of_real_numbers(name: str, curvature: str) -> None:
    after, error, message = OUTPUTS[name]
    model = randomize(Around(after=after))
    with pytest.raises(error, match=message):
        fit(model, curvature=curvature)


# ---------------------------------------------------------------------- no function of the sample and the weights


@pytest.mark.parametrize("curvature", CURVATURES)
def test_dropout_that_is_always_on(curvature: str) -> None:
    model = randomize(Around(between=lambda h: F.dropout(h, 0.3)))
    with pytest.raises(ValueError, match="change from call to call"):
        fit(model, curvature=curvature)
    module = randomize(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 3)))
    fit(module, curvature=curvature)  # which evaluation mode switches off


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize(
    "between",
    [
        lambda h: h - h.mean(0),
        lambda h: F.batch_norm(h, None, None, training=True),
        lambda h: F.normalize(h, dim=0),
        lambda h: h.cumsum(0),
        lambda h: (h @ h.T).softmax(-1) @ h,
    ],
)
def test_samples_that_depend_on_one_another(between: Callable[[Tensor], Tensor], curvature: str) -> None:
    with pytest.raises(ValueError, match="depends on the other samples"):
        fit(randomize(Around(between=between)), curvature=curvature)


@pytest.mark.parametrize("curvature", CURVATURES[:-1])
@pytest.mark.parametrize("build", [Backbone, lambda: Around(between=lambda h: torch.tanh(h).detach()),
                                   lambda: Around(between=lambda h: (8 * h).round())])  # fmt: skip
def test_backbones_without_a_gradient_are_named(build: Callable[[], nn.Module], curvature: str) -> None:
    model = randomize(build(), scale=1.5)
    first = next(iter(dict(model.named_parameters())))
    with pytest.raises(ValueError, match=f"depend on {first}, but it gets no gradient.*requires_grad_"):
        fit(model, curvature=curvature)
    model.get_submodule(first.split(".")[0]).requires_grad_(False)  # the way out that the message names
    la = fit(model, curvature=curvature)
    exact = exact_ggn(model, la.tangent.names, X, Y, "classification")
    if curvature == "full":
        torch.testing.assert_close(dense_curvature(la).diagonal(), exact.diagonal(), rtol=1e-9, atol=1e-11)
    assert float(dense_curvature(la).diagonal().min()) > 0


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision(dtype: torch.dtype, curvature: str) -> None:
    with pytest.raises(TypeError, match=r"0\.weight has type torch\.b?float16.*model\.float|2\.weight has type"):
        fit(mlp().to(dtype), X.to(dtype), curvature=curvature)


def test_weights_in_two_precisions() -> None:
    model = mlp()
    model[0].float()  # type: ignore[index]
    with pytest.raises(TypeError, match="differ in precision"):
        fit(model)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_weights_that_were_made_in_inference_mode(curvature: str, moved: bool) -> None:
    with torch.inference_mode():
        model = mlp()
    if moved:
        model.float()  # whose weights no longer say so
    with pytest.raises(ValueError, match=r"0\.weight was made within torch\.inference_mode"):
        fit(model, curvature=curvature)


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
@pytest.mark.parametrize("curvature", CURVATURES)
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
        again = [la.predictive(x), la.solve_mode().theta, la.function_covariance(x)[1]]
        return [*found, *again, torch.tensor(evidence)]

    for plain, other in zip(everything(contextlib.nullcontext()), everything(context()), strict=True):
        assert other.dtype == plain.dtype
        assert not other.is_inference()
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-6)


def float32_operators() -> Any:
    backends = torch.backends
    return (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul)


def float32_precisions() -> list[str]:
    return [own.fp32_precision for own in float32_operators()]


@pytest.mark.parametrize("interface", ["default", "older", "newer"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_single_precision_has_all_its_digits(curvature: str, interface: str) -> None:
    """The network runs without TF32, code in it may ask by torch's older interface, and the caller's choice stays."""
    seen: list[list[str]] = []

    class Says(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(float32_precisions())
            if interface != "newer":  # with which torch refuses the older one in any case
                assert not torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
            return x

    default = float32_precisions()
    model = nn.Sequential(Says(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).float()
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
        for own, precision in zip(float32_operators(), default, strict=True):  # other tests may have left "ieee"
            own.fp32_precision = precision
    assert "tf32" in before and after == before and float32_precisions() == default
    assert seen and all(precisions == ["ieee"] * 4 for precisions in seen)


@pytest.mark.parametrize("change", ["data_in_place", "data", "permuted", "one_entry", "buffer", "no_grad", "replaced"])
def test_weights_that_change_after_the_fit_are_noticed_however_it_is_done(change: str) -> None:
    model = randomize(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)))
    la = fit(model)
    before, kept = la.predictive(X), {n: t.clone() for n, t in model.state_dict().items()}
    weight = model[0].weight  # type: ignore[index]
    if change == "data_in_place":
        weight.data.mul_(1.5)
    elif change == "data":
        weight.data = weight.data * 1.5
    elif change == "permuted":  # the same entries in another order
        weight.data.copy_(weight.data.flip(0))
    elif change == "one_entry":
        weight.data[2, 1] = torch.nextafter(weight.data[2, 1], torch.tensor(9.0, dtype=torch.float64))
    elif change == "buffer":
        model[1].running_mean.data[3] += 0.1  # type: ignore[index]
    elif change == "no_grad":
        with torch.no_grad():
            weight.add_(0.1)
    else:
        model[0].weight = nn.Parameter(weight.detach() + 0.1)  # type: ignore[index]
    uses: list[Callable[[], Any]] = [
        lambda: la.predictive(X),
        lambda: la.function_samples(X, 2),
        lambda: la.function_covariance(X),
        lambda: la.solve_mode(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="weights have changed"):
            use()
    model.load_state_dict(kept)
    assert torch.equal(la.predictive(X), before)


# ---------------------------------------------------------------------- models and batches


def closed_over(model: nn.Module) -> nn.Module:
    method = model.forward
    model.forward = lambda x: 2 * method(x)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda m: m.forward, "a method; .*torch.nn.Module"),
        (lambda m: lambda x: m(x), "a function"),
        (lambda m: None, "NoneType"),
        (lambda m: dict(m.state_dict()), "dict"),
        (lambda m: type(m), "a type"),
        (nn.DataParallel, r"DataParallel.*model\.module"),
        (lambda m: torch.jit.trace(m, X), "TorchScript"),
        (torch.compile, r"torch\.compile.*_orig_mod"),
        (lambda m: closed_over(m), r"forward was set on the instance of .*MethodType"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_models_that_are_no_modules_of_their_own(wrap: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LinearizedLaplace(wrap(mlp()))


@pytest.mark.parametrize("covariance", ["exact", "samples"])
def test_empty_batches(covariance: Any) -> None:
    """A fit passes them over; a prediction has nothing to say."""
    la = LinearizedLaplace(mlp(), prior="single", evaluate_at="map").fit([(X[:0], Y[:0]), (X, Y), (X[:0], Y[:0])])
    assert la.summary.samples == len(X)
    calls: list[Callable[[], Any]] = [
        lambda: la.predictive(X[:0], covariance=covariance),
        lambda: la.predictive(X[:0], joint=True),
        lambda: la.function_covariance(X[:0]),
        lambda: la.function_samples(X[:0], 2),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="no samples"):
            call()


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (torch.tensor(1.0), ValueError, "first axis"),
        ((X, X[:4]), ValueError, r"\(9, 4\), \(4, 4\)"),
        ((), ValueError, "of none"),
        ({"x": X}, TypeError, "keyword argument 'x'"),
        ([X, None], TypeError, "NoneType"),
    ],
)
def test_inputs_without_one_batch_axis(inputs: Any, error: type[Exception], message: str) -> None:
    la = LinearizedLaplace(mlp(), prior="single", evaluate_at="map")
    with pytest.raises(error, match=message):
        la.fit([(inputs, Y)])
    la.fit([(X, Y)])
    with pytest.raises(error, match=message):
        la.predictive(inputs)
