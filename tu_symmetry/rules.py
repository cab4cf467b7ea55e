"""What a rule for an operator of your own (:func:`~tu_symmetry.register_rule`) is written with."""

from tu_symmetry.symmetry.operators.pointwise import elementwise
from tu_symmetry.symmetry.rules import TRAIT_NAMES, Call

__all__ = ["TRAIT_NAMES", "Call", "elementwise"]
