"""Run a module (``-m NAME ...``) or a script on the fake CUDA device; see :mod:`fake_cuda.device`."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path

from fake_cuda import device

device.start()
if kind := os.environ.get("FAKE_CUDA_WATCH"):
    device.watch(kind == "all")
    atexit.register(device.report)
if sys.argv[1] == "-m":
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
