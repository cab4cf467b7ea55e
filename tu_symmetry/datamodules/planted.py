"""Data sets of noise in the layout of the real files, for rehearsals: same names, formats, shapes and numbers.

Images of one class are brighter in a band, so that a network can tell the classes apart.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse
import torch
from torch import nn

from tu_symmetry.datamodules.readers import IDX_FOLDERS, IDXName


def plant_idx(root: Path, name: IDXName, train: int = 60000, test: int = 10000) -> None:
    """MNIST or one of its relatives, ``[n, 28, 28]``."""
    raw = root / IDX_FOLDERS[name] / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        x, y = _images(count, 10, (28, 28))
        for kind, content in (("images-idx3", x), ("labels-idx1", y)):
            head = struct.pack(f">I{content.ndim}I", 0x800 + content.ndim, *content.shape)
            (raw / f"{part}-{kind}-ubyte").write_bytes(head + content.tobytes())


def plant_cifar(root: Path, name: str, train: int = 50000, test: int = 10000) -> None:
    """``cifar10`` or ``cifar100`` as torchvision stores them."""
    hundred = name == "cifar100"
    classes, key = (100, "fine_labels") if hundred else (10, "labels")
    folder = root / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": train, "test": test}
    if not hundred:
        parts = {f"data_batch_{k}": train // 5 for k in range(1, 6)} | {"test_batch": test}
    for part, count in parts.items():
        x, y = _images(count, classes, (3, 32, 32))
        (folder / part).write_bytes(pickle.dumps({"data": x.reshape(count, -1), key: y.tolist()}))
    names = [f"class {k}" for k in range(classes)]
    meta = {"fine_label_names": names} if hundred else {"label_names": names}
    (folder / ("meta" if hundred else "batches.meta")).write_bytes(pickle.dumps(meta))


def plant_svhn(root: Path, count: int = 26032) -> None:
    """The test half of SVHN as torchvision stores it."""
    x, y = _images(count, 10, (3, 32, 32))
    root.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(root / "test_32x32.mat", {"X": x.transpose(2, 3, 1, 0), "y": y[:, None]})


def plant_tiny_imagenet(root: Path, train: int = 500, val: int = 50, classes: int = 200) -> None:
    """Tiny ImageNet with ``train`` and ``val`` images of each class, which are one file; red says the class."""
    from PIL import Image

    folder = root / "tiny-imagenet-200"
    wnids = [f"n{(7 * k) % classes:08d}" for k in range(classes)]  # in no order
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for label, wnid in enumerate(wnids):
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        pixels = np.random.default_rng(label).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        pixels[..., 0] = label
        names = [f"{wnid}_{k}.JPEG" for k in range(train)]
        Image.fromarray(pixels).save(images / names[0], quality=95)
        places = [images / name for name in names[1:]]
        for k in range(val):
            places.append(folder / "val" / "images" / f"val_{k * classes + label}.JPEG")
            lines.append(f"{places[-1].name}\t{wnid}\t0\t0\t63\t63\n")
        for place in places:
            os.link(images / names[0], place)
        (images.parent / f"{wnid}_boxes.txt").write_text("".join(f"{name}\t0\t0\t63\t63\n" for name in names))
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in wnids))
    (folder / "words.txt").write_text("".join(f"{wnid}\tthing, object\n" for wnid in wnids))


def plant_networks(folder: Path, make: Callable[[], nn.Module], count: int) -> None:
    """An archive of networks in half precision, as the published data set of arXiv 2310.08287 has them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{folder.name}-0-{count - 1}.tgz", "w:gz", compresslevel=1) as archive:
        for number in range(count):
            state = {n: t.half() if t.is_floating_point() else t for n, t in make().state_dict().items()}
            content = io.BytesIO()
            torch.save(state, content)
            member = tarfile.TarInfo(f"{folder.name}/version_{number}.ckpt")
            member.size = content.tell()
            content.seek(0)
            archive.addfile(member, content)


def plant_scan(root: Path, size: int = 501, angles: int = 60, bins: int = 128) -> None:
    """The three files of the walnut: a disk with a hole, seen by parallel rays, each pixel by the nearest detector."""
    folder = root / "walnut"
    folder.mkdir(parents=True, exist_ok=True)
    place = np.arange(size) - (size - 1) / 2
    x, y = (grid.reshape(-1) for grid in np.meshgrid(place, place))
    theta = np.pi * np.arange(angles) / angles
    seen = np.outer(np.cos(theta), x) + np.outer(np.sin(theta), y)  # [angles, pixels]
    detector = np.clip(seen * bins / (np.sqrt(2) * size) + bins / 2, 0, bins - 1).astype(np.int64)
    rows = (detector + bins * np.arange(angles)[:, None]).reshape(-1)
    columns = np.tile(np.arange(size * size), angles)
    shape = (angles * bins, size * size)
    operator = scipy.sparse.csr_matrix((np.full(len(rows), 1 / size, np.float32), (rows, columns)), shape)
    radius = np.hypot(x, y) / size
    truth = ((radius < 0.4) & (radius > 0.1)).astype(np.float32)
    clean = operator @ truth
    noise = np.random.default_rng(0).normal(size=len(clean))
    scipy.sparse.save_npz(folder / "operator.npz", operator, compressed=False)
    np.save(folder / "measurements.npy", clean + 0.05 * np.abs(clean).mean() * noise)
    np.save(folder / "truth.npy", truth.reshape(size, size))


def plant_uci(root: Path, rows: int = 1000) -> None:
    """A wheel of bde with its three regressions; targets are sums of columns and noise."""
    root.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(root / "sklearn_contrib_bde-0-py3-none-any.whl", "w") as wheel:
        for file, columns, separator in (
            ("airfoil.csv", 6, ","),
            ("concrete.data", 9, " "),
            ("bike_sharing_dataset/hour.csv", 17, ","),
        ):
            values = np.random.default_rng(columns).normal(size=(rows, columns)).round(3)
            values[:, -1] += values[:, 2:-3].sum(1)
            lines = [separator.join(map(str, row)) for row in values]
            head = [] if separator == " " else [separator.join(f"column{k}" for k in range(columns))]
            wheel.writestr(f"bde/data/{file}", "\n".join([*head, *lines]))


@contextmanager
def unverified() -> Iterator[None]:
    """Torchvision takes planted files for its own, whose digests it would compare."""
    from torchvision.datasets import cifar, svhn, utils

    modules: list[Any] = [cifar, svhn, utils]
    kept = [module.check_integrity for module in modules]
    try:
        for module in modules:
            module.check_integrity = lambda path, md5=None: os.path.isfile(path)
        yield
    finally:
        for module, check in zip(modules, kept, strict=True):
            module.check_integrity = check


def _images(count: int, classes: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a brighter band for each class, ``[count, *shape]``, and the classes, both uint8."""
    generator = np.random.default_rng(count)
    y = (np.arange(count) % classes).astype(np.uint8)
    x = generator.integers(0, 80, (count, *shape), dtype=np.uint8)
    height = shape[-2]
    for label in range(classes):
        first = label * (height - 6) // max(1, classes - 1)
        x[y == label, ..., first : first + 6, :] += np.uint8(120)
    return x, y
