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
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tu_symmetry.callbacks.laplace import FitLaplace
from tu_symmetry.callbacks.members import on_training_device
from tu_symmetry.callbacks.training_data import in_precision
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.posterior.draws import Draws, network_draws, require_drawable
from tu_symmetry.posterior.network import derived_seed, require_numbers, seeded
from tu_symmetry.posterior.samples import RunMark, SampleStore
from tu_symmetry.routines.predictive import training_points
from tu_symmetry.routines.variational import VariationalRoutine
from tu_symmetry.states import stack_states

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class PosteriorDraws(Callback):
    """At the end of a fit, draws networks of the plain architecture and writes them to a sample store.

    What is drawn from is, in this order: the approximation of a :class:`~tu_symmetry.callbacks.FitLaplace` that stands
    before it among the callbacks (of an ensemble, in equal shares from each member's); the Gaussian of a
    :class:`~tu_symmetry.routines.VariationalRoutine`; else the routine's ``model`` as
    :func:`~tu_symmetry.posterior.draws.network_draws` knows it: deep ensembles, checkpoint collectors, SWAG, dropout,
    Bayesian layers.

    Args:
        num_samples: number of networks.
        folder: folder of the store; ``samples`` in the trainer's ``default_root_dir`` by default.
        chain: number of the run in the store, so that runs with other seeds can share one.
        seed: seed of the draws.
        scale: factor of SWAG's covariance; its own by default, 0.5 for the paper's.
        dtype: ``float16`` or ``bfloat16`` to store half as much; floating-point tensors only.

    Raises:
        ValueError: a number of samples or a dtype that makes no sense.
    """

    def __init__(
        self,
        num_samples: int = 100,
        folder: str | Path | None = None,
        *,
        chain: int = 0,
        seed: int = 0,
        scale: float | None = None,
        dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None,
    ) -> None:
        super().__init__()
        require_numbers(num_samples=num_samples, chain=chain, seed=seed, scale=scale)
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        self.num_samples = num_samples
        self.folder = None if folder is None else Path(folder)
        self.chain = chain
        self.seed = seed
        self.scale = scale
        self.dtype = None if dtype is None else _DTYPES[dtype]
        self._checked = self._watched = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have TorchUncertainty's SWAG find its moments in a checkpoint.

        It writes them among the weights, but takes them out again only when it is loaded by itself, not as a part of a
        routine: a test or a resumed fit would be refused for unexpected keys.
        """
        swag: Any = getattr(pl_module, "model", None)
        if hasattr(swag, "swag_stats") and not self._watched:
            swag.register_load_state_dict_pre_hook(_take_moments)
            self._watched = True

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Networks of a SWAG that comes from a checkpoint, with running statistics from the training data."""
        _awaken(pl_module)
        swag: Any = getattr(pl_module, "model", None)
        data: Any = getattr(trainer, "datamodule", None)
        if getattr(swag, "need_bn_update", False) and data is not None and _has_statistics(swag.core_model):
            data.setup("fit")
            with isolate_rng(include_cuda=pl_module.device.type == "cuda"):
                swag.bn_update(data.train_dataloader(), device=pl_module.device)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what would fail at the end.

        Raises:
            FileExistsError: the store holds this chain already, and the run is not resumed.
        """
        self._checked = False
        _awaken(pl_module)
        folder = self._folder(trainer)
        store = SampleStore.open_if_there(folder)
        if store is not None and self.chain in store.chains and trainer.ckpt_path is None:
            raise FileExistsError(
                f"{folder} holds draws of chain {self.chain} of another run already: give another folder: or chain:"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Refuse at the first batch what the end of the fit would refuse.

        Raises:
            ValueError: nothing can be drawn from the network, see
                :func:`~tu_symmetry.posterior.draws.require_drawable`; SWAG will have no variance.
        """
        if self._checked:
            return
        self._checked = True
        laplace = any(isinstance(c, FitLaplace) for c in trainer.callbacks)  # type: ignore[attr-defined]
        if laplace or isinstance(pl_module, VariationalRoutine):
            return
        model: Any = pl_module.model
        inputs = batch[0] if isinstance(batch, Sequence) and isinstance(batch[0], Tensor) else None
        require_drawable(model, self.num_samples, inputs=inputs)
        if hasattr(model, "swag_stats"):
            _require_snapshots(trainer, model)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and write."""
        if not trainer.is_global_zero:
            return
        _training_loader(trainer)  # or there was no training
        folder = self._folder(trainer)
        store = SampleStore.open_if_there(folder)
        if store is not None and self.chain in store.chains:
            mark = store.marked(self.chain)
            if mark is None or mark.step == trainer.global_step:
                return  # a resumed run whose fit had ended
        with on_training_device(trainer, pl_module):
            drawn = self._draws(trainer, pl_module)
            whole = self._with_statistics(trainer, pl_module, drawn)
        states = {n: self._converted(n, t) for n, t in whole.items()}
        if store is None:
            architecture = type(getattr(pl_module, "model", pl_module)).__name__
            store = SampleStore.create(folder, architecture=architecture, method=drawn.method, seed=self.seed)
        apart = len(set(drawn.members)) > 1  # members of an ensemble and checkpoints are chains of their own
        ensemble = apart and drawn.method in ("deep_ensemble", "laplace")
        chain = [self.chain + m if ensemble else self.chain for m in drawn.members]
        store.discard(set(chain))  # those of a run that went on after its end
        store.mark(self.chain, RunMark(drawn.method, done=True, step=trainer.global_step))
        store.append(states, chain=chain, step=range(len(drawn.members)))
        rank_zero_info("%d networks of %s in %s", len(drawn.members), drawn.method, folder)

    def _folder(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "samples" if self.folder is None else self.folder

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

    def _with_statistics(self, trainer: Trainer, pl_module: LightningModule, drawn: Draws) -> dict[str, Tensor]:
        """SWAG's draws with running statistics of their own, from a pass over the training data."""
        if drawn.method != "swag" or not any(n.endswith("running_mean") for n in drawn.states):
            return drawn.states
        source: Any = pl_module.model
        network = copy.deepcopy(source.core_model).to(pl_module.device)
        found = []
        for k in range(len(drawn.members)):
            network.load_state_dict({n: t[k] for n, t in drawn.states.items()})
            torch.optim.swa_utils.update_bn(_training_loader(trainer), network, device=pl_module.device)
            found.append({n: t.detach().cpu().clone() for n, t in network.state_dict().items()})
        return stack_states(found)

    def _draws(self, trainer: Trainer, pl_module: LightningModule) -> Draws:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, FitLaplace) and callback.laplaces:
                return _laplace_draws(callback.laplaces, self.num_samples, self.seed)
        if isinstance(pl_module, VariationalRoutine):
            generator = torch.Generator().manual_seed(self.seed)
            states = pl_module.posterior().to("cpu").sample(self.num_samples, generator=generator)
            return Draws("variational", states, [0] * self.num_samples)
        inputs = next(iter(_training_loader(trainer)))[0]
        model: Any = pl_module.model
        if isinstance(inputs, Tensor):
            inputs = inputs.to(pl_module.device)
        return network_draws(model, self.num_samples, inputs=inputs, seed=self.seed, scale=self.scale)


class TrueTemperature(Callback):
    """Has TorchUncertainty's ``SGLD`` and ``SGHMC`` sample the posterior itself, at temperature 1.

    Both inject noise of the variance that a *potential's* gradient calls for, times ``noise_factor ** 2``, but are
    given the gradient of a *mean* loss over ``N`` training points, which is ``N`` times smaller. The stationary
    distribution is ``exp(-U / T)`` with ``T = N * noise_factor ** 2``; their default, 0.01, is a temperature of 6 on
    60,000 images. This sets ``noise_factor = sqrt(T / N)``, and ``weight_decay = prior_precision / N``.

    The noise of the batches comes on top: it is small where ``lr ** 2`` is small against ``friction / N`` (SGHMC), or
    ``lr`` against ``batch size / N`` (SGLD).

    Args:
        prior_precision: inverse variance of the normal prior of every parameter.
        temperature: 1 for the posterior; less for a cold one.
        num_data: number of training points; by default that of the training loader's data set.

    Raises:
        ValueError: values that are not positive; a fit with another optimizer, or with a loss that is not a mean.
    """

    def __init__(self, prior_precision: float = 1.0, temperature: float = 1.0, *, num_data: int | None = None) -> None:
        super().__init__()
        require_numbers(prior_precision=prior_precision, temperature=temperature, num_data=num_data)
        if not prior_precision > 0 or not temperature > 0:
            raise ValueError(
                f"prior_precision and temperature must be positive, got {prior_precision} and {temperature}"
            )
        self.prior_precision, self.temperature, self.num_data = prior_precision, temperature, num_data

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the noise and the prior.

        Raises:
            ValueError: an optimizer without a noise factor, or a loss that is no mean.
        """
        loss = getattr(pl_module, "loss", None)
        if getattr(loss, "reduction", "mean") != "mean":
            raise ValueError(f"the loss reduces by {loss.reduction!r}; temperatures here are those of a mean loss")  # type: ignore[union-attr]
        points = training_points(trainer, self.num_data)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if "noise_factor" not in group:
                    raise ValueError(
                        f"{type(optimizer).__name__} has no noise_factor, so it samples nothing: take "
                        "torch_uncertainty.optim.SGLD or SGHMC"
                    )
                group["noise_factor"] = math.sqrt(self.temperature / points)
                group["weight_decay"] = self.prior_precision / points


def _laplace_draws(laplaces: Sequence[LinearizedLaplace], count: int, seed: int) -> Draws:
    """Networks from one approximation, or in equal shares from that of each member of an ensemble."""
    if len(laplaces) > count:
        raise ValueError(f"num_samples={count}, but there are {len(laplaces)} members to draw from")
    shares = [count // len(laplaces) + (k < count % len(laplaces)) for k in range(len(laplaces))]
    drawn = [network_draws(la, n, seed=seed + k) for k, (la, n) in enumerate(zip(laplaces, shares, strict=True))]
    states = {name: torch.cat([one.states[name] for one in drawn]) for name in drawn[0].states}
    return Draws("laplace", states, [k for k, n in enumerate(shares) for _ in range(n)])


def _take_moments(swag: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before SWAG's own tensors are loaded: its moments, which are no buffers."""
    held = {name: state_dict.pop(name) for name in list(state_dict) if name in swag.swag_stats}
    if held.keys() == swag.swag_stats.keys():  # else the names that are missing or new are reported as always
        swag.swag_stats = {name: t.detach().cpu() for name, t in held.items()}
    else:
        state_dict.update(held)


def _awaken(pl_module: LightningModule) -> None:
    """Draw the networks that a loaded SWAG predicts with."""
    swag: Any = getattr(pl_module, "model", None)
    if hasattr(swag, "swag_stats") and not swag.fit and int(swag.num_avgd_models) > 0:
        with seeded(derived_seed(0, 15, 0), torch.device("cpu")):
            swag.samples = [swag.sample(swag.scale, swag.diag_covariance) for _ in range(swag.num_estimators)]
        swag.need_bn_update = swag.fit = True


def _has_statistics(network: nn.Module) -> bool:
    return any(getattr(m, "running_mean", None) is not None for m in network.modules())


def _require_snapshots(trainer: Trainer, swag: Any) -> None:
    """SWAG takes a snapshot where a validation starts; two are a variance. Only what the schedule says for certain.

    Raises:
        ValueError: at most one snapshot in all of the fit.
    """
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    if every is None or trainer.val_check_interval != 1.0 or epochs is None or epochs < 0:
        return
    validated = range(every - 1, epochs, every) if trainer.enable_validation else range(0)
    start, length = swag.cycle_start, swag.cycle_length
    coming = [e for e in validated if e >= trainer.current_epoch and e > start and (e - start) % length == 0]
    count = int(swag.num_avgd_models) + len(coming)
    if count < 2:
        raise ValueError(
            f"SWAG will have averaged {count} networks after {epochs} epochs (cycle_start {start}, cycle_length "
            f"{length}, a validation after every {every}), which have no variance: TorchUncertainty's routine adds one "
            "whenever a validation starts after cycle_start, so train longer, or validate after every cycle "
            "(check_val_every_n_epoch: 1)"
        )


def _training_loader(trainer: Trainer) -> DataLoader[Any]:
    """The training data; data modules' loaders for post-processing hold validation or test data."""
    found: Any = trainer.train_dataloader
    if found is None or not trainer.num_training_batches:
        raise ValueError(
            "PosteriorDraws draws from what a training has found, and this one has no batch: give it training data, "
            "and no limit_train_batches=0"
        )
    return in_precision(cast("DataLoader[Any]", found), trainer)
