"""Certificates: the change of a network's own outputs, beside what the rounding of its weights explains."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from zoo import Net, discovered

import tu_symmetry as tus

SAMPLE = [c for c in CASES if c.name in {"mlp_relu", "cnn_flatten", "GroupedConv", "MultiScaleLinearAttention"}]


def network() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.randn(4, 5)


def damaged(state: dict[str, Tensor], group: tus.symmetry.PermutationGroup) -> dict[str, Tensor]:
    """A state of which one axis of one tensor moved, and nothing else."""
    member = group.members[0]
    tensor = state[member.parameter]
    return state | {member.parameter: tensor.roll(1, dims=tensor.ndim - 1 if tensor.ndim == 1 else member.axis)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SAMPLE, ids=lambda c: c.name)
def test_certificates_hold_for_right_moves_and_for_no_wrong_one(case: Case, dtype: torch.dtype) -> None:
    model, graph = discovered(case)
    state = {n: t.to(dtype) for n, t in model.state_dict().items()}
    generator = torch.Generator().manual_seed(2)
    moved = tus.apply_permutation(graph, tus.random_permutation(graph, generator=generator), state)
    permuted = tus.certify(graph, state, moved)
    computed = 4 * 128 * torch.finfo(torch.float64).eps  # whichever entry comes closest to what it may change by
    assert permuted.holds and permuted.change <= permuted.allowed <= computed, str(permuted)
    assert permuted.dtype == torch.float64  # nothing was rounded
    scaled = tus.apply_scale(graph, tus.random_scale(graph, generator=generator, std=0.5), state)
    certificate = tus.certify(graph, state, scaled)
    assert certificate.holds, str(certificate)
    assert certificate.allowed <= max(4 * torch.finfo(dtype).eps, computed)
    assert certificate.dtype == (dtype if graph.scales else torch.float64)
    for group in graph.permutations:
        wrong = tus.certify(graph, state, damaged(moved, group))
        assert not wrong.holds and wrong.change > 1e-3, (group.name, str(wrong))
        with pytest.raises(tus.SymmetryError, match=r"aligned weights: the outputs .* They change by"):
            tus.symmetry.require_certificate(wrong, "aligned weights")


def test_a_change_of_one_part_in_a_million_is_seen_in_double_precision_and_explained_in_bfloat16() -> None:
    model, x = network()
    graph = tus.discover_symmetries(model, x)
    state = {n: t.double() for n, t in model.state_dict().items()}
    nearly = state | {"4.bias": state["4.bias"] * (1 + 1e-6)}
    assert not tus.certify(graph, state, nearly).holds
    rounded = {n: t.bfloat16() for n, t in state.items()}
    certificate = tus.certify(graph, state, rounded)
    assert certificate.holds and certificate.change > 1e-4 and certificate.dtype == torch.bfloat16


def test_the_epsilon_of_a_normalization_is_explained_as_far_as_it_goes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    graph = tus.discover_symmetries(model, x)
    (group,) = (g for g in graph.normalizations if not g.exact)
    state = dict(model.state_dict())
    for factor, holds in ((0.2, True), (-0.2, True), (-6.0, False)):  # at e^-6 the epsilon outweighs the variance
        scaled = tus.apply_scale(graph, {group.name: torch.full((group.size,), factor)}, state)
        certificate = tus.certify(graph, state, scaled)
        assert certificate.holds is holds and certificate.change > 1e-9, (factor, str(certificate))


def test_integer_outputs_and_infinite_ones_are_certified() -> None:
    def decided(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(torch.relu(self.a(x))).argmax(-1), torch.full((3,), -torch.inf, dtype=x.dtype)

    torch.manual_seed(0)
    model, x = Net(decided, a=nn.Linear(5, 8), b=nn.Linear(8, 3)), torch.randn(64, 5)
    graph = tus.discover_symmetries(model, x)
    state = dict(model.state_dict())
    moved = tus.apply_permutation(graph, tus.random_permutation(graph), state)
    assert tus.certify(graph, state, moved).holds
    wrong = tus.certify(graph, state, moved | {"b.weight": -moved["b.weight"]})
    assert wrong.change == torch.inf and not wrong.holds


def test_a_graph_keeps_no_weights_alive() -> None:
    model, x = network()
    weights = [weakref.ref(p) for p in model.parameters()]
    graph = tus.discover_symmetries(model, x)
    assert graph.probe is not None
    held = sum(p.untyped_storage().nbytes() for p in graph.probe.module.parameters())
    assert held == 8 * len(weights)  # a scalar each
    del model
    gc.collect()
    assert all(w() is None for w in weights)
    graph.require_verified()  # it is enough to verify


def test_copies_and_files_of_a_graph_hold_no_module(tmp_path: Path) -> None:
    model, _ = network()
    x = torch.randn(1000, 5)
    graph = tus.discover_symmetries(model, x)
    assert copy.copy(graph).probe is graph.probe is copy.deepcopy(graph).probe is not None
    torch.save(graph, tmp_path / "graph.pt")
    loaded = torch.load(tmp_path / "graph.pt", weights_only=False)
    assert (tmp_path / "graph.pt").stat().st_size < 8 * x.numel(), "neither weights nor inputs"
    state, p = dict(model.state_dict()), tus.random_permutation(graph)
    moved = tus.apply_permutation(graph, p, state)
    with pytest.raises(tus.SymmetryError, match="holds no network to verify it with"):
        tus.apply_permutation(loaded, p, state)
    with pytest.raises(tus.SymmetryError, match=r"holds no network to run.*verify_symmetries"):
        tus.certify(loaded, state, moved)
    tus.verify_symmetries(loaded, model, x[:4])
    assert loaded.verified and tus.certify(loaded, state, moved).outputs == 12
    with pytest.raises(tus.SymmetryError, match="the state after is a stack"):
        tus.certify(loaded, state, {n: t.unsqueeze(0) for n, t in moved.items()})


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("form", ["coo", "csr", "transposed", "float32"])
def test_states_of_every_layout_are_certified(form: str) -> None:
    def mixed(self: Any, x: Tensor) -> Tensor:
        return (self.mixing @ self.second(self.first(x).relu()).T).T

    mixing = torch.randn(3, 3).T if form == "transposed" else torch.eye(3) + torch.ones(3, 3).triu()
    mixing = {"coo": mixing.to_sparse, "csr": mixing.to_sparse_csr}.get(form, mixing.clone)()
    model, x = Net(mixed, mixing=mixing, first=nn.Linear(5, 8), second=nn.Linear(8, 3)), torch.randn(4, 5)
    graph = tus.discover_symmetries(model, x)
    assert 8 in [g.size for g in graph.permutations]
    state = model.state_dict()
    moved = tus.apply_permutation(graph, tus.random_permutation(graph), state)
    given = {n: t.clone() for n, t in moved.items()}
    certificate = tus.certify(graph, state, moved)
    assert certificate.holds and not tus.certify(graph, state, damaged(moved, graph.permutations[0])).holds
    assert all(torch.equal(given[n].to_dense(), t.to_dense()) for n, t in moved.items())
