"""Loss barriers between independently trained networks, before and after matching (arXiv 2209.04836 and 2211.08403)."""

from tu_symmetry.experiments.rebasin.barriers import measure
from tu_symmetry.experiments.rebasin.matching import match
from tu_symmetry.experiments.rebasin.networks import VGG, ResNet, VisionTransformer
from tu_symmetry.experiments.rebasin.report import report

__all__ = ["VGG", "ResNet", "VisionTransformer", "match", "measure", "report"]
