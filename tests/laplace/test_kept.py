"""The data of the joint fit are let go of with it: no tensor outlives the call that made it."""

from __future__ import annotations

import gc
import warnings

import pytest
from laplace_oracles import data, randomize
from torch import Tensor, nn

from tu_symmetry.laplace.model import LinearizedLaplace


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
    x, y = data(4, outputs=3)
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
