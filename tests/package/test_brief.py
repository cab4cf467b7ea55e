"""Results that hold tensors print as a line."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import tu_symmetry as tus
from tu_symmetry.reporting.brief import Brief


def test_results_print_short_and_say_what_was_found() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 3)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    graph = tus.discover_symmetries(net, x)
    one = net.state_dict()
    two = tus.apply_permutation(graph, tus.random_permutation(graph), one)
    alignment, form = tus.align(graph, [one, two, one]), tus.canonicalize(graph, one)
    merged = tus.merge(graph, [one, two], net, [(x, torch.tensor([0, 1, 2, 0]))], loss=F.cross_entropy)
    for result in (graph, alignment, tus.weight_matching(graph, one, two), form, merged):
        assert isinstance(result, Brief)
        text = repr(result)
        assert text.startswith(type(result).__name__ + "(") and "tensor(" not in text and "\n" not in text
        assert len(text) < 500
    counts = alignment.transpositions
    assert dict(alignment.facts())["transpositions"] == f"{sum(counts) / 3:.4g} (0 to {max(counts)})"
    assert dict(form.facts())["mass before"] == f"{form.mass_before:.4g}"
    assert f"aligned loss {merged.scores['aligned']['loss']:.4g}" in dict(merged.facts())["scores"]
    assert "Symmetries of" in str(graph)
