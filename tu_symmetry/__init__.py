"""Weight-space symmetries in Bayesian deep learning: find them, verify them, remove them, measure what is left.

The package is lazy: ``import tu_symmetry`` loads nothing heavy, a name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tu_symmetry._lazy import attach

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {
    "NormalizationGroup": "symmetry.groups",
    "PermutationGroup": "symmetry.groups",
    "ScaleGroup": "symmetry.groups",
    "SymmetryError": "states",
    "SymmetryGraph": "symmetry.graph",
    "SymmetryWarning": "states",
    "apply_permutation": "symmetry.action",
    "apply_scale": "symmetry.action",
    "move_optimizer_state": "symmetry.in_place",
    "compose": "symmetry.elements",
    "identity_permutation": "symmetry.elements",
    "invert": "symmetry.elements",
    "random_permutation": "symmetry.elements",
    "random_scale": "symmetry.elements",
    "transposition_count": "symmetry.elements",
    "discover_symmetries": "symmetry.discovery",
    "register_rule": "symmetry.rules",
    "verify_symmetries": "symmetry.verification",
    "Certificate": "symmetry.certificate",
    "certify": "symmetry.certificate",
    "require_certificate": "symmetry.certificate",
    "Alignment": "alignment.align",
    "Matching": "alignment.matching",
    "activation_matching": "alignment.activations",
    "align": "alignment.align",
    "weight_matching": "alignment.matching",
    "LossBarrier": "alignment.barrier",
    "barrier_matrix": "alignment.barrier",
    "interpolate": "alignment.barrier",
    "loss_barrier": "alignment.barrier",
    "Merged": "alignment.merging",
    "merge": "alignment.merging",
    "mean_state": "states",
    "plot": "plot",
    "reestimate_batchnorm": "alignment.repair",
    "repair": "alignment.repair",
    "CanonicalForm": "scaling.canonical",
    "canonicalize": "scaling.canonical",
    "MassProfile": "scaling.profiles",
    "mass_profile": "scaling.profiles",
    "normalization_epsilons": "scaling.epsilon",
    "remove_symmetries": "scaling.removal",
    "scale_with_epsilon": "scaling.epsilon",
    "representation_cost": "scaling.canonical",
    "GaussianPredictive": "laplace.links",
    "Bernoulli": "laplace.likelihood",
    "Categorical": "laplace.likelihood",
    "HeteroscedasticGaussian": "laplace.likelihood",
    "Hyperprior": "laplace.evidence",
    "LaplaceFileError": "laplace.storage",
    "LaplaceMixture": "laplace.mixture",
    "LinearizedLaplace": "laplace.model",
    "PrunedGroupWarning": "laplace.report",
    "DualLaplace": "laplace.dual_model",
    "DualPredictive": "laplace.dual_model",
    "IsotropicPrior": "laplace.structured",
    "KernelPrior": "laplace.structured",
    "LinearObservation": "laplace.observation",
    "SampledEvidence": "laplace.sampled",
    "TotalVariation": "laplace.hyperpriors",
    "CompactPosterior": "posterior.compact",
    "SampleStore": "posterior.samples",
    "load_state": "states",
    "show_progress": "reporting.progress",
    "FitCompactPosterior": "callbacks",
    "EvidenceWeightDecay": "callbacks",
    "FitLaplace": "callbacks",
    "PosteriorSnapshots": "callbacks",
    "PredictiveWriter": "callbacks",
    "ReferencePredictive": "callbacks",
    "Rebasin": "callbacks",
    "ScaleCanonicalization": "callbacks",
    "DeepImagePriorRoutine": "routines",
    "HMCRoutine": "routines",
    "LaplaceEnsemble": "routines",
    "LaplacePostProcessing": "routines",
    "LaplaceRegressionRoutine": "routines",
    "MembersRoutine": "routines",
    "VariationalRoutine": "routines",
    "posterior_ensemble": "routines",
    "MarginalHomogeneity": "metrics",
    "MaximumMeanDiscrepancy": "metrics",
    "PairwiseMutualInformation": "metrics",
    "PredictiveAgreement": "metrics",
    "PredictiveTotalVariation": "metrics",
    "RepresentationCost": "metrics",
    "TranspositionCount": "metrics",
}

__all__ = [
    "Alignment",
    "Bernoulli",
    "CanonicalForm",
    "Categorical",
    "Certificate",
    "CompactPosterior",
    "DeepImagePriorRoutine",
    "DualLaplace",
    "DualPredictive",
    "EvidenceWeightDecay",
    "FitCompactPosterior",
    "FitLaplace",
    "GaussianPredictive",
    "HMCRoutine",
    "HeteroscedasticGaussian",
    "Hyperprior",
    "IsotropicPrior",
    "KernelPrior",
    "LaplaceEnsemble",
    "LaplaceFileError",
    "LaplaceMixture",
    "LaplacePostProcessing",
    "LaplaceRegressionRoutine",
    "LinearObservation",
    "LinearizedLaplace",
    "LossBarrier",
    "MarginalHomogeneity",
    "MassProfile",
    "Matching",
    "MaximumMeanDiscrepancy",
    "MembersRoutine",
    "Merged",
    "NormalizationGroup",
    "PairwiseMutualInformation",
    "PermutationGroup",
    "PosteriorSnapshots",
    "PredictiveAgreement",
    "PredictiveTotalVariation",
    "PredictiveWriter",
    "PrunedGroupWarning",
    "Rebasin",
    "ReferencePredictive",
    "RepresentationCost",
    "SampleStore",
    "SampledEvidence",
    "ScaleCanonicalization",
    "ScaleGroup",
    "SymmetryError",
    "SymmetryGraph",
    "SymmetryWarning",
    "TotalVariation",
    "TranspositionCount",
    "VariationalRoutine",
    "__version__",
    "activation_matching",
    "align",
    "apply_permutation",
    "apply_scale",
    "barrier_matrix",
    "canonicalize",
    "certify",
    "compose",
    "discover_symmetries",
    "identity_permutation",
    "interpolate",
    "invert",
    "load_state",
    "loss_barrier",
    "mass_profile",
    "mean_state",
    "merge",
    "move_optimizer_state",
    "normalization_epsilons",
    "plot",
    "posterior_ensemble",
    "random_permutation",
    "random_scale",
    "reestimate_batchnorm",
    "register_rule",
    "remove_symmetries",
    "repair",
    "representation_cost",
    "require_certificate",
    "scale_with_epsilon",
    "show_progress",
    "transposition_count",
    "verify_symmetries",
    "weight_matching",
]

if TYPE_CHECKING:
    from tu_symmetry import plot
    from tu_symmetry.alignment.activations import activation_matching
    from tu_symmetry.alignment.align import Alignment, align
    from tu_symmetry.alignment.barrier import LossBarrier, barrier_matrix, interpolate, loss_barrier
    from tu_symmetry.alignment.matching import Matching, weight_matching
    from tu_symmetry.alignment.merging import Merged, merge
    from tu_symmetry.alignment.repair import reestimate_batchnorm, repair
    from tu_symmetry.callbacks import (
        EvidenceWeightDecay,
        FitCompactPosterior,
        FitLaplace,
        PosteriorSnapshots,
        PredictiveWriter,
        Rebasin,
        ReferencePredictive,
        ScaleCanonicalization,
    )
    from tu_symmetry.laplace.dual_model import DualLaplace, DualPredictive
    from tu_symmetry.laplace.evidence import Hyperprior
    from tu_symmetry.laplace.hyperpriors import TotalVariation
    from tu_symmetry.laplace.likelihood import Bernoulli, Categorical, HeteroscedasticGaussian
    from tu_symmetry.laplace.links import GaussianPredictive
    from tu_symmetry.laplace.mixture import LaplaceMixture
    from tu_symmetry.laplace.model import LinearizedLaplace
    from tu_symmetry.laplace.observation import LinearObservation
    from tu_symmetry.laplace.report import PrunedGroupWarning
    from tu_symmetry.laplace.sampled import SampledEvidence
    from tu_symmetry.laplace.storage import LaplaceFileError
    from tu_symmetry.laplace.structured import IsotropicPrior, KernelPrior
    from tu_symmetry.metrics import (
        MarginalHomogeneity,
        MaximumMeanDiscrepancy,
        PairwiseMutualInformation,
        PredictiveAgreement,
        PredictiveTotalVariation,
        RepresentationCost,
        TranspositionCount,
    )
    from tu_symmetry.posterior.compact import CompactPosterior
    from tu_symmetry.posterior.samples import SampleStore
    from tu_symmetry.reporting.progress import show_progress
    from tu_symmetry.routines import (
        DeepImagePriorRoutine,
        HMCRoutine,
        LaplaceEnsemble,
        LaplacePostProcessing,
        LaplaceRegressionRoutine,
        MembersRoutine,
        VariationalRoutine,
        posterior_ensemble,
    )
    from tu_symmetry.scaling.canonical import CanonicalForm, canonicalize, representation_cost
    from tu_symmetry.scaling.epsilon import normalization_epsilons, scale_with_epsilon
    from tu_symmetry.scaling.profiles import MassProfile, mass_profile
    from tu_symmetry.scaling.removal import remove_symmetries
    from tu_symmetry.states import SymmetryError, SymmetryWarning, load_state, mean_state
    from tu_symmetry.symmetry.action import apply_permutation, apply_scale
    from tu_symmetry.symmetry.certificate import Certificate, certify, require_certificate
    from tu_symmetry.symmetry.discovery import discover_symmetries
    from tu_symmetry.symmetry.elements import (
        compose,
        identity_permutation,
        invert,
        random_permutation,
        random_scale,
        transposition_count,
    )
    from tu_symmetry.symmetry.graph import SymmetryGraph
    from tu_symmetry.symmetry.groups import NormalizationGroup, PermutationGroup, ScaleGroup
    from tu_symmetry.symmetry.in_place import move_optimizer_state
    from tu_symmetry.symmetry.rules import register_rule
    from tu_symmetry.symmetry.verification import verify_symmetries
else:
    __getattr__, __dir__ = attach(__name__, _EXPORTS)
