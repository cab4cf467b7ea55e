"""Files of images to tensors of bytes: scikit-learn's digits, IDX files, CIFAR, SVHN, archives of JPEG or PNG images.

Every reader returns images ``[n, channels, height, width]`` and labels ``[n]``, both uint8, in the files' order, and
raises a :class:`DataFileError` that names the file where one is missing, truncated or of another format.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Split = Literal["train", "test"]
IDXName = Literal["mnist", "fashion_mnist", "kmnist", "notmnist"]
CIFARName = Literal["cifar10", "cifar100"]

IDX_FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "kmnist": "KMNIST", "notmnist": "notMNIST"}
CIFAR_ARCHIVE = "cifar10-jpeg.tar.xz"
TEXTURES_ARCHIVE = "dtd10-64.tar.xz"
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class DataFileError(ValueError):
    """A data set that is missing, truncated or of another format; the message names the file and what to do."""


class LabeledImages(NamedTuple):
    """Images ``[n, channels, height, width]`` and labels ``[n]``, both uint8."""

    x: Tensor
    y: Tensor


def read_digits() -> dict[str, LabeledImages]:
    """Scikit-learn's digits in 0..16: 1,437 ``train`` and 360 ``test`` images, stratified, always the same split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    split = train_test_split(bunch.images, bunch.target, test_size=360, stratify=bunch.target, random_state=0)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part).to(torch.uint8) for part in split)
    return {"train": LabeledImages(train_x.unsqueeze(1), train_y), "test": LabeledImages(test_x.unsqueeze(1), test_y)}


def idx_files(root: Path, name: IDXName, split: Split) -> tuple[Path, Path] | None:
    """Files of images and labels, gzipped or not, in ``root/NAME/raw`` or ``root/NAME``; None where one is missing."""
    half = "train" if split == "train" else "t10k"
    stems = (f"{half}-images-idx3-ubyte", f"{half}-labels-idx1-ubyte")
    for folder in (root / IDX_FOLDERS[name] / "raw", root / IDX_FOLDERS[name]):
        found = [p for stem in stems for p in (folder / stem, folder / f"{stem}.gz") if p.is_file()]
        images, labels = ([p for p in found if p.name.startswith(stem)] for stem in stems)
        if images and labels:
            return images[0], labels[0]
    return None


def read_idx_images(root: Path, name: IDXName, split: Split) -> LabeledImages:
    """One half of an MNIST-like data set, from its two IDX files (torchvision wants both halves, unzipped)."""
    files = idx_files(root, name, split)
    if files is None:
        raise DataFileError(
            f"{name}: there are no IDX files of images and labels of the {split} half, gzipped or not, in "
            f"{root / IDX_FOLDERS[name] / 'raw'}; give a root that holds them, or have them downloaded (torchvision "
            "has mnist, fashion_mnist and kmnist)"
        )
    x, y = map(read_idx, files)
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise DataFileError(
            f"{files[0]} has shape {tuple(x.shape)} and {files[1].name} {tuple(y.shape)}; they should be "
            "[n, height, width] and [n] of one data set. Get a fresh copy of both"
        )
    return LabeledImages(x.unsqueeze(1), y)


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped or not."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, ndim = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{ndim}I", content, 4)
        if (zeros, kind) != (0, 8) or len(content) != 4 + 4 * ndim + math.prod(shape):
            raise ValueError("it is truncated, or holds no bytes")
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise DataFileError(
            f"{path} cannot be read as an IDX file ({error}); delete it to have it downloaded"
        ) from error
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * ndim).reshape(shape)


def from_torchvision(name: str, root: Path, **options: Any) -> Any:
    """A data set of torchvision."""
    from torchvision import datasets

    if not hasattr(datasets, name):
        raise DataFileError(f"{name} is not in {root / name}, and torchvision cannot download it: put the files there")
    try:
        return getattr(datasets, name)(str(root), **options)
    except (RuntimeError, OSError) as error:
        raise DataFileError(f"{name} is not in {root} as torchvision lays it out; it said: {error}") from error


def read_cifar(root: Path, name: CIFARName, split: Split, *, download: bool = False) -> LabeledImages:
    """One half of CIFAR-10 or CIFAR-100 as torchvision stores it."""
    part = from_torchvision(name.upper(), root, train=split == "train", download=download)
    x = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
    return LabeledImages(x, torch.tensor(part.targets, dtype=torch.uint8, device="cpu"))


def read_cifar10_archive(root: Path, split: Split, size: int | None = None) -> LabeledImages:
    """Half of CIFAR-10 from the archive ``cifar10-jpeg.tar.xz`` with members ``train/00000_frog.jpg`` and so on.

    Only the first ``size`` images are decoded; None for all.
    """
    path, images, labels = root / CIFAR_ARCHIVE, list[Tensor](), list[int]()
    for name, image in read_archive(path, lambda name: name.startswith(f"{split}/")):
        label = PurePosixPath(name).stem.partition("_")[2]
        if label not in CIFAR10_CLASSES:
            raise DataFileError(f"{path}: {name} names no class of CIFAR-10 (train/00000_frog.jpg does)")
        images.append(image)
        labels.append(CIFAR10_CLASSES.index(label))
        if len(images) == size:
            break
    if not images or (size is not None and len(images) < size):
        raise DataFileError(f"{path} holds {len(images)} {split} images, {size or 'some'} are wanted")
    return LabeledImages(torch.stack(images), torch.tensor(labels, dtype=torch.uint8, device="cpu"))


def read_textures(root: Path, size: int) -> Tensor:
    """The textures of the archive ``dtd10-64.tar.xz``, resized to ``[n, 3, size, size]``."""
    images = torch.stack([image for _, image in read_archive(root / TEXTURES_ARCHIVE, lambda name: True)])
    return F.interpolate(images.float(), (size, size), mode="area").round().to(torch.uint8)


def read_svhn(root: Path, *, download: bool = False) -> Tensor:
    """The test images of SVHN ``[n, 3, 32, 32]``, as torchvision stores them."""
    return torch.from_numpy(from_torchvision("SVHN", root, split="test", download=download).data)


def read_archive(path: Path, take: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Names and images ``[3, height, width]`` in bytes of the wanted members of a tar file, in its order."""
    from PIL import Image

    if not path.is_file():
        raise DataFileError(f"{path} is missing: give the folder that holds it")
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and take(member.name):
                    content = archive.extractfile(member)
                    assert content is not None
                    image = np.array(Image.open(io.BytesIO(content.read())).convert("RGB"))
                    yield member.name, torch.from_numpy(image).permute(2, 0, 1).contiguous()
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError) as error:
        raise DataFileError(f"{path} cannot be read as an archive of images ({error}); get a fresh copy") from error
