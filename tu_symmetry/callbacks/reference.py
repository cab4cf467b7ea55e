"""Predictive distributions in files: written by a prediction run, and compared with in a test."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers.abstract import WrapperMetric

from tu_symmetry.files import TensorFile, replacing, write_safetensors
from tu_symmetry.metrics.means import PredictiveAgreement, PredictiveTotalVariation
from tu_symmetry.routines.predictive import PredictiveRoutine

_COLLECTIONS = ("test_cls_metrics", "post_cls_metrics")
_SUFFIXES = (".npz", ".safetensors")


class ReferencePredictive(Callback):
    """Compares what a test predicts with a stored predictive distribution.

    The metrics take the routine's own class probabilities (of an ensemble their mean) and the reference's for the same
    test points. They join the routine's metrics, so that they are logged and printed as ``test/cls/Agreement``,
    ``test/cls/TV`` and so on, and, where TorchUncertainty's routine has a post-processing, for what that predicts as
    ``test/post/cls/...``. Test points are told by their order: the loader must not shuffle.

    Args:
        reference: ``.npz`` or ``.safetensors`` file with the probabilities ``[points, classes]``.
        key: name of the array in the file.
        metrics: further metrics with ``update(probs, reference_probs)``, by the name after ``test/cls/``; one of the
            name ``Agreement`` or ``TV`` takes the place of that metric.

    Raises:
        ValueError: a file that is missing the key, or does not hold probability distributions.
    """

    def __init__(self, reference: str | Path, key: str = "probs", *, metrics: dict[str, Metric] | None = None) -> None:
        super().__init__()
        self.path = Path(reference)
        self.key = key
        self.reference = load_predictive(self.path, key)
        self.metrics: dict[str, Metric] = {"Agreement": PredictiveAgreement(), "TV": PredictiveTotalVariation()}
        self.metrics |= metrics or {}
        self._before: dict[str, MetricCollection] = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the metrics beside those of the routine.

        Raises:
            ValueError: a routine without metrics of class probabilities, or test data of another number of points.
        """
        found = {n: c for n in _COLLECTIONS if isinstance(c := getattr(pl_module, n, None), MetricCollection)}
        found = {n: c for n, c in found.items() if any(str(name).startswith("cls/") for name in c.keys(keep_base=True))}
        if not found:
            raise ValueError(
                f"{type(pl_module).__name__} has no metrics of class probabilities (a MetricCollection "
                "test_cls_metrics, as TorchUncertainty's ClassificationRoutine has it)"
            )
        self._require_same_points(trainer)
        place = trainer.global_rank, trainer.world_size
        for name, collection in found.items():
            own = dict(collection.items(keep_base=True, copy_state=False))
            ours = {
                f"cls/{label}": AgainstReference(metric.clone(), self.reference, *place)
                for label, metric in self.metrics.items()
            }
            groups = [list(group) for group in collection.compute_groups.values()]
            joined = MetricCollection(
                {**own, **ours},
                prefix=collection.prefix,
                compute_groups=[*groups, *([label] for label in ours)] if groups else False,
            )
            self._before[name] = collection
            setattr(pl_module, name, joined.to(pl_module.device))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the metrics away."""
        for name, collection in self._before.items():
            setattr(pl_module, name, collection)
        self._before = {}

    def _require_same_points(self, trainer: Trainer) -> None:
        loaders = trainer.test_dataloaders
        first = loaders[0] if isinstance(loaders, Sequence) else loaders
        dataset = getattr(first, "dataset", None)
        if dataset is not None and hasattr(dataset, "__len__") and len(dataset) != len(self.reference):
            raise ValueError(
                f"the test set has {len(dataset)} points, but {self.path} holds {len(self.reference)}: the reference "
                "is of other test data"
            )


class PredictiveWriter(BasePredictionWriter):
    """Writes the predictive distribution of a prediction run, for :class:`ReferencePredictive`.

    Of this package's routines the class probabilities are written as they are; what another routine predicts is taken
    for logits ``[members * B, classes]``, as TorchUncertainty's ensembles give them.

    Args:
        path: ``.npz`` or ``.safetensors`` file; it must not be there yet.
        key: name of the array in the file.

    Raises:
        ValueError: a file of another kind.
    """

    def __init__(self, path: str | Path, key: str = "probs") -> None:
        super().__init__(write_interval="epoch")
        self.path = Path(path)
        if self.path.suffix not in _SUFFIXES:
            raise ValueError(f"{path}: a predictive is written as .npz or .safetensors")
        self.key = key

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before the work.

        Raises:
            FileExistsError: the file is there.
            ValueError: several processes, whose shares would have to be put in order.
        """
        if self.path.exists():
            raise FileExistsError(f"{self.path} is there already; give another path, or move it away")
        if trainer.world_size > 1:
            raise ValueError("a predictive is written by one process: use one device")

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write the probabilities of all points."""
        own = isinstance(pl_module, PredictiveRoutine)
        parts = []
        for outputs, indices in zip(predictions, batch_indices[0], strict=True):
            if not own:
                outputs = outputs.unflatten(0, (-1, len(indices))).softmax(-1).mean(0)
            parts.append(outputs.detach().cpu())
        probs = torch.cat(parts)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.suffix == ".npz":
            with replacing(self.path) as scratch, open(scratch, "wb") as file:
                np.savez_compressed(file, **{self.key: probs.numpy()})  # type: ignore[arg-type]
        else:
            write_safetensors(self.path, {self.key: probs}, {"predictive": type(pl_module).__name__})


class AgainstReference(WrapperMetric):
    """A metric of two predictives, updated with one of them and looking up the other by the order of the points.

    Args:
        metric: with ``update(probs, reference_probs)``.
        reference: ``[points, classes]``.
        rank: rank of this process.
        world: number of processes, among which the points are dealt out in turn.
    """

    full_state_update = False

    def __init__(self, metric: Metric, reference: Tensor, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.metric = metric
        self.register_buffer("reference", reference, persistent=False)
        self.rank, self.world = rank, world
        self.seen = 0

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Take the probabilities ``(B, C)`` of the next ``B`` points (``(B,)`` of the second of two classes).

        Raises:
            ValueError: more points than the reference has, or other classes.
        """
        if probs.ndim == 1:
            probs = torch.stack([1 - probs, probs], dim=-1)
        reference: Tensor = self.reference  # type: ignore[assignment]
        index = self.rank + self.world * torch.arange(self.seen, self.seen + len(probs), device=reference.device)
        if len(index) and int(index[-1]) >= len(reference) + self.world:
            raise ValueError(f"more test points than the {len(reference)} of the reference")
        if probs.shape[-1] != reference.shape[-1]:
            raise ValueError(f"{probs.shape[-1]} classes are predicted, the reference has {reference.shape[-1]}")
        self.seen += len(probs)
        inside = index < len(reference)  # the last share may be filled up with points that were there before
        index = index[inside]
        self.metric.update(probs[inside.to(probs.device)].float(), reference[index].to(probs.device))

    def compute(self) -> Any:
        """What the metric says."""
        return self.metric.compute()

    def reset(self) -> None:
        """Start anew, at the first point."""
        super().reset()
        self.metric.reset()
        self.seen = 0


def load_predictive(path: Path, key: str = "probs") -> Tensor:
    """Class probabilities ``[points, classes]`` (float32) from a ``.npz`` or ``.safetensors`` file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, one without the key, or values that are no probability distributions.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file of a predictive")
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: a predictive is a .npz or .safetensors file")
    content: dict[str, Any]
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                content = {name: torch.from_numpy(archive[name]) for name in archive.files}
        else:
            content = dict(TensorFile(path))  # of any program
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); restore it") from error
    if key not in content:
        raise ValueError(f"{path} holds {sorted(content)}, and no {key!r}: give key")
    probs = content[key].float()
    sums = probs.sum(-1) if probs.ndim else probs
    if probs.ndim != 2 or not (probs >= 0).all() or not ((sums - 1).abs() < 1e-3).all():
        raise ValueError(
            f"{key!r} in {path} has shape {tuple(probs.shape)}; wanted are probabilities [points, classes], not "
            "negative, that sum to 1 over the classes"
        )
    return probs
