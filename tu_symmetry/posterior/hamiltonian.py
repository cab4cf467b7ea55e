"""One Hamiltonian chain, transition by transition, with a state that continues it bit for bit; moments; diagnostics.

The transitions are those of Pyro's kernels HMC and NUTS. What is kept of a chain is bounded: its last position, running
moments of its weights, and a few numbers for each transition, however long it is and however many weights there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tu_symmetry._extras import from_extra
from tu_symmetry.posterior.network import BayesianNetwork, States, derived_seed, require_positive, seeded


class Transition(NamedTuple):
    """What one transition did.

    Attributes:
        accepted: whether the chain moved.
        acceptance: probability with which it would have (of NUTS the mean over its tree).
        potential: potential of the position that the chain has now, in nats.
        step_size: leapfrog step that was used.
    """

    accepted: bool
    acceptance: float
    potential: float
    step_size: float


class HamiltonianChain:
    """A chain over the parameters of a network.

    The random numbers of a transition depend on ``seed`` and the transition's place in the chain only. Together with
    :meth:`state_dict` (position, its potential and gradient, counters, what the warm-up has adapted) this makes a
    restored chain equal to one that was never interrupted, bit for bit where the device's kernels are deterministic.

    Args:
        network: the model and its data.
        start: first position; the network's own parameters by default.
        step_size: leapfrog step; with ``adapt_step_size`` where the adaptation starts.
        leapfrog_steps: steps of a trajectory (of HMC; while the step adapts, the trajectory's length stays the same).
        kernel: ``hmc``, or ``nuts``, which chooses the number of steps itself.
        warmup: transitions in which step and mass matrix adapt; they are no samples.
        adapt_step_size: adapt the step to ``target_acceptance`` by dual averaging.
        adapt_mass_matrix: adapt a diagonal mass matrix to the variances.
        target_acceptance: acceptance probability that the step is adapted to.
        max_tree_depth: bound on NUTS's trees, at most ``2 ** max_tree_depth`` steps.
        seed: seed of the chain.
        transitions: how many have been made before, for the random numbers.

    Raises:
        ValueError: arguments out of range, a start of another network or with infinite potential.
    """

    def __init__(
        self,
        network: BayesianNetwork,
        start: Mapping[str, Tensor] | None = None,
        *,
        step_size: float,
        leapfrog_steps: int,
        kernel: Literal["hmc", "nuts"] = "hmc",
        warmup: int = 0,
        adapt_step_size: bool = False,
        adapt_mass_matrix: bool = False,
        target_acceptance: float = 0.8,
        max_tree_depth: int = 10,
        seed: int = 0,
        transitions: int = 0,
    ) -> None:
        with from_extra("sampling", purpose="an HMC or NUTS chain"):
            from pyro.infer.mcmc import HMC, NUTS

        require_positive(step_size=step_size, leapfrog_steps=leapfrog_steps, max_tree_depth=max_tree_depth)
        if not 0 < target_acceptance < 1:
            raise ValueError(f"target_acceptance is a probability between 0 and 1, got {target_acceptance}")
        if (adapt_step_size or adapt_mass_matrix) and warmup < 1:
            raise ValueError("step size and mass matrix adapt during the warm-up only: give warmup transitions for it")
        self.network = network
        self.seed = seed
        self.transitions = transitions
        position = network.parameters if start is None else network.parameters_of(start)
        if not torch.isfinite(network.potential(position)):
            raise ValueError(
                "the chain starts where the posterior's density is zero or NaN: check the data and the start"
            )
        common: dict[str, Any] = {
            "potential_fn": network.potential,
            "step_size": step_size,
            "adapt_step_size": adapt_step_size,
            "adapt_mass_matrix": adapt_mass_matrix,
            "target_accept_prob": target_acceptance,
        }
        # Pyro takes int(length / step) leapfrog steps; the half keeps rounding from dropping one.
        length = (leapfrog_steps + 0.5) * step_size
        self._kernel: Any = (
            HMC(trajectory_length=length, **common)
            if kernel == "hmc"
            else NUTS(max_tree_depth=max_tree_depth, **common)
        )
        self._kernel.initial_params = position
        with seeded(derived_seed(seed, 4, 0), network.device):  # the search for a first step draws momenta
            self._kernel.setup(warmup_steps=warmup)

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
        mass = adapter.mass_matrix_adapter
        return {
            "transitions": self.transitions,
            "position": {name: t.detach().clone() for name, t in kernel._z_last.items()},
            "gradient": {name: t.detach().clone() for name, t in kernel._z_grads_last.items()},
            "potential": kernel._potential_energy_last.detach().clone(),
            "kernel": {name: getattr(kernel, name) for name in ("_t", "_accept_cnt", "_mean_accept_prob")},
            "divergences": list(kernel._divergences),
            "step_size": adapter.step_size,
            "window": adapter._current_window,
            "dual_averaging": dict(vars(adapter._step_size_adapt_scheme)) if adapter.adapt_step_size else {},
            "inverse_mass_matrix": [m.clone() for m in mass.inverse_mass_matrix.values()],
            "mass_moments": [_numbers(scheme) for scheme in mass._adapt_scheme.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, in a chain made with the same arguments.

        Raises:
            ValueError: the state is of another network.
        """
        kernel, adapter = self._kernel, self._kernel._adapter
        mass, device = adapter.mass_matrix_adapter, self.network.device
        self.transitions = state["transitions"]
        self.network.parameters_of(state["position"])
        position, gradient = ({n: t.to(device) for n, t in state[part].items()} for part in ("position", "gradient"))
        kernel._cache(position, state["potential"].to(device), gradient)
        for name, value in state["kernel"].items():
            setattr(kernel, name, value)
        kernel._divergences = list(state["divergences"])
        mass.inverse_mass_matrix = {
            sites: m.to(device) for sites, m in zip(mass.mass_matrix_size, state["inverse_mass_matrix"], strict=True)
        }
        for scheme, numbers in zip(mass._adapt_scheme.values(), state["mass_moments"], strict=True):
            vars(scheme).update({n: v.to(device) if isinstance(v, Tensor) else v for n, v in numbers.items()})
        if adapter.adapt_step_size:
            vars(adapter._step_size_adapt_scheme).update(state["dual_averaging"])
        adapter.step_size, adapter._current_window = state["step_size"], state["window"]


class RunningMoments:
    """Mean and variance of states that come one at a time, by Welford's recurrence, in float64.

    Attributes:
        count: number of states.
        mean: their mean, by name; empty before the first.
        squares: sums of squared deviations from the mean.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: States = {}
        self.squares: States = {}

    def update(self, state: Mapping[str, Tensor]) -> None:
        """Take one more state."""
        self.count += 1
        for name, value in state.items():
            value = value.detach().to(torch.float64 if value.device.type != "mps" else value.dtype)
            mean = self.mean.get(name, torch.zeros_like(value))
            deviation = value - mean
            self.mean[name] = mean + deviation / self.count
            moved = deviation * (value - self.mean[name])
            self.squares[name] = self.squares[name] + moved if name in self.squares else moved

    def std(self, correction: int = 1) -> States:
        """Standard deviations; the sum of squares is divided by ``count - correction``.

        Raises:
            ValueError: too few states.
        """
        if self.count <= correction:
            raise ValueError(f"{self.count} states have no standard deviation")
        return {name: (s / (self.count - correction)).sqrt() for name, s in self.squares.items()}

    def state_dict(self) -> dict[str, Any]:
        """Count, mean and squares."""
        return {"count": self.count, "mean": dict(self.mean), "squares": dict(self.squares)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Continue from what :meth:`state_dict` gave."""
        self.count = state["count"]
        self.mean = {name: t.to(device) for name, t in state["mean"].items()}
        self.squares = {name: t.to(device) for name, t in state["squares"].items()}


class SignedSums:
    """Fixed random projections of weights: each coordinate is a signed sum over its own random part of the weights.

    The directions are orthonormal and never stored as a matrix: they cost one index and one sign a weight, whatever
    their number.

    Args:
        like: a state with the weights' shapes.
        count: number of projections; at most one for each weight.
        seed: seed of the directions.
    """

    def __init__(self, like: Mapping[str, Tensor], count: int, seed: int) -> None:
        require_positive(projections=count)
        self.names = sorted(like)
        weights = sum(like[name].numel() for name in self.names)
        device = like[self.names[0]].device
        self.count = min(count, weights)
        generator = torch.Generator().manual_seed(derived_seed(seed, 5, 0))
        self._order = torch.randperm(weights, generator=generator, device="cpu").to(device)
        self._sign = (torch.randint(2, (weights,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1).to(
            device
        )

    def __call__(self, state: Mapping[str, Tensor]) -> Tensor:
        """Projections ``(count,)`` of a state."""
        flat = torch.cat([state[name].detach().flatten() for name in self.names])
        signed = flat[self._order] * self._sign
        return torch.stack([part.sum() / math.sqrt(len(part)) for part in signed.tensor_split(self.count)])


def chain_diagnostics(series: Mapping[str, Tensor]) -> dict[str, float]:
    """Effective sample sizes and split R-hat (Pyro's) of one chain, on a bounded number of quantities.

    Args:
        series: by name, ``(S,)`` or ``(S, quantities)``; of several quantities the worst and the median are taken.

    Returns:
        For each name ``ess/name`` (and ``ess/name_median``) and ``rhat/name``; NaN for fewer than four samples or
        quantities that never moved.
    """
    with from_extra("sampling", purpose="a chain's diagnostics"):
        from pyro.ops.stats import split_gelman_rubin

    found: dict[str, float] = {}
    for name, values in series.items():
        values = values.detach().double().cpu()
        moved = values.reshape(len(values), -1)
        moved = moved[:, moved.std(0) > 0] if len(values) > 1 else moved[:, :0]
        if len(values) < 4 or not moved.shape[1]:
            found |= {f"ess/{name}": math.nan, f"rhat/{name}": math.nan}
            continue
        sizes = estimated_sample_size(moved)
        found[f"ess/{name}"] = float(sizes.min())
        if moved.shape[1] > 1:
            found[f"ess/{name}_median"] = float(sizes.median())
        found[f"rhat/{name}"] = float(split_gelman_rubin(moved.unsqueeze(0), chain_dim=0, sample_dim=1).max())
    return found


def estimated_sample_size(series: Tensor) -> Tensor:
    """Effective sample sizes of one chain ``(S, ...)`` by Geyer's initial monotone sequence.

    The numbers are those of ``pyro.ops.stats.effective_sample_size`` from its autocorrelations. Pyro takes the
    running minimum over a table of ``(S / 2)^2`` entries for each quantity, 200 MB each at 10,000 samples; here it is
    ``torch.cummin``. As in Stan, no size exceeds ``S * log10(S)`` (or ``S``, if larger): in short antithetic chains
    the estimated autocorrelation time may be zero or negative.
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


def _numbers(scheme: Any) -> dict[str, Any]:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in vars(scheme).items()}
