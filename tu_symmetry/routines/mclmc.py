"""Microcanonical Langevin Monte Carlo as a training run: a step moves all chains, by all data or by a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.func import stack_module_state

from tu_symmetry.posterior.microcanonical import Integrator, MicrocanonicalChains, Move
from tu_symmetry.posterior.network import (
    BayesianNetwork,
    States,
    categorical_nll,
    derived_seed,
    initialized,
    require_positive,
)
from tu_symmetry.routines.chains import ChainsRoutine
from tu_symmetry.routines.predictive import Likelihood
from tu_symmetry.routines.runs import starts
from tu_symmetry.states import unstack


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
        self.numbers, self.tuning, self.thinning = range(num_chains), tuning, thinning
        self.initial_states = None if initial_states is None else Path(initial_states)
        self.transitions_per_batch = transitions_per_batch
        several = f"transitions_per_batch is {transitions_per_batch}, and noise that stays the same is a bias"
        self.needs_all = several if transitions_per_batch > 1 else ""
        self.chain_options: dict[str, Any] = {
            "step_size": step_size,
            "length": length,
            "tuning": tuning,
            "energy_variance": energy_variance,
            "integrator": integrator,
            "seed": seed,
        }
        self.options = self.chain_options | {"thinning": thinning, "initial_states": self.initial_states}

    def _made(self, network: BayesianNetwork) -> MicrocanonicalChains:
        if self.initial_states is None:
            fresh = [initialized(self.model, derived_seed(self.seed, 1, k)) for k in self.numbers]
            held = stack_module_state(fresh)[0]
        else:
            held = starts(self.initial_states, self.model.state_dict(), num_chains=len(self.numbers))
        begin = {name: held[name].to(p) for name, p in self.model.named_parameters()}
        return MicrocanonicalChains(network, begin, **self.chain_options)

    def _positions(self) -> list[States]:
        return unstack(self.chain.position)

    def _move(self, batch: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
        chain = self.chain
        for _ in range(self.transitions_per_batch):
            made: Move = chain.step(batch)
            past = chain.transitions - self.tuning
            if past > 0 and past % self.thinning == 0:
                self._keep(made.potential)
        found = {
            "potential": made.potential,
            "energy_variance": made.energy_error.square() / sum(p.numel() for p in self.model.parameters()),
            "step_size": chain.step_size,
            "length": chain.length,
            "diverged": (~made.moved).double(),
        }
        return {name: value.mean() for name, value in found.items()}
