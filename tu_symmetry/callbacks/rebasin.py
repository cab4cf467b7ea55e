"""Re-basin during training: align the members of an ensemble, or the snapshots of a run, and log what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tu_symmetry import plot
from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.barrier import chord_excess, loss_barrier
from tu_symmetry.callbacks.base import SymmetryCallback
from tu_symmetry.callbacks.figures import log_figure
from tu_symmetry.callbacks.members import ModuleSource, copy_of, detached_state
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.certificate import UncertifiedWarning
from tu_symmetry.symmetry.elements import Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.in_place import permute_in_place

Loss = nn.Module | Callable[[Tensor, Tensor], Tensor]
Loader = Any


class Rebasin(SymmetryCallback):
    """Aligns the members of an ensemble to a reference member while they train, and logs NoT, distances and barriers.

    For each member but the reference it logs, as plain scalars to every logger of the trainer,

    * ``rebasin/NoT_i``: number of transpositions of the permutation that aligns member ``i`` (arXiv 2401.00611);
    * ``rebasin/distance_before_i`` and ``rebasin/distance_after_i``: Euclidean distance to the reference's weights;
    * ``rebasin/barrier_before_i`` and ``rebasin/barrier_after_i``, with a ``barrier_loader``: the loss barrier to the
      reference (excess over the chord, in the unit of the loss);

    * ``rebasin/output_change_i``: by how much the permutation changes the member's outputs on the example input
      (relative, see :func:`~tu_symmetry.certify`), where the graph holds a network to run;

    and the means over the members without the index (``rebasin/NoT``), which can be monitored by other callbacks.
    The same numbers are kept in :attr:`history`, which is part of the checkpoint. Loggers of images (TensorBoard,
    Weights & Biases, MLflow, Comet) get a figure of the distances over the run.

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
            ``model`` of the routine, without TorchUncertainty's averaging wrappers, or its only submodule with weights.
        reference: index of the member that the others are aligned to, or ``"first"`` or ``"previous"`` to follow one
            network and align its weights to its first or its previous snapshot.
        match_on: match units by ``"weights"``, or by ``"activations"`` on ``dataloader``.
        dataloader: batches for activation matching: a loader, or ``"val"`` for the trainer's validation loader.
        barrier_loader: batches on which loss barriers are computed: a loader, or ``"val"``; None for no barriers.
        loss: loss of (outputs, targets) for the barriers. Default: the ``loss`` of the LightningModule.
        prefix: first part of the logged names.
        **common: the schedule, ``in_place``, ``example_input``, ``graph`` and ``averages`` of
            :class:`~tu_symmetry.callbacks.base.SymmetryCallback`.

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
        match_on: Literal["weights", "activations"] = "weights",
        dataloader: Loader | None = None,
        barrier_loader: Loader | None = None,
        loss: Loss | None = None,
        prefix: str = "rebasin",
        **common: Any,
    ) -> None:
        super().__init__(members, prefix=prefix, **common)
        if isinstance(reference, str) and reference not in ("first", "previous"):
            raise ValueError(f"reference must be the index of a member, 'first' or 'previous', got {reference!r}")
        if match_on not in ("weights", "activations"):
            raise ValueError(f"match_on must be 'weights' or 'activations', got {match_on!r}")
        if match_on == "activations" and dataloader is None:
            raise ValueError("activation matching needs data: give dataloader= a loader, or 'val'")
        for name, loader in (("dataloader", dataloader), ("barrier_loader", barrier_loader)):
            if isinstance(loader, str) and loader != "val":
                raise ValueError(f"{name} must be an iterable of batches or 'val', got {loader!r}")
        self.reference = reference
        self.match_on = match_on
        self.dataloader, self.barrier_loader = dataloader, barrier_loader
        self.loss = loss

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self.permutations: dict[int, Permutation] = {}
        self._snapshot: dict[str, Tensor] | None = None

    @property
    def single(self) -> bool:
        """Whether snapshots of one network are aligned, not the members of an ensemble."""
        return isinstance(self.reference, str)

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule, the history, the reference snapshot, and the example input."""
        return super().state_dict() | {"snapshot": self._snapshot}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume with the schedule, the history and the reference snapshot of a checkpoint."""
        super().load_state_dict(state_dict)
        self._snapshot = state_dict["snapshot"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that can be checked before the first step.

        Raises:
            ValueError: no members, too few, or of different architectures; a reference that does not exist; no loss
                for the barriers; averages that do not match the members; weights sharded over processes.
        """
        super().on_fit_start(trainer, pl_module)
        count = len(self.networks(pl_module))
        if not isinstance(self.reference, str) and not -count <= self.reference < count:
            raise ValueError(f"reference={self.reference} is no member of an ensemble of {count}")
        if self.barrier_loader is not None:
            self._loss(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is a validation loader where one is needed; discover the symmetries if an input is known."""
        for name, loader in (("dataloader", self.dataloader), ("barrier_loader", self.barrier_loader)):
            if isinstance(loader, str):
                self._validation_batches(trainer, argument=name)
        super().on_train_start(trainer, pl_module)

    def check_graph(self, graph: SymmetryGraph, network: nn.Module) -> None:
        """Raise a ``SymmetryError`` if no hidden units can be permuted."""
        if not graph.permutations:
            pins = "; ".join(f"{p.parameter} axis {p.axis}: {p.reason}" for p in graph.pinned[:3])
            raise SymmetryError(
                f"{type(network).__name__} has no permutation symmetry that was found, so there is nothing to align"
                + (f" ({pins})" if pins else "")
                + "; print(discover_symmetries(model, example_inputs)) shows the whole report"
            )

    def act(self, trainer: Trainer, pl_module: LightningModule, *, hook: str) -> None:
        """Align, log, and permute in place if asked to."""
        members = self.networks(pl_module)
        graph = self._discover(pl_module)
        with isolate_rng(include_cuda=pl_module.device.type == "cuda"), torch.no_grad():
            states = [detached_state(m) for m in members]
            if self.single:
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
            others = [states[i] for i in moving]
            permutations, found = self.on_rank_zero(
                trainer, lambda: self._align(trainer, graph, members[0], reference, others)
            )
            self.permutations = dict(zip(moving, permutations, strict=True))
            record: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step} | found
            if self.barrier_loader is not None:
                record |= self._barriers(trainer, pl_module, graph, members[0], reference, states)
            if self.in_place:
                for i, permutation in self.permutations.items():
                    permute_in_place(graph, permutation, members[i], **self.followers(trainer, pl_module, members, i))
            if self.reference == "previous":
                self._snapshot = _on_cpu(detached_state(members[0]))
        self.history.append(record)
        self._log(trainer, pl_module, record, moving, hook)

    def _align(
        self,
        trainer: Trainer,
        graph: SymmetryGraph,
        member: nn.Module,
        reference: dict[str, Tensor],
        states: list[dict[str, Tensor]],
    ) -> tuple[list[Permutation], dict[str, list[float]]]:
        """Permutations on the CPU, and what is recorded of them."""
        model = loader = None
        if self.match_on == "activations":
            model, loader = copy_of(member), self._batches(trainer, self.dataloader, argument="dataloader")
            if loader is not None and any(t.dtype in _HALF for t in model.state_dict().values()):
                model, loader.widened = model.float(), True  # as the states below
        first, *moving = ({name: _widened(t) for name, t in s.items()} for s in (reference, *states))
        alignment = align(graph, moving, reference=first, match_on=self.match_on, model=model, dataloader=loader)
        if alignment.uncertified:
            self.notice(f"Rebasin is not certified: {alignment.uncertified}", UncertifiedWarning)
        record: dict[str, Any] = {
            "NoT": alignment.transpositions,
            "distance_before": alignment.distances_before,
            "distance_after": alignment.distances_after,
        }
        if alignment.certificates:
            record["output_change"] = [certificate.change for certificate in alignment.certificates]
        return [{n: t.cpu() for n, t in p.items()} for p in alignment.permutations], record

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
        losses = torch.tensor(curves, dtype=torch.float64, device="cpu")
        if trainer.world_size > 1:
            losses = trainer.strategy.reduce(losses.to(pl_module.device), reduce_op="mean").cpu()
        before, after = chord_excess(losses).reshape(-1, 2).T.tolist()
        return {"barrier_before": before, "barrier_after": after}

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
            return self._validation_batches(trainer, argument=argument)
        return _Batches(loader, trainer, None)

    def _validation_batches(self, trainer: Trainer, *, argument: str) -> _Batches | None:
        loaders = trainer.val_dataloaders
        if loaders is None and trainer.limit_val_batches == 0 and argument == "barrier_loader":
            self.notice("Rebasin(barrier_loader='val') computes no barriers: limit_val_batches is 0")
            return None
        loader = loaders[0] if isinstance(loaders, (list, tuple)) and loaders else loaders
        if loader is None or isinstance(loader, (list, tuple, dict)):
            raise ValueError(
                f"Rebasin({argument}='val') needs a validation loader, and the trainer has "
                f"{'none' if loader is None else 'several by name'}: give it a loader of its own"
            )
        limit = trainer.num_val_batches[0] if trainer.num_val_batches else None
        return _Batches(loader, trainer, int(limit) if limit is not None and limit != float("inf") else None)

    def _log(
        self, trainer: Trainer, pl_module: LightningModule, record: dict[str, Any], moving: list[int], hook: str
    ) -> None:
        scalars: dict[str, float] = {}
        for key, values in record.items():
            if not isinstance(values, list):
                continue
            scalars[f"{self.prefix}/{key}"] = sum(values) / len(values)
            if not self.single:
                scalars |= {f"{self.prefix}/{key}_{i}": float(v) for i, v in zip(moving, values, strict=True)}
        self.log_scalars(trainer, pl_module, scalars, hook)
        log_figure(trainer, f"{self.prefix}/distances", self._draw)

    def _draw(self) -> tuple[Any, Any]:
        """Distances to the reference before and after alignment over the run, members as a band."""
        steps = [record["step"] for record in self.history]
        runs = {
            when: [list(run) for run in zip(*(r[f"distance_{when}"] for r in self.history), strict=True)]
            for when in ("before", "after")
        }
        return plot.bands(steps, runs, xlabel="step", ylabel="distance to the reference")


class _Batches:
    """The batches of a loader as the module gets them in training; generators of the loader's own are left alone."""

    def __init__(self, loader: Any, trainer: Trainer, limit: int | None) -> None:
        self.loader = loader
        self.trainer = trainer
        self.limit = limit
        self.widened = False  # numbers in half precision to single precision

    def __iter__(self) -> Iterator[Any]:
        owners = (self.loader, getattr(self.loader, "sampler", None))
        generators = [g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)]
        states = [g.get_state() for g in generators]
        try:
            for batch in islice(self.loader, self.limit):
                own = self.trainer.strategy.batch_to_device(self.trainer.precision_plugin.convert_input(batch))
                yield tree_map_only(Tensor, _widened, own) if self.widened else own
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().clone() for name, t in state.items()}


_HALF = (torch.float16, torch.bfloat16)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
