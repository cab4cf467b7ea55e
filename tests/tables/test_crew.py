"""Two processes that ``torchrun`` starts write the files of a table that one writes; a kill, an error, a resumption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import run_table
from toy_networks import tree

from tu_symmetry.cli import main
from tu_symmetry.configs import ConfigError
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.crew import Crew
from tu_symmetry.tables.outcome import digest_tensors, plain

TABLE = """
title: Crew
root: runs/crew
bases: {fit: [fits.yaml]}
commands:
  - {name: reference, command: fit, config: members.yaml, together: true}
  - {name: chain, command: fit, config: chain.yaml, copies: 3, seeds: [routine.seed, routine.chain]}
  - {name: fragile, command: run, config: fragile.yaml}
  - {name: digests, command: run, config: digests.yaml, needs: [reference, chain]}
"""
FITS = """
seed_everything: 0
trainer:
  accelerator: cpu
  devices: 1
  default_root_dir: $root/$name
  enable_model_summary: false
  log_every_n_steps: 1
  enable_progress_bar: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: $root/$name, name: log}}
  callbacks:
    - {class_path: tu_symmetry.callbacks.LastCheckpoint, init_args: {every_seconds: 0}}
data:
  class_path: tu_symmetry.datamodules.DigitsDataModule
  init_args: {train_size: 200, test_size: 100}
"""
MEMBERS = """
trainer: {max_epochs: 3, gradient_clip_val: 0.5}
routine:
  class_path: tu_symmetry.routines.MembersRoutine
  init_args:
    model: {class_path: tu_symmetry.tables.models.MLP, init_args: {in_features: 64, num_classes: 10, hidden: [8]}}
    num_members: 5
    samples: $root/$name/samples
data: {init_args: {batch_size: 40, orders: 5}}
eval_after_fit: true
"""
CHAIN = """
trainer: {max_steps: 4, limit_val_batches: 0}
routine:
  class_path: tu_symmetry.routines.HMCRoutine
  init_args:
    model: {class_path: tu_symmetry.tables.models.MLP, init_args: {in_features: 64, num_classes: 10, hidden: [8]}}
    leapfrog_steps: 3
    burn_in: 1
    samples: $root/$name/samples
data: {init_args: {batch_size: full}}
"""
FRAGILE = """
command: {class_path: toy_commands.fragile, init_args: {out: $root/$name, first: $data_root/first}}
"""
DIGESTS = """
command: {class_path: toy_commands.digests, init_args: {out: $root/$name, root: $root}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "crew"
    folder.mkdir()
    files = {"table": TABLE, "fits": FITS, "members": MEMBERS, "chain": CHAIN, "fragile": FRAGILE, "digests": DIGESTS}
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def typed(recipe: Path, *words: str, count: int = 2) -> subprocess.CompletedProcess[str]:
    """What so many processes of ``tu-symmetry table`` say."""
    launched = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    command = [*launched, "-m", "tu_symmetry", "table", str(recipe), "--data-root", str(recipe.parent), *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)


def compared(root: Path) -> dict[str, Any]:
    """All files of a run but those that say when and where it ran; of checkpoints and stores what they hold."""
    found: dict[str, Any] = {}
    for store in (SampleStore.open(path.parent) for path in root.rglob("store.json")):
        places = [(record.chain, record.step) for record in store.records]
        found[str(store.folder.relative_to(root))] = places, digest_tensors(*store.load().values())
    for name, content in tree(root).items():
        if name.endswith(".ckpt"):
            kept = torch.load(root / name, weights_only=True)
            found[name] = plain({key: kept[key] for key in kept if key != "callbacks"})
        elif not name.startswith((".table", "results.json", ".lock")) and "/samples/" not in name:
            found[name] = str(content).replace(str(root), "ROOT")
    return found


@pytest.mark.slow
def test_two_processes_write_the_files_of_one(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first run of two processes is killed in one of them; the same command makes what is left."""
    one, two = recipe.parent / "one", recipe.parent / "two"
    killed = typed(recipe, "--out", str(two))
    assert killed.returncode != 0 and (recipe.parent / "first").exists()
    assert not (two / "digests").exists() and (two / "reference" / "samples").exists()
    made = {path: path.stat().st_mtime_ns for path in (two / "reference").rglob("*") if path.is_file()}
    done = typed(recipe, "--out", str(two))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("✓ reference done before") == 1 and done.stdout.count("✓ digests") == 1
    assert {path: path.stat().st_mtime_ns for path in made} == made
    run_table(recipe, one, data_root=recipe.parent)
    mine, theirs = compared(one), compared(two)
    assert mine.keys() == theirs.keys() and len(mine) == 18
    assert [name for name in mine if mine[name] != theirs[name]] == []
    results = [json.loads((root / "results.json").read_text())["commands"] for root in (one, two)]
    assert [r["results"] for r in results[0].values()] == [r["results"] for r in results[1].values()]
    assert list(results[0]) == list(results[1])


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_one_line(recipe: Path) -> None:
    failed = typed(recipe, "--out", str(recipe.parent / "two"), "--set", "chain_1.routine.step_size=-1.0")
    said = [line for line in failed.stderr.splitlines() if line.startswith("tu-symmetry")]
    assert failed.returncode != 0 and len(said) == 1, failed.stderr
    assert "step_size" in said[0] and "chain_1" in said[0]
    failed = typed(recipe, "--out", str(recipe.parent / "few"), "--set", "reference.routine.chunk_size=5")
    said = [line for line in failed.stderr.splitlines() if line.startswith("tu-symmetry")]
    assert len(said) == 1 and "fewer than 2 processes" in said[0] and "(reference, in process" in said[0]


def test_one_process_is_a_crew_of_one() -> None:
    crew = Crew()
    with crew.at_work(), crew.alone("command"):
        crew.all_here("start")
        assert (crew.number, crew.count) == (0, 1) and crew.first("taken", "0") == "0" and not crew.said("taken")
    with pytest.raises(ZeroDivisionError), crew.at_work():
        raise ZeroDivisionError


def test_fits_that_all_processes_would_repeat_are_refused(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    files = [f"--config={recipe / name}.yaml" for name in ("fits", "chain")]
    assert main(["fit", *files, f"--root={recipe.parent / 'typed'}"]) == 2
    assert "2 processes would all do the same: HMCRoutine is one process's" in capsys.readouterr().err


def test_only_trainings_are_run_together(recipe: Path) -> None:
    table = (recipe / "table.yaml").read_text()
    (recipe / "table.yaml").write_text(table.replace("fragile.yaml}", "fragile.yaml, together: true}"))
    with pytest.raises(ConfigError, match=r"'fragile': together is for a training \(fit\)"):
        load_table(recipe)
