"""TorchUncertainty's SWAG where the network is on a GPU, and in checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_uncertainty import methods

from tu_symmetry.posterior.network import derived_seed, seeded


class SWAG(methods.SWAG):
    """TorchUncertainty's ``SWAG``, with the network on any device, and as a part of a routine's checkpoint.

    That of TorchUncertainty 0.13 mixes moments and samples on the CPU with a count and batches on the GPU. It writes
    its moments among the weights, but takes them out again only when it is loaded by itself.
    """

    num_avgd_models: Tensor

    def __init__(self, core_model: nn.Module, **options: Any) -> None:
        super().__init__(core_model, **options)
        self.register_load_state_dict_pre_hook(_take_moments)
        self.register_load_state_dict_post_hook(_awaken)

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


def _take_moments(swag: SWAG, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before SWAG's own tensors are loaded: its moments, which are no buffers."""
    held = {name: state_dict.pop(name) for name in list(state_dict) if name in swag.swag_stats}
    if held.keys() == swag.swag_stats.keys():  # else the names that are missing or new are reported as always
        swag.swag_stats = {name: t.detach().cpu() for name, t in held.items()}
    else:
        state_dict.update(held)


def _awaken(swag: SWAG, _: Any) -> None:
    """Draw the networks that a loaded SWAG predicts with."""
    if not swag.fit and int(swag.num_avgd_models) > 0:
        with seeded(derived_seed(0, 15, 0), torch.device("cpu")):
            swag.samples = [swag.sample(swag.scale, swag.diag_covariance) for _ in range(swag.num_estimators)]
        swag.need_bn_update = swag.fit = True
