"""Running a module with given weights over a loader: evaluation mode, no gradients, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; on leaving, every submodule has its own mode back."""
    was_training = {m: m.training for m in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in was_training.items():
            module.training = training


def on_device(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], torch.device]:
    """A state with all its tensors where its first one is, and that device."""
    device = next(iter(state.values())).device
    return {name: t.to(device) for name, t in state.items()}, device


def input_batches(dataloader: Iterable[Any], device: torch.device) -> Iterator[Tensor]:
    """Inputs of a loader whose batches are tensors, or tuples that begin with the inputs.

    Raises:
        ValueError: an empty loader.
    """
    empty = True
    for batch in dataloader:
        empty = False
        yield (batch[0] if isinstance(batch, (list, tuple)) else batch).to(device)
    if empty:
        raise ValueError(_EMPTY)


def labeled_batches(dataloader: Iterable[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of a loader whose batches are pairs.

    Raises:
        ValueError: an empty loader, or batches that are not pairs.
    """
    empty = True
    for batch in dataloader:
        empty = False
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ValueError(
                f"a loss needs batches (inputs, targets), but the dataloader gave {type(batch).__name__}"
                + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")
            )
        yield batch[0].to(device), batch[1].to(device)
    if empty:
        raise ValueError(_EMPTY)


def reusable(dataloader: Iterable[Any]) -> Iterable[Any]:
    """The loader, or its batches as a list where it is an iterator that can be read only once."""
    return list(dataloader) if iter(dataloader) is dataloader else dataloader


def forward(model: nn.Module, state: Mapping[str, Tensor], inputs: Tensor) -> Any:
    """The module's outputs with other weights."""
    return torch.func.functional_call(model, dict(state), (inputs,), tie_weights=False)


_EMPTY = (
    "the dataloader gave no batch, so there is nothing to measure; an iterator that was used up before looks like "
    "this: pass a DataLoader, or a list of batches"
)
