"""Tiny ImageNet in the folders that its archive unpacks to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tu_symmetry.datamodules import DataFileError, TinyImageNetDataModule
from tu_symmetry.datamodules.planted import plant_tiny_imagenet


def test_images_have_the_labels_of_their_folders(tmp_path: Path) -> None:
    plant_tiny_imagenet(tmp_path, 2, 1, classes=9)
    data = TinyImageNetDataModule(
        tmp_path, 4, num_workers=0, pin_memory=False, persistent_workers=False, basic_augment=False
    )
    data.setup("fit")
    assert data.train.label_data.tolist() == [k // 2 for k in range(18)]
    assert data.val.label_data.tolist() == list(range(9))
    for part in (data.train, data.val):
        for i, y in enumerate(part.label_data.tolist()):
            red = 255 * (part[i][0][0] * data.std[0] + data.mean[0])
            assert part[i][0].shape == (3, 64, 64) and abs(float(red.median()) - y) <= 12  # JPEG
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == (4, 3, 64, 64) and x.dtype == torch.float32 and y.shape == (4,)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    data = TinyImageNetDataModule(tmp_path, 4, num_workers=0, pin_memory=False, persistent_workers=False)
    with pytest.raises(DataFileError, match=r"wnids\.txt.* is missing.*: unpack http"):
        data.setup("fit")
    plant_tiny_imagenet(tmp_path, 1, 1, classes=3)
    (tmp_path / "tiny-imagenet-200" / "train" / "n00000001" / "n00000001_boxes.txt").unlink()
    with pytest.raises(DataFileError, match=r"n00000001_boxes\.txt"):
        data.setup("fit")
