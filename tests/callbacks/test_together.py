"""All callbacks in one trainer, on a small deep ensemble of TorchUncertainty: fitted and tested."""

from __future__ import annotations

import csv
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty import TUTrainer
from torch_uncertainty.methods import deep_ensembles
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget

from tu_symmetry.callbacks import FitLaplace, PosteriorSnapshots, Rebasin, ScaleCanonicalization
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import LaplaceEnsemble

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
MEMBERS, DRAWS = 2, 3


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def digits() -> tuple[TensorDataset, TensorDataset]:
    x, y = load_digits(return_X_y=True)
    inputs, targets = torch.as_tensor(x, dtype=torch.float32) / 16, torch.as_tensor(y)
    return TensorDataset(inputs[:300], targets[:300]), TensorDataset(inputs[300:420], targets[300:420])


def ensemble(wrap: Any = lambda network: network) -> nn.Module:
    seed_everything(0, verbose=False)
    return deep_ensembles([wrap(net()) for _ in range(MEMBERS)])


def run(model: nn.Module, folder: Path, *callbacks: Callback, **options: Any) -> tuple[dict[str, float], Path]:
    routine = ClassificationRoutine(
        model,
        num_classes=10,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=True,
        format_batch_fn=RepeatTarget(num_repeats=MEMBERS),
        optim_recipe=torch.optim.Adam(model.parameters(), lr=0.02),
        **options,
    )
    train, test = digits()
    log = CSVLogger(folder)
    trainer = TUTrainer(
        callbacks=list(callbacks),
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=log,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=4,
    )
    trainer.fit(routine, DataLoader(train, 50, shuffle=True), DataLoader(test, 60))
    found = trainer.test(routine, DataLoader(test, 60), verbose=False)
    return dict(found[0]), Path(log.log_dir)


def columns(folder: Path) -> list[str]:
    with open(folder / "metrics.csv") as file:
        return next(csv.reader(file))


def test_four_callbacks_on_one_ensemble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rebasin = Rebasin(in_place=True, every_n_epochs=1, barrier_loader="val")
    scale = ScaleCanonicalization(in_place=True, every_n_epochs=1)
    snapshots = PosteriorSnapshots(tmp_path / "snapshots", every_n_epochs=1)
    laplace = FitLaplace()
    model = ensemble(lambda network: LaplaceEnsemble(network, DRAWS))
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        scores, folder = run(model, tmp_path, rebasin, scale, snapshots, laplace)
    assert [len(c.history) for c in (rebasin, scale)] == [2, 2]
    assert set(SampleStore.open(tmp_path / "snapshots").chains) == {0, 1}

    # Each member has its own approximation, of the network itself and not of a copy, and predicts with it.
    members = [m.core_model for m in model.core_models]
    assert [la.model for la in laplace.laplaces] == members
    assert [m.laplace for m in model.core_models] == laplace.laplaces
    assert model.eval()(digits()[1].tensors[0][:4]).shape == (MEMBERS * DRAWS * 4, 10)
    assert scores["test/cls/Acc"] > 0.5 and scores["test/ens_MI"] > 0

    ours = [w for w in caught if "tu_symmetry" in str(w.filename) or "tu_symmetry" in type(w.message).__module__]
    said = [str(w.message) for w in ours] + [r.getMessage() for r in caplog.records if "tu_symmetry" in r.pathname]
    assert len(said) == len(set(said)), "something was said twice"
    # Scalars are few, whatever the number of layers.
    own = [c for c in columns(folder) if c.startswith(("scale/", "rebasin/", "laplace/"))]
    assert len(own) <= 30 and not [c for c in own if "layer" in c or "GROUP" in c]
    assert {"laplace/log_evidence", "laplace/gamma", "scale/ratio_1"} <= set(own)


def test_an_ensemble_of_plain_networks_keeps_its_predictions(tmp_path: Path) -> None:
    plain, _ = run(ensemble(), tmp_path / "plain")
    laplace = FitLaplace(path=tmp_path / "laplace.safetensors")
    model = ensemble()
    scores, _ = run(model, tmp_path / "fitted", laplace)
    assert scores["test/cls/NLL"] == pytest.approx(plain["test/cls/NLL"], rel=1e-6)
    assert [la.model for la in laplace.laplaces] == list(model.core_models)
    with pytest.raises(ValueError, match="there are 2, one for each member of the ensemble: use laplaces"):
        _ = laplace.laplace
    assert [file.name for file in laplace.files] == ["laplace_0.safetensors", "laplace_1.safetensors"]

    # The files are read again, each for its member.
    x = digits()[1].tensors[0][:5]
    again = FitLaplace(load_from=tmp_path / "laplace.safetensors")
    other = ensemble()
    other.load_state_dict(model.state_dict())
    evaluate(other, again)
    for one, two in zip(laplace.laplaces, again.laplaces, strict=True):
        torch.testing.assert_close(one.predictive(x), two.predictive(x))


def evaluate(model: nn.Module, callback: Callback) -> None:
    routine = ClassificationRoutine(model, 10, nn.CrossEntropyLoss(), is_ensemble=True)
    trainer = TUTrainer(callbacks=[callback], accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    trainer.test(routine, DataLoader(digits()[1], 60), verbose=False)
