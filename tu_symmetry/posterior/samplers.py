"""Networks to begin with: Hamiltonian Monte Carlo, deep ensembles and mean-field variational inference.

All three take a module as the architecture, data that are resident on one device, and full states to start from; they
return states and leave the module and the global random state as they were. The model is a likelihood with an
independent normal prior on every weight,

    U(theta) = sum_i loss(f(x_i; theta), y_i) + (precision / 2) ||theta||^2        (nats, up to a constant),

where ``loss`` is a negative log-likelihood, by default the cross-entropy. Hamiltonian Monte Carlo samples from
``exp(-U)``, a member of the ensemble minimizes ``U / N`` over batches, and variational inference minimizes
``E_q[sum loss] + beta KL(q || prior)``.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pyro.infer.mcmc import HMC
from pyro.ops.stats import effective_sample_size
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from tu_symmetry.posterior.compact import CompactPosterior
from tu_symmetry.posterior.samples import SampleStore, State, stack_states, unstack_states

Loss = Callable[[Tensor, Tensor], Tensor]
Progress = Callable[[dict[str, Any]], None]

_TRACED_WEIGHTS = 1000


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits ``[B, C]``, summed over the batch, in nats."""
    return F.cross_entropy(outputs, targets, reduction="sum")


def initial_states(make_model: Callable[[], nn.Module], count: int, seed: int) -> State:
    """Freshly initialized networks as a stack ``[count, ...]``.

    Args:
        make_model: builds a module with random weights.
        count: how many.
        seed: each network gets its own stream; the global random state is left as it was.
    """
    states = []
    for k in range(count):
        with _seeded(torch.device("cpu"), seed, k):
            states.append({name: t.detach().clone() for name, t in make_model().state_dict().items()})
    return stack_states(states)


@dataclass(frozen=True)
class HMCResult:
    """What a run of Hamiltonian Monte Carlo says about its chains.

    Attributes:
        samples: the samples, a store or (without one) a list of states, chain after chain.
        acceptance_rate: share of accepted proposals among the kept samples, for each chain.
        potential: ``U`` of every sample, for each chain, in nats.
        effective_sample_size: over all chains, of ``potential``, of the ``squared norm`` of the weights, and median and
            minimum over a random thousand of the weights (``weights, median`` and ``weights, minimum``).
        divergences: proposals of this process after the warmup whose energy grew by over 1000 nats, over all chains.
    """

    samples: SampleStore | list[State]
    acceptance_rate: list[float]
    potential: list[list[float]]
    effective_sample_size: dict[str, float]
    divergences: int


def hmc_samples(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    num_samples: int,
    step_size: float,
    num_steps: int,
    warmup: int = 0,
    prior_precision: float = 1.0,
    init: Mapping[str, Tensor] | None = None,
    chains: int = 1,
    seed: int = 0,
    loss: Loss = cross_entropy,
    adapt_step_size: bool = False,
    store: SampleStore | None = None,
    shard_size: int = 10,
    progress: Progress | None = None,
) -> HMCResult:
    """Full-batch Hamiltonian Monte Carlo with Pyro's kernel (unit mass matrix).

    A run with a store resumes: it goes on from the last sample of each chain that the store holds, until there are
    ``num_samples``. Every transition draws its randomness from (seed, chain, step) alone, and depends on nothing but
    the sample before it, so on a device with deterministic arithmetic a resumed run is bit-identical to an
    uninterrupted one. Exceptions: an interruption during the warmup repeats the warmup (with the same outcome), at
    most ``shard_size - 1`` samples are drawn again, and with ``adapt_step_size`` a store cannot be resumed, since the
    adapted step is not kept.

    Args:
        model: the architecture, evaluated as in ``eval`` mode; its buffers are constants and part of every sample.
        x: all inputs ``[N, ...]``, on the device of the computation.
        y: all targets ``[N, ...]``.
        num_samples: samples to keep of each chain, all of them consecutive.
        step_size: of the leapfrog integrator.
        num_steps: leapfrog steps of each proposal.
        warmup: transitions that are discarded first.
        prior_precision: of the normal prior.
        init: state to start from (a stack ``[chains, ...]`` for several chains). Default: the model's weights.
        chains: number of chains, which run one after the other.
        seed: of the randomness.
        loss: negative log-likelihood, summed over the batch.
        adapt_step_size: adapt the step during the warmup to an acceptance of 0.8 (dual averaging).
        store: where to write the samples; without one they are kept in memory.
        shard_size: samples in one file of the store.
        progress: called after each transition with ``chain``, ``done``, ``total``, ``warmup``, ``acceptance``,
            ``potential`` and ``step_size``.

    Returns:
        The samples, acceptance rates and effective sample sizes.

    Raises:
        ValueError: data or numbers that make no sense, a start where ``U`` is not finite, a store of another run.
    """
    if num_samples < 1 or num_steps < 1 or warmup < 0 or step_size <= 0 or shard_size < 1 or chains < 1:
        raise ValueError(
            "num_samples, num_steps, shard_size and chains must be at least 1, warmup not negative and step_size "
            f"positive; got {num_samples}, {num_steps}, {shard_size}, {chains}, {warmup} and {step_size}"
        )
    _check_data(x, y, prior_precision)
    starts = _starts(model, init, chains)
    there = _resumable(store, chains, num_samples)
    if adapt_step_size and (any(there) or not warmup):
        raise ValueError(
            "adapt_step_size needs a warmup to adapt in, and a new store: the step that the earlier run adapted to is "
            "not kept; give the step_size that it reported, with adapt_step_size=False"
        )
    network = _Network(model, x.device)

    def potential(z: Mapping[str, Tensor]) -> Tensor:
        theta = z["theta"]
        return loss(network(theta, x), y) + 0.5 * prior_precision * theta.square().sum()

    memory: list[State] = []
    divergences = 0
    for chain in range(chains):
        done = there[chain]
        if done == num_samples:
            continue
        start, discard = starts[chain], warmup
        if store is not None and done:
            start, discard = _last_of(store, chain), 0
        theta = network.flatten(start)
        if not math.isfinite(float(potential({"theta": theta}))):
            raise ValueError(f"U is not finite where chain {chain} starts: start from finite, moderate weights")
        # Half a step more, since the kernel truncates trajectory_length / step_size to an integer.
        kernel = HMC(
            potential_fn=potential,
            step_size=step_size,
            trajectory_length=step_size * (num_steps + 0.5),
            adapt_step_size=adapt_step_size,
            adapt_mass_matrix=False,
        )
        kernel.initial_params = z = {"theta": theta}
        with _seeded(x.device, seed, chain):
            kernel.setup(discard)
        pending: list[State] = []
        accepted = 0
        first = warmup + done if not discard else 0
        for step in range(first, warmup + num_samples):
            before = z["theta"]
            with _seeded(x.device, seed, chain, step):
                z = kernel.sample(z)
            moved = z["theta"] is not before
            accepted += moved
            if step >= warmup:
                pending.append(network.state(z["theta"]))
            if store is not None and pending and (len(pending) == shard_size or step == warmup + num_samples - 1):
                steps = range(step - warmup - len(pending) + 1, step - warmup + 1)
                store.append([_on_cpu(s) for s in pending], chain=chain, step=list(steps))
                pending = []
            if progress is not None:
                progress(
                    {
                        "chain": chain,
                        "done": step + 1,
                        "total": warmup + num_samples,
                        "warmup": step < warmup,
                        "acceptance": accepted / (step - first + 1),
                        "potential": float(kernel._potential_energy_last),
                        "step_size": kernel.step_size,
                    }
                )
        memory += pending
        divergences += len(kernel.diagnostics()["divergences"])
    samples = memory if store is None else store
    numbers = [c for c in range(chains) for _ in range(num_samples)] if store is None else store.chains
    return _diagnose(samples, numbers, network, potential, divergences)


def deep_ensemble(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    init: Mapping[str, Tensor],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float = 1e-3,
    prior_precision: float = 1.0,
    seed: int = 0,
    loss: Loss = cross_entropy,
    progress: Progress | None = None,
) -> State:
    """Train the members of an ensemble at once, each to a maximum of the posterior, with Adam.

    Every member has its own start and its own order of the data; the step of one does not depend on the others.

    Args:
        model: the architecture; normalization layers train as usual, each member with its own running statistics.
        x: all inputs ``[N, ...]``, on the device of the computation.
        y: all targets ``[N, ...]``.
        init: stack ``[M, ...]`` of states to start from, see :func:`initial_states`.
        epochs: passes over the data.
        batch_size: the last batch of an epoch may be smaller.
        learning_rate: of Adam.
        prior_precision: of the normal prior; 0 for none.
        seed: of the orders of the data.
        loss: negative log-likelihood, summed over the batch.
        progress: called after each epoch with ``done``, ``total`` and ``loss``, the members' mean of ``U / N``.

    Returns:
        Stack ``[M, ...]`` of the trained states.

    Raises:
        ValueError: data or numbers that make no sense, or a run that diverges.
    """
    _check_data(x, y, prior_precision)
    _check_training(epochs, batch_size, learning_rate)
    count = len(next(iter(init.values())))
    _starts(model, init, count)
    network = _Network(model, x.device, train=True)
    parameters = {n: init[n].detach().to(x.device, copy=True) for n in network.shapes}
    buffers = {n: init[n].detach().to(x.device, copy=True) for n in network.buffers}
    total = len(x)

    def objective(weights: State, moving: State, inputs: Tensor, targets: Tensor) -> tuple[Tensor, State]:
        moving = {name: t.clone() for name, t in moving.items()}
        outputs = functional_call(network.template, {**weights, **moving}, (inputs,))
        norm = sum(w.square().sum() for w in weights.values())
        return loss(outputs, targets) / len(inputs) + 0.5 * prior_precision / total * norm, moving

    step = vmap(grad_and_value(objective, has_aux=True), randomness="different")
    optimizer = torch.optim.Adam(list(parameters.values()), lr=learning_rate)
    generator = torch.Generator().manual_seed(_derive(seed, 0))
    with _seeded(x.device, seed, 1):
        for epoch in range(epochs):
            orders = torch.stack([torch.randperm(total, generator=generator) for _ in range(count)]).to(x.device)
            running = torch.zeros((), device=x.device)
            for batch in orders.split(batch_size, dim=1):
                gradients, (values, buffers) = step(parameters, buffers, x[batch], y[batch])
                for name, weight in parameters.items():
                    weight.grad = gradients[name]
                optimizer.step()
                running += values.mean() * batch.shape[1] / total
            _report(progress, epoch, epochs, "loss", float(running))
    trained = {n: t.detach() for n, t in parameters.items()} | buffers
    return {name: trained[network.source[name]] for name in init}


@dataclass(frozen=True)
class VIResult:
    """A fitted mean-field posterior.

    Attributes:
        posterior: ``N(mean, diag sigma^2)`` over the weights.
        elbo: mean estimate of the evidence lower bound over each epoch, in nats, of the whole data set.
    """

    posterior: CompactPosterior
    elbo: list[float]


def mean_field_vi(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float = 1e-3,
    initial_std: float = 0.05,
    prior_precision: float = 1.0,
    beta: float = 1.0,
    init: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    loss: Loss = cross_entropy,
    progress: Progress | None = None,
) -> VIResult:
    """Mean-field variational inference: maximize the evidence lower bound over ``q = N(mean, diag sigma^2)``.

        ELBO = -E_q[ sum_i loss_i ] - beta KL(q || prior),   KL = sum_j (tau (s_j^2 + m_j^2) - 1 - log(tau s_j^2)) / 2

    with the sum over all data (batches are scaled up) and the whole divergence once. One reparameterized draw of all
    weights for each batch; ``sigma = softplus(rho)``; Adam on ``-ELBO / N`` (Bayes by Backprop, arXiv 1505.05424).

    Args:
        model: the architecture.
        x: all inputs ``[N, ...]``, on the device of the computation.
        y: all targets ``[N, ...]``.
        epochs: passes over the data.
        batch_size: the last batch of an epoch may be smaller.
        learning_rate: of Adam.
        initial_std: of every weight.
        prior_precision: tau, of the normal prior.
        beta: weight of the divergence; the bound holds for 1.
        init: state with the initial means. Default: the model's weights.
        seed: of the draws and of the order of the data.
        loss: negative log-likelihood, summed over the batch.
        progress: called after each epoch with ``done``, ``total`` and ``elbo``.

    Returns:
        The posterior and the curve of the bound.

    Raises:
        ValueError: data or numbers that make no sense, or a run that diverges.
    """
    _check_data(x, y, prior_precision)
    _check_training(epochs, batch_size, learning_rate)
    if initial_std <= 0 or prior_precision <= 0 or beta < 0:
        raise ValueError(
            f"initial_std and prior_precision must be positive and beta not negative, got {initial_std}, "
            f"{prior_precision}, {beta}"
        )
    network = _Network(model, x.device, train=True)
    (start,) = _starts(model, init, 1)
    network.buffers = {name: start[name].detach().to(x.device, copy=True) for name in network.buffers}
    mean = network.flatten(start).requires_grad_()
    rho = torch.full_like(mean, math.log(math.expm1(initial_std))).requires_grad_()
    optimizer = torch.optim.Adam([mean, rho], lr=learning_rate)
    generator = torch.Generator(x.device).manual_seed(_derive(seed, 0))
    orders = torch.Generator().manual_seed(_derive(seed, 1))
    total = len(x)
    curve: list[float] = []
    with _seeded(x.device, seed, 2):
        for epoch in range(epochs):
            running = torch.zeros((), device=x.device)
            for batch in torch.randperm(total, generator=orders).to(x.device).split(batch_size):
                std = F.softplus(rho)
                noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
                likelihood = loss(network(mean + std * noise, x[batch]), y[batch]) * (total / len(batch))
                bound = -likelihood - beta * kl_to_normal(mean, std, prior_precision)
                optimizer.zero_grad()
                (-bound / total).backward()
                optimizer.step()
                running += bound.detach() * len(batch) / total
            curve.append(float(running))
            _report(progress, epoch, epochs, "elbo", curve[-1])
    means, stds = network.state(mean.detach()), network.state(F.softplus(rho).detach())
    weights = [name for name in means if network.source[name] in network.shapes]
    aliases: dict[str, list[str]] = {}
    for name in weights:
        aliases.setdefault(network.source[name], []).append(name)
    posterior = CompactPosterior(
        means,
        {name: stds[name] for name in weights},
        aliases={name: names for name, names in aliases.items() if len(names) > 1},
        metadata={"method": "mean_field_vi", "architecture": type(model).__name__, "seed": seed, "beta": beta},
    )
    return VIResult(posterior, curve)


def kl_to_normal(mean: Tensor, std: Tensor, precision: float) -> Tensor:
    """``KL(N(mean, diag std^2) || N(0, 1 / precision))`` in nats."""
    return 0.5 * (precision * (std.square() + mean.square()) - 1 - 2 * std.log() - math.log(precision)).sum()


class _Network:
    """A module as a function of one flat vector of weights; the module that was given is left alone."""

    def __init__(self, model: nn.Module, device: torch.device, *, train: bool = False) -> None:
        self.template = copy.deepcopy(model).to(device).train(train).requires_grad_(False)
        names = {id(t): name for name, t in self.template.named_parameters()}
        self.shapes = {name: t.shape for name, t in self.template.named_parameters()}
        held = self.template.state_dict(keep_vars=True)
        self.source = {name: names.get(id(t), name) for name, t in held.items()}
        self.buffers = {name: t.detach() for name, t in held.items() if id(t) not in names}
        if not self.shapes:
            raise ValueError(f"{type(model).__name__} has no parameters")

    def flatten(self, state: Mapping[str, Tensor]) -> Tensor:
        device = next(self.template.parameters()).device
        return torch.cat([state[name].detach().flatten() for name in self.shapes]).to(device)

    def unflatten(self, theta: Tensor) -> State:
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        return {n: part.view(shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def state(self, theta: Tensor) -> State:
        """A full state dict, a copy."""
        weights = self.unflatten(theta) | self.buffers
        return {name: weights[source].detach().clone() for name, source in self.source.items()}

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        return functional_call(self.template, self.unflatten(theta) | self.buffers, (x,))


def _diagnose(
    samples: SampleStore | list[State],
    numbers: list[int],
    network: _Network,
    potential: Callable[[Mapping[str, Tensor]], Tensor],
    divergences: int,
) -> HMCResult:
    """Acceptance and effective sample sizes from the samples alone, so that a resumed run reports the whole chain."""
    traces: dict[int, list[Tensor]] = {}
    energies: dict[int, list[float]] = {}
    accepted: dict[int, int] = {}
    last: dict[int, Tensor] = {}
    chosen: Tensor | None = None
    for number, state in zip(numbers, samples, strict=True):
        theta = network.flatten(state)
        if chosen is None:
            order = torch.randperm(len(theta), generator=torch.Generator().manual_seed(0))
            chosen = order[:_TRACED_WEIGHTS].to(theta.device)
        same = number in last and torch.equal(theta, last[number])
        if number in last:
            accepted[number] += not same
        with torch.no_grad():
            energy = energies[number][-1] if same else float(potential({"theta": theta}))
        energies.setdefault(number, []).append(energy)
        accepted.setdefault(number, 0)
        trace = torch.cat([theta.double().square().sum().view(1), theta[chosen].double()]).cpu()
        traces.setdefault(number, []).append(trace)
        last[number] = theta
    rates = [accepted[c] / max(len(traces[c]) - 1, 1) for c in sorted(traces)]
    if min(rates) < 0.05:
        warnings.warn(
            f"acceptance rates {rates}: the chain hardly moves; take a smaller step_size, or start from better weights",
            stacklevel=3,
        )
    length = min(len(t) for t in traces.values())
    sizes = {"potential": math.nan, "squared norm": math.nan, "weights, median": math.nan, "weights, minimum": math.nan}
    if length >= 4:
        stacked = torch.stack([torch.stack(traces[c][:length]) for c in sorted(traces)])
        energy_trace = torch.tensor([energies[c][:length] for c in sorted(traces)], dtype=torch.float64)
        found = effective_sample_size(
            torch.cat([energy_trace.unsqueeze(-1), stacked], dim=-1), chain_dim=0, sample_dim=1
        )
        sizes = {
            "potential": float(found[0]),
            "squared norm": float(found[1]),
            "weights, median": float(found[2:].median()),
            "weights, minimum": float(found[2:].min()),
        }
    return HMCResult(samples, rates, [energies[c] for c in sorted(energies)], sizes, divergences)


def _resumable(store: SampleStore | None, chains: int, num_samples: int) -> list[int]:
    """Number of samples that the store holds of each chain."""
    counts = [0] * chains
    for record in store.records if store is not None else []:
        if record.chain >= chains or record.step != counts[record.chain]:
            raise ValueError(
                f"{store} holds sample (chain {record.chain}, step {record.step}), which is not what a run of "
                f"{chains} chains writes there: resume with the same arguments, or give another store"
            )
        counts[record.chain] += 1
    if max(counts) > num_samples:
        raise ValueError(f"{store} holds {max(counts)} samples of a chain already, more than num_samples={num_samples}")
    return counts


def _last_of(store: SampleStore, chain: int) -> State:
    index = max(i for i, record in enumerate(store.records) if record.chain == chain)
    state: State = store[index]
    return state


def _starts(model: nn.Module, init: Mapping[str, Tensor] | None, count: int) -> list[State]:
    """``count`` full states of the model's architecture."""
    expected = model.state_dict()
    if init is None:
        if count > 1:
            raise ValueError(f"{count} chains need a stack of {count} states to start from: init=initial_states(...)")
        return [dict(expected)]
    single = init.keys() == expected.keys() and all(init[n].shape == t.shape for n, t in expected.items())
    states = [dict(init)] if single else unstack_states(init)
    wrong = next((n for n in sorted(expected.keys() ^ states[0].keys())), None)
    wrong = wrong or next((n for n, t in expected.items() if states[0][n].shape != t.shape), None)
    if wrong is not None:
        raise ValueError(f"init is of another architecture than {type(model).__name__}: {wrong!r} differs")
    if len(states) != count:
        raise ValueError(f"init holds {len(states)} states, {count} are needed")
    return states


def _check_data(x: Tensor, y: Tensor, prior_precision: float) -> None:
    if len(x) == 0 or len(x) != len(y):
        raise ValueError(f"{len(x)} inputs and {len(y)} targets: there must be one target for each input, and some")
    if x.device != y.device:
        raise ValueError(f"inputs are on {x.device}, targets on {y.device}; put both where the computation shall be")
    if x.is_floating_point() and not torch.isfinite(x).all():
        raise ValueError("the inputs hold NaN or infinite values")
    if not (math.isfinite(prior_precision) and prior_precision >= 0):
        raise ValueError(f"prior_precision must be finite and not negative, got {prior_precision}")


def _check_training(epochs: int, batch_size: int, learning_rate: float) -> None:
    if epochs < 1 or batch_size < 1 or learning_rate <= 0:
        raise ValueError(
            f"epochs and batch_size must be at least 1 and learning_rate positive, got {epochs}, {batch_size}, "
            f"{learning_rate}"
        )


def _report(progress: Progress | None, epoch: int, epochs: int, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value} in epoch {epoch}: the run diverges; take a smaller learning rate")
    if progress is not None:
        progress({"done": epoch + 1, "total": epochs, name: value})


def _derive(*entropy: int) -> int:
    """A seed from several numbers, as good as independent of the seeds from others."""
    return int(np.random.SeedSequence([e % 2**64 for e in entropy]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def _seeded(device: torch.device, *entropy: int) -> Iterator[None]:
    """Global random state seeded inside, for code that knows no generators, and as before outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_derive(*entropy))
        yield


def _on_cpu(state: State) -> State:
    return {name: t.cpu() for name, t in state.items()}
