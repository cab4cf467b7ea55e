"""Microcanonical Langevin chains, all of them one stack: isokinetic dynamics, and the tuning of step size and length.

A chain has a position ``x`` of d weights and a velocity ``u`` of norm 1. Between refreshments it follows
``dx = u dt, du = -(1 - u u^T) grad U / (d - 1) dt``, which keeps ``(d - 1) log(speed) + U``; what an integrator changes
of that is the *energy error* of a step (arXiv 2212.08549). After each step the velocity is partly refreshed, so that it
is forgotten along the *length* L, and positions are distributed as ``exp(-U)`` (arXiv 2303.18221). No step is rejected:
the error's variance for each dimension says how large the bias is, and the step size is chosen by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from tu_symmetry.posterior.hamiltonian import sample_sizes
from tu_symmetry.posterior.network import BayesianNetwork, States, derived_seed, require_positive
from tu_symmetry.states import evenly

Integrator = Literal["leapfrog", "minimal_norm"]
Batch = tuple[Tensor, Tensor]

_INNER = 0.1931833275037836  # of McLachlan's integrator, which has the least error of those with two gradients
_SCHEMES = {  # shares of a step: a kick, then a drift
    "leapfrog": ((0.5, 1.0), (0.5, 0.0)),
    "minimal_norm": ((_INNER, 0.5), (1 - 2 * _INNER, 0.5), (_INNER, 0.0)),
}
_SHARES = (0.8, 0.9)  # of the tuning: where its first phase ends, and its second
_MEMORY = 99 / 101  # decay of the step size's averages, which is that of 100 samples
_TRUST = 1.5  # how far from what is wanted an error may be to count
_SHORTER = 0.8  # than a step that has diverged
_LENGTH = 0.4  # of the steps between independent samples
_WATCHED = 256  # weights that the last two phases look at


class Move(NamedTuple):
    """What one step of all chains did; ``[chains]`` in float64, the potential (nats) of the positions they have now."""

    potential: Tensor
    energy_error: Tensor
    moved: Tensor


def kick(velocity: Tensor, gradient: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Turn velocities ``[chains, d]`` down the gradients for times ``[chains]``, and what the kinetic energy gains.

    This is the exact solution for a constant gradient, without exponentials that overflow.
    """
    degrees = velocity.shape[1] - 1
    norm = gradient.norm(dim=1, keepdim=True)
    down = -gradient / norm.clamp_min(torch.finfo(gradient.dtype).tiny)
    delta = step.to(velocity.dtype)[:, None] * norm / degrees
    along, decay = (velocity * down).sum(1, keepdim=True), (-delta).exp()
    turned = down * (1 - decay) * (1 + decay + along * (1 - decay)) + 2 * decay * velocity
    gained = delta.double() - math.log(2) + torch.log(1 + along.double() + (1 - along.double()) * decay.double() ** 2)
    return turned / turned.norm(dim=1, keepdim=True), degrees * gained.squeeze(1)


class MicrocanonicalChains:
    """Chains over the parameters of a network, which start at the rows of a stack; each has its own step and length.

    The random numbers of a step depend on ``seed`` and its number only, so that chains that are restored from
    :meth:`state_dict` equal those that were never interrupted.

    In the first nine tenths of the ``tuning`` steps each chain's step size goes to where the energy error's variance
    for each dimension is that of ``energy_variance``, whose two numbers are those of its start and its end
    (arXiv 2502.06335). The length is ``sqrt(d)`` in the first eight, then the root of the variances' sum in the ninth,
    and at last 0.4 times the way between independent samples in the last one. With batches an energy error is that of
    the batch a step ends with, and its variance has a part that comes from the noise of the gradients, so that noise
    makes steps shorter too.

    Args:
        network: the likelihood and the prior.
        starts: parameters ``[chains, ...]``.
        step_size: of all chains, at the start if they are tuned.
        length: along which a velocity is forgotten; None for ``sqrt(d)``, or what the tuning finds.
        tuning: number of steps that tune; 0 for none.
        energy_variance: variances of the energy error for each dimension (nats squared).
        integrator: ``minimal_norm`` takes two gradients a step, ``leapfrog`` one.
        seed: of velocities.
    """

    def __init__(
        self,
        network: BayesianNetwork,
        starts: Mapping[str, Tensor],
        *,
        step_size: float,
        length: float | None = None,
        tuning: int = 0,
        energy_variance: tuple[float, float] = (0.5, 0.1),
        integrator: Integrator = "minimal_norm",
        seed: int = 0,
    ) -> None:
        start, end = energy_variance
        require_positive(step_size=step_size, length=length or 1.0, energy_variance=start)
        require_positive(energy_variance=end)
        if integrator not in _SCHEMES:
            raise ValueError(f"integrator={integrator!r} is none of {', '.join(_SCHEMES)}")
        if tuning != 0 and tuning < 50:
            raise ValueError(f"tuning has three phases in {tuning} steps: take at least 50 (thousands, usually), or 0")
        self.network, self.tuning, self.seed, self.transitions = network, tuning, seed, 0
        self.energy_variance, self.integrator = (start, end), integrator
        self._sizes = [t.numel() for t in network.parameters.values()]
        position = torch.cat([starts[n].detach().to(network.device).flatten(1) for n in network.parameters], 1)
        count, dimension = position.shape
        if dimension < 2:
            raise ValueError("microcanonical dynamics needs at least two parameters: a velocity of one cannot turn")
        potential, gradient = self._evaluate(position, None)
        if not (potential.isfinite() & gradient.isfinite().all(1)).all():
            raise ValueError(
                "a chain starts where the posterior's density is zero or NaN: check the data and the network"
            )
        zeros = torch.zeros_like(potential)  # in float64
        self._state: States = {
            "position": position,
            "velocity": torch.nn.functional.normalize(self._noise(position, 0), dim=1),
            "gradient": gradient,
            "potential": potential,
            "step_size": zeros + step_size,
            "length": zeros + (length or math.sqrt(dimension)),
            "weight": zeros,  # of the step size's average
            "average": zeros,
            "longest": zeros + math.inf,
            "watched": position.new_zeros(0, count, min(dimension, _WATCHED)),  # of the second and of the third phase
        }
        self._tune_length = length is None

    @property
    def position(self) -> States:
        """The parameters that the chains are at, ``[chains, ...]``."""
        return self._parts(self._state["position"])

    @property
    def step_size(self) -> Tensor:
        """Step sizes ``[chains]``."""
        return self._state["step_size"]

    @property
    def length(self) -> Tensor:
        """Lengths ``[chains]`` along which velocities are forgotten."""
        return self._state["length"]

    def step(self, batch: Batch | None = None) -> Move:
        """Make one step of all chains, by the gradients of a batch, or of all data."""
        s = self._state
        x, u, gradient, size = s["position"], s["velocity"], s["gradient"], s["step_size"]
        before = potential = s["potential"] if batch is None else vmap(self._potential(batch))(x).double()
        error = torch.zeros_like(before)
        for kicked, drifted in _SCHEMES[self.integrator]:
            u, gained = kick(u, gradient, kicked * size)
            error = error + gained
            if drifted:
                x = x + (drifted * size).to(x.dtype)[:, None] * u
                potential, gradient = self._evaluate(x, batch)
        error = error + potential - before
        moved = error.isfinite() & gradient.isfinite().all(1)
        self.transitions += 1
        noise = self._noise(x, self.transitions)
        refreshed = ((2 * size / s["length"]).expm1() / x.shape[1]).sqrt().to(x.dtype)[:, None]
        rows = moved[:, None]
        s["velocity"] = torch.nn.functional.normalize(torch.where(rows, u + refreshed * noise, noise), dim=1)
        s["position"] = torch.where(rows, x, s["position"])
        s["gradient"] = torch.where(rows, gradient, s["gradient"])
        s["potential"] = torch.where(moved, potential, before)
        if self.transitions <= self.tuning:
            self._tune(torch.where(moved, error, 0.0), moved, size, 6 if batch is None else 2)
        return Move(s["potential"], error, moved)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the chains depends on."""
        return {"transitions": self.transitions, **{name: t.clone() for name, t in self._state.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, in chains made with the same arguments."""
        self.transitions = state["transitions"]
        self._state = {name: state[name].to(self.network.device) for name in self._state}

    def _tune(self, error: Tensor, moved: Tensor, size: Tensor, power: int) -> None:
        """One step of the tuning; variances of energy errors grow as this power of the step size."""
        s, dimension = self._state, self._state["position"].shape[1]
        first, second = (int(share * self.tuning) for share in _SHARES)
        if self.transitions <= second:
            start, end = self.energy_variance
            wanted = start + (end - start) * self.transitions / second
            ratio = error.square() / (dimension * wanted) + 1e-8
            weight = torch.where(moved, (-(ratio.log() / (6 * _TRUST)).square() / 2).exp(), 0.0)
            s["average"] = _MEMORY * s["average"] + weight * ratio / size**power
            s["weight"] = _MEMORY * s["weight"] + weight
            s["longest"] = torch.where(moved, s["longest"], torch.minimum(s["longest"], _SHORTER * size))
            found = torch.where(s["weight"] > 0, (s["average"] / s["weight"]) ** (-1 / power), size)
            s["step_size"] = torch.minimum(found, s["longest"])
        if not self._tune_length or self.transitions <= first:
            return
        watched = s["position"][:, evenly(dimension, s["watched"].shape[-1])]
        s["watched"] = torch.cat([s["watched"], watched.unsqueeze(0)])
        if self.transitions in (second, self.tuning):
            seen = s["watched"].double()
            if self.transitions == second:
                found = (dimension * seen.var(0, correction=0).mean(1)).sqrt()
            else:
                found = _LENGTH * size * (len(seen) / sample_sizes(seen)).nanmean(1).to(size)
            s["length"] = torch.where(found.isfinite() & (found > 0), found, s["length"])
            s["watched"] = s["watched"][:0]

    def _evaluate(self, x: Tensor, batch: Batch | None) -> tuple[Tensor, Tensor]:
        """Potentials in float64, and their gradients."""
        gradient, values = vmap(grad_and_value(self._potential(batch)))(x)
        return values.double(), gradient

    def _potential(self, batch: Batch | None) -> Callable[[Tensor], Tensor]:
        return lambda row: self.network.potential(self._parts(row), batch)

    def _parts(self, rows: Tensor) -> States:
        """Parameters ``[..., *shape]`` by name, from ``[..., d]``."""
        held = zip(self.network.parameters.items(), rows.split(self._sizes, -1), strict=True)
        return {name: part.reshape(*rows.shape[:-1], *t.shape) for (name, t), part in held}

    def _noise(self, like: Tensor, step: int) -> Tensor:
        generator = torch.Generator(like.device).manual_seed(derived_seed(self.seed, 14, step))
        return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
