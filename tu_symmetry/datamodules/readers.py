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
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Split = Literal["train", "test"]
IDXName = Literal["mnist", "fashion_mnist", "kmnist", "notmnist"]
CIFARName = Literal["cifar10", "cifar100"]

IDX_FOLDERS: dict[str, str] = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "kmnist": "KMNIST",
    "notmnist": "notMNIST",
}
CIFAR_ARCHIVE = "cifar10-jpeg.tar.xz"
TEXTURES_ARCHIVE = "dtd10-64.tar.xz"
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_STEMS = {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")}
_STEMS["test"] = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


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


def read_idx_images(root: Path, name: IDXName, split: Split, *, flat: bool = True) -> LabeledImages:
    """One half of an MNIST-like data set, from its two IDX files, gzipped or not.

    Args:
        root: holds ``<Name>/raw`` as torchvision lays it out, or ``<Name>``, with the files.
        name: the name of the data set.
        split: which half.
        flat: accept the files in ``root`` itself too (where it belongs to this data set alone).

    Raises:
        DataFileError: files that are missing, truncated, of another format, or do not belong together.
    """
    images, labels = _STEMS[split]
    folder = idx_folder(root, name, split, flat=flat)
    if folder is None:
        known = IDX_FOLDERS[name]
        tried = ", ".join(str(p) for p in (root / known / "raw", root / known, *([root] if flat else [])))
        raise DataFileError(
            f"{name}: there is no {images} with its {labels}, gzipped or not, in any of {tried}; give a root that "
            "holds them, or have them downloaded (torchvision has mnist, fashion_mnist and kmnist)"
        )
    x, y = read_idx(folder, images), read_idx(folder, labels)
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise DataFileError(
            f"{folder}: {images} has shape {tuple(x.shape)} and {labels} {tuple(y.shape)}; they should be "
            "[n, height, width] and [n] of one data set. Get a fresh copy of both"
        )
    return LabeledImages(x.unsqueeze(1), y)


def idx_folder(root: Path, name: IDXName, split: Split, *, flat: bool = True) -> Path | None:
    """The folder with the two IDX files of one half, None if there is none."""
    known = root / IDX_FOLDERS[name]
    folders = (known / "raw", known, *([root] if flat else []))
    return next((f for f in folders if all(_idx_file(f, stem) is not None for stem in _STEMS[split])), None)


def read_idx(folder: Path, stem: str) -> Tensor:
    """Read an idx file of unsigned bytes, gzipped or not (torchvision itself reads only unzipped ones).

    Raises:
        DataFileError: a file that is missing, truncated or of another format.
    """
    path = _idx_file(folder, stem)
    if path is None:
        raise DataFileError(f"there is no {stem} in {folder}, gzipped or not")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, ndim = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{ndim}I", content, 4)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataFileError(
            f"{path} cannot be read as an idx file ({error}); delete it to have it downloaded"
        ) from error
    expected = 4 + 4 * ndim + math.prod(shape)
    if zeros != 0 or kind != 8 or len(content) != expected:
        raise DataFileError(
            f"{path} is no idx file of bytes, or it is truncated ({len(content):,} bytes); delete it to have it "
            "downloaded again"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * ndim).reshape(shape)


def download_idx(root: Path, name: IDXName) -> None:
    """Have torchvision download an MNIST-like data set into ``root``.

    Raises:
        DataFileError: a data set that torchvision does not have, or a download that failed.
    """
    from torchvision import datasets

    folder = IDX_FOLDERS[name]
    if not hasattr(datasets, folder):
        raise DataFileError(
            f"{name} is not in {root / folder / 'raw'} (its idx files, gzipped or not), and torchvision cannot "
            "download it: put the files there"
        )
    try:
        getattr(datasets, folder)(root, download=True)
    except (RuntimeError, OSError) as error:
        raise DataFileError(
            f"{folder} is not in {root / folder / 'raw'} (its four idx files, gzipped or not) and could not be "
            f"downloaded there. The download said: {error}"
        ) from error


def read_cifar(root: Path, name: CIFARName, split: Split, *, download: bool = True) -> LabeledImages:
    """One half of CIFAR-10 or CIFAR-100 as torchvision stores it.

    Raises:
        DataFileError: it is not there, damaged, or could not be downloaded.
    """
    from torchvision import datasets

    try:
        part = getattr(datasets, name.upper())(root, train=split == "train", download=download)
    except (RuntimeError, OSError) as error:
        folder = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
        label = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[name]
        outcome = " and could not be downloaded there" if download else ""
        raise DataFileError(
            f"{label} is not in {root} (torchvision's folder {folder}){outcome}; torchvision said: {error}"
        ) from error
    return LabeledImages(
        torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(),
        torch.tensor(part.targets, dtype=torch.uint8, device="cpu"),
    )


def read_cifar10_archive(
    root: Path, train_size: int | None = None, test_size: int | None = None
) -> dict[str, LabeledImages]:
    """CIFAR-10 from the archive ``cifar10-jpeg.tar.xz`` with members ``train/00000_frog.jpg`` and so on.

    Args:
        root: folder of the archive.
        train_size: number of training images, the first ones; None for all. Only these are decoded.
        test_size: likewise of the test images.

    Raises:
        DataFileError: no such archive, a damaged one, or one with fewer images.
    """
    wanted = {"train": train_size, "test": test_size}
    images: dict[str, list[Tensor]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}

    def take(name: str) -> bool:
        part, limit = name.partition("/")[0], wanted.get(name.partition("/")[0], 0)
        return part in wanted and (limit is None or len(images[part]) < limit)

    path = root / CIFAR_ARCHIVE
    for name, image in read_archive(path, take):
        part, label = name.partition("/")[0], PurePosixPath(name).stem.partition("_")[2]
        if label not in CIFAR10_CLASSES:
            raise DataFileError(
                f"{path}: {name} names no class of CIFAR-10; members are train/00000_frog.jpg and so on"
            )
        images[part].append(image)
        labels[part].append(CIFAR10_CLASSES.index(label))
    for part, limit in wanted.items():
        if limit != 0 and (not images[part] or (limit is not None and len(images[part]) < limit)):
            raise DataFileError(f"{path} holds {len(images[part])} {part} images, {limit or 'some'} are wanted")
    return {
        part: LabeledImages(torch.stack(found), torch.tensor(labels[part], dtype=torch.uint8, device="cpu"))
        for part, found in images.items()
        if found
    }


def read_textures(root: Path, size: int) -> Tensor:
    """The textures of the archive ``dtd10-64.tar.xz``, resized to ``[n, 3, size, size]``.

    Raises:
        DataFileError: no such archive, or a damaged one.
    """
    images = torch.stack([image for _, image in read_archive(root / TEXTURES_ARCHIVE, lambda name: True)])
    return F.interpolate(images.float(), (size, size), mode="area").round().to(torch.uint8)


def read_svhn(root: Path, *, download: bool = True) -> Tensor:
    """The test images of SVHN ``[n, 3, 32, 32]``, as torchvision stores them.

    Raises:
        DataFileError: it is not there and could not be downloaded.
    """
    from torchvision.datasets import SVHN

    try:
        return torch.from_numpy(SVHN(str(root), split="test", download=download).data)
    except (RuntimeError, OSError) as error:
        raise DataFileError(
            f"SVHN is not in {root} (torchvision's test_32x32.mat) and could not be downloaded there; give a folder "
            f"that holds it, or another out-of-distribution set. torchvision said: {error}"
        ) from error


def read_archive(path: Path, take: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Names and images ``[3, height, width]`` in bytes of the wanted members of a tar file, in its order.

    Raises:
        DataFileError: no such file, or a damaged one.
    """
    import numpy as np
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


def _idx_file(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / stem, folder / f"{stem}.gz") if p.is_file()), None)
