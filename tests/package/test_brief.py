"""Results that hold tensors print as a line, and as a small table in notebooks."""

from __future__ import annotations

import html
from typing import Any

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


def test_results_print_short_and_as_tables() -> None:
    for name, result in results().items():
        assert isinstance(result, Brief)
        text = repr(result)
        assert text.startswith(type(result).__name__ + "(") and "tensor" not in text, name
        assert len(text) < 500 and "\n" not in text, name
        page = result._repr_html_()
        assert all(part in html.unescape(page) for fact in result.facts() for part in fact), name
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


def test_markup_in_a_name_is_escaped() -> None:
    class Odd(Brief):
        def facts(self) -> list[tuple[str, str]]:
            return [("<b>", "a & b")]

    assert "&lt;b&gt;" in Odd()._repr_html_() and "a &amp; b" in Odd()._repr_html_()
