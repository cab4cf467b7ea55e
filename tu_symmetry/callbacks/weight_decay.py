"""Weight decay that is the prior precision of the largest evidence, found while a network trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tu_symmetry.callbacks.laplace_users import training_likelihood
from tu_symmetry.callbacks.members import network_of, require_whole_weights
from tu_symmetry.callbacks.training_data import plain_training_loader
from tu_symmetry.laplace.checks import require_weights
from tu_symmetry.laplace.determinants import Hyperprior
from tu_symmetry.laplace.groups import PriorGroups
from tu_symmetry.laplace.likelihood import Categorical, Likelihood, LikelihoodName
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import PrunedGroupWarning, UnevenEvidenceWarning
from tu_symmetry.posterior.network import require_numbers
from tu_symmetry.symmetry.graph import SymmetryGraph

_GROUP = "evidence_group"  # key of an optimizer's parameter groups
_PER_GROUP = ("base_lrs", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "lr_lambdas", "_last_lr")
_RESERVED = ("evaluate_at", "prior_precision")


class EvidenceWeightDecay(Callback):
    """Tunes one weight decay for each group of weights by the evidence, every few epochs of training.

    The trained weights minimize ``scale * sum of losses + sum_g decay_g / 2 ||theta_g||^2``: they are the mode of a
    posterior with prior precisions ``lambda_g = decay_g / scale``. Every ``every_n_epochs`` a Laplace approximation of
    the network with its present weights is fitted (:class:`~tu_symmetry.LinearizedLaplace`, at ``map``), the
    precisions of the largest evidence are found, and the optimizer's decay becomes ``scale * lambda_g`` (times the
    noise variance of a regression). Online evidence is due to arXiv 2104.04975; here weights that a normalization makes
    scale-invariant have a precision of their own, whose hyperprior respects the invariance (``prior="per_group"``).
    For example, with the mean cross entropy over 1,000 samples, ``scale`` is 1/1000, and a precision of 20 makes a
    decay of 0.02. What is divided by are the labels that count, as torch's mean does: of 1,000 sentences with 20 tokens
    each, 15,000 of which are ignored, it is 1/5000.

    When a fit starts, the optimizer's parameter groups are split so that each lies in one group of weights; a
    learning-rate schedule goes on as it was. Decays are part of the optimizer's state, so that resumed runs go on.

    Args:
        train_data: a loader or data set that gives the training data as the network sees them when it predicts; by
            default the trainer's, see :class:`~tu_symmetry.callbacks.FitLaplace`.
        every_n_epochs: how often.
        start_epoch: number of epochs before the first time; before it the optimizer's own decay holds.
        scale: the training loss over the sum of the losses of all samples. By default that of a mean over
            observations: one over the number of labels that are not ignored (over all positions and independent
            logits), two over it for ``nn.MSELoss``. Where batches have different numbers of them, a mean over each
            batch is that of all data but for these differences.
        transform, batch_size: for the training data, see :class:`~tu_symmetry.callbacks.FitLaplace`.
        hyperprior: on the precisions, see :meth:`LinearizedLaplace.optimize_evidence`.
        log_groups: log the precision of each group, too.
        prefix: first part of the logged names.
        likelihood: by default that of the loss, see :class:`~tu_symmetry.callbacks.FitLaplace`.
        options: further arguments of :class:`~tu_symmetry.LinearizedLaplace` (``prior``, ``curvature``, ...).

    Attributes:
        history: one record for each time, of all fits with this callback: epoch, log evidence (nats), noise variance,
            precisions by group.

    Raises:
        ValueError: options out of range, or that belong to this callback.
    """

    def __init__(
        self,
        train_data: DataLoader[Any] | Dataset[Any] | None = None,
        *,
        every_n_epochs: int = 5,
        start_epoch: int = 0,
        scale: float | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        hyperprior: Hyperprior | Literal["default"] | None = "default",
        log_groups: bool = False,
        prefix: str = "evidence",
        likelihood: LikelihoodName | Likelihood | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        taken = [name for name in _RESERVED if options.get(name) is not None]
        if taken:
            raise ValueError(f"{taken} cannot be chosen: the evidence is that at the weights of the run")
        if options.get("prior") == "diagonal":
            raise ValueError("prior='diagonal' has several precisions within a parameter, an optimizer has one decay")
        require_numbers(every_n_epochs=every_n_epochs, start_epoch=start_epoch, scale=scale, batch_size=batch_size)
        if every_n_epochs < 1 or start_epoch < 0:
            raise ValueError(
                f"every_n_epochs={every_n_epochs} has to be positive, start_epoch={start_epoch} not negative"
            )
        if scale is not None and not scale > 0:
            raise ValueError(f"scale={scale} has to be positive")
        self.train_data, self.every_n_epochs, self.start_epoch = train_data, every_n_epochs, start_epoch
        self.scale, self.transform, self.batch_size = scale, transform, batch_size
        self.hyperprior: Hyperprior | Literal["default"] | None = hyperprior
        self.log_groups, self.prefix = log_groups, prefix
        self.likelihood = likelihood
        self.options = options
        self.history: list[dict[str, Any]] = []
        self._graph: SymmetryGraph | None = None
        self._told = False

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look at the network anew; the history goes on, as the weights do."""
        if stage == "fit":
            self._graph, self._told = None, False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Split the optimizer's groups, before a checkpoint's state is put into it.

        Raises:
            TypeError: weights in half precision.
            ValueError: an optimizer without weight decay, or one that decays weights apart from the loss; several
                networks; a loss whose scale is not known.
        """
        require_whole_weights(trainer)
        laplace = self._laplace(pl_module)
        require_weights(laplace.model, laplace.tangent.names)
        likelihood = laplace.likelihood
        if self.scale is None and isinstance(likelihood, Categorical) and likelihood.class_weights is not None:
            raise ValueError(
                "the mean of a loss with class weights is divided by the weights of each batch; say scale=..., the "
                "training loss over the sum of the losses of all samples"
            )
        for optimizer in trainer.optimizers:
            _require_decay(optimizer)
        if trainer.train_dataloader is None:
            trainer.fit_loop.setup_data()
        with isolate_rng(include_cuda=pl_module.device.type == "cuda"):
            groups: PriorGroups = laplace.group(self._loader(trainer, pl_module))
        self._graph = laplace.graph
        labels = {
            id(p): groups.names[int(groups.of[name])]
            for name, p in laplace.model.named_parameters()
            if name in groups.of
        }
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        for optimizer in trainer.optimizers:
            split_groups(optimizer, labels, schedulers)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the precisions, and set the decays."""
        epoch = trainer.current_epoch + 1
        if epoch < self.start_epoch or epoch % self.every_n_epochs:
            return
        cuda = pl_module.device.type == "cuda"
        with isolate_rng(include_cuda=cuda), warnings.catch_warnings():
            for category in (PrunedGroupWarning, UnevenEvidenceWarning):
                warnings.simplefilter("ignore", category)  # of every time; FitLaplace says it of the last weights
            laplace = self._laplace(pl_module)
            laplace.fit(self._loader(trainer, pl_module))
            found = laplace.optimize_evidence(hyperprior=self.hyperprior)
        precisions = dict(zip(laplace.prior_groups.names, laplace.log_precision.exp().tolist(), strict=True))
        scale = self._scale_of(laplace, pl_module) * laplace.noise_variance
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if group.get(_GROUP) is not None:
                    group["weight_decay"] = scale * precisions[group[_GROUP]]
        record = {
            "epoch": epoch,
            "log_evidence": found.log_marginal_likelihood,
            "noise_variance": laplace.noise_variance,
            "precisions": precisions,
        }
        self.history.append(record)
        scalars = {"log_evidence": found.log_marginal_likelihood}
        if laplace.likelihood.noisy:
            scalars["noise_variance"] = laplace.noise_variance
        if self.log_groups:
            scalars |= {f"lambda/{name}": value for name, value in precisions.items()}
        for logger in trainer.loggers:
            logger.log_metrics({f"{self.prefix}/{k}": v for k, v in scalars.items()}, step=trainer.global_step)
        rank_zero_info(
            f"EvidenceWeightDecay: epoch {epoch}, log evidence {found.log_marginal_likelihood:.5g}, precisions "
            f"{min(precisions.values()):.3g} to {max(precisions.values()):.3g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The history."""
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a history."""
        self.history = list(state_dict["history"])

    # ------------------------------------------------------------------ work

    def _laplace(self, pl_module: LightningModule) -> LinearizedLaplace:
        model: Any = network_of(pl_module, argument="network")
        model = getattr(model, "_orig_mod", model)
        if isinstance(getattr(model, "core_models", None), nn.ModuleList):
            raise ValueError("EvidenceWeightDecay tunes the decays of one network, and this is an ensemble of several")
        likelihood = training_likelihood(self.likelihood, pl_module)
        laplace = LinearizedLaplace(model, likelihood, evaluate_at="map", **self.options)
        laplace.graph = laplace.graph or self._graph
        return laplace

    def _loader(self, trainer: Trainer, pl_module: LightningModule) -> DataLoader[Any]:
        quiet, self._told = self._told, True
        return plain_training_loader(
            trainer, pl_module, self.train_data, transform=self.transform, batch_size=self.batch_size, quiet=quiet
        )

    def _scale_of(self, laplace: LinearizedLaplace, pl_module: LightningModule) -> float:
        """The training loss over the sum of the losses."""
        if self.scale is not None:
            return self.scale
        count = laplace.summary.observations
        if not count:
            raise ValueError("every label of the training data is ignored: there is no loss that a decay could go with")
        return (2 if laplace.likelihood.name == "regression" else 1) / count


def split_groups(optimizer: torch.optim.Optimizer, labels: Mapping[int, str], schedulers: list[Any]) -> None:
    """Split an optimizer's parameter groups so that all parameters of one have the same label.

    Everything else of a group (learning rate, momentum, ...) is the same in its parts, and what schedulers keep for
    each group is repeated. Parameters without a label stay together, with the decay that they had.

    Args:
        optimizer: changed in place; it has no state yet.
        labels: ``id`` of a parameter to its label.
        schedulers: those of this optimizer, or others.
    """
    parts: list[dict[str, Any]] = []
    origin: list[int] = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for label in dict.fromkeys(labels.get(id(p)) for p in group["params"]):
            own = [i for i, p in enumerate(group["params"]) if labels.get(id(p)) == label]
            part = {**group, "params": [group["params"][i] for i in own], _GROUP: label}
            if names is not None:
                part["param_names"] = [names[i] for i in own]
            parts.append(part)
            origin.append(number)
    before = len(optimizer.param_groups)
    optimizer.param_groups[:] = parts
    for scheduler in _all_schedulers(schedulers):
        if getattr(scheduler, "optimizer", None) is optimizer:
            for name in _PER_GROUP:
                values = getattr(scheduler, name, None)
                if isinstance(values, list) and len(values) == before:
                    setattr(scheduler, name, [values[number] for number in origin])


def _all_schedulers(schedulers: list[Any]) -> Iterator[Any]:
    """Schedulers, and those that they are made of."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all_schedulers(list(getattr(scheduler, "_schedulers", ())))


def _require_decay(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if "weight_decay" not in group:
            raise ValueError(f"{name} has no weight_decay; train with SGD, Adam, or another optimizer that has one")
        if group.get("decoupled_weight_decay") or isinstance(optimizer, torch.optim.AdamW):
            raise ValueError(
                f"{name} decays weights apart from the loss, so that what it converges to is no mode of a posterior "
                "with these precisions; train with Adam (decoupled_weight_decay=False) or SGD"
            )
