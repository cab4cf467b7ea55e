"""A network from the command line: the dotted name of what builds it, the shapes of its inputs, its symmetries."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.verification import verify_symmetries

_ELEMENTS = 1 << 28  # of an input: 1 GB in single precision


class ArchitectureError(ValueError):
    """No network, or no forward pass, comes of what was typed; the message says why."""


@dataclass(frozen=True)
class Architecture:
    """What was typed about a network.

    Attributes:
        model: dotted name of a class or function that returns a module (``torchvision.models.resnet50``).
        inputs: one ``1,3,224,224`` or ``1,16:long`` for each positional argument of ``forward``.
        init: ``KEY=VALUE`` arguments of ``model``.
        kwargs: ``KEY=VALUE`` keyword arguments of ``forward``; a value like ``1,16:bool`` is a tensor.
        dtype: of the module and of its floating-point inputs.
    """

    model: str
    inputs: tuple[str, ...]
    init: tuple[str, ...] = ()
    kwargs: tuple[str, ...] = ()
    dtype: str = "float32"
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)

    def discover(self, console: Console, *, verify: bool = True) -> SymmetryGraph:
        """Build the module, find its symmetries and verify them, saying on ``console`` what takes how long.

        Raises:
            ArchitectureError: the module cannot be built or called.
            SymmetryError: it cannot be traced, or a symmetry does not hold.
        """
        dtype = parse_precision(self.dtype)
        with _step(console, f"building {self.model}"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = build_module(self.model, self.init).to(dtype).eval()
        inputs = tuple(parse_input(text, dtype, self._generator) for text in self.inputs)
        kwargs = {k: self._keyword(v, dtype) for k, v in map(_split, self.kwargs)}
        with _step(console, "running it once"):
            self._run(module, inputs, kwargs)
        with _step(console, "discovering its symmetries"):
            graph = discover_symmetries(module, inputs, example_kwargs=kwargs)
        if verify:
            with _step(console, "verifying them in float64"):
                verify_symmetries(graph, module, inputs, example_kwargs=kwargs)
        return graph

    def _keyword(self, text: str, dtype: torch.dtype) -> Any:
        return parse_input(text, dtype, self._generator) if ":" in text else _literal(text)

    def _run(self, module: nn.Module, inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                module(*inputs, **kwargs)
        except Exception as error:
            shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs)
            raise ArchitectureError(
                f"the forward pass of {self.model} fails on inputs {shapes}: {type(error).__name__}: "
                f"{_first_line(error)}. Check --input (one for each positional argument, with its batch axis; integers "
                "as 1,16:long), --kwargs and --init"
            ) from error


def build_module(dotted: str, init: Sequence[str] = ()) -> nn.Module:
    """Call a class or function by its dotted name; ``weights=None`` is passed if it takes ``weights``.

    Args:
        dotted: ``package.module.name``.
        init: ``KEY=VALUE`` arguments; values are Python literals, anything else is a string.

    Raises:
        ArchitectureError: no such name, or what it returns is no module.
    """
    build = _find(dotted)
    arguments = {k: _literal(v) for k, v in map(_split, init)}
    if isinstance(build, nn.Module):
        if arguments:
            raise ArchitectureError(f"{dotted} is a module already, so --init has nothing to act on")
        return build
    if not callable(build):
        raise ArchitectureError(f"{dotted} is a {type(build).__name__}, not a class or function that builds a module")
    try:
        if "weights" in inspect.signature(build).parameters:
            arguments.setdefault("weights", None)
    except ValueError:  # builtins have no signature
        pass
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


def parse_dtype(name: str) -> torch.dtype:
    """``float32``, ``long``, ``bool``, ... as a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ArchitectureError(f"{name!r} is no dtype of torch; examples: float32, float64, long, bool")
    return dtype


def parse_precision(name: str) -> torch.dtype:
    """A dtype that networks can be in: ``float64``, ``float32``, ``bfloat16`` or ``float16``."""
    dtype = parse_dtype(name)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ArchitectureError(f"{name} is no dtype of a network here; use float64, float32, bfloat16 or float16")
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
    wanted = parse_dtype(name) if name else dtype
    try:
        if wanted.is_floating_point or wanted.is_complex:
            return torch.randn(shape, generator=generator, dtype=wanted)
        return torch.randint(2, shape, generator=generator).to(wanted)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ArchitectureError(f"{text!r}: torch makes no such input ({_first_line(error)})") from error


def _find(dotted: str) -> Any:
    parts = dotted.replace(":", ".").split(".")
    for cut in range(len(parts) - 1, 0, -1):
        package = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is not None and (package == error.name or package.startswith(error.name + ".")):
                continue
            raise ArchitectureError(f"importing {package} fails: {error}") from error
        except Exception as error:
            raise ArchitectureError(f"importing {package} fails: {type(error).__name__}: {error}") from error
        for k, name in enumerate(parts[cut:]):
            if not hasattr(found, name):
                where = ".".join(parts[: cut + k])
                raise ArchitectureError(f"{where} has no {name!r}; --model takes a dotted name that builds a module")
            found = getattr(found, name)
        return found
    raise ArchitectureError(
        f"there is no module {parts[0]!r} to take {dotted!r} from: install it, or run where it can be imported; "
        "--model takes a dotted name such as torchvision.models.resnet50"
    )


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ArchitectureError(f"{text!r} is not KEY=VALUE")
    return key, value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


class _step:
    """A spinner while something runs, then a line with its time."""

    def __init__(self, console: Console, text: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console, self.text, self.clock = console, text, clock

    def __enter__(self) -> None:
        self.started = self.clock()
        self.status = self.console.status(f"{self.text} ...")
        self.status.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self.status.stop()
        if kind is None:
            seconds = self.clock() - self.started
            self.console.print(f"[green]✓[/green] {self.text} [cyan]{seconds:.1f} s[/cyan]", highlight=False)
