"""``tus.plot``: each function returns (figure, axes), shows the numbers it was given, and leaves the backend alone."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import tu_symmetry as tus
from tu_symmetry.alignment.barrier import LossBarrier

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed() -> Any:
    yield
    plt.close("all")


def line(barrier: float, losses: list[float]) -> LossBarrier:
    return LossBarrier(barrier, [0.0, 0.5, 1.0], losses)


def test_lines_and_bands_show_means_and_spreads() -> None:
    given = {"as given": [line(2.0, [1, 4, 1]), line(4.0, [1, 6, 3])], "aligned": line(0.5, [1, 1.5, 1])}
    figure, ax = tus.plot.interpolation(given, ylabel="nats")
    assert isinstance(figure, Figure) and ax.get_ylabel() == "nats"
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1, 5, 2])
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [1, 1.5, 1])
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert said == ["as given (barrier 3)", "aligned (barrier 0.5)"]
    with pytest.raises(ValueError, match="at least one is needed"):
        tus.plot.interpolation({"none": []})
    figure, ax = tus.plot.bands([0, 1], {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": [5.0, 6.0]}, ax=ax)
    np.testing.assert_allclose(ax.lines[-2].get_ydata(), [2, 3])
    assert figure is ax.figure  # axes that were given


def test_bars() -> None:
    _, ax = tus.plot.bars({"mass": [1, 2, 3], "least": [1, 1, 2]}, ["x", "y", "z"], log=True)
    assert [bar.get_height() for bar in ax.containers[0]] == [1, 2, 3] and ax.get_yscale() == "log"
