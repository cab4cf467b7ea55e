"""Canonical scales during training: log how far the weights are from their least mass, or rescale them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from tu_symmetry import plot
from tu_symmetry.callbacks.base import SymmetryCallback
from tu_symmetry.callbacks.figures import log_figure
from tu_symmetry.callbacks.members import ModuleSource, detached_state
from tu_symmetry.scaling.canonical import Method, canonicalize
from tu_symmetry.scaling.masses import counted_parameters
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.certificate import UncertifiedWarning
from tu_symmetry.symmetry.elements import LogScale
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.in_place import scale_in_place


class ScaleCanonicalization(SymmetryCallback):
    """Logs the mass of a network against its minimal mass over positive rescalings, while it trains.

    The mass is the squared L2 norm of the weights; its minimum over all rescalings that leave the function unchanged is
    the representation cost of arXiv 2310.08287, section 6. To every logger of the trainer go, as plain scalars,

    * ``scale/mass``, ``scale/minimal_mass`` and ``scale/ratio``, the first over the second;

    and to loggers of images (TensorBoard, Weights & Biases, MLflow, Comet) a figure of what each module holds of both.
    The members of an ensemble are treated one by one: the names then end in ``_i``, and the name without it is the
    mean. The same numbers are kept in :attr:`history`, which is part of the checkpoint.

    **In place.** With ``in_place=True`` the weights are brought into canonical scale where they are, together with
    buffers (running statistics), gradients, averages of the weights and the optimizers' state. Where a weight is
    multiplied by ``c``, gradients, momenta and first moments are divided by ``c``, second moments by ``c**2``.

    *The training trajectory is not invariant*. What holds exactly for the next steps, read in the old coordinates
    ``w = w' / c``:

    * SGD, with or without momentum: the step is that of the learning rate ``lr / c**2``, weight by weight, with the
      same momentum buffer. Rescaling ``lr`` by ``c**2`` and ``weight_decay`` by ``1 / c**2`` would undo the change.
    * Adam and AMSGrad: the step is that of ``lr / c`` and ``eps * c``. Rescaling ``lr`` by ``c``, ``eps`` by ``1 / c``
      and ``weight_decay`` by ``1 / c**2`` (with AdamW, whose decay is decoupled, by ``1 / c``) would undo the change.
    * Without those changes ``weight_decay`` penalizes the new weights, which is another objective: that is the point of
      least mass. Clipping by the gradient's norm sees another norm.

    The outputs on the example input are measured before and after (``output_change`` in the history, see
    :func:`~tu_symmetry.certify`). Factors that change them by more than rounding explains raise a ``SymmetryError``
    before any weight has been changed.

    Under data parallelism rank 0 canonicalizes and all ranks apply its factors.

    Example:
        >>> trainer = Trainer(callbacks=[ScaleCanonicalization(every_n_epochs=5)])          # doctest: +SKIP
        >>> trainer.fit(ClassificationRoutine(model, 10, nn.CrossEntropyLoss()), train)     # doctest: +SKIP

    Args:
        members: where the network is: an attribute path (``"model.backbone"``) or a callable of the LightningModule.
            Default: TorchUncertainty's ``core_models`` where there are some, else the routine's ``model`` without
            averaging wrappers, else its only submodule with weights.
        at_start: act before the first step too (with the first batch there, so that the symmetries are known).
        method: canonical scale that ``in_place`` brings the weights to, see :func:`~tu_symmetry.canonicalize`. What is
            logged as minimal mass is that of ``min_mass`` in any case.
        parameters: names or patterns (``"*.weight"``) of the tensors whose mass counts, as the regularizer counts
            them; all parameters if left out.
        prefix: first part of the logged names.
        **common: the schedule, ``in_place``, ``example_input``, ``graph`` and ``averages`` of
            :class:`~tu_symmetry.callbacks.base.SymmetryCallback`.

    Attributes:
        history: one record for each time: ``epoch``, ``step``, and lists over the members: numbers for ``mass``,
            ``minimal_mass`` and ``ratio``, dictionaries for ``layer_mass`` and ``layer_minimal_mass``; in place also
            ``output_change``, where the graph holds a network to run.
        log_scales: the log-factors found last, one element for each member.
    """

    def __init__(
        self,
        members: ModuleSource | None = None,
        *,
        at_start: bool = False,
        method: Method = "min_mass",
        parameters: Sequence[str] | None = None,
        prefix: str = "scale",
        **common: Any,
    ) -> None:
        super().__init__(members, prefix=prefix, **common)
        if method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}; got {method!r}")
        self.at_start = at_start
        self.method = method
        self.parameters = None if parameters is None else list(parameters)

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self.log_scales: list[LogScale] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that can be checked before the first step.

        Raises:
            ValueError: no network, members of different architectures, averages that do not match the members, weights
                sharded over processes; with a given graph, counted parameters that do not exist.
        """
        super().on_fit_start(trainer, pl_module)
        if self.graph is not None:
            counted_parameters(self.graph, self.parameters)

    def check_graph(self, graph: SymmetryGraph, network: nn.Module) -> None:
        """Raise a ``SymmetryError`` if no hidden units can be rescaled, or parameters to count do not exist."""
        if not graph.scales:
            raise SymmetryError(
                f"{type(network).__name__} has no scale symmetry that was found, so its mass is minimal as it is; "
                "positively homogeneous activations (ReLU, LeakyReLU, max-pooling) give scale symmetries, others "
                "(GELU, SiLU, tanh) do not; print(discover_symmetries(model, example_inputs)) shows the whole report"
            )
        counted_parameters(graph, self.parameters)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discover the symmetries with the first batch, if no input was given; act before the first step if asked."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.at_start and batch_idx == 0 and trainer.global_step == 0:
            self._act_once(trainer, pl_module, "start")

    def act(self, trainer: Trainer, pl_module: LightningModule, *, hook: str) -> None:
        """Find the canonical scale, log, and rescale in place if asked to."""
        members = self.networks(pl_module)
        graph = self._discover(pl_module)
        states = [detached_state(m) for m in members]
        found = self.on_rank_zero(trainer, lambda: [self._find(graph, state) for state in states])
        self.log_scales = [log_scale for log_scale, _ in found]
        if self.in_place:
            for i, log_scale in enumerate(self.log_scales):
                scale_in_place(graph, log_scale, members[i], **self.followers(trainer, pl_module, members, i))
        record: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        keys = [key for key in found[0][1] if all(key in numbers for _, numbers in found)]
        record |= {key: [numbers[key] for _, numbers in found] for key in keys}
        self.history.append(record)
        self._log(trainer, pl_module, record, hook)

    def _find(self, graph: SymmetryGraph, state: dict[str, Tensor]) -> tuple[LogScale, dict[str, Any]]:
        """The log-factors to the canonical scale, and what is recorded of one network."""
        state = {name: t.detach().cpu() for name, t in state.items()}
        certify = self.in_place and self.method == "min_mass"
        least = applied = canonicalize(graph, state, parameters=self.parameters, certify=certify)
        if self.method != "min_mass":
            applied = canonicalize(graph, state, method=self.method, parameters=self.parameters, certify=self.in_place)
        log_scale = applied.log_scale
        numbers: dict[str, Any] = {
            "mass": least.mass_before,
            "minimal_mass": least.mass_after,
            "ratio": least.mass_before / least.mass_after,
            "layer_mass": self._layer_masses(graph, state),
            "layer_minimal_mass": self._layer_masses(graph, least.state),
        }
        if applied.certificate is not None:
            numbers["output_change"] = applied.certificate.change
        elif self.in_place:
            self.notice(f"ScaleCanonicalization is not certified: {applied.uncertified}", UncertifiedWarning)
        return log_scale, numbers

    def _layer_masses(self, graph: SymmetryGraph, state: Mapping[str, Tensor]) -> dict[str, float]:
        counted = counted_parameters(graph, self.parameters)
        masses: dict[str, float] = {}
        for name in graph.shapes:
            if name in counted and state[name].is_floating_point():
                layer = name.rpartition(".")[0] or name
                masses[layer] = masses.get(layer, 0.0) + float(state[name].double().square().sum())
        return masses

    def _log(self, trainer: Trainer, pl_module: LightningModule, record: dict[str, Any], hook: str) -> None:
        scalars: dict[str, float] = {}
        for key in ("mass", "minimal_mass", "ratio"):
            scalars[f"{self.prefix}/{key}"] = sum(record[key]) / len(record[key])
            if len(record[key]) > 1:
                scalars |= {f"{self.prefix}/{key}_{i}": value for i, value in enumerate(record[key])}
        self.log_scalars(trainer, pl_module, scalars, hook)
        layers = list(record["layer_mass"][0])
        values = {
            label: [sum(member[layer] for member in record[key]) / len(record[key]) for layer in layers]
            for label, key in (("mass", "layer_mass"), ("minimal mass", "layer_minimal_mass"))
        }
        log_figure(trainer, f"{self.prefix}/layers", lambda: plot.bars(values, layers, ylabel="squared L2 norm"))
