"""A plugin of pytest that makes one machine round, read, order and warn as others do.

``python -m pytest -p tests.portability`` takes any of these options:

- ``--perturb-products``: every matrix product and convolution with a factor that does not lie on 64 bytes is off by two
  units in the last place, as vector instructions of another width would make it. What is promised bit for bit has to
  compute with the same memory layout; all else needs a tolerance.
- ``--perturb-shapes``: every one is, by the shapes and strides of its factors, which choose the order of sums. Whole
  numbers stay, since they round nowhere.
- ``--displace-files``: what the safetensors library reads lies 8 bytes off 64, as most of a file does.
- ``--shuffle=SEED``: modules, and tests within them, in random order.
- ``--warnings-are-errors``: but for the library's own, and for those of other libraries that pyproject.toml names.
"""

from __future__ import annotations

import random
import sys
import warnings
import zlib
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor

ALIGNED = 64
# operators of products, and where their factors stand
PRODUCTS = {
    "mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "dot": (0, 1), "addmv": (1, 2),
    "convolution": (0, 1), "convolution_backward": (0, 1, 2),
}  # fmt: skip
IN_PLACE = ("addmm", "baddbmm", "addmv")
OPEN = safetensors.safe_open
_KEPT: list[Any] = []  # a library that is collected takes its kernels away


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("portability")
    for option in ("--perturb-products", "--perturb-shapes", "--displace-files", "--warnings-are-errors"):
        group.addoption(option, action="store_true")
    group.addoption("--shuffle", type=int, metavar="SEED")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.perturb_products or config.option.perturb_shapes:
        perturb_products(every=config.option.perturb_shapes)
    if config.option.displace_files:
        displace_files()
    if config.option.warnings_are_errors:
        sys.warnoptions.append("default")  # where there is none, pytest shows deprecations, whatever the filters say
        warnings.simplefilter("error")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """What the library itself says of data and results is no defect: tests that are about it ask for it."""
    if session.config.option.warnings_are_errors:
        kinds = [Warning]
        while kinds:
            kind = kinds.pop()
            kinds += kind.__subclasses__()
            if kind.__module__.startswith("tu_symmetry."):
                warnings.simplefilter("default", kind)


@pytest.hookimpl(trylast=True)  # after tests that nobody asked for are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffle is None:
        return
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    generator, groups = random.Random(config.option.shuffle), list(modules.values())
    generator.shuffle(groups)
    for group in groups:
        generator.shuffle(group)
    items[:] = [item for group in groups for item in group]


def displaced(tensor: Tensor) -> Tensor:
    """A copy that lies 8 bytes (or one number, of wide ones) off 64."""
    skipped = max(1, 8 // tensor.element_size())
    moved = torch.empty(tensor.numel() + skipped, dtype=tensor.dtype)[skipped:]
    return moved.view(tensor.shape).copy_(tensor)


def odd(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return False
    try:
        return tensor.data_ptr() % ALIGNED != 0
    except RuntimeError:  # inside a function transform, which wraps what has the memory
        return False


def perturb(result: Any, factors: list[Tensor] | None) -> None:
    if isinstance(result, tuple):
        for part in result:
            perturb(part, factors)
    elif isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
        layout = repr([(tuple(factor.shape), factor.stride()) for factor in factors or ()])
        generator = torch.Generator().manual_seed(result.numel() + zlib.crc32(layout.encode()))
        units = torch.randint(0, 2, result.shape, generator=generator, dtype=torch.float64).mul_(4).sub_(2)
        if factors and not result.is_complex():
            units.mul_(result != result.round())
        result.mul_((units * torch.finfo(result.dtype).eps + 1).to(result.dtype))


def perturb_products(*, every: bool = False) -> None:
    """Put kernels before torch's own, on the CPU: below automatic differentiation, ``torch.func`` and tracing."""
    library = torch.library.Library("aten", "IMPL")
    _KEPT.append(library)
    kinds = {name: ("", ".out", "_")[: 3 if name in IN_PLACE else 2] for name in PRODUCTS}
    kinds |= {name: ("",) for name in PRODUCTS if name.startswith("convolution")}
    for name, places in PRODUCTS.items():
        for kind in kinds[name]:
            kernel = perturbed(torch.library.get_kernel(f"aten::{name}{kind}", "CPU"), name, places, every)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a kernel is replaced
                library.impl(f"{name}{kind}", kernel, "CPU", with_keyset=True, allow_override=True)


def perturbed(original: Any, name: str, places: tuple[int, ...], every: bool) -> Any:
    inner = not name.startswith("convolution")

    def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.call_boxed(keys, *args, **kwargs)
        single = inner and args[places[0]].shape[-1] == 1  # nothing is added up: rounded alike everywhere
        factors = [args[place] for place in places]
        if not single and (every or any(odd(factor) for factor in factors)):
            perturb(result, factors if every else None)
        return result

    return product


class Opened:
    """``safetensors.safe_open``, or a slice of it, with tensors that lie elsewhere."""

    def __init__(self, *args: Any, inner: Any = None, **kwargs: Any) -> None:
        self.inner = inner or OPEN(*args, **kwargs)

    def __enter__(self) -> Opened:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, index: Any) -> Tensor:
        return displaced(self.inner[index])

    def get_tensor(self, name: str) -> Tensor:
        return displaced(self.inner.get_tensor(name))

    def get_slice(self, name: str) -> Opened:
        return Opened(inner=self.inner.get_slice(name))


def displace_files() -> None:
    """Before anything has imported the function by its name."""
    early = [name for name, module in sys.modules.items() if getattr(module, "safe_open", None) is OPEN]
    for name in early:
        setattr(sys.modules[name], "safe_open", Opened)  # noqa: B010
