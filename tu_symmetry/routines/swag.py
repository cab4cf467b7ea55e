"""TorchUncertainty's SWAG where the network is on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_uncertainty import methods


class SWAG(methods.SWAG):
    """TorchUncertainty's ``SWAG``, with the network on any device.

    That of TorchUncertainty 0.13 keeps moments and samples on the CPU, but multiplies the moments with a count that
    moves with the network, and passes batches from the network's device to samples that stay behind: on a GPU it fails
    at its first snapshot. Arguments, attributes and checkpoints are the same.
    """

    num_avgd_models: Tensor

    @torch.no_grad()
    def update_wrapper(self, epoch: int) -> None:
        """Take a snapshot where one is due, with the count beside the moments as long as it takes."""
        device, self.num_avgd_models = self.num_avgd_models.device, self.num_avgd_models.cpu()
        try:
            super().update_wrapper(epoch)
        finally:
            self.num_avgd_models = self.num_avgd_models.to(device)

    def bn_update(self, loader: DataLoader[Any], device: torch.device | str | int | None) -> None:
        """Have the samples' running statistics found on the device."""
        for network in self.samples if self.need_bn_update else ():
            network.to(device)
        super().bn_update(loader, device)
