"""Data that a network was not trained on, and that it will not be tested on: where they are, and where there are none.

In many data modules the validation data *are* the test data (TorchUncertainty's, without ``val_split``). So data sets
are compared, through subsets and concatenations: of one data set by the indices that both take, of two by the samples
that they keep, whatever transforms they apply.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, SequentialSampler, Subset

from tu_symmetry.callbacks.training_data import content, in_precision, probed
from tu_symmetry.laplace.inputs import inputs_and_targets


class _Part(NamedTuple):
    """Samples ``indices`` of a data set that is no subset of another."""

    base: Any
    indices: np.ndarray[Any, Any]


def calibration_loader(
    trainer: Trainer, training: DataLoader[Any], given: DataLoader[Any] | Dataset[Any] | None
) -> DataLoader[Any] | None:
    """A loader of the given data (batched as ``training`` is), or else the validation loader of the run."""
    if given is None:
        return validation_loader(trainer)
    if isinstance(given, DataLoader):
        return in_precision(given, trainer)
    return DataLoader(given, training.batch_size, collate_fn=training.collate_fn)


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


def is_tested_on(loader: DataLoader[Any], trainer: Trainer) -> bool:
    """Whether a loader shows samples of the in-distribution test data, as far as these are known before the test.

    A data module that has not been set up for tests yet is asked through a copy, and for the test set alone, not for
    those of its OOD or shift evaluation. One that cannot be set up has none before its test.
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
            return False
    tests = _first(found)
    return tests is not None and share_samples(loader, tests)


def why_not_held_out(found: DataLoader[Any] | None, training: DataLoader[Any], trainer: Trainer) -> str:
    """Why nothing is to be chosen on data, in words; empty for data that are neither trained on nor tested on."""
    if found is None:
        return "there are no validation data (in batches of inputs and targets)"
    if share_samples(found, training):
        return "the validation data are training data"
    return "the validation data are the test data" if is_tested_on(found, trainer) else ""


def share_samples(first: DataLoader[Any], second: DataLoader[Any]) -> bool:
    """Whether two loaders show a sample in common, as far as their data sets tell.

    Data sets that keep nothing that tells their samples apart count as different, unless they are one object, or of
    one type, equally long and equal at every one of a few places.
    """
    return any(_parts_share(a, b) for a in _parts_of(first) for b in _parts_of(second))


def at_most(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """The loader, or one of ``count`` of its samples, evenly spaced, where it is a plain one of more."""
    plain = isinstance(loader.sampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler
    if not plain or len(loader.dataset) <= count:  # type: ignore[arg-type]
        return loader
    return DataLoader(spread(loader.dataset, count), loader.batch_size, collate_fn=loader.collate_fn)


def spread(dataset: Dataset[Any], count: int) -> Dataset[Any]:
    """``count`` samples of a data set, evenly spaced; all where there are no more."""
    size = len(dataset)  # type: ignore[arg-type]
    return dataset if size <= count else Subset(dataset, [i * size // count for i in range(count)])


def _first(found: Any) -> DataLoader[Any] | None:
    while isinstance(found, (list, tuple, dict)) and found:
        found = next(iter(found.values())) if isinstance(found, dict) else found[0]
    return found if isinstance(found, DataLoader) else None


def _parts_of(loader: DataLoader[Any]) -> Iterator[_Part]:
    chosen = getattr(loader.sampler, "indices", None)  # of a sampler of a subset
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
    return _parts(loader.dataset, np.asarray(range(size) if chosen is None else chosen, dtype=np.int64))


def _parts(dataset: Any, indices: np.ndarray[Any, Any]) -> Iterator[_Part]:
    if isinstance(dataset, Subset):
        yield from _parts(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[indices])
    elif isinstance(dataset, ConcatDataset):
        start = 0
        for own, stop in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            yield from _parts(own, indices[(indices >= start) & (indices < stop)] - start)
            start = stop
    elif isinstance(getattr(dataset, "dataset", None), Dataset) and len(dataset) % len(dataset.dataset) == 0:
        # around another one, such as repeated samples for augmentation at test time
        yield from _parts(dataset.dataset, indices // max(1, len(dataset) // len(dataset.dataset)))
    else:
        yield _Part(dataset, indices)


def _parts_share(a: _Part, b: _Part) -> bool:
    if not len(a.indices) or not len(b.indices):
        return a.base is b.base and not hasattr(a.base, "__len__")  # streams
    common = bool(np.intersect1d(a.indices, b.indices).size)
    if a.base is b.base:
        return common
    ours, theirs = _samples(a), _samples(b)
    if ours and theirs:
        return bool(ours & theirs)
    if type(a.base) is not type(b.base) or len(a.base) != len(b.base):
        return False
    with isolate_rng(include_cuda=False):
        return common and all(content(a.base[i]) == content(b.base[i]) for i in probed(len(a.base)))


def _samples(part: _Part) -> set[Any]:
    """What is kept of each sample, to be compared; nothing where that does not tell samples apart (labels alone)."""
    values = getattr(part.base, "__dict__", {}).values()
    kept = [own for value in values for own in (value if isinstance(value, tuple) else (value,))]
    lists = [own for own in kept if isinstance(own, list) or (isinstance(own, (Tensor, np.ndarray)) and own.ndim)]
    columns = [[content(own[i]) for i in part.indices.tolist()] for own in lists if len(own) == len(part.base)]
    found = set(zip(*columns, strict=True))
    return found if 2 * len(found) > len(part.indices) else set()
