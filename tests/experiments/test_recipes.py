"""Every recipe of stages parses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tu_symmetry.configs import parse, read_mapping
from tu_symmetry.tables.recipe import load_recipe
from tu_symmetry.tables.stage import stage_kind

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(p.parent for p in (ROOT / "recipes").rglob("table.yaml") if "stages" in read_mapping(p))


@pytest.mark.parametrize("folder", FOLDERS, ids=[f.name for f in FOLDERS])
def test_every_recipe_parses(folder: Path) -> None:
    recipe = load_recipe(folder)
    for name, config in recipe.stages.items():
        kind = stage_kind(config.stage)
        parse(kind.options, config.options, name)
        assert {r for r in kind.inputs if not r.endswith("?")} <= config.inputs.keys()
    assert recipe.table.source
    assert (folder / "README.md").is_file()
