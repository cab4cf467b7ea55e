"""What callbacks that act on a network by its symmetries share: which network, its graph, and who does the work."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from tu_symmetry.callbacks.members import (
    ModuleSource,
    as_input,
    check_same_architecture,
    copy_of,
    example_from,
    find_members,
    mirrored_modules,
    require_whole_weights,
    swag_statistics,
)
from tu_symmetry.callbacks.schedule import ScheduledCallback
from tu_symmetry.symmetry.certificate import UncertifiedWarning
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph

T = TypeVar("T")


class SymmetryCallback(ScheduledCallback):
    """Acts on networks by their symmetries, at an interval, without touching the global random streams.

    The networks are found and compared before the first step; the symmetries are discovered when training starts, or
    with the first batch. Rank 0 computes and tells the others. What is logged begins with ``prefix``.

    Args:
        members: where the networks are: an attribute path or a callable of the LightningModule. Default: the
            ``core_models`` of TorchUncertainty's deep ensembles, else the routine's ``model`` without averaging
            wrappers, else its only submodule with weights.
        every_n_epochs, every_n_steps, at_end: see :class:`~tu_symmetry.callbacks.schedule.ScheduledCallback`.
        in_place: change the networks themselves, with everything that belongs to their weights.
        graph: the networks' symmetry graph. Default: it is discovered with the LightningModule's
            ``example_input_array``, or else with the first batch of training (its first tensor).
    """

    least_networks: ClassVar[int] = 1
    prefix: ClassVar[str]

    def __init__(
        self,
        members: ModuleSource | None = None,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        at_end: bool = True,
        in_place: bool = False,
        graph: SymmetryGraph | None = None,
    ) -> None:
        self._given_graph = graph
        super().__init__(every_n_epochs=every_n_epochs, every_n_steps=every_n_steps, at_end=at_end)
        self.members, self.in_place = members, in_place

    @abstractmethod
    def check_graph(self, graph: SymmetryGraph, network: nn.Module) -> None:
        """Raise a ``SymmetryError`` if there is nothing to do for a network with these symmetries."""

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self.graph: SymmetryGraph | None = self._given_graph
        self.history: list[dict[str, Any]] = []
        self._noticed = False

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule, and the history."""
        return super().state_dict() | {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume with the schedule and the history of a checkpoint."""
        super().load_state_dict(state_dict)
        self.history = list(state_dict["history"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that can be checked before the first step."""
        require_whole_weights(trainer)
        check_same_architecture(self.networks(pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discover the symmetries if an input is known."""
        given = pl_module.example_input_array
        if isinstance(given, Mapping):
            raise TypeError("example_input_array is a dictionary; make it the tuple of the network's arguments")
        if self.graph is None and given is not None:
            self._discover(pl_module, tuple(given) if isinstance(given, (tuple, list)) else (given,))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discover the symmetries with the first batch, if no input was given."""
        if self.graph is None:
            self._discover(pl_module, example_from(batch))

    def networks(self, pl_module: LightningModule) -> list[nn.Module]:
        """The networks that this callback acts on."""
        return find_members(pl_module, self.members, least=self.least_networks)

    def known_graph(self) -> SymmetryGraph:
        """The symmetries, once training has seen an input."""
        if self.graph is None:
            raise ValueError("no training batch was seen: set example_input_array in the LightningModule")
        return self.graph

    def followers(self, trainer: Trainer, pl_module: LightningModule, network: nn.Module) -> dict[str, Any]:
        """Averages, SWAG statistics and optimizers that follow one network's weights: arguments of the movers."""
        return {
            "mirrors": list(mirrored_modules(trainer, pl_module, network)),
            "swag": list(swag_statistics(pl_module, network)),
            "optimizers": list(trainer.optimizers),
        }

    def on_rank_zero(self, trainer: Trainer, compute: Callable[[], T]) -> T:
        """Compute on rank 0 and tell the others; an error there is raised everywhere, so that no rank waits forever."""
        found: T | Exception | None = None
        if trainer.is_global_zero:
            try:
                found = compute()
            except Exception as error:
                if trainer.world_size == 1:
                    raise
                found = error
        found = trainer.strategy.broadcast(found, src=0)
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found

    def say_uncertified(self, why: str) -> None:
        """Warn, once in a run, that what is done to the weights is not measured."""
        if not self._noticed:
            self._noticed = True
            warnings.warn(f"{type(self).__name__} is not certified: {why}", UncertifiedWarning, stacklevel=3)

    def log_record(
        self, trainer: Trainer, pl_module: LightningModule, record: Mapping[str, Any], hook: str, *, first: int | None
    ) -> None:
        """Means over the networks, and each by its number from ``first`` on, to all loggers and to other callbacks."""
        scalars: dict[str, float] = {}
        for key, values in record.items():
            if isinstance(values, list):
                scalars[f"{self.prefix}/{key}"] = sum(values) / len(values)
                if first is not None:
                    scalars |= {f"{self.prefix}/{key}_{i}": float(v) for i, v in enumerate(values, first)}
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({**scalars, "epoch": trainer.current_epoch}, step=trainer.global_step)
                logger.save()
        # Lightning logs nothing at the end of training; what is logged here goes to other callbacks only.
        if hook in ("step", "epoch"):
            pl_module.log_dict(
                dict(scalars), logger=False, on_step=hook == "step", on_epoch=hook == "epoch", sync_dist=True
            )

    def _discover(self, pl_module: LightningModule, example: tuple[Any, ...]) -> None:
        network = self.networks(pl_module)[0]
        copied = copy_of(network).to(device="cpu")
        if any(t.dtype in (torch.float16, torch.bfloat16) for t in copied.state_dict().values()):
            copied = copied.to(torch.float32)
        dtype = next((p.dtype for p in copied.parameters()), torch.float32)
        with isolate_rng(include_cuda=False):
            graph = discover_symmetries(copied, tuple(as_input(x, dtype) for x in example))
            graph.require_verified()
        self.check_graph(graph, network)
        self.graph = graph
