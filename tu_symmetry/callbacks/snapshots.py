"""Snapshots of a run as posterior samples: every member's weights, at an interval after a burn-in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from tu_symmetry.callbacks.compact import trained_networks
from tu_symmetry.callbacks.members import ModuleSource, check_same_architecture, require_whole_weights
from tu_symmetry.callbacks.schedule import ScheduledCallback
from tu_symmetry.posterior.samples import SampleStore


class PosteriorSnapshots(ScheduledCallback):
    """Writes the weights of a run to a :class:`~tu_symmetry.posterior.samples.SampleStore` while it trains.

    One network is one chain; the members of an ensemble are one chain each, numbered from ``chain`` on. Parameters
    and buffers are written as they are between two optimizer steps, by rank 0. A resumed run appends to the store
    that it has begun, and leaves out what is there already (a run that stopped after its last checkpoint repeats a
    few steps).

    Args:
        folder: folder of the store; a store that is there must be of the same architecture.
        members: as for :class:`~tu_symmetry.callbacks.Rebasin`: an attribute path or a callable. Default: the
            members of a :class:`~tu_symmetry.routines.MembersRoutine`, the ``core_models`` of TorchUncertainty's deep
            ensembles if there are any, else the ``model`` of the routine without TorchUncertainty's averaging wrappers.
        every_n_epochs: write at the end of every n-th epoch after the burn-in.
        every_n_steps: write after every n-th optimizer step after the burn-in.
        at_epochs: write at the end of these epochs instead, counted from 1: ``[1, 2, 4, 8, ...]`` for a training on a
            logarithmic axis.
        burn_in: epochs (optimizer steps with ``every_n_steps``) to leave out first; the interval is the thinning.
        at_end: also write the last weights.
        chain: number of the first member's chain; runs with other seeds can share a store under other numbers.
        method: name of the method in the store's metadata.
        architecture: name of the architecture in the metadata. Default: the class of the network.
        seed: seed of the run, for the metadata.

    Raises:
        ValueError: contradictory arguments.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        members: ModuleSource | None = None,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        at_epochs: Iterable[int] = (),
        burn_in: int = 0,
        at_end: bool = False,
        chain: int = 0,
        method: str = "snapshots",
        architecture: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            every_n_epochs=every_n_epochs,
            every_n_steps=every_n_steps,
            at_epochs=at_epochs,
            at_end=at_end,
            start=burn_in,
        )
        self.folder = Path(folder)
        self.members = members
        self.chain = chain
        self.method = method
        self.architecture = architecture
        self.seed = seed

    @property
    def state_key(self) -> str:
        """Several of these callbacks can live in one trainer if they write elsewhere."""
        return self._generate_state_key(folder=str(self.folder), chain=self.chain)

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self._resumed = False
        self._store: SampleStore | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the checkpoint's place in the schedule, in the store that is there."""
        super().load_state_dict(state_dict)
        self._resumed = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the members and the folder before the first step.

        Raises:
            ValueError: no network was found, or members of different architectures.
            FileExistsError: the folder holds these chains of another run already.
            SampleFileError: the folder holds something else, or samples of another architecture.
        """
        require_whole_weights(trainer)
        members = trained_networks(pl_module, self.members)
        check_same_architecture(members)
        self._store = self._open(members[0])
        chains = range(self.chain, self.chain + len(members))
        taken = sorted({record.chain for record in self._store.records} & set(chains)) if self._store else []
        if taken and not self._resumed:
            raise FileExistsError(
                f"{self.folder} already holds samples of chain(s) {taken} of another run; resume that run from its "
                "checkpoint, or give another folder or chain="
            )

    def act(self, trainer: Trainer, pl_module: LightningModule, *, hook: str) -> None:
        """Append the weights of every member."""
        if not trainer.is_global_zero:
            return
        members = trained_networks(pl_module, self.members)
        if self._store is None:  # another chain may have made it since this run began
            self._store = self._open(members[0])
        if self._store is None:
            architecture = self.architecture or type(members[0]).__name__
            self._store = SampleStore.create(self.folder, architecture=architecture, method=self.method, seed=self.seed)
        step = trainer.global_step
        written = {record.chain for record in self._store.records if record.step == step}
        new = {c: m for c, m in enumerate(members, start=self.chain) if c not in written}
        if new:
            self._store.append([m.state_dict() for m in new.values()], chain=list(new), step=[step] * len(new))

    def _open(self, member: nn.Module) -> SampleStore | None:
        if not self.folder.is_dir() or not any(self.folder.iterdir()):
            return None
        return SampleStore.open(self.folder, like=member.state_dict())
