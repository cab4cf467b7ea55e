"""Room: data modules. LightningDataModules for image sets that fit in memory, which TorchUncertainty lacks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS: dict[str, str] = {
    "CIFARDataModule": "images",
    "DataFileError": "readers",
    "DigitsDataModule": "images",
    "IDXDataModule": "images",
    "ImageDataModule": "images",
}

__all__ = ["CIFARDataModule", "DataFileError", "DigitsDataModule", "IDXDataModule", "ImageDataModule"]

if TYPE_CHECKING:
    from tu_symmetry.datamodules.images import CIFARDataModule, DigitsDataModule, IDXDataModule, ImageDataModule
    from tu_symmetry.datamodules.readers import DataFileError


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"tu_symmetry.datamodules.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tu_symmetry.datamodules' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
