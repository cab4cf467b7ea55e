"""Hamiltonian Monte Carlo as a training run: a step is a transition of one chain over the full batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tu_symmetry.posterior.hamiltonian import HamiltonianChain, Transition
from tu_symmetry.posterior.network import BayesianNetwork, States, categorical_nll, require_numbers
from tu_symmetry.routines.chains import ChainsRoutine
from tu_symmetry.routines.predictive import Likelihood
from tu_symmetry.states import evenly


class HMCRoutine(ChainsRoutine):
    """Full-batch Hamiltonian Monte Carlo over the parameters of a network, with Pyro's kernel.

    A training step is one transition; ``trainer.max_steps`` (or ``max_epochs``) is the length of the chain, burn-in
    included. The potential is ``nll(model(x), y) + prior_precision / 2 * ||w||^2`` in nats, over the whole training
    set, which the data module must give as one batch without augmentation (``batch_size: full``). The chain is in every
    checkpoint.

    Logged: ``hmc/acceptance`` (probability), ``hmc/accepted``, ``hmc/potential`` (nats), ``hmc/log_likelihood`` (nats
    for each training point), ``hmc/step_size``, and at the end effective sample sizes and split R-hat of the potential
    and of random projections of the weights, ``hmc/ess/...`` and ``hmc/rhat/...``. Validation measures the chain's
    position, a test 100 stored samples, evenly spaced. Several chains are several runs with own ``seed`` and ``chain``.

    Args:
        model: the network; its own parameters are the start. It runs in ``eval`` mode.
        step_size, leapfrog_steps: of a trajectory.
        burn_in: transitions before the first sample.
        stored: ``(first, last, count)``: of the transitions after the burn-in store only ``linspace`` of these.
        prior_precision: inverse variance of the prior of every parameter.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        adapt_step_size: adapt the step during the burn-in to an acceptance of 0.8 (the trajectory's length stays).
        seed, chain: seed of the chain, and its number in the store.
        samples: folder of the :class:`~tu_symmetry.posterior.samples.SampleStore`; None to store no samples.
        matmul_precision: ``high`` allows TF32 on a GPU; the acceptance corrects the trajectory, not the potential.
    """

    method = "hmc"
    checkpoint_key = "hamiltonian_monte_carlo"
    needs_all = "a transition takes all data"

    def __init__(
        self,
        model: nn.Module,
        step_size: float = 1e-3,
        *,
        leapfrog_steps: int = 500,
        burn_in: int = 100,
        stored: tuple[int, int, int] | None = None,
        prior_precision: float = 1.0,
        nll: Likelihood = categorical_nll,
        adapt_step_size: bool = False,
        seed: int = 0,
        chain: int = 0,
        samples: str | Path | None = None,
        matmul_precision: Literal["highest", "high"] = "highest",
    ) -> None:
        super().__init__(model, nll, prior_precision, seed, samples)
        require_numbers(burn_in=burn_in, step_size=step_size, leapfrog_steps=leapfrog_steps, seed=seed, chain=chain)
        if burn_in < 0:
            raise ValueError(f"burn_in must not be negative, got {burn_in}")
        if stored is not None and not (0 <= stored[0] < stored[1] and 2 <= stored[2] <= stored[1] - stored[0] + 1):
            raise ValueError(f"stored is (first, last, count), at least two transitions of first..last, got {stored}")
        self.burn_in = burn_in
        self.stored = None if stored is None else {stored[0] + k for k in evenly(stored[1] - stored[0] + 1, stored[2])}
        self.kernel_options: dict[str, Any] = {
            "step_size": step_size,
            "leapfrog_steps": leapfrog_steps,
            "warmup": burn_in,
            "adapt_step_size": adapt_step_size,
            "seed": seed,
        }
        self.options = self.kernel_options | {"burn_in": burn_in, "stored": sorted(self.stored or ())}
        self.numbers, self.matmul_precision = [chain], matmul_precision

    def _made(self, network: BayesianNetwork) -> HamiltonianChain:
        return HamiltonianChain(network, **self.kernel_options)

    def _positions(self) -> list[States]:
        return [self.chain.position]

    def _move(self, batch: None) -> dict[str, float]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.matmul_precision)
        try:
            made: Transition = self.chain.step()
        finally:
            torch.set_float32_matmul_precision(before)
        taken = self.chain.transitions - self.burn_in
        if taken > 0:
            potential = torch.tensor([made.potential], dtype=torch.float64, device="cpu")
            self._keep(potential, store=self.stored is None or taken - 1 in self.stored)
        self.log("acceptance", made.acceptance, prog_bar=True, logger=False)
        network = self.chain.network
        log_likelihood = (float(network.penalty(self.chain.position)) - made.potential) / len(network.x)
        return made._asdict() | {"accepted": float(made.accepted), "log_likelihood": log_likelihood}
