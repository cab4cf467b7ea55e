"""Batches: a tensor, a tuple of positional arguments, or a mapping of keyword arguments, each with tensors in it.

Loaders give pairs ``(inputs, targets)``, or one mapping with the targets under a name of their own, as Hugging Face's
collators do: ``{"input_ids": ..., "labels": ...}`` is the call ``model(input_ids=...)`` with targets ``labels``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LABELS = ("labels", "label", "label_ids", "targets", "target")  # names of targets in a mapping


def mapped(function: Callable[[Tensor], Any], inputs: Any) -> Any:
    """The same inputs with a function of every tensor in place of it."""
    if isinstance(inputs, tuple):
        return tuple(mapped(function, own) for own in inputs)
    if isinstance(inputs, dict):
        return {name: mapped(function, own) for name, own in inputs.items()}
    return function(inputs)


def tensors_in(inputs: Any) -> list[Tensor]:
    """Every tensor of the inputs, in their order."""
    found: list[Tensor] = []
    mapped(found.append, inputs)
    return found


def ordinary(inputs: Any) -> Any:
    """Inputs outside of inference mode, without targets and without a gradient history."""
    if isinstance(inputs, Tensor):
        return inputs.clone() if inputs.is_inference() else inputs.detach()
    if isinstance(inputs, (tuple, list)):
        return tuple(ordinary(own) for own in inputs)
    if isinstance(inputs, Mapping):
        return {str(k): ordinary(own) for k, own in inputs.items() if k not in LABELS and own is not None}
    raise TypeError(
        f"the network's input is a {type(inputs).__name__}; give a tensor, a tuple of tensors, or a mapping of keyword "
        "arguments to tensors"
    )


def inputs_and_targets(batch: Any) -> tuple[Any, Tensor]:
    """A batch of a loader as inputs and targets, still as they were; a ``TypeError`` for what is no such batch."""
    if isinstance(batch, Mapping):
        names = [name for name in LABELS if isinstance(batch.get(name), Tensor)]
        if len(names) != 1:
            raise TypeError(
                f"a batch of the loader is a mapping with {list(batch)}; its targets have to be a tensor under one of "
                f"the names {list(LABELS)}, found {names}: rename them, or give pairs (inputs, targets)"
            )
        return batch, batch[names[0]]
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or not isinstance(batch[1], Tensor):
        raise TypeError(
            f"a batch of the loader is a {type(batch).__name__}; it has to be (inputs, targets), targets a tensor, or "
            "a mapping with 'labels'"
        )
    return batch[0], batch[1]


def batch_size(inputs: Any) -> int:
    """Length of the first axis of the inputs; a ``ValueError`` where there is none, or there are several lengths."""
    found = tensors_in(inputs)
    if not found or any(t.ndim == 0 or len(t) != len(found[0]) for t in found):
        shapes = ", ".join(str(tuple(t.shape)) for t in found)
        raise ValueError(
            f"the network's inputs have shapes {shapes or 'of none'}; the first axis of each is the batch. What all "
            "samples share, such as the edges of a graph, belongs into a module as a buffer; a graph is a sample then, "
            "with features [graphs, nodes, features] and targets [graphs, nodes]"
        )
    return len(found[0])


def rows_of(inputs: Any, rows: slice | Tensor) -> Any:
    """The samples ``rows`` of a batch of inputs, a range or their numbers."""
    return mapped(lambda own: own[rows], inputs)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the network's call."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def joined(parts: Sequence[Any]) -> Any:
    """Batches of one structure, one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = iter([torch.cat(own) for own in zip(*map(tensors_in, parts), strict=True)])
    return mapped(lambda _: next(columns), parts[0])


def structure(inputs: Any) -> Any:
    """What batches have to have in common to be joined: names, shapes apart from the batch, types."""
    if isinstance(inputs, tuple):
        return tuple(structure(own) for own in inputs)
    if isinstance(inputs, dict):
        return tuple((name, structure(own)) for name, own in inputs.items())
    return (inputs.shape[1:], inputs.dtype)
