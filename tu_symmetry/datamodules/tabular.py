"""Three regressions of the UCI repository, out of the wheel of bde that ships them, in the splits of its benchmark."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tu_symmetry.datamodules.images import BatchSize, ImageDataModule, Part
from tu_symmetry.datamodules.readers import DataFileError, LabeledImages

UCIName = Literal["airfoil", "concrete", "bikesharing"]

_FILES: dict[UCIName, tuple[str, int, dict[str, Any]]] = {  # with the number of inputs
    "airfoil": ("airfoil.csv", 5, {"delimiter": ",", "skiprows": 1}),
    "concrete": ("concrete.data", 8, {}),
    "bikesharing": (  # without the date, the row's number and the two counts that add up to the target
        "bike_sharing_dataset/hour.csv",
        12,
        {"delimiter": ",", "skiprows": 1, "usecols": [*range(2, 14), 16]},
    ),
}


def read_uci(name: UCIName, root: Path) -> np.ndarray:
    """A data set ``[rows, columns]``, its target last, from bde's wheel in ``root``.

    Raises:
        DataFileError: the wheel is not there, or damaged.
    """
    file, _, options = _FILES[name]
    wheels = sorted(root.glob("sklearn_contrib_bde-*.whl"))
    if not wheels:
        raise DataFileError(
            f"{name} comes in the wheel of bde, which is not in {root}: pip download sklearn-contrib-bde --no-deps "
            f"-d {root}"
        )
    try:
        content = zipfile.ZipFile(wheels[-1]).read(f"bde/data/{file}")
        return np.loadtxt(io.BytesIO(content), dtype=np.float64, **options)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataFileError(f"{name} cannot be read from bde ({error}): get a fresh copy of its wheel") from error


class UCIDataModule(ImageDataModule):
    """Airfoil noise, concrete strength or bike sharing (hourly): a fifth is held out, all columns are standardized.

    Splits, columns and scales are those of bde's benchmark (arXiv 2605.14146): NLLs are those of standardized targets.
    Validation runs on the test set.

    Args:
        dataset: ``airfoil`` (1,503 rows, 5 inputs), ``concrete`` (1,030, 8) or ``bikesharing`` (17,379, 12).
        root: folder with the wheel ``sklearn_contrib_bde-*.whl``, which ``pip download --no-deps`` gets.
        split: the split's seed; bde's benchmark has 0.
        batch_size: the size of training batches; ``full`` for the whole training set in order.
        train_size: number of training rows, the first of the split; None for all.
        seed: of the orders.
    """

    training_task = "regression"
    scale = None

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
        super().__init__(batch_size=batch_size, eval_batch_size=None, train_size=train_size, seed=seed)
        if split < 0:
            raise ValueError(f"split must not be negative, got {split}")
        self.dataset, self.root, self.split = dataset, Path(root), split
        self.input_shape = (_FILES[dataset][1],)

    def read(self, part: Part) -> LabeledImages:
        """Read a whole part: inputs ``[n, columns]`` and targets ``[n]``, standardized by all training rows."""
        from sklearn.model_selection import train_test_split

        train, test = train_test_split(read_uci(self.dataset, self.root), test_size=0.2, random_state=self.split)
        rows = torch.from_numpy(((train if part == "train" else test) - train.mean(0)) / train.std(0)).float()
        return LabeledImages(rows[:, :-1], rows[:, -1])
