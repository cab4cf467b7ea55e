"""``tu-symmetry fit | validate | test | predict``: TorchUncertainty's LightningCLI, with arguments as they were typed.

Beyond LightningCLI: ``$root``, ``$name`` and ``$data_root`` (:mod:`~tu_symmetry.tables.functions`), a routine without
``class_path`` is a ``ClassificationRoutine``, a resumed run overwrites its saved configuration, and a log file gets a
line of progress every half minute.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser

from tu_symmetry._extras import scripting_unsaid
from tu_symmetry.callbacks import LastCheckpoint, ProgressLines
from tu_symmetry.configs import ConfigError
from tu_symmetry.files import FileError, check_archive
from tu_symmetry.routines import MembersRoutine, MembersStrategy
from tu_symmetry.tables.functions import OneLineParser, add_folders, with_folders

with scripting_unsaid():
    from torch_uncertainty.utils.cli import TULightningCLI, TUSaveConfigCallback

ROUTINE = "torch_uncertainty.routines.ClassificationRoutine"
# whose classes a YAML file may name without their module
ROOMS = ("tu_symmetry.callbacks", "tu_symmetry.routines", "tu_symmetry.datamodules")


class _Parser(OneLineParser, LightningArgumentParser):
    """LightningCLI's, whose errors are one line."""


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
            save_config_callback=_SaveConfig,
            save_config_kwargs={"overwrite": True},
            parser_class=_Parser,
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The folders, and the routine's class unless a configuration names one."""
        super().add_arguments_to_parser(parser)
        add_folders(parser)
        parser.set_defaults({"routine": {"class_path": ROUTINE}})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, fills the folders in, and looks at the checkpoint before anything reads it."""
        super().parse_arguments(parser, args)
        subcommand = self.config["subcommand"]
        self.config[subcommand] = with_folders(self.config[subcommand])
        given = self.config[subcommand].get("ckpt_path")
        if given is not None:
            require_checkpoint(str(given))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Makes the trainer; processes that ``torchrun`` started share members, unless a strategy says otherwise."""
        given = self._get(self.config_init, "trainer")
        world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if world > 1 and given["strategy"] == "auto":
            if not isinstance(self.routine, MembersRoutine):
                raise ConfigError(
                    f"{world} processes would all do the same: {type(self.routine).__name__} is one process's, unless "
                    "trainer.strategy and trainer.devices say how they share it (ddp averages gradients)"
                )
            kwargs |= {"strategy": MembersStrategy(), "devices": local, "num_nodes": world // local}
        elif torch.cuda.is_available() and (own := torch.cuda.current_device()) and given["devices"] in (1, "1"):
            kwargs["devices"] = [own] if given["accelerator"] != "cpu" else 1  # of a process that has others beside it
        return super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs it; a checkpoint of another network is said in one line."""
        given = self.config[subcommand].get("ckpt_path")
        try:
            super()._run_subcommand(subcommand)
        except RuntimeError as error:
            if given is None or "loading state_dict" not in str(error):
                raise
            differs = "; ".join(line.strip() for line in str(error).splitlines()[1:3])[:300]
            said = f"--ckpt_path {given} is of another network than the configuration's: {differs}"
            raise ConfigError(said) from error

    def before_validate(self) -> None:
        """Validates with data modules that know no validation stage, as TorchUncertainty 0.13's."""
        setup = self.datamodule.setup
        self.datamodule.setup = lambda stage=None: setup("fit" if stage == "validate" else stage)

    def after_fit(self) -> None:
        """Evaluates where the configuration asks for it (not after a ``fast_dev_run``, which writes no checkpoint)."""
        if self.config["fit"]["eval_after_fit"] and not self.trainer.fast_dev_run:
            monitored = getattr(self.trainer.checkpoint_callback, "monitor", None) is not None
            self.trainer.test(self.routine, datamodule=self.datamodule, ckpt_path="best" if monitored else None)


class _SaveConfig(TUSaveConfigCallback):
    """Saves the configuration when a fit starts: after the checkpoint that it resumes from has been read."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save nothing yet, for an earlier run's configuration may stand there."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save."""
        super().setup(trainer, pl_module, "fit")


def require_checkpoint(path: str) -> None:
    """Refuse what is no checkpoint of a trainer, or was damaged; Lightning's own words (``last``) and URLs are left."""
    place = Path(path)
    sharded = (place / "meta.pt").is_file() or (place / "checkpoint").is_dir()
    if "://" in path or path in ("last", "best", "hpc") or path.startswith("registry") or sharded:
        return
    if not place.is_file():
        raise ConfigError(f"--ckpt_path {path}: there is no such file")
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"--ckpt_path: {path} is truncated, or no file of torch.save")
    try:
        with place.open("rb") as file:
            check_archive(file, path)
    except FileError as error:
        raise ConfigError(f"--ckpt_path: {error}, or take another") from error
    with zipfile.ZipFile(path) as archive:
        pickled = b"".join(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    if b"pytorch-lightning_version" not in pickled:
        raise ConfigError(f"--ckpt_path {path}: no trainer of Lightning has written it: give its own, as last.ckpt")


class OutOfTime(Exception):
    """A fit was cut at its deadline; its checkpoint says where it has come to."""


class _Deadline(LastCheckpoint):
    """Saves and raises at the first point after a time from which the run can be resumed."""

    def __init__(self, at: float) -> None:
        super().__init__(every_seconds=math.inf)
        self.at = at

    def consider(self, trainer: Trainer, *, ends: bool) -> None:
        if trainer.strategy.broadcast(time.monotonic() >= self.at) and not ends:
            self.save(trainer)
            raise OutOfTime


def run_lightning(
    arguments: Sequence[str], *, deadline: float | None = None, callbacks: Sequence[Callback] = ()
) -> SymmetryCLI:
    """Run what is typed after ``tu-symmetry``, ``["fit", "--config", "recipe.yaml", ...]``, with further callbacks.

    A fit is cut at its ``deadline`` (by :func:`time.monotonic`) without what callbacks and routines do at the end of an
    epoch or a fit, and resumes from ``checkpoints/last.ckpt`` in its folder.
    """
    before = sys.argv
    sys.argv = ["tu-symmetry", *arguments]  # LightningCLI warns about arguments that are not the program's own
    try:
        own = [ProgressLines(), *callbacks, *([] if deadline is None else [_Deadline(deadline)])]
        return SymmetryCLI(trainer_defaults={"callbacks": own})
    finally:
        sys.argv = before
