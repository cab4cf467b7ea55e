"""The benchmarks run, and what they write has the form that it should have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import many, planted
from benchmarks._report import JSON, MARKDOWN, Goal, Section, Settings, failure, record, save
from tu_symmetry.reporting.grid import Grid


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The program sets the number of threads; tests after these are to have theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def table_widths(page: str) -> list[list[int]]:
    """Number of cells in each row of each Markdown table."""
    tables: list[list[int]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            tables[-1].append(line.count("|") - 1)
        elif tables[-1]:
            tables.append([])
    return [t for t in tables if t]


def section(title: str, rows: list[list[str]]) -> Section:
    return Section(title, "How.", [Grid("A table", ["a", "b"], rows)], [Goal("fast", False, "slow")], {"x": [1.5]})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "subject",
    [
        "planted",
        "many",
        "matching",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("joint", "comparison", "streaming", "sharing", "size")),
    ],
)
def test_quick_run_writes_a_page(subject: str, tmp_path: Path) -> None:
    assert program.main([subject, "--quick", "--out", str(tmp_path)]) == 0
    page = (tmp_path / MARKDOWN).read_text(encoding="utf-8")
    assert page.count("\n## ") == 1
    assert "Machine: " in page and "thread(s)" in page and "torch " in page
    assert "Quick run" in page
    tables = table_widths(page)
    entry = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))[subject]
    assert len(tables) == len(entry["grids"]) + 1  # what was measured, and the goals
    for widths in tables:
        assert len(widths) > 2 and len(set(widths)) == 1
    measured = entry["data"]["cases"] if subject == "joint" else entry["data"]
    grids = entry["grids"] if subject == "matching" else entry["grids"][:1]
    assert entry["quick"] and measured and sum(len(grid["rows"]) for grid in grids) == len(measured)


@pytest.mark.slow
def test_discovery_runs_in_processes_of_its_own(tmp_path: Path) -> None:
    assert program.main(["discovery", "--quick", "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))["discovery"]["data"]
    assert found["permutations"] == 25 and found["verification_error"] is None
    assert found["discovery_memory"] > 0 and found["export_seconds"] > 0


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    for subject, title, cell in (("b", "Second", "old"), ("a", "First", "kept"), ("b", "Second", "new")):
        save(tmp_path, subject, record(section(title, [["row", cell]]), seconds=1.0, quick=False))
    page = (tmp_path / MARKDOWN).read_text(encoding="utf-8")
    assert page.index("## First") < page.index("## Second")
    assert "old" not in page and "| row | kept |" in page and "| row | new |" in page
    assert "| fast | **no** | slow |" in page
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([JSON, MARKDOWN])


def test_a_failed_subject_stays_on_the_page_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: Settings) -> Section:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(planted, "run", broken)
    monkeypatch.setattr(many, "run", lambda settings: section("Fine", [["row", "cell"]]))
    assert program.main(["planted", "many", "--quick", "--out", str(tmp_path)]) == 1
    page = (tmp_path / MARKDOWN).read_text(encoding="utf-8")
    assert "This subject failed" in page and "RuntimeError: no such thing" in page and "| row | cell |" in page
    assert failure("x", ValueError("why\nmore"), seconds=0.0, quick=False)["text"].endswith("`ValueError: why`")
