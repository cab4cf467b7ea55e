"""Networks, data and functions that command lines of the tests name: importable with ``tests/`` on the path."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


class Net(nn.Sequential):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def loader() -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))]


def raises() -> None:
    raise KeyError("x")


def mlp(hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def norm(hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, 3))


def transformer(hidden: int = 6) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, hidden)
