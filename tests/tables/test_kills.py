"""Every kind of run that stores a posterior, killed at any moment and started again by the same command: the same end.

A cut is made in a process of its own, where the n-th file that it writes ends it, just before or after the file takes
its name.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import side_by_side
from recipe_runs import plant_images, run_table

from tu_symmetry.files import read_safetensors
from tu_symmetry.posterior.samples import SampleStore

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]

PARTS = """
mlp: &mlp {class_path: tu_symmetry.tables.models.MLP, init_args: {in_features: 64, num_classes: 10, hidden: [5]}}
nll: &nll {class_path: torch.nn.CrossEntropyLoss}
classes: &classes {num_classes: 10, loss: *nll, model: *mlp}
sgd: &sgd {class_path: torch.optim.SGD, init_args: {lr: 0.05}}
temperature: &temperature {class_path: TrueTemperature}
draws: &draws {class_path: PosteriorDraws, init_args: {num_samples: 3}}
snapshots: &snapshots
  class_path: PosteriorSnapshots
  init_args: {folder: $root/$name/samples, every_n_steps: 2, at_end: true}
compact: &compact
  class_path: FitCompactPosterior
  init_args: {q_d: $root/$name/q_d.safetensors, q_r: $root/$name/q_r.safetensors, samples: $root/$name/samples}
kinds:
  hmc:
    epochs: 7
    callbacks: [*compact]
    routine:
      class_path: HMCRoutine
      init_args:
        {model: *mlp, step_size: 0.02, leapfrog_steps: 2, burn_in: 1, samples: $root/$name/samples}
    digits: {batch_size: full}
  members:
    callbacks: [*compact]
    routine: {class_path: MembersRoutine, init_args: {model: *mlp, num_members: 2, samples: $root/$name/samples}}
    digits: {orders: 2}
  variational:
    callbacks: [*draws]
    routine: {class_path: VariationalRoutine, init_args: {model: *mlp, posterior: $root/$name/posterior.safetensors}}
  sghmc:
    callbacks: [*snapshots, *temperature]
    routine: *classes
    optimizer: {class_path: torch_uncertainty.optim.SGHMC, init_args: {lr: 0.01, friction: 0.05, burn_in_steps: 4}}
  sgld:
    callbacks: [*snapshots, *temperature]
    routine: *classes
    optimizer: {class_path: torch_uncertainty.optim.SGLD, init_args: {lr: 0.01}}
  swag:
    callbacks: [*draws]
    optimizer: *sgd
    routine:
      <<: *classes
      is_ensemble: true
      model:
        class_path: tu_symmetry.routines.SWAG
        init_args: {cycle_start: 0, cycle_length: 1, num_estimators: 2, core_model: *mlp}
  ensemble:
    callbacks: [*snapshots]
    optimizer: *sgd
    routine:
      <<: *classes
      is_ensemble: true
      model:
        class_path: torch_uncertainty.methods.deep_ensembles
        init_args: {core_models: *mlp, num_estimators: 2, reset_model_parameters: true}
      format_batch_fn: {class_path: torch_uncertainty.transforms.RepeatTarget, init_args: {num_repeats: 2}}
  laplace:
    callbacks:
      - class_path: FitLaplace
        init_args: {curvature: last_layer, prior: single, evaluate_at: map, calibrate: false}
      - *draws
    optimizer: *sgd
    routine: {<<: *classes, post_processing: {class_path: tu_symmetry.routines.LaplacePostProcessing}}
  deep image prior:
    epochs: 2
    routine:
      class_path: DeepImagePriorRoutine
      init_args:
        num_problems: 1
        out: $root/$name/reconstructions.safetensors
        model:
          class_path: tu_symmetry.experiments.deep_image_prior.UNet
          init_args: {channels: [4], skip_channels: []}
    data: {class_path: TomographyDataModule, init_args: {root: $data_root, images: 1, steps_per_epoch: 3}}
"""
KINDS: dict[str, dict[str, Any]] = yaml.safe_load(PARTS)["kinds"]


def recipe(folder: Path, kind: str, every_seconds: float) -> Path:
    """A recipe of one fit."""
    chosen = KINDS[kind]
    last = {"class_path": "LastCheckpoint", "init_args": {"every_seconds": every_seconds}}
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "$root/$name", "name": "log"}}
    trainer = {
        "accelerator": "cpu", "devices": 1, "max_epochs": chosen.get("epochs", 3), "default_root_dir": "$root/$name",
        "enable_model_summary": False, "enable_progress_bar": False, "log_every_n_steps": 1, "logger": logger,
        "callbacks": [*chosen.get("callbacks", ()), last],
    }  # fmt: skip
    sizes = {"train_size": 60, "test_size": 20, "resident": True, "batch_size": 20} | chosen.get("digits", {})
    data = {"data": {"class_path": "DigitsDataModule", "init_args": sizes}}
    own = {key: value for key, value in chosen.items() if key in ("routine", "optimizer", "data")}
    command = {"name": "run", "command": "fit", "config": "run.yaml"}
    folder.mkdir()
    (folder / "table.yaml").write_text(yaml.safe_dump({"title": kind, "root": "runs", "commands": [command]}))
    (folder / "run.yaml").write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, **data, **own}))
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "data"
    plant_images(root)
    return root


def result(out: Path) -> dict[str, Any]:
    """Everything that a run has made but its checkpoint, logs and times: samples, other tensors, metrics."""
    found: dict[str, Any] = {}
    stores = {path.parent for path in (out / "run").rglob("store.json")}
    for folder in stores:
        store = SampleStore.open(folder)
        found[folder.relative_to(out).as_posix()] = dict(
            zip(zip(store.chains, store.steps, strict=True), store, strict=True)
        )
    for path in (out / "run").rglob("*.safetensors"):
        if path.parent not in stores:
            found[path.relative_to(out).as_posix()] = read_safetensors(path)[0]
    found["metrics"] = json.loads((out / "results.json").read_text())["commands"]["run"]["results"]["metrics"]
    return found


def writes(work: Callable[[], Any], at: int = 0, when: str = "after") -> int:
    """How many files take their names; the n-th ends the process, before that or after."""
    count, real = 0, os.replace

    def replace(source: Any, target: Any) -> None:
        nonlocal count
        count += 1
        if count == at and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            real(source, target)
        finally:  # also where a folder stands in the way, which is then moved first
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace  # type: ignore[assignment]
    try:
        work()
    finally:
        os.replace = real
    return count


def killed(work: Callable[[], Any], at: int, when: str) -> bool:
    """Do it in another process, which is waited for; whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            writes(work, at, when)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("every_seconds", [0.0, 1e6], ids=["checkpoints", "none before the end"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_run_that_is_killed_at_a_file_comes_to_the_same_end(
    kind: str, every_seconds: float, every: bool, tmp_path: Path, images: Path
) -> None:
    """Bit for bit, at all files or at two of them; in a process where no other test has started threads of autograd."""
    if not every and every_seconds == 0.0 and kind not in ("hmc", "sghmc"):
        pytest.skip("the slow test has them")
    side_by_side(kill, kind, every_seconds, every, tmp_path, images)


def kill(rank: int, kind: str, every_seconds: float, every: bool, tmp_path: Path, images: Path) -> None:
    folder = recipe(tmp_path / "recipe", kind, every_seconds)
    count = writes(lambda: run_table(folder, tmp_path / "whole", data_root=images))
    whole = result(tmp_path / "whole")
    assert any(name.startswith("run/") for name in whole) and whole["metrics"]
    for n in range(1, count + 1) if every else sorted({count // 2, count - 2}):
        out, when = tmp_path / str(n), "before" if n % 2 else "after"
        assert killed(lambda out=out: run_table(folder, out, data_root=images), n, when)
        run_table(folder, out, data_root=images)
        torch.testing.assert_close(result(out), whole, rtol=0, atol=0, equal_nan=True, msg=f"cut {when} file {n}")
        assert not [p for p in (out / "run").rglob("*.tmp")]
