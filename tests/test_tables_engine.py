"""The tables' engine: order, skipping, changes, interruptions, and errors that say what to do."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tu_symmetry.tables.data import DataConfig, load_data
from tu_symmetry.tables.engine import run_table
from tu_symmetry.tables.grid import Grid
from tu_symmetry.tables.progress import Display
from tu_symmetry.tables.recipe import RecipeError, StageConfig, TableConfig, load_recipe, parse

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "table.yaml").write_text("title: Toy\nstages: [walk, twice]\n")
    (folder / "walk.yaml").write_text('stage: "toy_stages:count"\noptions: {steps: 4}\n')
    (folder / "twice.yaml").write_text('stage: "toy_stages:double"\ninputs: {walk: walk}\n')
    return folder


def run(recipe: Path, *overrides: str, fresh: bool = False) -> tuple[dict[str, Any], str]:
    console = Console(record=True, width=100, file=io.StringIO())
    display = Display(console)
    results = run_table(recipe, out=recipe.parent / "run", overrides=overrides, fresh=fresh, display=display)
    display.tables(results)
    return results, console.export_text()


def made(text: str) -> set[str]:
    return {line.split()[1] for line in text.splitlines() if line.startswith("▸")}


def test_runs_in_order_and_skips_what_is_done(recipe: Path) -> None:
    first, text = run(recipe)
    assert made(text) == {"walk", "twice"}
    assert first["twice"]["end"] == pytest.approx(2 * first["walk"]["walk"][-1])
    assert first["twice"]["nan"] is None  # as JSON can hold it
    again, text = run(recipe)
    assert made(text) == set()
    assert again == first
    assert "Doubled" in text and f"{first['twice']['end']:.6f}" in text  # the table is shown again


def test_a_change_reruns_the_stage_and_what_depends_on_it(recipe: Path) -> None:
    run(recipe)
    results, text = run(recipe, "walk.steps=6")
    assert made(text) == {"walk", "twice"}
    assert len(results["walk"]["walk"]) == 7
    (recipe / "twice.yaml").write_text('stage: "toy_stages:double"\ninputs: {walk: walk, other: walk}\n')
    _, text = run(recipe, "walk.steps=6")
    assert made(text) == {"twice"}


@pytest.mark.parametrize("override", ["seed=1", "data.train_size=100"])
def test_seed_and_data_are_part_of_every_fingerprint(recipe: Path, override: str) -> None:
    run(recipe)
    _, text = run(recipe, override)
    assert made(text) == {"walk", "twice"}


def test_the_seed_changes_the_draws(recipe: Path) -> None:
    first, _ = run(recipe)
    second, _ = run(recipe, "seed=1")
    assert first["walk"]["walk"] != second["walk"]["walk"]


def test_fresh_runs_everything_again_to_the_same_numbers(recipe: Path) -> None:
    first, _ = run(recipe)
    again, text = run(recipe, fresh=True)
    assert made(text) == {"walk", "twice"}
    assert again == first


def test_killed_in_the_middle_resumes_to_the_same_numbers(recipe: Path, tmp_path: Path) -> None:
    whole = run_table(recipe, out=tmp_path / "whole", display=Display(Console(quiet=True)))
    command = [sys.executable, "-m", "tu_symmetry.cli", "table", str(recipe), "--out", str(tmp_path / "run")]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": path, "TOY_KILL_AT": "2"}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "run" / "walk").exists()
    results, text = run(recipe)
    assert "resuming" in text
    assert results["walk"]["found"] == 2  # two steps were kept
    assert results["walk"]["walk"] == whole["walk"]["walk"]


def test_control_c_resumes_too(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_INTERRUPT_AT", "3")
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    monkeypatch.delenv("TOY_INTERRUPT_AT")
    assert run(recipe)[0]["walk"]["found"] == 3


def test_a_partial_stage_of_another_config_is_made_anew(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_INTERRUPT_AT", "3")
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    monkeypatch.delenv("TOY_INTERRUPT_AT")
    assert run(recipe, "walk.scale=2.0")[0]["walk"]["found"] == 0


def test_results_json_holds_everything(recipe: Path) -> None:
    results, _ = run(recipe)
    content = json.loads((recipe.parent / "run" / "results.json").read_text())
    assert content["stages"]["walk"]["results"] == results["walk"]
    assert content["stages"]["walk"]["options"] == {"steps": 4, "scale": 1.0}
    assert content["environment"]["torch"] == torch.__version__.partition("+")[0]
    assert content["stages"]["walk"]["seconds"] >= 0


def test_foreign_folders_are_left_alone(recipe: Path) -> None:
    foreign = recipe.parent / "run" / "walk"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(RecipeError, match="did not write it"):
        run(recipe)
    assert (foreign / "thesis.txt").read_text() == "mine"


def test_a_run_folder_serves_one_run_at_a_time(recipe: Path) -> None:
    import fcntl

    out = recipe.parent / "run"
    out.mkdir()
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RecipeError, match="in use by another run"):
            run(recipe)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("table.yaml", "title: T\nstages: [walk]\ntitel: x\n", "unknown key 'titel'.*did you mean 'title'"),
        ("table.yaml", "stages: [walk]\n", "'title' is missing"),
        ("table.yaml", "title: T\nstages: [nowhere]\n", "nowhere.yaml is missing"),
        ("table.yaml", "title: T\nstages: [walk]\ndata: {nam: digits}\n", "data: unknown key 'nam'"),
        ("table.yaml", "title: T\nstages: [walk]\ndata: {name: imagenet}\n", "the data sets are digits"),
        ("table.yaml", "title: T\nstages: [twice, walk]\n", "'walk', which is no earlier stage"),
        ("table.yaml", "title: [", "no valid YAML"),
        ("walk.yaml", 'stage: "toy_stages:count"\noptions: {stepz: 4}\n', "unknown key 'stepz'.*'steps'"),
        ("walk.yaml", 'stage: "toy_stages:count"\noptions: {steps: many}\n', "steps"),
        ("walk.yaml", 'stage: "toy_stages:count"\nopts: {}\n', "unknown key 'opts'"),
        ("walk.yaml", "stage: counting\n", "unknown stage 'counting'"),
        ("walk.yaml", 'stage: "toy_stages:Path"\n', "cannot import"),
        ("walk.yaml", 'stage: "toy_stages:CountOptions"\n', "is no stage"),
        ("twice.yaml", 'stage: "toy_stages:double"\n', "has the inputs walk"),
        ("twice.yaml", 'stage: "toy_stages:double"\ninputs: {walk: walk, more: walk}\n', "has the inputs walk"),
    ],
)
def test_errors_in_recipes_name_the_file_and_the_key(recipe: Path, file: str, text: str, message: str) -> None:
    (recipe / file).write_text(text)
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        run(recipe)
    assert not (recipe.parent / "run").exists()  # nothing was written


@pytest.mark.parametrize("override", ["nothing", "foo=1", "walk=3", "foo.bar=2", "walk.stepz=3", "data.size=1"])
def test_overrides_that_name_nothing_are_errors(recipe: Path, override: str) -> None:
    with pytest.raises(RecipeError):
        run(recipe, override)


def test_no_recipe_folder(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"no table\.yaml.*toy"):
        load_recipe(tmp_path / "toi")


def test_parse_reads_numbers_as_people_write_them() -> None:
    config = parse(
        TableConfig, {"title": "T", "stages": ["a"], "seed": 3, "model": {"init_args": {"hidden": [3]}}}, "t"
    )
    assert config.model.init_args == {"hidden": [3]} and config.data.name == "digits"
    assert parse(StageConfig, {"stage": "hmc", "options": {"x": 1e-3}}, "s").options == {"x": 1e-3}


def test_digits_are_stratified_and_always_the_same() -> None:
    data = load_data(DataConfig("digits"), Path("nowhere"))
    assert data.train_x.shape == (1437, 1, 8, 8) and data.test_x.shape == (360, 1, 8, 8)
    assert data.train_x.min() == 0 and data.train_x.max() == 1
    assert data.test_y.bincount().min() >= 35
    assert data.checksum == load_data(DataConfig("digits"), Path("elsewhere")).checksum
    assert data.checksum != load_data(DataConfig("digits", train_size=1000), Path("nowhere")).checksum
    with pytest.raises(RecipeError, match="there are 1437 images"):
        load_data(DataConfig("digits", train_size=2000), Path("nowhere"))


def test_grid_is_markdown_and_fits_a_terminal() -> None:
    grid = Grid("T", ["", "HMC\nq_d"], [["row\npaper", "0.1\n0.2"]], "caption")
    assert grid.markdown() == "|  | HMC q_d |\n|---|---:|\n| row *paper* | 0.1 *0.2* |\n\ncaption"
    assert Grid(**grid.to_dict()) == grid
    console = Console(record=True, width=80, file=io.StringIO())
    grid.print(console)
    assert "0.2" in console.export_text()
