"""Room: data modules. LightningDataModules for image sets that TorchUncertainty lacks, or cannot read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tu_symmetry._lazy import attach

_EXPORTS: dict[str, str] = {
    "ScannedTomographyDataModule": "tomography",
    "TomographyDataModule": "tomography",
    "TomographyProblem": "tomography",
    "CIFARDataModule": "images",
    "DataFileError": "readers",
    "DigitsDataModule": "images",
    "IDXDataModule": "images",
    "ImageDataModule": "images",
    "TinyImageNetDataModule": "tiny_imagenet",
}

__all__ = [
    "CIFARDataModule",
    "DataFileError",
    "DigitsDataModule",
    "IDXDataModule",
    "ImageDataModule",
    "ScannedTomographyDataModule",
    "TinyImageNetDataModule",
    "TomographyDataModule",
    "TomographyProblem",
]

if TYPE_CHECKING:
    from tu_symmetry.datamodules.images import CIFARDataModule, DigitsDataModule, IDXDataModule, ImageDataModule
    from tu_symmetry.datamodules.readers import DataFileError
    from tu_symmetry.datamodules.tiny_imagenet import TinyImageNetDataModule
    from tu_symmetry.datamodules.tomography import ScannedTomographyDataModule, TomographyDataModule, TomographyProblem
else:
    __getattr__, __dir__ = attach(__name__, _EXPORTS)
