"""The small networks of the recipes, and how a recipe's model is made."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from tu_symmetry.configs import ConfigError, resolve
from tu_symmetry.tables.data import Data
from tu_symmetry.tables.recipe import ModelConfig


class MLP(nn.Module):
    """Fully connected ReLU network on flattened inputs (784-512-10 in arXiv 2401.00611).

    Args:
        in_features: number of inputs after flattening.
        num_classes: number of outputs.
        hidden: widths of the hidden layers.
    """

    def __init__(self, in_features: int, num_classes: int, hidden: Sequence[int] = (128,)) -> None:
        super().__init__()
        widths = [in_features, *hidden, num_classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of inputs ``[batch, ...]``."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def build_model(config: ModelConfig, data: Data) -> nn.Module:
    """The module that a recipe names; ``in_features`` and ``num_classes`` are filled in from the data if it takes them.

    Raises:
        ConfigError: a class that does not exist or is no module, or arguments that it does not take.
    """
    make = resolve(config.class_path)
    _require_module_maker(make, config.class_path)
    known = inspect.signature(make).parameters
    from_data = {"in_features": data.train_x[0].numel(), "num_classes": data.num_classes}
    arguments = {k: v for k, v in from_data.items() if k in known} | config.init_args
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"model {config.class_path}: {error}; it takes {', '.join(known)}") from None
    model = make(**arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {config.class_path} made a {type(model).__name__}, not a torch.nn.Module")
    return model


def _require_module_maker(make: object, name: str) -> None:
    """Look at what a recipe names before it is called: a class of modules, or a function that says it returns one."""
    try:
        made = make if isinstance(make, type) else typing.get_type_hints(make).get("return")
    except (TypeError, NameError, AttributeError):
        made = None
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise ConfigError(
            f"model {name} is neither a class of torch.nn.Module nor a function whose return type is annotated as one "
            "(-> nn.Module), so it was not called"
        )
