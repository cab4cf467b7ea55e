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
        vars(kernel).update(state["kernel"])
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


def chain_diagnostics(series: Mapping[str, Tensor]) -> dict[str, float]:
    """Effective sample sizes ``ess/name``, within chains, and split R-hat ``rhat/name``, over them (ArviZ's).

    Series are ``(S, chains, ...)``. Of several quantities the worst is taken, and ``ess/name_median``. NaN stands for
    fewer than four samples (eight for R-hat), or quantities that never moved.
    """
    found: dict[str, float] = {}
    for name, values in series.items():
        sizes = sample_sizes(values)
        moved = ~sizes.isnan().any(0)
        if not moved.any():
            found |= {f"ess/{name}": math.nan, f"rhat/{name}": math.nan}
            continue
        found[f"ess/{name}"] = float(sizes[:, moved].min())
        if sizes[:, moved].numel() > 1:
            found[f"ess/{name}_median"] = float(sizes[:, moved].median())
        half = len(values) // 2  # which counts as a chain: ArviZ splits several chains only
        halves = torch.cat([values[:half], values[-half:]], 1)
        found[f"rhat/{name}"] = float(_by_arviz("rhat", halves, "identity")[moved].max())
    return found


def sample_sizes(series: Tensor) -> Tensor:
    """Effective sample sizes ``(chains, quantities)`` of each chain by itself, from ``(S, chains, ...)``.

    They are Geyer's, by the initial monotone sequence; NaN for fewer than four samples, or where nothing moves.
    """
    sizes = _by_arviz("ess", series.flatten(1).unsqueeze(1), "identity")
    moved = (series != series[:1]).any(0).flatten().cpu()
    return torch.where(moved, sizes, torch.nan).view(series.shape[1], -1)


def _by_arviz(name: str, series: Tensor, method: str) -> Tensor:
    """A diagnostic of each quantity ``(quantities)``, from ``(S, chains, ...)``."""
    with from_extra("sampling", purpose="a chain's diagnostics"):
        from arviz_stats.base import array_stats

    values = series.detach().double().cpu().reshape(*series.shape[:2], -1).numpy()
    return torch.as_tensor(getattr(array_stats, name)(values, chain_axis=1, draw_axis=0, method=method), device="cpu")
