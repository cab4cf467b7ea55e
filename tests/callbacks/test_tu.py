"""Callbacks on TorchUncertainty's own routines and wrappers, each alone and all in one trainer."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import generator, normal
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch_uncertainty import TUTrainer
from torch_uncertainty.methods import EMA, SWA, deep_ensembles
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget
from trainings import QUIET, loader, mlp, trainer

from tu_symmetry.callbacks import FitLaplace, PosteriorSnapshots, Rebasin, ScaleCanonicalization
from tu_symmetry.callbacks.base import SymmetryCallback
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines import SWAG, LaplaceEnsemble
from tu_symmetry.symmetry.elements import random_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.in_place import permute_in_place

pytestmark = pytest.mark.filterwarnings("ignore")


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


def routine(wrap: Callable[[nn.Module], nn.Module], members: int, each: Any = lambda network: network) -> Any:
    """The same weights on every call; a single network for one member."""
    torch.manual_seed(0)
    model = wrap(deep_ensembles([each(mlp()) for _ in range(members)]) if members > 1 else mlp())
    return ClassificationRoutine(
        model,
        num_classes=3,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=members > 1,
        format_batch_fn=RepeatTarget(num_repeats=members) if members > 1 else None,
        optim_recipe=torch.optim.Adam(model.parameters(), lr=0.02),
    ).double()


def fit(wrap: Any, members: int, *callbacks: Callback) -> tuple[list[float], nn.Module, Trainer]:
    module, losses = routine(wrap, members), Losses()
    seed_everything(11, verbose=False)
    made = trainer(*callbacks, losses, max_epochs=4, num_sanity_val_steps=0)
    made.fit(module, loader(), loader())
    return losses.values, module.model, made


class DoubleSWAG(SWAG):
    """SWAG draws its samples in the default type."""

    def update_wrapper(self, epoch: int) -> None:
        torch.set_default_dtype(torch.float64)
        super().update_wrapper(epoch)
        torch.set_default_dtype(torch.float32)


def wrap_swag(model: nn.Module) -> nn.Module:
    return DoubleSWAG(model.double(), cycle_start=0, cycle_length=1, num_estimators=2, max_num_models=2)


WRAPPERS = {
    "plain": lambda model: model,
    "ema": lambda model: EMA(model, momentum=0.9),
    "swa": lambda model: SWA(model, cycle_start=1, cycle_length=1),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_deep_ensembles_and_averages(name: str) -> None:
    losses, plain, _ = fit(WRAPPERS[name], 3)
    rebasin = Rebasin(in_place=True, every_n_epochs=1, barrier_loader="val")
    aligned_losses, aligned, made = fit(WRAPPERS[name], 3, rebasin)
    assert sum(sum(r["NoT"]) for r in rebasin.history) > 5
    assert aligned_losses == pytest.approx(losses, rel=1e-9, abs=0)
    x = normal(9, 5)
    assert aligned.eval()(x).shape == (27, 3)
    torch.testing.assert_close(aligned(x), plain.eval()(x), rtol=1e-8, atol=1e-9)
    assert {"rebasin/NoT", "rebasin/barrier_after_2", "val/cls/Acc"} <= made.callback_metrics.keys()


def test_swag_statistics_follow_the_network() -> None:
    class Shuffle(SymmetryCallback):
        """Permutes at random in place."""

        prefix = "shuffle"
        moved = 0

        def check_graph(self, graph: SymmetryGraph, network: nn.Module) -> None:
            pass

        def act(self, trainer: Trainer, pl_module: Any, *, hook: str) -> None:
            (network,) = self.networks(pl_module)
            p = random_permutation(self.known_graph(), generator=generator(trainer.current_epoch))
            permute_in_place(self.known_graph(), p, network, **self.followers(trainer, pl_module, network))
            self.moved += transposition_count(p)

    shuffle = Shuffle(every_n_epochs=1)
    plain, moved = fit(wrap_swag, 1)[1], fit(wrap_swag, 1, shuffle)[1]
    assert shuffle.moved > 5
    x = normal(9, 5)

    def predict(model: Any, statistic: str, k: int | None = None) -> Tensor:
        net = mlp().double()
        held = {n: model.swag_stats[f"{model.prfx}{n}_{statistic}"] for n in net.state_dict()}
        held = held if k is None else {n: t[k] for n, t in held.items()}
        net.load_state_dict({n: held[n].reshape(t.shape) for n, t in net.state_dict().items()})
        return net(x)

    for what in (("mean",), ("sq_mean",), ("covariance_sqrt", 0), ("covariance_sqrt", 1)):
        torch.testing.assert_close(predict(moved, *what), predict(plain, *what), rtol=1e-9, atol=1e-10)


def test_four_callbacks_on_one_ensemble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rebasin = Rebasin(in_place=True, every_n_epochs=1, barrier_loader="val")
    scale = ScaleCanonicalization(in_place=True, every_n_epochs=1)
    snapshots = PosteriorSnapshots(tmp_path / "snapshots", every_n_epochs=1)
    laplace, log = FitLaplace(path=tmp_path / "laplace.safetensors"), CSVLogger(tmp_path)
    module = routine(lambda model: model, 2, lambda network: LaplaceEnsemble(network, 3))
    callbacks: list[Any] = [rebasin, scale, snapshots, laplace]
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        made = TUTrainer(callbacks=callbacks, max_epochs=2, log_every_n_steps=4, **QUIET | {"logger": log})
        made.fit(module, loader(), loader(n=16, shuffle=False))
        (scores,) = made.test(module, loader(n=16, shuffle=False), verbose=False)
    assert [len(c.history) for c in (rebasin, scale)] == [2, 2]
    assert set(SampleStore.open(tmp_path / "snapshots").chains) == {0, 1}

    # Each member has its own approximation, of the network itself and not of a copy, and predicts with it.
    members, x = list(module.model.core_models), normal(4, 5)
    assert [la.model for la in laplace.laplaces] == [m.core_model for m in members]
    assert [m.laplace for m in members] == laplace.laplaces
    assert module.model.eval()(x).shape == (2 * 3 * 4, 3) and scores["test/ens_MI"] > 0
    with pytest.raises(ValueError, match="there are 2, one for each member of the ensemble: use laplaces"):
        _ = laplace.laplace

    ours = [w for w in caught if "tu_symmetry" in str(w.filename) or "tu_symmetry" in type(w.message).__module__]
    said = [str(w.message) for w in ours] + [r.getMessage() for r in caplog.records if "tu_symmetry" in r.pathname]
    assert len(said) == len(set(said)), "something was said twice"
    # Scalars are few, whatever the number of layers.
    with open(Path(log.log_dir) / "metrics.csv") as file:
        own = {c for c in next(csv.reader(file)) if c.startswith(("scale/", "rebasin/", "laplace/"))}
    assert len(own) <= 33 and not [c for c in own if "layer" in c or "GROUP" in c]
    assert {"laplace/log_evidence", "laplace/gamma", "scale/ratio_1"} <= own

    # The files are read again, each for its member.
    assert [file.name for file in laplace.files] == ["laplace_0.safetensors", "laplace_1.safetensors"]
    again = FitLaplace(load_from=tmp_path / "laplace.safetensors")
    other = routine(lambda model: model, 2)
    own_states = {name.replace(".core_model.", "."): t for name, t in module.model.state_dict().items()}
    other.model.load_state_dict(own_states)
    TUTrainer(callbacks=[again], **QUIET).test(other, loader(n=16, shuffle=False), verbose=False)
    for one, two in zip(laplace.laplaces, again.laplaces, strict=True):
        torch.testing.assert_close(one.predictive(x), two.predictive(x))
