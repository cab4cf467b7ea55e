"""Data of the command line: the samples that a dotted name stands for, and names that stand for none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tu_symmetry.checkpoints.data import load_data


def loader(count: int = 40, seed: int = 0) -> DataLoader[Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, torch.arange(count) % 3), batch_size=16)


class Module:
    """What a LightningDataModule offers, several test loaders and a training loader that shuffles."""

    def __init__(self, count: int) -> None:
        self.count, self.stages = count, [""]

    def prepare_data(self) -> None:
        self.stages.append("prepare")

    def setup(self, stage: str) -> None:
        assert self.stages[1] == "prepare"
        self.stages.append(stage)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        assert "test" in self.stages
        return [loader(self.count), loader(self.count, seed=5)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(loader(self.count, seed=1).dataset, batch_size=16, shuffle=True)


def only_inputs() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(4, 4)))


def nothing() -> list[Tensor]:
    return []


LOSS = "no function"


def test_a_data_module_gives_test_data_and_training_inputs() -> None:
    found = load_data(f"{__name__}.Module", ["count=40"], 24, torch.float64)
    x, y = next(iter(loader()))
    assert torch.equal(found.evaluation[0][0], x.double()) and torch.equal(found.evaluation[0][1], y)
    assert found.num_samples == 24 and [len(s) for s in found.statistics] == [16, 8]
    known = {tuple(row) for row in loader(40, seed=1).dataset.tensors[0].double().tolist()}  # type: ignore[attr-defined]
    assert all(tuple(row) in known for row in torch.cat(found.statistics).tolist())
    state = torch.random.get_rng_state()
    assert load_data(f"{__name__}.Module", ["count=40"], 24, torch.float64).digest == found.digest
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nowhere.at_all", [], "cannot import"),
        (f"{__name__}.Module", [], "TypeError.*--data-init"),
        (f"{__name__}.loader", ["count"], "not KEY=VALUE"),
        (f"{__name__}.only_inputs", [], "two tensors"),
        (f"{__name__}.nothing", [], "gave no batch"),
        (f"{__name__}.LOSS", [], "not callable"),
    ],
)
def test_data_that_do_not_fit_are_named(name: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_data(name, arguments, 10, torch.float32)
