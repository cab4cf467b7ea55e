"""Hardware and versions, as every report states them."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ["tu-symmetry", "torch", "torchvision", "pyro-ppl", "lightning", "torchmetrics"]
PACKAGES += ["scikit-learn", "scipy", "numpy"]


def describe_environment(device: torch.device) -> dict[str, str | int]:
    """Processor, cores in use, accelerator, and the versions of what the numbers depend on."""
    found: dict[str, str | int] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
