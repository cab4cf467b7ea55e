"""Draws of whole networks of the plain architecture from what TorchUncertainty's methods and Laplace hold.

Objects are known by what they have, not by their class, so that the library does not have to be installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.evaluation import evaluating
from tu_symmetry.laplace.linearized import LinearizedLaplace
from tu_symmetry.posterior.network import derived_seed, seeded
from tu_symmetry.states import State, stack_states

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_READERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Draws(NamedTuple):
    """A stack of states, and the method they come from: ``mc_dropout``, ``swag``, ``variational`` or ``laplace``."""

    method: str
    states: State


def network_draws(source: Any, count: int, *, inputs: Tensor | None = None, seed: int = 0) -> Draws:
    """Draw networks from a method's object: SWAG, a network with dropout or Bayesian layers, a Laplace approximation.

    ``inputs`` are a few inputs, for dropout alone. An object that is none of these, or that has not been fitted, is a
    ValueError.
    """
    if isinstance(source, LinearizedLaplace):
        by_evidence = LinearizedLaplace.from_fitted(source.fitted.uncalibrated())  # whatever predictions are made with
        return Draws("laplace", by_evidence.sample(count, seed=seed))
    if hasattr(source, "swag_stats"):
        return Draws("swag", swag_draws(source, count, seed=seed))
    core: Any = getattr(source, "core_model", source)
    layers = list(core.modules()) if isinstance(core, nn.Module) else []
    if any(_is_bayesian(m) for m in layers):
        return Draws("variational", bayesian_draws(core, count, seed=seed))
    if any(_is_dropout(m) for m in layers):
        if inputs is None:
            raise ValueError("dropout needs a few inputs, to see which layers read what is dropped: pass inputs=")
        return Draws("mc_dropout", dropout_draws(core, inputs, count, seed=seed))
    raise ValueError(
        f"nothing can be drawn from this {type(source).__name__}: known are SWAG, networks with dropout or with "
        "Bayesian layers, and Laplace approximations; for the snapshots of a sampler use PosteriorSnapshots"
    )


def dropout_draws(model: nn.Module, inputs: Tensor, count: int, *, seed: int = 0) -> State:
    """Networks without dropout that compute what a network with fixed dropout masks computes.

    A mask goes into the weights of the next linear layer or convolution that runs:
    ``W2 (m * relu(W1 x)) = (W2 diag m) relu(W1 x)``. Where no weights express the masks (branches, a layer that reads
    twice, dropout of single positions) a ValueError is raised: the first draw is compared with the network under them.
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

    watched = [n for n, m in double.named_modules() if _is_dropout(m) or isinstance(m, _READERS)]
    with evaluating(double, {name: note(name) for name in watched}):
        double(x)
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
    stack = {n: t.detach().expand(count, *t.shape).clone() for n, t in model.state_dict().items()}
    masks = []
    for (_, module, width), (name, copies) in zip(drops, readers, strict=True):
        keep = 1 - float(module.p)  # type: ignore[arg-type]
        masks.append((torch.rand(count, width, generator=generator, device="cpu") < keep).double() / keep)
        t = stack[name]
        t *= masks[-1].repeat_interleave(copies, dim=1).to(t).view(count, 1, -1, *(1,) * (t.ndim - 3))
    _compare(double, x, {n: t[0] for n, t in stack.items()}, [m[0] for m in masks])
    return stack


def _compare(model: nn.Module, x: Tensor, drawn: State, masks: Sequence[Tensor]) -> None:
    waiting = list(masks)

    def apply(module: nn.Module, _: Any, output: Tensor) -> Any:
        mask = waiting.pop(0).to(output)
        return output * mask.view(1, -1, *(1,) * (output.ndim - 2))

    with evaluating(model, {n: apply for n, m in model.named_modules() if _is_dropout(m)}):
        masked = model(x)
    weights = {n: t.double() if t.is_floating_point() else t for n, t in drawn.items()}
    with evaluating(model):
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


def swag_draws(swag: Any, count: int, *, seed: int = 0) -> State:
    """Draws from TorchUncertainty's ``SWAG``, whose own ``scale`` is 0.5 for the covariance of arXiv 1902.02476."""
    averaged = int(getattr(swag, "num_avgd_models", 0))
    if averaged < 2:
        raise ValueError(
            f"SWAG has averaged {averaged} networks, which have no variance: TorchUncertainty's routine adds one "
            "whenever a validation starts after cycle_start, so train longer and validate after every cycle "
            "(check_val_every_n_epoch: 1)"
        )
    with seeded(derived_seed(seed, 13, 0), torch.device("cpu")), torch.no_grad():
        drawn = [swag.sample(swag.scale) for _ in range(count)]
    return stack_states([{n: t.detach().clone() for n, t in m.state_dict().items()} for m in drawn])


def _is_bayesian(module: nn.Module) -> bool:
    return hasattr(module, "weight_sampler") and callable(getattr(module, "sample", None))


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, (nn.Dropout, *_CHANNELS)) and module.p > 0
