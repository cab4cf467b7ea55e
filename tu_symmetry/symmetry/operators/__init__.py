"""The rules that come with the library; importing this package registers them."""

from tu_symmetry.symmetry.operators import (  # noqa: F401
    contractions,
    convolutions,
    experts,
    indexing,
    normalizations,
    pointwise,
    rearranging,
    recurrent,
    reductions,
    scattering,
)
from tu_symmetry.symmetry.rules import RULES

__all__ = ["RULES"]
