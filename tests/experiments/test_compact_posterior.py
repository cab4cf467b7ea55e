"""The recipes of arXiv 2401.00611: every file is a configuration of its command, and the demo runs end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import RECIPES, ROOT, run_table

from tu_symmetry.files import FileError
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.tables.commands import load_table
from tu_symmetry.tables.logs import last_values, logged_curve
from tu_symmetry.tables.outcome import Outcome

PAPER = RECIPES / "compact_posterior"
DIGITS = PAPER / "digits"
SMALL = {"data.train_size": 150, "data.test_size": 60, "model.hidden": [8]}
TINY = [
    *(f"{name}.{'' if key.startswith('data') else 'routine.'}{key}={value}"
      for name in ("ensemble", "hmc", "vi") for key, value in SMALL.items()),
    *(f"{name}.command.{key}={value}"
      for name in ("comparison", "pruning", "interpolation") for key, value in SMALL.items()),
    "ensemble.routine.num_members=3",
    "ensemble.data.orders=3",
    "ensemble.trainer.max_epochs=4",
    "hmc.trainer.max_epochs=86",
    "hmc.routine.burn_in=2",
    "hmc.routine.leapfrog_steps=4",
    "vi.trainer.max_epochs=4",
    "comparison.command.num_samples=5",
    "comparison.command.repeats=2",
    "pruning.command.num_samples=3",
    "pruning.command.keep=[1.0, 0.5]",
    "interpolation.command.points=5",
    "interpolation.command.pairs=2",
]  # fmt: skip


def test_the_reference_predictive_of_mnist_is_the_papers() -> None:
    """The 1,000 samples linspace(500, 9899) of the chain's 9,900 after burn-in are stored, and all stored are used."""
    import yaml

    content = yaml.safe_load((PAPER / "mnist" / "hmc.yaml").read_text())
    options = content["routine"]["init_args"]
    assert content["trainer"]["max_epochs"] - options["burn_in"] == 9900
    assert options["stored"] == [500, 9899, 1000]
    (fit,) = [c for c in content["trainer"]["callbacks"] if c["class_path"].endswith("FitCompactPosterior")]
    assert "num_samples" not in fit["init_args"]
    comparison = yaml.safe_load((PAPER / "mnist" / "comparison.yaml").read_text())["command"]["init_args"]
    assert "reference_samples" not in comparison


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("tiny")
    results, text = run_table(DIGITS, out, TINY)
    return out, results, text


def test_digits_run_end_to_end(tiny: tuple[Path, dict[str, Any], str]) -> None:
    out, results, text = tiny
    rows = results["comparison"]["rows"]
    assert rows["agreement"]["hmc/sample"] == 1 and rows["tv"]["hmc/sample"] == 0
    for row in ("agreement", "tv", "accuracy", "mean_accuracy"):
        assert all(v is None or 0 <= v <= 1 for v in rows[row].values())
    assert set(rows["mean_accuracy"]) == {"hmc/q_d", "hmc/q_r", "ensemble/q_d", "ensemble/q_r", "vi/q"}
    assert "0.8249" in text and f"{rows['agreement']['hmc/q_r']:.4f}" in text  # the paper's value and ours
    q_r = CompactPosterior.load(out / "ensemble" / "q_r.safetensors")
    assert len(q_r.metadata["transpositions"]) == 3 and q_r.metadata["transpositions"][0] == 0  # the reference
    assert len(SampleStore.open(out / "hmc" / "samples")) == 84
    _, acceptance = logged_curve(out / "hmc", "hmc/acceptance")
    assert len(acceptance) == 86 and all(0 <= a <= 1 for a in acceptance)
    assert any(name.startswith("hmc/ess") for name in last_values(out / "hmc"))


def test_digits_report(tiny: tuple[Path, dict[str, Any], str]) -> None:
    out, _, _ = tiny
    text = (out / "report" / "report.md").read_text()
    assert "acceptance rate" in text and "0.8249" in text
    for name in ("sigma.png", "pruning.png", "interpolation.png"):
        assert name in text
        assert (out / "report" / name).read_bytes().startswith(b"\x89PNG")
    content = json.loads((out / "results.json").read_text())
    assert list(content["commands"]) == [c.name for c in load_table(DIGITS).commands]
    assert content["environment"]["processor"]


def test_pruning_keeps_everything_at_one(tiny: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = tiny
    curves = results["pruning"]["curves"]
    assert curves["ensemble mean, own σ"][0] == results["comparison"]["rows"]["mean_accuracy"]["ensemble/q_r"]
    assert curves["ensemble mean, HMC's σ"][0] == curves["ensemble mean, random order"][0]


def test_interpolations_start_and_end_alike(tiny: tuple[Path, dict[str, Any], str]) -> None:
    """An alignment changes no function: the losses at both ends are the same before and after."""
    _, results, _ = tiny
    for source in ("ensemble", "hmc"):
        before, after = (results["interpolation"][f"{source}/{when}"]["loss"] for when in ("before", "after"))
        for a, b in zip(before, after, strict=True):
            assert (a[0], a[-1]) == pytest.approx((b[0], b[-1]), rel=1e-5)


def test_digits_skip_what_is_done(tiny: tuple[Path, dict[str, Any], str]) -> None:
    out, results, _ = tiny
    again, text = run_table(DIGITS, out, TINY)
    assert again == results
    assert "▸" not in text
    _, text = run_table(DIGITS, out, [*TINY, "pruning.command.num_samples=4"])
    assert [line.split()[1] for line in text.splitlines() if line.startswith("▸")] == ["pruning", "report"]


def test_a_damaged_result_is_refused(tiny: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    out, _, _ = tiny
    text = (out / "comparison" / "results.json").read_text()
    (tmp_path / "results.json").write_text(text.replace('"repeats"', '"repeat"').replace("0.", "1.", 1))
    with pytest.raises(FileError, match="changed or damaged"):
        Outcome.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ensemble", "hmc", "vi"])
def test_killed_in_a_fit_resumes_to_the_same_numbers(
    tiny: tuple[Path, dict[str, Any], str], tmp_path: Path, command: str
) -> None:
    """kill -9 in the middle of the fit; the second run gives what an uninterrupted one gives."""
    out, whole, _ = tiny
    often = [*TINY, f"{command}.trainer.callbacks.every_seconds=0"]
    words = [word for override in often for word in ("--set", override)]
    line = [sys.executable, "-m", "tu_symmetry.cli", "table", str(DIGITS), "--out", str(tmp_path / "run"), *words]
    process = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    checkpoint = tmp_path / "run" / command / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not checkpoint.exists():
        time.sleep(0.001)
    process.kill()
    process.wait()
    before = torch.load(checkpoint, weights_only=True)["global_step"]
    assert 0 < before < {"ensemble": 8, "hmc": 86, "vi": 4}[command]
    assert json.loads((tmp_path / "run" / ".table" / f"{command}.json").read_text())["status"] == "running"
    results, text = run_table(DIGITS, tmp_path / "run", often)
    assert f"{command} (resuming)" in text
    assert results["comparison"]["rows"] == whole["comparison"]["rows"]
    assert results["pruning"]["curves"] == whole["pruning"]["curves"]
    for column in ("hmc/q_r", "hmc/q_d", "ensemble/q_r", "ensemble/q_d", "vi/q"):
        resumed, uncut = (CompactPosterior.load(folder / f"{column}.safetensors") for folder in (tmp_path / "run", out))
        assert all(torch.equal(t, uncut.mean[name]) for name, t in resumed.mean.items())
        assert all(torch.equal(t, uncut.std[name]) for name, t in resumed.std.items())


@pytest.mark.slow
def test_one_row_typed_by_hand(tmp_path: Path) -> None:
    """fit, fit, test without ``table``, from an empty folder, as a new user would: q_r evaluated by TU's routine."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def typed(*words: str) -> str:
        line = [sys.executable, "-m", "tu_symmetry.cli", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    for name in ("ensemble", "hmc"):
        flags = [f"--{o.partition('.')[2]}" for o in TINY if o.startswith(f"{name}.")]
        typed("fit", "--config", str(DIGITS / f"{name}.yaml"), *flags)
    for q, draws in (("ensemble/q_r.safetensors", 7), ("hmc/samples", 4)):
        text = typed(
            "test",
            "--config",
            str(DIGITS / "test.yaml"),
            f"--routine.model.posterior=runs/digits/{q}",
            f"--routine.model.num_samples={draws}",
            "--routine.model.model.hidden=[8]",
        )
        assert "Acc" in text and "ECE" in text
    assert torch.load(tmp_path / "runs/digits/ensemble/checkpoints/last.ckpt", weights_only=False)["epoch"] == 3
