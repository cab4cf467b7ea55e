"""Compact posteriors: moments against numpy, planted permutations, pruning, files, and ensembles of draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import generator, normal
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.files import write_safetensors
from tu_symmetry.posterior.assessment import TEMPERATURES
from tu_symmetry.posterior.compact import CompactEnsemble, CompactPosterior, prune, sample_low_rank
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.states import SampleFileError, SymmetryError, stack_states, unstack
from tu_symmetry.symmetry.action import apply_permutation
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import random_permutation

X = normal(5, 3, seed=1, dtype=torch.float32)
WEIGHTS = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


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
    g, found = generator(seed), {}
    for name, t in (model or net()).state_dict().items():
        if not t.is_floating_point():
            found[name] = torch.tensor(100 + seed)
        else:
            draw = torch.randn(t.shape, generator=g)
            found[name] = draw.abs() + 0.5 if "running_var" in name else draw
    return found


GRAPH = discover_symmetries(net(), X)
MEMBERS = [randomized(i) for i in range(5)]


@pytest.fixture(scope="module")
def q() -> CompactPosterior:
    return CompactPosterior.from_states(MEMBERS, GRAPH, align=False)


@pytest.mark.parametrize("form", ["list", "stack", "store"])
def test_moments_are_numpys(form: str, tmp_path: Path) -> None:
    states: Any = stack_states(MEMBERS) if form == "stack" else MEMBERS
    if form == "store":
        states = SampleStore.create(tmp_path / "s", architecture="net", method="test")
        states.append(MEMBERS, step=range(5))
    q = CompactPosterior.from_states(states, GRAPH, align=False)
    assert q.std.keys() == WEIGHTS and q.mean.keys() == MEMBERS[0].keys()
    for name in MEMBERS[0]:
        values = np.stack([m[name].numpy() for m in MEMBERS]).astype(np.float64)
        if name in WEIGHTS:
            np.testing.assert_allclose(q.std[name].numpy(), values.std(0, ddof=1), rtol=1e-6)
        if "num_batches" in name:
            assert int(q.mean[name]) == 100 and q.mean[name].dtype == torch.int64
        else:
            np.testing.assert_allclose(q.mean[name].numpy(), values.mean(0), rtol=1e-6, atol=1e-12)


def test_alignment_removes_planted_permutations() -> None:
    g, base = generator(), randomized(0)
    near = [
        {n: t + 0.01 * torch.randn(t.shape, generator=g) if n in WEIGHTS else t for n, t in base.items()}
        for _ in range(6)
    ]
    shuffled = near[:1] + [apply_permutation(GRAPH, random_permutation(GRAPH, generator=g), s) for s in near[1:]]
    q_r, q_d = (CompactPosterior.from_states(shuffled, GRAPH, align=align) for align in (True, False))
    truth = CompactPosterior.from_states(near, GRAPH, align=False)
    torch.testing.assert_close(dict(q_r.mean), dict(truth.mean))
    torch.testing.assert_close(q_r.std, truth.std)
    assert q_d.sigma().mean() > 20 * q_r.sigma().mean()
    assert q_r.metadata["aligned"] and not q_d.metadata["aligned"]
    assert len(q_r.metadata["transpositions"]) == 6 and q_r.metadata["transpositions"][0] == 0


def test_draws_have_the_moments_and_buffers_stay(q: CompactPosterior) -> None:
    n = 20_000
    draws = q.sample(n, generator=generator())
    for name, t in q.std.items():
        z = (draws[name] - q.mean[name]) / t
        assert z.mean(0).abs().max() < 5 / n**0.5
        assert (z.var(0) - 1).abs().max() < 5 * (2 / n) ** 0.5
        assert (z**4).mean() == pytest.approx(3, abs=0.1)
    for name in q.mean.keys() - q.std.keys():
        assert torch.equal(draws[name], q.mean[name].expand(draws[name].shape))
    again = q.sample(n, generator=generator())
    assert all(torch.equal(draws[k], again[k]) for k in draws)
    assert not torch.equal(q.sample(1)["0.bias"], q.sample(1)["0.bias"])


def flat(stack: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    return torch.cat([stack[n].flatten(1) for n in sorted(WEIGHTS)], 1).numpy()


@pytest.mark.parametrize("rank", [1, 2, None])
def test_low_rank_draws_have_the_networks_main_directions(rank: int | None) -> None:
    """In the coordinates of numpy's SVD: the variances of the first directions, and nothing in the others."""
    wide = [{n: t.double() if t.is_floating_point() else t for n, t in m.items()} for m in MEMBERS]
    n, x = 20_000, flat(stack_states(wide))
    draws = sample_low_rank(wide, GRAPH, n, rank=rank, generator=generator())
    _, s, directions = np.linalg.svd(x - x.mean(0), full_matrices=False)
    found = flat(draws) - x.mean(0)
    z = found @ directions[: rank or 4].T / (s[: rank or 4] / 2)  # sqrt(M - 1)
    assert np.abs(z.mean(0)).max() < 5 / n**0.5
    assert np.abs(np.cov(z.T) - np.eye(rank or 4)).max() < 5 * (2 / n) ** 0.5
    np.testing.assert_allclose(z * (s[: rank or 4] / 2) @ directions[: rank or 4], found, atol=1e-12)
    mean = stack_states(wide)["1.running_var"].mean(0)
    torch.testing.assert_close(draws["1.running_var"], mean.expand(n, 6))
    assert draws["1.num_batches_tracked"].unique().tolist() == [100]


def test_a_planted_low_rank_is_found() -> None:
    """Networks on a plane: two directions are all of them. Tied weights are one weight."""
    g, base = generator(), randomized(0, Tied())
    plane = [{n: torch.randn(t.shape, generator=g, dtype=torch.float64) for n, t in base.items()} for _ in range(2)]
    at = torch.randn(6, 2, generator=g, dtype=torch.float64).tolist()
    states = [{n: t.double() + a * plane[0][n] + b * plane[1][n] for n, t in base.items()} for a, b in at]
    states = [s | {"second.weight": s["first.weight"]} for s in states]
    graph = discover_symmetries(Tied(), torch.randn(2, 4))
    two, full = (sample_low_rank(states, graph, 3, rank=rank, generator=generator(1)) for rank in (2, None))
    one = sample_low_rank(states, graph, 3, rank=1, generator=generator(1))
    torch.testing.assert_close(two, full)
    held, mean = ("first.bias", "first.weight", "second.bias"), stack_states(states)
    deviations = torch.cat([(two[n] - mean[n].mean(0)).flatten(1) for n in held], 1)
    spanned = torch.stack([torch.cat([p[n].flatten() for n in held]) for p in plane])
    solved = torch.linalg.lstsq(spanned.T, deviations.T).solution
    torch.testing.assert_close(spanned.T @ solved, deviations.T)
    assert not torch.allclose(one["first.bias"], full["first.bias"])
    assert torch.equal(two["first.weight"], two["second.weight"])


def test_pruning_keeps_the_lowest_of_the_whole_network(q: CompactPosterior) -> None:
    sigma = q.sigma().numpy()
    for keep in (0.0, 0.01, 0.3, 1.0):
        mask = q.pruning_mask(keep)
        assert mask.keys() == q.mean.keys()
        kept = np.concatenate([mask[n].flatten().numpy() for n in q.std])
        assert set(np.flatnonzero(kept)) == set(np.argsort(sigma)[: round(keep * len(sigma))])
        assert all(mask[n].all() for n in q.mean.keys() - q.std.keys())
        pruned = prune(MEMBERS[0], mask)
        assert all(torch.equal(pruned[n], MEMBERS[0][n] * mask[n]) for n in pruned)
        assert pruned["1.num_batches_tracked"].dtype == torch.int64
    stack = prune(stack_states(MEMBERS), q.pruning_mask(0.5))
    assert torch.equal(stack["0.weight"][3], prune(MEMBERS[3], q.pruning_mask(0.5))["0.weight"])
    equal = CompactPosterior({"w": torch.zeros(4)}, {"w": torch.ones(4)})
    assert int(equal.pruning_mask(0.5)["w"].sum()) == 2  # of equal ones, not all are kept


def test_tied_weights_are_one_weight(tmp_path: Path) -> None:
    members = [randomized(i, Tied()) for i in range(4)]
    members = [s | {"second.weight": s["first.weight"]} for s in members]
    q = CompactPosterior.from_states(members, discover_symmetries(Tied(), torch.randn(2, 4)), align=False)
    q.save(tmp_path / "q")
    for own in (q, CompactPosterior.load(tmp_path / "q"), q.to("cpu")):
        assert own.sigma().numel() == 16 + 4 + 4
        draws, mask = own.sample(3, generator=generator()), own.pruning_mask(0.5)
        assert torch.equal(draws["first.weight"], draws["second.weight"])
        assert torch.equal(mask["first.weight"], mask["second.weight"])
    assert q.as_module(Tied(), 3)(torch.randn(5, 4)).shape == (15, 4)


def test_a_file_holds_all_of_it(q: CompactPosterior, tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    q.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]
    back = CompactPosterior.load(path, GRAPH)
    assert back.metadata == q.metadata
    a, b = (p.sample(4, generator=generator()) for p in (q, back))
    assert list(a) == list(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)
    other = discover_symmetries(nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2)), X)
    with pytest.raises(SampleFileError, match=r"q\.safetensors is not a state dict"):
        CompactPosterior.load(path, other)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SampleFileError, match=r"q\.safetensors is truncated"):
        CompactPosterior.load(path)
    write_safetensors(path, {"w": torch.zeros(2)})
    with pytest.raises(SampleFileError, match="holds no compact posterior"):
        CompactPosterior.load(path)


def test_half_precision_members_give_float32() -> None:
    model = nn.Linear(2, 2)
    halves = [{n: t.half() for n, t in randomized(i, model).items()} for i in range(3)]
    q = CompactPosterior.from_states(halves, discover_symmetries(model, torch.randn(2, 2)), align=False)
    assert q.sigma().dtype == torch.float32


def test_an_ensemble_of_draws_is_member_major(q: CompactPosterior) -> None:
    model = net()
    module = q.as_module(model, 3, generator=generator(5))
    draws = q.sample(3, generator=generator(5))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    for mode in (module.train(), module.eval()):
        found = mode(X)
        assert found.shape == (15, 2)
        for i in range(3):
            model.load_state_dict({n: t[i] for n, t in draws.items()})
            torch.testing.assert_close(found[5 * i : 5 * i + 5], model(X))
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert not any(p.requires_grad for p in module.parameters())
    copy = q.as_module(net(), 3, generator=generator())
    copy.load_state_dict(module.state_dict())
    assert torch.equal(copy(X), module(X))


BROKEN = MEMBERS[1] | {"0.bias": torch.full((6,), float("inf"))}
Q = CompactPosterior({"w": torch.zeros(4)}, {"w": torch.ones(4)})
REFUSALS: list[tuple[str, Callable[[], Any]]] = [
    ("at least two networks, got 1", lambda: CompactPosterior.from_states(MEMBERS[:1], GRAPH)),
    ("draw 0", lambda: Q.sample(0)),
    ("at most 4 directions", lambda: sample_low_rank(MEMBERS, GRAPH, 3, rank=5)),
    ("at least one draw", lambda: sample_low_rank(MEMBERS, GRAPH, 0)),
    ("between 0 and 1", lambda: Q.pruning_mask(50)),
    ("another architecture", lambda: prune({"v": torch.zeros(4)}, Q.pruning_mask(0.5))),
    ("'0.bias'", lambda: CompactEnsemble(net(), stack_states([randomized(0) | {"0.bias": torch.zeros(7)}]))),
    ("finite, not negative", lambda: CompactPosterior({"w": torch.zeros(2)}, {"w": torch.tensor([1.0, -1.0])})),
    ("not of the same network", lambda: CompactPosterior({"w": torch.zeros(2)}, {"v": torch.ones(2)})),
]


def test_what_is_no_posterior_is_refused() -> None:
    for message, call in REFUSALS:
        with pytest.raises(ValueError, match=message):
            call()
    for align in (True, False):
        with pytest.raises(SymmetryError, match=r"states\[1\]\['0.bias'\] holds 6 NaN or infinite"):
            CompactPosterior.from_states([MEMBERS[0], BROKEN], GRAPH, align=align)
        with pytest.raises(SymmetryError, match=r"states\[1\] is not a state dict"):
            CompactPosterior.from_states([MEMBERS[0], nn.Linear(3, 2).state_dict()], GRAPH, align=align)


def separable(count: int, noise: float) -> tuple[nn.Module, Any, list[dict[str, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Linear-in-its-inputs classifiers of two classes near one that is right, and their graph and data."""
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    x = normal(200, 2, seed=3, dtype=torch.float32)
    eye = torch.eye(2).repeat(4, 1) * 2
    right = {"0.weight": eye, "0.bias": torch.zeros(8), "2.weight": eye.T.clone(), "2.bias": torch.zeros(2)}
    g = generator(4)
    states = [{n: t + noise * torch.randn(t.shape, generator=g) for n, t in right.items()} for _ in range(count)]
    return model, discover_symmetries(model, x[:2]), states, list(zip(x.split(70), x.argmax(1).split(70), strict=True))


def test_an_assessment_is_its_predictives_by_hand() -> None:
    """Each row against probabilities that are averaged in the test, and the temperature against all of its grid."""
    model, graph, states, batches = separable(4, 0.3)
    q = CompactPosterior.from_states(states, graph, align=False)
    found = q.assess(model, stack_states(states), batches, num_samples=7, generator=generator(1))
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    g = generator(1)
    own = unstack(q.sample(7, generator=g))
    noisy = unstack(q.isotropic(states[0]).sample(7, generator=g))

    def mean(networks: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([functional_call(model, s, (x,)).double().softmax(-1) for s in networks]).mean(0)

    def nll(p: Tensor) -> float:
        return float(nn.functional.nll_loss(p.log(), y))

    def tempered(t: float) -> list[dict[str, Tensor]]:
        return [{n: q.mean[n] + t**0.5 * (draw[n] - q.mean[n]) for n in draw} for draw in own]

    expected = {"ensemble": mean(states), "one member": mean(states[:1]), "one member with noise": mean(noisy)}
    expected |= {"mean": mean([q.mean]), "posterior": mean(own), "calibrated": mean(tempered(found.temperature))}
    assert list(found.scores) == list(expected)
    for name, p in expected.items():
        scores = found.scores[name]
        assert scores["nll"] == pytest.approx(nll(p), rel=1e-5)
        assert scores["accuracy"] == pytest.approx(float((p.argmax(1) == y).double().mean()))
        assert scores["tv"] == pytest.approx(float((p - expected["ensemble"]).abs().sum(1).mean() / 2), abs=1e-6)
    assert [found.scores[name]["storage"] for name in expected] == [4, 1, 1, 1, 2, 2]
    assert found.scores["calibrated"]["nll"] <= min(nll(mean(tempered(t))) for t in TEMPERATURES) + 1e-6
    gains = mean(tempered(found.temperature)).log() - expected["one member"].log()
    each = gains.gather(1, y[:, None]).squeeze(1)
    assert found.gain == pytest.approx(float(each.mean()), abs=1e-6)
    assert found.standard_error == pytest.approx(float(each.std()) / 200**0.5, rel=1e-4)


def test_verdicts_on_planted_networks() -> None:
    """Permuted units: q_d loses to one member. Noisy networks around a good one: their mean wins. Copies: a tie."""
    model, graph, states, batches = separable(8, 0.05)
    moved = [
        apply_permutation(graph, random_permutation(graph, generator=generator(k)), s) for k, s in enumerate(states)
    ]
    q_d = CompactPosterior.from_states(moved, graph, align=False)
    lost = q_d.assess(model, moved, batches, generator=generator())
    assert lost.gain < 0 and lost.verdict.endswith("take it, or the ensemble")
    model, graph, states, batches = separable(60, 1.5)
    near = CompactPosterior.from_states(states, graph, align=False)
    worst = sorted(
        states,
        key=lambda s: -float(sum(nn.functional.cross_entropy(functional_call(model, s, (x,)), y) for x, y in batches)),
    )
    won = near.assess(model, worst, batches, generator=generator())
    assert won.gain > 0 and won.verdict.endswith("the posterior is better than one member")
    same = CompactPosterior.from_states(states[:1] * 3, graph, align=False).assess(model, states[:1] * 3, batches)
    assert abs(same.gain) < 1e-6 and "do not tell the posterior from one member" in same.verdict


def test_temperature_and_noise(q: CompactPosterior, tmp_path: Path) -> None:
    for temperature in (0.0, 0.25, 4.0):
        torch.testing.assert_close(q.tempered(temperature).sigma(), q.sigma() * temperature**0.5)
    noise = q.isotropic(MEMBERS[2])
    assert noise.rms() == pytest.approx(q.rms()) and float(noise.sigma().std()) < 1e-6
    assert q.rms() == pytest.approx(float(q.sigma().double().pow(2).mean() ** 0.5))
    assert all(torch.equal(t, MEMBERS[2][n]) for n, t in noise.mean.items())
    tied = CompactPosterior.from_moments(
        Tied(), dict(Tied().named_parameters()), {n: torch.ones_like(p) for n, p in Tied().named_parameters()}
    )
    draws = tied.isotropic(Tied().state_dict()).sample(3)
    assert torch.equal(draws["first.weight"], draws["second.weight"])
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            q.tempered(wrong)
    with pytest.raises(ValueError, match="another architecture"):
        q.isotropic(Tied().state_dict())


def test_what_cannot_be_assessed_says_so() -> None:
    model, graph, states, batches = separable(2, 0.1)
    q = CompactPosterior.from_states(states, graph, align=False)
    with pytest.raises(ValueError, match="only classifiers are assessed"):
        q.assess(model, states, [(x, y.float()) for x, y in batches])
    with pytest.raises(ValueError, match="one for each class of the targets"):
        q.assess(model, states, [(x, y + 100) for x, y in batches])
    with pytest.raises(ValueError, match="NaN at every temperature"):
        q.assess(model, states, [(x * torch.nan, y) for x, y in batches])
    with pytest.raises(ValueError, match="gave no batch"):
        q.assess(model, states, [])
