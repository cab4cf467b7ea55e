"""Tables of strings, and what stands in their cells."""

from __future__ import annotations

import io

from rich.console import Console

from tu_symmetry.reporting.grid import Grid, mean_and_error, measured, verdict


def test_a_grid_is_markdown_and_fits_a_terminal() -> None:
    grid = Grid("T", ["", "HMC\nq_d"], [["row\npaper", "0.1\n0.2"]], "caption")
    assert grid.markdown() == "|  | HMC q_d |\n|---|---:|\n| row *paper* | 0.1 *0.2* |\n\ncaption"
    assert Grid(**grid.to_dict()) == grid
    console = Console(record=True, width=80, file=io.StringIO())
    grid.print(console)
    assert "0.2" in console.export_text()


def test_means_stand_with_the_error_of_a_sample() -> None:
    assert mean_and_error([1.0, 3.0]) == (2.0, 1.0) and mean_and_error([4.0]) == (4.0, None)
    assert measured([1.0, 3.0], "+.2f") == "+2.00 ± 1.00" and measured([4.0], ".1f") == "4.0"
    assert measured([1.0, 3.0], ".2f", error=False) == "2.00 ± 1.41"
    assert [verdict(v) for v in ([2.0, 3.0], [-2.0, -3.0])] == ["held", "did not hold"]
    assert verdict([1.0, -0.5]).startswith("not resolved") and verdict([0.0]).startswith("not resolved")
