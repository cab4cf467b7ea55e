"""What is said needlessly, and what is said too little: warnings of others, inputs without a batch, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tu_symmetry as tus
from tu_symmetry.cli import main


def test_a_laplace_fit_warns_of_nothing_of_torchs() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    data = [(torch.randn(12, 4), torch.arange(12) % 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        la = tus.LinearizedLaplace(network, evaluate_at="map").fit(data)
        la.optimize_evidence()
        assert la.predictive(data[0][0]).shape == (12, 3)


class Flat(nn.Module):
    def __init__(self, batched: bool = True) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 3)
        self.batched = batched

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1 if self.batched else 0))


CASES: list[tuple[Callable[[], nn.Module], Any, bool]] = [
    (Flat, torch.randn(1, 8, 8), True),  # an image alone
    (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), torch.randn(4), True),
    (Flat, torch.randn(1, 9, 9), False),  # another size: an axis more does not help
    (Flat, torch.randn(2, 3, 8, 8), False),  # channels that do not fit
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_missing_batch_axis_is_said_where_it_is_the_cause(case: int) -> None:
    build, x, missing = CASES[case]
    with pytest.raises(tus.SymmetryError) as caught:
        tus.discover_symmetries(build(), x)
    assert ("batch axis missing?" in str(caught.value)) is missing
    if missing:
        tus.discover_symmetries(build(), x.unsqueeze(0))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("torch.nn.BatchNorm2d", "batch axis missing"),
        ("weights.ckpt", "a checkpoint is no architecture"),
        ("a/model.safetensors", "a checkpoint is no architecture"),
        (__file__, "a checkpoint is no architecture"),
    ],
)
def test_inspect_says_what_is_missing(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    init = ["--init", "num_features=3"] if model == "torch.nn.BatchNorm2d" else []
    assert main(["inspect", "--model", model, *init, "--input", "3,8,8"]) == 2
    assert said in capsys.readouterr().err


def test_a_state_dict_is_no_architecture() -> None:
    for given in (Flat().state_dict(), Path("weights.ckpt")):
        with pytest.raises(TypeError, match="A checkpoint is no architecture"):
            tus.discover_symmetries(given, torch.randn(1, 1, 8, 8))  # type: ignore[arg-type]
