"""The drawing of a network: every layer and group is in it, lines meet where they should, and a browser shows it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.drawing import lay_out
from tu_symmetry.symmetry.graph import SymmetryGraph


class Transformer(nn.Module):
    """Nested groups (heads), a stream through all layers, and scales."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 6, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 6), nn.ReLU(), nn.Linear(6, 3)
    )


GRAPHS = {
    "transformer": lambda: discover_symmetries(Transformer(), torch.randn(2, 5, 3)),
    "convolutional": lambda: discover_symmetries(convolutional(), torch.randn(2, 1, 6, 6)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_lanes_branch_to_the_layers_of_their_groups_and_do_not_cross_others(name: str) -> None:
    graph: SymmetryGraph = GRAPHS[name]()
    layout = lay_out(graph)
    paths = [layer.name for layer in layout.layers]
    assert len(set(paths)) == len(paths) and {n.rpartition(".")[0] for n in graph.shapes} == set(paths)
    lanes = {(lane.name, lane.kind) for lane in layout.lanes}
    assert len(lanes) == len(layout.lanes) == len(list(graph.groups()))
    assert {"permutation", "nested", "scale"} <= {lane.kind for lane in layout.lanes}
    for group in graph.permutations:
        lane = next(one for one in layout.lanes if one.name == group.name and one.kind in ("permutation", "nested"))
        for what, axes in (("makes", (0,)), ("reads", (1, 2, 3))):
            expected = {m.parameter.rpartition(".")[0] for m in group.members if m.axis in axes}
            assert {paths[b.layer] for b in lane.branches if getattr(b, what)} == expected
        if group.parent is not None:
            assert lane.hue == next(one.hue for one in layout.lanes if one.name == group.parent)
    # Branches lie within the boxes of their layers, and no two at one height.
    heights = [b.y for lane in layout.lanes for b in lane.branches]
    assert len(set(heights)) == len(heights)
    for lane in layout.lanes:
        for b in lane.branches:
            box = layout.layers[b.layer]
            assert box.top < b.y < box.top + box.height
    for one, two in zip(layout.layers, layout.layers[1:], strict=False):
        assert one.top + one.height < two.top
    # Two groups share a lane only where one ends before the other begins.
    for lane in layout.lanes:
        for other in layout.lanes:
            if lane is not other and lane.column == other.column:
                assert (
                    lane.branches[-1].layer < other.branches[0].layer
                    or lane.branches[0].layer > other.branches[-1].layer
                )
    assert max(lane.column for lane in layout.lanes) + 1 == layout.columns <= len(layout.lanes)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_a_browser_shows_it_without_a_network(name: str, tmp_path: Path) -> None:
    """Names are where they can be read: inside the drawing, and none over another."""
    driver = pytest.importorskip("playwright.sync_api")
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    graph: SymmetryGraph = GRAPHS[name]()
    graph.to_html(tmp_path / "graph.html")
    asked: list[str] = []
    said: list[Any] = []
    with driver.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1200, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(error))
        page.goto((tmp_path / "graph.html").as_uri())
        drawing = page.locator("#network")
        whole = drawing.bounding_box()
        texts = [(t.text_content(), t.bounding_box()) for t in drawing.locator("text").all()]
        lines = drawing.locator("g.lane path").count()
        shown = drawing.screenshot(path=tmp_path / "graph.png")
        chromium.close()
    assert len(asked) == 1 and asked[0].startswith("file:") and not said
    assert lines >= len(list(graph.groups()))
    names = " ".join(text for text, _ in texts)
    assert all(group.name in names for group in graph.groups())
    assert all(layer.name in names for layer in lay_out(graph).layers)
    for k, (text, box) in enumerate(texts):
        assert whole["x"] <= box["x"] and box["x"] + box["width"] <= whole["x"] + whole["width"] + 1, text
        for other, there in texts[k + 1 :]:
            apart = box["x"] + box["width"] <= there["x"] or there["x"] + there["width"] <= box["x"]
            above = min(box["y"] + box["height"], there["y"] + there["height"]) - max(box["y"], there["y"])
            assert apart or above < 4, (text, other)
    assert len(shown) > 5000  # a picture of something
