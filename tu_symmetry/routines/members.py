"""Many networks of one architecture trained at once, as one module with stacked weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from tu_symmetry.posterior.network import States, categorical_nll, derived_seed, initialized, require_positive
from tu_symmetry.routines.predictive import Likelihood, PredictiveRoutine, optimizer_config, training_points
from tu_symmetry.routines.runs import is_over, require_free, starts, store_at_end
from tu_symmetry.routines.shares import MembersStrategy, joined, share_sizes
from tu_symmetry.states import unstack


class StackedNetworks(LightningModule):
    """Trains networks of one architecture as one module ``members``, stacked ``[networks, ...]``.

    Each network's gradient is clipped by its own norm, so that it trains as if it were alone.
    """

    members: nn.Module
    optimizer: OptimizerCallable | None
    lr_scheduler: LRSchedulerCallable | None
    default_lr: ClassVar[float] = 1e-3

    def configure_optimizers(self) -> Any:
        """One optimizer over the stack, which must treat every weight by itself."""
        parameters = list(self.members.parameters())
        made = optimizer_config(parameters, self.optimizer, self.lr_scheduler, lr=self.default_lr)
        if isinstance(made, torch.optim.LBFGS):
            raise ValueError("LBFGS mixes the gradients of all networks: take an optimizer such as Adam or SGD")
        return made

    def on_train_start(self) -> None:
        """Lay what a resumed optimizer keeps in memory as the weights lie; fused ones take both in memory's order."""
        for optimizer in self.trainer.optimizers:
            for p, kept in optimizer.state.items():
                for name, t in kept.items():
                    if isinstance(t, Tensor) and t.shape == p.shape and t.stride() != p.stride():
                        kept[name] = torch.empty_like(p, dtype=t.dtype).copy_(t)

    def network_states(self) -> list[States]:
        """The networks as a list of state dicts (views), as functions that take states read them from a routine."""
        return unstack({name: t.detach() for name, t in self.members.state_dict().items()})

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradient of every network by its own norm."""
        if not gradient_clip_val or gradient_clip_algorithm == "value":
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        gradients = [p.grad for p in self.members.parameters() if p.grad is not None]
        norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        factor = (float(gradient_clip_val) / (norm + 1e-6)).clamp(max=1)
        for g in gradients:
            g.mul_(factor.view(-1, *(1 for _ in g.shape[1:])))


class MembersRoutine(StackedNetworks, PredictiveRoutine):
    """Independent networks trained at once by ``torch.func``: ensembles of 5 as well as 1,000 small references.

    Every member has its own initialization (by the ``reset_parameters`` of its layers) and, with
    ``data_order: own``, its own order of the data. Its loss is ``nll / B + prior_precision / (2 N) * ||w||^2`` on
    batches of ``B`` out of ``N`` training points: its minimum is the maximum of the posterior under the prior
    ``N(0, 1 / prior_precision)``. Each member comes out as if trained alone, BatchNorm's statistics included.

    Several processes (:class:`~tu_symmetry.routines.MembersStrategy`) train shares of the members, whole chunks of
    ``chunk_size``, and write what one process writes, bit for bit where a chunk's numbers do not depend on its size.
    Until a fit or a test ends, each of them has its own members alone.

    Logged: ``loss`` (mean over the members), and what :class:`~tu_symmetry.routines.predictive.PredictiveRoutine` logs.

    Args:
        model: the architecture; its own weights do not matter.
        num_members: number of networks.
        prior_precision: inverse variance of the prior of every parameter; 0 for none.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        seed: seed of the initializations.
        data_order: ``own``: batches are ``[members, B, ...]``, as ``orders`` of this package's data modules makes
            them; ``shared``: all members see the same batches, from any data module.
        samples: folder of the sample store that the members are written to at the end; None to write none. A run that
            is resumed after its end, for more epochs, replaces them.
        initial_states: folder of a sample store with a state for each member to start from, in place of fresh
            initializations; a resumed fit starts from its checkpoint all the same.
        chunk_size: how many members are evaluated at a time, to save memory; None for all.
        optimizer, lr_scheduler: of the stack; Adam with learning rate 1e-3 by default. LightningCLI's goes first.
    """

    def __init__(
        self,
        model: nn.Module,
        num_members: int = 5,
        *,
        prior_precision: float = 1.0,
        nll: Likelihood = categorical_nll,
        seed: int = 0,
        data_order: Literal["own", "shared"] = "own",
        samples: str | Path | None = None,
        initial_states: str | Path | None = None,
        chunk_size: int | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(nll)
        require_positive(num_members=num_members, chunk_size=chunk_size or 1)
        if prior_precision < 0:
            raise ValueError(f"prior_precision must not be negative, got {prior_precision}")
        self.num_members, self.prior_precision, self.seed = num_members, prior_precision, seed
        self.data_order, self.chunk_size = data_order, chunk_size
        self.samples = None if samples is None else Path(samples)
        self.initial_states = None if initial_states is None else Path(initial_states)
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.members = stacked_module([initialized(model, derived_seed(seed, 1, m)) for m in range(num_members)])
        self._points = 0
        self._started = self._resumed = False
        self._end: tuple[int, int] | None = None  # epochs and steps of the checkpoint that a fit resumes from
        self._sizes: list[int] = []  # of the shares of several processes
        self._own = slice(None)  # which members this process has

    def setup(self, stage: str) -> None:
        """Put the given states in place before the first fit, and take this process's share of the members.

        Lightning loads a checkpoint after this.
        """
        if self.initial_states is not None and not self._started and stage == "fit":
            own = self.members.state_dict()
            like = {name: t[0] for name, t in own.items()}
            with torch.no_grad():
                for name, t in starts(self.initial_states, like, num_members=self.num_members).items():
                    own[name].copy_(t)
            self._started = True
        strategy = getattr(self._trainer, "strategy", None)
        if not isinstance(strategy, MembersStrategy) or strategy.world_size == 1:
            return
        self._sizes = share_sizes(self.num_members, self.chunk_size or 1, strategy.world_size)
        before = sum(self._sizes[: strategy.global_rank])
        self._own = slice(before, before + self._sizes[strategy.global_rank])
        self._hold(lambda t: t[self._own].clone())
        for scores in (self.val_scores, self.test_scores):  # of all members, in each process
            scores.sync_on_compute = False

    def teardown(self, stage: str) -> None:
        """Give every process all members again."""
        if self._sizes:
            self._hold(self._whole)
            self._sizes, self._own = [], slice(None)

    def _hold(self, made: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            for t in (*self.members.parameters(), *self.members.buffers()):
                t.grad = None
                t.data = made(t.data)

    def _whole(self, t: Tensor) -> Tensor:
        """All members' rows of a tensor of which this process has its own members'."""
        return joined(t, self._sizes, self.trainer.strategy.root_device) if self._sizes else t

    def on_fit_start(self) -> None:
        """Check the folder before the first step."""
        if self.samples is not None:
            require_free(self.samples, self._resumed)
        if self._end is not None and is_over(self.trainer, *self._end):  # cut between its last checkpoint and its end
            self._write(self._end[1])
        self._end = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A resumed run may find its own samples."""
        self._resumed = True
        if "loops" in checkpoint:
            epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
            self._end = epochs, checkpoint["global_step"]
        self._in_checkpoint(checkpoint, self.num_members, lambda t: t[self._own])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put all members into the checkpoint, with the optimizer's numbers of each."""
        self._in_checkpoint(checkpoint, len(next(self.members.parameters())), self._whole)

    def _in_checkpoint(self, checkpoint: dict[str, Any], count: int, made: Callable[[Tensor], Tensor]) -> None:
        """Change what a checkpoint has of so many members."""
        if not self._sizes:
            return
        weights = checkpoint["state_dict"]
        weights |= {name: made(t) for name, t in weights.items() if name.startswith("members.")}
        for optimizer in checkpoint.get("optimizer_states", ()):
            for k, kept in optimizer["state"].items():
                stacked = {n: t for n, t in kept.items() if isinstance(t, Tensor) and t.ndim and len(t) == count}
                optimizer["state"][k] = kept | {name: made(t) for name, t in stacked.items()}

    def on_train_start(self) -> None:
        """Count the training points; the loader makes batches of this process's members alone."""
        super().on_train_start()
        self._points = training_points(self.trainer)
        loader: Any = self.trainer.train_dataloader
        if self._sizes and len(getattr(loader, "orders", ())) == self.num_members:
            loader.orders = loader.orders[self._own]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The sum of the members' losses, which gives every member its own gradient."""
        x, y = batch
        own = self.data_order == "own"
        count = len(next(self.members.parameters()))
        if own and len(x) == len(y) == self.num_members:  # of another's loader
            x, y = x[self._own], y[self._own]
        if own and (len(x) != count or len(y) != count or y.ndim < 2):
            raise ValueError(
                f"data_order is own, but the batch has inputs {tuple(x.shape)} and targets {tuple(y.shape)}: give the "
                f"data module orders: {self.num_members} (those of tu_symmetry have it), or take data_order: shared"
            )

        def one(parameters: States, buffers: States, inputs: Tensor, targets: Tensor) -> tuple[Tensor, States]:
            buffers = {name: t.clone() for name, t in buffers.items()}  # BatchNorm writes into them
            outputs = functional_call(self.members, {**parameters, **buffers}, (inputs,))
            loss = self.nll(outputs, targets) / len(inputs)
            if self.prior_precision:
                penalty = torch.stack([p.square().sum() for p in parameters.values()]).sum()
                loss = loss + self.prior_precision / (2 * self._points) * penalty
            return loss, buffers

        where = 0 if own else None
        stack = dict(self.members.named_buffers())
        drawn = self._random_states() if self._sizes and self.global_step == 0 else []
        losses, buffers = vmap(one, (0, 0, where, where), randomness="different", chunk_size=self.chunk_size)(
            dict(self.members.named_parameters()), stack, x, y
        )
        if any(not torch.equal(*pair) for pair in zip(drawn, self._random_states() if drawn else [], strict=True)):
            raise ValueError(
                "the members draw random numbers while they train (dropout, say), those of one process for all "
                "of them: train them in one process"
            )
        with torch.no_grad():
            for name, t in buffers.items():
                stack[name].copy_(t)
        self.log("loss", self._whole(losses.detach()).mean(), prog_bar=True, batch_size=y.shape[1] if own else len(y))
        return losses.sum()

    def _random_states(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]

    def on_train_end(self) -> None:
        """Write the members, in place of those that an earlier part of this run has written when it ended."""
        self._write(self.trainer.global_step)

    def _write(self, step: int) -> None:
        if self.samples is None:
            return
        states = self.states()
        if not self.trainer.is_global_zero:
            return
        store_at_end(
            self.samples,
            states,
            after=step,
            chain=range(self.num_members),
            step=[step] * self.num_members,
            architecture=type(self.members).__name__,
            method="deep_ensemble",
            seed=self.seed,
            prior_precision=self.prior_precision,
        )

    def states(self) -> States:
        """The members as a stack ``[members, ...]`` of state dicts; all processes of a run have to ask for them."""
        return {name: self._whole(t.detach()) for name, t in self.members.state_dict().items()}

    def member(self, index: int) -> nn.Module:
        """One member as a module of its own (a copy)."""
        self._require_all()
        made = copy.deepcopy(self.members)
        with torch.no_grad():
            for t in (*made.parameters(), *made.buffers()):
                t.grad = None
                t.data = t.data[index].clone()
        return made

    def network_states(self) -> list[States]:
        """The networks as a list of state dicts (views)."""
        self._require_all()
        return super().network_states()

    def _require_all(self) -> None:
        if self._sizes:
            raise ValueError(
                "each process has its own members until the run ends: read them from the samples, or leave callbacks "
                "that read networks to a run of one process"
            )

    def member_outputs(self, x: Tensor) -> Tensor:
        """Outputs ``(members, B, ...)`` for the same inputs ``(B, ...)``, in ``eval`` mode."""
        self.members.eval()

        def one(state: States) -> Tensor:
            return functional_call(self.members, state, (x,))

        state: States = {**dict(self.members.named_parameters()), **dict(self.members.named_buffers())}
        return self._whole(vmap(one, chunk_size=self.chunk_size)(state))


def stacked_module(networks: list[nn.Module]) -> nn.Module:
    """The first network with the parameters and buffers of all of them, stacked; ties stay ties.

    Weights of linear layers lie in memory as ``vmap`` makes their gradients, transposed, which then need no copy.
    """
    parameters, buffers = stack_module_state(networks)
    made = copy.deepcopy(networks[0])
    linear = {id(module.weight) for module in made.modules() if isinstance(module, nn.Linear)}
    with torch.no_grad():
        for name, p in made.named_parameters():
            stacked = parameters[name].detach()
            p.data = stacked.mT.clone(memory_format=torch.contiguous_format).mT if id(p) in linear else stacked.clone()
        for name, b in made.named_buffers():
            b.data = buffers[name].detach().clone()
    return made
