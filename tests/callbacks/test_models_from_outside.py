"""FitLaplace and Rebasin on networks of other libraries, and around TorchUncertainty's MC dropout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import trainings
from lightning.pytorch import LightningModule
from outside import MODELS, build
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.methods import deep_ensembles, mc_dropout
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget

import tu_symmetry as tus
from tu_symmetry.callbacks import FitLaplace, Rebasin
from tu_symmetry.laplace.linearized import LinearizedLaplace

pytestmark = pytest.mark.filterwarnings("ignore")


class Routine(LightningModule):
    """Trains on the mappings of a collator."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        found = self.model(batch[self.name])
        found = getattr(found, "logits", found)
        return nn.functional.cross_entropy(found.flatten(0, -2), batch["labels"].flatten())

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("name", list(MODELS))
def test_fit_laplace_without_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its methods come to a result or say why not; symmetries are discovered once."""
    found: list[Any] = []
    discover = tus.discover_symmetries
    monkeypatch.setattr(
        "tu_symmetry.symmetry.discovery.discover_symmetries",
        lambda *args, **kwargs: found.append(discover(*args, **kwargs)) or found[-1],
    )
    model, x, y = build(name)
    argument = {"resnet": "x", "efficientnet": "x", "gcn": "x", "vit": "pixel_values", "convnext": "pixel_values"}
    own = argument.get(name, "input_ids")
    rows = [{own: a, "labels": b} for a, b in zip(x, y, strict=True)]
    routine, callback = Routine(model, own), FitLaplace(budget=None, max_iterations=2)
    loaders = DataLoader(rows[:3], batch_size=2), DataLoader(rows[3:], batch_size=2)
    trainings.trainer(callback, max_epochs=1, precision="64-true").fit(routine, *loaders)
    (fits,) = callback.fits
    assert len(fits) == 3 and all(fit.laplace or "last" in fit.missing for fit in fits)
    assert sum(fit.laplace is not None for fit in fits) == (2 if name in ("gpt2", "llama", "gcn") else 3)
    assert callback.laplace is not None and callback.calibration is not None and len(found) == 1
    probabilities = callback.laplace.predictive({own: x}, num_samples=2)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(y.shape, dtype=torch.float64))


def net(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)).double()


def train(model: nn.Module, callback: Any, members: int = 1) -> DataLoader[Any]:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, (x @ torch.ones(4).double() > 0).long()), batch_size=6)
    routine = ClassificationRoutine(
        model=model,
        num_classes=3,
        loss=nn.CrossEntropyLoss(),
        is_ensemble=True,
        optim_recipe={"optimizer": torch.optim.SGD(model.parameters(), lr=1e-2)},
        format_batch_fn=RepeatTarget(members),
    )
    trainings.trainer(callback, max_epochs=1, precision="64-true").fit(routine, loader, loader)
    return loader


@pytest.mark.parametrize("on_batch", [True, False])
def test_mc_dropout_is_one_network(on_batch: bool) -> None:
    core = net(0)
    callback = FitLaplace(evaluate_at="map", curvature="kfac", calibrate=False)
    loader = train(mc_dropout(core, 4, on_batch=on_batch), callback)
    assert [la.model for la in callback.laplaces] == [core]
    expected = LinearizedLaplace(copy.deepcopy(core).eval(), evaluate_at="map").fit(loader)
    expected.optimize_evidence()
    x = next(iter(loader))[0]
    torch.testing.assert_close(callback.laplaces[0].predictive(x), expected.predictive(x), rtol=1e-3, atol=1e-5)


def test_members_with_mc_dropout_are_aligned() -> None:
    """A member whose units stand in another order comes back to the first one's, and no barrier is left."""
    first, second = mc_dropout(net(0), 4), mc_dropout(net(0), 4)
    graph = tus.discover_symmetries(first, torch.randn(2, 4).double())
    planted = tus.random_permutation(graph, generator=torch.Generator().manual_seed(1))
    second.load_state_dict(tus.apply_permutation(graph, planted, first.state_dict()))
    callback = Rebasin(barrier_loader="val", in_place=True, every_n_epochs=1)
    train(deep_ensembles([first, second]), callback, members=2)
    (record,) = callback.history
    assert record["NoT"] == [tus.transposition_count(planted)]
    assert record["distance_after"][0] < record["distance_before"][0]
    assert record["barrier_after"][0] <= record["barrier_before"][0]
