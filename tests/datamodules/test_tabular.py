"""Regressions out of bde's wheel: their columns, splits and scales, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sklearn.model_selection import train_test_split

from tu_symmetry.datamodules import DataFileError, UCIDataModule, planted
from tu_symmetry.datamodules.tabular import read_uci


def test_splits_and_scales_are_those_of_the_benchmark(tmp_path: Path) -> None:
    planted.plant_uci(tmp_path, 50)
    for name, inputs in (("airfoil", 5), ("concrete", 8), ("bikesharing", 12)):
        rows = read_uci(name, tmp_path)  # type: ignore[arg-type]
        assert rows.shape == (50, inputs + 1)
        train, test = train_test_split(rows, test_size=0.2, random_state=3)
        data = UCIDataModule(name, tmp_path, split=3, batch_size="full")  # type: ignore[arg-type]
        assert data.train.x.shape == (40, inputs) and data.test.x.shape == (10, inputs)
        joint = torch.cat([data.train.x, data.train.y[:, None]], 1).double()
        torch.testing.assert_close(joint.mean(0), torch.zeros(inputs + 1).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(joint.var(0, correction=0), torch.ones(inputs + 1).double())
        expected = torch.from_numpy((test - train.mean(0)) / train.std(0)).float()
        assert torch.equal(torch.cat([data.test.x, data.test.y[:, None]], 1), expected)
        ((x, y),) = data.train_dataloader()
        assert x is data.train.x and y is data.train.y
        fewer = UCIDataModule(name, tmp_path, split=3, batch_size=7, train_size=20)  # type: ignore[arg-type]
        assert torch.equal(fewer.train.x, data.train.x[:20])  # on the scale of all
        assert [len(y) for _, y in fewer.train_dataloader()] == [7, 7, 6]
    hours = read_uci("bikesharing", tmp_path)
    assert not (UCIDataModule("airfoil", tmp_path).train.y == UCIDataModule("airfoil", tmp_path, split=1).train.y).all()
    assert len(hours) == 50


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="pip download sklearn-contrib-bde --no-deps"):
        read_uci("airfoil", tmp_path)
    (tmp_path / "sklearn_contrib_bde-1.0.2-py3-none-any.whl").write_bytes(b"no wheel")
    with pytest.raises(DataFileError, match="fresh copy"):
        read_uci("airfoil", tmp_path)
    planted.plant_uci(tmp_path / "there", 30)
    with pytest.raises(DataFileError, match="train_size is 25, but there are 24"):
        UCIDataModule("concrete", tmp_path / "there", train_size=25).train  # noqa: B018
    with pytest.raises(ValueError, match="must not be negative"):
        UCIDataModule(split=-1)
