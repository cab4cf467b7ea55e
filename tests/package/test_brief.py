"""Results that hold tensors print as a line, and as a small table in notebooks."""

from __future__ import annotations

import html.parser
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tu_symmetry as tus
from tu_symmetry.reporting.brief import Brief, change, span


def results() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 300), nn.ReLU(), nn.LayerNorm(300), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 3)
    )
    net = net.double()
    x = torch.randn(4, 8, dtype=torch.float64)
    graph = tus.discover_symmetries(net, x)
    one = net.state_dict()
    two = tus.apply_permutation(graph, tus.random_permutation(graph), one)
    loader = [(x, torch.tensor([0, 1, 2, 0]))]
    return {
        "graph": graph,
        "alignment": tus.align(graph, [one, two, one]),
        "matching": tus.weight_matching(graph, one, two),
        "canonical form": tus.canonicalize(graph, one),
        "merged": tus.merge(graph, [one, two], net, loader, loss=F.cross_entropy),
    }


class Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def test_results_print_short_and_as_tables() -> None:
    for name, result in results().items():
        assert isinstance(result, Brief)
        text = repr(result)
        assert text.startswith(type(result).__name__ + "(") and "tensor" not in text, name
        assert len(text) < 500 and "\n" not in text, name
        page = Cells()
        page.feed(result._repr_html_())
        assert not page.open and page.found[0] == type(result).__name__
        assert page.found[1:] == [part for fact in result.facts() for part in fact], name
        assert all(key in text for key, _ in result.facts())


def test_what_is_said_is_what_was_found() -> None:
    found = results()
    alignment, graph = found["alignment"], found["graph"]
    facts = dict(alignment.facts())
    assert facts["networks"] == "3" and facts["reference"] == "number 0"
    assert facts["NoT"] == span(alignment.transpositions[1:])
    assert dict(found["matching"].facts())["NoT"] == str(tus.transposition_count(found["matching"].permutation))
    canonical = found["canonical form"]
    assert dict(canonical.facts())["mass"] == change(canonical.mass_before, canonical.mass_after)
    assert dict(graph.facts())["of"] == "Sequential" and "Symmetries of" in str(graph)
    merged = found["merged"]
    assert f"loss {merged.scores['aligned']['loss']:.4g}" in dict(merged.facts())["aligned"]


def test_groups_print_without_their_indices() -> None:
    graph = results()["graph"]
    for group in (*graph.permutations, *graph.scales, *graph.normalizations):
        text = repr(group)
        assert repr(group.name) in text and group.members[0].parameter in text
        assert "tensor(" not in text and len(text) < 200


@pytest.mark.parametrize(("values", "text"), [([], "none"), ([2], "2"), ([3, 3], "3"), ([1, 2.5], "1.75 (1 to 2.5)")])
def test_spans_of_numbers(values: list[float], text: str) -> None:
    assert span(values) == text


def test_markup_in_a_name_is_escaped() -> None:
    class Odd(Brief):
        def facts(self) -> list[tuple[str, str]]:
            return [("<b>", "a & b")]

    assert "&lt;b&gt;" in Odd()._repr_html_() and "a &amp; b" in Odd()._repr_html_()
