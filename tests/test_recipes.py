"""Every recipe parses; the digits recipe and the transpositions recipe run end to end at a tiny size and resume."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tu_symmetry.tables.engine import run_table
from tu_symmetry.tables.predict import evenly
from tu_symmetry.tables.progress import Display
from tu_symmetry.tables.recipe import load_recipe, parse
from tu_symmetry.tables.stage import stage_kind
from tu_symmetry.tables.transpositions import permutation_with_count

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in (ROOT / "recipes").rglob("table.yaml"))
DIGITS = ROOT / "recipes" / "compact_posterior" / "digits"
TINY = [
    "data.train_size=150",
    "data.test_size=60",
    "model.hidden=[8]",
    "ensemble.members=3",
    "ensemble.epochs=4",
    "hmc.num_samples=6",
    "hmc.burn_in=2",
    "hmc.leapfrog_steps=4",
    "vi.epochs=4",
    "hmc_compact.samples=4",
    "evaluation.samples=5",
    "evaluation.repeats=2",
    "pruning.samples=3",
    "pruning.keep=[1.0, 0.5]",
    "interpolation.points=5",
    "interpolation.pairs=2",
]


def run(folder: Path, out: Path, overrides: list[str]) -> tuple[dict[str, Any], str]:
    console = Console(record=True, width=80, file=io.StringIO())
    display = Display(console)
    results = run_table(folder, out=out, overrides=overrides, display=display)
    display.tables(results)
    return results, console.export_text()


def test_the_reference_predictive_of_mnist_is_the_papers() -> None:
    """The 1,000 samples linspace(500, 9899) of the chain's 9,900 after burn-in, for the predictive and for q alike."""
    recipe = load_recipe(ROOT / "recipes" / "compact_posterior" / "mnist")
    stages = {name: config.options for name, config in recipe.stages.items()}
    kept = stages["hmc"]["num_samples"]
    wanted = torch.linspace(500, 9899, 1000, dtype=torch.float64).round().long()
    for options, samples, first in (
        (stages["evaluation"], "reference_samples", "reference_first"),
        (stages["hmc_compact"], "samples", "first"),
    ):
        chosen = options[first] + evenly(kept - options[first], options[samples])
        assert torch.equal(chosen, wanted)


@pytest.mark.parametrize("folder", FOLDERS, ids=[f.name for f in FOLDERS])
def test_every_recipe_parses(folder: Path) -> None:
    recipe = load_recipe(folder)
    for name, config in recipe.stages.items():
        kind = stage_kind(config.stage)
        parse(kind.options, config.options, name)
        assert {r for r in kind.inputs if not r.endswith("?")} <= config.inputs.keys()
    assert recipe.table.source
    assert (folder / "README.md").is_file()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("tiny")
    results, text = run(DIGITS, out, TINY)
    return out, results, text


def test_digits_run_end_to_end(tiny: tuple[Path, dict[str, Any], str]) -> None:
    _, results, text = tiny
    rows = results["evaluation"]["rows"]
    assert rows["agreement"]["hmc/sample"] == 1 and rows["tv"]["hmc/sample"] == 0
    for row in ("agreement", "tv", "accuracy", "mean_accuracy"):
        assert all(v is None or 0 <= v <= 1 for v in rows[row].values())
    assert set(rows["mean_accuracy"]) >= {"hmc/q_d", "hmc/q_r", "ensemble/q_d", "ensemble/q_r", "vi/q"}
    assert "0.8249" in text and f"{rows['agreement']['hmc/q_r']:.4f}" in text  # the paper's value and ours
    assert len(results["ensemble_compact"]["transpositions"]) == 3
    assert results["ensemble_compact"]["transpositions"][0] == 0  # the reference
    assert 0 < results["hmc"]["acceptance_rate"] <= 1
    assert all(value > 0 for value in results["hmc"]["effective_sample_size"].values())


def test_digits_report(tiny: tuple[Path, dict[str, Any], str]) -> None:
    out, results, _ = tiny
    text = (out / "report" / "report.md").read_text()
    assert f"{results['hmc']['acceptance_rate']:.3f}" in text
    for name in ("sigma.png", "pruning.png", "interpolation.png"):
        assert name in text
        assert (out / "report" / name).read_bytes().startswith(b"\x89PNG")
    content = json.loads((out / "results.json").read_text())
    assert set(content["stages"]) == set(load_recipe(DIGITS).stages)
    assert content["environment"]["processor"]


def test_pruning_keeps_everything_at_one(tiny: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = tiny
    curves = results["pruning"]["curves"]
    assert curves["ensemble mean, own σ"][0] == results["evaluation"]["rows"]["mean_accuracy"]["ensemble/q_r"]
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
    again, text = run(DIGITS, out, TINY)
    assert again == results
    assert "▸" not in text
    _, text = run(DIGITS, out, [*TINY, "pruning.samples=4"])
    assert [line.split()[1] for line in text.splitlines() if line.startswith("▸")] == ["pruning", "report"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ensemble", "hmc", "vi"])
def test_killed_in_a_stage_resumes_to_the_same_numbers(
    tiny: tuple[Path, dict[str, Any], str], tmp_path: Path, stage: str
) -> None:
    """kill -9 as soon as the stage has written something; the second run gives what an uninterrupted one gives."""
    _, whole, _ = tiny
    words = [word for override in TINY for word in ("--set", override)]
    command = [sys.executable, "-m", "tu_symmetry.cli", "table", str(DIGITS), "--out", str(tmp_path), *words]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    partial = tmp_path / f"{stage}.partial"
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if partial.is_dir() and any(p.is_file() and p.name != "stage.json" for p in partial.rglob("*")):
            break
        time.sleep(0.001)
    process.kill()
    process.wait()
    results, _ = run(DIGITS, tmp_path, TINY)
    assert results["evaluation"]["rows"] == whole["evaluation"]["rows"]
    assert results["hmc"]["acceptance_rate"] == whole["hmc"]["acceptance_rate"]


def test_transpositions_run_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "recipes" / "compact_posterior" / "transpositions"
    tiny = ["data.train_size=128", "model.hidden=[8]", "pairs.counts=3", "pairs.runs=2", "pairs.epochs=3"]
    whole, text = run(folder, tmp_path / "whole", tiny)
    assert whole["pairs"]["initial"] == [1, 4, 7]
    assert len(whole["matching"]["panels"]["barrier"]) == 2
    assert "NoT after training" in text
    assert (tmp_path / "whole" / "report" / "transpositions.png").is_file()

    import tu_symmetry.tables.transpositions as module

    save, calls = module.write_safetensors, []

    def interrupted(*arguments: Any) -> None:
        save(*arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "cut", tiny)
    resumed, text = run(folder, tmp_path / "cut", tiny)
    assert "resuming" in text and len(calls) == 4  # one epoch was left, and the pairs
    assert resumed["matching"] == whole["matching"]


@pytest.mark.parametrize("count", [0, 1, 5, 11])
def test_permutations_take_exactly_the_wanted_number_of_transpositions(count: int) -> None:
    p = permutation_with_count(12, count, torch.Generator().manual_seed(count)).tolist()
    seen: set[int] = set()
    cycles = 0
    for start in range(12):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = p[start]
    assert sorted(p) == list(range(12)) and 12 - cycles == count
    with pytest.raises(ValueError, match="0 to 11"):
        permutation_with_count(12, 12, torch.Generator())
