"""A stage that reads color images once, from torchvision's data sets or from archives of image files, for later stages.

Archives are tar files of JPEG or PNG images: of CIFAR-10 with the members ``train/NNNNN_class.jpg`` and
``test/NNNNN_class.jpg`` in canonical order, of out-of-distribution images with any members. Only what is needed is
decoded, into one file in the stage's folder.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tu_symmetry.tables.data import Data, load_data
from tu_symmetry.tables.recipe import DataConfig, RecipeError
from tu_symmetry.tables.stage import Input, Results, StageContext, stage

IMAGES = "images.safetensors"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_ARCHIVE = "cifar10-jpeg.tar.xz"
TEXTURES_ARCHIVE = "dtd10-64.tar.xz"


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
    tensors = _cifar10(options, root) if options.source == "cifar10" else _cifar10_jpeg(options, root)
    if options.out_of_distribution != "none":
        read = _svhn if options.out_of_distribution == "svhn" else _textures
        tensors["ood_x"] = read(root, options.out_of_distribution_size, tensors["test_x"].shape[-1])
    temporary = context.folder / "images.tmp"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    temporary.replace(context.folder / IMAGES)
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
    found = load_file(source.folder / IMAGES, device=str(device))
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
    wanted = {"train": options.train_size, "test": options.test_size}
    images: dict[str, list[Tensor]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}

    def take(name: str) -> bool:
        part, limit = name.partition("/")[0], wanted.get(name.partition("/")[0], 0)
        return part in wanted and (limit is None or len(images[part]) < limit)

    path = root / CIFAR_ARCHIVE
    for name, image in _decoded(path, take):
        part, label = name.partition("/")[0], PurePosixPath(name).stem.partition("_")[2]
        if label not in CLASSES:
            raise RecipeError(f"{path}: {name} names no class of CIFAR-10; members are train/00000_frog.jpg and so on")
        images[part].append(image)
        labels[part].append(CLASSES.index(label))
    for part, limit in wanted.items():
        if not images[part] or (limit is not None and len(images[part]) < limit):
            raise RecipeError(f"{path} holds {len(images[part])} {part} images, {limit or 'some'} are wanted")
    return {f"{part}_x": torch.stack(found) for part, found in images.items()} | {
        f"{part}_y": torch.tensor(found, dtype=torch.uint8) for part, found in labels.items()
    }


def _textures(root: Path, count: int | None, size: int) -> Tensor:
    path = root / TEXTURES_ARCHIVE
    images = torch.stack([image for _, image in _decoded(path, lambda name: True)])
    smaller = F.interpolate(images[_spaced(len(images), count, path)].float(), (size, size), mode="area")
    return smaller.round().to(torch.uint8)


def _svhn(root: Path, count: int | None, size: int) -> Tensor:
    from torchvision.datasets import SVHN

    try:
        images = torch.from_numpy(SVHN(str(root), split="test", download=True).data)
    except (RuntimeError, OSError) as error:
        raise RecipeError(
            f"SVHN is not in {root} (torchvision's test_32x32.mat) and could not be downloaded there; give a folder "
            "that holds it with --data-root, or leave out-of-distribution images out with "
            f"--set images.out_of_distribution=none. The download said: {error}"
        ) from error
    return images[_spaced(len(images), count, root)]


def _spaced(available: int, count: int | None, where: Path) -> Tensor:
    if count is not None and not 1 <= count <= available:
        raise RecipeError(f"out_of_distribution_size is {count}, but there are {available} images in {where}")
    return torch.linspace(0, available - 1, count or available, dtype=torch.float64).round().long()


def _decoded(path: Path, take: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Names and images ``[3, height, width]`` in bytes of the wanted members, in the archive's order."""
    from torchvision.io import ImageReadMode, decode_image

    if not path.is_file():
        raise RecipeError(
            f"{path} is missing: give the folder that holds it with --data-root, or have torchvision's "
            "data sets downloaded with --set images.source=cifar10 --set images.out_of_distribution=svhn"
        )
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and take(member.name):
                    content = archive.extractfile(member)
                    assert content is not None
                    buffer = torch.frombuffer(bytearray(content.read()), dtype=torch.uint8)
                    yield member.name, decode_image(buffer, ImageReadMode.RGB)
    except (tarfile.TarError, EOFError, OSError, RuntimeError) as error:
        raise RecipeError(f"{path} cannot be read as an archive of images ({error}); get a fresh copy") from error
