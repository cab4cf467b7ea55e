"""What callbacks that act on a network by its symmetries share: which network, its graph, and who does the work."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

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
from tu_symmetry.symmetry.in_place import Followers

T = TypeVar("T")


class SymmetryCallback(ScheduledCallback):
    """Acts on networks by their symmetries, at an interval, without touching the global random streams.

    The networks are found and compared before the first step; the symmetries are discovered when training starts, or
    with the first batch. Rank 0 computes and tells the others.

    Args:
        members: where the networks are: an attribute path or a callable of the LightningModule. Default: the
            ``core_models`` of TorchUncertainty's deep ensembles, else the routine's ``model`` without averaging
            wrappers, else its only submodule with weights.
        every_n_epochs: act at the end of every n-th epoch.
        every_n_steps: act after every n-th optimizer step.
        at_end: act when training ends.
        in_place: change the networks themselves, with everything that belongs to their weights.
        example_input: an input of one network, to discover the symmetries with. Default: the LightningModule's
            ``example_input_array``, else the first batch of training (its first tensor).
        graph: the networks' symmetry graph, instead of discovering it.
        prefix: first part of the logged names.
    """

    least_networks = 1

    def __init__(
        self,
        members: ModuleSource | None = None,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        at_end: bool = True,
        in_place: bool = False,
        example_input: Tensor | tuple[Any, ...] | None = None,
        graph: SymmetryGraph | None = None,
        prefix: str,
    ) -> None:
        self._given_graph = graph
        super().__init__(every_n_epochs=every_n_epochs, every_n_steps=every_n_steps, at_end=at_end)
        self.members, self.in_place, self.example_input, self.prefix = members, in_place, example_input, prefix

    @abstractmethod
    def check_graph(self, graph: SymmetryGraph, network: nn.Module) -> None:
        """Raise a ``SymmetryError`` if there is nothing to do for a network with these symmetries."""

    @property
    def state_key(self) -> str:
        """Several of these callbacks can live in one trainer if their prefixes differ."""
        return self._generate_state_key(prefix=self.prefix)

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self.graph: SymmetryGraph | None = self._given_graph
        self.history: list[dict[str, Any]] = []
        self._seen_input: tuple[Any, ...] | None = None
        self._noticed = False

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule, the history, and the example input."""
        return super().state_dict() | {"history": self.history, "example_input": self._seen_input}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume with the schedule, the history and the example input of a checkpoint."""
        super().load_state_dict(state_dict)
        self.history = list(state_dict["history"])
        self._seen_input = state_dict["example_input"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that can be checked before the first step."""
        require_whole_weights(trainer)
        check_same_architecture(self.networks(pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discover the symmetries if an input is known."""
        if self._example(pl_module) is not None:
            self._discover(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discover the symmetries with the first batch, if no input was given."""
        if self.graph is None:
            self._seen_input = example_from(batch)
            self._discover(pl_module)

    def networks(self, pl_module: LightningModule) -> list[nn.Module]:
        """The networks that this callback acts on."""
        return find_members(pl_module, self.members, least=self.least_networks)

    def followers(self, trainer: Trainer, pl_module: LightningModule, network: nn.Module) -> Followers:
        """Averages, SWAG statistics and optimizers that have to follow the weights of one network in place."""
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

    def log_scalars(
        self, trainer: Trainer, pl_module: LightningModule, scalars: Mapping[str, float], hook: str
    ) -> None:
        """Plain scalars to every logger of the trainer, and to other callbacks, which can monitor them."""
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({**scalars, "epoch": trainer.current_epoch}, step=trainer.global_step)
                logger.save()
        # Lightning logs nothing at the end of training; what is logged here goes to other callbacks only.
        if hook in ("step", "epoch"):
            pl_module.log_dict(
                dict(scalars), logger=False, on_step=hook == "step", on_epoch=hook == "epoch", sync_dist=True
            )

    def _example(self, pl_module: LightningModule) -> tuple[Any, ...] | None:
        given = self.example_input if self.example_input is not None else pl_module.example_input_array
        if given is None:
            return self._seen_input
        if isinstance(given, Mapping):
            raise TypeError(
                f"example_input_array is a dictionary; give {type(self).__name__}(example_input=...) a tensor, or the "
                "tuple of positional arguments of the network's forward"
            )
        return tuple(given) if isinstance(given, (tuple, list)) else (given,)

    def _discover(self, pl_module: LightningModule) -> SymmetryGraph:
        if self.graph is not None:
            return self.graph
        network = self.networks(pl_module)[0]
        example = self._example(pl_module)
        if example is None:
            raise ValueError(
                "no example input to discover the symmetries with: no training batch was seen; give "
                f"{type(self).__name__}(example_input=...), or set example_input_array in the LightningModule"
            )
        copied = copy_of(network).to(device="cpu")
        if any(t.dtype in (torch.float16, torch.bfloat16) for t in copied.state_dict().values()):
            copied = copied.to(torch.float32)
        dtype = next((p.dtype for p in copied.parameters()), torch.float32)
        with isolate_rng(include_cuda=False):
            graph = discover_symmetries(copied, tuple(as_input(x, dtype) for x in example))
            graph.require_verified()
        self.check_graph(graph, network)
        self.graph = graph
        return graph
