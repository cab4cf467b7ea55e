"""Room: routines. What extends TorchUncertainty's routines and post-processing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tu_symmetry._lazy import attach

_EXPORTS: dict[str, str] = {
    "DeepImagePriorRoutine": "deep_image_prior",
    "Reconstructions": "deep_image_prior",
    "HMCRoutine": "hmc",
    "LaplaceEnsemble": "laplace",
    "LaplacePostProcessing": "laplace",
    "LaplaceRegressionRoutine": "laplace",
    "MembersRoutine": "members",
    "SWAG": "swag",
    "VariationalRoutine": "variational",
    "posterior_ensemble": "ensembles",
}

__all__ = [
    "SWAG",
    "DeepImagePriorRoutine",
    "HMCRoutine",
    "LaplaceEnsemble",
    "LaplacePostProcessing",
    "LaplaceRegressionRoutine",
    "MembersRoutine",
    "Reconstructions",
    "VariationalRoutine",
    "posterior_ensemble",
]

if TYPE_CHECKING:
    from tu_symmetry.routines.deep_image_prior import DeepImagePriorRoutine, Reconstructions
    from tu_symmetry.routines.ensembles import posterior_ensemble
    from tu_symmetry.routines.hmc import HMCRoutine
    from tu_symmetry.routines.laplace import LaplaceEnsemble, LaplacePostProcessing, LaplaceRegressionRoutine
    from tu_symmetry.routines.members import MembersRoutine
    from tu_symmetry.routines.swag import SWAG
    from tu_symmetry.routines.variational import VariationalRoutine
else:
    __getattr__, __dir__ = attach(__name__, _EXPORTS)
