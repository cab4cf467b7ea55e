"""Every kind of run that stores a posterior, killed at any moment and started again by the same command: the same end.

A cut is made in a process of its own, where the n-th file that it writes ends it, just before or after the file takes
its name.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from processes import side_by_side
from recipe_runs import plant_images
from rich.console import Console
from torch import Tensor

from tu_symmetry.files import read_safetensors
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.reporting.progress import Display
from tu_symmetry.tables.commands import run_commands

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]

OUT = "$root/$name"


def made(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


MLP = made("tu_symmetry.tables.models.MLP", in_features=64, num_classes=10, hidden=[5])


def callback(name: str, **arguments: Any) -> dict[str, Any]:
    return made(f"tu_symmetry.callbacks.{name}", **arguments)


def digits(**arguments: Any) -> dict[str, Any]:
    sizes = {"train_size": 60, "test_size": 20, "resident": True}
    return made("tu_symmetry.datamodules.DigitsDataModule", **(sizes | {"batch_size": 20} | arguments))


def routine(name: str, **arguments: Any) -> dict[str, Any]:
    return made(f"tu_symmetry.routines.{name}", model=MLP, **arguments)


def trained(**arguments: Any) -> dict[str, Any]:
    return {"num_classes": 10, "loss": {"class_path": "torch.nn.CrossEntropyLoss"}, "model": MLP, **arguments}


SGD = made("torch.optim.SGD", lr=0.05)
COMPACT = callback(
    "FitCompactPosterior", q_d=f"{OUT}/q_d.safetensors", q_r=f"{OUT}/q_r.safetensors", samples=f"{OUT}/samples"
)
SNAPSHOTS = callback("PosteriorSnapshots", folder=f"{OUT}/samples", every_n_steps=2, at_end=True)
KINDS: dict[str, dict[str, Any]] = {
    "hmc": {
        "epochs": 7,
        "callbacks": [COMPACT],
        "routine": routine("HMCRoutine", step_size=0.02, leapfrog_steps=2, burn_in=1, samples=f"{OUT}/samples"),
        "data": digits(batch_size="full"),
    },
    "members": {
        "callbacks": [COMPACT],
        "routine": routine("MembersRoutine", num_members=2, samples=f"{OUT}/samples"),
        "data": digits(orders=2),
    },
    "variational": {
        "callbacks": [callback("PosteriorDraws", num_samples=3)],
        "routine": routine("VariationalRoutine", posterior=f"{OUT}/posterior.safetensors"),
    },
    "sghmc": {
        "callbacks": [SNAPSHOTS, callback("TrueTemperature")],
        "routine": trained(),
        "optimizer": made("torch_uncertainty.optim.SGHMC", lr=0.01, friction=0.05, burn_in_steps=4),
    },
    "sgld": {
        "callbacks": [SNAPSHOTS, callback("TrueTemperature")],
        "routine": trained(),
        "optimizer": made("torch_uncertainty.optim.SGLD", lr=0.01),
    },
    "swag": {
        "callbacks": [callback("PosteriorDraws", num_samples=3)],
        "routine": trained(
            is_ensemble=True,
            model=made("tu_symmetry.routines.SWAG", cycle_start=0, cycle_length=1, num_estimators=2, core_model=MLP),
        ),
        "optimizer": SGD,
    },
    "ensemble": {
        "callbacks": [SNAPSHOTS],
        "routine": trained(
            is_ensemble=True,
            model=made(
                "torch_uncertainty.methods.deep_ensembles",
                core_models=MLP, num_estimators=2, reset_model_parameters=True,
            ),
            format_batch_fn=made("torch_uncertainty.transforms.RepeatTarget", num_repeats=2),
        ),
        "optimizer": SGD,
    },
    "laplace": {
        "callbacks": [
            callback("FitLaplace", curvature="last_layer", prior="single", evaluate_at="map", calibrate=False),
            callback("PosteriorDraws", num_samples=3),
        ],
        "routine": trained(post_processing={"class_path": "tu_symmetry.routines.LaplacePostProcessing"}),
        "optimizer": SGD,
    },
    "deep image prior": {
        "epochs": 2,
        "routine": made(
            "tu_symmetry.routines.DeepImagePriorRoutine", num_problems=1, out=f"{OUT}/reconstructions.safetensors",
            model=made("tu_symmetry.experiments.deep_image_prior.UNet", channels=[4], skip_channels=[]),
        ),
        "data": made("tu_symmetry.datamodules.TomographyDataModule", root="$data_root", images=1, steps_per_epoch=3),
    },
}  # fmt: skip


def configuration(kind: str, every_seconds: float) -> dict[str, Any]:
    chosen = KINDS[kind]
    trainer = {
        "accelerator": "cpu", "devices": 1, "max_epochs": chosen.get("epochs", 3), "default_root_dir": OUT,
        "enable_model_summary": False, "enable_progress_bar": False, "log_every_n_steps": 1,
        "logger": made("lightning.pytorch.loggers.CSVLogger", save_dir=OUT, name="log"),
        "callbacks": [*chosen.get("callbacks", ()), callback("LastCheckpoint", every_seconds=every_seconds)],
    }  # fmt: skip
    more = {key: value for key, value in chosen.items() if key in ("routine", "optimizer")}
    return {"seed_everything": 1, "trainer": trainer, "data": chosen.get("data", digits()), **more}


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "data"
    plant_images(root)
    return root


def recipe(folder: Path, kind: str, every_seconds: float) -> Path:
    folder.mkdir()
    table = {
        "title": kind,
        "root": "runs/killed",
        "commands": [{"name": "run", "command": "fit", "config": "run.yaml"}],
    }
    for name, content in (("table", table), ("run", configuration(kind, every_seconds))):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


def run(folder: Path, out: Path, images: Path) -> None:
    run_commands(folder, out=out, data_root=images, display=Display(Console(quiet=True)))


def result(out: Path) -> dict[str, Any]:
    """Everything that a run has made but its checkpoint, logs and times: samples, other tensors, metrics."""
    found: dict[str, Any] = {}
    stores = {path.parent for path in (out / "run").rglob("store.json")}
    for folder in stores:
        store = SampleStore.open(folder)
        name = folder.relative_to(out).as_posix()
        found[name] = dict(zip(zip(store.chains, store.steps, strict=True), store, strict=True))
    for path in (out / "run").rglob("*.safetensors"):
        if path.parent not in stores:
            found[path.relative_to(out).as_posix()] = read_safetensors(path)[0]
    found["results"] = json.loads((out / "results.json").read_text())["commands"]["run"]["results"]
    return found


def assert_same(a: Any, b: Any, what: str) -> None:
    """Bit for bit: a resumed run does the same on tensors of the same layout."""
    assert type(a) is type(b), what
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all()), what
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), (what, sorted(map(str, a)), sorted(map(str, b)))
        for key in a:
            assert_same(a[key], b[key], f"{what}/{key}")
    else:
        assert a == b or a != a, what


def apart(work: Callable[[], Any]) -> int:
    """Do it in another process, which is waited for; its exit status (negative: the signal that ended it)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Cut:
    """Counts the files that take their names, and ends the process at the n-th, before that or after."""

    def __init__(self, at: int = 0, when: Literal["before", "after"] = "after") -> None:
        self.count, self.at, self.when, self.replace = 0, at, when, os.replace

    def __call__(self, source: Any, target: Any) -> None:
        self.count += 1
        if self.count == self.at and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            self.replace(source, target)
        finally:  # also where a folder stands in the way, which is then moved first
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


def writes(work: Callable[[], Any]) -> int:
    """How many files take their names."""
    counted = Cut()
    os.replace = counted  # type: ignore[assignment]
    try:
        work()
    finally:
        os.replace = counted.replace
    return counted.count


def cut(folder: Path, out: Path, images: Path, at: int, when: Literal["before", "after"]) -> int:
    def work() -> None:
        os.replace = Cut(at, when)  # type: ignore[assignment]
        run(folder, out, images)

    return apart(work)


def chosen(count: int, every: bool) -> Iterator[tuple[int, Literal["before", "after"]]]:
    """All cuts, or one in the middle and one at the last files."""
    numbers = range(1, count + 1) if every else sorted({count // 2, count - 2})
    for n in numbers:
        yield n, "before" if n % 2 else "after"


@pytest.mark.parametrize("every_seconds", [0.0, 1e6], ids=["checkpoints", "none before the end"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_run_that_is_killed_at_a_file_comes_to_the_same_end(
    kind: str, every_seconds: float, every: bool, tmp_path: Path, images: Path
) -> None:
    """In a process where no other test has started threads of autograd, which forbid to fork."""
    if not every and every_seconds == 0.0 and kind not in ("hmc", "sghmc"):
        pytest.skip("the slow test has them")
    side_by_side(kill, kind, every_seconds, every, tmp_path, images)


def kill(rank: int, kind: str, every_seconds: float, every: bool, tmp_path: Path, images: Path) -> None:
    folder = recipe(tmp_path / "recipe", kind, every_seconds)
    count = writes(lambda: run(folder, tmp_path / "whole", images))
    whole = result(tmp_path / "whole")
    assert any(name.startswith("run/") for name in whole) and whole["results"]["metrics"]
    for n, when in chosen(count, every):
        out = tmp_path / f"{n}-{when}"
        assert cut(folder, out, images, n, when) == -signal.SIGKILL
        run(folder, out, images)
        assert_same(whole, result(out), f"{kind}, cut {when} file {n} of {count}")
        assert not [p for p in (out / "run").rglob("*.tmp")]
