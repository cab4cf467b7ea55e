"""FitLaplace's temperature: on which data it is chosen, and that a model at the defaults is never worse for it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset
from torch_uncertainty.datamodules import TUDataModule
from torch_uncertainty.datamodules.abstract import CrossValDataModule
from torch_uncertainty.datasets.utils import TTADataset, create_train_val_split
from torch_uncertainty.routines import ClassificationRoutine
from trainings import trainer

from tu_symmetry.callbacks import FitLaplace
from tu_symmetry.callbacks.held_out import at_most, share_samples, validation_loader
from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.laplace.report import NothingHeldOutWarning
from tu_symmetry.routines import LaplaceEnsemble, LaplacePostProcessing

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


class Listed(Dataset[Any]):
    """Paths and labels, as image folders have them."""

    def __init__(self, start: int, transform: Callable[[int], int] | None = None) -> None:
        self.samples = [(f"{start + i}.png", i % 3) for i in range(40)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Arrays(Dataset[Any]):
    def __init__(self, seed: int) -> None:
        self.data = np.random.default_rng(seed).normal(size=(40, 3))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.data[index], 0


class Computed(Dataset[Any]):
    """Keeps nothing."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.factor * index]), index % 3


def pairs(some: slice = slice(None), clone: bool = False) -> TensorDataset:
    x, y = X[some], Y[some]
    return TensorDataset(x.clone(), y.clone()) if clone else TensorDataset(x, y)


WHOLE = pairs()
TU_TRAIN, TU_VAL = create_train_val_split(pairs(), 0.25, None, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (WHOLE, WHOLE, True),
        (WHOLE, pairs(), True),
        (WHOLE, pairs(clone=True), True),
        (pairs(slice(0, 20)), pairs(slice(20, 40)), False),
        (pairs(slice(0, 21)), pairs(slice(20, 40)), True),
        (Subset(WHOLE, [1, 2]), Subset(WHOLE, [3, 4]), False),
        (Subset(WHOLE, [1, 2]), Subset(copy.deepcopy(WHOLE), [2, 4]), True),
        (Subset(Subset(WHOLE, [5, 6, 7]), [0]), Subset(WHOLE, [5]), True),
        (Subset(Subset(WHOLE, [5, 6, 7]), [0]), Subset(WHOLE, [6]), False),
        (pairs(slice(10, 20)), Subset(WHOLE, [12]), True),
        (pairs(slice(10, 20)), Subset(WHOLE, [22]), False),
        (ConcatDataset([pairs(slice(0, 10)), pairs(slice(30, 40))]), pairs(slice(10, 30)), False),
        (ConcatDataset([pairs(slice(0, 10)), pairs(slice(30, 40))]), pairs(slice(20, 31)), True),
        (TU_TRAIN, TU_VAL, False),
        (TU_VAL, TU_VAL, True),
        (TTADataset(Subset(WHOLE, [1, 2]), 3), Subset(WHOLE, [2]), True),
        (TTADataset(Subset(WHOLE, [1, 2]), 3), Subset(WHOLE, [3]), False),
        (Listed(0), Listed(0, transform=abs), True),
        (Listed(0), Listed(40), False),
        (Arrays(0), Arrays(0), True),
        (Arrays(0), Arrays(1), False),
        (Computed(1.0), Computed(1.0), True),
        (Computed(1.0), Computed(2.0), False),
        (WHOLE, Arrays(0), False),
    ],
)
def test_data_sets_that_share_samples(first: Dataset[Any], second: Dataset[Any], shared: bool) -> None:
    a, b = DataLoader(first, 4), DataLoader(second, 7, shuffle=True)
    assert share_samples(a, b) is shared
    assert share_samples(b, a) is shared


def test_samplers_of_a_subset_are_told_apart() -> None:
    some, others = (DataLoader(WHOLE, 4, sampler=SubsetRandomSampler(chosen)) for chosen in ([1, 2], [3, 4]))
    assert share_samples(some, some) and not share_samples(some, others)


def test_validation_batches_are_taken_as_those_of_the_training_are() -> None:
    """Pairs of which the inputs may be several tensors, what is more than a pair, mappings; not inputs alone."""
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    samples: list[list[Any]] = [
        [((x[i], x[i]), y[i]) for i in range(6)], [(x[i], y[i], i) for i in range(6)],
        [{"pixel_values": x[i], "labels": y[i]} for i in range(6)],
    ]  # fmt: skip
    more = {"datamodule": None, "precision_plugin": Precision()}
    for some in samples:
        loader: Any = DataLoader(some, batch_size=3)  # type: ignore[arg-type]
        assert validation_loader(SimpleNamespace(val_dataloaders=loader, **more)) is loader  # type: ignore
    alone: Any = DataLoader(list(x), batch_size=3)  # type: ignore[arg-type]
    assert validation_loader(SimpleNamespace(val_dataloaders=alone, **more)) is None  # type: ignore


def test_at_most_so_many_samples() -> None:
    assert torch.equal(torch.cat([x for x, _ in at_most(DataLoader(WHOLE, 4), 10)]), X[::4])
    for loader in (DataLoader(WHOLE, 4), DataLoader(WHOLE, 4, shuffle=True)):
        assert at_most(loader, 40) is loader
    shuffled = DataLoader(WHOLE, 4, shuffle=True)
    assert at_most(shuffled, 10) is shuffled


READ = DigitsDataModule(train_size=400)


class UncertaintyData(TUDataModule):
    """As TorchUncertainty's own: without a validation split, validation and test are two copies of the test set."""

    training_task = "classification"

    def __init__(self, val_split: float | None = None, fails: bool = False) -> None:
        super().__init__(".", 64, 90, val_split, num_workers=0, pin_memory=False, persistent_workers=False)
        self.fails, self.stages = fails, list[str | None]()

    def setup(self, stage: str | None = None) -> None:
        self.stages.append(stage)
        train, test = TensorDataset(READ.train.x, READ.train.y), TensorDataset(READ.test.x, READ.test.y)
        if stage == "fit":
            if self.val_split:
                self.train, self.val = create_train_val_split(train, self.val_split)
            else:
                self.train, self.val = train, copy.deepcopy(test)
        if stage == "test":
            if self.fails:
                raise FileNotFoundError("no test data here")
            self.test = copy.deepcopy(test)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def routine(model: nn.Module, **options: Any) -> ClassificationRoutine:
    recipe = torch.optim.Adam(model.parameters(), lr=0.01)
    return ClassificationRoutine(model, 10, nn.CrossEntropyLoss(), optim_recipe=recipe, **options)


def runner(callback: FitLaplace, epochs: int) -> Trainer:
    return trainer(callback, max_epochs=epochs, limit_val_batches=0)


def run(
    data: LightningDataModule, model: nn.Module, *, epochs: int = 20, ensemble: bool = False, **options: Any
) -> tuple[FitLaplace, dict[str, float], list[str]]:
    """Train and test: the callback, metrics, and what was said of held-out data."""
    callback = FitLaplace(**options)
    processing = None if ensemble else LaplacePostProcessing()
    own = routine(LaplaceEnsemble(model, 30) if ensemble else model, is_ensemble=ensemble, post_processing=processing)
    fitting = runner(callback, epochs)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(own, datamodule=data)
        (found,) = fitting.test(own, datamodule=data, verbose=False)
    said = [str(w.message) for w in caught if issubclass(w.category, NothingHeldOutWarning)]
    return callback, dict(found), said


DATA: dict[str, tuple[Callable[[], LightningDataModule], str]] = {
    "TorchUncertainty's": (UncertaintyData, "are the test data"),
    "TorchUncertainty's, with a split": (lambda: UncertaintyData(0.1), ""),
    "this package's": (lambda: DigitsDataModule(batch_size=64, train_size=400), "are the test data"),
    "this package's, with a split": (lambda: DigitsDataModule(batch_size=64, train_size=400, val_size=140), ""),
}


@pytest.mark.parametrize("name", DATA)
def test_at_its_defaults_it_is_never_worse_than_the_network(name: str) -> None:
    """The promise: no option, a bounded search for the evidence, and test data that nothing has looked at."""
    make, why = DATA[name]
    data = make()
    callback, found, said = run(data, network())
    calibration = callback.calibration
    assert calibration is not None and callback.laplace is not None
    assert found["test/post/cls/NLL"] <= found["test/cls/NLL"] + 1e-3
    assert calibration.calibrated.nll <= calibration.network.nll
    assert callback.evidence_result is not None and callback.evidence_result.iterations <= 75_000 // 400
    assert calibration.held_out is (not why)
    assert len(said) == bool(why) and all(why in text and "val_split" in text for text in said)
    assert calibration.samples == (400 if why else 40 if "Torch" in name else 140)
    assert callback.laplace.temperature == calibration.temperature
    assert ("held-out" if calibration.held_out else "training samples") in str(calibration)


def test_the_posterior_of_the_evidence_alone_is_worse_here() -> None:
    """Without it the promise would hold of nothing."""
    callback, found, said = run(UncertaintyData(), network(), calibrate=False)
    assert not said and callback.calibration is None
    assert found["test/post/cls/NLL"] > found["test/cls/NLL"] + 0.02


def test_the_data_module_stays_as_it_is_while_training() -> None:
    data = UncertaintyData()
    callback, *_ = run(data, network(), epochs=1, evaluate_at="map")
    assert callback.calibration is not None
    assert data.stages.count("test") == 3  # two of a copy; they share the list
    data = UncertaintyData()
    fitting = runner(FitLaplace(evaluate_at="map"), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitting.fit(routine(network()), datamodule=data)
    assert not hasattr(data, "test")


@pytest.mark.parametrize("options", [{"evaluate_at": "map"}, {"budget": None}])
def test_what_turns_out_to_be_tested_on_is_not_chosen_on(options: dict[str, Any]) -> None:
    """Loaders that are given to each stage: before the test nothing is known of its data."""
    data, own = UncertaintyData(), routine(network())
    data.setup("fit")
    callback = FitLaplace(**options)
    fitting = runner(callback, 1)
    fitting.limit_val_batches = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitting.fit(own, data.train_dataloader(), data.val_dataloader())
    assert callback.calibration is not None and callback.calibration.held_out
    assert callback.calibration.samples == 360
    la = callback.laplace
    with pytest.warns(NothingHeldOutWarning, match="are the test data"):
        fitting.test(own, DataLoader(copy.deepcopy(data.val), 60), verbose=False)
    assert not callback.calibration.held_out
    assert callback.laplace is la if "evaluate_at" in options else callback.laplace is callback.fits[0][0].laplace


def test_test_data_that_are_not_there_do_not_stop_a_training() -> None:
    callback = FitLaplace(evaluate_at="map")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner(callback, 1).fit(routine(network()), datamodule=UncertaintyData(0.1, fails=True))
    assert callback.calibration is not None and callback.calibration.held_out


def test_folds_of_a_cross_validation_test_on_what_they_validate_on() -> None:
    whole = UncertaintyData(0.1)
    whole.setup("fit")
    indices = np.arange(len(whole.train))
    fold = CrossValDataModule(
        ".", indices[:300], indices[300:], whole, 32, 64, None, num_workers=0, pin_memory=False,
        persistent_workers=False,
    )  # fmt: skip
    callback, _, said = run(fold, network(), epochs=1, evaluate_at="map")
    assert len(said) == 1 and "are the test data" in said[0]
    assert callback.calibration is not None and not callback.calibration.held_out


def test_the_temperature_is_that_of_the_predictions_that_are_made() -> None:
    data = DigitsDataModule(batch_size=64, train_size=400, val_size=140)
    callback, *_ = run(data, network(), epochs=2, ensemble=True, evaluate_at="map")
    la, found = callback.laplace, callback.calibration
    assert la is not None and found is not None
    x, y = data.val.x, data.val.y
    p = la.predictive(x, covariance="samples", num_samples=30)
    assert found.calibrated.nll == pytest.approx(float(-p.double().gather(1, y[:, None]).log().mean()), rel=1e-4)


def test_asked_for_it_takes_the_validation_data_whatever_they_are() -> None:
    callback, _, said = run(UncertaintyData(), network(), epochs=1, evaluate_at="map", calibrate=True)
    assert not said and callback.calibration is not None and callback.calibration.samples == 360
    with pytest.raises(ValueError, match="calibrate='yes' is not known"):
        FitLaplace(calibrate="yes")  # type: ignore[arg-type]
