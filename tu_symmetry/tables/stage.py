"""A stage: one step of a table, as a function of its options and of what a run gives it."""

from __future__ import annotations

import typing
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tu_symmetry.configs import ConfigError, resolve
from tu_symmetry.reporting.progress import Tracker
from tu_symmetry.tables.recipe import TableConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tu_symmetry.symmetry.graph import SymmetryGraph
    from tu_symmetry.tables.data import Data

KINDS: dict[str, str] = {
    "rebasin_members": "tu_symmetry.tables.barriers:train_members",
}

Results = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """An earlier stage, as a later one sees it: its folder of files, and its results."""

    folder: Path
    results: Mapping[str, Any]


@dataclass
class StageContext:
    """What a stage works with.

    Attributes:
        name: of the stage.
        table: the whole table's config.
        data: the data, resident on ``device``.
        device: where to compute.
        folder: where the stage writes its files. It is renamed when the stage is done; after an interruption the
            stage finds there what it had written, and resumes from that.
        inputs: role to earlier stage.
        track: ``with context.track("what", total) as tracker`` shows a progress bar.
        environment: hardware and versions.
        data_root: folder of data sets, for stages that read others than the table's.
    """

    name: str
    table: TableConfig
    data: Data
    device: torch.device
    folder: Path
    inputs: dict[str, Input]
    track: Callable[[str, int], AbstractContextManager[Tracker]]
    environment: Mapping[str, Any] = field(default_factory=dict)
    data_root: Path = Path("data")

    def seed(self, purpose: str = "") -> int:
        """A seed that depends on the table's seed, the stage and the purpose only."""
        return zlib.crc32(f"{self.table.seed}/{self.name}/{purpose}".encode())

    def generator(self, purpose: str = "", device: str | torch.device = "cpu") -> torch.Generator:
        """A generator seeded with :meth:`seed`."""
        import torch

        return torch.Generator(device).manual_seed(self.seed(purpose))

    @cached_property
    def model(self) -> nn.Module:
        """The table's module on the device, initialized by the stage's seed."""
        import torch

        from tu_symmetry.tables.models import build_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed("initialization"))
            return build_model(self.table.model, self.data).to(self.device)

    @cached_property
    def graph(self) -> SymmetryGraph:
        """The module's symmetry graph, discovered and verified."""
        from tu_symmetry.symmetry.discovery import discover_symmetries

        graph = discover_symmetries(self.model, self.data.train_x[:2])
        graph.require_verified()
        return graph


@dataclass(frozen=True)
class StageKind:
    """A stage function with its options dataclass and what :func:`stage` declared of it."""

    run: Callable[[StageContext, Any], Results]
    options: type[Any]
    inputs: tuple[str, ...]
    version: int
    reads_table: bool


def stage(
    *, inputs: tuple[str, ...] = (), version: int = 1, reads_table: bool = False
) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Declare a function ``(context: StageContext, options: Options) -> results`` as a stage.

    Args:
        inputs: the roles that the recipe has to connect to earlier stages; a role ending in ``?`` is optional.
        version: raise it when the function's results change; runs made with another version are made again.
        reads_table: whether the results depend on the table's title, note and paper's numbers too (reports).
    """

    def declare(function: Callable[..., Results]) -> Callable[..., Results]:
        function.stage_kind = (inputs, version, reads_table)  # type: ignore[attr-defined]
        return function

    return declare


def stage_kind(name: str) -> StageKind:
    """The kind of stage that a recipe names.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name not in KINDS and ":" not in name:
        raise ConfigError(f"unknown stage {name!r}; there are {', '.join(KINDS)}, or 'module:function' of your own")
    function = resolve(KINDS.get(name, name))
    if not hasattr(function, "stage_kind"):
        raise ConfigError(f"{name!r} is no stage: declare the function with @stage()")
    inputs, version, reads_table = function.stage_kind
    hints = typing.get_type_hints(function)
    options = next(hint for key, hint in hints.items() if key == "options")
    return StageKind(function, options, inputs, version, reads_table)
