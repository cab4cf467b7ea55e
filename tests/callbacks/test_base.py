"""What the callbacks share: finding the network whatever it is called, notices once."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from trainings import loader, mlp, trainer

from tu_symmetry.callbacks import FitLaplace, PosteriorSnapshots, Rebasin, ScaleCanonicalization
from tu_symmetry.symmetry.certificate import UncertifiedWarning
from tu_symmetry.symmetry.discovery import discover_symmetries


class Plain(LightningModule):
    """As people write them: a loss, a network under any name, steps."""

    def __init__(self, **networks: nn.Module) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()
        for name, network in networks.items():
            setattr(self, name, network)
        self.order = list(networks)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Bare(Plain):
    """Its weights are its own, in no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(7, 5))
        self.second = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.first.T) @ self.second.T


def fit(module: LightningModule, *callbacks: Callback) -> None:
    trainer(*callbacks, max_epochs=2).fit(module.double(), loader(n=24, shuffle=False))


@pytest.mark.parametrize("make", [lambda: Plain(net=mlp()), lambda: Plain(model=mlp(), extra=nn.Linear(3, 3)), Bare])
def test_the_network_is_found_whatever_it_is_called(make: Any) -> None:
    scale = ScaleCanonicalization(every_n_epochs=1, in_place=True)
    fit(make(), scale)
    assert len(scale.history) == 2


def test_several_submodules_are_listed_and_the_hints_work(tmp_path: Any) -> None:
    def make() -> Plain:
        return Plain(encoder=mlp(), head=nn.Linear(3, 3))

    callbacks = [ScaleCanonicalization(), PosteriorSnapshots(tmp_path / "samples", every_n_epochs=1)]
    for callback in callbacks:
        with pytest.raises(ValueError, match=r"'encoder' \(Sequential\), 'head' \(Linear\).*members='encoder'"):
            fit(make(), callback)
    with pytest.raises(ValueError, match=r"'encoder' \(Sequential\), 'head' \(Linear\).*network='encoder'"):
        fit(make(), FitLaplace())
    for members in ("encoder", lambda module: module):
        scale = ScaleCanonicalization(members, in_place=True)
        fit(make(), scale)
        assert len(scale.history) == 1
    with pytest.raises(ValueError, match="no weights yet"):
        ScaleCanonicalization().networks(Plain())
    mixed = Plain(encoder=mlp())
    mixed.shift = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"weights of its own \(shift\)"):
        ScaleCanonicalization().networks(mixed)


def test_notices_are_said_once_in_a_run() -> None:
    graph = discover_symmetries(mlp(), torch.randn(2, 5))
    graph.require_verified()
    without_probe = pickle.loads(pickle.dumps(graph))
    scale = ScaleCanonicalization("net", graph=without_probe, in_place=True, every_n_steps=1)
    rebasin = Rebasin(lambda module: [module.net, module.other], graph=without_probe, every_n_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Plain(net=mlp())
        module.other = mlp()
        fit(module, scale, rebasin)
    said = [str(w.message).split(":")[0] for w in caught if issubclass(w.category, UncertifiedWarning)]
    assert sorted(said) == ["Rebasin is not certified", "ScaleCanonicalization is not certified"]
    assert len(scale.history) == 6
