"""Loss barriers between independently trained networks, before and after matching (arXiv 2209.04836 and 2211.08403)."""

from tu_symmetry.experiments.rebasin.barriers import measure
from tu_symmetry.experiments.rebasin.matching import match
from tu_symmetry.experiments.rebasin.networks import GPT, VGG, ResNet, VisionTransformer
from tu_symmetry.experiments.rebasin.report import report
from tu_symmetry.experiments.rebasin.text import TopicsDataModule
from tu_symmetry.experiments.rebasin.transport import move_tasks, report_transport

__all__ = [
    "GPT",
    "VGG",
    "ResNet",
    "TopicsDataModule",
    "VisionTransformer",
    "match",
    "measure",
    "move_tasks",
    "report",
    "report_transport",
]
