"""Many small tensors moved in one copy: every copy from a GPU waits until all that was asked of it is done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device, those of one place and dtype in one copy; what is there already is returned as it is."""
    found = list(tensors)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for k, tensor in enumerate(found):
        if tensor.device != device:
            kinds[tensor.device, tensor.dtype].append(k)
    for places in kinds.values():
        flat = torch.cat([found[k].reshape(-1) for k in places]).to(device)
        for k, part in zip(places, flat.split([found[k].numel() for k in places]), strict=True):
            found[k] = part.view(found[k].shape)
    return found


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one entry each, with one wait for each device and dtype."""
    return [float(scalar) for scalar in moved([scalar.detach() for scalar in scalars], _CPU)]
