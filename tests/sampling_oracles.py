"""Plain loops that the routines are compared with: full-batch HMC (Pyro's kernel), deep ensembles, mean-field VI.

All three share one model. The prior of every parameter is ``N(0, 1 / prior_precision)``, the likelihood is ``nll``, a
summed negative log-likelihood in nats. The settings of arXiv 2401.00611 are the defaults where it states them.

Networks here are deterministic functions of their parameters: they run in eval mode, buffers stay as they are, and
networks with running statistics are refused. Nothing touches the global random state; results depend on ``seed`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad_and_value, stack_module_state, vmap

from tu_symmetry.posterior.hamiltonian import HamiltonianChain, estimated_sample_size
from tu_symmetry.posterior.network import (
    NLL,
    BayesianNetwork,
    States,
    categorical_nll,
    derived_seed,
    gaussian_draw,
    gaussian_kl,
    initialized,
    require_positive,
)

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class HMCChunk:
    """Consecutive transitions of one chain: what has to be kept to continue it.

    Attributes:
        states: the samples, stacked ``(S, ...)``; of a chunk of the burn-in none, ``S = 0``.
        last: state after the last transition.
        transitions: transitions of the chain up to the end of this chunk, burn-in included.
        acceptance_rate: share of this chunk's proposals that were accepted.
        log_likelihood: mean log-likelihood of a training point under each sample, in nats, ``(S,)``.
    """

    states: States
    last: States
    transitions: int
    acceptance_rate: float
    log_likelihood: Tensor


@dataclass(frozen=True)
class HMCChain:
    """One chain without its burn-in.

    Attributes:
        states: the samples, stacked ``(S, ...)``.
        acceptance_rate: share of accepted proposals after the burn-in.
        effective_sample_size: by name; of the parameters the median and the minimum, and of the log-likelihood.
        log_likelihood: mean log-likelihood of a training point under each sample, in nats, ``(S,)``.
    """

    states: States
    acceptance_rate: float
    effective_sample_size: dict[str, float]
    log_likelihood: Tensor


@dataclass(frozen=True)
class Ensemble:
    """Independently trained networks.

    Attributes:
        states: the members, stacked ``(M, ...)``.
        loss: mean training loss of each epoch and member, ``(epochs, M)``, in nats for each data point.
    """

    states: States
    loss: Tensor


@dataclass(frozen=True)
class MeanFieldFit:
    """A Gaussian with independent parameters, fitted by variational inference.

    Attributes:
        mean: its mean, by parameter.
        std: its standard deviation, by parameter.
        elbo: evidence lower bound in nats, of the whole data set, averaged over the steps of each epoch.
    """

    mean: States
    std: States
    elbo: Tensor


def hmc_samples(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    num_samples: int,
    burn_in: int = 100,
    step_size: float = 1e-3,
    leapfrog_steps: int = 500,
    prior_precision: float = 1.0,
    nll: NLL = categorical_nll,
    initial_state: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    chunk_size: int = 10,
    on_chunk: Callable[[HMCChunk], None] | None = None,
    resume: Sequence[HMCChunk] = (),
    progress: Progress | None = None,
) -> HMCChain:
    """One chain of Hamiltonian Monte Carlo over the full batch, with Pyro's kernel.

    The potential is ``nll(model(x), y) + prior_precision / 2 * ||w||^2``, the mass matrix the identity, the trajectory
    ``leapfrog_steps`` steps of ``step_size``; nothing adapts.

    The random numbers of a transition depend on ``seed`` and the transition's place in the chain only. A resumed chain
    therefore continues with the numbers that the uninterrupted one would have drawn, whatever ``chunk_size`` is. The
    gradient at its first state is computed anew: where the device's kernels are deterministic, and the number of
    threads is the same, the two chains are equal bit for bit; elsewhere they agree in distribution.

    Args:
        model: the network; its own parameters are the start.
        x: all inputs ``(N, ...)``.
        y: all targets ``(N, ...)``.
        num_samples: samples kept, every transition after the burn-in.
        burn_in: transitions before the first sample.
        step_size: leapfrog step.
        leapfrog_steps: leapfrog steps of a trajectory.
        prior_precision: inverse variance of the prior of every parameter.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        initial_state: start of the chain; the parameters of ``model`` by default.
        seed: seed of the chain.
        device: where the chain runs and its samples stay.
        chunk_size: transitions between two calls of ``on_chunk``.
        on_chunk: receives each chunk as soon as it is done, to write it to a file.
        resume: all chunks of an earlier call with the same arguments, in order.
        progress: receives a dict with ``done``, ``total``, ``acceptance_rate`` after each transition.

    Returns:
        The chain, earlier chunks included.

    Raises:
        ValueError: for arguments out of range, chunks that do not fit, or a start with infinite potential.
        RuntimeError: if no proposal of the whole chain was accepted.
    """
    require_positive(num_samples=num_samples, chunk_size=chunk_size)
    network = BayesianNetwork(model, x, y, prior_precision, nll, device)
    total = burn_in + num_samples
    chunks = list(resume)
    done = chunks[-1].transitions if chunks else 0
    _check_resume(chunks, burn_in, total)
    start = chunks[-1].last if chunks else initial_state
    chain = HamiltonianChain(
        network, start, step_size=step_size, leapfrog_steps=leapfrog_steps, seed=seed, transitions=done
    )
    while done < total:
        boundary = burn_in if done < burn_in else total
        steps = min(chunk_size, boundary - done)
        kept: list[States] = []
        accepted = 0
        for i in range(steps):
            accepted += chain.step().accepted
            done += 1
            if done > burn_in:
                kept.append(chain.position)
            if progress is not None:
                progress({"done": done, "total": total, "acceptance_rate": accepted / (i + 1)})
        position = chain.position
        chunk = HMCChunk(
            states=network.complete(_stack(kept, position)),
            last={name: tensor[0] for name, tensor in network.complete(_stack([position], position)).items()},
            transitions=done,
            acceptance_rate=accepted / steps,
            log_likelihood=torch.tensor([network.log_likelihood(w) for w in kept], dtype=torch.float64),
        )
        chunks.append(chunk)
        if on_chunk is not None:
            on_chunk(chunk)
    return _join(chunks, network)


def deep_ensemble(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    members: int = 5,
    epochs: int = 50,
    batch_size: int = 100,
    learning_rate: float = 1e-3,
    prior_precision: float = 1.0,
    nll: NLL = categorical_nll,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Ensemble:
    """Trains independent networks to maxima of the posterior, all at once, with Adam.

    The loss of a member is ``nll / B + prior_precision / (2 N) * ||w||^2`` on batches of ``B``: an unbiased estimate
    of the negative log joint density divided by the number of data points ``N``. Members differ in their
    initialization and in the order of the data; member ``m`` does not depend on how many members there are.

    Args:
        model: the architecture; every layer with parameters needs ``reset_parameters``.
        x: all inputs ``(N, ...)``.
        y: all targets ``(N, ...)``.
        members: number of networks.
        epochs: passes over the data.
        batch_size: points in a batch; the last batch of an epoch may be smaller.
        learning_rate: Adam's learning rate.
        prior_precision: inverse variance of the prior of every parameter.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        seed: seed of all initializations and data orders.
        device: where the networks are trained and stay.
        progress: receives a dict with ``done``, ``total`` and ``loss`` after each epoch.

    Returns:
        The trained members and their losses.

    Raises:
        ValueError: for arguments out of range or a layer that cannot be initialized anew.
        RuntimeError: if the loss is not finite.
    """
    require_positive(members=members, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate)
    network = BayesianNetwork(model, x, y, prior_precision, nll, device)
    parameters, _ = stack_module_state([initialized(network.module, derived_seed(seed, 1, m)) for m in range(members)])
    parameters = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=learning_rate)
    orders = [torch.Generator().manual_seed(derived_seed(seed, 2, m)) for m in range(members)]
    n = len(network.x)

    def loss(w: States, inputs: Tensor, targets: Tensor) -> Tensor:
        return network.nll(w, inputs, targets) / len(inputs) + network.penalty(w) / n

    step = vmap(grad_and_value(loss), randomness="error")
    curve = torch.zeros(epochs, members, dtype=torch.float64)
    for epoch in range(epochs):
        order = torch.stack([torch.randperm(n, generator=g) for g in orders]).to(network.device)
        running = torch.zeros(members, device=network.device, dtype=torch.float64)
        for batch in order.split(batch_size, dim=1):
            gradients, losses = step(parameters, network.x[batch], network.y[batch])
            for name, tensor in parameters.items():
                tensor.grad = gradients[name]
            optimizer.step()
            running += losses.detach().double() * batch.shape[1] / n
        curve[epoch] = running.cpu()
        _check_finite(curve[epoch], "loss", epoch, learning_rate)
        if progress is not None:
            progress({"done": epoch + 1, "total": epochs, "loss": float(curve[epoch].mean())})
    return Ensemble(network.complete({name: tensor.detach() for name, tensor in parameters.items()}), curve)


def mean_field_vi(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int = 50,
    batch_size: int = 100,
    learning_rate: float = 1e-3,
    initial_std: float = 0.05,
    prior_precision: float = 1.0,
    nll: NLL = categorical_nll,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> MeanFieldFit:
    """Fits a Gaussian with independent parameters by the full evidence lower bound, with Adam.

    The bound is ``-N / B * nll(batch) - KL(q || prior)`` with one reparameterized draw of the weights for each batch
    of ``B``, and one closed-form KL of the whole network, untempered. The standard deviation is ``softplus(rho)``.

    Args:
        model: the architecture; every layer with parameters needs ``reset_parameters``, which gives the first mean.
        x: all inputs ``(N, ...)``.
        y: all targets ``(N, ...)``.
        epochs: passes over the data.
        batch_size: points in a batch; the last batch of an epoch may be smaller.
        learning_rate: Adam's learning rate.
        initial_std: standard deviation of every parameter at the start.
        prior_precision: inverse variance of the prior of every parameter.
        nll: summed negative log-likelihood of ``(outputs, targets)`` in nats.
        seed: seed of the initialization, the order of the data and the draws.
        device: where the fit runs and stays.
        progress: receives a dict with ``done``, ``total`` and ``elbo`` after each epoch.

    Returns:
        Mean, standard deviation, and the bound's curve.

    Raises:
        ValueError: for arguments out of range or a layer that cannot be initialized anew.
        RuntimeError: if the bound is not finite.
    """
    require_positive(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, initial_std=initial_std)
    network = BayesianNetwork(model, x, y, prior_precision, nll, device)
    start = initialized(network.module, derived_seed(seed, 1, 0))
    mean = {name: p.detach().clone().requires_grad_() for name, p in start.named_parameters()}
    rho = {name: torch.full_like(p, math.log(math.expm1(initial_std))).requires_grad_() for name, p in mean.items()}
    optimizer = torch.optim.Adam([*mean.values(), *rho.values()], lr=learning_rate)
    order = torch.Generator().manual_seed(derived_seed(seed, 2, 0))
    noise = torch.Generator(network.device).manual_seed(derived_seed(seed, 3, 0))
    n = len(network.x)
    curve = torch.zeros(epochs, dtype=torch.float64)
    for epoch in range(epochs):
        running = torch.zeros((), device=network.device, dtype=torch.float64)
        for batch in torch.randperm(n, generator=order).to(network.device).split(batch_size):
            std = {name: F.softplus(r) for name, r in rho.items()}
            draw = gaussian_draw(mean, std, noise)
            kl = gaussian_kl(mean, std, prior_precision)
            negative_elbo = network.nll(draw, network.x[batch], network.y[batch]) * (n / len(batch)) + kl
            optimizer.zero_grad()
            negative_elbo.backward()
            optimizer.step()
            running -= negative_elbo.detach().double() * len(batch) / n
        curve[epoch] = running.cpu()
        _check_finite(curve[epoch], "evidence lower bound", epoch, learning_rate)
        if progress is not None:
            progress({"done": epoch + 1, "total": epochs, "elbo": float(curve[epoch])})
    means = {name: m.detach() for name, m in mean.items()}
    stds = {name: F.softplus(r.detach()) for name, r in rho.items()}
    return MeanFieldFit(means, stds, curve)


def effective_sample_size(states: Mapping[str, Tensor], log_likelihood: Tensor) -> dict[str, float]:
    """Effective sample sizes of one chain, as Pyro estimates them (Geyer's initial monotone sequence).

    As in Stan, no size exceeds ``S * log10(S)`` (or ``S``, if larger): in short antithetic chains the estimated
    autocorrelation time may be zero or negative.

    Args:
        states: stacked parameters ``(S, ...)``; each coordinate is one quantity.
        log_likelihood: ``(S,)``.

    Returns:
        ``parameters, median``, ``parameters, minimum`` and ``log-likelihood``; NaN for fewer than four samples, and
        coordinates that never moved are left out of the parameters'.
    """
    names = ("parameters, median", "parameters, minimum", "log-likelihood")
    if len(log_likelihood) < 4:
        return dict.fromkeys(names, math.nan)
    of = estimated_sample_size
    sizes = torch.cat([of(part) for t in states.values() for part in t.flatten(1).split(8192, dim=1)])
    sizes = sizes[sizes.isfinite()]
    if len(sizes) == 0:
        return dict.fromkeys(names, math.nan)
    values = (sizes.median(), sizes.min(), of(log_likelihood))
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def _join(chunks: Sequence[HMCChunk], network: BayesianNetwork) -> HMCChain:
    kept = [c for c in chunks if len(c.log_likelihood)]
    states = {name: torch.cat([c.states[name] for c in kept]) for name in kept[0].states}
    log_likelihood = torch.cat([c.log_likelihood for c in kept])
    rate = sum(c.acceptance_rate * len(c.log_likelihood) for c in kept) / len(log_likelihood)
    if not any(c.acceptance_rate for c in chunks):
        raise RuntimeError(
            "no proposal was accepted: the leapfrog step is too long. Divide step_size by a power of two until the "
            "acceptance rate is about 0.8"
        )
    parameters = {name: states[name] for name in network.parameters}
    return HMCChain(states, rate, effective_sample_size(parameters, log_likelihood), log_likelihood)


def _check_resume(chunks: Sequence[HMCChunk], burn_in: int, total: int) -> None:
    if not chunks:
        return
    done, kept = chunks[-1].transitions, sum(len(c.log_likelihood) for c in chunks)
    if kept != max(0, done - burn_in) or done > total:
        raise ValueError(
            f"the chunks to resume from end after {done} transitions and hold {kept} samples; a chain of {total} "
            f"with a burn-in of {burn_in} does not pass there. Pass all of its chunks, and its own arguments"
        )


def _stack(states: Sequence[States], like: States) -> States:
    if not states:
        return {name: t.new_empty((0, *t.shape)) for name, t in like.items()}
    return {name: torch.stack([s[name] for s in states]) for name in like}


def _check_finite(value: Tensor, what: str, epoch: int, learning_rate: float) -> None:
    if not torch.isfinite(value).all():
        raise RuntimeError(
            f"the {what} is not finite in epoch {epoch + 1}: look for NaN in the data, or lower the learning rate "
            f"({learning_rate:g})"
        )
