"""A pytest plugin: trainers that tests make for the CPU take a CUDA device, the machine's own or else a fake one.

From the root of the project, ``PYTHONPATH=tests python -m pytest -p fake_cuda.plugin tests/callbacks``. Tests that ask
for the fixture ``cuda`` run as well, which skip where there is no device.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda import device

_lacking: str | None = None
try:  # here, before a conftest.py imports torch
    if not device.real_device():
        device.start()
except device.NoFakeDevice as reason:
    _lacking = str(reason)


def pytest_configure(config: pytest.Config) -> None:
    if _lacking is not None:
        pytest.exit(f"nothing was run, for there is no CUDA device and no fake one: {_lacking}", returncode=0)
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector as Connector

    connect = Connector.__init__

    def connected(self: Any, *, accelerator: Any = "auto", strategy: Any = "auto", devices: Any = "auto", **more: Any):
        if accelerator == "cpu" and strategy == "auto" and devices in (1, "1", "auto"):
            accelerator = "cuda"
        connect(self, accelerator=accelerator, strategy=strategy, devices=devices, **more)

    Connector.__init__ = connected  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip("random numbers of the CPU, or tensors that the fake device lacks"))
