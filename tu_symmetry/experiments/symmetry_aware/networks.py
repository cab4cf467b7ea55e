"""The networks of the recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class SmallLeNet(nn.Module):
    """Two strided convolutions and two linear layers with ReLU, dropout before each layer that reads a hidden one.

    A LeNet without pooling: 1,738 parameters with the default widths. Dropout drops whole channels, so that networks
    with and without it have the same weights, and the same symmetries.
    """

    def __init__(
        self, num_classes: int = 10, channels: Sequence[int] = (4, 8), hidden: int = 16, dropout: float = 0.0
    ) -> None:
        super().__init__()
        first, second = channels
        self.conv1 = nn.Conv2d(1, first, 5, stride=3)
        self.drop1 = nn.Dropout2d(dropout)
        self.conv2 = nn.Conv2d(first, second, 3, stride=2)
        self.drop2 = nn.Dropout2d(dropout)
        self.hidden = nn.Linear(second * 9, hidden)
        self.drop3 = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, 1, 28, 28]``."""
        x = self.drop1(self.conv1(x).relu())
        x = self.drop2(self.conv2(x).relu())
        return self.output(self.drop3(self.hidden(x.flatten(1)).relu()))


def residual_network(
    arch: int,
    num_classes: int,
    dropout: float = 0.0,
    filter_response: bool = False,
    bayesian: bool = False,
    prior_std: float = 0.2,
) -> nn.Module:
    """TorchUncertainty's ResNet for small images, in the three forms of the paper's methods with equal weights.

    Args:
        arch: 18 or 20, for example.
        dropout: probability of dropping a channel within blocks, and a feature before the last layer.
        filter_response: filter response normalization and SiLU in place of batch normalization and ReLU.
        bayesian: Bayesian layers of TorchUncertainty in place of all convolutions and linear layers, each mean at its
            layer's initialization.
        prior_std: standard deviation of the prior of each weight of a Bayesian layer.
    """
    from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear
    from torch_uncertainty.layers.filter_response_norm import FilterResponseNorm2d
    from torch_uncertainty.models.classification.resnet import resnet

    prior = {"prior_sigma_1": prior_std, "prior_pi": 1}
    made: nn.Module = resnet(
        in_channels=3,
        num_classes=num_classes,
        arch=arch,
        dropout_rate=dropout,
        style="cifar",
        activation_fn=silu if filter_response else relu,
        normalization_layer=FilterResponseNorm2d if filter_response else nn.BatchNorm2d,
    )
    for parent in list(made.modules()) if bayesian else []:
        for name, layer in list(parent.named_children()):
            new: nn.Module
            if isinstance(layer, nn.Conv2d):
                sizes: Any = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
                new = BayesConv2d(*sizes, layer.dilation, groups=layer.groups, bias=layer.bias is not None, **prior)
            elif isinstance(layer, nn.Linear):
                new = BayesLinear(layer.in_features, layer.out_features, bias=layer.bias is not None, **prior)
            else:
                continue
            with torch.no_grad():
                new.weight_mu.copy_(layer.weight)  # type: ignore[operator]
                if layer.bias is not None:
                    new.bias_mu.copy_(layer.bias)  # type: ignore[operator]
            setattr(parent, name, new)
    return made


class SWAGSchedule(LambdaLR):
    """The learning rates of SWAG's paper (arXiv 1902.02476, its code): constant, then linear down, then constant.

    They fall from half to nine tenths of the epochs before ``start``.

    Args:
        optimizer: its learning rates are those of the first half.
        start: epochs before the first snapshot.
        final: the last learning rate over the first one.
    """

    def __init__(self, optimizer: Optimizer, start: int, final: float) -> None:
        if start < 1 or not 0 < final <= 1:
            raise ValueError(f"start must be at least 1 and final in (0, 1], got {start} and {final}")
        super().__init__(optimizer, lambda epoch: 1 - (1 - final) * min(max(epoch / start - 0.5, 0.0) / 0.4, 1.0))
