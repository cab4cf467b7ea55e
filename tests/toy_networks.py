"""Networks, data and functions that command lines of the tests name: importable with ``tests/`` on the path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


class Net(nn.Sequential):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 3))


class Normed(nn.Sequential):
    """With batch normalization behind the first layer, and without behind the second."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, without locks."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: content for name, content in found.items() if not name.endswith(".lock")}


def loader() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))]


def raises() -> None:
    raise KeyError("x")


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


class Counted:
    """How many calls of a function are left before it raises :class:`Killed`, and how many there were."""

    def __init__(self) -> None:
        self.calls, self.used = 10**9, 0

    def while_alive(self, function: Any) -> Any:
        """The function, which does nothing any more once no call is left."""
        return lambda *args, **kwargs: function(*args, **kwargs) if self.calls > 0 else None


def counted(patch: pytest.MonkeyPatch, place: Any, name: str) -> Counted:
    """Kill in front of a call of a function: of the one that follows as many as ``calls`` says, and of all after it."""
    left, real = Counted(), getattr(place, name)

    def mortal(*args: Any, **kwargs: Any) -> Any:
        if left.calls <= 0:
            raise Killed
        left.calls -= 1
        left.used += 1
        return real(*args, **kwargs)

    patch.setattr(place, name, mortal)
    return left


def killed_at_any_write(run: Callable[[str], dict[str, bytes]]) -> dict[str, bytes]:
    """What a run leaves, by its name: also one that is killed in front of a rename, and run again.

    As after SIGKILL, nothing changes on the disk from then on.
    """
    with pytest.MonkeyPatch.context() as patch:
        left = counted(patch, os, "replace")
        expected = run("alone")
    for moment in range(left.used):
        with pytest.MonkeyPatch.context() as patch:
            mortal = counted(patch, os, "replace")
            mortal.calls = moment
            for place, name in ((Path, "unlink"), (os, "rmdir"), (os, "unlink")):
                patch.setattr(place, name, mortal.while_alive(getattr(place, name)))
            with pytest.raises(Killed):
                run(str(moment))
        assert run(str(moment)) == expected, moment
    return expected


class Blocks(nn.Module):
    """Blocks of which one has a second reader of the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(6, 4)}) for _ in range(3))
        self.blocks[1]["c"] = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            h = block["a"](x).relu()
            x = x + block["b"](h) + (block["c"](h) if "c" in block else 0.0)
        return x
