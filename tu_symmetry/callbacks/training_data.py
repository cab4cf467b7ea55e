"""The data a network was trained on, in a fixed order, whole and without augmentation, from a trainer's loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

_PROBES, _READS = 8, 4  # samples that are read, and how often, to see whether they are augmented


def plain_training_loader(
    trainer: Trainer,
    pl_module: LightningModule,
    given: DataLoader[Any] | Dataset[Any] | None = None,
    *,
    batch_size: int | None = None,
) -> DataLoader[Any]:
    """A loader of the training data: sequential, nothing dropped, and the same whenever it is read.

    Without ``given`` the trainer's training loader is rebuilt. Where its data set has the data module's
    ``train_transform``, and the data module a ``test_transform`` (as TorchUncertainty's have), the latter takes its
    place. Under data parallelism every process gets its own share, without repeated samples.

    Args:
        trainer: whose loader, or whose data module's loader, is taken.
        pl_module: the LightningModule of the run.
        given: a loader or data set to use instead.
        batch_size: None for that of the loader it comes from, 128 for a data set.

    Raises:
        ValueError: data that are augmented (they read differently from time to time), or without a known order.
    """
    source: Any = _own_loader(trainer, pl_module) if given is None else given
    if not isinstance(source, (DataLoader, Dataset)):
        raise ValueError(_asks_for_data(f"the training data are a {type(source).__name__}, not one DataLoader"))
    loader = source if isinstance(source, DataLoader) else None
    dataset: Any = source if loader is None else _everything_in(loader)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(_asks_for_data("the training data are a stream, of which no fixed order is known"))
    datamodule = trainer.datamodule if given is None else None  # type: ignore[attr-defined]
    evaluation = getattr(datamodule, "test_transform", None)
    if evaluation is not None and _transform_of(dataset) is getattr(datamodule, "train_transform", None):
        rank_zero_info("Training data are read with the data module's test_transform, not its train_transform.")
        dataset = _with_transform(dataset, evaluation)
    if given is None and loader is not None:
        limit = trainer.limit_train_batches  # a number of batches, or a share of them
        count = round(limit * len(dataset)) if isinstance(limit, float) else limit * (loader.batch_size or 1)
        if count < len(dataset):
            dataset = Subset(dataset, range(max(1, count)))
    collate = None if loader is None else loader.collate_fn
    _require_repeatable(dataset, collate)
    rank, world = trainer.global_rank, trainer.world_size
    plain: DataLoader[Any] = DataLoader(
        dataset if world == 1 else Subset(dataset, range(rank, len(dataset), world)),
        batch_size=batch_size or (128 if loader is None else loader.batch_size),
        shuffle=False,
        num_workers=0 if loader is None else loader.num_workers,
        collate_fn=collate,
        pin_memory=loader is not None and loader.pin_memory,
    )
    return in_precision(plain, trainer)


def in_precision(loader: DataLoader[Any], trainer: Trainer) -> DataLoader[Any]:
    """The loader with batches as the trainer gives them to the network: in double precision with ``64-true``."""
    plugin = trainer.precision_plugin
    if type(plugin).convert_input is Precision.convert_input:
        return loader
    made = copy.copy(loader)
    made._iterator = None
    made.collate_fn = partial(_converted, loader.collate_fn, plugin.convert_input)
    return made


def _converted(collate: Callable[[list[Any]], Any], convert: Callable[[Any], Any], samples: list[Any]) -> Any:
    return convert(collate(samples))


def _with_transform(dataset: Any, transform: Any) -> Any:
    """A shallow copy of a data set (also within subsets) that applies ``transform`` instead of its own."""
    made = copy.copy(dataset)
    if isinstance(made, Subset):
        made.dataset = _with_transform(made.dataset, transform)
        return made
    made.transform = transform
    if hasattr(made, "transforms"):  # torchvision keeps both
        made.transforms = type(made.transforms)(transform, made.target_transform)
    return made


def _transform_of(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return getattr(dataset, "transform", None)


def _own_loader(trainer: Trainer, pl_module: LightningModule) -> Any:
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    for owner in (datamodule, pl_module):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if owner is not None and is_overridden(hook, owner):
                raise ValueError(
                    _asks_for_data(f"{type(owner).__name__} changes batches in {hook}, before the network sees them")
                )
    found = trainer.train_dataloader
    if found is None and datamodule is not None:
        datamodule.setup("fit")
        found = datamodule.train_dataloader()
    if found is None:
        raise ValueError(
            _asks_for_data(
                "the trainer has no training data here (a test without data module of a network that was not trained "
                "with this callback, or a fit that reads none)"
            )
        )
    return found


def _everything_in(loader: DataLoader[Any]) -> Dataset[Any]:
    """The samples of which the loader shows a shuffled or truncated selection."""
    dataset, sampler = loader.dataset, loader.sampler
    if isinstance(dataset, IterableDataset):
        return dataset
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(_asks_for_data(f"the training loader draws batches by {type(loader.batch_sampler).__name__}"))
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(dataset, list(sampler.indices))
    size = len(dataset)  # type: ignore[arg-type]
    whole = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == size
    if not whole and not isinstance(sampler, (SequentialSampler, DistributedSampler)):
        raise ValueError(
            _asks_for_data(f"the training loader draws by {type(sampler).__name__}, of which no fixed order is known")
        )
    return dataset


def _require_repeatable(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
    if not len(dataset):
        raise ValueError("the training data are empty")
    places = probed(len(dataset))
    with isolate_rng(include_cuda=False):
        reads = [[dataset[i] for i in places] for _ in range(_READS)]
        found = [content(samples if collate is None else collate(samples)) for samples in reads]
    if any(other != found[0] for other in found[1:]):
        raise ValueError(
            _asks_for_data("the training data are augmented: the same samples read differently from time to time")
        )


def probed(size: int) -> list[int]:
    """A few places of a data set, evenly spaced."""
    return sorted({round(i * (size - 1) / (_PROBES - 1)) for i in range(_PROBES)})


def content(value: Any) -> Any:
    """What a sample holds, to be compared: bytes of tensors and arrays, numbers and text, of all else the type."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    if hasattr(value, "__array__"):
        return np.asarray(value).tobytes()
    if isinstance(value, Mapping):
        return tuple((key, content(own)) for key, own in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(content, value))
    if isinstance(value, float):
        return repr(value)  # NaN reads the same as NaN
    return value if isinstance(value, (str, bytes, int)) else type(value).__name__


def _asks_for_data(seen: str) -> str:
    return (
        f"{seen}; pass train_data= with a loader or data set that gives the training data as the network sees them, "
        "without augmentation"
    )
