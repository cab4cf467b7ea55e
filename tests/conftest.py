"""What every test relies on: the number of threads of each process, and no windows."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its pools
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

SAMPLE = int(os.environ.get("TU_SYMMETRY_SAMPLE", "0"))


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_report_header() -> str:
    return f"sample {SAMPLE} of the large suites (TU_SYMMETRY_SAMPLE)"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One in n of the tests marked ``sampled(n)`` is fast, by its name and the sample's number; all others are slow."""
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and (zlib.crc32(item.nodeid.encode()) + SAMPLE) % mark.args[0]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator: tests share no random state."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A CUDA device, real or fake (`make test-device`); tests that ask for it skip where there is none.

    Convolutions are those of float32 there, without TF32, so that results are comparable with the CPU's.
    """
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; `make test-device` runs this on a fake one")
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield torch.device("cuda", 0)
    torch.backends.cudnn.allow_tf32 = allowed
