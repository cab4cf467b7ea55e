"""Modules that are written as text.

An entry is ``Name(inputs) words``, the parts of the module (lines of keywords: pairs are linear layers, lists shapes
of parameters, plain tensors buffers), and the lines of ``forward``, or else an expression. Inputs that are given by
their shapes are random.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def executed(source: str, name: str, space: dict[str, Any]) -> dict[str, Any]:
    """The names that a source defines, which tracebacks show."""
    file = f"<{name} {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = dict(space)
    exec(compile(source, file, "exec"), space)
    return space


class Made(nn.Module):
    """A module of parts, of which plain tensors are buffers, and pairs of numbers the sizes of linear layers."""

    parts: Callable[[], Mapping[str, Any]] = dict

    def __init__(self) -> None:
        super().__init__()
        self.hold(self.parts())

    def hold(self, parts: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            part = nn.Linear(*part) if isinstance(part, tuple) else part
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


@dataclass(frozen=True)
class Entry:
    name: str
    words: str
    build: Callable[[], nn.Module]
    given: dict[str, Any]

    def inputs(self, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "dtype": dtype}
        return tuple(torch.randn(i, **options) if isinstance(i, tuple) else i for i in self.given.values())


def entries(
    text: str, space: dict[str, Any], kinds: Mapping[str, tuple[str, list[str], list[str]]] | None = None
) -> Iterator[Entry]:
    """The entries of a text; the first of an entry's words may name a kind: its parts, and lines around ``forward``."""
    for source in re.split(r"\n(?=\w)", re.sub(r"(?m)^(#.*)?\n", "", text)):
        head, *lines = source.splitlines()
        match = re.fullmatch(r"(\w+)\((.*)\)(?: (.*))?", head.partition(" #")[0])
        assert match, head
        name, words = match[1], match[3] or ""
        common, first, last = (kinds or {}).get(words.partition(" ")[0], ("", [], []))
        given = eval(f"dict({match[2]})", space)
        own = [line for line in lines if re.match(r" {4}\w+=[^=]", line)]
        body = [*first, *lines[len(own) :], *last]
        if any("return" in line for line in body):
            forward = executed("\n".join([f"def forward(self, {', '.join(given)}):", *body]), name, space)["forward"]
            parts = partial(parts_of, (common, " ".join(own)), space)
            build = type(name, (Made,), {"forward": forward, "parts": staticmethod(parts)})
        else:
            build = partial(eval, "".join(body), space)
        yield Entry(name, words, build, given)


def parts_of(texts: Iterable[str], space: dict[str, Any]) -> dict[str, Any]:
    found = [eval(f"dict({text})", space) for text in texts]
    return {name: parameter(part) for parts in found for name, part in parts.items()}


def parameter(part: Any) -> Any:
    """A parameter for the numbers of its shape, else the part as it is."""
    is_shape = isinstance(part, list) and all(isinstance(size, int) for size in part)
    return nn.Parameter(torch.randn(part)) if is_shape else part
