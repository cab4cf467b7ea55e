"""Results that hold tensors print as a line, and as a small table in notebooks."""

from __future__ import annotations

import html
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tu_symmetry as tus
from tu_symmetry.reporting.brief import Brief


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
    facts = dict(found["alignment"].facts())
    assert facts["states"] == "3 entries" and facts["reference"] == "0"
    counts = found["alignment"].transpositions
    assert facts["transpositions"] == f"{sum(counts) / 3:.4g} (0 to {max(counts)})"
    canonical = dict(found["canonical form"].facts())
    assert canonical["mass before"] == f"{found['canonical form'].mass_before:.4g}"
    assert dict(found["graph"].facts())["of"] == "Sequential" and "Symmetries of" in str(found["graph"])
    merged = found["merged"]
    assert f"aligned loss {merged.scores['aligned']['loss']:.4g}" in dict(merged.facts())["scores"]


def test_markup_in_a_name_is_escaped() -> None:
    class Odd(Brief):
        def facts(self) -> list[tuple[str, str]]:
            return [("<b>", "a & b")]

    assert "&lt;b&gt;" in Odd()._repr_html_() and "a &amp; b" in Odd()._repr_html_()
