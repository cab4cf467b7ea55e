"""FitLaplace: which weights it is fitted to, which data it sees, what it logs and saves."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch_uncertainty.methods import deep_ensembles
from torch_uncertainty.routines import ClassificationRoutine, RegressionRoutine, SegmentationRoutine

import tu_symmetry as tus
from tu_symmetry.callbacks import FitLaplace
from tu_symmetry.callbacks.laplace_users import find_networks, training_likelihood
from tu_symmetry.callbacks.training_data import plain_training_loader
from tu_symmetry.laplace.linearized import LinearizedLaplace

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES, CLASSES = 42, 3
Fit = partial(FitLaplace, calibrate=False)  # see test_held_out.py for the temperature


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES))


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return x, (x @ torch.randn(4, CLASSES, generator=generator)).argmax(-1)


class Routine(LightningModule):
    """A classifier with two parts that use a Laplace approximation, as TorchUncertainty's routines may have."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = model or net()
        self.user = User()
        self.predictions: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        assert torch.is_inference_mode_enabled() and self.user.laplace is not None
        self.predictions.append(self.user.laplace.predictive(batch[0]))

    validation_step = test_step
    predict_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class User(nn.Module):
    laplace: LinearizedLaplace | None = None

    def attach_laplace(self, laplace: LinearizedLaplace | None) -> None:
        self.laplace = laplace


class Data(LightningDataModule):
    def __init__(self, dataset: Dataset[Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.dataset = dataset
        self.options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "drop_last": True} | options

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.train = self.dataset or TensorDataset(*samples())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, **self.options)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*samples()), batch_size=20)

    predict_dataloader = test_dataloader


class Numbers(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        self.metrics |= metrics


def trainer(*callbacks: Callback, epochs: int = 3, **options: Any) -> Trainer:
    return trainings.trainer(*callbacks, max_epochs=epochs, **options)


def by_hand(model: nn.Module, data: Any = None, **options: Any) -> LinearizedLaplace:
    la = LinearizedLaplace(model, **options)
    la.fit([data or samples()])
    la.optimize_evidence()
    return la


def same(found: LinearizedLaplace | None, expected: LinearizedLaplace) -> None:
    assert found is not None
    x = samples()[0] + 0.2
    torch.testing.assert_close(found.predictive(x), expected.predictive(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.log_precision, expected.log_precision, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
def test_fits_the_trained_network_on_all_training_data(evaluate_at: str) -> None:
    routine, callback, logger = Routine(), Fit(evaluate_at=evaluate_at), Numbers()
    untrained = by_hand(Routine().model, evaluate_at=evaluate_at)
    trainer(callback, logger=logger).fit(routine, Data())
    la = callback.laplace
    assert la is not None and la.model is routine.model and routine.user.laplace is la
    assert la.summary.samples == SAMPLES  # the training loader drops two
    expected = by_hand(routine.model, evaluate_at=evaluate_at)
    same(la, expected)
    assert (la.log_precision - untrained.log_precision).abs().max() > 0.1, "vacuous: training changed nothing"
    assert routine.model.training and next(routine.model.parameters()).requires_grad
    assert logger.metrics["laplace/gamma"] == pytest.approx(sum(row.gamma for row in la.report()))
    assert logger.metrics["laplace/log_evidence"] == pytest.approx(la.log_marginal_likelihood())
    assert la.log_marginal_likelihood() == pytest.approx(expected.log_marginal_likelihood(), rel=1e-4)


def test_tests_reuse_what_belongs_to_the_weights_and_fit_anew_what_does_not(tmp_path: Path) -> None:
    routine, callback = Routine(), Fit(evaluate_at="map")
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    runner = trainer(callback, keep)
    runner.fit(routine, Data())
    last = callback.laplace
    runner.test(routine, Data(), verbose=False)
    assert callback.laplace is last
    runner.test(routine, Data(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert callback.laplace is not last and routine.user.laplace is callback.laplace
    same(callback.laplace, by_hand(routine.model, evaluate_at="map"))
    found, expected = torch.cat(routine.predictions[-3:]), callback.laplace.predictive(samples()[0])
    torch.testing.assert_close(found, expected, check_device=False)
    assert (tmp_path / "laplace.safetensors").is_file() and (tmp_path / "epoch=0.laplace.safetensors").is_file()


def test_without_a_fit_before() -> None:
    for stage in ("test", "validate", "predict"):
        routine, callback = Routine(), Fit(evaluate_at="map")
        data = Data()
        data.val_dataloader = data.test_dataloader  # type: ignore[method-assign]
        getattr(trainer(callback), stage)(routine, datamodule=data)
        same(callback.laplace, by_hand(routine.model, evaluate_at="map"))
        assert len(routine.predictions) == 3


@pytest.mark.parametrize("moved", [False, True])
def test_weights_made_under_inference_mode(moved: bool) -> None:
    with torch.inference_mode():
        model = net()
        model[3].weight.mul_(1.0)
    model.add_module("tied", nn.Identity())
    model.tied.weight = model[3].weight
    assert model[3].weight.is_inference()
    if moved:  # as on the way to a GPU: such a tensor no longer says that it was made there
        model.double().float()
        assert not model[3].weight.is_inference()
    routine, callback = Routine(model), Fit(evaluate_at="map", curvature="diag")
    trainer(callback).test(routine, Data(), verbose=False)
    assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
    assert model.tied.weight is model[3].weight
    same(callback.laplace, by_hand(model, evaluate_at="map", curvature="diag"))


def test_training_again_takes_the_old_approximation_back() -> None:
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(pl_module.user.laplace)  # type: ignore[union-attr]

    routine, callback = Routine(), Fit(evaluate_at="map")
    trainer(callback).fit(routine, Data())
    first = callback.laplace
    trainer(callback, Look()).fit(routine, Data())
    assert seen == [None] and callback.laplace is not first
    same(callback.laplace, by_hand(routine.model, evaluate_at="map"))


def test_which_network() -> None:
    routine, callback = Routine(), Fit(evaluate_at="map", network="other.1")
    routine.other = nn.Sequential(nn.Identity(), routine.model)
    trainer(callback).fit(routine, Data())
    assert callback.laplace is not None and callback.laplace.model is routine.model
    other = Routine()
    other.backbone = other.model
    del other.model
    assert find_networks(other, None) == [other.backbone]  # whatever it is called
    other.second = net()
    with pytest.raises(ValueError, match="network="):
        find_networks(other, None)


def test_what_would_fail_at_the_end_fails_at_the_start() -> None:
    odd = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Embedding(3, 4, max_norm=1.0), nn.Linear(4, CLASSES))
    for model, options, message in (
        (odd, {"curvature": "kfac"}, "Embedding with max_norm"),
        (net(), {"parameters": ["head"]}, "matches no parameter"),
    ):
        routine = Routine(model)
        before = routine.model[3].weight.clone()
        with pytest.raises(ValueError, match=message):
            trainer(Fit(**options)).fit(routine, Data())
        assert torch.equal(routine.model[3].weight, before)
    binary = Routine()
    binary.num_classes = 1
    with pytest.raises(ValueError, match="single logit"):
        trainer(Fit()).fit(binary, Data())


class Augmented(Dataset[Any]):
    """Noise on every reading, unless a transform takes its place; ``transform`` as torchvision's data sets have it."""

    def __init__(self, transform: Any = None) -> None:
        self.x, self.y = samples()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return (self.transform(self.x[i]) if self.transform else self.x[i]), self.y[i]


def noise(x: Tensor) -> Tensor:
    return x + 0.5 * torch.randn(x.shape)


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_augmented_data_are_refused_before_training() -> None:
    routine = Routine()
    before = routine.model[0].weight.clone()
    with pytest.raises(ValueError, match=r"augmented.*train_data="):
        trainer(Fit()).fit(routine, Data(Augmented(noise)))
    assert torch.equal(routine.model[0].weight, before)


def test_augmenting_collate_functions_are_refused() -> None:
    def mix(batch: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(batch)
        return noise(x), y

    with pytest.raises(ValueError, match="augmented"):
        trainer(Fit()).fit(Routine(), Data(collate_fn=mix))


def test_the_evaluation_transform_takes_the_place_of_augmentation() -> None:
    """As TorchUncertainty's data modules have it."""
    x, y = samples()
    for split in (False, True):
        rows = torch.arange(5, 35) if split else torch.arange(SAMPLES)
        dataset = Augmented(noise)
        data = Data(Subset(dataset, rows.tolist()) if split else dataset)
        data.train_transform, data.test_transform = noise, double
        routine, callback = Routine(), Fit(evaluate_at="map")
        trainer(callback).fit(routine, data)
        same(callback.laplace, by_hand(routine.model, (2 * x[rows], y[rows]), evaluate_at="map"))
        assert dataset.transform is noise


def test_given_data() -> None:
    x, y = samples()
    given = TensorDataset(x[:20], y[:20])
    for data in (given, DataLoader(given, batch_size=3, shuffle=True, drop_last=True)):
        routine, callback = Routine(), Fit(data, evaluate_at="map")  # type: ignore[arg-type]
        trainer(callback).fit(routine, Data(Augmented(noise)))
        same(callback.laplace, by_hand(routine.model, (x[:20], y[:20]), evaluate_at="map"))


def plain(data: Data, **options: Any) -> DataLoader[Any]:
    data.setup("fit")
    runner = trainer()
    runner.datamodule = data  # type: ignore[attr-defined]
    return plain_training_loader(runner, Routine(), **options)


def test_plain_loaders_are_sequential_and_whole() -> None:
    loader = plain(Data())
    assert [len(x) for x, _ in loader] == [8] * 5 + [2]
    torch.testing.assert_close(torch.cat([x for x, _ in loader]), samples()[0])
    assert [len(x) for x, _ in plain(Data(), batch_size=40)] == [40, 2]
    subset = plain(Data(shuffle=False, drop_last=False, sampler=SubsetRandomSampler([4, 9, 1])))
    torch.testing.assert_close(torch.cat([x for x, _ in subset]), samples()[0][[4, 9, 1]])


def test_loaders_without_a_known_order_are_refused() -> None:
    weighted = WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES)
    with pytest.raises(ValueError, match=r"WeightedRandomSampler.*train_data="):
        plain(Data(sampler=weighted, shuffle=False))

    class Batches(BatchSampler):
        pass

    batches = Batches(SequentialSampler(range(SAMPLES)), 8, False)
    with pytest.raises(ValueError, match="draws batches by Batches"):
        plain(Data(batch_sampler=batches, batch_size=1, shuffle=None, drop_last=False))

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from zip(*samples(), strict=True)

    with pytest.raises(ValueError, match="stream"):
        plain(Data(Stream(), shuffle=None, drop_last=False))
    plain(Data(), given=TensorDataset(torch.full((8, 4), torch.nan), torch.zeros(8)))  # NaN is no augmentation
    with pytest.raises(ValueError, match="empty"):
        plain(Data(), given=TensorDataset(torch.zeros(0, 4), torch.zeros(0)))
    with pytest.raises(ValueError, match="are a list"):
        plain(Data(), given=[samples()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no training data here"):
        trainer(Fit()).test(Routine(), Data().test_dataloader(), verbose=False)


def test_batches_that_are_changed_on_their_way_are_refused() -> None:
    class Normalizing(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return double(batch[0]), batch[1]

    with pytest.raises(ValueError, match="Normalizing changes batches in on_after_batch_transfer"):
        trainer(Fit()).fit(Routine(), Normalizing())


def test_every_process_has_its_share_and_no_sample_twice() -> None:
    class Rank:
        datamodule, fast_dev_run, world_size, train_dataloader = None, False, 4, None
        precision_plugin = Precision()

    shares = []
    for rank in range(4):
        Rank.global_rank = rank  # type: ignore[attr-defined]
        loader = plain_training_loader(Rank(), Routine(), TensorDataset(*samples()))  # type: ignore[arg-type]
        shares.append(torch.cat([x for x, _ in loader]))
    assert sorted(len(s) for s in shares) == [10, 10, 11, 11]
    torch.testing.assert_close(torch.cat(shares).sum(0), samples()[0].sum(0), rtol=1e-4, atol=1e-4)


def test_saved_beside_the_checkpoint_without_the_weights(tmp_path: Path) -> None:
    routine, callback = Routine(), Fit(evaluate_at="tangent_mode", prior="single")
    trainer(callback, ModelCheckpoint(tmp_path, filename="net")).fit(routine, Data())
    path = tmp_path / "laplace.safetensors"
    assert callback.files == [path]
    content = torch.load(tmp_path / "net.ckpt", weights_only=True)
    assert content["state_dict"].keys() == {f"model.{name}" for name in net().state_dict()}
    with safe_open(path, "pt") as file:
        stored = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    for name, weight in routine.model.named_parameters():
        assert not any(t.shape == weight.shape and torch.equal(t, weight) for t in stored), name
    assert not list(tmp_path.glob("*.tmp*"))
    assert callback.laplace is not None
    again, other = Routine(), Fit(load_from=path)
    trainer(other).test(again, Data(), ckpt_path=tmp_path / "net.ckpt", verbose=False)
    routine.model.to(again.predictions[0].device)
    expected = torch.cat([callback.laplace.predictive(x) for x in samples()[0].split(20)])
    assert torch.equal(torch.cat(again.predictions), expected)
    with pytest.raises(ValueError, match=r"laplace\.safetensors"):
        trainer(Fit(load_from=path)).test(Routine(), Data(), verbose=False)


def test_a_path_of_ones_own_and_nothing_without_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(callback := Fit(evaluate_at="map")).fit(Routine(), Data())
    assert not callback.files and not list(tmp_path.iterdir())
    trainer(callback := Fit(evaluate_at="map", path=tmp_path / "deep" / "la.safetensors")).fit(Routine(), Data())
    assert LinearizedLaplace.load(tmp_path / "deep" / "la.safetensors", callback.laplace.model).prior == "per_group"


def test_few_iterations_find_the_precisions_that_many_find() -> None:
    """What stopping early costs: next to nothing of the precisions, and nothing of the predictions."""
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    y = (x @ torch.randn(6, CLASSES) + torch.randn(400, CLASSES)).argmax(-1)
    model = nn.Sequential(
        nn.Linear(6, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:200]), y[:200]).backward()
        optimizer.step()
    model.eval()
    found = []
    for limit in (30, None):
        la = LinearizedLaplace(model).fit([(x[:200], y[:200])])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = la.optimize_evidence(max_iterations=limit, memory=0)  # as a large network's: many directions
            quality = la.calibrate([(x[200:300], y[200:300])])
        p = la.predictive(x[300:]).gather(-1, y[300:, None])
        found.append((la.log_precision, quality.calibrated.nll, -p.log().mean().item()))
    assert result.converged and result.iterations > 50, "vacuous: the limit stops nothing"
    early, late = found
    torch.testing.assert_close(early[0], late[0], rtol=0, atol=0.1)
    assert early[1:] == pytest.approx(late[1:], abs=5e-3)


class HeldOut(Data):
    """With validation data that the network cannot predict: labels at random."""

    def val_dataloader(self) -> DataLoader[Any]:
        x, y = samples()
        return DataLoader(TensorDataset(x + 1, (y + torch.arange(SAMPLES)) % CLASSES), 10)


@pytest.mark.parametrize("fitting", [True, False])
def test_the_temperature_is_chosen_on_validation_data(fitting: bool) -> None:
    routine, callback, logger = Routine(), Fit(evaluate_at="map", calibrate=True), Numbers()
    run = trainer(callback, logger=logger, limit_val_batches=0)
    (run.fit if fitting else run.test)(routine, HeldOut())
    found, la = callback.calibration, callback.laplace
    assert found is not None and la is not None and la.temperature == found.temperature
    assert found.samples == SAMPLES
    assert found.calibrated.nll <= found.network.nll
    x, y = HeldOut().val_dataloader().dataset.tensors  # type: ignore[attr-defined]
    p = la.predictive(x).double().gather(-1, y.unsqueeze(-1))
    assert -p.log().mean().item() == pytest.approx(found.calibrated.nll, rel=1e-4)
    assert logger.metrics["laplace/temperature"] == found.temperature
    for name in ("network", "evidence", "calibrated"):
        assert logger.metrics[f"laplace/held_out/{name}/nll"] == getattr(found, name).nll
    callback = Fit(evaluate_at="map", calibrate=False)
    trainer(callback, limit_val_batches=0).fit(Routine(), HeldOut())
    assert callback.calibration is None and callback.laplace is not None and callback.laplace.temperature == 1


def test_the_temperature_is_one_that_is_surely_better() -> None:
    """By two standard errors unless another number is asked for."""
    found = {}
    for errors in (None, 0.0, 4.0):
        callback = Fit(evaluate_at="map", calibrate=True, **({} if errors is None else {"standard_errors": errors}))
        trainer(callback, limit_val_batches=0).fit(Routine(), HeldOut())
        assert callback.calibration is not None and callback.laplace is not None
        found[errors] = callback.calibration
        expected = 2.0 if errors is None else errors
        again = callback.laplace.calibrate(HeldOut().val_dataloader(), standard_errors=expected)
        assert again.temperature == callback.calibration.temperature
        assert again.calibrated.nll == pytest.approx(callback.calibration.calibrated.nll, rel=1e-5)
    assert found[4.0].temperature < found[0.0].temperature, "vacuous: both rules choose the same"
    assert found[0.0].calibrated.nll < found[4.0].calibrated.nll <= found[4.0].network.nll
    assert FitLaplace().standard_errors == 2.0  # here it chooses as 0 does
    with pytest.raises(ValueError, match="standard_errors"):
        FitLaplace(standard_errors=math.nan)


@pytest.mark.parametrize("loader", [True, False])
def test_the_temperature_is_chosen_on_the_data_that_are_given(loader: bool) -> None:
    """Whatever the validation data are, and without a word."""
    x, y = samples()
    own: Any = TensorDataset(x[:13] + 2, y[:13])
    given = DataLoader(own, 5) if loader else own
    with warnings.catch_warnings():
        warnings.simplefilter("error", tus.laplace.report.NothingHeldOutWarning)
        callback = FitLaplace(evaluate_at="map", calibration_data=given)
        trainer(callback, limit_val_batches=0).fit(Routine(), Data())
    assert callback.calibration is not None and callback.calibration.held_out
    assert callback.calibration.samples == 13
    with pytest.raises(ValueError, match="calibrate=False chooses none"):
        FitLaplace(calibrate=False, calibration_data=given)


@pytest.mark.parametrize(("limit", "expected"), [(1, 8), (2, 16), (0.5, 21), (1.0, SAMPLES), (100, SAMPLES)])
def test_limited_training_batches_are_those_of_the_fit(limit: float, expected: int) -> None:
    callback = Fit(evaluate_at="map")
    trainer(callback, limit_train_batches=limit).fit(Routine(), Data())
    assert callback.laplace is not None and callback.laplace.summary.samples == expected


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="prior='per_unit' is not known"):
        Fit(prior="per_unit")
    with pytest.raises(TypeError, match="priors"):
        Fit(priors="single")
    Fit(parameters=["head"])


def test_in_yaml(tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    parser.add_argument("--config", action="config")
    (tmp_path / "c.yaml").write_text("""
callback:
  class_path: tu_symmetry.callbacks.FitLaplace
  init_args: {prior: single, evaluate_at: map, likelihood: regression, noise_variance: 0.5, hyperprior: {std: 3.0}}
""")
    found = parser.instantiate(parser.parse_args(["--config", str(tmp_path / "c.yaml")])).callback
    assert found.options["prior"] == "single" and found.options["noise_variance"] == 0.5
    assert found.hyperprior.std == 3 and found.likelihood == "regression"
    own = {"class_path": "tu_symmetry.likelihoods.Categorical", "init_args": {"label_smoothing": 0.1}}
    given = {"class_path": "tu_symmetry.callbacks.FitLaplace", "init_args": {"likelihood": own}}
    assert parser.instantiate(parser.parse_object({"callback": given})).callback.likelihood.label_smoothing == 0.1
    given["init_args"] = {"priors": 1}
    with pytest.raises(Exception, match="priors"):
        parser.parse_object({"callback": given})


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    runner = Trainer(
        callbacks=[Fit(path=tmp_path / "two.safetensors"), ModelCheckpoint(tmp_path)],
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    runner.fit(Routine(), Data())
    model = net()
    state = torch.load(next(tmp_path.glob("*.ckpt")), weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    found = LinearizedLaplace.load(tmp_path / "two.safetensors", model)
    assert found.summary.samples == SAMPLES
    same(found, by_hand(model, evaluate_at="tangent_mode"))


def test_the_likelihood_is_that_of_the_loss() -> None:
    class Focal(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target) ** 2

    smooth = nn.CrossEntropyLoss(label_smoothing=0.2)
    segmenter = SegmentationRoutine(nn.Conv2d(3, 4, 1), 4, smooth)
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (ClassificationRoutine(net(), 3, smooth), "classification", {"label_smoothing": 0.2, "ignore_index": -100}),
        (segmenter, "classification", {"label_smoothing": 0.2, "ignore_index": 255}),
        (
            ClassificationRoutine(net(), 1, nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))),
            "binary",
            {"pos_weight": [2.0]},
        ),
        (RegressionRoutine(nn.Linear(3, 2), 2, nn.MSELoss()), "regression", {}),
        (ClassificationRoutine(net(), 3, Focal()), "", {}),
        (ClassificationRoutine(net(), 3, nn.MSELoss()), "", {}),
        (Routine(), "", {}),
    ]
    for routine, name, options in cases:
        found = training_likelihood(None, routine)
        if name:
            assert not isinstance(found, str) and found.name == name
            assert options.items() <= found.config().items()
        else:
            assert found == "classification"
        assert training_likelihood("binary", routine) == "binary"


def test_members_of_a_deep_ensemble_are_a_mixture() -> None:
    class Together(Routine):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            outputs = self.model(batch[0])
            return nn.functional.cross_entropy(outputs, batch[1].repeat(len(outputs) // len(batch[1])))

    model, x = deep_ensembles([net(), net()]), samples()[0]
    routine, callback = Together(model), FitLaplace(prior="single", evaluate_at="map")
    routine.user = None  # type: ignore[assignment]
    trainer(callback).fit(routine, Data())
    each = [la.predictive(x, link_approx="probit") for la in callback.laplaces]
    assert [la.model for la in callback.laplaces] == list(model.core_models)
    torch.testing.assert_close(callback.mixture.predictive(x, link_approx="probit"), (each[0] + each[1]) / 2)


class Measured(Routine):
    """A regression whose loss is a function, from which no likelihood follows."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1][:, None].float())


def test_a_test_with_a_loader_of_its_own_knows_the_data_of_the_training(tmp_path: Path) -> None:
    """Of another checkpoint of the network that was trained, on the same training and validation data."""
    callback, data, model = FitLaplace(evaluate_at="map"), HeldOut(), Routine()
    model.validation_step = lambda batch, batch_idx: None  # type: ignore[assignment, method-assign]
    data.setup("fit")
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = trainer(callback, keep, epochs=2)
    run.fit(model, data.train_dataloader(), data.val_dataloader())
    first, test = callback.laplace, DataLoader(TensorDataset(*samples()), batch_size=8)
    assert first is not None and callback.calibration is not None and callback.calibration.held_out
    run.test(model, test, ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=False)
    again = callback.laplace
    assert again is not None and not torch.equal(again.fitted.center, first.fitted.center)
    assert again.summary.samples == first.summary.samples == SAMPLES
    expected = by_hand(model.model, evaluate_at="map")  # in batches of another size, and without a temperature
    torch.testing.assert_close(again.log_precision, expected.log_precision, rtol=1e-3, atol=2e-3)
    assert callback.calibration.held_out and callback.calibration.samples == 42
    other = Routine()  # which has not been trained with this callback
    with pytest.raises(ValueError, match="not trained with this callback"):
        run.test(other, test)


def test_targets_that_are_none_of_the_likelihood_are_refused_before_training() -> None:
    x, y = samples()
    routine, loader = Measured(), DataLoader(TensorDataset(x, y), batch_size=8)
    before = routine.model.weight.clone()
    with pytest.raises(ValueError, match=r"Measured has no `loss`.*FitLaplace\(likelihood='regression'\)"):
        trainer(Fit()).fit(routine, loader)
    assert torch.equal(routine.model.weight, before)
    callback = Fit(likelihood="regression", evaluate_at="map")
    trainer(callback, epochs=1).fit(routine, DataLoader(TensorDataset(x, y.float()[:, None]), batch_size=8))
    assert callback.laplace is not None and callback.laplace.likelihood.name == "regression"


def test_in_double_precision_data_are_as_the_network_sees_them() -> None:
    """The training data, the held-out data and those of the test."""
    routine, callback = Routine(), FitLaplace(evaluate_at="map", calibrate=True)
    data = HeldOut()
    routine.validation_step = lambda batch, batch_idx: None  # type: ignore[assignment, method-assign]
    runner = trainer(callback, precision="64-true")
    runner.fit(routine, data)
    la = callback.laplace
    assert la is not None and la.theta.dtype == torch.float64 and callback.calibration is not None
    x, y = samples()
    expected = by_hand(routine.model, (x.double(), y), evaluate_at="map")
    torch.testing.assert_close(la.log_precision, expected.log_precision)
    runner.test(routine, data, verbose=False)
    assert callback.laplace is la and routine.predictions[0].dtype == torch.float64


def test_training_is_the_same_with_the_callback_and_without() -> None:
    trained = []
    for chosen in ([], [FitLaplace]):
        routine = Routine()
        torch.manual_seed(5)  # of the order of the data
        trainer(*(kind(evaluate_at="map", max_iterations=2) for kind in chosen)).fit(routine, Data())
        trained.append((*routine.state_dict().values(), torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("evaluate_at", ["map", "tangent_mode"])
def test_a_fit_is_on_the_device_of_the_training_and_follows_the_network(evaluate_at: Any, cuda: torch.device) -> None:
    class Device(Callback):
        seen: torch.device | None = None

        def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen = pl_module.device

    routine, callback, device = Routine(), Fit(evaluate_at=evaluate_at), Device()
    fitted: list[torch.device] = []
    adopt = callback._adopt
    callback._adopt = lambda module, found: (fitted.append(found[0].theta.device), adopt(module, found))  # type: ignore
    runner = trainer(callback, device, accelerator="cuda")
    runner.fit(routine, Data())
    la = callback.laplace
    assert fitted == [cuda] and device.seen == torch.device("cpu") and la is not None
    on_cpu = la.predictive(samples()[0])
    assert on_cpu.device.type == "cpu" and la.theta.device.type == "cpu"
    runner.test(routine, Data(), verbose=False)
    assert callback.laplace is la and routine.predictions[0].device == cuda
    torch.testing.assert_close(torch.cat(routine.predictions).cpu(), on_cpu, rtol=1e-4, atol=1e-5)
