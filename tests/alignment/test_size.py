"""Networks that do not fit into memory: nothing is kept while they are matched, and the results are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.alignment import matching
from tu_symmetry.alignment.products import WeightSimilarities
from tu_symmetry.alignment.relaxation import RelaxedPair
from tu_symmetry.states import open_state
from tu_symmetry.symmetry.action import Permuted
from tu_symmetry.symmetry.running import probe


class Residual(nn.Module):
    """Two blocks with convolutions on one stream, and a head behind a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6 * 16, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 6, 1))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(torch.relu(x))
        return self.head(x.flatten(1))


def decoder() -> nn.Module:
    sizes = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))  # type: ignore[arg-type]


CASES = {
    "residual": (Residual, torch.randn(2, 3, 4, 4)),
    "decoder": (decoder, torch.zeros(1, 5, dtype=torch.long)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(12, 3, 10, dropout=0.0, batch_first=True),
        torch.randn(1, 4, 12),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """A graph, weights, and those of a network that has nothing to do with them."""
    build, x = CASES[request.param]
    model, generator = build(), torch.Generator().manual_seed(0)
    graph = tus.discover_symmetries(model, x)
    graph.verified = True  # which the tests of these networks' symmetries look at
    one, other = (
        {n: torch.randn(t.shape, generator=generator).to(t) for n, t in model.state_dict().items()} for _ in "12"
    )
    for name in (n for n in one if n.endswith("var")):
        one[name], other[name] = one[name].abs(), other[name].abs()
    return graph, one, other


@pytest.mark.parametrize("noise", [0.0, 0.7])
@pytest.mark.parametrize("solver", ["frank_wolfe", "descent"])
def test_matching_without_anything_kept(solver: Any, noise: float, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same permutation as with everything kept, of planted units and of units under noise."""
    graph, one, other = pair
    noisy = {n: t + noise * other[n] for n, t in one.items()}
    planted = tus.random_permutation(graph, generator=torch.Generator().manual_seed(1))
    moved = tus.apply_permutation(graph, planted, noisy)
    expected = tus.weight_matching(graph, one, moved, solver=solver)
    monkeypatch.setattr(matching, "_MOST_KEPT", -1)
    found = tus.weight_matching(graph, one, moved, solver=solver)
    assert all(torch.equal(p, found.permutation[name]) for name, p in expected.permutation.items())
    assert found.objective == pytest.approx(expected.objective, rel=1e-6)
    assert found.distance_after == pytest.approx(expected.distance_after, rel=1e-6, abs=1e-6)
    if noise == 0 and solver == "frank_wolfe":
        assert found.distance_after == 0


def test_a_path_is_a_mean_of_its_vertices(pair: Any) -> None:
    """Matrices, similarities, steps and gains along the path of Frank-Wolfe, in float64, beside those that are kept."""
    graph, one, other = ({n: t.double() for n, t in s.items()} if isinstance(s, dict) else s for s in pair)
    kept, free = (RelaxedPair(WeightSimilarities.of(graph, one, other, kept=k).products) for k in (True, False))
    for _ in range(5):
        for name in kept.plan.sizes:
            torch.testing.assert_close(free.matrix(name), kept.matrix(name))
            for a, b in zip(free.similarity(name), kept.similarity(name), strict=True):
                torch.testing.assert_close(a, b)
        _, sources, gap, scale = kept.vertex()
        assert free.vertex()[2:] == pytest.approx((gap, scale), rel=1e-9, abs=1e-9)
        if gap <= 1e-9 * scale:
            break
        assert free.advance(sources, gap) == pytest.approx(kept.advance(sources, gap), rel=1e-9)


def test_outputs_are_compared_operator_by_operator(pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network runs on a view of its file as on its weights, with noise on them too, and a wrong order is refused."""
    graph, one, _ = pair
    monkeypatch.setattr(probe, "_LARGE", 1)
    save_file({n: t.contiguous() for n, t in one.items()}, tmp_path / "one.safetensors")
    view = open_state(tmp_path / "one.safetensors")
    for found, expected in zip(graph.probe.run(view), graph.probe.run(one), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    element = tus.random_permutation(graph, generator=torch.Generator().manual_seed(1))
    moved = Permuted(graph, element, view)
    assert tus.certify(graph, view, moved).holds
    rounded = {n: t.half().float() if t.is_floating_point() else t for n, t in one.items()}
    save_file({n: t.contiguous() for n, t in rounded.items()}, tmp_path / "two.safetensors")
    assert not tus.certify(graph, view, open_state(tmp_path / "two.safetensors")).holds
    assert float(tus.certify(graph, view, moved).allowed) < 1e-9
