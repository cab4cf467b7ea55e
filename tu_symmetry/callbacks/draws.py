"""Networks drawn from what a run has trained, into a store; and the temperature of TorchUncertainty's samplers."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader

from tu_symmetry.callbacks.laplace import FitLaplace
from tu_symmetry.callbacks.members import on_training_device
from tu_symmetry.callbacks.training_data import in_precision
from tu_symmetry.posterior.draws import Draws, network_draws
from tu_symmetry.posterior.network import require_numbers, require_positive
from tu_symmetry.routines.predictive import training_points
from tu_symmetry.routines.runs import require_free, store_at_end
from tu_symmetry.routines.variational import VariationalRoutine
from tu_symmetry.states import stack_states


class PosteriorDraws(Callback):
    """At the end of a fit, draws networks of the plain architecture into a sample store, ``samples`` in its folder.

    What is drawn from is, in this order: the approximation of a :class:`~tu_symmetry.callbacks.FitLaplace` that stands
    before it among the callbacks; the Gaussian of a :class:`~tu_symmetry.routines.VariationalRoutine`; else the
    routine's ``model``: SWAG, dropout, Bayesian layers (:func:`~tu_symmetry.posterior.draws.network_draws`).

    Args:
        num_samples: number of networks.
        seed: seed of the draws.
        dtype: ``float16`` or ``bfloat16`` to store half as much; floating-point tensors only.
    """

    def __init__(
        self,
        num_samples: int = 100,
        *,
        seed: int = 0,
        dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None,
    ) -> None:
        super().__init__()
        require_positive(num_samples=num_samples)
        require_numbers(seed=seed)
        if dtype not in (None, "float16", "bfloat16", "float32", "float64"):
            raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype!r}")
        self.num_samples = num_samples
        self.seed = seed
        self.dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the networks of a SWAG that comes from a checkpoint running statistics from the training data."""
        swag: Any = getattr(pl_module, "model", None)
        data: Any = getattr(trainer, "datamodule", None)
        if getattr(swag, "need_bn_update", False) and data is not None:
            data.setup("fit")
            with isolate_rng(include_cuda=pl_module.device.type == "cuda"):
                swag.bn_update(data.train_dataloader(), device=pl_module.device)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what would fail at the end."""
        require_free(_folder(trainer), resumed=trainer.ckpt_path is not None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Refuse at the first batch what the end of the fit would refuse."""
        laplace = any(isinstance(c, FitLaplace) for c in trainer.callbacks)  # type: ignore[attr-defined]
        known = laplace or isinstance(pl_module, VariationalRoutine) or hasattr(pl_module.model, "swag_stats")
        if trainer.global_step == batch_idx == 0 and not known:
            network_draws(pl_module.model, 1, inputs=_inputs(batch))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and write."""
        if not trainer.is_global_zero:
            return
        loader = _training_loader(trainer)
        with on_training_device(trainer, pl_module):
            drawn = self._draws(trainer, pl_module, loader)
            states = _with_statistics(pl_module, loader, drawn)
        folder = _folder(trainer)
        store_at_end(
            folder,
            {n: self._converted(n, t) for n, t in states.items()},
            after=trainer.global_step,
            chain=0,
            step=range(self.num_samples),
            architecture=type(getattr(pl_module, "model", pl_module)).__name__,
            method=drawn.method,
            seed=self.seed,
        )
        rank_zero_info("%d networks of %s in %s", self.num_samples, drawn.method, folder)

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        made = tensor.to(self.dtype)
        if not torch.isfinite(made).all() and torch.isfinite(tensor).all():
            raise ValueError(
                f"{name!r} holds {float(tensor.abs().max()):.3g}, which {self.dtype} cannot: take bfloat16 or float32"
            )
        return made

    def _draws(self, trainer: Trainer, pl_module: LightningModule, loader: DataLoader[Any]) -> Draws:
        laplaces = [c.laplace for c in trainer.callbacks if isinstance(c, FitLaplace) and c.laplaces]  # type: ignore[attr-defined]
        if laplaces:
            return network_draws(laplaces[0], self.num_samples, seed=self.seed)
        if isinstance(pl_module, VariationalRoutine):
            generator = torch.Generator().manual_seed(self.seed)
            return Draws("variational", pl_module.posterior().sample(self.num_samples, generator=generator))
        inputs = _inputs(next(iter(loader)))
        inputs = None if inputs is None else inputs.to(pl_module.device)
        return network_draws(pl_module.model, self.num_samples, inputs=inputs, seed=self.seed)


class TrueTemperature(Callback):
    """Has TorchUncertainty's ``SGLD`` and ``SGHMC`` sample the posterior itself, at temperature 1.

    Both inject noise of the variance that a *potential's* gradient calls for, times ``noise_factor ** 2``, but are
    given the gradient of a *mean* loss over ``N`` training points. The stationary distribution is ``exp(-U / T)`` with
    ``T = N * noise_factor ** 2``. This sets ``noise_factor = sqrt(1 / N)``, and ``weight_decay = prior_precision / N``.
    The noise of the batches comes on top.

    Args:
        prior_precision: inverse variance of the normal prior of every parameter.

    Raises:
        ValueError: a precision that is not positive; a fit with another optimizer, or with a loss that is not a mean.
    """

    def __init__(self, prior_precision: float = 1.0) -> None:
        super().__init__()
        require_positive(prior_precision=prior_precision)
        self.prior_precision = prior_precision

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the noise and the prior."""
        loss = getattr(pl_module, "loss", None)
        if getattr(loss, "reduction", "mean") != "mean":
            raise ValueError(f"the loss reduces by {loss.reduction!r}; temperatures here are those of a mean loss")  # type: ignore[union-attr]
        points = training_points(trainer)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if "noise_factor" not in group:
                    raise ValueError(
                        f"{type(optimizer).__name__} has no noise_factor, so it samples nothing: take "
                        "torch_uncertainty.optim.SGLD or SGHMC"
                    )
                group["noise_factor"] = math.sqrt(1 / points)
                group["weight_decay"] = self.prior_precision / points


def _folder(trainer: Trainer) -> Path:
    return Path(trainer.default_root_dir) / "samples"


def _inputs(batch: Any) -> Tensor | None:
    return batch[0] if isinstance(batch, Sequence) and isinstance(batch[0], Tensor) else None


def _training_loader(trainer: Trainer) -> DataLoader[Any]:
    """The training data; data modules' loaders for post-processing hold validation or test data."""
    found: Any = trainer.train_dataloader
    if found is None or not trainer.num_training_batches:
        raise ValueError(
            "PosteriorDraws draws from what a training has found, and this one has no batch: give it training data, "
            "and no limit_train_batches=0"
        )
    return in_precision(cast("DataLoader[Any]", found), trainer)


def _with_statistics(pl_module: LightningModule, loader: DataLoader[Any], drawn: Draws) -> dict[str, Tensor]:
    """SWAG's draws with running statistics of their own, from a pass over the training data."""
    if drawn.method != "swag" or not any(n.endswith("running_mean") for n in drawn.states):
        return drawn.states
    source: Any = pl_module.model
    network = copy.deepcopy(source.core_model).to(pl_module.device)
    found = []
    for k in range(len(next(iter(drawn.states.values())))):
        network.load_state_dict({n: t[k] for n, t in drawn.states.items()})
        torch.optim.swa_utils.update_bn(loader, network, device=pl_module.device)
        found.append({n: t.detach().cpu().clone() for n, t in network.state_dict().items()})
    return stack_states(found)
