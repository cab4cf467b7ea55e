"""Variational inference as a training run: the bound by a plain loop, its optimum, files, resuming, YAML."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainings import digits_network

from tu_symmetry.datamodules import DigitsDataModule
from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.network import derived_seed, initialized
from tu_symmetry.routines import VariationalRoutine

pytestmark = pytest.mark.filterwarnings("ignore")


def data(**more: Any) -> DigitsDataModule:
    return DigitsDataModule(**({"batch_size": 40, "train_size": 150, "test_size": 60, "seed": 5} | more))


epochs = functools.partial(trainings.epochs, precision="64-true")


class Curve(Callback):
    """The logged bound and its terms, epoch by epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.rows.append({n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("vi/")})


@pytest.mark.cpu
def test_the_bound_and_its_descent_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    curve, path = Curve(), tmp_path / "vi" / "q.safetensors"
    routine = VariationalRoutine(digits_network(), prior_precision=2.0, seed=4, posterior=path)
    epochs(tmp_path, 3, curve).fit(routine, datamodule=data())

    model = initialized(digits_network(), derived_seed(4, 1, 0)).double()
    mean = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    rho = {n: torch.full_like(p, 0.05).expm1().log().requires_grad_() for n, p in mean.items()}
    for r in rho.values():
        r.data.fill_(float(torch.tensor(0.05, dtype=torch.float64).expm1().log().float()))  # float32 at the start
    optimizer = torch.optim.Adam([*mean.values(), *rho.values()], lr=1e-3)
    noise = torch.Generator().manual_seed(derived_seed(4, 3, 0))
    loader = data().train_dataloader()
    for epoch in range(3):
        loader.set_epoch(epoch)  # type: ignore[attr-defined]
        sums = dict.fromkeys(("vi/elbo", "vi/log_likelihood", "vi/kl"), 0.0)
        for x, y in loader:
            w = {
                n: m + F.softplus(rho[n]) * torch.randn(m.shape, generator=noise, dtype=m.dtype)
                for n, m in mean.items()
            }
            nll = F.cross_entropy(functional_call(model, w, (x.double(),)), y) * 150
            prior = Normal(0.0, torch.tensor(0.5, dtype=torch.float64).sqrt())
            kl = sum((kl_divergence(Normal(m, F.softplus(rho[n])), prior).sum() for n, m in mean.items()), nll * 0)
            optimizer.zero_grad()
            ((nll + kl) / 150).backward()
            optimizer.step()
            for name, value in (("vi/elbo", -nll - kl), ("vi/log_likelihood", -nll), ("vi/kl", kl)):
                sums[name] += float(value.detach()) * len(x) / 150
        for name, value in sums.items():
            assert curve.rows[epoch][name] == pytest.approx(value, rel=1e-5)  # logged in float32
    q = CompactPosterior.load(path)
    for name, m in mean.items():
        assert torch.allclose(routine.mean()[name], m, rtol=1e-9, atol=1e-10)
        assert torch.allclose(q.mean[name], m, rtol=1e-9, atol=1e-10)
        assert torch.allclose(q.std[name], F.softplus(rho[name]), rtol=1e-9, atol=1e-10)
    assert q.metadata["method"] == "mean_field_vi"


class Regression(LightningDataModule):
    """A linear problem whose mean-field optimum is known."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(12, 2, generator=g, dtype=torch.float64) @ torch.tensor([[1.0, 0.6], [0, 0.8]]).double()
        self.y = self.x @ torch.tensor([1.0, -2.0]).double() + 0.5 + torch.randn(12, generator=g, dtype=torch.float64)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=12)

    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=5)


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - targets).square().sum() / 2


def test_reaches_the_mean_field_optimum(tmp_path: Path) -> None:
    module = Regression()
    design = torch.cat([module.x, torch.ones(12, 1, dtype=torch.float64)], dim=1)
    precision = design.T @ design + 2 * torch.eye(3, dtype=torch.float64)

    class Decaying(VariationalRoutine):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.993)]

    routine = Decaying(
        nn.Linear(2, 1), prior_precision=2.0, nll=gaussian_nll, optimizer=lambda p: torch.optim.Adam(p, lr=0.03)
    )
    epochs(tmp_path, 700).fit(routine, datamodule=module)
    mean = torch.cat([p.flatten() for p in routine.mean().values()])
    std = torch.cat([s.flatten() for s in routine.std().values()])
    assert torch.allclose(mean, torch.linalg.solve(precision, design.T @ module.y), atol=0.05)
    assert torch.allclose(std, precision.diagonal().rsqrt(), rtol=0.08)
    (found,) = epochs(tmp_path).test(routine, datamodule=module, verbose=False)
    assert "test/members/NLL_mean" in found and "test/cls/Acc" not in found


def test_test_measures_draws(tmp_path: Path) -> None:
    routine = VariationalRoutine(digits_network())
    (found,) = epochs(tmp_path).test(routine, datamodule=data(), verbose=False)
    (again,) = epochs(tmp_path).test(routine, datamodule=data(), verbose=False)
    assert found == again and routine.member_scores["Acc"].shape == (20,)
    assert routine.member_scores["NLL"].unique().numel() == 20


def test_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 .BatchNorm1d. has running statistics"):
        VariationalRoutine(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match="initial_std must be positive"):
        VariationalRoutine(digits_network(), initial_std=0)
    (tmp_path / "q.safetensors").touch()
    with pytest.raises(FileExistsError, match="is there already"):
        epochs(tmp_path).fit(
            VariationalRoutine(digits_network(), posterior=tmp_path / "q.safetensors"), datamodule=data()
        )
