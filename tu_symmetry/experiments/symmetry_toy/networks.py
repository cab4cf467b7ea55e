"""The perceptron of the toy figure."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NormalLinear(nn.Linear):
    """A linear layer with weights and biases from ``N(0, std^2)``.

    Args:
        in_features: number of inputs.
        out_features: number of outputs.
        bias: whether it has biases.
        std: standard deviation at initialization.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        with torch.no_grad():
            for p in self.parameters(recurse=False):
                p.normal_(0.0, self.std)


class Perceptron(nn.Module):
    """Two inputs, two hidden ReLU units, one logit.

    Args:
        bias: whether the layers have biases.
        initial_std: standard deviation of all parameters at initialization.
    """

    def __init__(self, bias: bool = False, initial_std: float = 1.0) -> None:
        super().__init__()
        self.hidden = NormalLinear(2, 2, bias, initial_std)
        self.output = NormalLinear(2, 1, bias, initial_std)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch]`` of inputs ``[batch, 2]``."""
        return self.output(self.hidden(x).relu()).squeeze(-1)
