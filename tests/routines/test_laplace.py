"""Linearized Laplace in TorchUncertainty's routines, against what LinearizedLaplace predicts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine, RegressionRoutine
from trainings import trainer

from tu_symmetry.callbacks import FitLaplace
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.routines import LaplaceEnsemble, LaplacePostProcessing, LaplaceRegressionRoutine

pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = 3


def net(outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))


class DataModule(LightningDataModule):
    """Three noisy classes, or a noisy function of the inputs; OOD inputs lie far away; validation labels are wrong."""

    def __init__(self, kind: str = "classification", ood: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.ood = ood
        x = torch.randn(200, 4, generator=generator)
        scores = x @ torch.randn(4, CLASSES, generator=generator) + 0.7 * torch.randn(200, CLASSES, generator=generator)
        y = scores.argmax(-1) if kind == "classification" else scores[:, 0]
        self.train_set, self.test_set = TensorDataset(x[:120], y[:120]), TensorDataset(x[120:], y[120:])
        self.held_out = TensorDataset(x[120:], y[120:].flip(0))
        self.far = TensorDataset(6 * torch.randn(60, 4, generator=generator), torch.zeros(60).to(y))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, batch_size=16, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=16)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        sets = [self.test_set, self.far] if self.ood else [self.test_set]
        return [DataLoader(s, batch_size=32) for s in sets]

    def postprocess_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


def classify(model: nn.Module, **options: Any) -> ClassificationRoutine:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return ClassificationRoutine(model, CLASSES, nn.CrossEntropyLoss(), optim_recipe=optimizer, **options)


def run(routine: Any, data: DataModule, **options: Any) -> tuple[dict[str, float], FitLaplace]:
    """Fit and test; the metrics without the loaders' numbers, and the callback."""
    torch.manual_seed(0)
    callback = FitLaplace(**{"calibrate": False} | options)
    runner = trainer(callback, max_epochs=4)
    runner.fit(routine, data)
    found: dict[str, float] = {}
    for results in runner.test(routine, data, verbose=False):
        found |= {key.split("/dataloader")[0]: value for key, value in results.items()}
    return found, callback


def by_hand(model: nn.Module, data: DataModule, **options: Any) -> LinearizedLaplace:
    """Fitted to the training data in one batch, without any of Lightning."""
    la = LinearizedLaplace(model, **options)
    la.fit([data.train_set.tensors])
    la.optimize_evidence()
    return la


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Share of pairs in the right order."""
    above = (outside.unsqueeze(1) > inside).double() + 0.5 * (outside.unsqueeze(1) == inside).double()
    return float(above.mean())


def entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


@pytest.mark.parametrize(("evaluate_at", "prior"), [("map", "per_group"), ("tangent_mode", "single")])
def test_post_processing_metrics_equal_a_hand_computation(evaluate_at: str, prior: str) -> None:
    data = DataModule(ood=True)
    model = net()
    routine = classify(model, post_processing=LaplacePostProcessing(), eval_ood=True, ood_criterion="post_processing")
    found, callback = run(routine, data, evaluate_at=evaluate_at, prior=prior)
    x, y = data.test_set.tensors
    la = by_hand(model, data, evaluate_at=evaluate_at, prior=prior)
    p = la.predictive(x)
    assert found["test/post/cls/NLL"] == pytest.approx(float(-p[torch.arange(len(y)), y].log().mean()), rel=1e-3)
    onehot = nn.functional.one_hot(y, CLASSES)
    assert found["test/post/cls/Brier"] == pytest.approx(float((p - onehot).square().sum(-1).mean()), rel=1e-3)
    assert found["test/post/cls/Acc"] == pytest.approx(float((p.argmax(-1) == y).float().mean()), abs=0.013)
    far = la.predictive(data.far.tensors[0])
    assert found["ood/AUROC"] == pytest.approx(auroc(-p.amax(-1), -far.amax(-1)), abs=2e-3)
    plain = model.eval()(x).softmax(-1)
    assert found["test/cls/NLL"] == pytest.approx(float(-plain[torch.arange(len(y)), y].log().mean()), rel=1e-4)
    assert float((p - plain).abs().max()) > 1e-2, "vacuous: no uncertainty"
    assert callback.laplace is not None and callback.laplace.summary.samples == 120  # nothing dropped, nothing held out


def test_returns_log_probabilities_that_a_softmax_leaves() -> None:
    data = DataModule()
    la, x = by_hand(net(), data, evaluate_at="map"), data.test_set.tensors[0]
    for link_approx in ("mc", "probit"):
        found = LaplacePostProcessing(la, link_approx=link_approx)(x).softmax(-1)  # type: ignore[arg-type]
        torch.testing.assert_close(found, la.predictive(x, link_approx=link_approx), rtol=1e-5, atol=1e-7)


def test_checkpoints_hold_the_weights_once() -> None:
    plain = classify(net())
    model = net()
    routine = classify(model, post_processing=LaplacePostProcessing())
    assert routine.post_processing.model is model
    assert routine.state_dict().keys() == plain.state_dict().keys()
    run(routine, DataModule(), evaluate_at="map")
    assert routine.state_dict().keys() == plain.state_dict().keys()
    wrapped = classify(LaplaceEnsemble(net(), 3), is_ensemble=True)
    run(wrapped, DataModule(), evaluate_at="map")
    assert {k.replace("model.core_model", "model") for k in wrapped.state_dict()} == plain.state_dict().keys()


def test_what_cannot_predict_is_refused() -> None:
    """TorchUncertainty's LaplaceApprox takes held-out data, and predicts with a copy of the network from before."""
    data, model, x = DataModule(), net(), torch.randn(2, 4)
    processing = LaplacePostProcessing()
    routine = classify(model, post_processing=processing)
    with pytest.raises(RuntimeError, match="held out, and no evidence"):
        trainer().test(routine, data, verbose=False)
    with pytest.raises(RuntimeError, match="FitLaplace"):
        processing(x)
    with pytest.raises(ValueError, match="asks the data module for postprocess_dataloader"):
        trainer(FitLaplace(data.train_set, evaluate_at="map")).test(routine, data.test_dataloader(), verbose=False)
    la = by_hand(net(), data, evaluate_at="map")
    with pytest.raises(ValueError, match="perhaps of a copy"):
        classify(model, post_processing=LaplacePostProcessing(la))
    with pytest.raises(ValueError, match="perhaps of a copy"):
        LaplaceEnsemble(model, laplace=la)
    with pytest.raises(ValueError, match="of a regression"):
        LaplacePostProcessing(by_hand(net(1), DataModule("regression"), likelihood="regression", evaluate_at="map"))
    processing = LaplacePostProcessing(la)
    processing(x)
    with torch.no_grad():
        la.model[0].weight.mul_(1.5)  # type: ignore[index, union-attr, operator]
    with pytest.raises(RuntimeError, match="weights have changed"):
        processing(x)


def test_ensemble_of_functions() -> None:
    data, model = DataModule(ood=True), net()
    ensemble = LaplaceEnsemble(model, 12, seed=3)
    routine = classify(ensemble, is_ensemble=True, eval_ood=True, ood_criterion="mutual_information")
    found, _ = run(routine, data, evaluate_at="map")
    la = by_hand(model, data, evaluate_at="map")
    x, y = data.test_set.tensors
    p, far = (la.function_samples(t, 12, seed=3).softmax(-1) for t in (x, data.far.tensors[0]))
    mean = p.mean(0)
    assert found["test/cls/NLL"] == pytest.approx(float(-mean[torch.arange(len(y)), y].log().mean()), rel=1e-3)
    inside, outside = (entropy(q.mean(0)) - entropy(q).mean(0) for q in (p, far))
    assert found["test/ens_MI"] == pytest.approx(float(inside.mean()), rel=1e-3)
    assert float(inside.mean()) > 1e-3, "vacuous: all functions agree"
    assert found["ood/AUROC"] == pytest.approx(auroc(inside, outside), abs=3e-3)


def test_ensemble_before_the_fit() -> None:
    model, x = net(), torch.randn(5, 4)
    ensemble = LaplaceEnsemble(model, 4).eval()
    with pytest.raises(RuntimeError, match="FitLaplace"):
        ensemble(x)
    assert ensemble.train()(x).shape == (5, CLASSES)
    ensemble.eval().attach_laplace(None)  # what FitLaplace does before it fits: validation sees the network
    torch.testing.assert_close(ensemble(x), model(x))
    ensemble.attach_laplace(by_hand(model, DataModule(), evaluate_at="map"))
    outputs = ensemble(x).reshape(4, 5, CLASSES)
    assert outputs.std(0).min() > 0
    torch.testing.assert_close(ensemble(x[:2]).reshape(4, 2, CLASSES), outputs[:, :2])  # the same functions
    with pytest.raises(ValueError, match="at least 1"):
        LaplaceEnsemble(model, 0)


@pytest.mark.parametrize("outputs", [1, 2])
def test_regression_metrics_equal_a_hand_computation(outputs: int) -> None:
    data = DataModule("regression")
    if outputs == 2:
        for name in ("train_set", "test_set", "held_out"):
            x, y = getattr(data, name).tensors
            setattr(data, name, TensorDataset(x, torch.stack([y, x[:, 0] * x[:, 1]], 1)))
    model = net(outputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    routine = LaplaceRegressionRoutine(model, outputs, nn.MSELoss(), optim_recipe=optimizer)
    found, callback = run(routine, data, likelihood="regression", evaluate_at="map")
    assert found.keys() >= {"test/reg/NLL", "test/cal/QCE", "test/reg/MAE", "test/reg/RMSE"}
    la = by_hand(model, data, likelihood="regression", evaluate_at="map")
    x, y = data.test_set.tensors
    y = y.reshape(len(y), outputs)
    predictive = la.predictive(x)
    residual = y - predictive.mean
    terms = 0.5 * (residual.square() / predictive.variance + (2 * torch.pi * predictive.variance).log())
    assert found["test/reg/NLL"] == pytest.approx(float(terms.mean()), rel=1e-3)  # TorchUncertainty: per output
    assert found["test/reg/RMSE"] == pytest.approx(float(residual.square().mean().sqrt()), rel=1e-4)
    assert 0 < found["test/cal/QCE"] < 1
    assert callback.laplace is not None
    assert callback.laplace.noise_variance == pytest.approx(la.noise_variance, rel=1e-3)
    assert float(predictive.epistemic.mean()) > 1e-3 * la.noise_variance, "vacuous: no epistemic variance"


def test_regression_needs_an_approximation_and_one_network() -> None:
    routine = LaplaceRegressionRoutine(net(1), 1, loss=nn.MSELoss())
    with pytest.raises(RuntimeError, match="FitLaplace"):
        trainer().test(routine, DataModule("regression"), verbose=False)
    with pytest.raises(ValueError, match="leave out dist_family"):
        LaplaceRegressionRoutine(net(1), 1, dist_family="normal")


def test_functions_of_a_regression_as_an_ensemble() -> None:
    data, model = DataModule("regression"), net(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    ensemble = LaplaceEnsemble(model, 50)
    routine = RegressionRoutine(ensemble, 1, nn.MSELoss(), is_ensemble=True, optim_recipe=optimizer)
    found, callback = run(routine, data, likelihood="regression", evaluate_at="map")
    x, y = data.test_set.tensors
    assert callback.laplace is not None
    mean = callback.laplace.function_samples(x, 50).mean(0).squeeze(-1)
    assert found["test/reg/MSE"] == pytest.approx(float((mean - y).square().mean()), rel=1e-4)
