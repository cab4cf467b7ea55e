"""Merged networks: statistics, REPAIR, barriers that are corrected, and matching by the loss of the midpoint."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import CASES, discovered, planted

import tu_symmetry as tus
from tu_symmetry.alignment.barrier import chord_excess, classifier_scores, interpolate, mean_loss
from tu_symmetry.alignment.repair import reestimate_batchnorm, repair
from tu_symmetry.alignment.straight_through import straight_through_matching
from tu_symmetry.symmetry.running.weights import random_state


def draws(model: nn.Module, count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [random_state(model, generator) for _ in range(count)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Bottleneck(nn.Module):
    """Without batch normalization: a convolution with bias, one without, a layer that runs twice, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 3, bias=False)
        self.twice, self.c, self.out = nn.Linear(5, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(F.relu(self.a(x)))).mean((2, 3))
        return self.out(F.relu(self.c(F.relu(self.twice(F.relu(self.twice(x)))))))


def outputs_of(model: nn.Module, path: str, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of one layer, channels first."""
    found: list[Tensor] = []
    layer = dict(model.named_modules())[path]
    handle = layer.register_forward_hook(lambda module, args, output: found.append(output))
    try:
        torch.func.functional_call(model, state, (x,))
    finally:
        handle.remove()
    return found[0].movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1)


def test_reestimated_statistics_are_those_of_all_samples() -> None:
    """Of any split into batches; of the first layer, whose inputs no normalization changes."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))
    model = model.double().train()
    (state,) = draws(model, 1)
    x = normal(14, 2, 7, 7)
    kept = {n: t.clone() for n, t in state.items()}
    found = reestimate_batchnorm(model, state, [x[:5], (x[5:13], None), x[13:]])
    hidden = F.conv2d(x, state["0.weight"], state["0.bias"])
    torch.testing.assert_close(found["1.running_mean"], hidden.mean((0, 2, 3)))
    torch.testing.assert_close(found["1.running_var"], hidden.movedim(1, 0).flatten(1).var(1))
    assert not torch.allclose(found["4.running_var"], state["4.running_var"])
    assert all(torch.equal(t, kept[n]) for n, t in state.items()) and model.training
    assert {n for n in state if not torch.equal(found[n], state[n])} == {
        f"{k}.running_{what}" for k in (1, 4) for what in ("mean", "var")
    }
    whole = reestimate_batchnorm(model, state, [x])
    model.load_state_dict(whole)
    model.train()
    model[1].momentum = model[4].momentum = None
    model[1].reset_running_stats(), model[4].reset_running_stats()
    model(x)  # torch's own cumulative averages, from one batch
    for name, tensor in model.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(whole[name], tensor)


def test_reestimation_follows_permutations() -> None:
    case = next(c for c in CASES if c.name == "resnet_batchnorm")
    model, graph = discovered(case)
    (state,) = draws(model, 1)
    p = tus.random_permutation(graph, generator=torch.Generator().manual_seed(0))
    loader = [normal(8, 2, 6, 6)]
    one = tus.apply_permutation(graph, p, reestimate_batchnorm(model, state, loader))
    two = reestimate_batchnorm(model, tus.apply_permutation(graph, p, state), loader)
    for name in one:
        torch.testing.assert_close(one[name], two[name])


def test_repaired_units_have_the_interpolated_statistics() -> None:
    model = Bottleneck().double()
    states = draws(model, 3)
    ratios = [0.5, 0.3, 0.2]
    x = normal(30, 2, 8, 8)
    merged = {n: sum(r * s[n] for r, s in zip(ratios, states, strict=True)) for n in states[0]}
    before = {n: t.clone() for n, t in merged.items()}
    found = repair(model, states, ratios, merged, [x[:7], x[7:20], x[20:]])
    for path in ("a", "b", "c"):
        ends = [outputs_of(model, path, s, x) for s in states]
        now = outputs_of(model, path, found, x)
        goal = sum(r * e.std(1, correction=0) for r, e in zip(ratios, ends, strict=True))
        torch.testing.assert_close(now.std(1, correction=0), goal)
        assert not torch.allclose(outputs_of(model, path, merged, x).std(1, correction=0), goal)
        if path != "b":  # no bias to shift
            torch.testing.assert_close(now.mean(1), sum(r * e.mean(1) for r, e in zip(ratios, ends, strict=True)))
    changed = {n for n in merged if not torch.equal(merged[n], found[n])}
    assert changed == {"a.weight", "a.bias", "b.weight", "c.weight", "c.bias"}  # not what runs twice, nor the output
    assert all(torch.equal(t, before[n]) for n, t in merged.items())


def test_repairing_an_endpoint_changes_nothing() -> None:
    model = Bottleneck().double()
    a, b = draws(model, 2)
    found = repair(model, [a, b], [1.0, 0.0], a, [normal(9, 2, 8, 8)])
    for name in a:
        torch.testing.assert_close(found[name], a[name])


def test_repair_leaves_layers_before_batch_normalization_to_it() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)
    ).double()
    a, b = draws(model, 2)
    loader = [normal(20, 4)]
    merged = interpolate(a, b, 0.5)
    found = repair(model, [a, b], [0.5, 0.5], merged, loader)
    assert torch.equal(found["0.weight"], merged["0.weight"]) and torch.equal(found["5.weight"], merged["5.weight"])
    assert not torch.equal(found["3.weight"], merged["3.weight"])
    torch.testing.assert_close(found["1.running_mean"], (loader[0] @ merged["0.weight"].T + merged["0.bias"]).mean(0))


def test_scores_of_a_classifier() -> None:
    """Two classes with logit gap g by hand; with the temperature from other samples than it is measured on."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False)).double()
    state = {"0.weight": torch.tensor([[7.0], [0.0]], dtype=torch.float64)}

    def samples(right: int, wrong: int) -> list[tuple[Tensor, Tensor]]:
        return [(torch.ones(right + wrong, 1).double(), torch.tensor([0] * right + [1] * wrong))]

    found = classifier_scores(model, state, samples(60, 40), calibration=samples(80, 20))
    gap = math.log(4)  # at the tuned temperature
    assert found.accuracy == pytest.approx(0.6)
    assert found.loss == pytest.approx(math.log1p(math.exp(-7)) + 0.4 * 7)
    assert found.temperature == pytest.approx(7 / gap, rel=1e-5)
    assert found.tempered_loss == pytest.approx(math.log1p(math.exp(-gap)) + 0.4 * gap, rel=1e-5)


def test_excess_over_the_chord() -> None:
    curves = torch.tensor([[1.0, 5.0, 3.0], [1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [0.0, math.inf, 0.0]])
    assert chord_excess(curves).tolist() == [3.0, 0.0, 0.0, math.inf]


def test_straight_through_matching_lowers_the_midpoint_loss() -> None:
    """Below weight matching's, on two networks that were trained apart; nothing is left changed."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    x = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    y = (x.square().sum(1) > 1.2).long()
    states = []
    for start in draws(model, 2, seed=3):
        weights = {n: t.clone().requires_grad_() for n, t in start.items()}
        optimizer = torch.optim.Adam(weights.values(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y).backward()
            optimizer.step()
        states.append({n: t.detach() for n, t in weights.items()})
    graph = tus.discover_symmetries(model, x[:2])
    loader = [(x[:100], y[:100]), (x[100:], y[100:])]
    model.train()
    kept = [{n: t.clone() for n, t in s.items()} for s in states]
    by_loss = straight_through_matching(graph, model, *states, loader, F.cross_entropy, epochs=15, learning_rate=0.02)
    by_weight = tus.weight_matching(graph, *states)

    def midpoint(permutation: dict[str, Tensor]) -> float:
        moved = tus.apply_permutation(graph, permutation, states[1])
        return mean_loss(model, tus.mean_state([states[0], moved]), loader, F.cross_entropy)

    assert midpoint(by_loss.permutation) < midpoint(by_weight.permutation) - 0.01
    assert model.training
    assert all(torch.equal(s[n], k[n]) for s, k in zip(states, kept, strict=True) for n in s)


def test_a_correction_acts_between_the_ends_only() -> None:
    case = next(c for c in CASES if c.name == "batchnorm_cnn")
    model, _ = discovered(case)
    a, b = draws(model, 2)
    x, y = normal(16, 2, 8, 8), torch.arange(16) % 3
    again = partial(reestimate_batchnorm, model, dataloader=[x])
    plain, corrected = (
        tus.loss_barrier(model, a, b, [(x, y)], F.cross_entropy, points=3, merge=merge)
        for merge in (None, lambda state, ratio: again(state))
    )
    assert corrected.losses[0] == plain.losses[0] and corrected.losses[2] == plain.losses[2]
    middle = again(interpolate(a, b, 0.5))
    expected = F.cross_entropy(torch.func.functional_call(model.eval(), middle, (x,)), y)
    assert corrected.losses[1] == pytest.approx(float(expected)) and corrected.losses[1] != plain.losses[1]


@pytest.mark.parametrize("name", ["batchnorm_cnn", "TinyLlama", "mlp_wide_blocks"])
def test_straight_through_matching_keeps_planted_permutations(name: str) -> None:
    """Running statistics, tied weights; the start (weight matching) is exact, and nothing is better."""
    case = next(c for c in CASES if c.name == name)
    model, graph = discovered(case)
    _, reference, state = planted(case, 8)
    x = case.inputs()[0].repeat(4, *[1] * (case.inputs()[0].ndim - 1))
    with torch.no_grad():
        target = torch.func.functional_call(model, reference, (x,), tie_weights=False)
    if name == "batchnorm_cnn":  # compare what the midpoint's statistics will be
        target = torch.func.functional_call(model, reestimate_batchnorm(model, reference, [x]), (x,)).detach()
    found = straight_through_matching(graph, model, reference, state, [(x, target)], F.mse_loss, epochs=2)
    assert found.distance_after <= 1e-7 * found.distance_before


def test_bad_input_is_refused() -> None:
    model = Bottleneck().double()
    a, b = draws(model, 2)
    x = normal(4, 2, 8, 8)
    for call, message in (
        (lambda: reestimate_batchnorm(model, a, [x]), "no BatchNorm layer"),
        (lambda: repair(model, [a, b], [0.5, 0.6], a, [x]), "sum 1"),
        (lambda: repair(model, [a, b], [0.5, 0.5], a, []), "no batch"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
