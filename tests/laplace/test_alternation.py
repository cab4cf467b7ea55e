"""The alternation between weights and hyperparameters returns the best point it has seen, and says which it was."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from laplace_oracles import data, randomize
from torch import Tensor, nn

from tu_symmetry.laplace.alternation import Alternation, Step, alternate
from tu_symmetry.laplace.evidence import Hyperprior
from tu_symmetry.laplace.model import LinearizedLaplace, NotConvergedWarning

BOUND = torch.full((3,), 50.0, dtype=torch.float64)


def run(step: Any, limit: int, start: Tensor | None = None, **options: Any) -> tuple[Alternation, list[float]]:
    """Where the iteration ended, and all objectives that it has seen."""
    seen: list[float] = []

    def noted(point: Tensor, accuracy: float) -> Step:
        found: Step = step(point, accuracy)
        seen.append(found.objective)
        return found._replace(weights=len(seen))

    start = torch.zeros(3, dtype=torch.float64) if start is None else start
    options = {"tolerance": 1e-6, "accuracy": 1e-6} | options
    return alternate(noted, start, -BOUND, BOUND, max_iterations=limit, **options), seen


def scripted(objectives: list[float]) -> Any:
    """A map that never settles, with given objectives."""
    values = iter(objectives)
    none = torch.zeros(3, dtype=torch.bool)
    return lambda point, accuracy: Step(next(values), point + 1.0, none)


@pytest.mark.parametrize(
    ("objectives", "best"),
    [([21.4, 20.689, 21.105], 2), ([3.0, 2.0, 1.0], 3), ([1.0, 2.0, 3.0, 4.0], 1), ([5.0, 1.0, 4.0, 2.0, 3.0], 2)],
)
def test_the_best_point_of_planted_objectives(objectives: list[float], best: int) -> None:
    found, seen = run(scripted(objectives), len(objectives))
    assert seen == objectives
    assert (found.best, found.objective, found.weights) == (best, min(objectives), best)
    assert (found.iterations, found.converged) == (len(objectives), False)
    assert found.change == 1.0  # of the point that is returned


def test_a_stationary_point_that_is_worse_than_an_earlier_one_is_not_converged() -> None:
    def step(point: Tensor, accuracy: float) -> Step:
        none = torch.zeros(3, dtype=torch.bool)
        if float(point[0]) == 0.0:
            return Step(1.0, torch.full_like(point, 2.0), ~none)  # sent to the bound, which no step takes back
        return Step(7.0, point, none)

    found, _ = run(step, 20)
    assert not found.converged
    assert (found.best, found.objective) == (1, 1.0)
    assert torch.equal(found.point, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(60))
def test_no_point_that_was_seen_is_better(seed: int) -> None:
    """Random smooth maps, some of which overshoot, with any number of steps allowed."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(3, 3, generator=generator, dtype=torch.float64) * float(
        0.3 + torch.rand(1, generator=generator)
    )
    fixed, bend = torch.randn(3, generator=generator, dtype=torch.float64), float(torch.rand(1, generator=generator))
    none = torch.zeros(3, dtype=torch.bool)

    def step(point: Tensor, accuracy: float) -> Step:
        away = point - fixed
        return Step(
            float(away.square().sum() + bend * torch.cos(5 * away).sum()), fixed + torch.tanh(matrix @ away), none
        )

    before = math.inf
    for limit in range(1, 12):
        found, seen = run(step, limit)
        rounding = 1e-6 * abs(found.objective) + 1e-4  # weights are asked for to 0.01 at the roughest
        assert found.objective <= min(seen) + rounding
        assert found.objective == seen[found.best - 1] and found.weights == found.best
        assert found.objective <= before + rounding  # more steps are never worse
        before = found.objective
        if found.converged:
            assert found.change <= 1e-6 and found.best == found.iterations == len(seen)


# ---------------------------------------------------------------------- of a network


def note(values: list[float], info: dict[str, Any]) -> None:
    """Keep the objective of an alternation."""
    if info["stage"] == "evidence":
        values.append(info["objective"])


@pytest.mark.parametrize("hyperprior", [None, Hyperprior()])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_more_alternations_are_never_worse(kind: Any, hyperprior: Hyperprior | None) -> None:
    """Stopped after any number, the network has the precisions and weights of the best objective so far."""
    model = randomize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x, y = data(4, outputs=3, kind=kind, samples=20)
    before = math.inf
    for limit in range(1, 8):
        la = LinearizedLaplace(model, kind, prior="per_layer", curvature="kfac").fit([(x, y)])
        values: list[float] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = la.optimize_evidence(
                hyperprior=hyperprior,
                solver="alternation",
                max_iterations=limit,
                progress=partial(note, values),
            )
        objective = la.fitted.objective()
        assert objective <= min(values) + 1e-3
        assert objective <= before + 1e-3
        assert 1 <= result.best_iteration <= result.iterations <= limit
        assert result.log_marginal_likelihood == pytest.approx(la.log_marginal_likelihood(), abs=1e-9)
        assert result.gradient_norm == la.solution.gradient_norm <= 1e-6
        assert result.converged == (not any(issubclass(w.category, NotConvergedWarning) for w in caught))
        before = objective


def test_the_warning_says_which_point_it_is() -> None:
    model = randomize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    la = LinearizedLaplace(model, prior="per_layer").fit([data(4, outputs=3)])
    with pytest.warns(NotConvergedWarning, match="best point, that of iteration 2") as caught:
        assert la.optimize_evidence(max_iterations=2).best_iteration == 2
    (warned,) = [w for w in caught if issubclass(w.category, NotConvergedWarning)]
    assert warned.filename == __file__
