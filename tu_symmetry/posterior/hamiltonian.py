"""One Hamiltonian chain by Pyro's kernel, transition by transition, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tu_symmetry._extras import from_extra
from tu_symmetry.posterior.network import BayesianNetwork, States, derived_seed, require_positive, seeded


class Transition(NamedTuple):
    """What one transition did; the potential in nats, of the position that the chain has now."""

    accepted: bool
    acceptance: float
    potential: float
    step_size: float


class HamiltonianChain:
    """A chain over the parameters of a network, which starts at its own.

    The random numbers of a transition depend on ``seed`` and the transition's place in the chain only, so that a chain
    that is restored from :meth:`state_dict` equals one that was never interrupted. With ``adapt_step_size`` the step
    adapts in the ``warmup`` to an acceptance of 0.8 by dual averaging, and a trajectory's length stays the same.
    """

    def __init__(
        self,
        network: BayesianNetwork,
        *,
        step_size: float,
        leapfrog_steps: int,
        warmup: int = 0,
        adapt_step_size: bool = False,
        seed: int = 0,
    ) -> None:
        with from_extra("sampling", purpose="an HMC chain"):
            from pyro.infer.mcmc import HMC

        require_positive(step_size=step_size, leapfrog_steps=leapfrog_steps)
        if adapt_step_size and warmup < 1:
            raise ValueError("the step adapts during the warm-up only: give warmup transitions for it")
        self.network = network
        self.seed = seed
        self.transitions = 0
        if not torch.isfinite(network.potential(network.parameters)):
            raise ValueError(
                "the chain starts where the posterior's density is zero or NaN: check the data and the network"
            )
        self._kernel: Any = HMC(
            potential_fn=network.potential,
            step_size=step_size,
            # Pyro takes int(length / step) leapfrog steps; the half keeps rounding from dropping one.
            trajectory_length=(leapfrog_steps + 0.5) * step_size,
            adapt_step_size=adapt_step_size,
            adapt_mass_matrix=False,
        )
        self._kernel.initial_params = network.parameters
        with seeded(derived_seed(seed, 4, 0), network.device):  # the search for a first step draws momenta
            self._kernel.setup(warmup_steps=warmup if adapt_step_size else 0)

    @property
    def position(self) -> States:
        """The parameters that the chain is at; every transition makes new tensors."""
        return {name: value.detach() for name, value in self._kernel._z_last.items()}

    def step(self) -> Transition:
        """Make one transition."""
        kernel = self._kernel
        before, mean, step_size = kernel._z_last, kernel._mean_accept_prob, kernel.step_size
        with seeded(derived_seed(self.seed, 0, self.transitions), self.network.device):
            kernel.sample(before)
        self.transitions += 1
        made = kernel._t - kernel._warmup_steps if kernel._t > kernel._warmup_steps else kernel._t
        acceptance = mean + (kernel._mean_accept_prob - mean) * made if made > 1 else kernel._mean_accept_prob
        return Transition(
            accepted=kernel._z_last is not before,
            acceptance=min(max(float(acceptance), 0.0), 1.0),
            potential=float(kernel._potential_energy_last),
            step_size=float(step_size),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the chain depends on, as tensors and numbers."""
        kernel, adapter = self._kernel, self._kernel._adapter
        return {
            "transitions": self.transitions,
            "position": {name: t.detach().clone() for name, t in kernel._z_last.items()},
            "gradient": {name: t.detach().clone() for name, t in kernel._z_grads_last.items()},
            "potential": kernel._potential_energy_last.detach().clone(),
            "kernel": {name: getattr(kernel, name) for name in ("_t", "_accept_cnt", "_mean_accept_prob")},
            "step_size": adapter.step_size,
            "window": adapter._current_window,
            "dual_averaging": dict(vars(adapter._step_size_adapt_scheme)) if adapter.adapt_step_size else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, in a chain made with the same arguments."""
        kernel, adapter, device = self._kernel, self._kernel._adapter, self.network.device
        self.transitions = state["transitions"]
        position, gradient = ({n: t.to(device) for n, t in state[part].items()} for part in ("position", "gradient"))
        kernel._cache(position, state["potential"].to(device), gradient)
        for name, value in state["kernel"].items():
            setattr(kernel, name, value)
        if adapter.adapt_step_size:
            vars(adapter._step_size_adapt_scheme).update(state["dual_averaging"])
        adapter.step_size, adapter._current_window = state["step_size"], state["window"]


class SignedSums:
    """Fixed random projections of weights: each of ``count`` is a signed sum over its own random part of them."""

    def __init__(self, like: Mapping[str, Tensor], count: int, seed: int) -> None:
        self.names = sorted(like)
        weights = sum(like[name].numel() for name in self.names)
        device = like[self.names[0]].device
        self.count = min(count, weights)
        generator = torch.Generator().manual_seed(derived_seed(seed, 5, 0))
        self._order = torch.randperm(weights, generator=generator, device="cpu").to(device)
        drawn = torch.randint(2, (weights,), generator=generator, dtype=torch.int8, device="cpu")
        self._sign = (drawn * 2 - 1).to(device)

    def __call__(self, state: Mapping[str, Tensor]) -> Tensor:
        """Projections ``(count,)`` of a state."""
        flat = torch.cat([state[name].detach().flatten() for name in self.names])
        signed = flat[self._order] * self._sign
        return torch.stack([part.sum() / math.sqrt(len(part)) for part in signed.tensor_split(self.count)])


def chain_diagnostics(series: Mapping[str, Tensor], *, several: bool = False) -> dict[str, float]:
    """Effective sample sizes ``ess/name`` and split R-hat (Pyro's) ``rhat/name`` of one chain's series ``(S, ...)``.

    With ``several``, series are ``(S, chains, ...)``; sample sizes are within chains then, and R-hat is over them. Of
    several quantities the worst is taken, and ``ess/name_median``. NaN stands for fewer than four samples, or
    quantities that never moved.
    """
    with from_extra("sampling", purpose="a chain's diagnostics"):
        from pyro.ops.stats import split_gelman_rubin

    found: dict[str, float] = {}
    for name, values in series.items():
        values = values.detach().double().cpu()
        chains = values.reshape(len(values), values.shape[1] if several else 1, -1).transpose(0, 1)
        moved = chains[..., (chains.std(1) > 0).all(0)] if len(values) > 1 else chains[..., :0]
        if len(values) < 4 or not moved.shape[-1]:
            found |= {f"ess/{name}": math.nan, f"rhat/{name}": math.nan}
            continue
        sizes = estimated_sample_size(moved.transpose(0, 1).flatten(1))
        found[f"ess/{name}"] = float(sizes.min())
        if len(sizes) > 1:
            found[f"ess/{name}_median"] = float(sizes.median())
        found[f"rhat/{name}"] = float(split_gelman_rubin(moved, chain_dim=0, sample_dim=1).max())
    return found


def estimated_sample_size(series: Tensor) -> Tensor:
    """Effective sample sizes of one chain ``(S, ...)`` by Geyer's initial monotone sequence, at most ``S * log10(S)``.

    Unlike Pyro's, it makes no table of ``(S / 2)^2`` entries.
    """
    with from_extra("sampling", purpose="an effective sample size"):
        from pyro.ops.stats import autocorrelation

    values = series.detach().double().cpu()
    count = len(values)
    correlation = autocorrelation(values, dim=0)
    correlation[:, values.var(0) == 0] = torch.nan  # a quantity that never moves
    pairs = correlation[: count // 2 * 2].unflatten(0, (count // 2, 2)).sum(1)  # lags 0 and 1, 2 and 3, ...
    later = pairs[1:].clamp(min=0)
    monotone = later.cummin(0).values.sum(0) if len(later) else torch.zeros_like(pairs[0])
    size = count / (2 * pairs[0] + 2 * monotone - 1)
    limit = count * max(1.0, math.log10(count))
    return torch.where(size <= 0, limit, size.clamp(max=limit))
