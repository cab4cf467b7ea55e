"""Draws of whole networks from what other libraries call a posterior: one stack of ordinary states for each method.

A metric of posteriors compares states of one architecture. What a method of TorchUncertainty holds is something else:
masks that are drawn in the forward pass, layers of means and standard deviations, moments of a trajectory, a list of
networks. :func:`network_draws` makes states of the plain architecture of any of them. Objects are known by what they
have, not by their class, so that the library does not have to be installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.evaluation import evaluating
from tu_symmetry.laplace.function_posterior import WeightSamples
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.posterior.network import derived_seed, seeded
from tu_symmetry.states import State, evenly, stack_states

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_READERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Draws(NamedTuple):
    """States of the plain architecture, and the method that they come from.

    Attributes:
        method: ``deep_ensemble``, ``mc_dropout``, ``swag``, ``variational``, ``checkpoint_ensemble`` or ``laplace``.
        states: a stack ``(S, ...)``.
        members: for each state the number of the run or checkpoint that it comes from, ``(S,)``; all 0 for one run.
    """

    method: str
    states: State
    members: list[int]


def network_draws(
    source: Any, count: int, *, inputs: Tensor | None = None, seed: int = 0, scale: float | None = None
) -> Draws:
    """Draw networks from a method's object.

    | source | what is drawn |
    |---|---|
    | ``deep_ensembles`` (``core_models``) | the members, in equal shares |
    | ``CheckpointCollector`` (``saved_models``) | its checkpoints, evenly spaced |
    | ``mc_dropout`` (``filtered_modules``), or a plain network with dropout | :func:`dropout_draws` |
    | ``SWAG`` (``swag_stats``) | :func:`swag_draws` |
    | Bayesian layers, also within ``StochasticModel`` | :func:`bayesian_draws` |
    | :class:`~tu_symmetry.LinearizedLaplace` | :func:`laplace_draws` |

    Args:
        source: the object, after training.
        count: number of states; for ensembles and checkpoints at most as many as there are.
        inputs: a few inputs, for dropout alone.
        seed: seed of the draws; the global random state stays as it is.
        scale: factor of SWAG's covariance; its own by default.

    Raises:
        ValueError: an object that is none of these, that has not been fitted, or holds too few networks.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if isinstance(source, LinearizedLaplace):
        return Draws("laplace", laplace_draws(source, count, seed=seed), [0] * count)
    if not isinstance(source, nn.Module):
        raise ValueError(f"nothing can be drawn from a {type(source).__name__}: {_KNOWN}")
    held: Any = source
    if hasattr(source, "core_models"):
        return Draws("deep_ensemble", *_chosen(list(held.core_models), count, "members"))
    if hasattr(source, "saved_models"):
        last = [held.core_model] if getattr(source, "use_final_model", True) else []
        return Draws("checkpoint_ensemble", *_chosen([*held.saved_models, *last], count, "checkpoints"))
    if hasattr(source, "swag_stats"):
        return Draws("swag", swag_draws(source, count, seed=seed, scale=scale), [0] * count)
    core: Any = getattr(source, "core_model", source)
    if any(_is_bayesian(m) for m in core.modules()):
        return Draws("variational", bayesian_draws(core, count, seed=seed), [0] * count)
    if any(_is_dropout(m) for m in core.modules()):
        if inputs is None:
            raise ValueError("dropout needs a few inputs, to see which layers read what is dropped: pass inputs=")
        return Draws("mc_dropout", dropout_draws(core, inputs, count, seed=seed), [0] * count)
    raise ValueError(f"nothing can be drawn from this {type(source).__name__}, a single fixed network: {_KNOWN}")


def require_drawable(source: Any, count: int, *, inputs: Tensor | None = None) -> None:
    """Refuse before a training what :func:`network_draws` would refuse after it.

    What the training itself fills (SWAG's moments, checkpoints, a Laplace approximation) is not looked at.

    Args:
        source: the object, before training.
        count: number of states that will be wanted.
        inputs: a few inputs, for dropout alone.

    Raises:
        ValueError: a network in which nothing is random, dropout whose masks are no weights, an ensemble of fewer
            members than are wanted.
    """
    if not isinstance(source, nn.Module):
        return
    if hasattr(source, "core_models"):
        _require_enough(len(source.core_models), count, "members")  # type: ignore[arg-type]
    elif not (hasattr(source, "saved_models") or hasattr(source, "swag_stats")):
        core: Any = getattr(source, "core_model", source)
        if not any(_is_bayesian(m) for m in core.modules()):
            network_draws(source, 1, inputs=inputs)


_KNOWN = (
    "known are deep ensembles, checkpoint collectors, SWAG, networks with dropout or with Bayesian layers, and Laplace "
    "approximations; for the snapshots of a sampler use PosteriorSnapshots"
)


def dropout_draws(model: nn.Module, inputs: Tensor, count: int, *, seed: int = 0) -> State:
    """Networks without dropout that compute what a network with fixed dropout masks computes.

    A mask on the units of a layer is a factor 0 or ``1 / (1 - p)`` on what the next layer reads of them: for a hidden
    layer ``W2 (m * relu(W1 x)) = (W2 diag m) relu(W1 x)``. The layer that reads a dropout's output is the next linear
    layer or convolution that runs. The first draw is compared with the network under the same masks, in float64, so
    that a network in which this is not so (branches, a layer that reads twice, masks of single pixels) is refused.

    Args:
        model: a network with ``nn.Dropout`` on features ``(B, F)``, or ``nn.Dropout1d``, ``2d``, ``3d``.
        inputs: a few inputs.
        count: number of draws.
        seed: seed of the masks.

    Raises:
        ValueError: no dropout, dropout of single positions, or masks that no weights express.
    """
    double = copy.deepcopy(model).double()
    x = inputs[:2].detach().double().to(next(double.parameters()).device)
    calls: list[tuple[str, nn.Module, int]] = []  # what runs, in order; width of what is dropped

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, _: Any, output: Tensor) -> None:
            calls.append((name, module, output.shape[1] if _is_dropout(module) else 0))
            if _is_dropout(module) and not (isinstance(module, _CHANNELS) or output.ndim == 2):
                raise ValueError(
                    f"{name} ({type(module).__name__}) drops single entries of {output.ndim - 1}-dimensional features, "
                    "which no weights express: use nn.Dropout2d (1d, 3d), which drops whole channels"
                )

        return hook

    watched = [(n, m) for n, m in double.named_modules() if _is_dropout(m) or isinstance(m, _READERS)]
    with evaluating(double):
        handles = [m.register_forward_hook(note(n)) for n, m in watched]
        try:
            double(x)
        finally:
            _remove(handles)
    drops = [(i, module, width) for i, (_, module, width) in enumerate(calls) if width]
    if not drops:
        raise ValueError("the network has no nn.Dropout with p > 0 that runs: nothing is random in it")
    readers = []
    for i, module, width in drops:
        after = next(((n, m) for n, m, w in calls[i + 1 :] if not w), None)
        entries = after[1].weight.shape[1] if after is not None else 0  # type: ignore[index]
        if after is None or getattr(after[1], "groups", 1) != 1 or entries % width:
            raise ValueError(
                f"what {calls[i][0]} ({type(module).__name__}) drops is not read by one linear layer or ungrouped "
                "convolution behind it, so that its masks are no weights"
            )
        readers.append((f"{after[0]}.weight" if after[0] else "weight", entries // width))
    generator = torch.Generator().manual_seed(derived_seed(seed, 11, 0))
    masks = []
    for _, module, width in drops:
        keep = 1 - float(module.p)  # type: ignore[arg-type]
        masks.append((torch.rand(count, width, generator=generator, device="cpu") < keep).double() / keep)
    state = {n: t.detach() for n, t in model.state_dict().items()}
    factors: dict[str, Tensor] = {}
    for (name, copies), mask in zip(readers, masks, strict=True):
        wide = mask.repeat_interleave(copies, dim=1)
        factors[name] = factors[name] * wide if name in factors else wide
    stack = {}
    for name, t in state.items():
        stack[name] = t.expand(count, *t.shape).clone()
        if name in factors:
            own = factors[name].to(t)
            stack[name] *= own.view(count, 1, -1, *(1,) * (t.ndim - 2))
    _compare(double, x, {n: t[0] for n, t in stack.items()}, [m[0] for m in masks])
    return stack


def _compare(model: nn.Module, x: Tensor, drawn: State, masks: Sequence[Tensor]) -> None:
    waiting = list(masks)

    def apply(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        mask = waiting.pop(0).to(output)
        return output * mask.view(1, -1, *(1,) * (output.ndim - 2))

    with evaluating(model):
        handles = [m.register_forward_hook(apply) for m in model.modules() if _is_dropout(m)]
        try:
            masked = model(x)
        finally:
            _remove(handles)
        weights = {n: t.double() if t.is_floating_point() else t for n, t in drawn.items()}
        found = functional_call(model, weights, (x,), tie_weights=False)
    difference = float((masked - found).abs().max() / masked.abs().max().clamp_min(1e-30))
    if not difference < 1e-5:  # the weights were rounded to their own precision
        raise ValueError(
            f"the weights that dropout's masks were put into compute something else (relative difference "
            f"{difference:.2g}): what is dropped is read in another place than the next layer, as in a residual branch"
        )


def bayesian_draws(model: nn.Module, count: int, *, seed: int = 0) -> State:
    """Draws from a network with Bayesian layers (``sample() -> weight, bias``), under the plain layers' names."""
    layers = {name: m for name, m in model.named_modules() if _is_bayesian(m)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no Bayesian layer to draw from")
    inside = tuple(f"{name}." if name else "" for name in layers)
    fixed = {n: t.detach() for n, t in model.state_dict().items() if not n.startswith(inside)}
    states = []
    with seeded(derived_seed(seed, 12, 0), next(model.parameters()).device), torch.no_grad():
        for _ in range(count):
            state = {}
            for name, layer in layers.items():
                weight, bias = layer.sample()
                stem = f"{name}." if name else ""
                state[f"{stem}weight"] = weight.detach().clone()
                if bias is not None:
                    state[f"{stem}bias"] = bias.detach().clone()
            states.append(state | fixed)
    return stack_states(states)


def swag_draws(swag: Any, count: int, *, seed: int = 0, scale: float | None = None) -> State:
    """Draws from TorchUncertainty's ``SWAG``: its mean, variances and, of each tensor by itself, its low-rank part.

    Its covariance is ``scale`` times the sum of both parts; that of the paper (arXiv 1902.02476) is ``scale=0.5``.

    Raises:
        ValueError: fewer than two networks have been averaged, so that there is no variance.
    """
    averaged = int(getattr(swag, "num_avgd_models", 0))
    if averaged < 2:
        raise ValueError(
            f"SWAG has averaged {averaged} networks, which have no variance: TorchUncertainty's routine adds one "
            "whenever a validation starts after cycle_start, so train longer and validate after every cycle "
            "(check_val_every_n_epoch: 1)"
        )
    with seeded(derived_seed(seed, 13, 0), torch.device("cpu")), torch.no_grad():
        drawn = [swag.sample(swag.scale if scale is None else scale) for _ in range(count)]
    return stack_states([{n: t.detach().clone() for n, t in m.state_dict().items()} for m in drawn])


def laplace_draws(laplace: LinearizedLaplace, count: int, *, seed: int = 0) -> State:
    """Weights from a Laplace approximation, centered on the trained weights.

    Weights that it leaves out (all but the last layer of ``last_layer``) stay as trained. The states are weights: a
    network with them is no linearized network.
    """
    tangent = laplace.tangent
    samples = WeightSamples(laplace.posterior, count, seed, tangent.point()[:1])
    vectors = torch.cat(list(samples.chunks())) + tangent.point()
    drawn = [tangent.unflatten(v) for v in vectors]
    return stack_states([{n: t.detach().clone() for n, t in (tangent.state() | d).items()} for d in drawn])


def _chosen(networks: Sequence[nn.Module], count: int, what: str) -> tuple[State, list[int]]:
    _require_enough(len(networks), count, what)
    numbers = evenly(len(networks), count)
    states = [{n: t.detach().cpu().clone() for n, t in networks[k].state_dict().items()} for k in numbers]
    return stack_states(states), numbers


def _require_enough(there: int, count: int, what: str) -> None:
    if count > there:
        raise ValueError(f"there are {there} {what}, {count} states are wanted")


def _is_bayesian(module: nn.Module) -> bool:
    return hasattr(module, "weight_sampler") and callable(getattr(module, "sample", None))


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, (nn.Dropout, *_CHANNELS)) and module.p > 0


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
