"""What callbacks that act on a network by its symmetries share: which network, its graph, and who does the work.

A subclass says how it acts (:meth:`~SymmetryCallback.act`) and what it needs of the symmetries
(:meth:`~SymmetryCallback.check_graph`). Everything around it is here, once::

    setup                 a new run starts with an empty history (ScheduledCallback)
    on_fit_start          the networks are found and compared; what cannot be done is refused before the first step
    on_train_start        the symmetries are discovered, if an example input is known,
    on_train_batch_start  else with the first batch; two callbacks of one trainer on one network discover them once
    act                   rank 0 computes and tells the others; what belongs to the weights follows them in place
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

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
    resolve_modules,
    swag_statistics,
)
from tu_symmetry.callbacks.schedule import ScheduledCallback
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph

T = TypeVar("T")


class Followers(TypedDict):
    """What has to follow a network's weights: arguments of ``permute_in_place`` and ``scale_in_place``."""

    mirrors: list[nn.Module]
    swag: list[tuple[dict[str, Tensor], str]]
    optimizers: list[torch.optim.Optimizer]


class SymmetryCallback(ScheduledCallback):
    """Acts on networks by their symmetries, at an interval, without touching the global random streams.

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
        averages: further copies of the weights that must follow in place: attribute paths or callables as for
            ``members``, each finding as many modules as there are networks.
        prefix: first part of the logged names.

    Attributes:
        history: one record for each time it acted; part of the checkpoint.
        graph: the symmetry graph, once it is known.

    Raises:
        ValueError: contradictory arguments.
    """

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
        averages: Sequence[ModuleSource] = (),
        prefix: str,
    ) -> None:
        self._given_graph = graph
        super().__init__(every_n_epochs=every_n_epochs, every_n_steps=every_n_steps, at_end=at_end)
        self.members = members
        self.in_place = in_place
        self.example_input = example_input
        self.averages = tuple(averages)
        self.prefix = prefix

    @abstractmethod
    def check_graph(self, graph: SymmetryGraph, network: nn.Module) -> None:
        """Raise a ``SymmetryError`` if there is nothing to do for a network with these symmetries."""

    @property
    def single(self) -> bool | None:
        """True to follow one network, False for the members of an ensemble, None for whichever there is."""
        return None

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
        self._noticed: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule, the history, and the example input."""
        return super().state_dict() | {"history": self.history, "example_input": self._seen_input}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume with the schedule, the history and the example input of a checkpoint."""
        super().load_state_dict(state_dict)
        self.history = list(state_dict["history"])
        self._seen_input = state_dict["example_input"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that can be checked before the first step.

        Raises:
            ValueError: no network, too few, or of different architectures; averages that do not match them; weights
                sharded over processes.
        """
        require_whole_weights(trainer)
        members = self.networks(pl_module)
        check_same_architecture(members)
        if self.in_place:
            for i, _ in enumerate(members):
                list(self._mirrors(trainer, pl_module, members, i))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discover the symmetries if an input is known."""
        if self._example(pl_module) is not None:
            self._discover(pl_module, trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discover the symmetries with the first batch, if no input was given."""
        if self.graph is None:
            self._seen_input = example_from(batch)
            self._discover(pl_module, trainer)

    def networks(self, pl_module: LightningModule) -> list[nn.Module]:
        """The networks that this callback acts on."""
        return find_members(pl_module, self.members, single=self.single)

    def followers(
        self, trainer: Trainer, pl_module: LightningModule, members: list[nn.Module], index: int
    ) -> Followers:
        """Averages, SWAG statistics and optimizers that have to follow the weights of one network in place."""
        return {
            "mirrors": list(self._mirrors(trainer, pl_module, members, index)),
            "swag": list(swag_statistics(pl_module, members[index])),
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

    def notice(self, text: str, category: type[Warning] = UserWarning) -> None:
        """Warn once in a run, however often the callback acts."""
        if text not in self._noticed:
            self._noticed.add(text)
            warnings.warn(text, category, stacklevel=3)

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

    def _discover(self, pl_module: LightningModule, trainer: Trainer | None = None) -> SymmetryGraph:
        if self.graph is not None:
            return self.graph
        network = self.networks(pl_module)[0]
        graph = None if trainer is None else self._discovered_by_another(trainer, pl_module, network)
        if graph is None:
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

    def _discovered_by_another(
        self, trainer: Trainer, pl_module: LightningModule, network: nn.Module
    ) -> SymmetryGraph | None:
        """The graph that another callback of this run has discovered for the same network with the same input."""
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if (
                isinstance(other, SymmetryCallback)
                and other is not self
                and other.graph is not None
                and other._given_graph is None
                and other.example_input is self.example_input
                and other.networks(pl_module)[0] is network
            ):
                return other.graph
        return None

    def _mirrors(
        self, trainer: Trainer, pl_module: LightningModule, members: list[nn.Module], index: int
    ) -> Iterator[nn.Module]:
        yield from mirrored_modules(trainer, pl_module, members[index])
        for source in self.averages:
            copies = resolve_modules(source, pl_module, argument="averages")
            if len(copies) != len(members):
                raise ValueError(
                    f"averages={source!r} finds {len(copies)} modules, but there are {len(members)} networks"
                )
            check_same_architecture([members[index], copies[index]])
            yield copies[index]
