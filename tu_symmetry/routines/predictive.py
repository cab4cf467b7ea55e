"""What routines with several networks in one module share: their predictive distribution, and its metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAccuracy

from tu_symmetry.metrics.base import AverageMetric

Likelihood = Callable[..., Any]  # as :data:`tu_symmetry.posterior.network.NLL`; jsonargparse takes a path or a class


# of a Trainer, with which weights are in half precision
HALF_PRECISION = ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16")


class PredictiveNLL(AverageMetric):
    """Mean negative log-probability of the targets, in nats."""

    higher_is_better = False

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Take probabilities ``(B, C)`` and classes ``(B,)``."""
        chosen = probs.gather(-1, target.unsqueeze(-1)).clamp_min(torch.finfo(probs.dtype).tiny)
        self.add(-chosen.log().double().sum(), len(target))

    def compute(self) -> Tensor:
        """The mean."""
        mean: Tensor = super().compute()
        return mean.float()


class MemberScores(AverageMetric):
    """Mean negative log-likelihood in nats, and accuracy, of every member by itself."""

    def __init__(self) -> None:
        super().__init__(shape=(2, 1))

    def update(self, nll: Tensor, correct: Tensor, count: int) -> None:
        """Take sums ``(members,)`` over a batch of ``count`` points."""
        self.add(torch.stack([nll.double(), correct.double()]), count)

    def compute(self) -> dict[str, Tensor]:
        """``NLL`` and ``Acc``, each ``(members,)``."""
        return dict(zip(("NLL", "Acc"), super().compute(), strict=True))


class PredictiveRoutine(LightningModule):
    """A routine whose validation and test see several networks: each by itself, and the mean of their predictions.

    Logged are, with ``val/`` or ``test/`` before them: ``cls/Acc`` and ``cls/NLL`` of the mean of the class
    probabilities and whatever metric is given (where targets are classes), and over the members ``members/NLL_mean``,
    ``members/Acc_mean``, ``_min`` and ``_max``. Test batches of a second loader are out-of-distribution images, as
    with TorchUncertainty's routines: ``ood/AUROC`` and ``ood/AUPR`` of the maximum class probability.

    Attributes:
        member_scores: ``NLL`` and ``Acc`` of every member in the last validation or test.
        test_cls_metrics: metrics of the predictive in a test; callbacks may put others in their place.

    Args:
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        metrics: further metrics of class probabilities ``(B, C)`` and classes ``(B,)``, by the name after ``cls/``.

    Raises:
        ValueError: a likelihood that takes the mean over the batch.
    """

    def __init__(self, nll: Likelihood, metrics: dict[str, Metric] | None = None) -> None:
        super().__init__()
        if getattr(nll, "reduction", "sum") != "sum":
            raise ValueError(
                f"nll={nll!r} reduces by {nll.reduction!r}; the likelihood of a data set is a sum, "  # type: ignore[attr-defined]
                "so give it reduction='sum'"
            )
        self.nll = nll
        own = {"cls/Acc": MulticlassAccuracy(average="micro"), "cls/NLL": PredictiveNLL()}
        given = {f"cls/{name}": metric for name, metric in (metrics or {}).items()}
        every = MetricCollection({**own, **given}, compute_groups=False)
        self.val_cls_metrics = every.clone(prefix="val/")
        self.test_cls_metrics = every.clone(prefix="test/")
        self.val_members, self.test_members = MemberScores(), MemberScores()
        self.test_ood_metrics = MetricCollection(
            {"AUROC": BinaryAUROC(), "AUPR": BinaryAveragePrecision()}, prefix="ood/"
        )
        self.member_scores: dict[str, Tensor] = {}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the precision of the checkpoint, so that weights in float64 are not rounded when they are read."""
        weights = [t for t in checkpoint["state_dict"].values() if t.is_floating_point()]
        if any(t.dtype == torch.float64 for t in weights):
            self.double()

    @abstractmethod
    def member_outputs(self, x: Tensor) -> Tensor:
        """Outputs ``(members, B, ...)`` of every network."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[members * B, ...]``, all inputs of the first member first, as TorchUncertainty's ensembles."""
        return self.member_outputs(x).flatten(0, 1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Take a batch into the metrics of the validation."""
        self._take(batch, self.val_cls_metrics, self.val_members)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Take a batch into the metrics of the test, of a second loader into those of OOD detection.

        Raises:
            ValueError: a third loader.
        """
        if dataloader_idx > 1:
            raise ValueError(f"{type(self).__name__} knows test data and out-of-distribution data; this is a third set")
        if dataloader_idx == 0:
            confidence = self._take(batch, self.test_cls_metrics, self.test_members)
        else:
            confidence = self.member_outputs(batch[0]).softmax(-1).mean(0).amax(-1)
        if confidence is not None and len(self.trainer.num_test_batches) > 1:
            self.test_ood_metrics.update(1 - confidence, torch.full_like(confidence, dataloader_idx, dtype=torch.long))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Mean class probabilities ``(B, C)``."""
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        return self.member_outputs(x).softmax(-1).mean(0)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the validation."""
        self._log(self.val_cls_metrics, self.val_members, "val")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the test."""
        self._log(self.test_cls_metrics, self.test_members, "test")
        if len(self.trainer.num_test_batches) > 1:
            self.log_dict(self.test_ood_metrics.compute())
            self.test_ood_metrics.reset()

    def _take(self, batch: Any, metrics: MetricCollection, members: MemberScores) -> Tensor | None:
        """Update the metrics; the confidence ``(B,)`` of the predictive where targets are classes."""
        x, y = batch
        outputs = self.member_outputs(x)
        nll = torch.stack([self.nll(output, y) for output in outputs])
        if y.is_floating_point():
            members.update(nll, torch.full_like(nll, torch.nan), len(y))
            return None
        probs = outputs.softmax(-1).mean(0)
        members.update(nll, (outputs.argmax(-1) == y).sum(1), len(y))
        metrics.update(probs, y)
        return probs.amax(-1)

    def _log(self, metrics: MetricCollection, members: MemberScores, stage: str) -> None:
        scores = self.member_scores = members.compute()
        classes = not scores["Acc"].isnan().any()
        found = {f"{stage}/members/NLL_mean": scores["NLL"].mean().float()}
        if classes:
            acc = scores["Acc"].float()
            found |= {f"{stage}/members/Acc_{n}": v for n, v in (("mean", acc.mean()), ("min", acc.min()))}
            found[f"{stage}/members/Acc_max"] = acc.max()
            found |= metrics.compute()
            metrics.reset()
        members.reset()
        self.log_dict(found, prog_bar=False)


def training_points(trainer: Trainer, given: int | None) -> int:
    """Number of points in the training set: what is given, else the length of the training loader's data set.

    Raises:
        ValueError: several training loaders, or one without a length.
    """
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    if given is not None:
        return given
    if dataset is None or not hasattr(dataset, "__len__"):
        raise ValueError(
            "the number of training points, which weighs the prior against the likelihood, cannot be told from "
            f"{type(trainer.train_dataloader).__name__}: give num_data"
        )
    return len(dataset)


def optimizer_config(
    parameters: Iterable[Any],
    optimizer: OptimizerCallable | None,
    scheduler: LRSchedulerCallable | None,
    *,
    lr: float = 1e-3,
) -> Any:
    """What ``configure_optimizers`` returns: Adam with learning rate ``lr`` unless another optimizer is given.

    Schedules that torch defines by the batch (``OneCycleLR``, ``CyclicLR``) advance after every optimizer step, others
    after every epoch.
    """
    made = torch.optim.Adam(parameters, lr=lr) if optimizer is None else optimizer(parameters)
    if scheduler is None:
        return made
    schedule = scheduler(made)
    interval = "step" if isinstance(schedule, (OneCycleLR, CyclicLR)) else "epoch"
    return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": interval}}
