"""One checkpoint, ``last.ckpt``, from which a run resumes to the numbers of a run that was never interrupted."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from tu_symmetry.callbacks.members import shards_weights
from tu_symmetry.files import clear_scratch, replacing
from tu_symmetry.posterior.network import require_numbers
from tu_symmetry.routines.runs import is_over

_RANDOM = "global_random_states"
_METRICS = "callback_metrics"
_COUNTS = "optimizer_counts"


class LastCheckpoint(ModelCheckpoint):
    """Keeps ``last.ckpt``: at most ``every_seconds`` old, and written when training ends or is cut.

    ``--ckpt_path last`` resumes from it, and the run then gives the numbers of one that was not interrupted, bit for
    bit where the device's kernels are deterministic. Unlike Lightning's ``ModelCheckpoint(save_last=True)`` it saves
    an epoch that ``max_time`` or ``max_steps`` cuts before its end hooks, a whole one after all of them; it keeps
    global random states (where all processes read the same batches), counts of an optimizer outside of its
    ``state_dict`` and what was logged; and weights in double precision are not rounded on their way back.

    In the middle of an epoch a checkpoint is written only where the training loader keeps its place (``state_dict``
    and ``load_state_dict``, as the loaders of this package and of torchdata do), and where no gradients are being
    accumulated. With other loaders it is written at the end of an epoch only.

    Give the length of a run as ``max_epochs`` where you can: Lightning 2.6 counts one epoch too few after a run of
    ``max_steps`` is resumed at the end of an epoch. ``max_time`` counts the time of all parts of a resumed run.

    Args:
        dirpath: folder of the file; ``checkpoints`` in ``default_root_dir`` of the trainer by default.
        every_seconds: seconds between two checkpoints; 0 for every batch.
    """

    def __init__(self, dirpath: str | Path | None = None, every_seconds: float = 30.0) -> None:
        require_numbers(every_seconds=every_seconds)
        if not every_seconds >= 0:
            raise ValueError(f"every_seconds must not be negative, got {every_seconds}")
        super().__init__(dirpath=dirpath, save_last=True, save_top_k=0)
        self.every_seconds = every_seconds
        self._saved_at = 0.0
        self._random: dict[str, Any] | None = None
        self._metrics: dict[str, Any] = {}
        self._counts: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the folder, and give the weights the precision of a run before a checkpoint is read into them."""
        self._choose_folder(trainer)
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.is_global_zero and "://" not in str(self.dirpath):
            clear_scratch(str(self.dirpath), of=[self.CHECKPOINT_NAME_LAST + self.FILE_EXTENSION])
        if isinstance(trainer.precision_plugin, DoublePrecision):
            pl_module.double()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting, with what was logged and what optimizers had counted before the cut."""
        self._saved_at = time.monotonic()
        self._say_what_was_logged(trainer)
        for optimizer, counts in zip(trainer.optimizers, self._counts, strict=False):
            vars(optimizer).update(counts)
        self._counts = []

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what was logged, of a fit that was resumed at its end."""
        self._say_what_was_logged(trainer)

    def _say_what_was_logged(self, trainer: Trainer) -> None:
        trainer.callback_metrics.update(self._metrics)
        self._metrics = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save in the middle of an epoch; its last batch is left to the end of the epoch."""
        if not trainer.is_last_batch and not trainer.fit_loop._should_accumulate() and keeps_its_place(trainer):
            self.consider(trainer, ends=trainer.fit_loop.epoch_loop.done)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after a whole epoch, not after one that was cut."""
        keeps = keeps_its_place(trainer)
        if not trainer.is_last_batch and keeps:
            return
        ends = trainer.should_stop or is_over(trainer, trainer.current_epoch + 1, trainer.global_step)
        if ends or trainer.max_steps == -1 or trainer.num_training_batches == 1 or not keeps:
            self.consider(trainer, ends=ends)

    def consider(self, trainer: Trainer, *, ends: bool) -> None:
        """Save if it is time, or if training ends, at a point from which a run can be resumed."""
        due = time.monotonic() - self._saved_at >= self.every_seconds
        if trainer.world_size > 1:
            due = trainer.strategy.broadcast(due)
        if (ends or due) and not self._should_skip_saving_checkpoint(trainer):
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write the file, whole or not at all."""
        path = os.path.join(str(self.dirpath), self.CHECKPOINT_NAME_LAST + self.FILE_EXTENSION)
        self.last_model_path = path
        self._saved_at = time.monotonic()
        if "://" in path or shards_weights(trainer):
            self._save_checkpoint(trainer, path)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) if trainer.is_global_zero else nullcontext(Path(path)) as temporary:
            self._save_checkpoint(trainer, str(temporary))
        self._last_checkpoint_saved = path

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save nothing: validation is part of an epoch."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save nothing: the end has been saved as that of an epoch or a batch."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the global random states into the checkpoint."""
        if _reads_all(trainer):
            states = _collect_rng_states()
            name, keys, *rest = states["numpy"]
            checkpoint[_RANDOM] = states | {"numpy": [name, keys.tolist(), *rest]}  # no array: `weights_only` loads it
        checkpoint[_COUNTS] = [_counts(optimizer) for optimizer in trainer.optimizers]
        checkpoint[_METRICS] = {k: v.detach().cpu() for k, v in trainer.callback_metrics.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the global random states and what was logged, for a fit that is resumed."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._random, self._metrics = checkpoint.get(_RANDOM), checkpoint.get(_METRICS, {})
            self._counts = checkpoint.get(_COUNTS, [])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the random states in place, before the first epoch draws from them."""
        if self._random is not None and _reads_all(trainer):
            name, keys, *rest = self._random["numpy"]
            _set_rng_states(self._random | {"numpy": (name, np.array(keys, dtype=np.uint32), *rest)})
        self._random = None

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        self._choose_folder(trainer)
        return super()._find_last_checkpoints(trainer)

    def _choose_folder(self, trainer: Trainer) -> None:
        if self.dirpath is None:
            self.dirpath = os.path.join(os.path.realpath(trainer.default_root_dir), "checkpoints")


def _reads_all(trainer: Trainer) -> bool:
    """Whether this process reads all batches, and so has the random states of any other."""
    return bool((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1) == 1)


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers that an optimizer keeps as its attributes."""
    kept = {name: value for name, value in vars(optimizer).items() if not name.startswith("_")}
    copied = {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in kept.items()}
    return {name: v for name, v in copied.items() if isinstance(v, (int, float, Tensor))}


def keeps_its_place(trainer: Trainer) -> bool:
    """Whether the training loaders say in a checkpoint how far they have come in an epoch."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return all(isinstance(loader, _Stateful) for loader in loaders)
