"""Progress where there is no terminal: a line now and then, in a log file or a batch job."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from rich.console import Console

from tu_symmetry.reporting.progress import StageProgress


class ProgressLines(Callback):
    """Says how far a run is, how fast, and how long it still takes, where the standard output is no terminal.

    Lightning's bar is for a terminal; in a log file a long fit looks as if it hung. The lines go to the standard error,
    with the figures that a routine logs for the bar::

        fit: training step 1250/2000, 4.1/s, 183 s left  epoch 5  loss 0.0132

    ``tu-symmetry fit`` and its kin have one by default, whether the bar is on or off. A run that takes less than
    ``every_seconds`` prints nothing.

    Args:
        every_seconds: between two lines; 0 for a line at every batch.
        console: where to; None for the standard error.

    Raises:
        ValueError: a negative number of seconds.
    """

    EVERY_SECONDS = 30.0

    def __init__(self, every_seconds: float | None = None, console: Console | None = None) -> None:
        self.every_seconds = self.EVERY_SECONDS if every_seconds is None else every_seconds
        if not self.every_seconds >= 0:
            raise ValueError(f"every_seconds must not be negative, got {every_seconds}")
        self.console = console
        self._shown = False
        self._stages = StageProgress("")
        self._last = self._batches = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look whether lines are wanted; of several of these callbacks the first one speaks."""
        first = next(c for c in trainer.callbacks if isinstance(c, ProgressLines))  # type: ignore[attr-defined]
        self._shown = first is self and trainer.is_global_zero and not sys.stdout.isatty()
        self._stages = StageProgress(str(getattr(stage, "value", stage)))
        self._last = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here: a run that is resumed is as fast as its own part."""
        self._batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._show("training", *_position(trainer, self._batches), {}, always=False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After each batch."""
        self._batches += 1
        if self._due():
            figures = {"epoch": trainer.current_epoch, **_figures(trainer)}
            self._show("training", *_position(trainer, self._batches), figures)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each batch of an evaluation; not of Lightning's trial of the validation before a fit."""
        if trainer.sanity_checking:
            return
        what, counts = "prediction", trainer.num_predict_batches
        if trainer.state.stage == RunningStage.VALIDATING:
            what, counts = "validation", trainer.num_val_batches
        elif trainer.testing:
            what, counts = "test", trainer.num_test_batches
        sizes: Any = counts if isinstance(counts, (list, tuple)) else [counts]
        total = sizes[dataloader_idx] if dataloader_idx < len(sizes) else math.inf
        stage = what if len(sizes) < 2 else f"{what}, data {dataloader_idx + 1} of {len(sizes)}"
        if batch_idx == 0 or self._due():
            self._show(stage, batch_idx + 1, total, {}, always=batch_idx > 0)

    on_validation_batch_end = on_predict_batch_end = on_test_batch_end

    def _due(self) -> bool:
        return self._shown and time.monotonic() - self._last >= self.every_seconds

    def _show(self, stage: str, done: float, total: float, figures: dict[str, Any], *, always: bool = True) -> None:
        """Take a position in; print it where a line is due, but for the first one of a stage, which has no rate."""
        if not self._shown:
            return
        info = {"stage": stage, "step": done, "batches": int(total) if math.isfinite(total) else None, **figures}
        line = self._stages.line(info)
        if always and self._due():
            self._last = time.monotonic()
            console = self.console or Console(stderr=True)
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _position(trainer: Trainer, batches: float) -> tuple[float, float]:
    """How many steps or batches are done, and of how many, by whatever ends the fit first."""
    limits = []
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        limits.append((float(trainer.global_step), float(trainer.max_steps)))
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append((batches, float(trainer.max_epochs * trainer.num_training_batches)))
    known = [(done, total) for done, total in limits if math.isfinite(total) and total > 0]
    return max(known, key=lambda at: at[0] / at[1], default=(batches, math.inf))


def _figures(trainer: Trainer) -> dict[str, float]:
    """What is logged for the bar."""
    found = {name: value for name, value in trainer.progress_bar_metrics.items() if name != "v_num"}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
