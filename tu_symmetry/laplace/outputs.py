"""What a network returns, as outputs ``[batch, outputs]`` or ``[batch, positions, outputs]``, and back.

``[batch, classes, height, width]`` is read as ``[batch, height * width, classes]``, pixels row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def class_axis_of(axes: int, class_axis: int | None) -> int:
    """The axis, counted from 0, of an output with so many axes that holds the classes (or other outputs).

    By default the last of two or three axes, and axis 1 of four and more, which is torch's convention of images.
    """
    found = (1 if axes > 3 else axes - 1) if class_axis is None else class_axis
    if found < 0:
        found += axes
    if not 0 < found < axes:
        raise ValueError(f"class_axis={class_axis} is no axis of an output with {axes} axes, of which 0 is the batch")
    return found


def as_outputs(found: Any, batch: int, class_axis: int | None = None) -> Tensor:
    """What a network returns, see :func:`tensor_in`, as ``[batch, outputs]`` or ``[batch, positions, outputs]``.

    Raises:
        TypeError: something else than a tensor of real numbers in single or double precision.
        ValueError: another first axis than the batch.
    """
    found = tensor_in(found)
    if found.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"the network's outputs are of type {found.dtype}; curvatures need real numbers (logits, not classes) in "
            "single or double precision: call model.float(), and leave out torch.autocast inside the network"
        )
    if found.ndim == 0 or len(found) != batch:
        raise ValueError(
            f"the network's output has shape {tuple(found.shape)} for a batch of {batch} samples; its first axis has "
            "to be the batch. Return tokens or pixels as [batch, positions, outputs], and transpose inputs and outputs "
            "of a network that takes the batch as its second axis"
        )
    if found.ndim == 1:
        found = found.unsqueeze(-1)
    if found.ndim > 2:
        found = found.movedim(class_axis_of(found.ndim, class_axis), -1).flatten(1, -2)
    if found.numel() == 0 and batch > 0:
        raise ValueError(f"the network's output has shape {tuple(found.shape)}: it holds no values")
    return found


def check_outputs(found: Any, batch: int, class_axis: int | None = None) -> Tensor:
    """The same, where NaN and infinite values are refused too."""
    outputs = as_outputs(found, batch, class_axis)
    if not torch.isfinite(outputs.detach()).all():
        raise ValueError(
            "the network's output holds NaN or infinite values: its weights come from a diverged run, or the inputs "
            "are not finite"
        )
    return outputs


def tensor_in(found: Any) -> Tensor:
    """The tensor that a network returns, or that is in the ``logits`` of an object or a mapping."""
    if isinstance(found, Tensor):
        return found
    logits = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(
        f"the network returns a {type(found).__name__}; it has to return a tensor of outputs, or an object or mapping "
        "with 'logits'. Wrap it in a module whose forward gives that tensor alone"
    )
