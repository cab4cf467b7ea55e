"""Rehearsals: what a table will take, from a few steps of each of its commands at full size."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
from tu_symmetry.tables.rehearsal import Forecast, forecast_table, rehearse

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


ARCH = [f"{name}_0.routine.model.{'' if name in ('laplace', 'sghmc') else 'core_model.'}arch=20" for name in (
    "dropout", "swag", "vibnn", "laplace", "sghmc")] + ["evaluation.command.model.arch=20"]  # fmt: skip
FEW = [  # SWAG runs the training set for the statistics of each draw
    "swag_0.data.train_size=512",
    "evaluation.command.data.test_size=100",
    "evaluation.command.ood.svhn.ood_size=100",
    *(f"{name}_0.data.eval_batch_size=100" for name in ("swag", "vibnn")),
]
SMALLER = {  # what a CPU cannot do in minutes is smaller there; the whole size is for a GPU
    "compact_posterior/mnist": ["hmc.routine.leapfrog_steps=2", "pruning.command.num_samples=3"],
    "deep_image_prior/kmnist": [
        f"{part}-{noise}.{flag}"
        for part in ("dip", "dropout")
        for noise in (5, 10)
        for flag in ("data.images=1", "routine.num_problems=4")
    ],
    "deep_image_prior/walnut": [
        *(f"{part}.command.scored.inner=[8,40]" for part in ("linearized", "masks")),
        *(
            f"{part}.model.channels=[4,4,4,4,4,4]"
            for part in ("dip.routine", "dropout.routine", "linearized.command", "masks.command")
        ),
    ],
    "symmetry_aware/cifar10": [*ARCH, *FEW, "dropout_0.data.eval_batch_size=100"],
    "symmetry_aware/cifar10-frn": FEW,
    "symmetry_aware/cifar100": [*ARCH, *FEW, "dropout_0.data.eval_batch_size=100"],
    "symmetry_aware/tinyimagenet": [flag for flag in ARCH if "vibnn" not in flag],
    "linearized_laplace/table1-mnist": [
        f"{name}{early}.{flag}"
        for name in ("t-former", "cnn", "resnet", "pre-resnet", "fixup")
        for early in ("", "-early")
        for flag in ("routine.num_members=1", "data.orders=1")
    ],
    "linearized_laplace/table2-resnet50": ["networks.routine.model.arch=18", "evidence.command.model.arch=18"],
}
PAPER_SIZE = sorted(p.parent for p in RECIPES.rglob("table.yaml") if load_table(p.parent).rehearsal)


@pytest.mark.slow
@pytest.mark.parametrize("folder", PAPER_SIZE, ids=lambda f: f.relative_to(RECIPES).as_posix())
def test_every_recipe_of_paper_size_starts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command at its configuration; on a CPU with the reductions that are named above."""
    monkeypatch.chdir(tmp_path)
    name = folder.relative_to(RECIPES).as_posix()
    overrides = [] if real_device() and torch.cuda.is_available() else SMALLER.get(name, [])
    if overrides:
        monkeypatch.setattr(planted, "plant_tiny_imagenet", partial(planted.plant_tiny_imagenet, train=20, val=1))
        monkeypatch.setattr(planted, "plant_scan", partial(planted.plant_scan, size=64, angles=8, bins=40))
    made, shown = run(folder, tmp_path / "out", data_root=tmp_path / "nothing", overrides=overrides)
    assert not [f for f in made if f.error], shown
