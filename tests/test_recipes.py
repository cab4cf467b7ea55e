"""Every recipe of stages parses; the transpositions recipe runs end to end at a tiny size and resumes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tu_symmetry.tables.engine import run_table
from tu_symmetry.tables.progress import Display
from tu_symmetry.tables.recipe import load_recipe, parse, read_mapping
from tu_symmetry.tables.stage import stage_kind
from tu_symmetry.tables.transpositions import permutation_with_count

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(p.parent for p in (ROOT / "recipes").rglob("table.yaml") if "stages" in read_mapping(p))


def run(folder: Path, out: Path, overrides: list[str]) -> tuple[dict[str, Any], str]:
    console = Console(record=True, width=80, file=io.StringIO())
    display = Display(console)
    results = run_table(folder, out=out, overrides=overrides, display=display)
    display.tables(results)
    return results, console.export_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=[f.name for f in FOLDERS])
def test_every_recipe_parses(folder: Path) -> None:
    recipe = load_recipe(folder)
    for name, config in recipe.stages.items():
        kind = stage_kind(config.stage)
        parse(kind.options, config.options, name)
        assert {r for r in kind.inputs if not r.endswith("?")} <= config.inputs.keys()
    assert recipe.table.source
    assert (folder / "README.md").is_file()


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
