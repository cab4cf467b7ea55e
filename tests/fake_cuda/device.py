"""A CUDA device without a GPU, for the CUDA build of PyTorch on Linux.

:func:`start`, called before torch is imported, puts a fake CUDA runtime in front of the real one (``runtime.c``: device
memory is host memory), and replaces the CUDA kernels of all ATen operators (``kernels.cpp``) by: check that the
tensors' devices agree as CUDA does, run the CPU kernel on the same memory. All else of PyTorch's CUDA support is the
real one: ``torch.cuda``, the caching allocator and its statistics, generators, streams, Lightning's GPU accelerator. So
code that mixes devices, draws with the wrong generator, or reads ``.numpy()`` of a device tensor fails here as it does
on a GPU, and waits for the device (``.item()``, ``nonzero``, copies to the host) are counted. What it cannot show:
speed, numbers of real kernels (TF32, cuDNN), and kernels that are written in Triton or CUDA.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "fake_cuda"
_FLAGS = ["-O1", "-shared", "-fPIC", "-w"]

_kernels: Any = None


class NoFakeDevice(Exception):
    """This machine cannot have a fake CUDA device; the message says why."""


def real_device() -> bool:
    """Whether the machine has an NVIDIA driver, so that nothing need be faked."""
    return Path("/dev/nvidiactl").exists()


def build() -> Path:
    """Compile the libraries for the installed torch, unless that has been done; return their folder.

    Raises:
        NoFakeDevice: another system than Linux, no compiler, or a torch without CUDA.
    """
    if sys.platform != "linux":
        raise NoFakeDevice(f"the fake CUDA device is for Linux, and this is {sys.platform}")
    lacking = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    if lacking:
        raise NoFakeDevice(f"the fake CUDA device is compiled, and there is no {' and no '.join(lacking)}")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoFakeDevice("torch is not installed")
    torch = Path(spec.origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        raise NoFakeDevice("the installed torch was built without CUDA; the fake CUDA device needs the CUDA build")
    headers = [  # triton ships CUDA's
        found.parents[1]
        for folder in (torch.parent / "triton/backends/nvidia/include", torch.parent / "nvidia")
        for found in sorted(folder.glob("**/crt/host_defines.h"))
    ]
    if not headers:
        raise NoFakeDevice("no CUDA headers: neither triton nor an nvidia package that has them is installed")
    sources = [HERE / name for name in ("driver.c", "runtime.c", "kernels.cpp")]
    parts = [importlib.metadata.version("torch"), sys.version, *(source.read_text() for source in sources)]
    folder = BUILD / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    made = folder.with_name(f"{folder.name}.{os.getpid()}")
    made.mkdir(parents=True)
    driver, runtime, kernels = map(str, sources)
    folders = (sysconfig.get_paths()["include"], torch / "include", torch / "include/torch/csrc/api/include")
    include = [f"-I{path}" for path in folders]
    link = [f"-L{torch}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"]
    commands = [
        ["gcc", *_FLAGS, driver, "-Wl,-soname,libcuda.so.1", "-o", f"{made}/libcuda.so.1"],
        ["gcc", *_FLAGS, f"-I{headers[0]}", runtime, "-ldl", "-lpthread", "-o", f"{made}/libfakecudart.so"],
        ["g++", *_FLAGS, "-std=c++20", *include, kernels, *link, "-o", f"{made}/libfakekernels.so"],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(made)
            raise NoFakeDevice(f"the fake CUDA device does not compile with this torch ({parts[0]}):\n{done.stderr}")
    try:
        made.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return folder


def start() -> None:
    """Put the fake device in place; torch may not have been imported yet.

    Raises:
        NoFakeDevice: see :func:`build`.
    """
    global _kernels
    if _kernels is not None:
        return
    if "torch" in sys.modules:
        raise RuntimeError("fake_cuda.device.start() was called after torch was imported; call it first")
    folder = build()
    for name in ("libcuda.so.1", "libfakecudart.so"):
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401
    import torchvision  # noqa: F401 - its operators are replaced, too

    _kernels = ctypes.PyDLL(str(folder / "libfakekernels.so"))
    _kernels.fake_cuda_counts.restype = ctypes.c_char_p
    from fake_cuda import operators

    stderr = os.dup(2)  # the dispatcher warns of each kernel that is replaced
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            _kernels.fake_cuda_register(*operators.lists())
            operators.register()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def counts() -> dict[str, int]:
    """Kernels so far: by operator, ``total``, and ``sync`` (waits)."""
    lines = _kernels.fake_cuda_counts().decode().splitlines()
    return {name: int(number) for name, number in (line.rsplit(" ", 1) for line in lines)}
