"""The benchmarks run, and what they write has the form that it should have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as program
from benchmarks import many, planted
from benchmarks._measure import figure, interleave
from benchmarks._report import JSON, MARKDOWN, Goal, Section, Settings, failure, record, save
from tu_symmetry.reporting.grid import Grid


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


def test_subjects_are_the_files_of_the_folder() -> None:
    assert {"discovery", "matching", "planted", "many"} <= set(program.subjects())
    assert not any(name.startswith("_") for name in program.subjects())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "subject",
    [
        "planted",
        "many",
        "matching",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("joint", "comparison", "streaming")),
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


@pytest.mark.filterwarnings("ignore")
def test_calibration_benchmark_judges_on_what_did_not_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import calibration

    found: list[Any] = []
    measure = calibration.measure
    monkeypatch.setattr(calibration, "measure", lambda *a, **k: found.extend(measure(*a, **k)) or found)
    assert program.main(["calibration", "--quick", "--out", str(tmp_path)]) == 0
    entry = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))["calibration"]
    assert len(entry["data"]) == 18 and len(entry["grids"][0]["rows"]) == 6 and len(entry["goals"]) == 2
    assert not any(isinstance(value, list) for row in entry["data"] for value in row.values())
    rows = {(r["method"], r["size"], r["rule"]): r for r in found}
    assert [row["mean change"] for row in entry["data"]] == pytest.approx(
        [sum(row["change"]) / 50 for row in found], abs=1e-6
    )
    for (method, size, rule), row in rows.items():
        assert len(row["change"]) == len(row["temperatures"]) == len(row["possible"]) == 50
        assert all(a >= b for a, b in zip(row["change"], row["possible"], strict=True))
        assert all(c == 0 for c, t in zip(row["change"], row["temperatures"], strict=True) if t == 0)
        if rule:
            assert sum(row["temperatures"]) <= sum(rows[method, size, 0.0]["temperatures"])
    assert any(c > 0 for row in rows.values() for c in row["change"]), "vacuous: judged where it was chosen"


def test_laplace_benchmark_compares_equal_things(tmp_path: Path) -> None:
    """Factors, posterior and exact covariances of both libraries are the same; only then do their times compare."""
    pytest.importorskip("laplace")
    assert program.main(["laplace", "--quick", "--out", str(tmp_path)]) == 0
    entry = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))["laplace"]
    (fit,) = entry["data"]["fit"]
    assert fit["difference"] < 1e-5
    ours, theirs = (fit["evidence"][name]["log_evidence"] for name in ("this library", "laplace-torch 0.3"))
    assert ours >= theirs - 1e-4
    rows = {(r["method"], r["images"]): r for r in entry["data"]["predictive"]}
    probit = [rows[name, 2]["distance"] for name in ("laplace-torch 0.3, probit", "exact covariances, probit")]
    assert probit[0] == pytest.approx(probit[1], rel=1e-2)
    assert all(r["cpu"] > 0 and r["error"] is None for r in rows.values())
    assert [len(g["rows"]) for g in entry["grids"]] == [1, 2, len(rows)]


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


def test_an_unknown_subject_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["planting"])
    assert "planting" in capsys.readouterr().err


def test_candidates_run_in_turn_and_failures_are_results() -> None:
    calls: list[str] = []

    def fails() -> None:
        calls.append("b")
        raise OSError("gone")

    outcomes = interleave({"a": lambda: lambda: calls.append("a"), "b": lambda: fails, "c": lambda: lambda: 3}, 2)
    assert calls == ["a", "b", "a"]
    assert outcomes["b"].error == "OSError: gone" and outcomes["b"].median is None
    assert outcomes["c"].value == 3 and len(outcomes["c"].seconds) == 2


def test_triples_are_counted() -> None:
    """Three rotations of three units: consistent as they are, and not with one of them turned."""
    import torch

    turn = [torch.tensor([(i + k) % 3 for i in range(3)]) for k in range(3)]
    pairs = {(0, 1): {"g": turn[1]}, (1, 2): {"g": turn[1]}, (0, 2): {"g": turn[2]}}
    assert many._consistent(pairs) == 1
    assert many._consistent({**pairs, (0, 2): {"g": turn[1]}}) == 0
    assert many._slope([(2, 6.0), (4, 12.0), (8, 24.0)]) == pytest.approx(1.0)


def test_figures() -> None:
    assert [figure(v) for v in (None, 0.0, 0.12345, 12.345, 1234.6, 1e-5)] == [
        "–",
        "0",
        "0.123",
        "12.3",
        "1235",
        "1.0e-05",
    ]


def test_the_comparison_keeps_the_tables_that_were_not_measured_again(tmp_path: Path) -> None:
    from benchmarks import comparison

    page = tmp_path / "page.md"
    page.write_text(
        f"What to try.\n\n{comparison._MARK}\n\nold text\n\n**ViT, trained long**\n\n| a |\n|---|\n| kept |\n"
    )
    scores = {"nll": 0.25, "ece": 0.5, "brief": 0.0, "brier": 0.75, "auroc": 0.875}
    itself = {
        "network": "MLP",
        "training": "briefly",
        "seconds": 0.0,
        "method": "the network itself",
        "evidence": scores,
    }
    row = itself | {"method": "all", "calibrated": scores | {"nll": 0.125}, "temperature": 0.1, "converged": False}
    for _ in range(2):
        comparison.write(comparison.section([itself, row]), page)
        text = page.read_text()
        assert text.startswith("What to try.") and "old text" not in text and text.count("| kept |") == 1
        assert text.index("**MLP, trained briefly**") < text.index("**ViT, trained long**")
        assert text.count("| all † | 0.250 → 0.125 | 0.500 → 0.500 | 0.750 → 0.750 | 0.875 → 0.875 | 0.1 |") == 1
    page.write_text("no mark")
    with pytest.raises(ValueError, match="has no line"):
        comparison.write(comparison.section([itself]), page)
