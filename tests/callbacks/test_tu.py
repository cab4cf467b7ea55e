"""Rebasin on TorchUncertainty's own routines and wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch_uncertainty.methods import EMA, SWA, deep_ensembles
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget
from trainings import loader, mlp, trainer

from tu_symmetry.callbacks import Rebasin
from tu_symmetry.callbacks.base import SymmetryCallback
from tu_symmetry.routines import SWAG
from tu_symmetry.symmetry.elements import random_permutation, transposition_count
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.in_place import permute_in_place

pytestmark = pytest.mark.filterwarnings("ignore")


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


def fit(wrap: Any, members: int, *callbacks: Callback, ensemble: bool = True) -> tuple[list[float], nn.Module, Trainer]:
    torch.manual_seed(0)
    model = wrap(deep_ensembles([mlp() for _ in range(members)]) if ensemble else mlp())
    module = ClassificationRoutine(
        model,
        num_classes=3,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=ensemble,
        format_batch_fn=RepeatTarget(num_repeats=members) if ensemble else None,
        optim_recipe=torch.optim.Adam(model.parameters(), lr=0.02),
    ).double()
    losses = Losses()
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
    x = torch.randn(9, 5, dtype=torch.float64)
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
            graph = self.known_graph()
            p = random_permutation(graph, generator=torch.Generator().manual_seed(trainer.current_epoch))
            permute_in_place(graph, p, network, **self.followers(trainer, pl_module, network))
            self.moved += transposition_count(p)

    _, plain, _ = fit(wrap_swag, 1, ensemble=False)
    shuffle = Shuffle(every_n_epochs=1)
    _, moved, _ = fit(wrap_swag, 1, shuffle, ensemble=False)
    assert shuffle.moved > 5
    permutable = {n: t for n, t in plain.swag_stats.items() if n.endswith("_mean")}
    assert any(not torch.allclose(t, moved.swag_stats[n]) for n, t in permutable.items()), "vacuous"
    x = torch.randn(9, 5, dtype=torch.float64)

    def predict(model: Any, statistic: str) -> Tensor:
        net = mlp().double()
        net.load_state_dict({n: model.swag_stats[f"{model.prfx}{n}{statistic}"] for n in net.state_dict()})
        return net(x)

    torch.testing.assert_close(predict(moved, "_mean"), predict(plain, "_mean"), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(predict(moved, "_sq_mean"), predict(plain, "_sq_mean"), rtol=1e-9, atol=1e-10)
    for k in range(2):
        nets = []
        for model in (moved, plain):
            net = mlp().double()
            deviations = {n: model.swag_stats[f"{model.prfx}{n}_covariance_sqrt"][k] for n in net.state_dict()}
            net.load_state_dict({n: deviations[n].reshape(t.shape) for n, t in net.state_dict().items()})
            nets.append(net(x))
        torch.testing.assert_close(nets[0], nets[1], rtol=1e-9, atol=1e-10)
