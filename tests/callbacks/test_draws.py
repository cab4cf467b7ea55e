"""Draws at the end of a fit, and the temperature of TorchUncertainty's samplers."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drawn import normal
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.methods import deep_ensembles, mc_dropout
from torch_uncertainty.optim import SGHMC, SGLD
from torch_uncertainty.routines import ClassificationRoutine
from trainings import trainer

from tu_symmetry.callbacks import FitLaplace, PosteriorDraws, TrueTemperature
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import SWAG, LaplacePostProcessing, VariationalRoutine


def loader(batch_size: int = 20) -> DataLoader:
    y = torch.arange(60) % 3
    x = normal(60, 2, dtype=torch.float32) + 1.5 * torch.eye(3)[y][:, :2]
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(dropout), nn.Linear(4, 3))


def run(folder: Path, *callbacks: Callback, epochs: int = 3) -> Trainer:
    return trainer(*callbacks, folder=folder, max_epochs=epochs)


def routine(model: nn.Module, **options) -> ClassificationRoutine:
    return ClassificationRoutine(
        model, 3, nn.CrossEntropyLoss(), optim_recipe=torch.optim.SGD(model.parameters(), lr=0.1), **options
    )


@pytest.mark.parametrize(
    ("method", "dtype"), [("mc_dropout", None), ("swag", "bfloat16"), ("laplace", "float16"), ("variational", None)]
)
def test_every_method_fills_a_store(tmp_path: Path, method: str, dtype: str | None) -> None:
    torch.manual_seed(0)
    draws = PosteriorDraws(5, dtype=dtype)  # type: ignore[arg-type]
    before: list = []
    if method == "mc_dropout":
        made = routine(mc_dropout(network(0.3), 2), is_ensemble=True)
    elif method == "swag":
        made = routine(SWAG(network(), cycle_start=0, cycle_length=1, num_estimators=2), is_ensemble=True)
    elif method == "variational":
        made = VariationalRoutine(network())
    else:
        before = [FitLaplace(curvature="last_layer", evaluate_at="map")]
        made = routine(network(), post_processing=LaplacePostProcessing())
    run(tmp_path, *before, draws).fit(made, loader(), loader())  # SWAG averages when a validation starts
    store = SampleStore.open(tmp_path / "samples")
    assert len(store) == 5 and store.metadata["method"] == method and store.chains == [0] * 5
    assert set(store.layout or ()) == set(network().state_dict())
    wanted = torch.float32 if dtype is None else getattr(torch, dtype)
    assert {entry.dtype for entry in (store.layout or {}).values()} == {wanted}
    assert not torch.equal(store[0]["3.weight"], store[1]["3.weight"])
    with pytest.raises(FileExistsError, match="resume its run"):
        run(tmp_path, *before, draws).fit(made, loader())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (network(), {}, "known are SWAG"),
        (mc_dropout(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3)), 2), {"is_ensemble": True}, "not read by one"),
        (deep_ensembles([network(), network()]), {"is_ensemble": True}, "known are SWAG"),
    ],
)
def test_what_nothing_can_be_drawn_from_is_refused_before_the_first_step(
    tmp_path: Path, model: nn.Module, options: dict[str, bool], message: str
) -> None:
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        run(tmp_path, PosteriorDraws(3), epochs=4).fit(routine(model, **options), loader(), loader())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("normalized", [False, True])
def test_swag_comes_back_from_a_checkpoint(tmp_path: Path, normalized: bool) -> None:
    """A resumed SWAG is the uninterrupted one, and a test draws its networks from the moments that were saved."""

    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return loader()

        val_dataloader = test_dataloader = train_dataloader

    def made() -> ClassificationRoutine:
        torch.manual_seed(0)
        core = (
            nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)) if normalized else network()
        )
        return routine(SWAG(core, cycle_start=0, cycle_length=1, num_estimators=2), is_ensemble=True)

    whole, first, second, tested = made(), made(), made(), made()
    run(tmp_path / "whole", PosteriorDraws(3), epochs=5).fit(whole, Data())
    cut = run(tmp_path / "cut", PosteriorDraws(3), epochs=3)
    cut.fit(first, Data())
    cut.save_checkpoint(tmp_path / "cut.ckpt")
    run(tmp_path / "resumed", PosteriorDraws(3), epochs=5).fit(second, Data(), ckpt_path=tmp_path / "cut.ckpt")
    assert int(second.model.num_avgd_models) == int(whole.model.num_avgd_models) == 4
    for name, t in whole.model.swag_stats.items():
        torch.testing.assert_close(second.model.swag_stats[name], t)
    (found,) = run(tmp_path / "test", PosteriorDraws(3)).test(tested, Data(), ckpt_path=tmp_path / "cut.ckpt")
    assert "test/cls/Acc" in found and len(tested.model.samples) == 2
    for name, t in first.model.swag_stats.items():
        assert torch.equal(tested.model.swag_stats[name], t)
    statistics = [b for m in tested.model.samples for n, b in m.named_buffers() if n.endswith("running_mean")]
    assert all(bool(b.abs().sum() > 0) for b in statistics) and len(statistics) == 2 * normalized


class Gaussian(nn.Module):
    """Data whose posterior is known: the mean of a normal distribution with variance 1, prior N(0, 1 / tau)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(400))  # 400 chains at once

    def forward(self, x: Tensor) -> Tensor:
        return self.mean.expand(len(x), -1)


@pytest.mark.parametrize("name", ["SGLD", "SGHMC"])
def test_the_stationary_variance_is_the_posteriors(name: str) -> None:
    """1 / (N + tau) under the rule that the callback sets; N ** 2 / 10,000 times as much under their default."""
    points, tau = 50, 10.0
    y = normal(points, dtype=torch.float32)

    def moments(apply: bool) -> tuple[float, float]:
        torch.manual_seed(0)
        model = Gaussian()
        more = {} if name == "SGLD" else {"friction": 0.1, "burn_in_steps": 0}
        optimizer = {"SGLD": SGLD, "SGHMC": SGHMC}[name](model.parameters(), lr=0.05, **more)
        if apply:
            data = DataLoader(TensorDataset(torch.zeros(points, 1), y))
            run = SimpleNamespace(optimizers=[optimizer], train_dataloader=data)
            TrueTemperature(prior_precision=tau).on_train_start(run, SimpleNamespace(loss=nn.MSELoss()))  # type: ignore[arg-type]
        seen = []
        for step in range(1500):
            optimizer.zero_grad()
            # the mean over the data of each chain's loss
            (0.5 * (model.mean.unsqueeze(0) - y.unsqueeze(1)).square()).mean(0).sum().backward()
            optimizer.step()
            if step >= 700 and step % 20 == 0:
                seen.append(model.mean.detach().clone())
        samples = torch.stack(seen)
        return float(samples.mean()), float(samples.var())

    expected = 1 / (points + tau)
    mean, variance = moments(True)
    assert variance == pytest.approx(expected, rel=0.1)
    assert mean == pytest.approx(float(y.sum()) / (points + tau), abs=4 * math.sqrt(expected / 400))
    assert abs(moments(False)[1] / expected - 1) > 0.3


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    for message, make in (
        ("num_samples", lambda: PosteriorDraws(0)),
        ("dtype", lambda: PosteriorDraws(3, dtype="int8")),  # type: ignore[arg-type]
        ("positive", lambda: TrueTemperature(0.0)),
        ("samples nothing", lambda: run(tmp_path, TrueTemperature(), epochs=1).fit(routine(network()), loader())),
    ):
        with pytest.raises(ValueError, match=message):
            make()
