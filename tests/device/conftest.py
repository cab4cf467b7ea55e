"""Tests that need a CUDA device, real kernels or not; what they count needs the fake one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def fake_device() -> Any:
    """The fake CUDA device, which has to be there before torch is imported."""
    if "fake_device" not in sys.modules:
        pytest.skip("needs the fake CUDA device: make test-device")
    return sys.modules["fake_device"]


@pytest.fixture
def waits(fake_device: Any) -> Callable[[Callable[[], object]], int]:
    """How often the host waits for the device while a function runs."""

    def counted(function: Callable[[], object]) -> int:
        before = fake_device.counts().get("sync", 0)
        function()
        return int(fake_device.counts().get("sync", 0) - before)

    return counted
