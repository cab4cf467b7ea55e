"""The data of a table: small image sets, whole and resident on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tu_symmetry.configs import ConfigError
from tu_symmetry.datamodules.readers import (
    DataFileError,
    IDXName,
    LabeledImages,
    download_idx,
    idx_folder,
    read_cifar,
    read_digits,
    read_idx_images,
)
from tu_symmetry.evaluation import Batches
from tu_symmetry.tables.recipe import DataConfig

TORCHVISION: tuple[IDXName, ...] = ("mnist", "fashion_mnist", "kmnist")


@dataclass(frozen=True)
class Data:
    """Images in [0, 1] ``[n, ...]`` and class numbers ``[n]``, for training and for testing.

    Attributes:
        checksum: of the contents, for the fingerprints of stages.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    checksum: str

    @property
    def train(self) -> Batches:
        """The training set in batches."""
        return Batches(self.train_x, self.train_y)

    @property
    def test(self) -> Batches:
        """The test set in batches."""
        return Batches(self.test_x, self.test_y)

    def to(self, device: torch.device) -> Data:
        """The same data resident on ``device``."""
        names = ("train_x", "train_y", "test_x", "test_y")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def load_data(config: DataConfig, root: Path) -> Data:
    """Load a table's data.

    Args:
        config: name and sizes.
        root: folder of downloaded data sets, as torchvision lays it out; what is missing there is downloaded.

    Raises:
        ConfigError: an unknown data set, sizes that it does not have, or data that can be neither found nor downloaded.
    """
    with recipe_errors("; --data-root says where the data sets are"):
        if config.name == "digits":
            parts = read_digits()
            train, test = parts["train"], parts["test"]
        elif config.name in TORCHVISION:
            train, test = _idx(config.name, root)
        elif config.name == "cifar10":
            train, test = read_cifar(root, "cifar10", "train"), read_cifar(root, "cifar10", "test")
        else:
            raise ConfigError(f"data.name {config.name!r}: the data sets are digits, cifar10, {', '.join(TORCHVISION)}")
    train_x, train_y = _first(*train, config.train_size, "train_size")
    test_x, test_y = _first(*test, config.test_size, "test_size")
    digest = hashlib.sha256()
    for tensor in (train_x, train_y, test_x, test_y):
        digest.update(tensor.contiguous().numpy().tobytes())
    classes = int(max(train.y.max(), test.y.max())) + 1
    scale = 16.0 if config.name == "digits" else 255.0
    return Data(
        train_x.float() / scale, train_y.long(), test_x.float() / scale, test_y.long(), classes, digest.hexdigest()[:16]
    )


def _first(x: Tensor, y: Tensor, size: int | None, what: str) -> tuple[Tensor, Tensor]:
    if size is not None and not 1 <= size <= len(x):
        raise ConfigError(f"data.{what} is {size}, but there are {len(x)} images")
    return x[:size], y[:size]


@contextmanager
def recipe_errors(hint: str = "") -> Iterator[None]:
    """Data that cannot be read, as an error of the recipe, with a hint about this command's options."""
    try:
        yield
    except DataFileError as error:
        raise ConfigError(f"{error}{hint}") from error


def _idx(name: IDXName, root: Path) -> tuple[LabeledImages, LabeledImages]:
    if any(idx_folder(root, name, split, flat=False) is None for split in ("train", "test")):
        download_idx(root, name)
    return read_idx_images(root, name, "train", flat=False), read_idx_images(root, name, "test", flat=False)
