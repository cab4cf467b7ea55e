"""LightningDataModules for image sets that fit in memory, with the same splits and orders on every machine."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from tu_symmetry.datamodules import readers
from tu_symmetry.datamodules.loading import ResumableLoader, SeededOrder, TensorPairs, as_it_is, flip_and_shift
from tu_symmetry.datamodules.readers import CIFARName, DataFileError, IDXName, LabeledImages
from tu_symmetry.states import evenly

Part = Literal["train", "test", "ood"]
BatchSize = int | Literal["full"]


class ImageDataModule(LightningDataModule):
    """What the data modules of this package share; a subclass says how its parts are read.

    Where ``val_size`` is 0, validation runs on the test set, as in TorchUncertainty's data modules. Batches are read by
    index from tensors in memory, in an order that is a function of ``seed`` and the epoch; a run resumed in the middle
    of an epoch continues with the batches that were left.

    Args:
        batch_size: the size of training batches; ``full`` for the whole training set in order.
        eval_batch_size: the size of all other batches; None for whole sets.
        train_size: number of training images, None for all that validation leaves.
        val_size: number of validation images, the last of the training half.
        test_size: number of test images, the first ones; None for all.
        normalize: subtract the data set's mean and divide by its standard deviation (of the pixels in [0, 1], by
            channel); else images are in [0, 1].
        eval_ood: also test on the out-of-distribution set, whose labels mean nothing.
        ood_size: number of its images, evenly spaced; None for all.
        orders: for members trained at once: training batches are ``[orders, batch, ...]``, with an independent order
            for each; the m-th is that of a data module with ``seed + m`` and no ``orders``.
        resident: keep the tensors on the trainer's device, so that nothing is copied there batch by batch.
        seed: the seed of the orders.
        augment: flip training images left to right at random, and shift them by up to 4 pixels over a border of zeros;
            a function of the seed, the epoch and the place in it.

    Attributes:
        input_shape: ``(channels, height, width)``.
        mean: the mean of the training pixels in [0, 1], by channel; ``std`` likewise.
    """

    training_task: ClassVar[str] = "classification"
    shift_severity: ClassVar[int] = 1
    num_tta: ClassVar[int] = 1
    eval_shift: ClassVar[bool] = False

    num_classes: int
    input_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float | None = 255.0  # of the pixels; None where inputs stay as they are read

    def __init__(
        self,
        *,
        batch_size: BatchSize = 100,
        eval_batch_size: int | None = 1000,
        train_size: int | None = None,
        val_size: int = 0,
        test_size: int | None = None,
        normalize: bool = False,
        eval_ood: bool = False,
        ood_size: int | None = None,
        orders: int | None = None,
        resident: bool = False,
        seed: int = 0,
        augment: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"eval_batch_size": eval_batch_size, "train_size": train_size, "test_size": test_size}
        sizes |= {"ood_size": ood_size, "orders": orders, "batch_size": None if batch_size == "full" else batch_size}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if val_size < 0 or seed < 0:
            raise ValueError(f"val_size and seed must not be negative, got {val_size} and {seed}")
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.train_size, self.val_size, self.test_size, self.ood_size = train_size, val_size, test_size, ood_size
        self.normalize, self.eval_ood, self.orders = normalize, eval_ood, orders
        self.resident, self.seed, self.augment = resident, seed, augment

    @abstractmethod
    def read(self, part: Part) -> LabeledImages:
        """Read a whole part from its files: ``train``, ``test`` or ``ood``."""

    @cached_property
    def _training_half(self) -> tuple[TensorPairs, TensorPairs]:
        found = self.read("train")
        left = len(found.x) - self.val_size
        if left < 1:
            raise DataFileError(f"val_size is {self.val_size}, but there are {len(found.x)} training images")
        fitted, held_out = (LabeledImages(found.x[rows], found.y[rows]) for rows in (slice(left), slice(left, None)))
        return self._pairs(fitted, "train_size", self.train_size), self._pairs(held_out)

    @property
    def train(self) -> TensorPairs:
        """The training set."""
        return self._training_half[0]

    @property
    def val(self) -> TensorPairs:
        """The validation set; the test set if ``val_size`` is 0."""
        return self._training_half[1] if self.val_size else self.test

    @cached_property
    def test(self) -> TensorPairs:
        """The test set."""
        return self._pairs(self.read("test"), "test_size", self.test_size)

    @cached_property
    def ood(self) -> TensorPairs:
        """The out-of-distribution set."""
        return self._pairs(self.read("ood"), "ood_size", self.ood_size)

    def setup(self, stage: str | None = None) -> None:
        """Read what the stage needs (once), and move it to the trainer's device if it is to stay there."""
        needed = [self.train, self.val] if stage in ("fit", None) else [self.val] if stage == "validate" else []
        needed += [self.test] if stage in ("test", "predict", None) else []
        needed += [self.ood] if stage in ("test", None) and self.eval_ood else []
        if self.resident and self.trainer is not None:
            device = self.trainer.strategy.root_device
            for pairs in needed:
                pairs.x, pairs.y = pairs.x.to(device), pairs.y.to(device)

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches; the whole set in order for a full batch."""
        data, full = self.train, self.batch_size == "full"
        shares = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        orders = [
            SeededOrder(data, **(shares or {"num_replicas": 1, "rank": 0}), seed=self.seed + m, shuffle=not full)
            for m in range(self.orders or 1)
        ]
        size = len(data) if full else int(self.batch_size)
        augment = flip_and_shift if self.augment else None
        return ResumableLoader(data, size, orders[0], orders if self.orders else (), augment)

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation batches, in order."""
        return self._in_order(self.val)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """Test batches, and with ``eval_ood`` out-of-distribution batches, in order."""
        return [self._in_order(self.test), *([self._in_order(self.ood)] if self.eval_ood else [])]

    def predict_dataloader(self) -> DataLoader[Any]:
        """Test batches, in order."""
        return self._in_order(self.test)

    def postprocess_dataloader(self) -> DataLoader[Any]:
        """Training batches, in order: what post-processing such as Laplace is fitted to."""
        return self._in_order(self.train)

    def _in_order(self, data: TensorPairs) -> DataLoader[Any]:
        return DataLoader(data, batch_size=self.eval_batch_size or len(data), shuffle=False, collate_fn=as_it_is)

    def _pairs(self, found: LabeledImages, what: str = "", size: int | None = None) -> TensorPairs:
        """The first ``size`` images (or evenly spaced ones), scaled."""
        if size is not None and size > len(found.x):
            raise DataFileError(f"{what} is {size}, but there are {len(found.x)} images")
        chosen: Any = evenly(len(found.x), size) if what == "ood_size" else slice(size)
        x, y = found.x[chosen], found.y[chosen]
        if tuple(x.shape[1:]) != self.input_shape:
            raise DataFileError(
                f"{type(self).__name__}: the files hold images of shape {tuple(x.shape[1:])}, expected "
                f"{self.input_shape}; they are of another data set"
            )
        return TensorPairs(self._inputs(x), y if y.is_floating_point() else y.long())

    def _inputs(self, x: Tensor) -> Tensor:
        """What networks take of images as they are read."""
        if self.scale is None:
            return x
        x = x.float() / self.scale
        if self.normalize:
            mean, std = (torch.tensor(values, device="cpu").view(-1, 1, 1) for values in (self.mean, self.std))
            x = (x - mean) / std
        return x


class DigitsDataModule(ImageDataModule):
    """Scikit-learn's digits, 1,437 training and 360 test images of 8 x 8 pixels; nothing is downloaded.

    The out-of-distribution set are the test images with their pixels in a random order, each in its own. Arguments are
    those of :class:`ImageDataModule`.
    """

    num_classes = 10
    input_shape = (1, 8, 8)
    mean = (0.3054,)
    std = (0.3761,)
    scale = 16.0

    def read(self, part: Part) -> LabeledImages:
        """Read a whole part."""
        if part != "ood":
            return readers.read_digits()[part]
        test = readers.read_digits()["test"]
        order = torch.rand(len(test.x), 64, generator=torch.Generator().manual_seed(0), device="cpu").argsort(1)
        return LabeledImages(test.x.flatten(1).gather(1, order).view_as(test.x), test.y)


_IDX_MOMENTS: dict[str, tuple[float, float]] = {
    "mnist": (0.1307, 0.3081),
    "fashion_mnist": (0.2860, 0.3530),
    "kmnist": (0.1918, 0.3483),
    "notmnist": (0.4266, 0.4589),  # of the test half
}


class IDXDataModule(ImageDataModule):
    """MNIST, Fashion-MNIST, KMNIST or notMNIST from their IDX files, gzipped or not.

    Files lie in ``root/MNIST/raw`` (as torchvision puts them) or in ``root/MNIST``; of an out-of-distribution set only
    the test half is needed. What is missing is downloaded by torchvision, except notMNIST.

    Args:
        dataset: ``mnist``, ``fashion_mnist``, ``kmnist`` or ``notmnist``.
        root: folder of data sets.
        eval_ood: also test on the out-of-distribution set.
        ood_dataset: the out-of-distribution set, normalized as the training set.
        **common: the arguments of :class:`ImageDataModule`.
    """

    num_classes = 10
    input_shape = (1, 28, 28)

    def __init__(
        self,
        dataset: IDXName = "mnist",
        root: str | Path = "data",
        *,
        eval_ood: bool = False,
        ood_dataset: IDXName = "fashion_mnist",
        **common: Any,
    ) -> None:
        super().__init__(eval_ood=eval_ood, **common)
        if eval_ood and ood_dataset == dataset:
            raise ValueError(f"ood_dataset is {dataset}, which is the data set itself: choose another")
        self.dataset, self.ood_dataset, self.root = dataset, ood_dataset, Path(root)
        mean, std = _IDX_MOMENTS[dataset]
        self.mean, self.std = (mean,), (std,)

    def prepare_data(self) -> None:
        """Download what is missing, in one process."""
        needed: list[tuple[IDXName, Any]] = [(self.dataset, "train"), (self.dataset, "test")]
        needed += [(self.ood_dataset, "test")] if self.eval_ood else []
        for name, split in needed:
            if readers.idx_files(self.root, name, split) is None:
                readers.from_torchvision(readers.IDX_FOLDERS[name], self.root, download=True)

    def read(self, part: Part) -> LabeledImages:
        """Read a whole part."""
        name, split = (self.ood_dataset, "test") if part == "ood" else (self.dataset, part)
        return readers.read_idx_images(self.root, name, split)  # type: ignore[arg-type]


class CIFARDataModule(ImageDataModule):
    """CIFAR-10 or CIFAR-100, as torchvision stores and downloads them or, CIFAR-10, from an archive of JPEG images.

    Args:
        dataset: ``cifar10`` or ``cifar100``.
        root: folder of data sets: of torchvision's, or of the archive.
        source: ``torchvision``; or ``archive``, the file ``cifar10-jpeg.tar.xz`` in ``root`` with members
            ``train/00000_frog.jpg`` in canonical order.
        batch_size: the size of training batches; ``full`` for the whole training set in order.
        ood_dataset: ``svhn`` (torchvision's test set) or ``textures`` (the archive ``dtd10-64.tar.xz`` in ``root``).
        **common: the other arguments of :class:`ImageDataModule`.
    """

    input_shape = (3, 32, 32)

    def __init__(
        self,
        dataset: CIFARName = "cifar10",
        root: str | Path = "data",
        *,
        source: Literal["torchvision", "archive"] = "torchvision",
        batch_size: BatchSize = 128,
        ood_dataset: Literal["svhn", "textures"] = "svhn",
        **common: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **common)
        if source == "archive" and dataset != "cifar10":
            raise ValueError(f"source 'archive' is {readers.CIFAR_ARCHIVE}, which holds CIFAR-10, not {dataset}")
        self.dataset, self.root, self.source, self.ood_dataset = dataset, Path(root), source, ood_dataset
        hundred = dataset == "cifar100"
        self.num_classes = 100 if hundred else 10
        self.mean = (0.5071, 0.4867, 0.4408) if hundred else (0.4914, 0.4822, 0.4465)
        self.std = (0.2673, 0.2564, 0.2762) if hundred else (0.2470, 0.2435, 0.2616)

    def prepare_data(self) -> None:
        """Download what is missing, in one process."""
        if self.source == "torchvision":
            readers.read_cifar(self.root, self.dataset, "train", download=True)
        if self.eval_ood and self.ood_dataset == "svhn":
            readers.read_svhn(self.root, download=True)

    def read(self, part: Part) -> LabeledImages:
        """Read a whole part; of the archive no more than is asked for is decoded."""
        if part == "ood":
            svhn = self.ood_dataset == "svhn"
            x = readers.read_svhn(self.root) if svhn else readers.read_textures(self.root, self.input_shape[-1])
            return LabeledImages(x, torch.zeros(len(x), dtype=torch.uint8, device="cpu"))
        if self.source == "torchvision":
            return readers.read_cifar(self.root, self.dataset, part)
        size = self.test_size if part == "test" else None if self.val_size else self.train_size
        return readers.read_cifar10_archive(self.root, part, size)
