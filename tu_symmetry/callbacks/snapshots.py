"""Snapshots of a run as posterior samples: every member's weights, at an interval after a burn-in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from tu_symmetry.callbacks.members import ModuleSource, check_same_architecture, require_whole_weights, trained_networks
from tu_symmetry.callbacks.schedule import ScheduledCallback
from tu_symmetry.routines.runs import StoredRun, fingerprint_of


class PosteriorSnapshots(ScheduledCallback):
    """Writes the weights of a run to a :class:`~tu_symmetry.posterior.samples.SampleStore` while it trains.

    One network is one chain; the members of an ensemble are one chain each, numbered from ``chain`` on. Parameters
    and buffers are written as they are between two optimizer steps, by rank 0. A resumed run appends to the store
    that it has begun; what it had written after its last checkpoint is taken back and made anew.

    Args:
        folder: folder of the store; a store that is there must be of the same architecture.
        members: as for :class:`~tu_symmetry.callbacks.Rebasin`, or the members of a
            :class:`~tu_symmetry.routines.MembersRoutine`.
        every_n_epochs, every_n_steps, at_epochs: see :class:`~tu_symmetry.callbacks.schedule.ScheduledCallback`.
        burn_in: epochs (optimizer steps with ``every_n_steps``) to leave out first; the interval is the thinning.
        at_end: also write the last weights.
        chain: number of the first member's chain; runs with other seeds can share a store under other numbers.
        method: name of the method in the store's metadata.
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
    ) -> None:
        super().__init__(
            every_n_epochs=every_n_epochs,
            every_n_steps=every_n_steps,
            at_epochs=at_epochs,
            at_end=at_end,
            start=burn_in,
        )
        self.folder, self.members, self.chain, self.method = Path(folder), members, chain, method

    @property
    def state_key(self) -> str:
        """Several of these callbacks can live in one trainer if they write elsewhere."""
        return self._generate_state_key(folder=str(self.folder), chain=self.chain)

    def forget(self) -> None:
        """Drop what earlier runs left."""
        super().forget()
        self._resumed: dict[str, Any] | None = None
        self._stored: StoredRun | None = None

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule, and what has been stored."""
        return super().state_dict() | {"stored": {} if self._stored is None else self._stored.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the checkpoint's place in the schedule, in the store that is there."""
        super().load_state_dict(state_dict)
        self._resumed = state_dict.get("stored", {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the members and the folder before the first step."""
        require_whole_weights(trainer)
        members = trained_networks(pl_module, self.members)
        check_same_architecture(members)
        states = [m.state_dict() for m in members]
        kind = type(members[0]).__name__
        schedule = (self.every_n_epochs, self.every_n_steps, self.at_epochs, self.at_end, self.start)
        self._stored = StoredRun(
            self.folder,
            range(self.chain, self.chain + len(members)),
            fingerprint_of(states, architecture=kind, schedule=schedule, by=trainer.optimizers),
            states[0],
            architecture=kind,
            method=self.method,
        )
        self._stored.begin(trainer, self._resumed, step=self._last_step)

    def act(self, trainer: Trainer, pl_module: LightningModule, *, hook: str) -> None:
        """Append the weights of every member."""
        if trainer.is_global_zero and self._stored is not None:
            states = [m.state_dict() for m in trained_networks(pl_module, self.members)]
            self._stored.append(states, chain=self._stored.chains, step=[trainer.global_step] * len(states))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say in the store that the run has come to its end."""
        if trainer.is_global_zero and self._stored is not None:
            self._stored.finish()
