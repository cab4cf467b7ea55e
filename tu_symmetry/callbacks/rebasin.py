"""Re-basin during training: align the members of an ensemble, or the snapshots of a run, and log what it takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from tu_symmetry.alignment.align import Alignment, align
from tu_symmetry.alignment.barrier import chord_excess, loss_barrier
from tu_symmetry.callbacks.members import (
    ModuleSource,
    as_input,
    check_same_architecture,
    copy_of,
    detached_state,
    example_from,
    find_members,
    mirrored_modules,
    require_whole_weights,
    resolve_modules,
    swag_statistics,
)
from tu_symmetry.callbacks.schedule import ScheduledCallback
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.in_place import permute_in_place
from tu_symmetry.symmetry.measured import UncertifiedWarning

Loss = nn.Module | Callable[[Tensor, Tensor], Tensor]
Loader = Any


class Rebasin(ScheduledCallback):
    """Aligns the members of an ensemble to a reference member while they train, and logs NoT, distances and barriers.

    For each member but the reference it logs, as plain scalars to every logger of the trainer,

    * ``rebasin/NoT_i``: number of transpositions of the permutation that aligns member ``i`` (arXiv 2401.00611);
    * ``rebasin/distance_before_i`` and ``rebasin/distance_after_i``: Euclidean distance to the reference's weights;
    * ``rebasin/barrier_before_i`` and ``rebasin/barrier_after_i``, with a ``barrier_loader``: the loss barrier to the
      reference (excess over the chord, in the unit of the loss);

    * ``rebasin/output_change_i``: by how much the permutation changes the member's outputs on the example input
      (relative, see :func:`~tu_symmetry.certify`), where the graph holds a network to run;

    and the means over the members without the index (``rebasin/NoT``), which can be monitored by other callbacks.
    The same numbers are kept in :attr:`history`, which is part of the checkpoint.

    A permutation that changes a member's outputs by more than rounding explains raises a ``SymmetryError`` before any
    weight has been changed.

    With ``in_place=True`` the members' hidden units are permuted where they are, together with their gradients, the
    optimizers' state and running averages of the weights. The function and the training trajectory stay the same, up
    to the order of floating-point sums. Dropout on hidden units keeps the trajectory in distribution only, since
    the random mask falls on other units. The callback draws nothing from the global random streams.

    Under data parallelism rank 0 aligns and all ranks apply its permutations. Barriers come from the mean
    over the ranks' shares of the loader.

    Example:
        >>> model = deep_ensembles(networks, task="classification")                     # doctest: +SKIP
        >>> routine = ClassificationRoutine(model, 10, nn.CrossEntropyLoss(), is_ensemble=True,
        ...     format_batch_fn=RepeatTarget(num_repeats=4), optim_recipe=recipe)       # doctest: +SKIP
        >>> trainer = Trainer(callbacks=[Rebasin(every_n_epochs=5, barrier_loader="val")])  # doctest: +SKIP

    Args:
        members: where the members are: an attribute path (``"model.core_models"``) or a callable of the
            LightningModule. Default: the ``core_models`` of TorchUncertainty's deep ensembles; for snapshots the
            ``model`` of the routine, without TorchUncertainty's averaging wrappers.
        reference: index of the member that the others are aligned to, or ``"first"`` or ``"previous"`` to follow one
            network and align its weights to its first or its previous snapshot.
        every_n_epochs: align at the end of every n-th epoch.
        every_n_steps: align after every n-th optimizer step.
        at_end: align when training ends.
        in_place: permute the members themselves, with everything that belongs to their weights.
        match_on: match units by ``"weights"``, or by ``"activations"`` on ``dataloader``.
        dataloader: batches for activation matching: a loader, or ``"val"`` for the trainer's validation loader.
        barrier_loader: batches on which loss barriers are computed: a loader, or ``"val"``; None for no barriers.
        loss: loss of (outputs, targets) for the barriers. Default: the ``loss`` of the LightningModule.
        example_input: an input of one member, to discover the symmetries with. Default: the LightningModule's
            ``example_input_array``, else the first batch of training (its first tensor).
        graph: the members' symmetry graph, instead of discovering it.
        averages: further copies of the members' weights that must follow them in place (an own EMA, for example):
            attribute paths or callables as for ``members``, each finding as many modules as there are members.
        prefix: first part of the logged names.

    Attributes:
        history: one record for each alignment: epoch, step, and lists over the aligned members.
        permutations: member index to the permutation of the last alignment (index 0 for snapshots).
        graph: the symmetry graph, once it is known.

    Raises:
        ValueError: contradictory arguments.
    """

    def __init__(
        self,
        members: ModuleSource | None = None,
        reference: int | Literal["first", "previous"] = 0,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        at_end: bool = True,
        in_place: bool = False,
        match_on: Literal["weights", "activations"] = "weights",
        dataloader: Loader | None = None,
        barrier_loader: Loader | None = None,
        loss: Loss | None = None,
        example_input: Tensor | tuple[Any, ...] | None = None,
        graph: SymmetryGraph | None = None,
        averages: Sequence[ModuleSource] = (),
        prefix: str = "rebasin",
    ) -> None:
        self._given_graph = graph
        super().__init__(every_n_epochs=every_n_epochs, every_n_steps=every_n_steps, at_end=at_end)
        if isinstance(reference, str) and reference not in ("first", "previous"):
            raise ValueError(f"reference must be the index of a member, 'first' or 'previous', got {reference!r}")
        if match_on not in ("weights", "activations"):
            raise ValueError(f"match_on must be 'weights' or 'activations', got {match_on!r}")
        if match_on == "activations" and dataloader is None:
            raise ValueError("activation matching needs data: give dataloader= a loader, or 'val'")
        for name, loader in (("dataloader", dataloader), ("barrier_loader", barrier_loader)):
            if isinstance(loader, str) and loader != "val":
                raise ValueError(f"{name} must be an iterable of batches or 'val', got {loader!r}")
        self.members = members
        self.reference = reference
        self.in_place = in_place
        self.match_on = match_on
        self.dataloader = dataloader
        self.barrier_loader = barrier_loader
        self.loss = loss
        self.example_input = example_input
        self.averages = tuple(averages)
        self.prefix = prefix

    @property
    def state_key(self) -> str:
        """Several of these callbacks can live in one trainer if their prefixes differ."""
        return self._generate_state_key(prefix=self.prefix)

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self.graph: SymmetryGraph | None = self._given_graph
        self.history: list[dict[str, Any]] = []
        self.permutations: dict[int, Permutation] = {}
        self._snapshot: dict[str, Tensor] | None = None
        self._seen_input: tuple[Any, ...] | None = None
        self._warned = False

    @property
    def follows_one_network(self) -> bool:
        """Whether snapshots of one network are aligned, not the members of an ensemble."""
        return isinstance(self.reference, str)

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule, the history, the reference snapshot, and the example input."""
        own = {"history": self.history, "snapshot": self._snapshot, "example_input": self._seen_input}
        return super().state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped."""
        super().load_state_dict(state_dict)
        self.history = list(state_dict["history"])
        self._snapshot = state_dict["snapshot"]
        self._seen_input = state_dict["example_input"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that can be checked before the first step.

        Raises:
            ValueError: no members, too few, or of different architectures; a reference that does not exist; no loss
                for the barriers; averages that do not match the members; weights sharded over processes.
        """
        require_whole_weights(trainer)
        members = find_members(pl_module, self.members, single=self.follows_one_network)
        check_same_architecture(members)
        if not isinstance(self.reference, str) and not -len(members) <= self.reference < len(members):
            raise ValueError(f"reference={self.reference} is no member of an ensemble of {len(members)}")
        if self.barrier_loader is not None:
            self._loss(pl_module)
        if self.in_place:
            for i, _ in enumerate(members):
                list(self._mirrors(trainer, pl_module, members, i))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is a validation loader where one is needed; discover the symmetries if an input is known."""
        for name, loader in (("dataloader", self.dataloader), ("barrier_loader", self.barrier_loader)):
            if isinstance(loader, str):
                _validation_batches(trainer, argument=name)
        if self._example(pl_module) is not None:
            self._discover(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discover the symmetries with the first batch, if no input was given."""
        if self.graph is None:
            self._seen_input = example_from(batch)
            self._discover(pl_module)

    def act(self, trainer: Trainer, pl_module: LightningModule, *, hook: str) -> None:
        """Align, log, and permute in place if asked to."""
        members = find_members(pl_module, self.members, single=self.follows_one_network)
        graph = self._discover(pl_module)
        with isolate_rng(include_cuda=pl_module.device.type == "cuda"), torch.no_grad():
            states = [detached_state(m) for m in members]
            if self.follows_one_network:
                if self._snapshot is None:
                    self._snapshot = _on_cpu(states[0])
                    return
                reference = {n: t.to(states[0][n].device) for n, t in self._snapshot.items()}
                moving = [0]
            else:
                assert isinstance(self.reference, int)
                at = self.reference % len(members)
                reference = states[at]
                moving = [i for i in range(len(members)) if i != at]
            found = self._align_on_rank_zero(trainer, graph, members[0], reference, [states[i] for i in moving])
            self.permutations = dict(zip(moving, found.permutations, strict=True))
            record = found.as_record(trainer)
            if self.barrier_loader is not None:
                record |= self._barriers(trainer, pl_module, graph, members[0], reference, states)
            if self.in_place:
                for i, permutation in self.permutations.items():
                    permute_in_place(
                        graph,
                        permutation,
                        members[i],
                        mirrors=list(self._mirrors(trainer, pl_module, members, i)),
                        swag=swag_statistics(pl_module, members[i]),
                        optimizers=trainer.optimizers,
                    )
            if self.reference == "previous":
                self._snapshot = _on_cpu(detached_state(members[0]))
        self.history.append(record)
        self._log(trainer, pl_module, record, moving, hook)

    def _example(self, pl_module: LightningModule) -> tuple[Any, ...] | None:
        given = self.example_input if self.example_input is not None else pl_module.example_input_array
        if given is None:
            return self._seen_input
        if isinstance(given, Mapping):
            raise TypeError(
                "example_input_array is a dictionary; give Rebasin(example_input=...) a tensor, or the tuple of "
                "positional arguments of one member's forward"
            )
        return tuple(given) if isinstance(given, (tuple, list)) else (given,)

    def _discover(self, pl_module: LightningModule) -> SymmetryGraph:
        if self.graph is not None:
            return self.graph
        example = self._example(pl_module)
        if example is None:
            raise ValueError(
                "no example input to discover the symmetries with: no training batch was seen; give "
                "Rebasin(example_input=...), or set example_input_array in the LightningModule"
            )
        member = find_members(pl_module, self.members, single=self.follows_one_network)[0]
        copied = copy_of(member).to(device="cpu")
        if any(t.dtype in (torch.float16, torch.bfloat16) for t in copied.state_dict().values()):
            copied = copied.to(torch.float32)
        dtype = next((p.dtype for p in copied.parameters()), torch.float32)
        with isolate_rng(include_cuda=False):
            graph = discover_symmetries(copied, tuple(as_input(x, dtype) for x in example))
            graph.require_verified()
        if not graph.permutations:
            pins = "; ".join(f"{p.parameter} axis {p.axis}: {p.reason}" for p in graph.pinned[:3])
            raise SymmetryError(
                f"{type(member).__name__} has no permutation symmetry that was found, so there is nothing to align"
                + (f" ({pins})" if pins else "")
                + "; print(discover_symmetries(model, example_inputs)) shows the whole report"
            )
        self.graph = graph
        return graph

    def _align_on_rank_zero(
        self,
        trainer: Trainer,
        graph: SymmetryGraph,
        member: nn.Module,
        reference: dict[str, Tensor],
        states: list[dict[str, Tensor]],
    ) -> _Found:
        """Align on rank 0 and tell the others; an error there is raised everywhere, so that no rank waits forever."""
        found: _Found | Exception | None = None
        if trainer.is_global_zero:
            try:
                found = self._align(trainer, graph, member, reference, states)
            except Exception as error:
                if trainer.world_size == 1:
                    raise
                found = error
        found = trainer.strategy.broadcast(found, src=0)
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found

    def _align(
        self,
        trainer: Trainer,
        graph: SymmetryGraph,
        member: nn.Module,
        reference: dict[str, Tensor],
        states: list[dict[str, Tensor]],
    ) -> _Found:
        model = loader = None
        if self.match_on == "activations":
            model, loader = copy_of(member), self._batches(trainer, self.dataloader, argument="dataloader")
        moving = [_as_float(s) for s in states]
        alignment = align(
            graph, moving, reference=_as_float(reference), match_on=self.match_on, model=model, dataloader=loader
        )
        if alignment.uncertified and not self._warned:
            self._warned = True
            warnings.warn(f"Rebasin is not certified: {alignment.uncertified}", UncertifiedWarning, stacklevel=2)
        return _Found.of(alignment)

    def _barriers(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        graph: SymmetryGraph,
        member: nn.Module,
        reference: dict[str, Tensor],
        states: list[dict[str, Tensor]],
    ) -> dict[str, list[float]]:
        batches = self._batches(trainer, self.barrier_loader, argument="barrier_loader")
        if batches is None:
            return {}
        copied, loss = copy_of(member), self._loss(pl_module)
        curves = []
        for i, permutation in self.permutations.items():
            for state in (states[i], apply_permutation(graph, permutation, states[i])):
                curves.append(loss_barrier(copied, reference, state, batches, loss).losses)
        losses = torch.tensor(curves, dtype=torch.float64)
        if trainer.world_size > 1:
            losses = trainer.strategy.reduce(losses.to(pl_module.device), reduce_op="mean").cpu()
        before, after = chord_excess(losses).reshape(-1, 2).T.tolist()
        return {"barrier_before": before, "barrier_after": after}

    def _mirrors(
        self, trainer: Trainer, pl_module: LightningModule, members: list[nn.Module], index: int
    ) -> Iterator[nn.Module]:
        yield from mirrored_modules(trainer, pl_module, members[index])
        for source in self.averages:
            copies = resolve_modules(source, pl_module, argument="averages")
            if len(copies) != len(members):
                raise ValueError(
                    f"averages={source!r} finds {len(copies)} modules, but there are {len(members)} members"
                )
            check_same_architecture([members[index], copies[index]])
            yield copies[index]

    def _loss(self, pl_module: LightningModule) -> Loss:
        loss = self.loss if self.loss is not None else getattr(pl_module, "loss", None)
        if not callable(loss):
            raise ValueError(
                f"loss barriers need a loss, and {type(pl_module).__name__} has no attribute 'loss': give "
                "Rebasin(loss=...), a callable of (outputs, targets)"
            )
        return loss

    def _batches(self, trainer: Trainer, loader: Loader, *, argument: str) -> _Batches | None:
        if isinstance(loader, str):
            return _validation_batches(trainer, argument=argument)
        return _Batches(loader, trainer, None)

    def _log(
        self, trainer: Trainer, pl_module: LightningModule, record: dict[str, Any], moving: list[int], hook: str
    ) -> None:
        scalars: dict[str, float] = {}
        for key, values in record.items():
            if not isinstance(values, list):
                continue
            scalars[f"{self.prefix}/{key}"] = sum(values) / len(values)
            if not self.follows_one_network:
                scalars |= {f"{self.prefix}/{key}_{i}": float(v) for i, v in zip(moving, values, strict=True)}
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(scalars | {"epoch": trainer.current_epoch}, step=trainer.global_step)
                logger.save()
        if hook != "end":  # Lightning logs nothing at the end of training; here the values go to other callbacks only
            pl_module.log_dict(scalars, logger=False, on_step=hook == "step", on_epoch=hook == "epoch", sync_dist=True)


@dataclass(frozen=True)
class _Found:
    """What rank 0 tells the others: permutations on the CPU, and plain numbers."""

    permutations: list[Permutation]
    transpositions: list[int]
    distances_before: list[float]
    distances_after: list[float]
    output_changes: list[float]

    @classmethod
    def of(cls, alignment: Alignment[Any]) -> _Found:
        return cls(
            permutations=[{n: t.cpu() for n, t in p.items()} for p in alignment.permutations],
            transpositions=alignment.transpositions,
            distances_before=alignment.distances_before,
            distances_after=alignment.distances_after,
            output_changes=[certificate.change for certificate in alignment.certificates],
        )

    def as_record(self, trainer: Trainer) -> dict[str, Any]:
        record = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "NoT": self.transpositions,
            "distance_before": self.distances_before,
            "distance_after": self.distances_after,
        }
        return record | ({"output_change": self.output_changes} if self.output_changes else {})


class _Batches:
    """The batches of a loader as the module gets them in training; generators of the loader's own are left alone."""

    def __init__(self, loader: Any, trainer: Trainer, limit: int | None) -> None:
        self.loader = loader
        self.trainer = trainer
        self.limit = limit

    def __iter__(self) -> Iterator[Any]:
        owners = (self.loader, getattr(self.loader, "sampler", None))
        generators = [g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)]
        states = [g.get_state() for g in generators]
        try:
            for batch in islice(self.loader, self.limit):
                yield self.trainer.strategy.batch_to_device(self.trainer.precision_plugin.convert_input(batch))
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _validation_batches(trainer: Trainer, *, argument: str) -> _Batches | None:
    loaders = trainer.val_dataloaders
    if loaders is None and trainer.limit_val_batches == 0 and argument == "barrier_loader":
        warnings.warn("Rebasin(barrier_loader='val') computes no barriers: limit_val_batches is 0", stacklevel=2)
        return None
    loader = loaders[0] if isinstance(loaders, (list, tuple)) and loaders else loaders
    if loader is None or isinstance(loader, (list, tuple, dict)):
        raise ValueError(
            f"Rebasin({argument}='val') needs a validation loader, and the trainer has "
            f"{'none' if loader is None else 'several by name'}: give it a loader of its own"
        )
    limit = trainer.num_val_batches[0] if trainer.num_val_batches else None
    return _Batches(loader, trainer, int(limit) if limit is not None and limit != float("inf") else None)


def _on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().clone() for name, t in state.items()}


def _as_float(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for n, t in state.items()}
