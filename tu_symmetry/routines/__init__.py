"""Room: routines. What extends TorchUncertainty's routines and post-processing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS: dict[str, str] = {
    "HMCRoutine": "hmc",
    "LaplaceEnsemble": "laplace",
    "LaplacePostProcessing": "laplace",
    "LaplaceRegressionRoutine": "laplace",
    "MembersRoutine": "members",
    "VariationalRoutine": "variational",
    "posterior_ensemble": "ensembles",
}

__all__ = [
    "HMCRoutine",
    "LaplaceEnsemble",
    "LaplacePostProcessing",
    "LaplaceRegressionRoutine",
    "MembersRoutine",
    "VariationalRoutine",
    "posterior_ensemble",
]

if TYPE_CHECKING:
    from tu_symmetry.routines.ensembles import posterior_ensemble
    from tu_symmetry.routines.hmc import HMCRoutine
    from tu_symmetry.routines.laplace import LaplaceEnsemble, LaplacePostProcessing, LaplaceRegressionRoutine
    from tu_symmetry.routines.members import MembersRoutine
    from tu_symmetry.routines.variational import VariationalRoutine


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"tu_symmetry.routines.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tu_symmetry.routines' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
