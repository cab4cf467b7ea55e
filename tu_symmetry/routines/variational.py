"""Mean-field variational inference over all weights of a network, by the true evidence lower bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.network import (
    States,
    categorical_nll,
    derived_seed,
    gaussian_draw,
    gaussian_kl,
    initialized,
    require_function_of_parameters,
    require_positive,
)
from tu_symmetry.routines.predictive import Likelihood, PredictiveRoutine, optimizer_config, training_points

_STATE = "variational_inference"
_TESTED = 20  # draws in a validation or test


class VariationalRoutine(PredictiveRoutine):
    """Fits ``N(mean, diag std^2)`` over all weights; ``std = softplus(rho)``.

    The objective is the evidence lower bound of the whole training set, ``-N / B * nll(batch) - KL(q || prior)`` in
    nats, with the closed-form KL to ``N(0, 1 / prior_precision)``, untempered. The weights are drawn by
    reparameterization, once for all points of a batch; the state of the noise is in the checkpoint.

    Logged, in nats, as means over an epoch: ``vi/elbo``, ``vi/log_likelihood`` (of the training set, expected) and
    ``vi/kl``; validation and test measure 20 draws as an ensemble, always the same ones.

    Args:
        model: the network; it runs in ``eval`` mode.
        prior_precision: inverse variance of the prior of every parameter.
        initial_std: standard deviation of every weight at the start.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        seed: seed of the initialization (by the ``reset_parameters`` of the layers) and the noise.
        posterior: file that the :class:`CompactPosterior` is written to at the end; None to write none.
        optimizer: optimizer of means and ``rho``; Adam with learning rate 1e-3 by default. LightningCLI's goes first.
    """

    def __init__(
        self,
        model: nn.Module,
        prior_precision: float = 1.0,
        *,
        initial_std: float = 0.05,
        nll: Likelihood = categorical_nll,
        seed: int = 0,
        posterior: str | Path | None = None,
        optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__(nll)
        require_positive(prior_precision=prior_precision, initial_std=initial_std)
        require_function_of_parameters(model)
        self.model = initialized(model, derived_seed(seed, 1, 0))
        rho = math.log(math.expm1(initial_std))
        self.rho = nn.ParameterList(torch.full_like(p, rho) for p in self.model.parameters())
        self.prior_precision, self.seed = prior_precision, seed
        self.posterior_file = None if posterior is None else Path(posterior)
        self.optimizer = optimizer
        self._noise: torch.Generator | None = None
        self._noise_state: Tensor | None = None
        self._sums: Tensor | None = None
        self._points = self._seen = 0

    def mean(self) -> States:
        """Means, by parameter."""
        return dict(self.model.named_parameters())

    def std(self) -> States:
        """Standard deviations, by parameter."""
        return {name: F.softplus(rho) for (name, _), rho in zip(self.model.named_parameters(), self.rho, strict=True)}

    def network_states(self) -> NoReturn:
        """Refuse to stand for one network where states are read: it holds a distribution of them."""
        raise ValueError(
            "a variational posterior is a distribution of networks: draw them, routine.posterior().sample(10), or take "
            "its mean, routine.posterior().mean"
        )

    def posterior(self) -> CompactPosterior:
        """The Gaussian as it is now."""
        return CompactPosterior.from_moments(
            self.model, self.mean(), self.std(), metadata={"method": "mean_field_vi", "seed": self.seed}
        )

    def configure_optimizers(self) -> Any:
        """One optimizer over means and ``rho``."""
        return optimizer_config([*self.model.parameters(), *self.rho], self.optimizer, None)

    def on_fit_start(self) -> None:
        """Check the file before the first step, and start the noise."""
        if self.posterior_file is not None and self.posterior_file.exists() and self._noise_state is None:
            raise FileExistsError(f"{self.posterior_file} is there already; give another posterior:, or move it away")
        self._noise = torch.Generator(self.device)
        if self._noise_state is not None and self.global_rank == 0:
            self._noise.set_state(self._noise_state.cpu())
        else:  # of rank 0 alone the state is in the checkpoint; the others take noise that they have not had yet
            stream = self.global_rank + self.trainer.world_size * self.trainer.global_step
            self._noise.manual_seed(derived_seed(self.seed, 3, stream if self.global_rank else 0))

    def on_train_start(self) -> None:
        """Count the training points."""
        self._points = training_points(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The negative evidence lower bound divided by the number of training points."""
        x, y = batch
        assert self._noise is not None
        self.model.eval()
        mean, std = self.mean(), self.std()
        outputs = functional_call(self.model, gaussian_draw(mean, std, self._noise), (x,))
        nll = self.nll(outputs, y) * (self._points / len(x))
        kl = gaussian_kl(mean, std, self.prior_precision)
        terms = torch.stack([-(nll + kl), -nll, kl]).detach().double() * len(x)
        self._sums = terms if self._sums is None else self._sums.to(terms.device) + terms
        self._seen += len(x)
        return (nll + kl) / self._points

    def on_train_epoch_end(self) -> None:
        """Log the means over the epoch (Lightning's own averaging costs more than a step of a small network)."""
        if self._sums is not None:
            means = (self._sums / self._seen).float()
            names = ("vi/elbo", "vi/log_likelihood", "vi/kl")
            self.log_dict(dict(zip(names, means, strict=True)), sync_dist=self.trainer.world_size > 1)
        self._sums, self._seen = None, 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the state of the noise, and the sums over the epoch so far, into the checkpoint."""
        if self._noise is not None:
            checkpoint[_STATE] = {"noise": self._noise.get_state(), "sums": self._sums, "seen": self._seen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take them from the checkpoint."""
        if _STATE in checkpoint:
            state = checkpoint[_STATE]
            self._noise_state, self._sums, self._seen = state["noise"], state["sums"], state["seen"]

    def on_fit_end(self) -> None:
        """Write the posterior, of a fit that was resumed at its end too."""
        if self.posterior_file is not None and self.trainer.is_global_zero:
            self.posterior().save(self.posterior_file)

    def member_outputs(self, x: Tensor) -> Tensor:
        """Outputs ``(draws, B, ...)``."""
        self.model.eval()
        generator = torch.Generator(self.device).manual_seed(derived_seed(self.seed, 6, 0))
        mean, std = self.mean(), self.std()
        draws = (gaussian_draw(mean, std, generator) for _ in range(_TESTED))
        return torch.stack([functional_call(self.model, draw, (x,)) for draw in draws])
