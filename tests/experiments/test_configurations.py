"""Every YAML file of every recipe is a configuration that runs by itself, without ``tu-symmetry table``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningArgumentParser
from recipe_runs import RECIPES, Typed, class_paths, run_files, typed_commands

from tu_symmetry.configs import read_mapping
from tu_symmetry.tables.functions import build_parser
from tu_symmetry.tables.lightning import SymmetryCLI

pytestmark = pytest.mark.filterwarnings("ignore")
COMMANDS = typed_commands()
BY_RECIPE = {name: [t for t in COMMANDS if t.recipe == name] for name in sorted({t.recipe for t in COMMANDS})}
FAST = ("compact_posterior/digits", "symmetry_toy")
RUNS = [
    pytest.param(name, id=name, marks=() if name in FAST else pytest.mark.slow)
    for name in BY_RECIPE
    if not name.startswith("symmetry_aware/")  # published networks are on the network; the rest: test_symmetry_aware.py
]


@pytest.fixture(scope="module")
def lightning() -> LightningArgumentParser:
    """The parser of ``fit``, ``validate``, ``test`` and ``predict``, made once."""
    first = next(typed for typed in COMMANDS if typed.command == "fit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tu-symmetry"])
        patch.setattr(SymmetryCLI, "instantiate_classes", lambda self: None)
        patch.setattr(SymmetryCLI, "_run_subcommand", lambda self, name: None)
        return SymmetryCLI(args=["fit", "--config", str(first.file)]).parser


@pytest.mark.parametrize("recipe", BY_RECIPE)
def test_every_file_parses(recipe: str, lightning: LightningArgumentParser) -> None:
    """The classes that a file names exist and take the arguments that it gives; ``--print_config`` prints them."""
    rows = {(typed.file, *(flag.partition("=")[0] for flag in typed.flags)): typed for typed in BY_RECIPE[recipe]}
    for typed in rows.values():
        words = ["--config", str(typed.file), *typed.flags]
        parser = build_parser() if typed.command == "run" else lightning
        config = parser.parse_args(words if typed.command == "run" else [typed.command, *words])
        shown = parser.dump(config, skip_none=False, skip_validation=True)
        for path in class_paths(read_mapping(typed.file)):
            assert path.rpartition(".")[2] in shown
        if typed.command == "fit" and (folder := config.fit.trainer.default_root_dir) is not None:
            logger = config.fit.trainer.logger
            assert not logger or str(logger.init_args.save_dir).startswith(str(folder))


@pytest.mark.parametrize("recipe", RUNS)
def test_every_file_runs_by_itself(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a reader types one after the other in an empty folder, on small networks and few images."""
    monkeypatch.chdir(tmp_path)
    for typed in run_files(BY_RECIPE[recipe], tmp_path, "cpu"):
        if typed.command == "fit":
            assert list((tmp_path / folder_of(typed)).rglob("*.ckpt")), "what --ckpt_path last resumes from"
        elif typed.command == "test":
            assert "test/" in (shown := capsys.readouterr().out) or "Acc" in shown


def folder_of(typed: Typed) -> str:
    flag = next((f for f in typed.flags if f.startswith("--trainer.default_root_dir=")), None)
    return flag.partition("=")[2] if flag else str(read_mapping(typed.file)["trainer"].get("default_root_dir", "."))


def test_every_training_of_a_recipe_can_be_resumed() -> None:
    """A fit that the table runs keeps a checkpoint that is at most half a minute old."""
    tables = {path.parent for path in RECIPES.rglob("table.yaml")}
    for typed in COMMANDS:
        if typed.command == "fit" and typed.file.parent in tables:
            callbacks = list(class_paths(read_mapping(typed.file)["trainer"].get("callbacks", [])))
            assert any(path.endswith("LastCheckpoint") for path in callbacks), typed.file
