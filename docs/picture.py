"""Draws the README's picture from a finished run of the demo: ``python docs/picture.py runs/digits``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tu_symmetry.tables import plots


def main(run: Path) -> None:
    """Draw the training loss along interpolations, before and after alignment, next to this script."""
    found = json.loads((run / "interpolation" / "stage.json").read_text(encoding="utf-8"))["results"]
    paths = {name: value for name, value in found.items() if name != "ratios"}
    plots.interpolation(Path(__file__).with_name("interpolation.png"), found["ratios"], paths)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
