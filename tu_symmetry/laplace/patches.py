"""The patches that a convolution sees, and their second moments."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ELEMENTS = 1 << 24


def patches_of(inputs: Tensor, conv: nn.Module) -> Tensor:
    """Patches that a convolution sees, ``[batch, groups, positions, features]``; any number of spatial axes."""
    assert isinstance(conv, CONVOLUTIONS)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padding = conv._reversed_padding_repeated_twice
    x = F.pad(inputs, padding, mode=mode) if any(padding) else inputs
    spatial = len(conv.kernel_size)
    for axis, (kernel, stride, dilation) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)):
        x = x.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    x = x.unflatten(1, (conv.groups, -1))
    places = [3 + i for i in range(spatial)]
    kernels = [3 + spatial + i for i in range(spatial)]
    return x.permute(0, 1, *places, 2, *kernels).flatten(2 + spatial).flatten(2, 1 + spatial)


def add_patch_gram(total: Tensor | None, inputs: Tensor, conv: nn.Module, *, reduce: bool) -> tuple[Tensor, float]:
    """Add ``sum a a^T`` over patches (or over samples' mean patches) to a running sum.

    Args:
        total: running sum ``[groups, features, features]``, or None; not edited.
        inputs: the convolution's input ``[batch, channels, *spatial]``.
        conv: the convolution.
        reduce: average patches over the positions of a sample first.

    Returns:
        The new sum, and the number of rows that were added.
    """
    count = 0.0
    chunk = max(1, _ELEMENTS // max(1, inputs[0].numel() * conv.weight[0, 0].numel()))  # type: ignore[index]
    for part in inputs.split(chunk):
        rows = patches_of(part, conv)
        rows = rows.mean(2).transpose(0, 1) if reduce else rows.transpose(0, 1).flatten(1, 2)
        gram = rows.mT @ rows
        total = gram if total is None else total + gram
        count += rows.shape[1]
    assert total is not None
    return total, count
