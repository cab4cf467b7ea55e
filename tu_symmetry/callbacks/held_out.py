"""Data that a network was not trained on, and that it will not be tested on: where they are, and where there are none.

In many data modules the validation data *are* the test data (TorchUncertainty's, without ``val_split``). What is
chosen on these is chosen on the test set. So data sets are compared, through subsets and concatenations: of one data
set by the indices that both take, of two by the samples that they keep, whatever transforms they apply.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, SequentialSampler, Subset

from tu_symmetry.callbacks.training_data import in_precision
from tu_symmetry.laplace.inputs import inputs_and_targets

_PROBES = 8  # samples that are compared where a data set keeps its own in no tensor, array or list


class _Part(NamedTuple):
    """Samples ``indices`` of a data set that is no subset of another."""

    base: Any
    indices: np.ndarray[Any, Any]


def validation_loader(trainer: Trainer) -> DataLoader[Any] | None:
    """The first validation loader of the run or of its data module, if its batches have targets; None without any."""
    found: Any = trainer.val_dataloaders
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if found is None and datamodule is not None and is_overridden("val_dataloader", datamodule, LightningDataModule):
        found = datamodule.val_dataloader()
    loader = _first(found)
    if loader is None:
        return None
    with isolate_rng():
        batch = next(iter(loader), None)
    try:
        inputs_and_targets(batch)
    except TypeError:
        return None
    return in_precision(loader, trainer)


def testing_loader(trainer: Trainer) -> DataLoader[Any] | None:
    """The loader of the in-distribution test data, as far as it is known before the test: None without any.

    A data module that has not been set up for tests yet is asked through a copy, so that it stays as it is, and for
    the test set alone, not for the sets of its OOD or shift evaluation. One that cannot be set up (its test data are
    not there, say) has none before its test.
    """
    found: Any = trainer.test_dataloaders
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if found is None and datamodule is not None and is_overridden("test_dataloader", datamodule, LightningDataModule):
        own = copy.copy(datamodule)
        for name in ("eval_ood", "eval_shift"):
            if getattr(own, name, False):
                setattr(own, name, False)
        try:
            with isolate_rng():
                own.setup("test")
                found = own.test_dataloader()
        except Exception:  # whatever it is, a test will raise it; training has to go on without
            return None
    return _first(found)


def share_samples(first: DataLoader[Any], second: DataLoader[Any]) -> bool:
    """Whether two loaders show a sample in common, as far as their data sets tell.

    Data sets that keep nothing that tells their samples apart count as different, unless they are one object, or of
    one type, equally long and equal at every one of a few places.
    """
    return any(
        _parts_share(a, b)
        for a in _parts(first.dataset, _chosen(first))
        for b in _parts(second.dataset, _chosen(second))
    )


def calibration_loader(
    trainer: Trainer, training: DataLoader[Any], given: DataLoader[Any] | Dataset[Any] | None
) -> DataLoader[Any] | None:
    """A loader of the data that are given to choose a temperature on, or else the validation loader of the run.

    Args:
        trainer: the one that runs.
        training: loader of the training data, whose batch size and collate function a data set gets.
        given: a loader, a data set, or None.
    """
    if given is None:
        return validation_loader(trainer)
    if isinstance(given, DataLoader):
        return in_precision(given, trainer)
    return DataLoader(given, training.batch_size, collate_fn=training.collate_fn)


def at_most(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """The loader, or one of ``count`` of its samples, evenly spaced, where it is a plain one of more."""
    dataset: Any = loader.dataset
    plain = isinstance(loader.sampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler
    if not plain or len(dataset) <= count:
        return loader
    chosen = [i * len(dataset) // count for i in range(count)]
    return DataLoader(Subset(dataset, chosen), loader.batch_size, collate_fn=loader.collate_fn)


def _first(found: Any) -> DataLoader[Any] | None:
    while isinstance(found, (list, tuple, dict)) and found:
        found = next(iter(found.values())) if isinstance(found, dict) else found[0]
    return found if isinstance(found, DataLoader) else None


def _chosen(loader: DataLoader[Any]) -> Sequence[int] | None:
    """What a sampler of a subset takes; None for everything."""
    found = getattr(loader.sampler, "indices", None)
    return None if found is None else [int(i) for i in found]


def _parts(dataset: Any, chosen: Sequence[int] | None) -> Iterator[_Part]:
    size = len(dataset) if hasattr(dataset, "__len__") else 0
    indices = np.arange(size) if chosen is None else np.asarray(chosen, dtype=np.int64)
    if isinstance(dataset, Subset):
        yield from _parts(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[indices].tolist())
    elif isinstance(dataset, ConcatDataset):
        start = 0
        for own, stop in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            yield from _parts(own, (indices[(indices >= start) & (indices < stop)] - start).tolist())
            start = stop
    elif isinstance(getattr(dataset, "dataset", None), Dataset) and size and size % len(dataset.dataset) == 0:
        # around another one, such as repeated samples for augmentation at test time
        yield from _parts(dataset.dataset, (indices // (size // len(dataset.dataset))).tolist())
    else:
        yield _Part(dataset, indices)


def _parts_share(a: _Part, b: _Part) -> bool:
    if not len(a.indices) or not len(b.indices):
        return a.base is b.base and not hasattr(a.base, "__len__")  # streams
    if a.base is b.base:
        return bool(np.intersect1d(a.indices, b.indices).size)
    ours, theirs = _samples(a), _samples(b)
    if ours and theirs:
        return bool(ours & theirs)
    if type(a.base) is not type(b.base) or len(a.base) != len(b.base):
        return False
    places = sorted({round(i * (len(a.base) - 1) / (_PROBES - 1)) for i in range(_PROBES)})
    with isolate_rng(include_cuda=False):
        equal = all(_same(a.base[i], b.base[i]) for i in places)
    return equal and bool(np.intersect1d(a.indices, b.indices).size)


def _samples(part: _Part) -> set[Any]:
    """What is kept of each sample, to be compared; nothing where that does not tell samples apart (labels alone)."""
    columns = [[_word(own[i]) for i in part.indices.tolist()] for own in _contents(part.base)]
    found = set(zip(*columns, strict=True))
    return found if 2 * len(found) > len(part.indices) else set()


def _word(value: Any) -> Any:
    """The value of an entry: bytes of tensors and arrays, numbers and text as they are, of all else the type."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (tuple, list)):
        return tuple(map(_word, value))
    return value if isinstance(value, (str, bytes, int, float)) else type(value).__name__


def _contents(base: Any) -> list[Any]:
    """What a data set keeps with an entry for each sample: tensors, arrays, lists, also within tuples."""
    found: list[Any] = []

    def collect(value: Any, depth: int) -> None:
        sized = isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0
        sized = sized and not (isinstance(value, Tensor) and value.layout != torch.strided)
        if (sized or isinstance(value, list)) and len(value) == len(base):
            found.append(value)
        elif isinstance(value, (tuple, list)) and len(value) < 16 and depth < 2:
            for own in value:
                collect(own, depth + 1)
        elif isinstance(value, Mapping) and depth < 2:
            for own in value.values():
                collect(own, depth + 1)

    for value in getattr(base, "__dict__", {}).values():
        collect(value, 0)
    return found


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.cpu(), y.cpu())
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x.shape == y.shape and np.array_equal(x, y)
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(_same(own, other) for own, other in zip(x, y, strict=True))
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return x.keys() == y.keys() and all(_same(x[key], y[key]) for key in x)
    return type(x) is type(y) and bool(x == y)


def spread(dataset: Dataset[Any], count: int) -> Dataset[Any]:
    """``count`` samples of a data set, evenly spaced; all where there are no more."""
    size = len(dataset)  # type: ignore[arg-type]
    return dataset if size <= count else Subset(dataset, [i * size // count for i in range(count)])
