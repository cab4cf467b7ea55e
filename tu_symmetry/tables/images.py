"""A stage that reads color images once, from torchvision's data sets or from archives of image files, for later stages.

Archives are tar files of JPEG or PNG images: of CIFAR-10 with the members ``train/NNNNN_class.jpg`` and
``test/NNNNN_class.jpg`` in canonical order, of out-of-distribution images with any members. Only what is needed is
decoded, into one file in the stage's folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tu_symmetry.datamodules.readers import (
    CIFAR10_CLASSES,
    read_cifar10_archive,
    read_svhn,
    read_textures,
)
from tu_symmetry.files import read_tensors, write_safetensors
from tu_symmetry.tables.data import Data, load_data, recipe_errors
from tu_symmetry.tables.recipe import DataConfig
from tu_symmetry.tables.stage import Input, Results, StageContext, stage

IMAGES = "images.safetensors"
CLASSES = CIFAR10_CLASSES
_HINT = (
    "; --data-root says where the data sets are, --set images.source=cifar10 --set images.out_of_distribution=svhn "
    "has torchvision's downloaded, and --set images.out_of_distribution=none leaves the latter out"
)


@dataclass(frozen=True)
class ImagesOptions:
    """Which images, and where they are.

    Attributes:
        root: folder of data sets and archives, if it is not that of the command (``--data-root``).
        source: ``cifar10``, torchvision's, downloaded into ``root`` where it is missing; or ``cifar10_jpeg``, the
            archive ``cifar10-jpeg.tar.xz`` in ``root``.
        train_size: number of training images, the first ones; None for all.
        test_size: number of test images, the first ones; None for all.
        out_of_distribution: ``svhn`` (torchvision's test set), ``textures`` (the archive ``dtd10-64.tar.xz``, resized
            to the size of the images), or ``none``.
        out_of_distribution_size: number of them, evenly spaced through the set; None for all.
    """

    root: str | None = None
    source: Literal["cifar10", "cifar10_jpeg"] = "cifar10"
    train_size: int | None = None
    test_size: int | None = None
    out_of_distribution: Literal["svhn", "textures", "none"] = "svhn"
    out_of_distribution_size: int | None = None


@stage()
def prepare_images(context: StageContext, options: ImagesOptions) -> Results:
    """Read the images into one file."""
    root = Path(options.root) if options.root is not None else context.data_root
    count = options.out_of_distribution_size
    with recipe_errors(_HINT):
        tensors = _cifar10(options, root) if options.source == "cifar10" else _cifar10_jpeg(options, root)
        if options.out_of_distribution == "svhn":
            tensors["ood_x"] = read_svhn(root, count)
        elif options.out_of_distribution == "textures":
            tensors["ood_x"] = read_textures(root, count, tensors["test_x"].shape[-1])
    write_safetensors(context.folder / IMAGES, tensors)
    sizes = {name.removesuffix("_x"): len(t) for name, t in tensors.items() if name.endswith("_x")}
    digest = hashlib.sha256(b"".join(tensors[name].contiguous().numpy().tobytes() for name in sorted(tensors)))
    return {
        "sizes": sizes,
        "source": options.source,
        "out_of_distribution": options.out_of_distribution,
        "checksum": digest.hexdigest()[:16],
        "headline": ", ".join(f"{count:,} {name}" for name, count in sizes.items()) + " images",
    }


def read_images(source: Input, device: torch.device) -> tuple[Data, Tensor | None]:
    """What :func:`prepare_images` wrote: the data on the device, and out-of-distribution images in [0, 1] if any."""
    found = read_tensors(source.folder / IMAGES, device=device)
    x = {name: t.float() / 255 for name, t in found.items() if name.endswith("_x")}
    data = Data(
        x["train_x"],
        found["train_y"].long(),
        x["test_x"],
        found["test_y"].long(),
        len(CLASSES),
        source.results["checksum"],
    )
    return data, x.get("ood_x")


def _cifar10(options: ImagesOptions, root: Path) -> dict[str, Tensor]:
    data = load_data(DataConfig("cifar10", options.train_size, options.test_size), root)
    found = {"train_x": data.train_x, "train_y": data.train_y, "test_x": data.test_x, "test_y": data.test_y}
    return {n: ((t * 255).round() if n.endswith("_x") else t).to(torch.uint8) for n, t in found.items()}


def _cifar10_jpeg(options: ImagesOptions, root: Path) -> dict[str, Tensor]:
    parts = read_cifar10_archive(root, options.train_size, options.test_size)
    return {f"{part}_x": found.x for part, found in parts.items()} | {
        f"{part}_y": found.y for part, found in parts.items()
    }
