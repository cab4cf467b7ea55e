"""Three regressions of the UCI repository, out of the wheel of bde that ships them, in the splits of its benchmark."""

from __future__ import annotations

import io
import zipfile
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from tu_symmetry.datamodules.images import BatchSize
from tu_symmetry.datamodules.loading import ResumableLoader, SeededOrder, TensorPairs, as_it_is
from tu_symmetry.datamodules.readers import DataFileError

UCIName = Literal["airfoil", "concrete", "bikesharing"]

_FILES: dict[UCIName, tuple[str, dict[str, Any]]] = {
    "airfoil": ("airfoil.csv", {"delimiter": ",", "skiprows": 1}),
    "concrete": ("concrete.data", {}),
    "bikesharing": (  # without the date, the row's number and the two counts that add up to the target
        "bike_sharing_dataset/hour.csv",
        {"delimiter": ",", "skiprows": 1, "usecols": [*range(2, 14), 16]},
    ),
}


def read_uci(name: UCIName, root: Path) -> np.ndarray:
    """A data set ``[rows, columns]``, its target last, from bde's wheel in ``root``, or from bde where it is installed.

    Raises:
        DataFileError: neither is there, or the wheel is damaged.
    """
    file, options = _FILES[name]
    wheels = sorted(root.glob("sklearn_contrib_bde-*.whl"))
    spec = None if wheels else find_spec("bde")
    try:
        if wheels:
            content = zipfile.ZipFile(wheels[-1]).read(f"bde/data/{file}")
        elif spec is not None and spec.origin is not None:
            content = (Path(spec.origin).parent / "data" / file).read_bytes()
        else:
            raise DataFileError(
                f"{name} comes in the wheel of bde, which is not in {root}: pip download sklearn-contrib-bde --no-deps "
                f"-d {root}"
            )
        return np.loadtxt(io.BytesIO(content), dtype=np.float64, **options)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, DataFileError):
            raise
        raise DataFileError(f"{name} cannot be read from bde ({error}): get a fresh copy of its wheel") from error


class UCIDataModule(LightningDataModule):
    """Airfoil noise, concrete strength or bike sharing (hourly): a fifth is held out, all columns are standardized.

    Splits, columns and scales are those of bde's benchmark (arXiv 2605.14146): NLLs are those of standardized targets.
    Validation runs on the test set.

    Args:
        dataset: ``airfoil`` (1,503 rows, 5 inputs), ``concrete`` (1,030, 8) or ``bikesharing`` (17,379, 12).
        root: folder with the wheel ``sklearn_contrib_bde-*.whl``, which ``pip download --no-deps`` gets; without one
            the data are read from bde where it is installed.
        split: the split's seed; bde's benchmark has 0.
        batch_size: the size of training batches; ``full`` for the whole training set in order.
        train_size: number of training rows, the first of the split; None for all.
        seed: of the orders.
    """

    training_task = "regression"

    def __init__(
        self,
        dataset: UCIName = "airfoil",
        root: str | Path = "data",
        *,
        split: int = 0,
        batch_size: BatchSize = 100,
        train_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(split, seed) < 0 or (batch_size != "full" and batch_size < 1):
            raise ValueError(
                f"split and seed must not be negative and batch_size at least 1, got {split}, {seed} and {batch_size}"
            )
        self.dataset, self.root, self.split, self.seed = dataset, Path(root), split, seed
        self.batch_size, self.train_size = batch_size, train_size

    @cached_property
    def _parts(self) -> tuple[TensorPairs, TensorPairs]:
        from sklearn.model_selection import train_test_split

        train, test = train_test_split(read_uci(self.dataset, self.root), test_size=0.2, random_state=self.split)
        if self.train_size is not None and not 2 <= self.train_size <= len(train):
            raise DataFileError(f"train_size is {self.train_size}, but there are {len(train)} training rows")
        mean, deviation = train.mean(0), train.std(0)  # of all of them, whatever train_size is
        train, test = (torch.from_numpy((part - mean) / deviation).float() for part in (train, test))
        train = train[: self.train_size]
        return TensorPairs(train[:, :-1], train[:, -1]), TensorPairs(test[:, :-1], test[:, -1])

    @property
    def train(self) -> TensorPairs:
        """The training rows."""
        return self._parts[0]

    @property
    def test(self) -> TensorPairs:
        """The test rows."""
        return self._parts[1]

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches; the whole set in order for a full batch."""
        full = self.batch_size == "full"
        order = SeededOrder(self.train, num_replicas=1, rank=0, seed=self.seed, shuffle=not full)
        return ResumableLoader(self.train, len(self.train) if full else int(self.batch_size), order)

    def val_dataloader(self) -> DataLoader[Any]:
        """All test rows at once."""
        return DataLoader(self.test, batch_size=len(self.test), collate_fn=as_it_is)

    test_dataloader = predict_dataloader = val_dataloader
