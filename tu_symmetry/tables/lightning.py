"""``tu-symmetry fit | validate | test | predict``: TorchUncertainty's LightningCLI, with arguments as they were typed.

What a reader knows of LightningCLI holds: several ``--config`` files (the later overrides the earlier), dotted flags,
``--print_config``, ``--trainer.callbacks+=Rebasin`` by the bare name of a class, ``--ckpt_path last``. Four things
are added: a routine without ``class_path`` is a ``ClassificationRoutine``; ``--eval_after_fit`` takes true and false; a
configuration that an earlier part of a resumed run saved is overwritten rather than refused; outside of a terminal, in
a log file say, a line every half minute says how far a run is and how long it still takes.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import ActionYesNo, get_loader, set_loader
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from tu_symmetry._extras import scripting_unsaid
from tu_symmetry.callbacks import LastCheckpoint, ProgressLines
from tu_symmetry.configs import ConfigError, read_yaml

with scripting_unsaid():
    from torch_uncertainty.utils.cli import TULightningCLI, TUSaveConfigCallback

ROUTINE = "torch_uncertainty.routines.ClassificationRoutine"
# whose classes a YAML file may name without their module
ROOMS = ("tu_symmetry.callbacks", "tu_symmetry.routines", "tu_symmetry.datamodules")


class SymmetryCLI(TULightningCLI):
    """TorchUncertainty's LightningCLI over any routine and any data module."""

    def __init__(self, **kwargs: Any) -> None:
        for room in ROOMS:
            module = importlib.import_module(room)
            for name in module.__all__:
                getattr(module, name)
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=TUSaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """``--eval_after_fit`` as a switch that takes a value (TorchUncertainty's can only be set)."""
        parser.add_argument(
            "--eval_after_fit",
            action=ActionYesNo,
            nargs="?",
            default=self.eval_after_fit_default,
            help="whether fit is followed by test, on the checkpoint that a monitor chose, or else on the last weights",
        )
        LightningCLI.add_default_arguments_to_parser(self, parser)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The routine's class unless a configuration names one."""
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"routine": {"class_path": ROUTINE}})

    def before_validate(self) -> None:
        """Validates with data modules that know no validation stage, as TorchUncertainty 0.13's."""
        setup = self.datamodule.setup
        self.datamodule.setup = lambda stage=None: setup("fit" if stage == "validate" else stage)

    def after_fit(self) -> None:
        """Evaluates where the configuration asks for it (not after a ``fast_dev_run``, which writes no checkpoint)."""
        if self.config["fit"]["eval_after_fit"] and not self.trainer.fast_dev_run:
            monitored = getattr(self.trainer.checkpoint_callback, "monitor", None) is not None
            self.trainer.test(self.routine, datamodule=self.datamodule, ckpt_path="best" if monitored else None)


class OutOfTime(Exception):
    """A fit was cut at its deadline; its checkpoint says where it has come to."""


class _Deadline(LastCheckpoint):
    """Saves and raises at the first point after a time from which the run can be resumed."""

    def __init__(self, at: float) -> None:
        super().__init__(every_seconds=math.inf)
        self.at = at

    def consider(self, trainer: Trainer, *, ends: bool) -> None:
        if time.monotonic() >= self.at and not ends:
            self.save(trainer)
            raise OutOfTime


def run_lightning(arguments: Sequence[str], *, deadline: float | None = None) -> SymmetryCLI:
    """Run a subcommand, ``["fit", "--config", "recipe.yaml", ...]``, as LightningCLI understands it.

    Args:
        arguments: what is typed after ``tu-symmetry``.
        deadline: of a fit, by :func:`time.monotonic`. It is then cut without what callbacks and routines do at the end
            of an epoch or a fit, and resumes from ``checkpoints/last.ckpt`` in its folder.

    Returns:
        What ran, with its ``trainer`` and ``routine``.

    Raises:
        OutOfTime: the deadline was reached before the fit's end.
        SystemExit: as LightningCLI does, for ``--help``, ``--print_config`` and arguments that do not fit.
    """
    _bound_aliases()
    before = sys.argv
    sys.argv = ["tu-symmetry", *arguments]  # LightningCLI warns about arguments that are not the program's own
    try:
        own: list[Callback] = [ProgressLines(), *([] if deadline is None else [_Deadline(deadline)])]
        return SymmetryCLI(trainer_defaults={"callbacks": own})
    finally:
        sys.argv = before


def _bound_aliases() -> None:
    """Have jsonargparse refuse YAML whose aliases, written out, are more than a machine can hold; once is enough."""
    load = get_loader("yaml")
    if getattr(load, "bounded", False):
        return

    def bounded(text: str) -> Any:
        if "&" in text and "*" in text:
            try:
                read_yaml(text, "the configuration")
            except ConfigError as error:
                raise yaml.YAMLError(str(error)) from error
        return load(text)

    bounded.bounded = True  # type: ignore[attr-defined]
    set_loader("yaml", bounded, exceptions=(yaml.YAMLError,))


def was_cut(trainer: Trainer) -> bool:
    """Whether ``max_time`` ended a fit that had not reached its last epoch or step."""
    timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
    if not any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers):
        return False
    epochs, steps = trainer.max_epochs, trainer.max_steps
    reached = (epochs is not None and 0 <= epochs <= trainer.current_epoch) or 0 <= steps <= trainer.global_step
    return not reached
