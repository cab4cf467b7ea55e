"""The tables' engine: order, skipping, changes, interruptions, and errors that say what to do."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from tu_symmetry.configs import ConfigError, check_numbers, parse
from tu_symmetry.files import lock_folder
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.data import DataConfig, load_data
from tu_symmetry.tables.engine import run_table
from tu_symmetry.tables.models import build_model
from tu_symmetry.tables.recipe import ModelConfig, StageConfig, TableConfig, load_recipe

TESTS = Path(__file__).parents[1]


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
    with pytest.raises(ConfigError, match="did not write it"):
        run(recipe)
    assert (foreign / "thesis.txt").read_text() == "mine"


def test_a_run_folder_serves_one_run_at_a_time(recipe: Path) -> None:
    out = recipe.parent / "run"
    out.mkdir()
    with lock_folder(out), pytest.raises(ConfigError, match="in use by another run"):
        run(recipe)


def died(work: Callable[[], Any], seconds: float) -> None:
    """Run something in a copy of this process and kill -9 it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def quiet(recipe: Path, out: Path, *overrides: str, fresh: bool = False) -> dict[str, Any]:
    display = Display(Console(quiet=True))
    return run_table(recipe, out=out, overrides=overrides, fresh=fresh, display=display)


def test_killed_anywhere_any_number_of_times_it_comes_to_the_same_end(recipe: Path, tmp_path: Path) -> None:
    """Also where old results are being replaced, which is when the walk has other steps or everything is fresh."""
    draw, out = random.Random(0), tmp_path / "run"
    expected = {steps: quiet(recipe, tmp_path / f"whole{steps}", f"walk.steps={steps}") for steps in (4, 9)}
    started = time.perf_counter()
    quiet(recipe, tmp_path / "timed", fresh=True)
    seconds = time.perf_counter() - started
    for number in range(40):
        steps, fresh = draw.choice((4, 9)), draw.random() < 0.4
        died(lambda s=steps, f=fresh: quiet(recipe, out, f"walk.steps={s}", fresh=f), 1.5 * seconds * draw.random())
        if number % 4 == 3:
            found = quiet(recipe, out, f"walk.steps={steps}")
            assert (
                found["walk"]["walk"] == expected[steps]["walk"]["walk"] and found["twice"] == expected[steps]["twice"]
            )
            assert {p.name for p in out.iterdir()} == {".lock", "results.json", "twice", "walk"}
            assert {p.name for p in (out / "walk").iterdir()} == {"stage.json", "walk.safetensors"}


@pytest.mark.parametrize("replace", ["os.replace", "shutil.rmtree", "pathlib.Path.mkdir", "pathlib.Path.write_bytes"])
def test_interrupted_at_every_step_on_disk_it_goes_on(
    replace: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = quiet(recipe, tmp_path / "whole")

    class Killed(BaseException):
        pass

    for number in range(60):
        out, left = tmp_path / f"run{number}", number
        quiet(recipe, out, "seed=5")  # an old result, which has to make room
        owner, _, name = replace.rpartition(".")
        module: Any = {"os": os, "shutil": shutil, "pathlib.Path": Path}[owner]
        original = getattr(module, name)

        def dying(*arguments: Any, original: Any = original, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed  # and what a `finally` wants to do on the way out fails too, as in a process that is dead
            return original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, dying)
            try:
                quiet(recipe, out)
                break
            except Killed:
                pass
        assert quiet(recipe, out)["twice"] == expected["twice"]
        assert {p.name for p in out.iterdir()} == {".lock", "results.json", "twice", "walk"}
    assert number >= 2


def test_a_partial_folder_without_a_mark_is_empty(recipe: Path) -> None:
    """As the version before left them; what lies in one is kept under another name."""
    out = recipe.parent / "run"
    (out / "walk.partial").mkdir(parents=True)
    (out / "twice.partial").mkdir()
    (out / "twice.partial" / "thesis.txt").write_text("mine")
    _, text = run(recipe)
    assert made(text) == {"walk", "twice"} and "nothing is known of it" in text
    (aside,) = out.glob("twice.partial.*.unmarked")
    assert (aside / "thesis.txt").read_text() == "mine"


def test_a_stage_that_was_killed_leaves_no_scratch(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_INTERRUPT_AT", "3")
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    monkeypatch.delenv("TOY_INTERRUPT_AT")
    partial = recipe.parent / "run" / "walk.partial"
    (partial / "samples").mkdir()
    (partial / "samples" / ".00000000-1a2b3c4d.safetensors.1a2b3c4d.tmp").write_bytes(b"half")
    (partial / ".walk.safetensors.1a2b3c4d.tmp").mkdir()
    assert run(recipe)[0]["walk"]["found"] == 3
    names = {p.name for p in (recipe.parent / "run" / "walk").rglob("*")}
    assert names == {"stage.json", "walk.safetensors", "samples"}


@pytest.mark.parametrize("file", ["walk/walk.safetensors", "walk/stage.json", "twice/stage.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "swapped"])
def test_results_that_were_changed_are_refused(file: str, damage: str, recipe: Path) -> None:
    run(recipe)
    path = recipe.parent / "run" / file
    content = path.read_bytes()
    if damage == "flipped":
        at = content.index(b'"end"') if b'"end"' in content else len(content) - 20
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif damage == "cut":
        path.write_bytes(content[:-5])
    elif damage == "gone":
        path.unlink()
    else:
        quiet(recipe, recipe.parent / "other", "seed=1")
        path.write_bytes((recipe.parent / "other" / file).read_bytes())
    if damage == "swapped" and file.endswith("stage.json"):
        _, text = run(recipe)  # the mark of another seed: its stage is made again
        assert path.parent.name in made(text)
        return
    with pytest.raises(ConfigError, match=rf"{path.parent}.*--(fresh|out)") as raised:
        run(recipe)
    assert "\n" not in str(raised.value)
    shutil.rmtree(path.parent)  # as the message says
    assert path.parent.name in made(run(recipe)[1])


def test_a_whole_stage_copied_over_another_is_made_again(recipe: Path) -> None:
    run(recipe)
    out = recipe.parent / "run"
    shutil.rmtree(out / "twice")
    shutil.copytree(out / "walk", out / "twice")
    results, text = run(recipe)
    assert made(text) == {"twice"} and "end" in results["twice"]


def test_a_result_of_another_version_is_kept_and_said(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tu_symmetry.__version__", "0.0.1")
        run(recipe)
    _, text = run(recipe)
    assert made(text) == set() and text.count("done before by tu_symmetry 0.0.1") == 2
    for name in ("walk", "twice"):  # of a version without seals
        mark = recipe.parent / "run" / name / "stage.json"
        content = json.loads(mark.read_text())
        mark.write_text(json.dumps({k: content[k] for k in ("fingerprint", "status", "results")}))
    _, text = run(recipe)
    assert made(text) == set()
    assert text.count("done before by an older version; its files cannot be checked") == 2


def test_a_damaged_file_in_a_partial_folder_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_INTERRUPT_AT", "3")
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    monkeypatch.delenv("TOY_INTERRUPT_AT")
    path = recipe.parent / "run" / "walk.partial" / "walk.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        ConfigError, match=r"stage walk: .*walk\.safetensors is truncated.*walk\.partial starts the stage"
    ):
        run(recipe)


def test_numbers_that_no_option_can_mean_are_refused(recipe: Path) -> None:
    for override, message in [
        ("walk.steps=0", "steps must be at least 1, got 0"),
        ("walk.steps=-3", "steps must be at least 1, got -3"),
        ("walk.scale=-0.5", "scale must be at least 0, got -0.5"),
        ("walk.scale=.nan", "scale must be a finite number, .* got nan"),
        ("walk.scale=.inf", "scale must be a finite number, .* got inf"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run(recipe, override)
    with pytest.raises(ConfigError, match="burn_in must be at least 0, got -5"):
        check_numbers(Burning(burn_in=-5), "hmc")
    check_numbers(Burning(burn_in=0), "hmc")


@dataclass(frozen=True)
class Burning:
    """Options of a stage with a number that may be zero."""

    burn_in: int = field(default=100, metadata={"least": 0})


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, "aliases stand for more than 100000 values"),
        ("a: &a {x: 1}\nb: &b {<<: *a, y: *a}\ntitle: T\ntitle: U\n", "'title' stands twice"),
        ("title: T\nstages: [walk]\ndata: {name: digits, name: mnist}\n", "'name' stands twice"),
        ("title: &a [*a]\n", "stand for more than"),
        ("title: " + "[" * 800 + "]" * 800, "nested too deeply"),
        ("title: 2020-13-45\n", "no valid YAML"),
        ("title: T\nstages: [walk, walk]\n", "'walk' is listed twice"),
        ("title: T\nstages: [../walk]\n", r"'\.\./walk' is no name of a stage"),
        ("title: T\nstages: [walk.partial]\n", "is no name of a stage"),
        ("title: T\nstages: [[walk]]\n", "is no name of a stage"),
        ("title: " + "x" * 2_000_000, "too long"),
    ],
    ids=range(11),
)
def test_yaml_that_means_harm_or_nothing(content: str, message: str, recipe: Path) -> None:
    (recipe / "table.yaml").write_text(content)
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=message):
        run(recipe)
    assert time.perf_counter() - started < 30


def test_yaml_has_to_be_utf_8(recipe: Path) -> None:
    (recipe / "table.yaml").write_bytes("title: Größe\nstages: [walk]\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"table\.yaml is no text in UTF-8 \(byte 9\)"):
        run(recipe)
    (recipe / "table.yaml").write_bytes("title: Größe\nstages: [walk, twice]\n".encode("utf-8-sig"))
    run(recipe)


CALLED: list[str] = []


def careless(**options: Any) -> None:
    CALLED.append("careless")


def careful(in_features: int, num_classes: int) -> nn.Linear:
    CALLED.append("careful")
    return nn.Linear(in_features, num_classes)


@pytest.mark.parametrize("name", ["os.system", "builtins.print", f"{__name__}.careless", "pathlib.Path", "os.path"])
def test_what_a_recipe_names_is_looked_at_before_it_is_called(name: str) -> None:
    data = load_data(DataConfig("digits", 20, 20), Path("nowhere"))
    CALLED.clear()
    with pytest.raises(ConfigError, match=f"{name} is neither a class of .* so it was not called"):
        build_model(ModelConfig(name, {"command": "true"}), data)
    assert CALLED == []
    assert isinstance(build_model(ModelConfig(f"{__name__}.careful"), data), nn.Linear)


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
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        run(recipe)
    assert not (recipe.parent / "run").exists()  # nothing was written


@pytest.mark.parametrize("override", ["nothing", "foo=1", "walk=3", "foo.bar=2", "walk.stepz=3", "data.size=1"])
def test_overrides_that_name_nothing_are_errors(recipe: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        run(recipe, override)


def test_no_recipe_folder(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"no table\.yaml.*toy"):
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
    with pytest.raises(ConfigError, match="there are 1437 images"):
        load_data(DataConfig("digits", train_size=2000), Path("nowhere"))


def test_grid_is_markdown_and_fits_a_terminal() -> None:
    grid = Grid("T", ["", "HMC\nq_d"], [["row\npaper", "0.1\n0.2"]], "caption")
    assert grid.markdown() == "|  | HMC q_d |\n|---|---:|\n| row *paper* | 0.1 *0.2* |\n\ncaption"
    assert Grid(**grid.to_dict()) == grid
    console = Console(record=True, width=80, file=io.StringIO())
    grid.print(console)
    assert "0.2" in console.export_text()
