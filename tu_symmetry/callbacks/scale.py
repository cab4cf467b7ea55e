"""Canonical scales during training: log how far the weights are from their least mass, or rescale them in place."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from tu_symmetry.callbacks.base import SymmetryCallback
from tu_symmetry.callbacks.members import ModuleSource, detached_state
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.elements import LogScale
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.in_place import scale_in_place


class ScaleCanonicalization(SymmetryCallback):
    """Logs the mass of a network against its minimal mass over positive rescalings, while it trains.

    The mass is the squared L2 norm of the weights; its minimum over all rescalings that leave the function unchanged is
    the representation cost of arXiv 2310.08287, section 6. To every logger of the trainer go, as plain scalars,
    ``scale/mass``, ``scale/minimal_mass`` and ``scale/ratio``, the first over the second. The members of an ensemble
    are treated one by one: the names then end in ``_i``, and the name without it is the mean.

    With ``in_place=True`` the weights are brought to their minimal mass where they are, together with buffers (running
    statistics), gradients, averages of the weights and the optimizers' state. Where a weight is multiplied by ``c``,
    gradients, momenta and first moments are divided by ``c``, second moments by ``c**2``. *The training trajectory is
    not invariant*: read in the old coordinates ``w = w' / c``, the next steps of SGD are those of the learning rate
    ``lr / c**2``, those of Adam of ``lr / c`` and ``eps * c``, weight by weight; and ``weight_decay`` penalizes the new
    weights, which is the point of least mass.

    Factors that change the outputs on the example input by more than rounding explains raise a ``SymmetryError``
    first. Under data parallelism rank 0 canonicalizes and all ranks apply its factors.

    Args:
        members: where the networks are, see :class:`~tu_symmetry.callbacks.base.SymmetryCallback`.
        at_start: act before the first step too (with the first batch there, so that the symmetries are known).
        **common: the schedule, ``in_place`` and ``graph`` of :class:`~tu_symmetry.callbacks.base.SymmetryCallback`.

    Attributes:
        history: one record for each time: ``epoch``, ``step``, and lists over the members of ``mass``,
            ``minimal_mass`` and ``ratio``, in place also ``output_change``; in the checkpoint.
        log_scales: the log-factors found last, one element for each member.
    """

    prefix = "scale"

    def __init__(self, members: ModuleSource | None = None, *, at_start: bool = False, **common: Any) -> None:
        super().__init__(members, **common)
        self.at_start = at_start

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self.log_scales: list[LogScale] = []

    def check_graph(self, graph: SymmetryGraph, network: nn.Module) -> None:
        """Raise a ``SymmetryError`` if no hidden units can be rescaled."""
        if not graph.scales:
            raise SymmetryError(
                f"{type(network).__name__} has no scale symmetry that was found, so its mass is minimal as it is; "
                "positively homogeneous activations (ReLU, LeakyReLU, max-pooling) give scale symmetries, others "
                "(GELU, SiLU, tanh) do not; print(discover_symmetries(model, example_inputs)) shows the whole report"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discover the symmetries with the first batch, if no input was given; act before the first step if asked."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.at_start and batch_idx == 0 and trainer.global_step == 0:
            self._act_once(trainer, pl_module, "start")

    def act(self, trainer: Trainer, pl_module: LightningModule, *, hook: str) -> None:
        """Find the canonical scale, log, and rescale in place if asked to."""
        members = self.networks(pl_module)
        graph = self.known_graph()
        states = [detached_state(m) for m in members]
        found = self.on_rank_zero(trainer, lambda: [self._find(graph, state) for state in states])
        self.log_scales = [log_scale for log_scale, _ in found]
        if self.in_place:
            for member, log_scale in zip(members, self.log_scales, strict=True):
                scale_in_place(graph, log_scale, member, **self.followers(trainer, pl_module, member))
        record: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        keys = [key for key in found[0][1] if all(key in numbers for _, numbers in found)]
        record |= {key: [numbers[key] for _, numbers in found] for key in keys}
        self.history.append(record)
        self.log_record(trainer, pl_module, record, hook, first=0 if len(members) > 1 else None)

    def _find(self, graph: SymmetryGraph, state: dict[str, Tensor]) -> tuple[LogScale, dict[str, float]]:
        """The log-factors to the minimal mass, and what is recorded of one network."""
        form = canonicalize(graph, {name: t.detach().cpu() for name, t in state.items()}, certify=self.in_place)
        numbers = {
            "mass": form.mass_before,
            "minimal_mass": form.mass_after,
            "ratio": form.mass_before / form.mass_after,
        }
        if form.certificate is not None:
            numbers["output_change"] = form.certificate.change
        elif self.in_place:
            self.say_uncertified(form.uncertified)
        return form.log_scale, numbers
