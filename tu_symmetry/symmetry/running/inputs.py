"""The inputs that a network is run on: the examples that a user gives, and others like them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tu_symmetry.symmetry.running.weights import as_computed, is_continuous, kept_value

Example = tuple[tuple[Any, ...], dict[str, Any]]
ExampleInputs = Tensor | tuple[Any, ...] | list[Any]
ExampleKwargs = Mapping[str, Any] | list[Mapping[str, Any]] | None


def examples_of(example_inputs: ExampleInputs, example_kwargs: ExampleKwargs = None) -> list[Example]:
    """Positional and keyword arguments of each example, as :func:`discover_symmetries` takes them."""
    count = next((len(given) for given in (example_inputs, example_kwargs) if isinstance(given, list)), 1)
    several = example_inputs if isinstance(example_inputs, list) else [example_inputs] * count
    named = example_kwargs if isinstance(example_kwargs, list) else [example_kwargs or {}] * count
    if len(named) != len(several) or not several:
        raise ValueError(f"{len(several)} example_inputs and {len(named)} example_kwargs; pass as many, at least one")
    return [(a if isinstance(a, tuple) else (a,), dict(k)) for a, k in zip(several, named, strict=True)]


def doubled(example: Example) -> Example:
    """The example twice along its first axis: batch norm trains on two samples at least."""
    return tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.ndim else t, example)


def in_double(example: Example, generator: torch.Generator) -> Example:
    """An example in float64 on the CPU, with noise in place of constant tensors (zeros, ones)."""

    def wide(tensor: Tensor) -> Tensor:
        if tensor.is_meta and is_continuous(tensor):
            drawn = torch.randn(tensor.shape, generator=generator, device="cpu")
            return drawn.to(as_computed(tensor.dtype, torch.float64))
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        own = kept_value(tensor)
        if own.layout != torch.strided or own.numel() < 2 or not is_continuous(own):
            return own
        constant = bool((own == own.flatten()[0]).all())
        return torch.randn(own.shape, generator=generator, dtype=own.dtype, device="cpu") if constant else own

    return tree_map_only(Tensor, wide, example)


def redrawn(example: Example, generator: torch.Generator) -> Example:
    """Other numbers of the same mean and deviation in the floating-point tensors; masks stay as they are."""

    def draw(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()) or len(tensor.unique()) < 3:
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu")
        return tensor.mean() + tensor.std() * noise

    return tree_map_only(Tensor, draw, example)


def blank(example: Example) -> Example:
    """Zeros in the floating-point tensors."""
    return tree_map_only(Tensor, lambda t: torch.zeros_like(t) if t.is_floating_point() else t, example)
