"""The epistemic score as the criterion by which TorchUncertainty's routine detects out-of-distribution data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine
from trainings import trainer

from tu_symmetry.callbacks import FitLaplace
from tu_symmetry.routines import EpistemicCriterion, LaplacePostProcessing

pytestmark = pytest.mark.filterwarnings("ignore")


class KnownAndFar(LightningDataModule):
    """Known inputs, and the same thirty times as large."""

    eval_ood = True

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(90, 4, generator=generator)
        self.sets = TensorDataset(x, (x[:, 0] > 0).long()), TensorDataset(30 * x, torch.zeros(90, dtype=torch.long))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.sets[0], 30)

    val_dataloader = postprocess_dataloader = train_dataloader

    def test_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(own, 25) for own in self.sets]

    def get_indices(self) -> dict[str, list[int]]:
        return {"test": [0], "test_ood": [1], "near_ood": [], "far_ood": [], "shift": [], "val_ood": []}


def routine(**options: Any) -> ClassificationRoutine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    recipe = torch.optim.Adam(model.parameters(), 0.05)
    return ClassificationRoutine(
        model,
        2,
        nn.CrossEntropyLoss(),
        optim_recipe=recipe,
        eval_ood=True,
        ood_criterion=EpistemicCriterion(),
        **options,
    )


def test_scores_are_those_of_the_posterior_whatever_was_calibrated() -> None:
    own, callback, data = routine(post_processing=LaplacePostProcessing()), FitLaplace(), KnownAndFar()
    run = trainer(callback, max_epochs=5)
    run.fit(own, data)
    la = callback.laplace
    assert la is not None
    known, far = (la.epistemic(s.tensors[0]) for s in data.sets)
    pairs = (far[:, None] > known[None]).double() + 0.5 * (far[:, None] == known[None]).double()
    found = {name: value for part in run.test(own, data, verbose=False) for name, value in part.items()}
    auroc = next(value for name, value in found.items() if name.startswith("ood") and "AUROC" in name)
    assert auroc == pytest.approx(float(pairs.mean()), abs=1e-4) and not math.isclose(auroc, 0.5)


def test_without_a_laplace_predictive_it_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="LaplacePostProcessing"):
        EpistemicCriterion()(torch.full((3, 2), 0.5))
    with pytest.raises(ValueError, match="post_processing"):
        trainer(FitLaplace(), max_epochs=1).fit(routine(), KnownAndFar())
