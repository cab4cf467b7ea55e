"""Tests that need a CUDA device, the machine's own or a fake one; those that count waits need the fake one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> None:
    """Skip where there is no device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; `make test-device` runs this on a fake one")


@pytest.fixture
def waits() -> Callable[[Callable[[], object]], int]:
    """How often the host waits for the device while a function runs."""
    fake: Any = sys.modules.get("fake_cuda.device") or sys.modules.get("fake_device")
    if fake is None or getattr(fake, "_kernels", fake) is None:
        pytest.skip("waits are counted on the fake CUDA device: `make test-device`")

    def counted(function: Callable[[], object]) -> int:
        before = fake.counts().get("sync", 0)
        function()
        return int(fake.counts().get("sync", 0) - before)

    return counted
