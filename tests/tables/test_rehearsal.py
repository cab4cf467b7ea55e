"""Rehearsals: what a table will take, from a few steps of each of its commands at full size."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_functions
import yaml
from fake_cuda.device import real_device
from recipe_runs import RECIPES
from rich.console import Console

from tu_symmetry.cli import main
from tu_symmetry.configs import ConfigError, merged
from tu_symmetry.datamodules import CIFARDataModule, IDXDataModule, planted
from tu_symmetry.posterior.published import collect_checkpoints
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.models import MLP
from tu_symmetry.tables.rehearsal import Forecast, _Pace, _whole, forecast_table, rehearse

pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu", "default_root_dir": "$root/$name"}
MODEL = {
    "class_path": "tu_symmetry.tables.models.MLP",
    "init_args": {"in_features": 784, "num_classes": 10, "hidden": [6]},
}
FIT = {
    "trainer": QUIET | {"max_epochs": 7, "check_val_every_n_epoch": 7},
    "routine": {
        "class_path": "tu_symmetry.routines.MembersRoutine",
        "init_args": {"model": MODEL, "num_members": 2, "samples": "$root/$name/samples"},
    },
    "data": {
        "class_path": "tu_symmetry.datamodules.IDXDataModule",
        "init_args": {"root": "$data_root", "batch_size": 1000, "orders": 2},
    },
}
WALK = {"class_path": "toy_functions.walk", "init_args": {"out": "$root/$name", "steps": 4}}
WRONG = {"class_path": "toy_functions.doubled", "init_args": {"out": "$root/$name", "walk": "$root/nowhere"}}
TABLE: dict[str, Any] = {
    "title": "Toy",
    "root": "runs/toy",
    "commands": [
        {"name": "networks", "command": "fit", "config": "fit.yaml", "copies": 3},
        {"name": "walk", "command": "run", "config": "walk.yaml", "needs": ["networks"]},
        {"name": "wrong", "command": "run", "config": "wrong.yaml"},
        {"name": "late", "command": "run", "config": "walk.yaml", "needs": ["wrong"]},
    ],
    "rehearsal": {"walk": {"set": {"command.steps": 2}, "times": 50}, "networks": {"step_times": 10}},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    folder.mkdir()
    for name, content in (("table", TABLE), ("fit", FIT), ("walk", {"command": WALK}), ("wrong", {"command": WRONG})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


def run(recipe: Path, out: Path, **options: Any) -> tuple[list[Forecast], str]:
    console = Console(record=True, width=160, file=io.StringIO())
    return rehearse(recipe, out=out, display=Display(console), **options), console.export_text()


def test_every_command_is_forecast_from_a_few_steps(recipe: Path, tmp_path: Path) -> None:
    made, shown = run(recipe, tmp_path / "out", data_root=tmp_path / "nothing")
    networks, walk, wrong, late = made
    assert (networks.name, networks.copies, networks.steps) == ("networks_0", 3, 7 * 60)  # of 60,000 planted images
    assert networks.step is not None and networks.seconds > networks.steps * networks.step > 0
    assert networks.rehearsed < networks.seconds and networks.disk_bytes > 2 * 4 * 785 * 6
    assert walk.steps == 0 and walk.step is None and walk.seconds == pytest.approx(50 * walk.rehearsed)
    assert wrong.error.startswith("FileNotFoundError") and late.error == "not tried: it needs wrong"
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_file() and p.suffix) == [
        "rehearsal.json",
        "rehearsal.md",
    ]
    assert not [p for p in (tmp_path / "out").iterdir() if p.is_dir()], "what was written is removed"
    content = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert [f["name"] for f in content["forecasts"]] == ["networks_0", "walk", "wrong", "late"]
    assert "networks × 3" in shown and "420 ×" in shown and "not tried" in shown


def test_data_sets_that_are_there_are_taken_and_left_alone(recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    planted.plant_idx(root, "mnist", train=3000, test=100)
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    made, _ = run(
        recipe,
        tmp_path / "out",
        data_root=root,
        overrides=["networks_0.routine.num_members=1", "networks_0.data.orders=1"],
    )
    assert made[0].steps == 7 * 3
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before


def test_the_command_says_whether_all_went_well(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["table", str(recipe), "--rehearse", "--data-root", str(tmp_path / "data")]
    assert main(words) == 1
    content = yaml.safe_load((recipe / "table.yaml").read_text())
    content["commands"] = content["commands"][:2]
    (recipe / "table.yaml").write_text(yaml.safe_dump(content))
    assert main(words) == 0
    assert (tmp_path / "runs" / "toy-rehearsal" / "rehearsal.md").is_file() and not (tmp_path / "runs" / "toy").exists()
    content["rehearsal"]["unknown"] = {}
    (recipe / "table.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="unknown"):
        load_table(recipe)
    content["rehearsal"] = {"walk": {"often": 3}}
    (recipe / "table.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="often"):
        run(recipe, tmp_path / "third", data_root=tmp_path / "data")
    content["rehearsal"] = {"walk": {"planted": {"MNIST": {"train": 9}}}}  # walk reads no data set
    content["commands"] = [content["commands"][1] | {"needs": []}]
    (recipe / "table.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="does not read"):
        run(recipe, tmp_path / "fourth", data_root=tmp_path / "data")


def test_smaller_pieces_count_more_often(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of 5 s and a piece of 2 s a step, by a clock that the command itself moves."""
    content = yaml.safe_load((recipe / "table.yaml").read_text()) | {
        "rehearsal": {
            "walk": {
                "set": {"command.steps": 10, "command.seed": 1},
                "times": 3,
                "cpu": {
                    "set": {"command.steps": 4},
                    "times": 1,
                    "disk_times": 7,
                    "pieces": {"toy_functions:doubled": 500},
                },
            }
        }
    }
    content["commands"] = [content["commands"][1] | {"needs": []}]
    (recipe / "table.yaml").write_text(yaml.safe_dump(content))
    typed: list[list[str]] = []
    clock = [0.0]

    def work(steps: int) -> None:
        clock[0] += 2.0 * steps

    def execute(words: list[str], pace: Any) -> None:
        typed.append(words)
        steps = int([word for word in words if word.startswith("--command.steps=")][-1].partition("=")[2])
        clock[0] += 5.0
        toy_functions.doubled(steps)
        folder = tmp_path / "out" / "walk"
        folder.mkdir(exist_ok=True)
        (folder / "place.txt").write_text("1" * steps)

    monkeypatch.setattr(toy_functions, "doubled", work)
    monkeypatch.setattr("tu_symmetry.tables.rehearsal._execute", execute)
    monkeypatch.setattr("tu_symmetry.tables.rehearsal.time.perf_counter", lambda: clock[0])
    (small,), _ = run(recipe, tmp_path / "out", data_root=tmp_path, reduced=True)
    assert "--command.seed=1" in typed[0] and "--command.steps=4" in typed[0]
    assert (small.seconds, small.rehearsed, small.disk_bytes) == (5.0 + 500 * 8.0, 13.0, 28)
    assert toy_functions.doubled is work
    (large,), _ = run(recipe, tmp_path / "out", data_root=tmp_path, reduced=False)
    assert (large.seconds, large.disk_bytes, len(typed)) == (3 * 25.0, 30, 2)


def test_validations_count_as_often_as_there_are_epochs() -> None:
    pace = _Pace(ends=True)
    pace.started, pace.taken, pace.checked, pace.before = 110.0, [4.0, 3.0], [2.0, 1.0], 1
    # begun at 100, 8 s to start but for the first validation; 20 s in all, of which 10 are steps and validations
    assert pace.seconds(100.0, 20.0, 5.0) == 8.0 + 5 * (20 - 8 - 7 - 3) and pace.step == 3.0
    assert _whole({"trainer": {"max_epochs": 75, "check_val_every_n_epoch": 25}}, 391) == (75 * 391, 3)
    assert _whole({"trainer": {"max_epochs": -1, "max_steps": 1500}}, 100) == (1500, 15)


def test_nothing_but_a_rehearsal_is_cleared(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "walk").mkdir(parents=True)
    with pytest.raises(ConfigError, match="something else"):
        run(recipe, tmp_path / "mine", data_root=tmp_path / "data")
    assert (tmp_path / "mine" / "walk").is_dir()
    for mark in (".table/walk.json", ".rehearsal"):  # results of a table, in a folder where a rehearsal was killed
        path = tmp_path / "results" / mark
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(ConfigError, match="something else"):
        run(recipe, tmp_path / "results", data_root=tmp_path / "data")

    def interrupted(*_: Any) -> None:
        raise SystemExit(1)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("tu_symmetry.tables.rehearsal._execute", interrupted)
        run(recipe, tmp_path / "out", data_root=tmp_path / "data")
    (tmp_path / "out" / "walk").mkdir()
    with pytest.raises(ConfigError, match="something else"):
        run(recipe, tmp_path / "out", data_root=tmp_path / "data")
    (tmp_path / "out" / ".rehearsal").touch()  # as a killed rehearsal leaves it
    made, _ = run(recipe, tmp_path / "out", data_root=tmp_path / "data", overrides=["networks_0.data.batch_size=9000"])
    assert made[0].steps == 7 * 7 and not (tmp_path / "out" / "walk").exists()


def test_totals_add_up_and_memory_is_the_largest() -> None:
    made = [
        Forecast("a_0", 10, 60.0, 1.0, 0.5, 100, 2 * 10**9, 10**9, 10**8),
        Forecast("b", 1, 30.0, 1.0, None, 0, 10**9, 3 * 10**9, 10**9),
    ]
    grid = forecast_table([*made, Forecast("c", 1, error="no")], "T", {"device": "cpu", "processor": "P", "threads": 1})
    assert grid.rows[0][:4] == ["a × 10", "100 × 0.5 s", "60 s", "10 min"]
    assert grid.rows[-1] == ["all", "", "", "10 min", "2.00", "3.00", "2.00"] and grid.rows[2][1] == "failed"


def test_later_configurations_override_entry_by_entry() -> None:
    first, second = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]}
    assert merged([first, second]) == {"a": {"b": 1, "c": 3}, "d": [2]} and first["a"]["c"] == 2


def test_planted_data_sets_are_read_as_the_real_ones(tmp_path: Path) -> None:
    planted.plant_cifar(tmp_path, "cifar10", 50, 20)
    planted.plant_cifar(tmp_path, "cifar100", 200, 100)
    planted.plant_svhn(tmp_path, 30)
    with planted.unverified():
        for name, train, classes in (("cifar10", 50, 10), ("cifar100", 200, 100)):
            data = CIFARDataModule(name, tmp_path, eval_ood=True)  # type: ignore[arg-type]
            data.prepare_data()
            assert len(data.train.x) == train and data.train.y.unique().tolist() == [*range(classes)]
            assert data.train.x.shape[1:] == (3, 32, 32) and len(data.ood.x) == 30
    planted.plant_idx(tmp_path, "kmnist", 40, 20)
    assert IDXDataModule("kmnist", tmp_path).test.x.shape == (20, 1, 28, 28)
    planted.plant_networks(tmp_path / "models" / "small", lambda: MLP(4, 2, (3,)), 5)
    store = collect_checkpoints(tmp_path / "store", tmp_path / "models", folder="small", start=1, count=3)
    assert len(store) == 3 and store[0]["layers.0.weight"].dtype == torch.float16
    planted.plant_scan(tmp_path, 20, 5, 12)
    assert np.load(tmp_path / "walnut" / "measurements.npy").shape == (60,)


SMALLER = {  # what takes a CPU more minutes than a test should
    "compact_posterior/mnist": ["hmc.routine.leapfrog_steps=2", "pruning.command.num_samples=3"],
    "deep_image_prior/kmnist": [
        f"{part}-{noise}.{flag}"
        for part in ("dip", "dropout")
        for noise in (5, 10)
        for flag in ("data.images=1", "routine.num_problems=4")
    ],
    "linearized_laplace/table1-mnist": [
        f"{name}{early}.{flag}"
        for name in ("t-former", "cnn", "resnet", "pre-resnet", "fixup")
        for early in ("", "-early")
        for flag in ("routine.num_members=1", "data.orders=1")
    ],
}
PAPER_SIZE = sorted(p.parent for p in RECIPES.rglob("table.yaml") if load_table(p.parent).rehearsal)


@pytest.mark.slow
@pytest.mark.parametrize("folder", PAPER_SIZE, ids=lambda f: f.relative_to(RECIPES).as_posix())
def test_every_recipe_of_paper_size_starts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command at its configuration; on a CPU, and on the fake device, in the smaller pieces of its plan."""
    monkeypatch.chdir(tmp_path)
    reduced = not (real_device() and torch.cuda.is_available())
    overrides = SMALLER.get(folder.relative_to(RECIPES).as_posix(), []) if reduced else []
    options: dict[str, Any] = {"data_root": tmp_path / "nothing", "overrides": overrides, "reduced": reduced}
    made, shown = run(folder, tmp_path / "out", **options)
    assert not [f for f in made if f.error], shown
    if torch.cuda.is_available():
        assert any(f.device_bytes for f in made), shown
