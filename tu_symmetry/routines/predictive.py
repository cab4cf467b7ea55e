"""What routines with several networks in one module share: the scores of their predictive distribution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from tu_symmetry.metrics.base import AverageMetric

Likelihood = Callable[..., Any]  # as :data:`tu_symmetry.posterior.network.NLL`; jsonargparse takes a path or a class


# of a Trainer, with which weights are in half precision
HALF_PRECISION = ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16")


class PredictiveRoutine(LightningModule):
    """A routine whose validation and test see several networks: each by itself, and the mean of their predictions.

    Logged are, with ``val/`` or ``test/`` before them: ``cls/Acc`` and ``cls/NLL`` of the mean of the class
    probabilities (where targets are classes), and over the members ``members/NLL_mean``, ``members/Acc_mean``, ``_min``
    and ``_max``. ``member_scores`` holds ``NLL`` and ``Acc`` of every member in the last validation or test.

    Args:
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
    """

    def __init__(self, nll: Likelihood) -> None:
        super().__init__()
        if getattr(nll, "reduction", "sum") != "sum":
            raise ValueError(
                f"nll={nll!r} reduces by {nll.reduction!r}; the likelihood of a data set is a sum, "  # type: ignore[attr-defined]
                "so give it reduction='sum'"
            )
        self.nll = nll
        # NLL and accuracy (2, 1 + members) of the predictive, and of every member
        self.val_scores, self.test_scores = AverageMetric((2, 1)), AverageMetric((2, 1))
        self.member_scores: dict[str, Tensor] = {}

    @abstractmethod
    def member_outputs(self, x: Tensor) -> Tensor:
        """Outputs ``(members, B, ...)`` of every network."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[members * B, ...]``, all inputs of the first member first, as TorchUncertainty's ensembles."""
        return self.member_outputs(x).flatten(0, 1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Take a batch into the scores of the validation."""
        self._take(batch, self.val_scores)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Take a batch into the scores of the test."""
        if dataloader_idx:
            raise ValueError(
                f"{type(self).__name__} tests one set; for out-of-distribution data give the stored networks to "
                "TorchUncertainty's ClassificationRoutine, by tu_symmetry.routines.posterior_ensemble"
            )
        self._take(batch, self.test_scores)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Mean class probabilities ``(B, C)``."""
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        return self.member_outputs(x).softmax(-1).mean(0)

    def on_validation_epoch_end(self) -> None:
        """Log the scores of the validation."""
        self._log(self.val_scores, "val")

    def on_test_epoch_end(self) -> None:
        """Log the scores of the test."""
        self._log(self.test_scores, "test")

    def _take(self, batch: Any, scores: AverageMetric) -> None:
        x, y = batch
        outputs = self.member_outputs(x)
        nll = torch.stack([self.nll(output, y) for output in outputs]).double()
        if y.is_floating_point():
            predictive, right = nll.new_full((1,), torch.nan), nll.new_full((1 + len(nll),), torch.nan)
        else:
            probs = outputs.softmax(-1).mean(0)
            chosen = probs.gather(-1, y.unsqueeze(-1)).clamp_min(torch.finfo(probs.dtype).tiny)
            predictive = -chosen.log().double().sum().view(1)
            right = (torch.cat([probs.unsqueeze(0), outputs]).argmax(-1) == y).sum(1).double()
        scores.update(torch.stack([torch.cat([predictive, nll]), right]), len(y))

    def _log(self, scores: AverageMetric, stage: str) -> None:
        nll, acc = scores.compute()
        scores.reset()
        self.member_scores = {"NLL": nll[1:], "Acc": acc[1:]}
        found = {"members/NLL_mean": nll[1:].mean()}
        if not acc.isnan().any():
            own = acc[1:]
            found |= {"members/Acc_mean": own.mean(), "members/Acc_min": own.min(), "members/Acc_max": own.max()}
            found |= {"cls/NLL": nll[0], "cls/Acc": acc[0]}
        self.log_dict({f"{stage}/{name}": value.float() for name, value in found.items()}, prog_bar=False)


def training_points(trainer: Trainer) -> int:
    """Number of points in the training loader's data set."""
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__len__"):
        raise ValueError(
            "the number of training points, which weighs the prior against the likelihood, cannot be told from "
            f"{type(trainer.train_dataloader).__name__}: give one loader of a data set with a length"
        )
    return len(dataset)


def optimizer_config(
    parameters: Iterable[Any],
    optimizer: OptimizerCallable | None,
    scheduler: LRSchedulerCallable | None,
    *,
    lr: float = 1e-3,
) -> Any:
    """Adam with learning rate ``lr`` unless another is given; ``OneCycleLR`` and ``CyclicLR`` advance by steps."""
    made = torch.optim.Adam(parameters, lr=lr) if optimizer is None else optimizer(parameters)
    if scheduler is None:
        return made
    schedule = scheduler(made)
    interval = "step" if isinstance(schedule, (OneCycleLR, CyclicLR)) else "epoch"
    return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": interval}}
