"""ScaleCanonicalization: what it logs, and the exact laws of weights and optimizer state that are rescaled in place."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from trainings import adam, cnn, fit, mlp, mlp_graph, routine, sgd

from tu_symmetry.callbacks import ScaleCanonicalization
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.states import SymmetryError
from tu_symmetry.symmetry.discovery import discover_symmetries
from tu_symmetry.symmetry.elements import random_scale
from tu_symmetry.symmetry.in_place import scale_in_place

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def mlp_canonicalization(**kwargs: Any) -> ScaleCanonicalization:
    return ScaleCanonicalization(graph=mlp_graph(), **kwargs)


def squared_norm(module: nn.Module) -> float:
    return sum(float(p.detach().square().sum()) for p in module.parameters())


def moved_factors(scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """The factor of each tensor of :func:`mlp`, written out by hand for two hidden layers."""
    a, b = (scales[name].exp() for name in ("0", "2"))
    return {
        "0.weight": a[:, None].expand(7, 5),
        "0.bias": a,
        "2.weight": b[:, None] / a,
        "2.bias": b,
        "4.weight": (1 / b).expand(3, 6),
        "4.bias": torch.ones(3, dtype=torch.float64),
    }


class Watch(Callback):
    """Keeps what stands behind each epoch or step, before or after the callback that it precedes or follows."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Tensor]] = {}
        self.grads: dict[int, dict[str, Tensor]] = {}
        self.outputs: dict[int, Tensor] = {}
        self.moments: dict[int, dict[str, dict[str, Tensor]]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        model, step = pl_module.model, trainer.global_step
        self.states[step] = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}  # type: ignore
        self.grads[step] = {k: p.grad.cpu().clone() for k, p in model.named_parameters()}  # type: ignore
        state = trainer.optimizers[0].state
        self.moments[step] = {
            name: {k: v.cpu().clone() for k, v in state[p].items() if isinstance(v, Tensor)}
            for name, p in model.named_parameters()  # type: ignore
        }
        model.eval()  # type: ignore
        shape = (4, 1, 6, 6) if isinstance(model[0], nn.Conv2d) else (4, 5)  # type: ignore
        x = torch.linspace(-2, 2, math.prod(shape), dtype=torch.float64).reshape(shape)
        with torch.no_grad():
            self.outputs[step] = model(x.to(pl_module.device)).cpu()  # type: ignore
        model.train()  # type: ignore


def test_logging_changes_nothing_and_says_what_canonicalize_says() -> None:
    plain, module, watch = routine(), routine(), Watch()
    fit(plain)
    canonical = mlp_canonicalization(every_n_epochs=1)
    fit(module, watch, canonical)
    assert module.losses == plain.losses
    assert [(r["epoch"], r["step"]) for r in canonical.history] == [(0, 6), (1, 12), (2, 18)]
    for record in canonical.history:
        state = watch.states[record["step"]]
        form = canonicalize(mlp_graph(), state)
        assert record["mass"] == pytest.approx([sum(float(t.square().sum()) for t in state.values())])
        assert record["minimal_mass"] == pytest.approx([form.mass_after])
        assert record["ratio"][0] == pytest.approx(form.mass_before / form.mass_after) and record["ratio"][0] > 1.001


@pytest.mark.parametrize("given", [True, False])
def test_it_can_act_before_the_first_step(given: bool) -> None:
    module = routine()
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    graph = mlp_graph() if given else None
    callback = ScaleCanonicalization(graph=graph, at_start=True, every_n_epochs=1)
    fit(module, callback, max_epochs=2)
    assert [(r["epoch"], r["step"]) for r in callback.history] == [(0, 0), (0, 6), (1, 12)]
    assert callback.history[0]["mass"] == [pytest.approx(sum(float(p.square().sum()) for p in before.values()))]
    assert callback.history[0]["minimal_mass"] == [pytest.approx(canonicalize(mlp_graph(), before).mass_after)]


@pytest.mark.parametrize("method", ["min_mass", "unit_norm"])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_in_place_keeps_the_function_and_reaches_the_canonical_scale(make: Any, method: Any) -> None:
    module, before, after = routine(make), Watch(), Watch()
    image = make is cnn
    canonical = ScaleCanonicalization(every_n_steps=4, in_place=True, method=method)
    fit(module, before, canonical, after, image=image, max_epochs=2)
    assert [r["step"] for r in canonical.history] == [4, 8, 12]
    assert canonical.graph is not None
    for step in (4, 8, 12):
        torch.testing.assert_close(after.outputs[step], before.outputs[step], rtol=1e-10, atol=1e-12)
        expected = canonicalize(canonical.graph, before.states[step], method=method).state
        for name, tensor in after.states[step].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
    assert any(not torch.equal(t, before.states[4][n]) for n, t in after.states[4].items()), "vacuous"
    if method == "min_mass":
        assert squared_norm(module) == pytest.approx(canonical.history[-1]["minimal_mass"][0], rel=1e-10)


def test_running_statistics_move_where_a_normalization_is_scaled() -> None:
    """Weights before a normalization have factors too; moving along them takes the running statistics along."""
    model = routine(cnn).model
    graph = discover_symmetries(model, torch.randn(2, 1, 6, 6, dtype=torch.float64))
    names = [g.name for g in graph.normalizations]
    torch.manual_seed(1)
    model.train()(torch.randn(30, 1, 6, 6, dtype=torch.float64))
    model[1].eps = 1e-30  # type: ignore[index, union-attr]  # torch 2.11 refuses 0; no double notices this
    x = torch.randn(9, 1, 6, 6, dtype=torch.float64)
    before, mean = model.eval()(x), model[1].running_mean.clone()  # type: ignore[index, union-attr]
    s = {n: torch.linspace(-1, 1, 4, dtype=torch.float64) for n in names}
    assert names, "the architecture has a normalization group"
    scale_in_place(graph, s, model)
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model[1].running_mean, mean * s[names[0]].exp())  # type: ignore[index, union-attr]


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_gradients_and_moments_obey_the_chain_rule(optimizer: Any) -> None:
    """Gradients and first moments are divided by the factor, second moments by its square; the rest stays."""
    before, after = Watch(), Watch()
    canonical = mlp_canonicalization(every_n_steps=4, at_end=False, in_place=True)
    fit(routine(optimizer=optimizer), before, canonical, after, max_epochs=1)
    factors = moved_factors(canonical.log_scales[0])
    powers = {"momentum_buffer": -1, "exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2, "step": 0}
    seen = set()
    for name, c in factors.items():
        torch.testing.assert_close(after.states[4][name], before.states[4][name] * c, rtol=1e-12, atol=0)
        torch.testing.assert_close(after.grads[4][name], before.grads[4][name] / c, rtol=1e-12, atol=0)
        for key, value in before.moments[4][name].items():
            moved = after.moments[4][name][key]
            torch.testing.assert_close(moved, value * c.to(value.dtype) ** powers[key] if powers[key] else value)
            seen.add(key)
    assert seen == ({"momentum_buffer"} if optimizer is sgd else {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"})
    assert max(float(c.log().abs().max()) for c in factors.values()) > 0.1, "vacuous"


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(4)
    return [
        (torch.randn(8, 5, generator=g, dtype=torch.float64), torch.randint(3, (8,), generator=g)) for _ in range(count)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def warm(optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer after five steps."""
    torch.manual_seed(0)
    model = mlp().double()
    made = optimizer(model.parameters())
    train(model, made, batches(5))
    return model, made


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("nesterov", [False, True])
def test_law_of_sgd_with_momentum(nesterov: bool) -> None:
    """The next step in the old coordinates is the one of learning rate lr / c**2, weight by weight."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=nesterov)

    (plain, a), (scaled, b) = warm(optimizer), warm(optimizer)
    start = parameters_of(plain)
    s = random_scale(mlp_graph(), generator=torch.Generator().manual_seed(2))
    scale_in_place(mlp_graph(), s, scaled, optimizers=[b])
    next_batch = batches(6)[5:]
    train(plain, a, next_batch)
    train(scaled, b, next_batch)
    for name, c in moved_factors(s).items():
        step = parameters_of(plain)[name] - start[name]
        mine = parameters_of(scaled)[name] / c - start[name]
        torch.testing.assert_close(mine, step / c**2, rtol=1e-8, atol=1e-13)
        buffers = [o.state[dict(m.named_parameters())[name]]["momentum_buffer"] for m, o in ((plain, a), (scaled, b))]
        torch.testing.assert_close(buffers[1] * c, buffers[0], rtol=1e-9, atol=1e-14)


def test_law_of_adam() -> None:
    """The next step in the old coordinates is the one of learning rate lr / c and eps * c, weight by weight."""
    (plain, a), (scaled, b) = warm(adam), warm(adam)
    start = parameters_of(plain)
    s = random_scale(mlp_graph(), generator=torch.Generator().manual_seed(2))
    scale_in_place(mlp_graph(), s, scaled, optimizers=[b])
    next_batch = batches(6)[5:]
    train(plain, a, next_batch)
    train(scaled, b, next_batch)
    beta1, beta2, count = 0.9, 0.999, 6
    for name, c in moved_factors(s).items():
        moments = a.state[dict(plain.named_parameters())[name]]
        first = moments["exp_avg"] / (1 - beta1**count)
        second = moments["max_exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**count)
        torch.testing.assert_close(parameters_of(plain)[name] - start[name], -0.02 * first / (second + 1e-3))
        mine = parameters_of(scaled)[name] / c - start[name]
        torch.testing.assert_close(mine, -(0.02 / c) * first / (second + 1e-3 * c), rtol=1e-7, atol=1e-13)


def test_optimizers_that_cannot_follow_are_refused_before_anything_moves() -> None:
    s = random_scale(mlp_graph(), generator=torch.Generator().manual_seed(2))
    for make, key in (
        (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9), "momentum_buffer"),
        (lambda p: torch.optim.Adadelta(p), "acc_delta"),
        (lambda p: torch.optim.Rprop(p), "step_size"),
    ):
        model, optimizer = warm(make)
        before = parameters_of(model)
        with pytest.raises(SymmetryError, match=f"{key}.*not known"):
            scale_in_place(mlp_graph(), s, model, optimizers=[optimizer])
        assert all(torch.equal(t, before[n]) for n, t in parameters_of(model).items())


def test_weight_averages_follow() -> None:
    """The average at the end is the average of weights that were all mapped to the last coordinates."""
    module, watch = routine(), Watch()
    canonical = mlp_canonicalization(every_n_steps=12, at_end=False, in_place=True)
    fit(module, EMAWeightAveraging(decay=0.9), canonical, watch)
    before = {n: t / moved_factors(canonical.log_scales[0])[n] for n, t in watch.states[12].items()}
    average: dict[str, Tensor] | None = None
    for step, state in watch.states.items():
        state = before if step == 12 else state
        average = state if average is None else {n: t.lerp(state[n], 0.1) for n, t in average.items()}
        if step == 12:
            average = {n: t * moved_factors(canonical.log_scales[0])[n] for n, t in average.items()}
    assert average is not None
    for name, tensor in parameters_of(module.model).items():
        torch.testing.assert_close(tensor, average[name], rtol=1e-9, atol=1e-12)


def test_swag_statistics_follow() -> None:
    """Means and deviations scale as the weights do, second moments as their squares; other statistics stay."""
    model, s = mlp().double(), random_scale(mlp_graph(), generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3)
    factors, samples, stats = moved_factors(s), {}, {"other_mean": torch.ones(3)}
    for name, c in factors.items():
        w = samples[name] = torch.randn(4, *c.shape, generator=generator, dtype=torch.float64)
        stats[f"swag.{name}_mean"], stats[f"swag.{name}_sq_mean"] = w.mean(0), w.square().mean(0)
        stats[f"swag.{name}_covariance_sqrt"] = (w - w.mean(0)).flatten(1)
    scale_in_place(mlp_graph(), s, model, swag=[(stats, "swag.")])
    for name, c in factors.items():
        w = samples[name] * c
        torch.testing.assert_close(stats[f"swag.{name}_mean"], w.mean(0))
        torch.testing.assert_close(stats[f"swag.{name}_sq_mean"], w.square().mean(0))
        torch.testing.assert_close(stats[f"swag.{name}_covariance_sqrt"], (w - w.mean(0)).flatten(1))
    assert torch.equal(stats["other_mean"], torch.ones(3))


def test_members_of_an_ensemble_are_treated_one_by_one() -> None:
    module = routine(members=2)
    canonical = mlp_canonicalization(in_place=True)
    t = fit(module, canonical)
    (record,) = canonical.history
    members = list(module.model.core_models)  # type: ignore[union-attr, arg-type]
    assert [squared_norm(m) for m in members] == pytest.approx(record["minimal_mass"])
    assert record["mass"][0] != pytest.approx(record["mass"][1])
    assert float(t.callback_metrics["scale/mass"]) == pytest.approx(sum(record["mass"]) / 2)
    assert float(t.callback_metrics["scale/mass_1"]) == pytest.approx(record["mass"][1])


def test_counted_parameters() -> None:
    weights = ["0.weight", "2.weight", "4.weight"]
    module, watch = routine(), Watch()
    canonical = mlp_canonicalization(parameters=["0.weight", "[24].weight"])
    fit(module, watch, canonical)
    (record,) = canonical.history
    assert record["mass"] == pytest.approx([sum(float(watch.states[18][n].square().sum()) for n in weights)])
    for canonical in (mlp_canonicalization(parameters=["1.weight"]), ScaleCanonicalization(parameters=["1.weight"])):
        with pytest.raises(ValueError, match=r"no parameters .1\.weight."):
            fit(routine(), canonical)


def test_networks_without_scale_symmetry_are_refused() -> None:
    tanh = functools.partial(nn.Sequential, nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(SymmetryError, match="no scale symmetry"):
        fit(routine(tanh), ScaleCanonicalization())
