"""Every command of every recipe runs by itself, without ``tu-symmetry table``."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningArgumentParser
from recipe_runs import RECIPES, class_paths, run_files, typed_commands

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
        return SymmetryCLI(args=["fit", *first.words]).parser


@pytest.mark.parametrize("recipe", BY_RECIPE)
def test_every_command_parses(recipe: str, lightning: LightningArgumentParser) -> None:
    """The classes that its files name exist and take the arguments that they give; ``--print_config`` prints them."""
    rows = {(typed.files, *(flag.partition("=")[0] for flag in typed.flags)): typed for typed in BY_RECIPE[recipe]}
    for typed in rows.values():
        parser = build_parser() if typed.command == "run" else lightning
        config = parser.parse_args(typed.words if typed.command == "run" else [typed.command, *typed.words])
        shown = parser.dump(config, skip_none=False, skip_validation=True)
        for path in class_paths(typed.content):
            assert path.rpartition(".")[2] in shown
        if typed.command == "fit" and (folder := config.fit.trainer.default_root_dir) is not None:
            logger = config.fit.trainer.logger
            assert not logger or str(logger.init_args.save_dir).startswith(str(folder))


def test_the_commands_of_the_readmes_parse(lightning: LightningArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    typed = re.compile(r"^    tu-symmetry ((?:fit|test|run) [^#]*?)(?:\s*#.*)?$", re.MULTILINE)
    found = []
    for page in RECIPES.rglob("README.md"):
        found += [shlex.split(line) for line in typed.findall(page.read_text().replace("\\\n", " "))]
    assert len(found) > 6
    for words in found:
        (build_parser() if words[0] == "run" else lightning).parse_args(words[words[0] == "run" :])


def test_the_readmes_say_how_long_a_table_takes() -> None:
    for table in RECIPES.rglob("table.yaml"):
        lines = re.findall(r"^    tu-symmetry table .*$", (table.parent / "README.md").read_text(), re.MULTILINE)
        assert re.search(r"  # (.*\d.* (s|minutes) (of processor time|on an H100)|not run)", lines[0]), table


@pytest.mark.parametrize("recipe", RUNS)
def test_every_command_runs_by_itself(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a reader types one after the other in an empty folder, on small networks and few images."""
    monkeypatch.chdir(tmp_path)
    for typed in run_files(BY_RECIPE[recipe], tmp_path, "cpu"):
        if typed.command == "fit":
            assert list((tmp_path / typed.folder).rglob("*.ckpt")), "what --ckpt_path last resumes from"
        elif typed.command == "test":
            assert "test/" in (shown := capsys.readouterr().out) or "Acc" in shown


def test_every_training_of_a_recipe_can_be_resumed() -> None:
    """A fit that the table runs keeps a checkpoint that is at most half a minute old."""
    for typed in COMMANDS:
        if typed.command == "fit" and typed.recipe != "lightning":
            callbacks = list(class_paths(typed.content["trainer"]["callbacks"]))
            assert any(path.endswith("LastCheckpoint") for path in callbacks), typed.files
