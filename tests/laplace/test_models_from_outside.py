"""Networks of transformers, timm, torch_geometric and PEFT, compiled ones and MC dropout: the defaults run, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace_oracles import dense_curvature, exact_ggn, fitted, mlp, randomize
from oracle import judge
from outside import LABELS, MODELS, build
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch_geometric.nn import GCN
from torch_uncertainty.methods import mc_dropout

import tu_symmetry as tus
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.laplace.report import ReadElsewhereWarning

pytestmark = pytest.mark.filterwarnings("ignore")


class Logits(nn.Module):
    """What an oracle differentiates: the tensor in an output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        found = self.model(x)
        return getattr(found, "logits", found)


@pytest.mark.parametrize("name", list(MODELS))
def test_defaults_fit_predict_save_and_load(name: str, tmp_path: Path) -> None:
    """What has no Kronecker factors is exact: its block is that of the Gauss-Newton matrix from dense Jacobians."""
    (model, x, y), shared = build(name), MODELS[name][2]
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    if shared:
        with pytest.warns(ReadElsewhereWarning, match=r"numbers of positions"):
            la = LinearizedLaplace(model).fit(batches)
    else:
        la = LinearizedLaplace(model).fit(batches)
    assert shared <= set(la.fitted.curvature.whole)
    for parameter in shared:
        expected = exact_ggn(Logits(model), [f"model.{parameter}"], x, y, "classification")
        (block,) = (b for b in la.posterior.blocks if b.name == parameter)
        found = block.from_basis(block.to_basis(torch.eye(len(expected)).double()) * block.eigenvalues())
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max())
        )  # T5 and Llama normalize in single precision
        assert float(expected.abs().max()) > 0
    la.optimize_evidence(max_iterations=2)
    found = la.predictive(x, num_samples=3)
    torch.testing.assert_close(found.sum(-1), torch.ones(y.shape, dtype=torch.float64))
    la.save(tmp_path / "la.safetensors")
    loaded = LinearizedLaplace.load(tmp_path / "la.safetensors", model)
    torch.testing.assert_close(loaded.predictive(x, num_samples=3), found)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bert", [2, 2, 2, 4, 4, 6]),
        ("gpt2", [2, 2, 2, 4, 6]),
        ("llama", [2, 4, 6, 8]),
        ("t5", [2, 2, 2, 4, 6]),
        ("vit", [2, 2, 2, 4, 6]),
        ("gcn", [8]),
    ],
)
def test_their_symmetries(name: str, sizes: list[int]) -> None:
    """Of heads too: the keys and values that a network caches are none of its outputs."""
    model, x, _ = build(name)
    graph = tus.discover_symmetries(model, x[:2])
    tus.verify_symmetries(graph, model, x[:2])
    assert sorted(group.size for group in graph.permutations) == sizes
    assert not judge(graph, model, (x[:2],)).wrong


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_batches_of_any_size_tell_what_they_share(samples: int) -> None:
    """A first batch of one sample looks like numbers of positions ``[1, n]``."""
    model, x, y = build("bert")
    batches = [(x[:samples], y[:samples])] + ([(x[samples:], y[samples:])] if samples < 5 else [])
    la = LinearizedLaplace(model, prior="single").fit(batches)
    torch.testing.assert_close(
        dense_curvature(la), dense_curvature(LinearizedLaplace(model, prior="single").fit([(x, y)]))
    )


def test_a_graph_that_all_samples_share_is_no_batch() -> None:
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    batch = ({"x": torch.randn(5, 5), "edge_index": edges}, LABELS)
    with pytest.raises(ValueError, match=r"\(5, 5\), \(2, 3\).*edges of a graph, belongs into a module as a buffer"):
        LinearizedLaplace(GCN(5, 8, 2, 3).eval()).fit([batch])


class Branching(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if x.sum() > 0 else 2)


def test_what_cannot_be_traced_names_the_priors_that_can() -> None:
    model, x = randomize(Branching(nn.Linear(4, 3))), torch.randn(5, 4).double()
    with pytest.raises(tus.SymmetryError, match=r"branches on the values(?s:.*)prior='per_layer'"):
        LinearizedLaplace(model).fit([(x[:1], LABELS[:1])])


# -- what is put around networks --------------------------------------------------------------------------------------

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "compiled_part": lambda m: nn.Sequential(torch.compile(m, backend="eager")),
    "compiled_in_place": in_place,
    "mc_dropout": lambda m: mc_dropout(m, 4).eval(),
    "mc_dropout_loop": lambda m: mc_dropout(m, 4, on_batch=False).eval(),
}


def dropping() -> nn.Module:
    return randomize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)))


@pytest.mark.parametrize("around", list(AROUND))
def test_what_is_around_a_network_changes_nothing(around: str, tmp_path: Path) -> None:
    plain = dropping()
    wrapped = AROUND[around](copy.deepcopy(plain))
    modes = {name: m.training for name, m in wrapped.named_modules()}
    expected, la = (fitted(m, X, LABELS) for m in (plain, wrapped))
    torch.testing.assert_close(dense_curvature(la), dense_curvature(expected))
    torch.testing.assert_close(la.predictive(X), expected.predictive(X))
    assert {name: m.training for name, m in wrapped.named_modules()} == modes
    la.save(tmp_path / "la.safetensors")
    loaded = LinearizedLaplace.load(tmp_path / "la.safetensors", wrapped)
    torch.testing.assert_close(loaded.predictive(X), expected.predictive(X))


@pytest.mark.parametrize("around", list(AROUND))
def test_planted_orders_of_wrapped_networks_are_found(around: str) -> None:
    wrapped = AROUND[around](dropping())
    graph, state = tus.discover_symmetries(wrapped, X), wrapped.state_dict()
    assert [group.size for group in graph.permutations] == [5]
    planted = tus.random_permutation(graph, generator=torch.Generator().manual_seed(2))
    other = tus.apply_permutation(graph, planted, state)
    loss = nn.functional.cross_entropy
    merged = tus.merge(graph, [state, other], wrapped, [(X, LABELS)], loss=loss)
    torch.testing.assert_close(dict(merged.state), dict(state))
    assert merged.scores["aligned"]["loss"] == pytest.approx(float(loss(dropping()(X), LABELS)), rel=1e-6)


def test_a_graph_of_what_is_around_is_refused() -> None:
    compiled = torch.compile(mlp(), backend="eager")
    with pytest.raises(ValueError, match=r"graph= is of another network: this one has no \['_orig_mod\.0\.weight'"):
        LinearizedLaplace(compiled, graph=tus.discover_symmetries(compiled, X)).fit([(X, LABELS)])


def test_adapters_of_peft(tmp_path: Path) -> None:
    """They alone are uncertain, exactly as in a network with all else frozen."""
    bert, x, y = build("bert")
    model = randomize(get_peft_model(bert, LoraConfig(target_modules=["query", "value"], r=2)), scale=0.3)
    la = LinearizedLaplace(model, prior="single", evaluate_at="map", curvature="full").fit([(x, y)])
    assert len(la.tangent.names) == 4 and all("lora" in name for name in la.tangent.names)
    expected = exact_ggn(Logits(model), [f"model.{name}" for name in la.tangent.names], x, y, "classification")
    torch.testing.assert_close(dense_curvature(la), expected, rtol=1e-6, atol=1e-9)
    la = LinearizedLaplace(model).fit([(x, y)])
    la.save(tmp_path / "la.safetensors")
    loaded = LinearizedLaplace.load(tmp_path / "la.safetensors", model)
    torch.testing.assert_close(loaded.predictive(x), la.predictive(x))


def test_networks_with_adapters_of_peft_are_aligned() -> None:
    model = randomize(get_peft_model(mlp(), LoraConfig(target_modules=["0"], r=2)))
    graph, state = tus.discover_symmetries(model, X), model.state_dict()
    assert sorted(group.size for group in graph.permutations) == [2, 5]  # of the adapter's rank, too
    planted = tus.random_permutation(graph, generator=torch.Generator().manual_seed(2))
    (found,) = tus.align(graph, [tus.apply_permutation(graph, planted, state)], reference=state).states
    torch.testing.assert_close(dict(found), dict(state))
