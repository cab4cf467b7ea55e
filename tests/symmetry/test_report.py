"""Printing and drawing a graph, and the command that does both from a dotted name."""

from __future__ import annotations

import html
import itertools
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from tu_symmetry import cli
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.graph import SymmetryGraph

NOT_A_MODULE, MLP = 3, f"{__name__}.mlp"


def mlp(hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def encoder() -> SymmetryGraph:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return discover_symmetries(nn.TransformerEncoder(layer, 3).eval(), torch.zeros(1, 3, 16))


def tiny() -> SymmetryGraph:
    return discover_symmetries(mlp(), torch.zeros(1, 4))


def test_resnet18_prints_in_120_columns_with_equal_groups_of_repeated_layers_in_a_line() -> None:
    graph = discover_symmetries(torchvision.models.resnet18(weights=None), torch.zeros(1, 3, 64, 64))
    lines = str(graph).splitlines()
    assert max(map(len, lines)) <= 120 and lines[0] == "Symmetries of ResNet"
    text = " ".join(" ".join(lines).split())
    assert f"12 groups of 2880 units: 10^{graph.log10_permutations:.1f} equivalent weight vectors" in text
    assert "scales 12 groups, 2880 dimensions" in text
    assert "34 axes: kernel position" in text and "1 axis: input of the network (conv1.weight[1])" in text
    (folded,) = [line for line in lines if line.startswith("  layer3.{0-1}.conv1  2 ×")]
    assert folded.endswith("256  .conv1.weight[0], .bn1.{weight,bias,running_mean,running_var}[0], .conv2.weight[1]")
    start, end = lines.index("Permutation groups"), lines.index("Scale groups")
    counts = [int(n or 1) for n in re.findall(r"^  \S+ +(?:(\d+) × )?\d+  \S", "\n".join(lines[start:end]), re.M)]
    assert sum(counts) == 12 and len(counts) == 8


def test_nested_groups_stand_under_their_parents() -> None:
    lines = str(encoder()).splitlines()
    heads = next(k for k, line in enumerate(lines) if re.match(r"  layers\.\{0-2\}\.self_attn +3 × 4 ", line))
    inner = [line for line in lines[heads:] if line.startswith("    in each block: ")]
    assert len(inner) == 2 and all(" 3 × 4·4  " in line for line in inner)


def test_long_names_are_cut_not_overflowed() -> None:
    model = mlp()
    for name in ("a_rather_long_name_of_a_module" * 3, "another_long_name" * 4):
        model = nn.Sequential(OrderedDict({name: model}))
    assert max(map(len, str(discover_symmetries(model, torch.zeros(1, 4))).splitlines())) <= 120


@pytest.mark.parametrize("build", [encoder, tiny])
def test_the_page_parses_and_holds_every_group_tensor_and_pin(
    build: Callable[[], SymmetryGraph], tmp_path: Path
) -> None:
    graph = build()
    graph.architecture = "<script>alert(1)</script>"
    target = tmp_path / "graph.html"
    text = graph.to_html(target)
    assert "&lt;script&gt;" in text
    assert target.read_text(encoding="utf-8") == text and list(tmp_path.iterdir()) == [target]
    opened, closed = (Counter(re.findall(tag, text)) for tag in (r"<(\w+)(?:[^>]*[^/])?>", r"</(\w+)>"))
    assert opened - Counter(["meta"]) == closed and not re.search(r"(src|href)=|<script|<link", text)
    cells = [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", text)]
    assert {g.name for g in graph.groups()} <= set(cells) and set(graph.shapes) <= set(cells)
    told = "; ".join(cells)
    assert all(f"axis {pin.axis}, size {pin.size}: {pin.reason}" in told for pin in graph.pinned)
    assert all(f"axis {m.axis}: {group.name}" in told for group in graph.permutations for m in group.members)


@pytest.mark.parametrize("build", [encoder, tiny])
def test_a_notebook_shows_the_drawing_alone(build: Callable[[], SymmetryGraph]) -> None:
    """The page's own, with rules for nothing outside it."""
    text, page = build()._repr_html_(), build().to_html()
    (picture,) = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert picture in text and not re.search(r"<(html|body|table|script)", text)
    rules = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)[0].strip().splitlines()
    assert len(rules) > 5 and all(rule.startswith(".network") for rule in rules)


@pytest.mark.parametrize("build", [encoder, tiny])
def test_every_group_has_a_lane_that_no_other_crosses(build: Callable[[], SymmetryGraph]) -> None:
    graph = build()
    text = graph.to_html()
    assert text.count('<rect class="layer"') == len({n.rpartition(".")[0] for n in graph.shapes})
    kinds = re.findall(r'<g class="lane (\w+)">', text)
    wanted = [g.kind if getattr(g, "parent", None) is None else "nested" for g in graph.groups()]
    assert sorted(kinds) == sorted(wanted)
    lanes = defaultdict(list)
    for x, *ends in re.findall(r'<path d="M([\d.]+) ([\d.]+)V([\d.]+)', text):
        lanes[x].append(tuple(map(float, ends)))
    assert sum(map(len, lanes.values())) == len(kinds)
    for held in lanes.values():
        assert all(one[1] < two[0] for one, two in itertools.pairwise(sorted(held)))


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["inspect", *words])
    found = capsys.readouterr()
    return status, found.out, " ".join(found.err.split())


def test_inspect_builds_verifies_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--init", "hidden=7", "--dtype", "float64"]
    status, out, err = inspect(capsys, "--model", MLP, "--input", "1,4", *options)
    assert status == 0 and "verifying them in float64" in err
    assert "state           verified" in out and re.search(r"^  0  7  0\.\{weight,bias\}\[0\]", out, re.M)
    words = ["--model", "torch.nn.Embedding", "--init", "num_embeddings=4", "embedding_dim=6", "--input", "2,5:long"]
    assert inspect(capsys, *words)[0] == 0


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("nowhere_at_all.Net", ["--input", "1,3"], "No module named 'nowhere_at_all'"),
        (f"{__name__}.Tyni", ["--input", "1,3"], "has no attribute 'Tyni'"),
        (f"{__name__}.NOT_A_MODULE", ["--input", "1,3"], "'int' object is not callable"),
        ("builtins.dict", ["--input", "1,3"], "returns a dict, not a torch.nn.Module"),
        (MLP, ["--init", "width=3", "--input", "1,3"], "unexpected keyword argument 'width'"),
        (MLP, ["--init", "width", "--input", "1,3"], "'width' is not KEY=VALUE"),
        (MLP, ["--input", "1,3"], "forward pass"),
        (MLP, ["--input", "1,x"], "'1,x' is no shape"),
        (MLP, ["--input", "1,3:flt"], "'flt' is no dtype"),
    ],
)
def test_inspect_explains_what_is_wrong(
    model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = inspect(capsys, "--model", model, *words)
    assert status == 2 and out == "" and message in err
