"""Microcanonical Langevin Monte Carlo as a training run: a step moves all chains, by all data or by a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from tu_symmetry.posterior.hamiltonian import SignedSums, chain_diagnostics
from tu_symmetry.posterior.microcanonical import Integrator, MicrocanonicalChains, Move
from tu_symmetry.posterior.network import (
    BayesianNetwork,
    States,
    categorical_nll,
    derived_seed,
    initialized,
    require_positive,
)
from tu_symmetry.posterior.samples import SampleStore
from tu_symmetry.routines.chains import ChainsRoutine
from tu_symmetry.routines.predictive import Likelihood
from tu_symmetry.states import unstack

_PROJECTIONS = 16


class MCLMCRoutine(ChainsRoutine):
    """Microcanonical Langevin Monte Carlo over the parameters of a network, all chains as one stack.

    Nothing is rejected; the step size keeps the bias small, by the energy error's variance
    (:class:`~tu_symmetry.posterior.microcanonical.MicrocanonicalChains` has the papers). From ``initial_states`` that a
    :class:`~tu_symmetry.routines.MembersRoutine` has trained, the chains are a Bayesian deep ensemble.

    The potential is ``nll(model(x), y) + prior_precision / 2 * ||w||^2`` in nats, over the whole training set, or
    estimated from each batch in turn. All data as one batch (``batch_size: full``) are moved on by
    ``transitions_per_batch`` in each training step, a batch of them once. The chains are in every checkpoint.

    Logged, means over the chains: ``mclmc/potential`` (nats), ``mclmc/energy_variance`` (of the last transition, nats
    squared for each dimension), ``mclmc/step_size``, ``mclmc/length``, ``mclmc/diverged`` (share of chains that stayed
    where they were, since the way led to what is not finite); and at the end effective sample sizes within chains and
    split R-hat over them, as :class:`~tu_symmetry.routines.HMCRoutine` has them. Validation measures the chains'
    positions, a test 100 stored samples, evenly spaced.

    Args:
        model: the network; it runs in ``eval`` mode.
        num_chains: number of chains.
        initial_states: folder of a sample store with a state for each chain to start from; None for fresh
            initializations, which take long to forget.
        step_size: at the start of the tuning; without one, of the whole chain.
        length: along which a velocity is forgotten; None for what the tuning finds.
        tuning: transitions that tune and are not stored; 0 for none.
        energy_variance: of the energy error for each dimension, at the tuning's start and at its end; less is less
            bias and a slower chain.
        integrator: ``minimal_norm`` takes two gradients a transition, ``leapfrog`` one.
        thinning: every so many transitions behind the tuning the positions are stored.
        transitions_per_batch: transitions in a training step, where a batch holds all data.
        prior_precision: inverse variance of the prior of every parameter.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        seed: of initializations and velocities.
        samples: folder of the :class:`~tu_symmetry.posterior.samples.SampleStore`; None to store no samples.
    """

    method = "mclmc"
    checkpoint_key = "microcanonical_langevin"

    def __init__(
        self,
        model: nn.Module,
        num_chains: int = 4,
        *,
        initial_states: str | Path | None = None,
        step_size: float = 0.01,
        length: float | None = None,
        tuning: int = 1000,
        energy_variance: tuple[float, float] = (0.5, 0.1),
        integrator: Integrator = "minimal_norm",
        thinning: int = 10,
        transitions_per_batch: int = 1,
        prior_precision: float = 1.0,
        nll: Likelihood = categorical_nll,
        seed: int = 0,
        samples: str | Path | None = None,
    ) -> None:
        super().__init__(model, nll, prior_precision, seed, samples)
        require_positive(num_chains=num_chains, thinning=thinning, transitions_per_batch=transitions_per_batch)
        self.num_chains, self.tuning, self.thinning = num_chains, tuning, thinning
        self.initial_states = None if initial_states is None else Path(initial_states)
        self.transitions_per_batch = transitions_per_batch
        self.chain_options: dict[str, Any] = {
            "step_size": step_size,
            "length": length,
            "tuning": tuning,
            "energy_variance": energy_variance,
            "integrator": integrator,
            "seed": seed,
        }

    def _forget(self) -> None:
        super()._forget()
        self._project: SignedSums | None = None

    @property
    def _numbers(self) -> list[int]:
        return list(range(self.num_chains))

    def _options(self) -> dict[str, Any]:
        return self.chain_options | {"thinning": self.thinning, "initial_states": self.initial_states}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Make the transitions of one batch."""
        x, y = batch
        batches, size = self._sets(batch)
        whole = batches == 1 and len(x) == size
        if not whole and self.transitions_per_batch > 1:
            raise ValueError(
                f"transitions_per_batch is {self.transitions_per_batch}, but this batch has {len(x)} of {size} points, "
                "and noise that stays the same is a bias: take 1, or give the data module batch_size: full"
            )
        if self.chain is None:
            network = BayesianNetwork(self.model, x, y, self.prior_precision, self.nll, self.device, points=size)
            self._project = SignedSums(network.parameters, _PROJECTIONS, self.seed)
            self.chain = self._continue(MicrocanonicalChains(network, self._starts(), **self.chain_options))
        optimizer: Any = self.optimizers()
        made: Move = optimizer.step(closure=lambda: self._move(None if whole else (x, y)))
        chain = self.chain
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(chain.position[name][0])
        dimension = sum(p.numel() for p in self.model.parameters())
        found = {
            "potential": made.potential,
            "energy_variance": made.energy_error.square() / dimension,
            "step_size": chain.step_size,
            "length": chain.length,
            "diverged": (~made.moved).double(),
        }
        self.log_dict({f"mclmc/{name}": value.mean() for name, value in found.items()})

    def diagnostics(self) -> dict[str, float]:
        """Effective sample sizes within chains, and split R-hat over all of them, of the samples so far."""
        series = torch.stack(self._series)
        return chain_diagnostics({"projections": series[..., :-1], "potential": series[..., -1]}, several=True)

    def _move(self, batch: tuple[Tensor, Tensor] | None) -> Move:
        for _ in range(self.transitions_per_batch):
            made: Move = self.chain.step(batch)
            past = self.chain.transitions - self.tuning
            if past > 0 and past % self.thinning == 0:
                self._keep(made.potential)
        return made

    def _keep(self, potential: Tensor) -> None:
        assert self._project is not None
        states = unstack(self.chain.position)
        projected = torch.stack([self._project(state) for state in states])
        self._series.append(torch.cat([projected.double(), potential[:, None]], 1).cpu())
        if self._stored is not None:
            whole = [self.chain.network.complete(state) for state in states]
            steps = [self.chain.transitions] * self.num_chains
            self._stored.append(whole, chain=self._numbers, step=steps)

    def _starts(self) -> States:
        if self.initial_states is None:
            fresh = [initialized(self.model, derived_seed(self.seed, 1, k)) for k in self._numbers]
            return dict(stack_module_state(fresh)[0])
        store = SampleStore.open(self.initial_states, like=self.model.state_dict())
        if len(store) != self.num_chains:
            raise ValueError(
                f"initial_states {self.initial_states} holds {len(store)} states, but num_chains is {self.num_chains}"
            )
        held = store.load()
        return {name: held[name].to(p) for name, p in self.model.named_parameters()}

    def _position_outputs(self, x: Tensor) -> Tensor:
        if self.chain is None:
            return super()._position_outputs(x)

        def one(state: States) -> Tensor:
            return functional_call(self.model, state, (x,))

        outputs: Tensor = vmap(one)(self.chain.position)
        return outputs
