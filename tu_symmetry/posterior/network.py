"""What samplers and routines share: a network as a Bayesian model, its initialization, and seeds.

The prior of every parameter is ``N(0, 1 / prior_precision)``, the likelihood ``nll`` a sum in nats.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tu_symmetry.states import check_number

States = dict[str, Tensor]
NLL = Callable[[Tensor, Tensor], Tensor]


def categorical_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy in nats of ``logits (B, C)`` and ``labels (B,)``."""
    return F.cross_entropy(logits, labels, reduction="sum")


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-density in nats of ``targets (B,)``, whose mean and deviation are outputs ``(B, 2)``.

    The deviation is ``softplus`` of the second output and 1e-6, as in the package bde (arXiv 2605.14146).
    """
    mean, deviation = outputs[..., 0], F.softplus(outputs[..., 1]) + 1e-6
    return (deviation.log() + ((targets - mean) / deviation).square() / 2 + math.log(2 * math.pi) / 2).sum()


def gaussian_kl(mean: Mapping[str, Tensor], std: Mapping[str, Tensor], prior_precision: float) -> Tensor:
    """``KL(N(mean, std^2) || N(0, 1 / prior_precision))``, summed over all parameters, in nats."""
    terms = []
    for name, m in mean.items():
        variance = std[name].square() * prior_precision
        terms.append((variance + prior_precision * m.square() - 1 - variance.log()).sum() / 2)
    return torch.stack(terms).sum()


def gaussian_draw(mean: Mapping[str, Tensor], std: Mapping[str, Tensor], generator: torch.Generator) -> States:
    """One reparameterized draw from ``N(mean, std^2)``; gradients reach ``mean`` and ``std``."""
    return {
        name: m + std[name] * torch.randn(m.shape, generator=generator, device=m.device, dtype=m.dtype)
        for name, m in mean.items()
    }


def require_function_of_parameters(model: nn.Module) -> None:
    """Raise a ValueError that names the first layer with running statistics."""
    for name, layer in model.named_modules():
        if getattr(layer, "running_mean", None) is not None:
            raise ValueError(
                f"{name or 'the network'} ({type(layer).__name__}) has running statistics, so the likelihood is no "
                "function of the parameters alone: use a normalization without them, such as GroupNorm"
            )


def initialized(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a network with parameters that ``reset_parameters`` of its layers draws, on the CPU."""
    device = next(model.parameters()).device
    fresh = copy.deepcopy(model).cpu()
    with seeded(seed, torch.device("cpu")):
        for name, layer in fresh.named_modules():
            reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
            if reset is not None:
                reset()
            elif any(True for _ in layer.parameters(recurse=False)):
                raise ValueError(
                    f"layer {name or '(the network itself)'} of type {type(layer).__name__} has parameters but no "
                    "reset_parameters(), so it cannot be initialized anew: give its class that method"
                )
    return fresh.to(device)


class BayesianNetwork:
    """A network as a function of its parameters, with all its data ``(N, ...)``; ``eval`` mode, buffers as they are.

    Where the data are a batch of more, ``points`` says of how many, and the likelihood is weighted to that number.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        prior_precision: float,
        nll: NLL,
        device: torch.device | str,
        *,
        points: int | None = None,
    ) -> None:
        require_positive(prior_precision=prior_precision)
        if len(x) == 0 or len(x) != len(y):
            raise ValueError(f"got {len(x)} inputs and {len(y)} targets: there must be as many, and at least one")
        if x.is_floating_point() and not torch.isfinite(x).all():
            raise ValueError("the inputs hold NaN or infinite values")
        require_function_of_parameters(model)
        self.device = torch.device(device)
        self.module = copy.deepcopy(model).to(self.device).eval()
        self.x, self.y = x.to(self.device), y.to(self.device)
        self.prior_precision, self.nll, self.points = prior_precision, nll, points or len(x)
        self.parameters = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        if not self.parameters:
            raise ValueError("the network has no parameters")

    def penalty(self, w: States) -> Tensor:
        """Negative log-density of the prior without its constant."""
        return self.prior_precision / 2 * torch.stack([t.square().sum() for t in w.values()]).sum()

    def potential(self, w: States, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Negative log-density of data and weights without the prior's constant, in nats; estimated from a batch."""
        x, y = batch or (self.x, self.y)
        return self.points / len(x) * self.nll(functional_call(self.module, w, (x,)), y) + self.penalty(w)

    def complete(self, w: States) -> States:
        """A whole state on the CPU from parameters: tied names and buffers are added."""
        owners = {id(p): name for name, p in self.module.named_parameters()}
        held = self.module.state_dict(keep_vars=True)
        return {name: w.get(owners.get(id(t), ""), t).detach().cpu().clone() for name, t in held.items()}


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators that ``device`` uses, and restore them afterwards."""
    cuda = [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for index in cuda:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def derived_seed(seed: int, stream: int, index: int) -> int:
    """An independent seed for one of several streams of random numbers."""
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return int(np.random.SeedSequence([seed, stream, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def require_numbers(**values: object) -> None:
    """Raise a TypeError that names the first value that is a text, as a number in quotes is; ``auto`` is none."""
    for name, value in values.items():
        if isinstance(value, str) and value != "auto":
            check_number(value, name)


def require_positive(**values: float) -> None:
    """Raise a ValueError that names the first value that is not positive and finite."""
    require_numbers(**values)
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive, got {value}")
