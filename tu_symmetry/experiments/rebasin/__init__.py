"""Loss barriers between independently trained networks, before and after matching (arXiv 2209.04836 and 2211.08403).

Members are trained by :class:`~tu_symmetry.routines.MembersRoutine`; :func:`match` matches them by several methods,
:func:`measure` measures all pairs and the mean of all networks with each correction, and :func:`report` answers the
claims of the recipe from what was measured.
"""

from tu_symmetry.experiments.rebasin.barriers import measure
from tu_symmetry.experiments.rebasin.matching import match
from tu_symmetry.experiments.rebasin.networks import VGG, ResNet
from tu_symmetry.experiments.rebasin.report import report

__all__ = ["VGG", "ResNet", "match", "measure", "report"]
