"""Fit a linearized Laplace approximation where training ends, and hand it to whatever evaluates it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tu_symmetry.callbacks.held_out import at_most, calibration_loader, is_tested_on, spread, why_not_held_out
from tu_symmetry.callbacks.laplace_choice import (
    DECIDING,
    JOINT,
    METHODS,
    Clock,
    Fit,
    OverBudgetError,
    Watched,
    cheapest,
    choose,
    describe,
    duration,
    parse_budget,
    relieved,
    seconds_of,
)
from tu_symmetry.callbacks.laplace_users import (
    LaplaceUser,
    attach,
    find_networks,
    leave_inference,
    log_scalars,
    predictive_options,
    require_own,
    say,
    share_buffers,
    training_likelihood,
)
from tu_symmetry.callbacks.members import ModuleSource, on_training_device, require_whole_weights
from tu_symmetry.callbacks.training_data import plain_training_loader
from tu_symmetry.laplace.checks import require_weights
from tu_symmetry.laplace.curvature import require_room
from tu_symmetry.laplace.data import batches
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.fitted import FittedLaplace
from tu_symmetry.laplace.hooks import find_layers
from tu_symmetry.laplace.inputs import rows_of
from tu_symmetry.laplace.likelihood import Likelihood, LikelihoodName, make_likelihood
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.mixture import LaplaceMixture
from tu_symmetry.laplace.report import (
    Calibration,
    EvidenceResult,
    LaplaceHurtsWarning,
    NotConvergedWarning,
    NothingHeldOutWarning,
)
from tu_symmetry.laplace.tangent import TangentModel, evaluating
from tu_symmetry.posterior.network import require_numbers
from tu_symmetry.reporting.progress import show_progress
from tu_symmetry.routines.predictive import HALF_PRECISION

Progress = Callable[[dict[str, Any]], None]

T = TypeVar("T")
_HELD_OUT, _TRAINED_ON = 2000, 1000  # samples that the temperature is chosen on, of either kind
_PART = 5  # or, where that is more, one held-out sample for so many training samples
_READINGS, _LEAST = 75_000, 30  # of samples by the evidence at its default, and iterations whatever their number
_TRIED, _MOST = 4, 1000  # iterations whose time is measured, and the most
_DIRECTION = 0.3  # what an iteration takes, as a share of KFAC at the weights, before any is measured


class _Trained(NamedTuple):
    """Networks, and the data that they were trained on."""

    networks: list[nn.Module]
    world_size: int
    training: DataLoader[Any]
    validation: DataLoader[Any] | None


class FitLaplace(Callback):
    """Fits :class:`~tu_symmetry.LinearizedLaplace` to the trained network, and chooses its precisions by the evidence.

    Which approximation that is, it finds by itself: of the last layer, KFAC at the weights, and KFAC at the joint
    optimum it fits what its ``budget`` allows, and keeps the cheapest that held-out data cannot tell from the best
    (:func:`~tu_symmetry.callbacks.laplace_choice.choose`). The first is fitted in any case. Where there is nothing to
    choose on, or several processes train, it is the only one. Options that say what to fit (``curvature``,
    ``evaluate_at``, ``parameters``) leave no choice, and no limit of time; what is chosen within a budget hangs on the
    speed of the machine.

    It fits at the end of ``fit``, and before ``test``, ``validate`` and ``predict`` to weights that are new to it.
    Everything with a method ``attach_laplace`` gets the approximation; members of an ensemble get one each. Training
    data are read in order, whole and unaugmented. Loggers get ``laplace/log_evidence`` (nats), ``laplace/gamma``,
    ``laplace/noise_variance``, ``laplace/temperature``, ``laplace/held_out/network/nll`` and so on.

    Args:
        train_data: the training data as the network sees them when it predicts; None for the trainer's, with the data
            module's ``test_transform``.
        network: attribute path (``"model.ema_model"``) or callable of the LightningModule; None for its ``model``.
        budget: time for it all: a share of the training's (a minute, where nothing was trained), a duration such as
            ``"10min"``, or None for all that it takes.
        hyperprior: see :meth:`LinearizedLaplace.optimize_evidence`.
        max_iterations: the most that the evidence takes. ``auto``: as many as read 75,000 samples, and 30 at least,
            which is enough to predict with. None: to convergence, to compare networks by their evidence.
        calibrate: whether to choose the temperature (:meth:`LinearizedLaplace.calibrate`). ``auto``: on validation data
            that are neither test nor training data, else, with a warning, on 1,000 training samples. True: on the
            validation data, whatever they are.
        calibration_data: loader or data set in place of the validation data.
        standard_errors: see :meth:`LinearizedLaplace.calibrate`.
        path: file to save to; None for ``laplace.safetensors`` beside the checkpoint. Members of an ensemble are saved
            to ``NAME_0.safetensors`` and so on.
        load_from: a file that was saved earlier, to use instead of fitting before tests.
        likelihood: None for that of the LightningModule's ``loss``, else ``classification``.
        options: those of :class:`~tu_symmetry.LinearizedLaplace` (``prior``, ``curvature``, ...).

    Attributes:
        laplaces, evidence_results, calibrations, files: what was found and written, one for each network.
        fits: all that were fitted to each network, to choose from; with an approximation those that may be used yet.
        training_seconds: how long the training took; None where there was none.
        laplace, evidence_result, calibration: the only one of these, or None.
    """

    def __init__(
        self,
        train_data: DataLoader[Any] | Dataset[Any] | None = None,
        *,
        network: ModuleSource | None = None,
        budget: float | str | None = 0.25,
        hyperprior: Hyperprior | Literal["default"] | None = "default",
        max_iterations: int | Literal["auto"] | None = "auto",
        calibrate: bool | Literal["auto"] = "auto",
        calibration_data: DataLoader[Any] | Dataset[Any] | None = None,
        standard_errors: float = 2.0,
        path: str | Path | None = None,
        load_from: str | Path | None = None,
        likelihood: LikelihoodName | Likelihood | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require_numbers(standard_errors=standard_errors)
        some = likelihood or ("classification" if options.get("noise_variance") is None else "regression")
        without_names = {k: v for k, v in options.items() if k not in ("parameters", "graph")}
        with isolate_rng(include_cuda=False):  # the layer's weights are drawn
            LinearizedLaplace(nn.Linear(1, 2), some, **without_names)  # refuses wrong options before training
        if calibrate not in (True, False, "auto"):
            raise ValueError(f"calibrate={calibrate!r} is not known; choose 'auto', True or False")
        if calibration_data is not None and calibrate is False:
            raise ValueError("calibration_data are to choose a temperature on, and calibrate=False chooses none")
        if not 0 <= standard_errors < math.inf:
            raise ValueError(f"standard_errors={standard_errors} has to be finite and not negative")
        if isinstance(max_iterations, str) and max_iterations != "auto":
            raise ValueError(f"max_iterations={max_iterations!r} is not known; choose 'auto', a number, or None")
        self.train_data, self.network, self.likelihood = train_data, network, likelihood
        self.options = options  # in a line of its own, by which jsonargparse finds what they are options of
        self.budget = parse_budget(budget)
        self.hyperprior, self.max_iterations = hyperprior, max_iterations
        self.calibrate, self.calibration_data, self.standard_errors = calibrate, calibration_data, standard_errors
        self.path = None if path is None else Path(path)
        self.load_from = None if load_from is None else Path(load_from)
        self.forget()

    def forget(self) -> None:
        """Drop what earlier runs left."""
        self.laplaces: list[LinearizedLaplace] = []
        self.evidence_results: list[EvidenceResult] = []
        self.calibrations: list[Calibration] = []
        self.fits: list[list[Fit]] = []
        self.files: list[Path] = []
        self._fingerprints: list[str] = []
        self._chosen_on: DataLoader[Any] | None = None
        self._trained: _Trained | None = None
        self._warned = False
        self._training_began: float | None = None
        self.training_seconds: float | None = None

    @property
    def laplace(self) -> LinearizedLaplace | None:
        """The approximation of the only network; a ValueError where there are several."""
        return _only(self.laplaces, "laplaces")

    @property
    def mixture(self) -> LaplaceMixture:
        """The approximations of all members as one posterior."""
        return LaplaceMixture(self.laplaces)

    @property
    def evidence_result(self) -> EvidenceResult | None:
        """What choosing the precisions of the only network gave."""
        return _only(self.evidence_results, "evidence_results")

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the only network."""
        return _only(self.calibrations, "calibrations")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take back older approximations, for the weights are about to change, and check what would fail at the end."""
        require_whole_weights(trainer)
        if trainer.precision in HALF_PRECISION:
            raise TypeError(
                f"precision={trainer.precision!r} makes the weights torch.bfloat16 or torch.float16, of which no "
                "curvature can be taken: train with 'bf16-mixed' or '32-true'"
            )
        made = [self._possible(network, pl_module) for network in find_networks(pl_module, self.network)]
        self.forget()
        attach(pl_module, [])
        require_own(pl_module, made)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the training data, and at those for the temperature, while there is nothing to lose."""
        training = self._training(trainer, pl_module)
        networks = find_networks(pl_module, self.network)
        self._require_likelihood(pl_module, networks, training)
        validation = calibration_loader(trainer, training, self.calibration_data)
        self._trained = _Trained(networks, trainer.world_size, training, validation)
        self._held_out(trainer, training)
        self._training_began = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Know how long the training took."""
        if self._training_began is not None:
            self.training_seconds = time.monotonic() - self._training_began

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit to the weights that training ended with."""
        with on_training_device(trainer, pl_module):
            self._fit(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, unless the approximation belongs to these weights."""
        lacks = not hasattr(trainer.datamodule, "postprocess_dataloader")  # type: ignore[attr-defined]
        if lacks and isinstance(getattr(pl_module, "post_processing", None), LaplaceUser):
            raise ValueError(
                "TorchUncertainty's routine asks the data module for postprocess_dataloader() before it tests with a "
                "post-processing: test with datamodule=..., a TUDataModule or one that has this method"
            )
        self._ensure(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As before a test, where ``validate`` was called; during ``fit`` there is nothing to fit yet."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._ensure(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As before a test."""
        self._ensure(trainer, pl_module)

    def _ensure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An approximation of the present weights: the one that there is, that of a file, or a new one."""
        networks = find_networks(pl_module, self.network)
        with torch.inference_mode(False):
            for network in networks:
                leave_inference(network)
            known = [la for la in self.laplaces if any(la.model is network for network in networks)]
            found = [la.tangent.fingerprint() for la in known]
            if len(known) == len(networks) and found == self._fingerprints:
                attach(pl_module, known)
                self._require_untested(trainer, pl_module)
            elif self.load_from is not None:
                files = _numbered(self.load_from, len(networks))
                loaded = [LinearizedLaplace.load(file, net) for file, net in zip(files, networks, strict=True)]
                self._adopt(pl_module, loaded)
            else:
                self._fit(trainer, pl_module)

    def _adopt(self, pl_module: LightningModule, laplaces: list[LinearizedLaplace]) -> None:
        self.laplaces, self._fingerprints = laplaces, [la.tangent.fingerprint() for la in laplaces]
        attach(pl_module, laplaces)

    def _fit(self, trainer: Trainer, pl_module: LightningModule) -> None:
        require_whole_weights(trainer)
        cuda = pl_module.device.type == "cuda"
        shown = trainer.progress_bar_callback is not None and trainer.is_global_zero
        lines = show_progress() if shown else nullcontext()
        networks = find_networks(pl_module, self.network)
        self.fits, chosen = [], []
        with torch.inference_mode(False), isolate_rng(include_cuda=cuda), lines as progress:
            training = self._training(trainer, pl_module)
            self._chosen_on = self._held_out(trainer, training)
            seconds = self._announce(trainer)
            for network in networks:
                leave_inference(network)
                if trainer.world_size > 1:
                    share_buffers(network)
                clock = Clock(None if seconds is None else seconds / len(networks))
                self.fits.append(self._fit_methods(trainer, pl_module, network, training, clock, progress))
                chosen.append(choose(self.fits[-1], self.standard_errors))
        self._keep(trainer, pl_module, chosen)
        if not self._decided:
            for fits, fit in zip(self.fits, chosen, strict=True):
                rank_zero_info(describe(fits, fit, self.standard_errors))
        self.fits = [relieved(fits, fit) for fits, fit in zip(self.fits, chosen, strict=True)]
        say(self.laplaces, self.evidence_results if self.max_iterations == "auto" else [], self.calibrations)

    def _keep(self, trainer: Trainer, pl_module: LightningModule, chosen: Sequence[Fit]) -> None:
        self.evidence_results = [fit.evidence for fit in chosen if fit.evidence is not None]
        self.calibrations = [fit.calibration for fit in chosen if fit.calibration is not None]
        self._adopt(pl_module, [fit.laplace for fit in chosen if fit.laplace is not None])
        self._finish(trainer)

    @property
    def _decided(self) -> bool:
        """Whether the options say what to fit."""
        return any(name in self.options for name in DECIDING)

    def _announce(self, trainer: Trainer) -> float | None:
        """Say how much time there is to choose in, and return the seconds; None where there is no limit."""
        if self._decided or self.budget is None or self._chosen_on is None or trainer.world_size > 1:
            return None
        seconds, trained = seconds_of(self.budget, self.training_seconds), self.training_seconds
        after = "" if trained is None else f" after a training of {duration(trained)}"
        rank_zero_info(
            f"FitLaplace has {duration(seconds)}{after}: it fits {', then '.join(METHODS)}, as far as they fit in. "
            "budget='10min' gives it ten minutes, budget=None all that it takes"
        )
        return seconds

    def _possible(self, network: nn.Module, pl_module: LightningModule) -> LinearizedLaplace:
        """The first approximation that the network allows; the error of the last where it allows none."""
        errors: list[Exception] = []
        for method in self._methods().values():
            try:
                laplace = self._approximation(network, pl_module, method)
                self._require(laplace, pl_module)
                return laplace
            except (ValueError, TypeError) as error:
                errors.append(error)
        raise errors[-1]

    def _methods(self) -> dict[str, dict[str, Any]]:
        return {"": {}} if self._decided else METHODS

    def _require(self, laplace: LinearizedLaplace, pl_module: LightningModule) -> None:
        """What would fail at the end."""
        require_weights(laplace.model, laplace.tangent.names)
        if laplace.options.curvature == "kfac":
            find_layers(laplace.model, laplace.tangent.names)
        require_room(laplace.tangent, laplace.options, groups=1 if laplace.prior == "single" else 2)
        if laplace.likelihood.name == "classification" and getattr(pl_module, "num_classes", 2) == 1:
            raise ValueError(
                "num_classes=1 is a single logit: train with nn.BCEWithLogitsLoss(), which is recognized, or pass "
                "likelihood='binary'"
            )

    def _fit_methods(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        network: nn.Module,
        training: DataLoader[Any],
        clock: Clock,
        progress: Progress | None,
    ) -> list[Fit]:
        """Every method, by cost, as long as there is time, and something to choose on."""
        fits: list[Fit] = []
        without = self._chosen_on is None or trainer.world_size > 1
        weights: FittedLaplace | None = None  # KFAC there, with which the joint optimum begins
        before: LinearizedLaplace | None = None  # which has discovered the symmetries
        for name, method in self._methods().items():
            first = not any(fit.laplace for fit in fits)
            own = Clock(None) if first else Clock(clock.left)
            if not first and without:
                break
            try:
                laplace = self._approximation(network, pl_module, method)
                laplace.graph = laplace.graph if before is None else before.graph
                before = laplace
                if weights is not None and name == JOINT:
                    own.require(_LEAST * _DIRECTION * fits[-1].seconds)
                    laplace = LinearizedLaplace.from_fitted(weights.begun_at("tangent_mode"), training)
                else:
                    self._require(laplace, pl_module)
                    laplace.fit(training if first else Watched(training, own), progress=progress)
                    laplace.train_loader = training
                    weights = laplace.fitted if method.get("curvature") == "kfac" else None
                evidence = self._optimize(laplace, own, progress)
                calibration = self._calibrated(pl_module, laplace, training, own)
            except OverBudgetError as error:
                fits.append(Fit(name, own.spent, missing=f"it takes {error}"))
                break
            except (ValueError, TypeError) as error:
                if self._decided or (name == JOINT and first):
                    raise
                fits.append(Fit(name, own.spent, missing=str(error)))
            else:
                fits.append(Fit(name, own.spent, laplace, evidence, calibration))
        return fits

    def _optimize(self, laplace: LinearizedLaplace, clock: Clock, progress: Progress | None) -> EvidenceResult:
        limit = self.max_iterations
        with warnings.catch_warnings():
            if limit == "auto":  # instead of a warning there is a sentence in what is printed
                limit = max(_LEAST, _READINGS // laplace.summary.samples)
                warnings.simplefilter("ignore", NotConvergedWarning)
            options: Any = {"hyperprior": self.hyperprior, "progress": progress}
            if clock.left < math.inf and laplace.evaluate_at == "tangent_mode":
                before = clock.spent
                found = laplace.optimize_evidence(max_iterations=_TRIED, **options)
                if found.converged:
                    return found
                each = (clock.spent - before) / _TRIED
                clock.require(each * _LEAST)
                limit = min(limit or _MOST, int(clock.left / each))
            return laplace.optimize_evidence(max_iterations=limit, **options)

    def _approximation(
        self, network: nn.Module, pl_module: LightningModule, method: Mapping[str, Any]
    ) -> LinearizedLaplace:
        likelihood = training_likelihood(self.likelihood, pl_module)
        others = {name: value for name, value in method.items() if name not in self.options}
        return LinearizedLaplace(network, likelihood, **others, **self.options)

    def _calibrated(
        self, pl_module: LightningModule, laplace: LinearizedLaplace, training: DataLoader[Any], clock: Clock
    ) -> Calibration | None:
        """Choose the temperature for the predictions that the LightningModule will make."""
        own = predictive_options(pl_module, laplace)
        if self.calibrate is False:
            return None
        data: Iterable[Any] | None = self._chosen_on
        held_out = data is not None
        if data is None and self.calibrate == "auto":
            some = spread(training.dataset, _TRAINED_ON)
            data = DataLoader(some, training.batch_size, collate_fn=training.collate_fn)
        if data is None:
            return None
        data = data if clock.left == math.inf else Watched(data, clock)
        with warnings.catch_warnings():
            if not self._decided:  # what is printed of every method says it
                warnings.simplefilter("ignore", LaplaceHurtsWarning)
            return laplace.calibrate(data, held_out=held_out, standard_errors=self.standard_errors, **own)

    def _held_out(self, trainer: Trainer, training: DataLoader[Any]) -> DataLoader[Any] | None:
        """The data to choose the temperature on, where there are any that are neither trained on nor tested on."""
        if self.calibrate is False:
            return None
        found = calibration_loader(trainer, training, self.calibration_data)
        if found is None and self._trained is not None and training is self._trained.training:
            found = self._trained.validation
        if self.calibrate is True or self.calibration_data is not None:
            return found
        if not (why := why_not_held_out(found, training, trainer)) and found is not None:
            size = len(training.dataset) if isinstance(training.dataset, Sized) else 0
            return at_most(found, max(_HELD_OUT, size // _PART))
        self._warn(why)
        return None

    def _warn(self, why: str) -> None:
        if not self._warned:
            warnings.warn(
                f"FitLaplace has no data to choose the temperature of its posterior on: {why}. It takes training data, "
                "on which networks look better than they are, so that predictions stay close to the network's own. Set "
                "validation data aside (val_split=0.1 in TorchUncertainty's data modules, val_size in this package's), "
                "or pass calibration_data=..., or calibrate=False for the posterior of the evidence as it is",
                NothingHeldOutWarning,
                stacklevel=2,
            )
        self._warned = True

    def _require_untested(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where it turns out that data were chosen on that are tested on now, choose anew on others."""
        chosen_on, tested = self._chosen_on, trainer.state.fn == TrainerFn.TESTING
        guessed = self.calibrate == "auto" and self.calibration_data is None
        if not guessed or chosen_on is None or not tested or not is_tested_on(chosen_on, trainer):
            return
        self._warn("the validation data are the test data")
        self._chosen_on = None
        with isolate_rng(include_cuda=pl_module.device.type == "cuda"):
            training = self._training(trainer, pl_module)
            fits = [
                replace(fit, calibration=self._calibrated(pl_module, fit.laplace, training, Clock(None)))
                for fit in map(cheapest, self.fits)
                if fit.laplace is not None
            ]
        self.fits = [[fit] for fit in fits]
        self._keep(trainer, pl_module, fits)
        say([], [], self.calibrations)

    def _training(self, trainer: Trainer, pl_module: LightningModule) -> DataLoader[Any]:
        """The data of the training, where these networks were trained with this callback; else those of the trainer."""
        known, found = self._trained, find_networks(pl_module, self.network)
        same = known is not None and [*map(id, found)] == [*map(id, known.networks)]
        if known is not None and same and known.world_size == trainer.world_size:
            return known.training
        return plain_training_loader(trainer, pl_module, self.train_data)

    def _require_likelihood(
        self, pl_module: LightningModule, networks: Sequence[nn.Module], training: DataLoader[Any]
    ) -> None:
        """Compare a first batch with the likelihood, which is a guess where it does not follow from a loss."""
        likelihood = training_likelihood(self.likelihood, pl_module)
        own = make_likelihood(likelihood)
        with torch.no_grad(), isolate_rng(include_cuda=pl_module.device.type == "cuda"):
            for network in networks:
                inputs, targets = next(batches(training, next(network.parameters()).device))
                some = slice(0, 2)
                try:
                    with evaluating(network):
                        outputs = TangentModel(network, [], class_axis=own.class_axis).outputs(rows_of(inputs, some))
                    own.targets(outputs, targets[some])
                except (ValueError, TypeError) as error:
                    if self.likelihood is not None or likelihood != "classification":
                        raise
                    guess = f"{type(pl_module).__name__} has no `loss` that says so, and is taken for a classification"
                    raise type(error)(f"{error} ({guess}: FitLaplace(likelihood='regression') says else)") from error

    def _finish(self, trainer: Trainer) -> None:
        """Log and save what was found."""
        log_scalars(trainer, self.laplaces, self.evidence_results, self.calibrations)
        path = self.path or _beside_checkpoint(trainer)
        if path is not None:
            self.files = _numbered(path, len(self.laplaces))
            if trainer.is_global_zero:
                path.parent.mkdir(parents=True, exist_ok=True)
                for file, laplace in zip(self.files, self.laplaces, strict=True):
                    laplace.save(file)
            trainer.strategy.barrier("FitLaplace saved")


def _only(found: Sequence[T], name: str) -> T | None:
    if len(found) > 1:
        raise ValueError(f"there are {len(found)}, one for each member of the ensemble: use {name}")
    return found[0] if found else None


def _numbered(path: Path, count: int) -> list[Path]:
    """The file, or one for each of several networks."""
    return [path] if count == 1 else [path.with_name(f"{path.stem}_{k}{path.suffix}") for k in range(count)]


def _beside_checkpoint(trainer: Trainer) -> Path | None:
    loaded = trainer.ckpt_path if trainer.state.fn != TrainerFn.FITTING else None
    if loaded is not None:
        return Path(loaded).with_suffix(".laplace.safetensors")
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    return None if folder is None else Path(folder) / "laplace.safetensors"
