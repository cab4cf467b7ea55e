"""The recipe of task vectors runs end to end, goes on where it was cut, and tells ways to move them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipe_runs import RECIPES, assert_goes_on, run_table

from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.experiments.rebasin import move_tasks

SMALL: Any = {"pairs": 2, "epochs": 3, "tuning_epochs": 2}


def test_the_recipe_runs_end_to_end(tmp_path: Path) -> None:
    tiny = [f"tasks.command.{key}={value}" for key, value in {**SMALL, "pairs": 1, "widths": "[8,12]"}.items()]
    results, text = run_table(RECIPES / "rebasin" / "transport", tmp_path, tiny)
    runs = results["tasks"]["runs"]
    assert len(runs) == 2 * 2 * 2 and {run["width"] for run in runs} == {8, 12}
    assert "the fine-tuned original" in text and (tmp_path / "report" / "report.md").exists()
    for run in runs:
        before, after = run["distances"]
        assert after <= before * (1 + 1e-9)
        assert all(0 <= scores["test"] <= 1 for scores in run["found"].values())


def test_a_base_that_was_trained_on_keeps_its_units(tmp_path: Path) -> None:
    data = DigitsDataModule(val_size=32, train_size=96, test_size=64)
    found = assert_goes_on(lambda out: move_tasks(out, data, widths=[10], **SMALL), tmp_path, lost=1).results
    for run in (run for run in found["runs"] if run["kind"] == "continued"):
        before, after = run["distances"]
        assert after == pytest.approx(before)
        assert run["found"]["permuted"] == run["found"]["as it is"]
