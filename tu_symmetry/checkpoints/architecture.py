"""A network from the command line: the dotted name of what builds it, the shapes of its inputs, its symmetries."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from tu_symmetry.configs import ConfigError, parse_assignments, resolve
from tu_symmetry.files import SUFFIXES
from tu_symmetry.memory import give_back
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.tracing import batch_axis_missing

_ELEMENTS = 1 << 28  # at most in an input: 1 GB in single precision


class ArchitectureError(ValueError):
    """No network, or no forward pass, comes of what was typed; the message says why."""


@dataclass(frozen=True)
class Architecture:
    """What was typed about a network; see the help of ``tu-symmetry inspect``."""

    model: str
    inputs: Sequence[str]
    init: Sequence[str] = ()
    dtype: torch.dtype = torch.float32
    narrow: Sequence[str] = ()

    def build(self) -> nn.Module:
        """The module, with random weights; ``weights=None`` is passed to what takes ``weights``.

        With ``narrow`` arguments its parameters are on the meta device, and have no values.
        """
        with torch.random.fork_rng(devices=[]), _without_weights() if self.narrow else nullcontext():
            torch.default_generator.manual_seed(0)  # that of the CPU, which alone is put back
            return _build(self.model, self.init).to(self.dtype)

    def discover(self, console: Console) -> SymmetryGraph:
        """Build the module and find its symmetries, saying on ``console`` what takes how long."""
        with step(console, f"building {self.model}"):
            module = self.build().eval()
        generator = torch.Generator().manual_seed(0)
        inputs = tuple(parse_input(text, self.dtype, generator) for text in self.inputs)
        if self.narrow:
            return self._discover_wide(module, inputs, console)
        with step(console, "running it once"):
            self._run(module, inputs)
        with step(console, "discovering its symmetries"):
            return discover_symmetries(module, inputs)

    def _discover_wide(self, module: nn.Module, inputs: tuple[Tensor, ...], console: Console) -> SymmetryGraph:
        """The symmetries of a network without weights, which are verified on a narrow one with the same tensors."""
        narrow = replace(self, init=(*self.init, *self.narrow), narrow=(), dtype=torch.float32).discover(console)
        with step(console, "discovering its symmetries"):
            graph = discover_symmetries(module, inputs)
        if graph.aliases != narrow.aliases:
            raise ArchitectureError(
                f"the network of --narrow {' '.join(self.narrow)} has tensors of other names than {self.model}; change "
                "widths alone, and no number of layers"
            )
        give_back()  # what follows goes tensor by tensor
        return replace(graph, narrow=narrow)

    def _run(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                module(*inputs)
        except Exception as error:
            shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs)
            if batch_axis_missing(module, inputs, {}):
                typed = " ".join(f"--input 1,{text}" for text in self.inputs)
                raise ArchitectureError(
                    f"batch axis missing? The forward pass of {self.model} fails on inputs {shapes}, and runs with "
                    f"{typed}"
                ) from error
            raise ArchitectureError(
                f"the forward pass of {self.model} fails on inputs {shapes}: {type(error).__name__}: "
                f"{_first_line(error)}. Check --input (one for each positional argument, with its batch axis; integers "
                "as 1,16:long) and --init"
            ) from error


@contextmanager
def _without_weights() -> Iterator[None]:
    """Parameters that are made within the block go to the meta device at once; buffers keep their values."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _build(dotted: str, init: Sequence[str]) -> nn.Module:
    arguments = parse_assignments(init, "--init")
    if Path(dotted).is_file() or dotted.endswith(SUFFIXES):
        raise ArchitectureError(
            f"{dotted} is a checkpoint, and a checkpoint is no architecture: it holds weights, not what computes with "
            "them. --model takes the dotted name of the class or function that builds the network, for example "
            "torchvision.models.resnet50; `tu-symmetry align` and `merge` take checkpoints beside it"
        )
    try:
        build = resolve(dotted)
    except ConfigError as error:
        raise ArchitectureError(f"{error}; --model takes a dotted name such as torchvision.models.resnet50") from error
    with suppress(ValueError, TypeError):  # builtins have no signature
        if "weights" in inspect.signature(build).parameters:
            arguments.setdefault("weights", None)
    try:
        module = build(**arguments)
    except Exception as error:
        raise ArchitectureError(
            f"{dotted}({', '.join(f'{k}={v!r}' for k, v in arguments.items())}) fails: {type(error).__name__}: "
            f"{_first_line(error)}. Pass its arguments with --init KEY=VALUE"
        ) from error
    if not isinstance(module, nn.Module):
        raise ArchitectureError(f"{dotted} returns a {type(module).__name__}, not a torch.nn.Module")
    return module


def parse_precision(name: str) -> torch.dtype:
    """A dtype that networks can be in: ``float64``, ``float32``, ``bfloat16`` or ``float16``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ArchitectureError(f"{name!r} is no dtype of a network; use float64, float32, bfloat16 or float16")
    return dtype


def parse_input(text: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A random tensor from ``1,3,224,224`` (standard normal) or ``1,16:long`` (zeros and ones)."""
    sizes, colon, name = text.partition(":")
    try:
        shape = tuple(int(s) for s in sizes.split(",") if s.strip())
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1 or (colon and not name):
        raise ArchitectureError(f"{text!r} is no shape: write positive sizes as 1,3,224,224, or 1,16:long for integers")
    if math.prod(shape) > _ELEMENTS:
        raise ArchitectureError(f"{text!r} has more than {_ELEMENTS} elements; a small batch of small inputs is enough")
    wanted = getattr(torch, name, None) if name else dtype
    if not isinstance(wanted, torch.dtype):
        raise ArchitectureError(f"{name!r} is no dtype of torch; examples: float32, float64, long, bool")
    try:
        if wanted.is_floating_point or wanted.is_complex:
            return torch.randn(shape, generator=generator, dtype=wanted, device="cpu")
        return torch.randint(2, shape, generator=generator, device="cpu").to(wanted)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ArchitectureError(f"{text!r}: torch makes no such input ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


@contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """A spinner while something runs, then a line with its time."""
    started = time.perf_counter()
    with console.status(f"{text} ..."):
        yield
    seconds = time.perf_counter() - started
    console.print(f"[green]✓[/green] {text} [cyan]{seconds:.1f} s[/cyan]", highlight=False)
