"""The recipe of Bayesian deep ensembles on regressions, on planted data: it runs, and its scores are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drawn import normal
from recipe_runs import RECIPES, run_table
from torch import nn

from tu_symmetry.datamodules import UCIDataModule, planted
from tu_symmetry.experiments.compact_posterior.regressions import linearized_outputs, predictive
from tu_symmetry.posterior.network import gaussian_nll

SETS = ("airfoil", "concrete", "bikesharing")
TINY = [f"{name}-{k}-{kind}.{flag}" for name in SETS for k in range(3) for kind, flag in (
    ("ensemble", "routine.model.hidden=[4]"), ("ensemble", "routine.num_members=2"),
    ("ensemble", "trainer.max_epochs=2"),
    ("ensemble", "data.train_size=48"), ("chains", "data.train_size=48"), ("chains", "routine.model.hidden=[4]"),
    ("chains", "routine.num_chains=2"), ("chains", "routine.tuning=50"), ("chains", "routine.thinning=5"),
    ("chains", "routine.transitions_per_batch=20"), ("chains", "trainer.max_steps=5"),
)]  # fmt: skip
TINY += [f"{name}.command.{flag}" for name in SETS for flag in ("model.hidden=[4]", "rank=2", "num_samples=5")]
TINY += [f"{name}.command.data.train_size=48" for name in SETS]


@pytest.mark.slow
def test_the_recipe_runs_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("arviz_stats")
    planted.plant_uci(tmp_path / "data", 120)
    results, text = run_table(RECIPES / "compact_posterior" / "uci", tmp_path, TINY, data_root=tmp_path / "data")
    (split, *others) = results["airfoil"]["splits"]
    assert len(others) == 2 and set(split["spaces"]) == {"weights", "weights without symmetries", "outputs"}
    rows, weights = split["rows"], split["weights"]
    assert weights == 5 * 4 + 4 + 4 * 2 + 2
    assert {name: row["storage"] / weights for name, row in rows.items()} == {
        "one network": 1, "deep ensemble": 2, "Bayesian deep ensemble": 20, "one of its chains": 10,
        "q of one chain": 2, "mean of q of one chain": 1, "q of one chain, rank 2": 3,
        "q_d": 2, "mean of q_d": 1, "q_d, rank 2": 3, "q_r": 2, "mean of q_r": 1, "q_r, rank 2": 3,
        "linearized Laplace": 1 + (weights + 1) / 2,
    }  # fmt: skip
    assert all(row["seconds"] > 0 for row in rows.values()) and "−0.9126" not in text
    assert all(one["optimum"]["after"] < one["optimum"]["before"] for one in (split, *others))
    assert (tmp_path / "report" / "storage.png").is_file() and "published" in (
        tmp_path / "report/report.md"
    ).read_text()


def test_scores_are_those_of_torchs_mixture() -> None:
    outputs, y = normal(7, 11, 2), normal(11, seed=1)
    deviation = nn.functional.softplus(outputs[..., 1]) + 1e-6
    parts = torch.distributions.Normal(outputs[..., 0].T, deviation.T)
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(11, 7)), parts)
    found = predictive(outputs, y)
    assert found["nll"] == pytest.approx(float(-mixture.log_prob(y).mean()), rel=1e-6)
    moments = torch.distributions.Normal(mixture.mean, mixture.variance.sqrt())
    assert found["matched"] == pytest.approx(float(-moments.log_prob(y).mean()), rel=1e-6)
    assert found["rmse"] == pytest.approx(float((mixture.mean - y).square().mean().sqrt()))


def test_the_linearization_has_the_curvature_of_the_expected_loss(tmp_path: Path) -> None:
    planted.plant_uci(tmp_path, 60)
    data, model = UCIDataModule("airfoil", tmp_path), nn.Linear(5, 2)
    optimum: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    state = {n: t.detach() for n, t in model.state_dict().items()}
    drawn = linearized_outputs(model, state, data, 2.0, 4000, generator, optimum)
    assert optimum["gradient"] < 1e-3
    # of a linear network the tangent model is the network: its Fisher information is a mean of Hessians over targets
    w = torch.zeros(12, dtype=torch.float64)
    start = torch.cat([t.flatten().double() for t in state.values()]).requires_grad_()
    x, y = data.train.x.double(), data.train.y.double()

    def loss(v: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return gaussian_nll(x @ v[:10].view(2, 5).T + v[10:], targets) + v.square().sum()

    search = torch.optim.LBFGS([start], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        search.zero_grad()
        value = loss(start, y)
        value.backward()
        return value

    search.step(closure)
    w = start.detach()
    out = x @ w[:10].view(2, 5).T + w[10:]
    deviation = nn.functional.softplus(out[:, 1]) + 1e-6
    nodes = 2.0**0.5 * torch.tensor([-1.224744871391589, 0.0, 1.224744871391589], dtype=torch.float64)  # Gauss-Hermite
    shares = torch.tensor([1 / 6, 2 / 3, 1 / 6], dtype=torch.float64)
    hessian = sum(
        share * torch.autograd.functional.hessian(lambda v, t=node: loss(v, out[:, 0] + t * deviation), w)  # type: ignore[misc]
        for node, share in zip(nodes, shares, strict=True)
    )
    covariance = torch.linalg.inv(hessian)
    slope = torch.zeros(len(data.test.x), 2, 12, dtype=torch.float64)
    slope[:, 0, :5] = slope[:, 1, 5:10] = data.test.x
    slope[:, 0, 10] = slope[:, 1, 11] = 1
    expected = torch.einsum("rop,pq,roq->ro", slope, covariance, slope)
    torch.testing.assert_close(drawn.var(0), expected, rtol=0.15, atol=0)
