"""Compact posteriors: moments against numpy, planted permutations, pruning, files, and ensembles of draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tu_symmetry.files import write_safetensors
from tu_symmetry.posterior.compact import CompactEnsemble, CompactPosterior, prune
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError, SymmetryError, stack_states
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import random_permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def randomized(seed: int, model: nn.Module | None = None) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = {}
    for name, t in (model or net()).state_dict().items():
        if not t.is_floating_point():
            found[name] = torch.tensor(100 + seed)
        else:
            draw = torch.randn(t.shape, generator=g)
            found[name] = draw.abs() + 0.5 if "running_var" in name else draw
    return found


@pytest.fixture(scope="module")
def graph() -> SymmetryGraph:
    return discover_symmetries(net(), X)


@pytest.fixture
def members() -> list[dict[str, Tensor]]:
    return [randomized(i) for i in range(5)]


WEIGHTS = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize("form", ["list", "stack", "store"])
def test_moments_are_numpys(members: list[dict[str, Tensor]], graph: SymmetryGraph, form: str, tmp_path: Path) -> None:
    states: object = members
    if form == "stack":
        states = stack_states(members)
    elif form == "store":
        states = SampleStore.create(tmp_path / "s", architecture="net", method="test")
        states.append(members, step=range(5))
    q = CompactPosterior.from_states(states, graph, align=False)  # type: ignore[arg-type]
    assert q.std.keys() == WEIGHTS
    assert q.mean.keys() == members[0].keys()
    for name in members[0]:
        values = np.stack([m[name].numpy() for m in members]).astype(np.float64)
        if name in WEIGHTS:
            expected = values.std(0, ddof=1)
            np.testing.assert_allclose(q.std[name].numpy(), expected, rtol=1e-6)
        if "num_batches" in name:
            assert int(q.mean[name]) == 100 and q.mean[name].dtype == torch.int64
        else:
            np.testing.assert_allclose(q.mean[name].numpy(), values.mean(0), rtol=1e-6, atol=1e-12)


def test_alignment_removes_planted_permutations(graph: SymmetryGraph) -> None:
    g = torch.Generator().manual_seed(0)
    base = randomized(0)
    near = [
        {n: t + 0.01 * torch.randn(t.shape, generator=g) if n in WEIGHTS else t for n, t in base.items()}
        for _ in range(6)
    ]
    shuffled = near[:1] + [apply_permutation(graph, random_permutation(graph, generator=g), s) for s in near[1:]]
    q_r = CompactPosterior.from_states(shuffled, graph, align=True)
    q_d = CompactPosterior.from_states(shuffled, graph, align=False)
    truth = CompactPosterior.from_states(near, graph, align=False)
    for name in q_r.mean:
        torch.testing.assert_close(q_r.mean[name], truth.mean[name])
    for name in q_r.std:
        torch.testing.assert_close(q_r.std[name], truth.std[name])
    assert q_d.sigma().mean() > 20 * q_r.sigma().mean()
    assert q_r.metadata["aligned"] and not q_d.metadata["aligned"]
    assert len(q_r.metadata["transpositions"]) == 6 and q_r.metadata["transpositions"][0] == 0
    assert q_r.metadata["groups"] == {p.name: [6] for p in graph.permutations}


def test_draws_have_the_moments_and_buffers_stay(members: list[dict[str, Tensor]], graph: SymmetryGraph) -> None:
    q = CompactPosterior.from_states(members, graph, align=False)
    n = 20_000
    before = torch.get_rng_state()
    draws = q.sample(n, generator=torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())
    for name, t in q.std.items():
        z = (draws[name] - q.mean[name]) / t
        assert z.mean(0).abs().max() < 5 / n**0.5
        assert (z.var(0) - 1).abs().max() < 5 * (2 / n) ** 0.5
        assert (z**4).mean() == pytest.approx(3, abs=0.1)
    for name in q.mean.keys() - q.std.keys():
        assert torch.equal(draws[name], q.mean[name].expand(draws[name].shape))
    again = q.sample(n, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(draws[k], again[k]) for k in draws)
    assert not torch.equal(q.sample(1)["0.bias"], q.sample(1)["0.bias"])
    with pytest.raises(ValueError, match="draw 0"):
        q.sample(0)


def test_pruning_keeps_the_lowest_of_the_whole_network(members: list[dict[str, Tensor]], graph: SymmetryGraph) -> None:
    q = CompactPosterior.from_states(members, graph, align=False)
    sigma = q.sigma().numpy()
    for keep in (0.0, 0.01, 0.3, 1.0):
        mask = q.pruning_mask(keep)
        assert mask.keys() == q.mean.keys()
        kept = np.concatenate([mask[n].flatten().numpy() for n in q.std])
        count = round(keep * len(sigma))
        assert kept.sum() == count
        assert set(np.flatnonzero(kept)) == set(np.argsort(sigma)[:count])
        assert all(mask[n].all() for n in q.mean.keys() - q.std.keys())
        pruned = prune(members[0], mask)
        assert all(torch.equal(pruned[n], members[0][n] * mask[n]) for n in pruned)
        assert pruned["1.num_batches_tracked"].dtype == torch.int64
    stack = prune(stack_states(members), q.pruning_mask(0.5))
    assert torch.equal(stack["0.weight"][3], prune(members[3], q.pruning_mask(0.5))["0.weight"])
    tied = CompactPosterior({"w": torch.zeros(4)}, {"w": torch.ones(4)})
    assert int(tied.pruning_mask(0.5)["w"].sum()) == 2  # ties are broken, not all kept
    with pytest.raises(ValueError, match="between 0 and 1"):
        q.pruning_mask(50)
    with pytest.raises(ValueError, match="another architecture"):
        prune({"w": torch.zeros(4)}, mask)


def test_tied_weights_are_one_weight() -> None:
    graph = discover_symmetries(Tied(), torch.randn(2, 4))
    members = []
    for i in range(4):
        s = randomized(i, Tied())
        members.append(s | {"second.weight": s["first.weight"]})
    q = CompactPosterior.from_states(members, graph, align=False)
    assert q.sigma().numel() == 16 + 4 + 4
    draws = q.sample(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draws["first.weight"], draws["second.weight"])
    mask = q.pruning_mask(0.5)
    assert torch.equal(mask["first.weight"], mask["second.weight"])
    module = q.as_module(Tied(), 3, generator=torch.Generator().manual_seed(0))
    assert module(torch.randn(5, 4)).shape == (15, 4)


def test_a_file_holds_all_of_it(members: list[dict[str, Tensor]], graph: SymmetryGraph, tmp_path: Path) -> None:
    q = CompactPosterior.from_states(members, graph)
    q.save(tmp_path / "q.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]
    back = CompactPosterior.load(tmp_path / "q.safetensors", graph)
    assert back.metadata == q.metadata
    a, b = (p.sample(4, generator=torch.Generator().manual_seed(0)) for p in (q, back))
    assert list(a) == list(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def test_files_that_do_not_belong(members: list[dict[str, Tensor]], graph: SymmetryGraph, tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    CompactPosterior.from_states(members, graph, align=False).save(path)
    other = discover_symmetries(nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2)), X)
    with pytest.raises(SampleFileError, match=r"q\.safetensors is not a state dict"):
        CompactPosterior.load(path, other)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SampleFileError, match=r"q\.safetensors is truncated"):
        CompactPosterior.load(path)
    write_safetensors(path, {"w": torch.zeros(2)})
    before = path.read_bytes()
    with pytest.raises(SampleFileError, match="holds no compact posterior"):
        CompactPosterior.load(path)
    assert path.read_bytes() == before


def test_bad_networks(members: list[dict[str, Tensor]], graph: SymmetryGraph) -> None:
    fit = CompactPosterior.from_states
    with pytest.raises(ValueError, match="at least two networks, got 1"):
        fit(members[:1], graph)
    broken = members[1] | {"0.bias": torch.full((6,), float("inf"))}
    for align in (True, False):
        with pytest.raises(SymmetryError, match=r"states\[1\]\['0.bias'\] holds 6 NaN or infinite"):
            fit([members[0], broken], graph, align=align)
        with pytest.raises(SymmetryError, match=r"states\[1\] is not a state dict"):
            fit([members[0], nn.Linear(3, 2).state_dict()], graph, align=align)


def test_half_precision_members_give_float32() -> None:
    model = nn.Linear(2, 2)
    halves = [{n: t.half() for n, t in randomized(i, model).items()} for i in range(3)]
    q = CompactPosterior.from_states(halves, discover_symmetries(model, torch.randn(2, 2)), align=False)
    assert q.sigma().dtype == torch.float32
    assert q.to(dtype=torch.float64).sample(2)["bias"].dtype == torch.float64


def test_an_ensemble_of_draws_is_member_major(members: list[dict[str, Tensor]], graph: SymmetryGraph) -> None:
    q = CompactPosterior.from_states(members, graph, align=False)
    model = net()
    module = q.as_module(model, 3, generator=torch.Generator().manual_seed(5))
    draws = q.sample(3, generator=torch.Generator().manual_seed(5))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    for mode in (module.train(), module.eval()):
        found = mode(X)
        assert found.shape == (15, 2)
        for i in range(3):
            model.load_state_dict({n: t[i] for n, t in draws.items()})
            torch.testing.assert_close(found[5 * i : 5 * i + 5], model(X))
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert not any(p.requires_grad for p in module.parameters())
    copy = q.as_module(net(), 3, generator=torch.Generator().manual_seed(0))
    copy.load_state_dict(module.state_dict())
    assert torch.equal(copy(X), module(X))


def test_states_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"do not belong to Sequential: '0\.bias'"):
        CompactEnsemble(net(), stack_states([randomized(0) | {"0.bias": torch.zeros(7)}]))
    with pytest.raises(ValueError, match="must be finite, not negative"):
        CompactPosterior({"w": torch.zeros(2)}, {"w": torch.tensor([1.0, -1.0])})
    with pytest.raises(ValueError, match=r"not of the same network: \['v'\]"):
        CompactPosterior({"w": torch.zeros(2)}, {"v": torch.ones(2)})
