"""The rules that come with the library; importing this package registers them."""

from tu_symmetry.symmetry.operators import (
    contractions,
    convolutions,
    movement,
    normalizations,
    pointwise,
    recurrent,
    reductions,
)
from tu_symmetry.symmetry.rules import RULES

__all__ = [
    "RULES",
    "contractions",
    "convolutions",
    "movement",
    "normalizations",
    "pointwise",
    "recurrent",
    "reductions",
]
