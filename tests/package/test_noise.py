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


def test_inspect_asks_for_the_batch_axis(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", "--model", "torch.nn.BatchNorm2d", "--init", "num_features=3", "--input", "3,8,8"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "batch axis missing?" in said and "--input 1,3,8,8" in said


@pytest.mark.parametrize("name", ["weights.ckpt", "runs/last.pt", "a/model.safetensors", "there"])
def test_a_checkpoint_is_no_architecture(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "there":
        name = str(tmp_path / "there")
        torch.save({}, name)
    assert main(["inspect", "--model", name, "--input", "1,3,8,8"]) == 2
    assert "a checkpoint is no architecture" in capsys.readouterr().err


def test_a_state_dict_is_no_architecture() -> None:
    for given in (Flat().state_dict(), Path("weights.ckpt")):
        with pytest.raises(TypeError, match="A checkpoint is no architecture"):
            tus.discover_symmetries(given, torch.randn(1, 1, 8, 8))  # type: ignore[arg-type]
