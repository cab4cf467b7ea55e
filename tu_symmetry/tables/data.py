"""The data of a table: small image sets, whole and resident on the device."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tu_symmetry.tables.recipe import DataConfig, RecipeError

TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "kmnist": "KMNIST"}


@dataclass(frozen=True)
class Batches:
    """Consecutive batches of resident tensors, in order, as often as they are iterated.

    Attributes:
        x: ``[n, ...]`` inputs.
        y: ``[n]`` class numbers.
        batch_size: of all batches but the last.
    """

    x: Tensor
    y: Tensor
    batch_size: int = 1000

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True)


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
        RecipeError: an unknown data set, sizes that it does not have, or data that can be neither found nor downloaded.
    """
    if config.name == "digits":
        parts = _digits()
    elif config.name in TORCHVISION:
        parts = _torchvision(TORCHVISION[config.name], root)
    elif config.name == "cifar10":
        parts = _cifar10(root)
    else:
        raise RecipeError(f"data.name {config.name!r}: the data sets are digits, cifar10, {', '.join(TORCHVISION)}")
    train_x, train_y = _first(*parts[:2], config.train_size, "train_size")
    test_x, test_y = _first(*parts[2:], config.test_size, "test_size")
    digest = hashlib.sha256()
    for tensor in (train_x, train_y, test_x, test_y):
        digest.update(tensor.contiguous().numpy().tobytes())
    classes = int(max(parts[1].max(), parts[3].max())) + 1
    scale = 16.0 if config.name == "digits" else 255.0
    return Data(
        train_x.float() / scale, train_y.long(), test_x.float() / scale, test_y.long(), classes, digest.hexdigest()[:16]
    )


def _first(x: Tensor, y: Tensor, size: int | None, what: str) -> tuple[Tensor, Tensor]:
    if size is not None and not 1 <= size <= len(x):
        raise RecipeError(f"data.{what} is {size}, but there are {len(x)} images")
    return x[:size], y[:size]


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,437 training and 360 test images ``[n, 1, 8, 8]`` in 0..16, stratified, always the same split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    split = train_test_split(bunch.images, bunch.target, test_size=360, stratify=bunch.target, random_state=0)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in split)
    return train_x.to(torch.uint8).unsqueeze(1), train_y, test_x.to(torch.uint8).unsqueeze(1), test_y


def _torchvision(name: str, root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The images ``[n, 1, 28, 28]`` in 0..255 and labels of one of torchvision's MNIST-like sets."""
    raw = root / name / "raw"
    stems = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    if not all(_idx_file(raw, stem) for stem in stems):
        from torchvision import datasets

        try:
            getattr(datasets, name)(root, download=True)
        except (RuntimeError, OSError) as error:
            raise RecipeError(
                f"{name} is not in {raw} (its four idx files, gzipped or not) and could not be downloaded there; "
                f"give --data-root with a folder that holds {name}/raw. The download said: {error}"
            ) from error
    train_x, train_y, test_x, test_y = (read_idx(raw, stem) for stem in stems)
    return train_x.unsqueeze(1), train_y, test_x.unsqueeze(1), test_y


def _cifar10(root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The images ``[n, 3, 32, 32]`` in 0..255 and labels, from torchvision's ``cifar-10-batches-py``."""
    from torchvision.datasets import CIFAR10

    try:
        parts = [CIFAR10(root, train=train, download=True) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise RecipeError(
            f"CIFAR-10 is not in {root} (torchvision's folder cifar-10-batches-py) and could not be downloaded there; "
            f"give --data-root with a folder that holds it. The download said: {error}"
        ) from error
    images = [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]
    labels = [torch.tensor(part.targets, dtype=torch.uint8) for part in parts]
    return images[0], labels[0], images[1], labels[1]


def read_idx(folder: Path, stem: str) -> Tensor:
    """Read an idx file of unsigned bytes, gzipped or not (torchvision itself reads only unzipped ones).

    Raises:
        RecipeError: a file that is truncated or of another format.
    """
    path = _idx_file(folder, stem)
    assert path is not None, f"{folder / stem} vanished"
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, ndim = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{ndim}I", content, 4)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise RecipeError(f"{path} cannot be read as an idx file ({error}); delete it to have it downloaded") from error
    if zeros != 0 or kind != 8 or len(content) != 4 + 4 * ndim + math.prod(shape):
        raise RecipeError(f"{path} is no idx file of bytes, or it is truncated; delete it to have it downloaded again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * ndim).reshape(shape)


def _idx_file(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / stem, folder / f"{stem}.gz") if p.is_file()), None)
