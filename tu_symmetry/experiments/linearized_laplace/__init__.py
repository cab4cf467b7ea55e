"""arXiv 2206.08900: the evidence of linearized Laplace for networks with normalization; two tables, four figures."""

from tu_symmetry.experiments.linearized_laplace.depth import compare_depths, report_depths
from tu_symmetry.experiments.linearized_laplace.evidence import (
    Settings,
    Trained,
    optimize_evidence,
    optimize_kronecker_evidence,
)
from tu_symmetry.experiments.linearized_laplace.networks import CNN, FixUpResNet, PreActivationResNet, Transformer
from tu_symmetry.experiments.linearized_laplace.rows import SmallIDXDataModule
from tu_symmetry.experiments.linearized_laplace.shift import measure_rotations, report_rotations
from tu_symmetry.experiments.linearized_laplace.tables import report_architectures, report_residual
from tu_symmetry.experiments.linearized_laplace.toy import BatchNormMLP, CurveDataModule, compute_bands, report_bands
from tu_symmetry.experiments.linearized_laplace.training import measure_training, report_training

__all__ = [
    "CNN",
    "BatchNormMLP",
    "CurveDataModule",
    "FixUpResNet",
    "PreActivationResNet",
    "Settings",
    "SmallIDXDataModule",
    "Trained",
    "Transformer",
    "compare_depths",
    "compute_bands",
    "measure_rotations",
    "measure_training",
    "optimize_evidence",
    "optimize_kronecker_evidence",
    "report_architectures",
    "report_bands",
    "report_depths",
    "report_residual",
    "report_rotations",
    "report_training",
]
