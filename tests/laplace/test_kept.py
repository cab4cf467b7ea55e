"""What is kept of the data: it is let go of with the fit that made it, and is never taken for other data."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from laplace_oracles import data, randomize
from torch import Tensor, nn

from tu_symmetry.laplace.likelihood import Categorical
from tu_symmetry.laplace.mode import _Objective
from tu_symmetry.laplace.model import LinearizedLaplace
from tu_symmetry.laplace.tangent import TangentModel


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects of torch that warn when they are looked at
        return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


NETWORKS = {
    "tanh": lambda: nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)),
    "relu": lambda: nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)),
    "sigmoid, softmax": lambda: nn.Sequential(nn.Linear(4, 12), nn.Sigmoid(), nn.Softmax(-1), nn.Linear(12, 3)),
    "normalized": lambda: nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_joint_fit_leaves_no_tensor_behind(name: str) -> None:
    x, y = data(4, outputs=3, samples=20)
    la = LinearizedLaplace(randomize(NETWORKS[name]()), prior="single", evaluate_at="tangent_mode")
    loader = [(x[:10], y[:10]), (x[10:], y[10:])]
    la.fit(loader)
    counts = []
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            la.optimize_evidence()
        counts.append(live_tensors())
    assert counts[2:] == counts[1:3]


@pytest.mark.parametrize("other", ["labels", "inputs", "sizes", "more"])
def test_batches_that_come_in_another_order_are_not_those_of_the_gradient(other: str) -> None:
    x, y = data(4, outputs=3, samples=20)
    first = [(x[:8], y[:8]), (x[8:16], y[8:16])]
    second = {
        "labels": [(x[:8], (y[:8] + 1) % 3), first[1]],  # with the same outputs
        "inputs": first[::-1],
        "sizes": [(x[:5], y[:5]), (x[5:16], y[5:16])],
        "more": [*first, (x[16:20], y[16:20])],
    }[other]
    model = randomize(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)))
    tangent = TangentModel(model, [name for name, _ in model.named_parameters()])
    point = tangent.point()
    direction = torch.randn(point.shape, generator=torch.Generator().manual_seed(0), dtype=point.dtype)
    loader = list(first)
    objective, fresh = (
        _Objective(tangent, Categorical(), loader, torch.ones_like(point), 1.0, 16) for loader in (loader, second)
    )
    objective.gradient(point + 0.1)
    loader[:] = second
    fresh.theta, fresh._kept = point + 0.1, None
    for found, expected in (
        (objective.line(direction), fresh.line(direction)),
        (objective.product(direction), fresh.product(direction)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
