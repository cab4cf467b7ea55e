"""Weight-space symmetries in Bayesian deep learning: find them, verify them, remove them, measure what is left.

The package is lazy: ``import tu_symmetry`` loads nothing heavy, a name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {
    "NormalizationGroup": "symmetry.graph",
    "PermutationGroup": "symmetry.graph",
    "ScaleGroup": "symmetry.graph",
    "SymmetryError": "states",
    "SymmetryGraph": "symmetry.graph",
    "SymmetryWarning": "symmetry.graph",
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
    "loss_barrier": "alignment.barrier",
    "CanonicalForm": "scaling.canonical",
    "canonicalize": "scaling.canonical",
    "MassProfile": "scaling.profiles",
    "mass_profile": "scaling.profiles",
    "normalization_epsilons": "scaling.epsilon",
    "remove_symmetries": "scaling.removal",
    "scale_with_epsilon": "scaling.epsilon",
    "representation_cost": "scaling.canonical",
    "GaussianPredictive": "laplace.predictive",
    "Hyperprior": "laplace.evidence",
    "LaplaceFileError": "laplace.storage",
    "LinearizedLaplace": "laplace.model",
    "PrunedGroupWarning": "laplace.report",
    "CompactPosterior": "posterior.compact",
    "SampleStore": "posterior.samples",
    "load_state": "states",
    "FitCompactPosterior": "callbacks",
    "FitLaplace": "callbacks",
    "PosteriorSnapshots": "callbacks",
    "PredictiveWriter": "callbacks",
    "ReferencePredictive": "callbacks",
    "Rebasin": "callbacks",
    "ScaleCanonicalization": "callbacks",
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

__all__ = [*sorted(_EXPORTS), "__version__"]

if TYPE_CHECKING:
    from tu_symmetry.states import SymmetryError
    from tu_symmetry.symmetry.action import apply_permutation, apply_scale
    from tu_symmetry.symmetry.certificate import Certificate, certify, require_certificate
    from tu_symmetry.symmetry.elements import (
        compose,
        identity_permutation,
        invert,
        random_permutation,
        random_scale,
        transposition_count,
    )
    from tu_symmetry.symmetry.graph import (
        NormalizationGroup,
        PermutationGroup,
        ScaleGroup,
        SymmetryGraph,
        SymmetryWarning,
    )
    from tu_symmetry.symmetry.in_place import move_optimizer_state


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"tu_symmetry.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tu_symmetry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
