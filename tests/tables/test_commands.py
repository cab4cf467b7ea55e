"""A table of commands: skips what is done, resumes what was cut, and knows when a result was changed."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import toy_commands
from lightning.pytorch import Callback
from recipe_runs import run_table
from rich.console import Console

from tu_symmetry.cli import main
from tu_symmetry.configs import ConfigError
from tu_symmetry.files import FolderInUseError, lock_folder
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.commands import TableInterrupted, load_table, run_commands
from tu_symmetry.tables.outcome import Outcome

TABLE = """
title: Toy
root: runs/toy
commands:
  - {name: line, command: fit, config: line.yaml}
  - {name: double, command: run, config: double.yaml, needs: [line]}
"""
LINE = """
seed_everything: 0
trainer:
  accelerator: cpu
  max_epochs: 3
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: $root/$name
  callbacks:
    - class_path: tu_symmetry.callbacks.LastCheckpoint
      init_args: {every_seconds: 0}
routine: {class_path: toy_commands.Line, init_args: {out: $root/$name}}
data: {class_path: toy_commands.Points, init_args: {root: $data_root}}
"""
DOUBLE = """
command:
  class_path: toy_commands.double
  init_args: {out: $root/$name, line: $root/line}
"""


def written(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return written(tmp_path / "toy", table=TABLE, line=LINE, double=DOUBLE)


def run(recipe: Path, **options: object) -> tuple[dict[str, dict], list[str], str]:
    """Results, what was called, and what was shown."""
    toy_commands.CALLS.clear()
    console = Console(record=True, width=100, file=io.StringIO())
    options.setdefault("out", recipe.parent / "out")
    results = run_commands(recipe, display=Display(console), **options)  # type: ignore[arg-type]
    return results, list(toy_commands.CALLS), console.export_text()


def test_commands_run_in_order_and_are_skipped_when_done(recipe: Path) -> None:
    out = recipe.parent / "out"
    before = sys.argv
    results, calls, _ = run(recipe)
    assert calls == ["fit 3", "double"] and sys.argv is before
    weight = float((out / "line" / "weight.txt").read_text())
    assert results["double"]["value"] == 2 * weight
    assert json.loads((out / "results.json").read_text())["commands"]["double"]["results"]["value"] == 2 * weight
    again, calls, text = run(recipe)
    assert again == results and not calls and "▸" not in text
    more = recipe.parent / "more.yaml"
    for factor in (3, 5):  # a further configuration is part of what was run
        more.write_text(f"{{command: {{init_args: {{factor: {factor}}}}}}}")
        for expected in (["double"], []):
            results, calls, _ = run(recipe, overrides=[f"double.config={more}"])
            assert calls == expected and results["double"]["value"] == factor * weight
    (recipe / "line.yaml").write_text(LINE.replace("max_epochs: 3", "max_epochs: 4"))
    assert run(recipe)[1] == ["fit 4", "double"]


@pytest.mark.parametrize("damage", ["changed", "removed", "added"])
def test_a_result_that_was_touched_is_made_again_and_kept_aside(recipe: Path, damage: str) -> None:
    first, _, _ = run(recipe)
    folder = recipe.parent / "out" / "line"
    if damage == "removed":
        (folder / "weight.txt").unlink()
    else:
        (folder / ("weight.txt" if damage == "changed" else "notes.txt")).write_text("17.0")
    results, calls, text = run(recipe)
    assert calls == ["fit 3"] and results["double"] == first["double"]  # whose input came out the same
    assert "line is made again" in text
    (kept,) = folder.parent.glob("line.changed-*")
    assert any(file.read_text() == "17.0" for file in kept.glob("*.txt")) == (damage != "removed")


class Slow(Callback):
    """Takes a tenth of a second for an epoch, and counts."""

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        toy_commands.CALLS.append(f"epoch {trainer.current_epoch}")
        time.sleep(0.1)


def test_time_that_is_over_cuts_and_every_call_takes_it_further(recipe: Path) -> None:
    """The numbers of a run that was never cut; what a routine does at the end is done once, and no epoch twice."""
    toy_commands.Slow = Slow  # type: ignore[attr-defined]
    Slow.__module__ = "toy_commands"
    line = LINE.replace("max_epochs: 3", "max_epochs: 20")
    line = line.replace("  callbacks:\n", "  callbacks:\n    - class_path: toy_commands.Slow\n")
    (recipe / "line.yaml").write_text(line)
    whole, _, _ = run(recipe, out=recipe.parent / "whole")
    made: list[str] = []
    results, cuts = None, 0
    while results is None:
        try:
            results = run(recipe, max_time=timedelta(seconds=0.5))[0]
        except TableInterrupted as error:
            cuts += 1
            assert "resumes with" in str(error) and cuts < 40
        made += toy_commands.CALLS
    assert cuts > 1 and results["double"]["value"] == whole["double"]["value"]
    assert made == [*(f"epoch {epoch}" for epoch in range(20)), "fit 20", "double"]
    mark = json.loads((recipe.parent / "out" / ".table" / "line.json").read_text())
    assert mark["seconds"] > 2 and mark["resumed"]  # of all parts together
    with pytest.raises(TableInterrupted):
        run(recipe, max_time=timedelta(seconds=0), out=recipe.parent / "another")


def test_data_root_and_flags_reach_the_commands(recipe: Path) -> None:
    out = recipe.parent / "out"
    run(recipe, data_root="elsewhere", overrides=["line.trainer.max_epochs=1"])
    (config,) = (out / "line").rglob("config.yaml")
    assert "root: elsewhere" in config.read_text() and f"out: {out / 'line'}" in config.read_text()
    assert toy_commands.CALLS == ["fit 1", "double"]


def test_later_files_go_over_earlier_ones_and_copies_are_commands(recipe: Path) -> None:
    (recipe / "short.yaml").write_text("trainer: {max_epochs: 1}\n")
    (recipe / "both.yaml").write_text("command: {class_path: toy_commands.double, init_args: {line: $root/line_1}}\n")
    (recipe / "out.yaml").write_text("command: {init_args: {out: $root/$name}}\n")
    table = """
    title: Toy
    root: runs/toy
    bases: {fit: [line.yaml]}
    commands:
      - {name: line, command: fit, config: short.yaml, copies: 2}
      - {name: double, command: run, config: [both.yaml, out.yaml], needs: [line], set: {command.factor: 3}}
    """
    (recipe / "table.yaml").write_text(table)
    results, calls, _ = run(recipe)
    weights = [float((recipe.parent / "out" / f"line_{k}" / "weight.txt").read_text()) for k in (0, 1)]
    assert calls == ["fit 1", "fit 1", "double"] and results["double"]["value"] == 3 * weights[1]
    assert weights[0] != weights[1]  # the copies have seeds of their own
    (recipe / "short.yaml").write_text("trainer: {max_epochs: 2}\n")
    assert run(recipe)[1] == ["fit 2", "fit 2", "double"]


def test_the_printed_commands_are_what_the_table_runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, by_hand = recipe.parent / "out", recipe.parent / "by hand"
    more = ["line.trainer.max_epochs=4"]
    results, calls, _ = run(recipe, overrides=more)
    assert calls == ["fit 4", "double"]
    assert main(["table", str(recipe), "--print-commands", "--out", str(by_hand), "--set", *more]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert main(shlex.split(line)[1:]) == 0
    weight = (by_hand / "line" / "weight.txt").read_text()
    assert weight == (out / "line" / "weight.txt").read_text()
    assert Outcome.load(by_hand / "double").results == {k: v for k, v in results["double"].items() if k != "tables"}


def test_the_papers_numbers_may_stand_in_another_table(recipe: Path) -> None:
    file, content = recipe / "table.yaml", (recipe / "table.yaml").read_text()
    other = recipe.parent / "other"
    other.mkdir()
    (other / "table.yaml").write_text(content + "paper: {accuracy: {a: 0.5}}\n")
    file.write_text(content + "paper: ../other/table.yaml\n")
    assert load_table(recipe).paper == {"accuracy": {"a": 0.5}}
    file.write_text(content + "paper: ../none.yaml\n")
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_table(recipe)


def test_a_folder_in_use_and_one_that_the_table_has_not_made_are_left_alone(recipe: Path) -> None:
    foreign = recipe.parent / "out" / "line"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("mine")
    with lock_folder(foreign.parent), pytest.raises(FolderInUseError):
        run(recipe)
    with pytest.raises(ConfigError, match="this table has not made it"):
        run(recipe)
    assert (foreign / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("needs: [line]", "needs: [other]", "no earlier command"),
        ("name: double", "name: line", "stands once"),
        ("command: run", "command: train", "command"),
        ("config: double.yaml", "config: triple.yaml", "triple.yaml is missing"),
        ("config: line.yaml", "config: [line.yaml, elsewhere.yaml]", r"is 'runs/line', it must be '\$root/\$name'"),
        ("title: Toy", "titel: Toy", "titel"),
        (TABLE[TABLE.index("commands") :], "commands: []", "must list the commands"),
    ],
)
def test_a_wrong_table_is_refused(recipe: Path, old: str, new: str, message: str) -> None:
    (recipe / "table.yaml").write_text(TABLE.replace(old, new))
    (recipe / "elsewhere.yaml").write_text("trainer: {default_root_dir: runs/line}\n")
    with pytest.raises(ConfigError, match=message):
        load_table(recipe)


def test_only_functions_that_return_an_outcome_are_called(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe / "double.yaml").write_text(DOUBLE.replace("double\n", "not_a_command\n").replace(", line: $root/line", ""))
    with pytest.raises(SystemExit):
        run(recipe)
    assert "not_a_command" not in toy_commands.CALLS
    assert "Outcome" in capsys.readouterr().err


WALKS = """
title: Walk
root: runs/toy
commands:
  - {name: walk, command: run, config: walk.yaml}
  - {name: twice, command: run, config: twice.yaml, needs: [walk]}
"""
WALK = "command: {class_path: toy_functions.walk, init_args: {out: $root/$name, steps: 4}}\n"
TWICE = "command: {class_path: toy_functions.doubled, init_args: {out: $root/$name, walk: $root/walk}}\n"


def test_killed_in_a_function_it_resumes_from_the_parts_that_were_made(tmp_path: Path) -> None:
    walks, tests = written(tmp_path / "walks", table=WALKS, walk=WALK, twice=TWICE), Path(__file__).parents[1]
    whole, _ = run_table(walks, tmp_path / "whole")
    command = [sys.executable, "-m", "tu_symmetry.cli", "table", str(walks), "--out", str(tmp_path / "run")]
    environment = {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]), "TOY_KILL_AT": "2"}
    killed = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    results, _ = run_table(walks, tmp_path / "run")
    assert results["walk"]["found"] == 2  # two steps were kept
    assert results["walk"]["place"] == whole["walk"]["place"] and results["twice"] == whole["twice"]
