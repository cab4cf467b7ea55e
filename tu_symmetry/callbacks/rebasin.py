"""Re-basin during training: align the members of an ensemble, and log what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from tu_symmetry.alignment.align import align
from tu_symmetry.alignment.barrier import chord_excess, loss_barrier
from tu_symmetry.alignment.moves import Move, move_tensors
from tu_symmetry.alignment.over import Over, check_over
from tu_symmetry.callbacks.base import SymmetryCallback
from tu_symmetry.callbacks.members import ModuleSource, copy_of, detached_state
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.elements import LogScale, Permutation, Signs, identity_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.in_place import permute_in_place, scale_in_place, sign_in_place


class Rebasin(SymmetryCallback):
    """Aligns the members of an ensemble to the first one while they train, and logs NoT, distances and barriers.

    For each member but the first it logs, as plain scalars to every logger of the trainer,

    * ``rebasin/NoT_i``: number of transpositions of the permutation that aligns member ``i`` (arXiv 2401.00611);
    * ``rebasin/distance_before_i`` and ``rebasin/distance_after_i``: Euclidean distance to the first one's weights;
    * ``rebasin/barrier_before_i`` and ``rebasin/barrier_after_i``, with a ``barrier_loader``: the loss barrier to the
      first one (excess over the chord, in the unit of the LightningModule's ``loss``);
    * ``rebasin/output_change_i``: by how much the permutation changes the member's outputs on the example input
      (relative, see :func:`~tu_symmetry.certify`), where the graph holds a network to run;

    and the means over the members without the index (``rebasin/NoT``), which can be monitored by other callbacks. A
    permutation that changes a member's outputs by more than rounding explains raises a ``SymmetryError`` first.

    With ``in_place=True`` the members' hidden units are permuted where they are, together with their gradients, the
    optimizers' state and running averages of the weights. The function and the training trajectory stay the same, up
    to the order of floating-point sums, and with dropout on hidden units in distribution. With a ``barrier_loader`` a
    member whose barrier would rise stays as it is: a shorter distance is no lower barrier. Under data parallelism rank
    0 aligns, and barriers come from the mean over the ranks' shares of the loader.

    Args:
        members: where the members are: an attribute path (``"model.core_models"``) or a callable of the
            LightningModule. Default: the ``core_models`` of TorchUncertainty's deep ensembles.
        over: which symmetries move members, as for :func:`~tu_symmetry.align`. With ``"signs"``,
            ``rebasin/sign_changes_i`` counts the units that turn. With ``"scales"`` distances and barriers are those of
            members at their least mass, to which ``in_place`` brings all of them, the first one too, together with the
            optimizers' state; the trajectory then is another one, as
            :class:`~tu_symmetry.callbacks.ScaleCanonicalization` says. ``"rotations"`` are for looking on: what an
            optimizer knows of each weight by itself (Adam's second moments) does not follow a rotation.
        barrier_loader: ``"val"`` for loss barriers on the trainer's validation loader; None for no barriers.
        **common: the schedule, ``in_place`` and ``graph`` of :class:`~tu_symmetry.callbacks.base.SymmetryCallback`.

    Attributes:
        history: one record for each alignment: epoch, step, and lists over the aligned members; in the checkpoint.
        permutations: member index to the permutation of the last alignment.
        signs: member index to its signs.
        log_scales: member index, the first one's among them, to the log-factors of its least mass.
    """

    least_networks = 2
    prefix = "rebasin"

    def __init__(
        self,
        members: ModuleSource | None = None,
        *,
        over: Sequence[Over] = ("permutations",),
        barrier_loader: Literal["val"] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(members, **common)
        self.over = check_over(over)
        if "rotations" in self.over and self.in_place:
            raise ValueError(
                "Rebasin(in_place=True) moves members by permutations, signs and scales: optimizers keep numbers for "
                "each weight (Adam's second moments) that do not follow a rotation. Leave 'rotations' out of over=, or "
                "leave out in_place=True and align after training"
            )
        if barrier_loader not in (None, "val"):
            raise ValueError(f"barrier_loader must be 'val' or None, got {barrier_loader!r}")
        self.barrier_loader = barrier_loader

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self.permutations: dict[int, Permutation] = {}
        self.signs: dict[int, Signs] = {}
        self.log_scales: dict[int, LogScale] = {}
        self._moves: list[Move] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that can be checked before the first step."""
        super().on_fit_start(trainer, pl_module)
        if self.barrier_loader is not None and not callable(getattr(pl_module, "loss", None)):
            raise ValueError(
                f"loss barriers need a loss, and {type(pl_module).__name__} has no attribute 'loss', a callable of "
                "(outputs, targets): give it one, or leave out barrier_loader"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is a validation loader where one is needed; discover the symmetries if an input is known."""
        if self.barrier_loader is not None:
            _Batches(trainer)
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
        graph = self.known_graph()
        with isolate_rng(include_cuda=pl_module.device.type == "cuda"), torch.no_grad():
            states = [detached_state(m) for m in members]
            self._moves, found = self.on_rank_zero(trainer, lambda: self._align(graph, states))
            record: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step} | found
            if self.barrier_loader is not None:
                record |= self._barriers(trainer, pl_module, graph, members[0], states)
            if self.in_place:
                self._leave(record, identity_permutation(graph))
            self.permutations = {i: move.permutation for i, move in enumerate(self._moves) if i}
            self.signs = {i: move.signs for i, move in enumerate(self._moves) if i}
            self.log_scales = {i: move.log_scale for i, move in enumerate(self._moves)}
            if self.in_place:
                for member, move in zip(members, self._moves, strict=True):
                    followers = self.followers(trainer, pl_module, member)
                    scale_in_place(graph, move.log_scale, member, **followers)
                    permute_in_place(graph, move.permutation, member, **followers)
                    sign_in_place(graph, move.signs, member, **followers)
        self.history.append(record)
        self.log_record(trainer, pl_module, record, hook, first=1)

    def _align(
        self, graph: SymmetryGraph, states: list[dict[str, Tensor]]
    ) -> tuple[list[Move], dict[str, list[float]]]:
        """What moves each member, on the CPU, and what is recorded of all but the first."""
        alignment = align(graph, [{name: _widened(t) for name, t in s.items()} for s in states], over=self.over)
        if alignment.uncertified:
            self.say_uncertified(alignment.uncertified)
        record: dict[str, Any] = {
            "NoT": alignment.transpositions[1:],
            "distance_before": alignment.distances_before[1:],
            "distance_after": alignment.distances_after[1:],
        }
        counts = [move.counts() for move in alignment.moves[1:]]
        told = {"signs": "sign_changes", "scales": "largest_factor", "rotations": "mixed_blocks"}
        record |= {key: [one[key] for one in counts] for word, key in told.items() if word in self.over}
        if alignment.certificates:
            record["output_change"] = [certificate.change for certificate in alignment.certificates[1:]]
        moves = [Move.of({name: t.cpu() for name, t in move.flat().items()}) for move in alignment.moves]
        return moves, record

    def _leave(self, record: dict[str, Any], identity: Permutation) -> None:
        """Leave the units of members as they are whose barriers would rise."""
        barriers = zip(record.get("barrier_before", ()), record.get("barrier_after", ()), strict=True)
        for i in [i for i, (before, after) in enumerate(barriers) if after > before]:
            self._moves[i + 1] = replace(self._moves[i + 1], permutation=identity, signs={})
            for key in ("distance", "barrier"):
                record[f"{key}_after"][i] = record[f"{key}_before"][i]
            unscaled = {"output_change"} if "scales" not in self.over else set()
            for key in {"NoT", "sign_changes", *unscaled} & record.keys():
                record[key][i] = 0

    def _barriers(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        graph: SymmetryGraph,
        member: nn.Module,
        states: list[dict[str, Tensor]],
    ) -> dict[str, list[float]]:
        copied, loss, batches = copy_of(member), pl_module.loss, _Batches(trainer)
        curves = []
        first, *others = zip(self._moves, states, strict=True)
        anchor = move_tensors(graph, *first)
        for move, state in others:
            for own in (replace(move, permutation={}, signs={}, maps={}), move):
                moved = move_tensors(graph, own, state)
                curves.append(loss_barrier(copied, anchor, moved, batches, loss).losses)  # type: ignore[arg-type]
        losses = torch.tensor(curves, dtype=torch.float64, device="cpu")
        if trainer.world_size > 1:
            losses = trainer.strategy.reduce(losses.to(pl_module.device), reduce_op="mean").cpu()
        before, after = chord_excess(losses).reshape(-1, 2).T.tolist()
        return {"barrier_before": before, "barrier_after": after}


class _Batches:
    """The trainer's validation batches as the module gets them; generators of the loader's own are left alone."""

    def __init__(self, trainer: Trainer) -> None:
        loaders: Any = trainer.val_dataloaders
        self.trainer = trainer
        self.loader = loaders[0] if isinstance(loaders, (list, tuple)) and loaders else loaders
        if self.loader is None or isinstance(self.loader, (list, tuple, dict)):
            raise ValueError(
                "Rebasin(barrier_loader='val') needs a validation loader, and the trainer has "
                f"{'none' if self.loader is None else 'several by name'}"
            )

    def __iter__(self) -> Iterator[Any]:
        limits = self.trainer.num_val_batches
        limit = int(limits[0]) if limits and limits[0] != float("inf") else None
        owners = (self.loader, getattr(self.loader, "sampler", None))
        generators = [g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)]
        states = [g.get_state() for g in generators]
        try:
            for batch in islice(self.loader, limit):
                yield self.trainer.strategy.batch_to_device(self.trainer.precision_plugin.convert_input(batch))
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
