"""Tables as CSV and LaTeX: what was put in is read back from both."""

from __future__ import annotations

import csv
import io
import random
import re
from pathlib import Path

import pytest
from rich.console import Console

from tu_symmetry.reporting.grid import Grid, mean_and_error, measured, verdict, write_grids
from tu_symmetry.tables.outcome import Outcome

TEXTS = [
    "HMC q_d",
    "50 % & more",
    "a → b",
    "σ_max ≤ 3 × 10",
    r"C:\runs {x} #1 ~ ^ $",
    "x < y | z > w",
    "agreement ↑",
    "β–VI",
]


def number(generator: random.Random) -> tuple[str, float]:
    value = generator.choice([generator.uniform(-2000, 2000), generator.gauss(0, 1e-6), generator.randrange(3_000_000)])
    shown = generator.choice(["{:.4f}", "{:.3g}", "{:,.1f}", "{:,.0f}"]).format(value)
    return shown, float(shown.replace(",", ""))


def rows_of_latex(text: str) -> list[list[str]]:
    """Cells of a tabular; what stands in comments is left out, as TeX does."""
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0].replace(r"\midrule", "")
    lines = [re.sub(r"(?<!\\)%.*", "", line) for line in body.splitlines()]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix(r" \\"))] for line in lines if line.strip()
    ]


def read_number(latex: str) -> float:
    text = latex.strip("$").replace("{,}", "")
    mantissa, _, exponent = text.partition(r" \times 10^{")
    return float(f"{mantissa}e{exponent.rstrip('}')}" if exponent else mantissa)


def read_text(latex: str) -> str:
    """Undo the escapes of a cell by what they mean in TeX."""
    meant = {r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^"}
    meant |= {r"\textless{}": "<", r"\textgreater{}": ">", r"\textbar{}": "|", r"$\to$": "→", r"$\sigma$": "σ"}
    meant |= {r"$\leq$": "≤", r"$\times$": "×", r"$\uparrow$": "↑", r"$\beta$": "β", "--": "–"}
    meant |= {rf"\{c}": c for c in "&%$#_{}"}
    pattern = "|".join(re.escape(m) for m in sorted(meant, key=len, reverse=True))
    return re.sub(pattern, lambda found: meant[found[0]], latex)


@pytest.mark.parametrize("seed", range(30))
def test_numbers_and_texts_are_read_back(seed: int) -> None:
    generator = random.Random(seed)
    columns = generator.randint(1, 4)
    labels = [generator.choice(TEXTS) + f" {i}" for i in range(generator.randint(1, 5))]
    header = ["", *(f"{generator.choice(TEXTS)} {j}" for j in range(columns))]
    rows, expected = [], []
    for label in labels:
        row, values = [f"{label}\npaper"], []
        for _ in range(columns):
            lines = []
            for _ in range(2):  # ours, and the paper's
                shown, value = number(generator)
                error_shown, error = number(generator)
                kind = generator.choice(["number", "measured", "nothing"])
                error_shown, error = error_shown.lstrip("-"), abs(error)
                lines.append({"number": shown, "measured": f"{shown} ± {error_shown}", "nothing": "–"}[kind])
                values.append({"number": (value, None), "measured": (value, error), "nothing": (None, None)}[kind])
            row.append("\n".join(lines))
        rows.append(row)
        expected.append(values)
    grid = Grid("T", header, rows)

    read = list(csv.reader(io.StringIO(grid.csv())))
    names = read[0]
    assert len(set(names)) == len(names)
    for i, label in enumerate(labels):
        found = dict(zip(names, read[i + 1], strict=True))
        assert found[""] == label
        for j, name in enumerate(header[1:]):
            for k, suffix in enumerate(("", " (paper)")):
                value, error = expected[i][2 * j + k]
                assert found[name + suffix] == "" if value is None else float(found[name + suffix]) == value
                shown = found.get(f"{name}{suffix} ±", "")
                assert shown == "" if error is None else float(shown) == error

    head, *body = rows_of_latex(grid.latex())
    assert [read_text(cell) for cell in head] == header
    for i, cells in enumerate(body):
        assert read_text(cells[0]) == labels[i] + r" \textit{paper}"
        for j, cell in enumerate(cells[1:]):
            ours, paper = re.fullmatch(r"(.*?) \\textit\{(.*)\}", cell).groups()  # type: ignore[union-attr]
            for latex, (value, error) in zip((ours, paper), expected[i][2 * j : 2 * j + 2], strict=True):
                if value is None:
                    assert latex == "--"
                    continue
                parts = latex.strip("$").split(r" \pm ")
                assert [read_number(p) for p in parts] == [value] if error is None else [value, error]
                assert (error is None) or latex == rf"${parts[0]} \pm {parts[1]}$"


def test_latex_is_balanced_and_has_a_rule_for_every_sign() -> None:
    grid = Grid("50 % & _x_", ["", *TEXTS], [["row", *TEXTS], ["±", *("1.5 ± 0.5" for _ in TEXTS)]], "two\nlines")
    text = grid.latex()
    assert text.split(r"\begin", 1)[1].isascii()
    assert text.startswith("% 50 % & _x_\n% two\n% lines\n\\begin{tabular}{lrrrrrrrr}")
    outside = re.sub(r"\\[{}$]|\\textbackslash\{\}", "", text.split(r"\toprule")[1])
    assert outside.count("{") == outside.count("}")
    assert len(re.findall(r"(?<!\\)\$", outside)) % 2 == 0


def test_files_have_the_titles_as_names(tmp_path: Path) -> None:
    grids = [
        Grid("Table 1, digits 8x8", ["", "a"], [["r", "1"]]),
        Grid("Table 1: digits 8x8!", ["", "b"], [["r", "2"]]),
    ]
    names = [path.name for path in write_grids(tmp_path, grids)]
    assert names == [f"table-1-digits-8x8{suffix}" for suffix in (".csv", ".tex", "-2.csv", "-2.tex")]
    assert (tmp_path / "table-1-digits-8x8-2.csv").read_text() == ",b\nr,2\n"


def test_every_command_with_tables_writes_them(tmp_path: Path) -> None:
    Outcome({"value": 1}, "one", [Grid("Found", ["", "a"], [["r", "1 ± 0.5"]])]).save(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["found.csv", "found.tex", "results.json"]
    assert (tmp_path / "out" / "found.csv").read_text() == ",a,a ±\nr,1,0.5\n"
    assert r"r & $1 \pm 0.5$ \\" in (tmp_path / "out" / "found.tex").read_text()
    assert Outcome.load(tmp_path / "out").tables[0].rows == [["r", "1 ± 0.5"]]


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
