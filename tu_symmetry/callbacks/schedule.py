"""When a callback acts: every so many epochs or optimizer steps, and at the end of the fit, across resumed runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tu_symmetry.posterior.network import require_numbers
from tu_symmetry.routines.runs import is_over


class ScheduledCallback(Callback):
    """A callback that acts at an interval and at the end of the fit, always between two optimizer steps.

    The place in the schedule is part of the checkpoint: a resumed run keeps the same schedule.

    Args:
        every_n_epochs: act at the end of every n-th training epoch.
        every_n_steps: act after every n-th optimizer step (``trainer.global_step``).
        at_epochs: act after these epochs instead, counted from 1. An epoch that a limit of time or steps cuts does not
            count; resumed, it does when it is whole.
        at_end: act once more when training ends, unless the last step has been acted on already.
        start: epochs (or steps, with ``every_n_steps``) to let pass before the interval starts to count.
    """

    def __init__(
        self,
        *,
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        at_epochs: Iterable[int] = (),
        at_end: bool = True,
        start: int = 0,
    ) -> None:
        at_epochs = tuple(at_epochs)
        require_numbers(every_n_epochs=every_n_epochs, every_n_steps=every_n_steps, start=start)
        for epoch in at_epochs:
            require_numbers(at_epochs=epoch)
        name = type(self).__name__
        intervals = [n for n in (every_n_epochs, every_n_steps) if n is not None]
        if len(intervals) + bool(at_epochs) > 1 or (at_epochs and start):
            raise ValueError(
                f"{name} takes one of every_n_epochs, every_n_steps and at_epochs, which has nothing to wait for"
            )
        if min((*at_epochs, *intervals), default=1) < 1 or start < 0:
            raise ValueError(f"{name}: intervals and epochs are at least 1, and a start at least 0")
        if not intervals and not at_epochs and not at_end:
            raise ValueError(f"{name} would never act: give every_n_epochs, every_n_steps, at_epochs or at_end=True")
        self.at_epochs = tuple(sorted(set(at_epochs)))
        self.every_n_epochs, self.every_n_steps = every_n_epochs, every_n_steps
        self.at_end, self.start = at_end, start
        self.forget()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the schedule anew with a new run (a checkpoint is loaded after this)."""
        if stage == "fit" and trainer.global_step == 0:
            self.forget()

    def forget(self) -> None:
        """Drop what earlier runs left."""
        self._intervals_done = 0
        self._last_step = -1

    @abstractmethod
    def act(self, trainer: Trainer, pl_module: LightningModule, *, hook: str) -> None:
        """Do the work; ``hook`` is ``"step"``, ``"epoch"`` or ``"end"``. Called on every rank."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act where an interval of optimizer steps is complete."""
        if self.every_n_steps is not None and self._due(trainer.global_step, self.every_n_steps):
            self._act_once(trainer, pl_module, "step")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act where an interval of epochs is complete, and after the last planned epoch or step.

        The end is acted on here, where it is foreseen, so that a checkpoint written at the end of the epoch has it.
        """
        epoch = trainer.current_epoch + 1
        due = self.every_n_epochs is not None and self._due(epoch, self.every_n_epochs)
        due = due or (epoch in self.at_epochs and trainer.is_last_batch)
        if due or (self.at_end and is_over(trainer, epoch, trainer.global_step)):
            self._act_once(trainer, pl_module, "epoch")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act at an end that was not foreseen (early stopping, a time limit)."""
        if self.at_end:
            self._act_once(trainer, pl_module, "end")

    def state_dict(self) -> dict[str, Any]:
        """The place in the schedule."""
        return {"intervals_done": self._intervals_done, "last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the checkpoint's place in the schedule."""
        self._intervals_done, self._last_step = state_dict["intervals_done"], state_dict["last_step"]

    def _due(self, count: int, every: int) -> bool:
        done = max(count - self.start, 0) // every
        due = done > self._intervals_done
        self._intervals_done = max(done, self._intervals_done)
        return due

    def _act_once(self, trainer: Trainer, pl_module: LightningModule, hook: str) -> None:
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self.act(trainer, pl_module, hook=hook)
