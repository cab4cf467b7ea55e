"""Canonical scales during training: log how far the weights are from their least mass, or rescale them in place."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

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
from tu_symmetry.scaling.canonical import Method, canonicalize
from tu_symmetry.scaling.masses import counted_parameters
from tu_symmetry.scaling.profiles import mass_profile
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import LogScale
from tu_symmetry.symmetry.graph import SymmetryGraph
from tu_symmetry.symmetry.in_place import scale_in_place
from tu_symmetry.symmetry.measured import UncertifiedWarning


class ScaleCanonicalization(ScheduledCallback):
    """Logs the mass of a network against its minimal mass over positive rescalings, while it trains.

    The mass is the squared L2 norm of the weights; its minimum over all rescalings that leave the function unchanged is
    the representation cost of arXiv 2310.08287, section 6. To every logger of the trainer go, as plain scalars,

    * ``scale/mass``, ``scale/minimal_mass`` and ``scale/ratio``, the first over the second;
    * ``scale/layer_mass/LAYER`` and ``scale/layer_minimal_mass/LAYER``: what each module holds of both;
    * ``scale/log_factor/GROUP``: root mean square of the natural-log factors that lead from the weights to the
      minimum, for each scale group (zero at the minimum);
    * ``scale/profile_minimum/GROUP``: the natural-log factor of least mass when a whole group is scaled alike.

    The members of an ensemble are treated one by one: the names then end in ``_i``, and the name without it is the
    mean. The same numbers are kept in :attr:`history`, which is part of the checkpoint.

    **In place.** With ``in_place=True`` the weights are brought into canonical scale where they are, together with
    buffers (running statistics), gradients, averages of the weights and the optimizers' state. Let a weight be
    multiplied by its factor ``c``. The function is unchanged, so gradients become ``g / c`` by the chain rule; momenta
    and first moments are divided by ``c``, second moments by ``c**2``, averages of weights multiplied by ``c``.

    *The training trajectory is not invariant*, since neither SGD nor Adam is equivariant under rescaling. What holds
    exactly for the next steps, read in the old coordinates ``w = w' / c`` (tests/callbacks/test_scale.py):

    * SGD, with or without momentum: the step is that of the learning rate ``lr / c**2``, weight by weight, with the
      same momentum buffer. Rescaling ``lr`` by ``c**2`` and ``weight_decay`` by ``1 / c**2`` would undo the change; a
      factor for each unit has no learning rate of its own in torch, so the callback does not try.
    * Adam and AMSGrad: the step is that of ``lr / c`` and ``eps * c``, so the *absolute* step in the new coordinates is
      what it was, up to ``eps``. Rescaling ``lr`` by ``c``, ``eps`` by ``1 / c`` and ``weight_decay`` by ``1 / c**2``
      (with AdamW, whose decay is decoupled, by ``1 / c``) would undo the change.
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
            averaging wrappers.
        every_n_epochs: act at the end of every n-th epoch.
        every_n_steps: act after every n-th optimizer step.
        at_end: act when training ends.
        at_start: act before the first step too (with the first batch there, so that the symmetries are known).
        in_place: rescale the weights themselves, with everything that belongs to them.
        method: canonical scale that ``in_place`` brings the weights to, see :func:`~tu_symmetry.canonicalize`. What is
            logged as minimal mass is that of ``min_mass`` in any case.
        parameters: names or patterns (``"*.weight"``) of the tensors whose mass counts, as the regularizer counts
            them; all parameters if left out.
        profile: natural-log factors at which the mass profile of every group is taken
            (:func:`~tu_symmetry.mass_profile`); none if empty.
        example_input: an input of the network, to discover the symmetries with. Default: the LightningModule's
            ``example_input_array``, else the first batch of training (its first tensor).
        graph: the network's symmetry graph, instead of discovering it.
        averages: further copies of the weights that must follow in place: attribute paths or callables as for
            ``members``, each finding as many modules as there are members.
        prefix: first part of the logged names.

    Attributes:
        history: one record for each time: ``epoch``, ``step``, and lists over the members: numbers for ``mass``,
            ``minimal_mass`` and ``ratio``; dictionaries for ``layer_mass``, ``layer_minimal_mass``, ``log_factor`` and
            ``profile_minimum`` (infinite where a group's mass lies on one side only), and for ``profile`` (group to
            masses), where asked for. In place also ``output_change``, where the graph holds a network to run.
        log_scales: the log-factors found last, one element for each member.
    """

    def __init__(
        self,
        members: ModuleSource | None = None,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        at_end: bool = True,
        at_start: bool = False,
        in_place: bool = False,
        method: Method = "min_mass",
        parameters: Sequence[str] | None = None,
        profile: Sequence[float] = (),
        example_input: Tensor | tuple[Any, ...] | None = None,
        graph: SymmetryGraph | None = None,
        averages: Sequence[ModuleSource] = (),
        prefix: str = "scale",
    ) -> None:
        self._given_graph = graph
        super().__init__(every_n_epochs=every_n_epochs, every_n_steps=every_n_steps, at_end=at_end)
        if method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}; got {method!r}")
        if not all(math.isfinite(x) for x in profile):
            raise ValueError(f"profile must hold finite log-factors, got {list(profile)}")
        self.members = members
        self.at_start = at_start
        self.in_place = in_place
        self.method = method
        self.parameters = None if parameters is None else list(parameters)
        self.profile = [float(x) for x in profile]
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
        self.log_scales: list[LogScale] = []
        self._seen_input: tuple[Any, ...] | None = None
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule, the history, and the example input."""
        return super().state_dict() | {"history": self.history, "example_input": self._seen_input}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped."""
        super().load_state_dict(state_dict)
        self.history = list(state_dict["history"])
        self._seen_input = state_dict["example_input"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check everything that can be checked before the first step.

        Raises:
            ValueError: no network, members of different architectures, averages that do not match the members, weights
                sharded over processes; with a given graph, counted parameters that do not exist.
        """
        require_whole_weights(trainer)
        members = find_members(pl_module, self.members)
        check_same_architecture(members)
        if self.graph is not None:
            counted_parameters(self.graph, self.parameters)
        if self.in_place:
            for i, _ in enumerate(members):
                list(self._mirrors(trainer, pl_module, members, i))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discover the symmetries if an input is known."""
        if self._example(pl_module) is not None:
            self._discover(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discover the symmetries with the first batch, if no input was given; act before the first step if asked."""
        if self.graph is None:
            self._seen_input = example_from(batch)
            self._discover(pl_module)
        if self.at_start and batch_idx == 0 and trainer.global_step == 0:
            self._act_once(trainer, pl_module, "start")

    def act(self, trainer: Trainer, pl_module: LightningModule, *, hook: str) -> None:
        """Find the canonical scale, log, and rescale in place if asked to."""
        members = find_members(pl_module, self.members)
        graph = self._discover(pl_module)
        optimizers = list(trainer.optimizers)
        found = self._find_on_rank_zero(trainer, graph, [detached_state(m) for m in members])
        self.log_scales = [log_scale for log_scale, _ in found]
        if self.in_place:
            for i, log_scale in enumerate(self.log_scales):
                scale_in_place(
                    graph,
                    log_scale,
                    members[i],
                    mirrors=list(self._mirrors(trainer, pl_module, members, i)),
                    swag=swag_statistics(pl_module, members[i]),
                    optimizers=optimizers,
                )
        record: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        keys = [key for key in found[0][1] if all(key in numbers for _, numbers in found)]
        record |= {key: [numbers[key] for _, numbers in found] for key in keys}
        self.history.append(record)
        self._log(trainer, pl_module, record, hook)

    def _find_on_rank_zero(
        self, trainer: Trainer, graph: SymmetryGraph, states: list[dict[str, Tensor]]
    ) -> list[tuple[LogScale, dict[str, Any]]]:
        """Canonicalize on rank 0 and tell the others; an error there is raised everywhere, so that none waits."""
        found: list[tuple[LogScale, dict[str, Any]]] | Exception | None = None
        if trainer.is_global_zero:
            try:
                found = [self._find(graph, state) for state in states]
            except Exception as error:
                if trainer.world_size == 1:
                    raise
                found = error
        found = trainer.strategy.broadcast(found, src=0)
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found

    def _find(self, graph: SymmetryGraph, state: dict[str, Tensor]) -> tuple[LogScale, dict[str, Any]]:
        """The log-factors to the canonical scale, and what is recorded of one network."""
        state = {name: t.detach().cpu() for name, t in state.items()}
        certify = self.in_place and self.method == "min_mass"
        least = applied = canonicalize(graph, state, parameters=self.parameters, certify=certify)
        if self.method != "min_mass":
            applied = canonicalize(graph, state, self.method, parameters=self.parameters, certify=self.in_place)
        log_scale = applied.log_scale
        numbers: dict[str, Any] = {
            "mass": least.mass_before,
            "minimal_mass": least.mass_after,
            "ratio": least.mass_before / least.mass_after,
            "layer_mass": self._layer_masses(graph, state),
            "layer_minimal_mass": self._layer_masses(graph, least.state),
            "log_factor": {name: float(s.square().mean().sqrt()) for name, s in least.log_scale.items()},
        }
        if applied.certificate is not None:
            numbers["output_change"] = applied.certificate.change
        elif self.in_place and not self._warned:
            self._warned = True
            text = f"ScaleCanonicalization is not certified: {applied.uncertified}"
            warnings.warn(text, UncertifiedWarning, stacklevel=2)
        profile = mass_profile(graph, state, self.profile, parameters=self.parameters)
        numbers["profile_minimum"] = dict(profile.minima)
        if self.profile:
            numbers["profile"] = {name: values.tolist() for name, values in profile.masses.items()}
        return log_scale, numbers

    def _layer_masses(self, graph: SymmetryGraph, state: Mapping[str, Tensor]) -> dict[str, float]:
        counted = counted_parameters(graph, self.parameters)
        masses: dict[str, float] = {}
        for name in graph.shapes:
            if name in counted and state[name].is_floating_point():
                layer = name.rpartition(".")[0] or name
                masses[layer] = masses.get(layer, 0.0) + float(state[name].double().square().sum())
        return masses

    def _example(self, pl_module: LightningModule) -> tuple[Any, ...] | None:
        given = self.example_input if self.example_input is not None else pl_module.example_input_array
        if given is None:
            return self._seen_input
        if isinstance(given, Mapping):
            raise TypeError(
                "example_input_array is a dictionary; give ScaleCanonicalization(example_input=...) a tensor, or the "
                "tuple of positional arguments of the network's forward"
            )
        return tuple(given) if isinstance(given, (tuple, list)) else (given,)

    def _discover(self, pl_module: LightningModule) -> SymmetryGraph:
        if self.graph is not None:
            return self.graph
        example = self._example(pl_module)
        if example is None:
            raise ValueError(
                "no example input to discover the symmetries with: no training batch was seen; give "
                "ScaleCanonicalization(example_input=...), or set example_input_array in the LightningModule"
            )
        network = find_members(pl_module, self.members)[0]
        copied = copy_of(network).to(device="cpu")
        if any(t.dtype in (torch.float16, torch.bfloat16) for t in copied.state_dict().values()):
            copied = copied.to(torch.float32)
        dtype = next((p.dtype for p in copied.parameters()), torch.float32)
        with isolate_rng(include_cuda=False):
            graph = discover_symmetries(copied, tuple(as_input(x, dtype) for x in example))
            graph.require_verified()
        if not graph.scales:
            raise SymmetryError(
                f"{type(network).__name__} has no scale symmetry that was found, so its mass is minimal as it is; "
                "positively homogeneous activations (ReLU, LeakyReLU, max-pooling) give scale symmetries, others "
                "(GELU, SiLU, tanh) do not; print(discover_symmetries(model, example_inputs)) shows the whole report"
            )
        counted_parameters(graph, self.parameters)
        self.graph = graph
        return graph

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

    def _log(self, trainer: Trainer, pl_module: LightningModule, record: dict[str, Any], hook: str) -> None:
        per_member: list[dict[str, float]] = []
        for i in range(len(record["mass"])):
            scalars = {f"{self.prefix}/{key}": record[key][i] for key in ("mass", "minimal_mass", "ratio")}
            for key in ("layer_mass", "layer_minimal_mass", "log_factor", "profile_minimum"):
                scalars |= {f"{self.prefix}/{key}/{name}": value for name, value in record[key][i].items()}
            per_member.append(scalars)
        scalars = {key: sum(m[key] for m in per_member) / len(per_member) for key in per_member[0]}
        if len(per_member) > 1:
            scalars |= {f"{key}_{i}": value for i, m in enumerate(per_member) for key, value in m.items()}
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(scalars | {"epoch": trainer.current_epoch}, step=trainer.global_step)
                logger.save()
        # Lightning logs nothing at the end of training; what is logged here goes to other callbacks only.
        if hook in ("step", "epoch"):
            pl_module.log_dict(scalars, logger=False, on_step=hook == "step", on_epoch=hook == "epoch", sync_dist=True)
