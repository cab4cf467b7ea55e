"""Fit a linearized Laplace approximation where training ends, and hand it to whatever evaluates it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tu_symmetry import plot
from tu_symmetry.callbacks.figures import log_figure
from tu_symmetry.callbacks.held_out import at_most, share_samples, spread, testing_loader, validation_loader
from tu_symmetry.callbacks.members import (
    ModuleSource,
    network_of,
    on_training_device,
    require_whole_weights,
    resolve_modules,
)
from tu_symmetry.callbacks.training_data import plain_training_loader
from tu_symmetry.laplace.checks import made_in_inference_mode, require_weights
from tu_symmetry.laplace.curvature import require_room
from tu_symmetry.laplace.data import batches
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.hooks import find_layers
from tu_symmetry.laplace.inputs import rows_of
from tu_symmetry.laplace.likelihood import (
    Categorical,
    HeteroscedasticGaussian,
    Likelihood,
    LikelihoodName,
    likelihood_of,
    make_likelihood,
)
from tu_symmetry.laplace.linearized import (
    Calibration,
    EvidenceResult,
    GroupReport,
    LinearizedLaplace,
    NotConvergedWarning,
    NothingHeldOutWarning,
)
from tu_symmetry.laplace.mixture import LaplaceMixture
from tu_symmetry.laplace.tangent import TangentModel, evaluating
from tu_symmetry.posterior.network import require_numbers
from tu_symmetry.reporting.progress import show_progress
from tu_symmetry.routines.predictive import HALF_PRECISION

Calibrate = bool | Literal["auto"]
Iterations = int | Literal["auto"] | None

T = TypeVar("T")
_OF_MEANS = ("held_out/", "temperature")  # what is logged of an ensemble's mean member alone
_FEW = ("held_out/network/nll", "held_out/calibrated/nll")  # and of these only so many
_SHOWN = 12  # groups that the printed summary names
_HELD_OUT, _TRAINED_ON = 2000, 1000  # samples that the temperature is chosen on, of either kind
_PART = 5  # or, where that is more, one held-out sample for so many training samples
_READINGS, _LEAST = 75_000, 30  # of samples by the evidence at its default, and iterations whatever their number


@runtime_checkable
class LaplaceUser(Protocol):
    """A part of a LightningModule that predicts with a Laplace approximation once it has one."""

    def attach_laplace(self, laplace: LinearizedLaplace | None) -> None:
        """Take the approximation; None where the network is about to train, and an older one has no meaning."""


class _Trained(NamedTuple):
    """Networks, and the data that they were trained on."""

    networks: list[nn.Module]
    world_size: int
    training: DataLoader[Any]
    validation: DataLoader[Any] | None


class FitLaplace(Callback):
    """Fits :class:`~tu_symmetry.LinearizedLaplace` to the trained network, and chooses its precisions by the evidence.

    It fits at the end of ``fit``, and before ``test``, ``validate`` and ``predict`` where the weights are not those
    that it has been fitted to (another checkpoint, or no fit before). The approximation is that of the network itself,
    not of a copy, and goes to every part of the LightningModule that uses one:
    :class:`~tu_symmetry.routines.LaplacePostProcessing`, :class:`~tu_symmetry.routines.LaplaceEnsemble`,
    :class:`~tu_symmetry.routines.LaplaceRegressionRoutine`, and whatever has a method ``attach_laplace``.

    **An ensemble of networks** (TorchUncertainty's ``deep_ensembles``) gets an approximation for each member, which is
    a mixture of Gaussians, one around each mode. They are in :attr:`laplaces`; where the members are
    :class:`~tu_symmetry.routines.LaplaceEnsemble`, each gets its own, and the routine tests the mixture::

        deep_ensembles([LaplaceEnsemble(network, num_samples=10) for network in networks])

    **On training data, unaugmented.** The evidence of other data, or of augmented data, is another quantity. Without
    ``train_data`` the trainer's training loader is made sequential, with nothing dropped. A data module's
    ``test_transform`` takes the place of its ``train_transform``, which is said, and samples are read repeatedly: data
    that change from one reading to the next raise an error before training starts.

    Logged to every logger of the trainer are ``laplace/log_evidence`` (nats), ``laplace/gamma`` (the number of weights
    that the data determine), for a regression ``laplace/noise_variance``, with ``log_groups``
    ``laplace/lambda/GROUP``, ``laplace/gamma/GROUP`` and ``laplace/squared_norm/GROUP``, and the
    ``laplace/temperature`` with ``nll``, ``ece`` and ``accuracy`` of the network, of the posterior of the evidence, and
    of the calibrated one on held-out data: ``laplace/held_out/network/nll`` and so on. Members of an ensemble have
    ``_i`` after these names, and the name without it is their mean (of temperature and NLL there is the mean alone).
    Loggers of images (TensorBoard, Weights & Biases, MLflow, Comet) get a figure of the precisions of all groups. The
    curvature is saved beside the checkpoint, without the weights: read it again with ``load_from``, or with
    :meth:`LinearizedLaplace.load`.

    Example:
        >>> routine = ClassificationRoutine(                                                # doctest: +SKIP
        ...     model, 10, nn.CrossEntropyLoss(),
        ...     post_processing=LaplacePostProcessing(), eval_ood=True, ood_criterion="post_processing",
        ... )
        >>> trainer = TUTrainer(callbacks=[FitLaplace(prior="per_group")])   # doctest: +SKIP
        >>> trainer.fit(routine, datamodule); trainer.test(routine, datamodule)             # doctest: +SKIP

    Args:
        train_data: a loader or data set that gives the training data as the network sees them when it predicts.
        transform: evaluation transform that takes the place of the training data set's ``transform``.
        batch_size: for the curvature and the evidence; by default that of the training loader.
        network: where the network is: an attribute path (``"model.ema_model"``) or a callable of the LightningModule.
            Default: its ``model``, or the network within a :class:`~tu_symmetry.routines.LaplaceEnsemble`. Where an
            ensemble is found, or several modules, each network of it is meant.
        at_fit_end: whether to fit at the end of ``fit``; False where tests load other weights anyway.
        evidence: whether to choose the precisions by the evidence; False leaves them as they start, see
            ``prior_precision`` of :class:`~tu_symmetry.LinearizedLaplace`.
        hyperprior: on the precisions, see :meth:`LinearizedLaplace.optimize_evidence`.
        tolerance, mode_tolerance, memory: see :meth:`LinearizedLaplace.optimize_evidence`.
        max_iterations: likewise, each of which takes about as long as 1 to 3 epochs of training. ``auto``: at most as
            many as read 75,000 samples, and never less than 30: 75 for 1,000 training samples, 30 for 2,500 and more.
            Most networks converge before (a LeNet after 9 directions with 1,000 and with 10,000 images, a ResNet-18
            after 26 with 1,000), and then Laplace takes less than 100 epochs. Where the limit stops the evidence before
            its tolerances are met, that is said: the precisions are good enough to predict with. To compare networks by
            their evidence choose None: to convergence.
        calibrate: on which data to choose the posterior's temperature, see :meth:`LinearizedLaplace.calibrate`; at
            temperature 0 predictions are the network's own, so that on these data they are never worse. ``auto``: the
            validation data of the trainer or its data module (at most 2,000 samples of them, or, where that is more, a
            fifth as many as there are training samples), unless they are the test data, as in many data modules without
            a validation split, or the training data. Where nothing is held out it takes 1,000 training samples: on
            these a network looks better than it is elsewhere, so that the temperature comes out too low rather than too
            high, and predictions stay close to the network's. That is said in one warning, before training starts.
            True: the validation data, whatever they are, where there are any. False: no temperature but 1.
        standard_errors: the temperature is that of the highest gain over the network on these data less so many
            standard errors of it, see :meth:`LinearizedLaplace.calibrate`: predictions stay near the network's own
            where the data leave open whether Laplace is better. 0: the temperature that is best on these data.
        path: file to save to. Default: ``laplace.safetensors`` in the checkpoint callback's folder, or, where a
            checkpoint was loaded, its name with ``.laplace.safetensors``. Nothing is saved without checkpoints. Members
            of an ensemble are saved to ``NAME_0.safetensors``, ``NAME_1.safetensors`` and so on.
        load_from: a file that was saved earlier, to use instead of fitting before tests; it has to belong to the
            weights.
        prefix: first part of the logged names.
        log_groups: log three scalars for each group of weights too (a ResNet-18 has 62 groups); not with
            ``prior="diagonal"``.
        likelihood: see :class:`~tu_symmetry.LinearizedLaplace`. By default that of the LightningModule's ``loss`` where
            it is one of torch's, else ``classification``.
        options: further arguments of :class:`~tu_symmetry.LinearizedLaplace` (``prior``, ``evaluate_at``,
            ``curvature``, ``fisher_type``, ...).

    Attributes:
        laplaces: the approximations, once fitted: one, or one for each member of an ensemble.
        evidence_results: what :meth:`LinearizedLaplace.optimize_evidence` returned for each; empty without evidence.
        calibrations: what :meth:`LinearizedLaplace.calibrate` returned for each: quality of the network, of the
            posterior of the evidence, and of the calibrated one; empty without ``calibrate``.
        files: the files, once written.
        laplace, evidence_result, calibration, saved_to: the only one of these, or None.
    """

    def __init__(
        self,
        train_data: DataLoader[Any] | Dataset[Any] | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        network: ModuleSource | None = None,
        at_fit_end: bool = True,
        evidence: bool = True,
        hyperprior: Hyperprior | Literal["default"] | None = "default",
        max_iterations: Iterations = "auto",
        tolerance: float | None = None,
        mode_tolerance: float | None = None,
        memory: int | None = None,
        calibrate: Calibrate = "auto",
        standard_errors: float = 2.0,
        path: str | Path | None = None,
        load_from: str | Path | None = None,
        prefix: str = "laplace",
        log_groups: bool = False,
        likelihood: LikelihoodName | Likelihood | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require_numbers(batch_size=batch_size, tolerance=tolerance, mode_tolerance=mode_tolerance, memory=memory)
        require_numbers(standard_errors=standard_errors)
        some = likelihood or ("classification" if options.get("noise_variance") is None else "regression")
        with isolate_rng(include_cuda=False):  # the layer's weights are drawn
            LinearizedLaplace(nn.Linear(1, 2), some, **_without_names(options))  # refuses wrong options before training
        self.likelihood = likelihood
        if calibrate not in (True, False, "auto"):
            raise ValueError(f"calibrate={calibrate!r} is not known; choose 'auto', True or False")
        if not (standard_errors >= 0 and math.isfinite(standard_errors)):
            raise ValueError(f"standard_errors={standard_errors} has to be finite and not negative")
        self.train_data = train_data
        self.transform = transform
        self.batch_size = batch_size
        self.network = network
        self.at_fit_end = at_fit_end
        self.evidence = evidence
        self.hyperprior = hyperprior
        self.max_iterations, self.memory = max_iterations, memory
        self.tolerance, self.mode_tolerance = tolerance, mode_tolerance
        self.calibrate, self.standard_errors = calibrate, standard_errors
        self.path = None if path is None else Path(path)
        self.load_from = None if load_from is None else Path(load_from)
        if isinstance(max_iterations, str) and max_iterations != "auto":
            raise ValueError(f"max_iterations={max_iterations!r} is not known; choose 'auto', a number, or None")
        self.prefix = prefix
        if log_groups and options.get("prior") == "diagonal":
            raise ValueError("log_groups=True would log three scalars for every weight with prior='diagonal'; leave it")
        self.log_groups = log_groups
        self.options = options
        self.forget()

    def forget(self) -> None:
        """Drop what earlier runs left."""
        self.laplaces: list[LinearizedLaplace] = []
        self.evidence_results: list[EvidenceResult] = []
        self.calibrations: list[Calibration] = []
        self.files: list[Path] = []
        self._fingerprints: list[str] = []
        self._told = False
        self._validation: DataLoader[Any] | None = None
        self._trained: _Trained | None = None
        self._warned = False

    @property
    def laplace(self) -> LinearizedLaplace | None:
        """The approximation of the only network.

        Raises:
            ValueError: there are several, one for each member of an ensemble.
        """
        return _only(self.laplaces, "laplaces")

    @property
    def mixture(self) -> LaplaceMixture:
        """The approximations of all members as one posterior.

        Raises:
            ValueError: nothing has been fitted.
        """
        return LaplaceMixture(self.laplaces)

    @property
    def evidence_result(self) -> EvidenceResult | None:
        """What choosing the precisions of the only network gave."""
        return _only(self.evidence_results, "evidence_results")

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the only network."""
        return _only(self.calibrations, "calibrations")

    @property
    def saved_to(self) -> Path | None:
        """The file of the only network."""
        return _only(self.files, "files")

    # ------------------------------------------------------------------ hooks

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take back older approximations, for the weights are about to change, and check what would fail at the end.

        Raises:
            TypeError: weights in half precision.
            ValueError: no network, an averaging wrapper where one network is meant, a single logit, an ensemble with a
                part that predicts with one approximation, or a curvature that would not fit the memory.
            UnsupportedLayerError: layers without Kronecker factors, by name.
        """
        require_whole_weights(trainer)
        if trainer.precision in HALF_PRECISION:
            raise TypeError(
                f"precision={trainer.precision!r} makes the weights torch.bfloat16 or torch.float16, of which no "
                "curvature can be taken: train with 'bf16-mixed' or '32-true'"
            )
        made = [self._approximation(network, pl_module) for network in self._find_networks(pl_module)]
        for laplace in made:
            require_weights(laplace.model, laplace.tangent.names)
            if laplace.options.curvature == "kfac":
                find_layers(laplace.model, laplace.tangent.names)
            require_room(laplace.tangent, laplace.options, groups=1 if laplace.prior == "single" else 2)
            if laplace.likelihood.name == "classification" and getattr(pl_module, "num_classes", 2) == 1:
                raise ValueError(
                    "num_classes=1 is a single logit: train with nn.BCEWithLogitsLoss(), which is recognized, or pass "
                    "likelihood='binary'"
                )
        self.forget()
        _attach(pl_module, [])
        _require_own(pl_module, made)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the training data while there is nothing to lose.

        Raises:
            ValueError: data of which no plain loader can be made, or that are none of the likelihood.

        Warns:
            NothingHeldOutWarning: there are no data to choose the temperature on but those of the training.
        """
        training = self._loader(trainer, pl_module)
        networks = self._find_networks(pl_module)
        self._require_likelihood(trainer, pl_module, networks, training)
        self._trained = _Trained(networks, trainer.world_size, training, validation_loader(trainer))
        self._held_out(trainer, training)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit to the weights that training ended with."""
        if self.at_fit_end:
            with on_training_device(trainer, pl_module):
                self._fit(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, unless the approximation belongs to these weights.

        Raises:
            ValueError: a test that TorchUncertainty's routines cannot run with a post-processing.
        """
        processing = getattr(pl_module, "post_processing", None)
        lacks = not hasattr(trainer.datamodule, "postprocess_dataloader")  # type: ignore[attr-defined]
        if isinstance(processing, LaplaceUser) and lacks:
            raise ValueError(
                "TorchUncertainty's routine asks the data module for postprocess_dataloader() before it tests with a "
                "post-processing (whose data are not used here); test with datamodule=..., a TUDataModule or one that "
                "has this method"
            )
        self._ensure(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As before a test, where ``validate`` was called; during ``fit`` there is nothing to fit yet."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._ensure(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As before a test."""
        self._ensure(trainer, pl_module)

    # ------------------------------------------------------------------ work

    def _ensure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        networks = self._find_networks(pl_module)
        with torch.inference_mode(False):
            for network in networks:
                _leave_inference(network)
            known = [la for la in self.laplaces if any(la.model is network for network in networks)]
            found = [la.tangent.fingerprint() for la in known]
            if len(known) == len(networks) and found == self._fingerprints:
                _attach(pl_module, known)
                self._require_untested(trainer, pl_module, known)
            elif self.load_from is not None:
                files = _numbered(self.load_from, len(networks))
                loaded = [LinearizedLaplace.load(file, net) for file, net in zip(files, networks, strict=True)]
                self._adopt(pl_module, loaded)
            else:
                self._fit(trainer, pl_module)

    def _adopt(self, pl_module: LightningModule, laplaces: list[LinearizedLaplace]) -> None:
        self.laplaces, self._fingerprints = laplaces, [la.tangent.fingerprint() for la in laplaces]
        _attach(pl_module, laplaces)

    def _fit(self, trainer: Trainer, pl_module: LightningModule) -> None:
        require_whole_weights(trainer)
        cuda = pl_module.device.type == "cuda"
        made = []
        self.evidence_results, self.calibrations = [], []
        with torch.inference_mode(False), isolate_rng(include_cuda=cuda), _progress(trainer) as progress:
            loader = self._loader(trainer, pl_module)
            for network in self._find_networks(pl_module):
                _leave_inference(network)
                if trainer.world_size > 1:
                    _share_buffers(network)
                laplace = self._approximation(network, pl_module)
                laplace.fit(loader, progress=progress)
                made.append(laplace)
                if self.evidence:  # without it, the weights' mode (passes over the data) is not needed to predict
                    self.evidence_results.append(self._optimize(laplace, progress))
            self._calibrate(trainer, pl_module, made, loader, progress)
        self._adopt(pl_module, made)
        self._log(trainer)
        self._save(trainer)

    def _optimize(
        self, laplace: LinearizedLaplace, progress: Callable[[dict[str, Any]], None] | None
    ) -> EvidenceResult:
        limit, own = self.max_iterations, self.max_iterations == "auto"
        if isinstance(limit, str):
            limit = max(_LEAST, _READINGS // laplace.summary.samples)
        with warnings.catch_warnings():
            if own:  # instead of a warning there is a sentence in what is printed
                warnings.simplefilter("ignore", NotConvergedWarning)
            return laplace.optimize_evidence(
                hyperprior=self.hyperprior,
                max_iterations=limit,
                tolerance=self.tolerance,
                mode_tolerance=self.mode_tolerance,
                memory=self.memory,
                progress=progress,
            )

    def _approximation(self, network: nn.Module, pl_module: LightningModule) -> LinearizedLaplace:
        return LinearizedLaplace(network, training_likelihood(self.likelihood, pl_module), **self.options)

    def _calibrate(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        laplaces: Sequence[LinearizedLaplace],
        training: DataLoader[Any],
        progress: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        """Choose the temperatures for the predictions that the LightningModule will make."""
        self.calibrations, self._validation = [], None
        options = [_predictive_options(pl_module, laplace) for laplace in laplaces]
        if self.calibrate is False or any(own.get("link_approx") == "mean" for own in options):
            return
        self._validation = self._held_out(trainer, training)
        chosen_on, held_out = self._validation, True
        if chosen_on is None and self.calibrate == "auto":
            some: Any = spread(training.dataset, _TRAINED_ON)
            chosen_on, held_out = DataLoader(some, training.batch_size, collate_fn=training.collate_fn), False
        if chosen_on is not None:
            for laplace, own in zip(laplaces, options, strict=True):
                found = laplace.calibrate(
                    chosen_on, held_out=held_out, standard_errors=self.standard_errors, progress=progress, **own
                )
                self.calibrations.append(found)

    def _held_out(self, trainer: Trainer, training: DataLoader[Any]) -> DataLoader[Any] | None:
        """The data to choose the temperature on, where there are any that are neither trained on nor tested on."""
        if self.calibrate is False:
            return None
        found = validation_loader(trainer)
        if found is None and self._trained is not None and training is self._trained.training:
            found = self._trained.validation
        if self.calibrate is True:
            return found
        if found is None:
            why = "there are no validation data (in batches of inputs and targets)"
        elif share_samples(found, training):
            why = "the validation data are training data"
        elif _tested_on(found, trainer):
            why = "the validation data are the test data"
        else:
            size = len(training.dataset) if isinstance(training.dataset, Sized) else 0
            return at_most(found, max(_HELD_OUT, size // _PART))
        self._warn(why)
        return None

    def _warn(self, why: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"FitLaplace has no data to choose the temperature of its posterior on: {why}. It takes training data, on "
            "which networks look better than they are, so that predictions stay close to the network's own. To gain "
            "from Laplace, set validation data aside from the training data (val_split=0.1 in TorchUncertainty's data "
            "modules, val_size in this package's), or pass calibrate=False for the posterior of the evidence as it is",
            NothingHeldOutWarning,
            stacklevel=2,
        )

    def _require_untested(
        self, trainer: Trainer, pl_module: LightningModule, laplaces: Sequence[LinearizedLaplace]
    ) -> None:
        """Where it turns out that the temperature was chosen on what is tested on now, choose it anew elsewhere."""
        chosen_on, tested = self._validation, trainer.state.fn == TrainerFn.TESTING
        if self.calibrate != "auto" or chosen_on is None or not tested or not _tested_on(chosen_on, trainer):
            return
        self._warn("the validation data are the test data")
        cuda = pl_module.device.type == "cuda"
        with isolate_rng(include_cuda=cuda), _progress(trainer) as progress:
            training: Any = laplaces[0].train_loader
            self._calibrate(trainer, pl_module, laplaces, training, progress)
        self._log(trainer, again=True)
        self._save(trainer)

    def _find_networks(self, pl_module: LightningModule) -> list[nn.Module]:
        """The network, or the members of an ensemble; networks within parts that use an approximation are meant."""
        if self.network is not None:
            found = resolve_modules(self.network, pl_module, argument="network")
        else:
            found = [network_of(pl_module, argument="network")]
        return [network for module in found for network in _within(module, pl_module)]

    def _require_likelihood(
        self, trainer: Trainer, pl_module: LightningModule, networks: Sequence[nn.Module], training: DataLoader[Any]
    ) -> None:
        """Compare a first batch with the likelihood, which is a guess where it does not follow from a loss.

        Raises:
            ValueError: outputs or targets that are none of this likelihood.
        """
        likelihood = training_likelihood(self.likelihood, pl_module)
        assumed = self.likelihood is None and likelihood == "classification"
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
                    why = (
                        f" ({type(pl_module).__name__} has no `loss` that says so: its likelihood is taken to be "
                        "'classification'. Say FitLaplace(likelihood='regression'), 'binary' or another)"
                    )
                    raise type(error)(f"{error}{why if assumed else ''}") from error

    def _loader(self, trainer: Trainer, pl_module: LightningModule) -> DataLoader[Any]:
        known = self._known(trainer, pl_module)
        if known is not None and self.train_data is None:
            return known.training
        quiet, self._told = self._told, True  # what is said of the data is said once in a run
        return plain_training_loader(
            trainer, pl_module, self.train_data, transform=self.transform, batch_size=self.batch_size, quiet=quiet
        )

    def _known(self, trainer: Trainer, pl_module: LightningModule) -> _Trained | None:
        """The data of the training, where a test of the same networks comes with loaders of its own alone."""
        trained = self._trained
        if trained is None or trainer.state.fn == TrainerFn.FITTING or trainer.datamodule is not None:  # type: ignore[attr-defined]
            return None
        found = self._find_networks(pl_module)
        same = len(found) == len(trained.networks) and all(a is b for a, b in zip(found, trained.networks, strict=True))
        return trained if same and trained.world_size == trainer.world_size else None

    def _log(self, trainer: Trainer, *, again: bool = False) -> None:
        """Log and print what was found; ``again`` where only the temperatures are new."""
        rows = [laplace.report() for laplace in self.laplaces]
        each = [self._scalars(k, rows[k]) for k in range(len(rows))]
        scalars = {name: sum(one[name] for one in each) / len(each) for name in each[0] if all(name in o for o in each)}
        if len(each) > 1:
            scalars |= {
                f"{name}_{k}": value
                for k, one in enumerate(each)
                for name, value in one.items()
                if not name.startswith(_OF_MEANS)
            }
            scalars = {n: v for n, v in scalars.items() if not n.startswith("held_out/") or n in _FEW}
        for logger in trainer.loggers:
            logger.log_metrics({f"{self.prefix}/{k}": v for k, v in scalars.items()}, step=trainer.global_step)
            logger.save()
        names = [row.name for row in rows[0]]
        single = self.laplaces[0].prior_groups.weights  # no figure has room for a bar for each weight
        if not single and all([row.name for row in one] == names for one in rows):  # members of one architecture
            many = len(rows) > 1
            values = {f"member {k}" if many else "lambda": [r.precision for r in one] for k, one in enumerate(rows)}
            draw = partial(plot.bars, values, names, ylabel="prior precision", log=True)
            log_figure(trainer, f"{self.prefix}/precisions", draw)
        for k, laplace in enumerate(() if again else self.laplaces):
            which = f" of member {k}" if len(rows) > 1 else ""
            rank_zero_info(_summary(laplace, rows[k], which))
            if self.max_iterations == "auto" and self.evidence_results and not self.evidence_results[k].converged:
                rank_zero_info(_stopped(self.evidence_results[k], which))
        for calibration in self.calibrations:
            rank_zero_info(str(calibration))

    def _scalars(self, k: int, rows: list[GroupReport]) -> dict[str, float]:
        """What is logged of the ``k``-th network."""
        laplace, scalars = self.laplaces[k], {"gamma": float(sum(row.gamma for row in rows))}
        if self.evidence_results:
            scalars["log_evidence"] = self.evidence_results[k].log_marginal_likelihood
        for row in rows if self.log_groups else ():
            scalars |= {
                f"lambda/{row.name}": row.precision,
                f"gamma/{row.name}": row.gamma,
                f"squared_norm/{row.name}": row.squared_norm,
            }
        if laplace.likelihood.name == "regression":
            scalars["noise_variance"] = laplace.noise_variance
        if self.calibrations:
            calibration = self.calibrations[k]
            scalars["temperature"] = calibration.temperature
            for name in ("network", "evidence", "calibrated") if calibration.held_out else ():
                found = vars(getattr(calibration, name))
                scalars |= {f"held_out/{name}/{key}": v for key, v in found.items() if not math.isnan(v)}
        return scalars

    def _save(self, trainer: Trainer) -> None:
        path = self.path or _beside_checkpoint(trainer)
        if path is None:
            return
        files = _numbered(path, len(self.laplaces))
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            for file, laplace in zip(files, self.laplaces, strict=True):
                laplace.save(file)
        trainer.strategy.barrier("FitLaplace saved")
        self.files = files


def _stopped(result: EvidenceResult, which: str) -> str:
    """What is said of an evidence that the callback's own limit has stopped."""
    return (
        f"  The evidence{which} was stopped after {result.iterations} iterations, so that it takes no longer than a "
        f"training does; log precisions changed by {result.change:.2g} in the last one. These precisions are good to "
        "predict with. The log evidence (of use to compare networks) is higher at convergence, by at most "
        f"{result.gap:.3g} nats at these precisions: FitLaplace(max_iterations=None) goes on to it."
    )


def _only(found: Sequence[T], name: str) -> T | None:
    if len(found) > 1:
        raise ValueError(f"there are {len(found)}, one for each member of the ensemble: use {name}")
    return found[0] if found else None


def _numbered(path: Path, count: int) -> list[Path]:
    """The file, or one for each of several networks."""
    return [path] if count == 1 else [path.with_name(f"{path.stem}_{k}{path.suffix}") for k in range(count)]


def _within(module: nn.Module, pl_module: LightningModule) -> list[nn.Module]:
    """The single networks in a module: members of an ensemble, cores of what predicts with an approximation.

    Raises:
        ValueError: averages of a network, of which it is not known which one predicts.
    """
    module = getattr(module, "_orig_mod", module)
    members = getattr(module, "core_models", None)
    if isinstance(members, nn.ModuleList) and len(members):
        return [network for member in members for network in _within(member, pl_module)]
    core = getattr(module, "core_model", None)
    if isinstance(module, LaplaceUser) and isinstance(core, nn.Module):
        return _within(core, pl_module)
    inner = [n for n in ("core_model", "ema_model", "swa_model") if isinstance(getattr(module, n, None), nn.Module)]
    if inner:
        path = next((name for name, m in pl_module.named_modules() if m is module), "model")
        raise ValueError(
            f"{type(module).__name__} holds several networks or averages of one ({', '.join(inner)}); say which "
            f"one predicts, for example network='{path}.{inner[-1]}'"
        )
    return [module]


def _tested_on(loader: DataLoader[Any], trainer: Trainer) -> bool:
    tests = testing_loader(trainer)
    return tests is not None and share_samples(loader, tests)


def _predictive_options(pl_module: LightningModule, laplace: LinearizedLaplace) -> dict[str, Any]:
    """With which the LightningModule will predict by an approximation; defaults where it does not say."""
    users = [module for module in pl_module.modules() if isinstance(module, LaplaceUser)]
    own = [user for user in users if any(m is laplace.model for m in getattr(user, "modules", list)())]
    for user in (*own, *users):
        found: dict[str, Any] | None = getattr(user, "predictive_options", None)
        if found is not None:
            return dict(found)
    return {}


def _attach(pl_module: LightningModule, laplaces: Sequence[LinearizedLaplace]) -> None:
    """Give every user its approximation: the only one, or that of the network which is part of the user."""
    for module in pl_module.modules():
        if isinstance(module, LaplaceUser):
            module.attach_laplace(_own(module, laplaces) if laplaces else None)


def _own(user: Any, laplaces: Sequence[LinearizedLaplace]) -> LinearizedLaplace | None:
    if len(laplaces) == 1:
        return laplaces[0]
    parts = list(user.modules()) if isinstance(user, nn.Module) else []
    found = [la for la in laplaces if any(la.model is part for part in parts)]
    return found[0] if len(found) == 1 else None


def _require_own(pl_module: LightningModule, laplaces: Sequence[LinearizedLaplace]) -> None:
    """Raise a ValueError where a part of the LightningModule could not tell which member's approximation is its own."""
    for module in pl_module.modules():
        if isinstance(module, LaplaceUser) and laplaces and _own(module, laplaces) is None:
            raise ValueError(
                f"{type(module).__name__} predicts with one Laplace approximation, and the ensemble gets "
                f"{len(laplaces)}, one for each member: leave it out, and make each member a LaplaceEnsemble, "
                "deep_ensembles([LaplaceEnsemble(network, num_samples=10), ...])"
            )


def training_likelihood(
    given: LikelihoodName | Likelihood | None, pl_module: LightningModule
) -> LikelihoodName | Likelihood:
    """The likelihood of the loss that a network is trained with, where none is given and the loss is known.

    Args:
        given: what was asked for.
        pl_module: with a ``loss``, as TorchUncertainty's routines have.

    Returns:
        What was given, the likelihood of the loss, or ``classification``.
    """
    loss = getattr(pl_module, "loss", None)
    if given is not None or not isinstance(loss, nn.Module):
        return given or "classification"
    from torch_uncertainty.losses import DistributionNLLLoss
    from torch_uncertainty.routines import SegmentationRoutine

    found = likelihood_of(loss)
    if type(loss) is DistributionNLLLoss and getattr(pl_module, "dist_family", None) == "normal":
        found = HeteroscedasticGaussian()
    if isinstance(found, Categorical) and isinstance(pl_module, SegmentationRoutine):
        found = Categorical(**found.config() | {"ignore_index": 255})  # which the routine leaves out itself
    if found is None or (found.noisy and hasattr(pl_module, "num_classes")):
        return "classification"
    return found


def _without_names(options: dict[str, Any]) -> dict[str, Any]:
    """The options that can be checked without the network."""
    return {k: v for k, v in options.items() if k not in ("parameters", "graph", "groups")}


def _leave_inference(network: nn.Module) -> None:
    """Exchange tensors that were made under inference mode, which autograd refuses, for ordinary ones."""
    if not any(made_in_inference_mode(t) for t in (*network.parameters(), *network.buffers())):
        return
    made: dict[int, Any] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and made_in_inference_mode(parameter):
                made.setdefault(id(parameter), nn.Parameter(parameter.clone(), parameter.requires_grad))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and made_in_inference_mode(buffer):
                module._buffers[name] = made.setdefault(id(buffer), buffer.clone())


@torch.no_grad()
def _share_buffers(network: nn.Module) -> None:
    """Give every process the buffers of rank 0, as the checkpoint has them: running statistics differ by a batch."""
    for buffer in network.buffers():
        torch.distributed.broadcast(buffer, src=0)


def _beside_checkpoint(trainer: Trainer) -> Path | None:
    loaded = trainer.ckpt_path if trainer.state.fn != TrainerFn.FITTING else None
    if loaded is not None:
        return Path(loaded).with_suffix(".laplace.safetensors")
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    return None if folder is None else Path(folder) / "laplace.safetensors"


@contextmanager
def _progress(trainer: Trainer) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Lines that say what is going on, how fast and for how long still, where the trainer shows progress at all."""
    if trainer.progress_bar_callback is None or not trainer.is_global_zero:
        yield None
        return
    with show_progress() as show:
        yield show


def _summary(laplace: LinearizedLaplace, rows: list[GroupReport], which: str = "") -> str:
    groups = laplace.prior_groups
    if groups.weights:
        lines = [_of_parameter(name, rows[slot.start : slot.stop]) for name, slot in groups.slots.items()]
    else:
        lines = [
            f"  {row.name}: lambda {row.precision:.4g}, gamma {row.gamma:.4g} of {row.size}{', pruned' * row.pruned}"
            for row in rows
        ]
    what = "parameters" if groups.weights else "groups"
    more = [f"  and {len(lines) - _SHOWN} more {what}"] if len(lines) > _SHOWN else []
    head = f"Laplace approximation{which} from {laplace.summary.samples} training samples:"
    return "\n".join([head, *lines[:_SHOWN], *more])


def _of_parameter(name: str, rows: list[GroupReport]) -> str:
    """A line for all weights of a parameter, where each has a precision of its own."""
    found = sorted(row.precision for row in rows)
    pruned = sum(row.pruned for row in rows)
    return (
        f"  {name}: lambda {found[0]:.3g} to {found[-1]:.3g}, half of them below {found[len(found) // 2]:.3g}, gamma "
        f"{sum(row.gamma for row in rows):.4g} of {len(rows)}{f', {pruned} pruned' if pruned else ''}"
    )
