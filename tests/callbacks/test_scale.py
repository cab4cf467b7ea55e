"""ScaleCanonicalization: what it logs, and the exact laws of weights and optimizer state that are rescaled in place."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from drawn import generator, normal
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from trainings import adam, cnn, fit, mlp, mlp_graph, routine, sgd

from tu_symmetry.callbacks import ScaleCanonicalization
from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.states import SymmetryError
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


@pytest.mark.parametrize("make", [mlp, cnn])
def test_in_place_keeps_the_function_and_reaches_the_canonical_scale(make: Any) -> None:
    module, before, after = routine(make), Watch(), Watch()
    image = make is cnn
    canonical = ScaleCanonicalization(every_n_steps=4, in_place=True)
    fit(module, before, canonical, after, image=image, max_epochs=2)
    assert [r["step"] for r in canonical.history] == [4, 8, 12]
    assert canonical.graph is not None
    for step in (4, 8, 12):
        torch.testing.assert_close(after.outputs[step], before.outputs[step], rtol=1e-10, atol=1e-12)
        expected = canonicalize(canonical.graph, before.states[step]).state
        for name, tensor in after.states[step].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
    assert any(not torch.equal(t, before.states[4][n]) for n, t in after.states[4].items()), "vacuous"
    assert squared_norm(module) == pytest.approx(canonical.history[-1]["minimal_mass"][0], rel=1e-10)


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


def warm(optimizer: Any, steps: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer after a few steps."""
    torch.manual_seed(0)
    model = mlp().double()
    made = optimizer(model.parameters())
    for k in range(steps):
        step(model, made, k)
    return model, made


def step(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(normal(8, 5, seed=k)), torch.arange(8) % 3).backward()
    optimizer.step()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", [plain_sgd, sgd, adam])
def test_the_next_step_in_the_old_coordinates(optimizer: Any) -> None:
    """SGD's is that of the learning rate lr / c**2, Adam's that of lr / c and eps * c, weight by weight."""
    (plain, a), (scaled, b) = warm(optimizer), warm(optimizer)
    start = parameters_of(plain)
    s = random_scale(mlp_graph(), generator=generator(2))
    scale_in_place(mlp_graph(), s, scaled, optimizers=[b])
    step(plain, a, 5)
    step(scaled, b, 5)
    for name, c in moved_factors(s).items():
        there = parameters_of(plain)[name] - start[name]
        mine = parameters_of(scaled)[name] / c - start[name]
        expected = there / c**2
        if optimizer is adam:
            moments = a.state[dict(plain.named_parameters())[name]]
            first = moments["exp_avg"] / (1 - 0.9**6)
            second = moments["max_exp_avg_sq"].sqrt() / math.sqrt(1 - 0.999**6)
            torch.testing.assert_close(there, -0.02 * first / (second + 1e-3))
            expected = -(0.02 / c) * first / (second + 1e-3 * c)
        torch.testing.assert_close(mine, expected, rtol=1e-7, atol=1e-13)


def test_optimizers_that_cannot_follow_are_refused_before_anything_moves() -> None:
    s = random_scale(mlp_graph(), generator=generator(2))
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


def test_swag_statistics_follow() -> None:
    """Means and deviations scale as the weights do, second moments as their squares; other statistics stay."""
    model, s = mlp().double(), random_scale(mlp_graph(), generator=generator(2))
    stats, expected = {"other_mean": torch.ones(3)}, {"other_mean": torch.ones(3)}
    for name, c in moved_factors(s).items():
        w = normal(4, *c.shape, seed=3)
        for held, own in ((stats, w), (expected, w * c)):
            held[f"swag.{name}_mean"], held[f"swag.{name}_sq_mean"] = own.mean(0), own.square().mean(0)
            held[f"swag.{name}_covariance_sqrt"] = (own - own.mean(0)).flatten(1)
    scale_in_place(mlp_graph(), s, model, swag=[(stats, "swag.")])
    torch.testing.assert_close(stats, expected)


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


def test_networks_without_scale_symmetry_are_refused() -> None:
    tanh = functools.partial(nn.Sequential, nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(SymmetryError, match="no scale symmetry"):
        fit(routine(tanh), ScaleCanonicalization())
