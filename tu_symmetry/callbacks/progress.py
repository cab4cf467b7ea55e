"""Progress where there is no terminal: a line now and then, in a log file or a batch job."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from tu_symmetry.reporting.progress import StageProgress


class ProgressLines(Callback):
    """Says how far a fit is, how fast, and how long it still takes, where the standard output is no terminal.

    The lines go to the standard error, with the figures that a routine logs for Lightning's bar::

        fit: training step 1250/2000, 4.1/s, 183 s left  epoch 5  loss 0.0132

    ``tu-symmetry fit`` has one by default.
    """

    EVERY_SECONDS = 30.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here: a run that is resumed is as fast as its own part."""
        self._shown = trainer.is_global_zero and not sys.stdout.isatty()
        self._stages = StageProgress("fit")
        self._last = time.monotonic()
        self._batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._line(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Say it, after every so many seconds."""
        self._batches += 1
        if self._shown and time.monotonic() - self._last >= self.EVERY_SECONDS:
            self._last = time.monotonic()
            Console(stderr=True).print(self._line(trainer), highlight=False, markup=False, soft_wrap=True)

    def _line(self, trainer: Trainer) -> str:
        done, total = _position(trainer, self._batches)
        logged = trainer.progress_bar_metrics.items()
        figures = {n: float(v) for n, v in logged if n != "v_num" and isinstance(v, (int, float))}
        batches = int(total) if math.isfinite(total) else None
        return self._stages.line(
            {"stage": "training", "step": done, "batches": batches, "epoch": trainer.current_epoch, **figures}
        )


def _position(trainer: Trainer, batches: float) -> tuple[float, float]:
    """How many steps or batches are done, and of how many, by whatever ends the fit first."""
    limits = []
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        limits.append((float(trainer.global_step), float(trainer.max_steps)))
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append((batches, float(trainer.max_epochs * trainer.num_training_batches)))
    known = [(done, total) for done, total in limits if math.isfinite(total) and total > 0]
    return max(known, key=lambda at: at[0] / at[1], default=(batches, math.inf))
