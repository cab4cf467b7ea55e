"""Tiny ImageNet by TorchUncertainty's data module, whose training half cannot be read as it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_uncertainty.datamodules import TinyImageNetDataModule as _DataModule
from torch_uncertainty.datasets.classification import TinyImageNet as _Dataset

from tu_symmetry.datamodules.readers import DataFileError


class TinyImageNet(_Dataset):
    """TorchUncertainty's data set with a training half, whose classes come in the order of ``wnids.txt``.

    TorchUncertainty 0.13 adds a text to a path where it looks for the training images, which is a ``TypeError``.
    """

    def __init__(self, root: str | Path, split: Any = "train", **transforms: Any) -> None:
        try:
            super().__init__(root, split, **transforms)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataFileError(
                f"Tiny ImageNet is not in {Path(root) / 'tiny-imagenet-200'}, or not whole ({error.filename} is "
                f"missing): unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip in {root}"
            ) from error

    def _make_paths(self) -> list[tuple[Path, int]]:
        if self.split != "train":
            return super()._make_paths()
        found = []
        for label, wnid in enumerate(self.wnids_path.read_text().split()):
            folder = self.root / "train" / wnid
            lines = (folder / f"{wnid}_boxes.txt").read_text().splitlines()
            found += [(folder / "images" / line.split()[0], label) for line in lines]
        return found


class TinyImageNetDataModule(_DataModule):
    """TorchUncertainty's ``TinyImageNetDataModule``, and its options; ``root`` holds ``tiny-imagenet-200``."""

    def __init__(self, root: str | Path, batch_size: int, **options: Any) -> None:
        super().__init__(root=root, batch_size=batch_size, **options)
        self.dataset = TinyImageNet
