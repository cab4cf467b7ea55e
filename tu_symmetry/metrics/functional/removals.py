"""What is removed from networks before they are compared: a named choice of scale and of order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.scaling.canonical import Method
from tu_symmetry.scaling.removal import removal_element, remove_symmetries
from tu_symmetry.symmetry.elements import LogScale, Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

RemovalName = Literal["paper", "min_mass"]


@dataclass(frozen=True)
class Removal:
    """A canonical form of networks: first the scale of every unit, then the order of the units.

    Attributes:
        name: what it is called where values of it are reported.
        scale: see :func:`~tu_symmetry.canonicalize`.
        reference: a state that units are matched to; None to sort them by their largest weight.
    """

    name: str
    scale: Method
    reference: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def element(self, graph: SymmetryGraph, state: Mapping[str, Tensor]) -> tuple[LogScale, Permutation]:
        """Log-factors and permutation that bring one network to its canonical form."""
        return removal_element(graph, state, **self._options())

    def apply(self, graph: SymmetryGraph, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The canonical form of a network, or of each of a stack."""
        with torch.no_grad():
            return remove_symmetries(graph, states, certify=False, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "reference": self.reference}


def removal(name: RemovalName | Removal, *, align_to: Mapping[str, Tensor] | None = None) -> Removal:
    """A removal by its name: ``paper`` (arXiv 2310.08287: unit norm of every hidden filter) or ``min_mass``.

    Units are then sorted by their largest weight, or with ``align_to`` matched to those of that network (sorting tears
    apart units whose keys are almost equal).
    """
    if isinstance(name, Removal):
        return name
    scales: dict[str, Method] = {"paper": "unit_norm", "min_mass": "min_mass"}
    if name not in scales:
        raise ValueError(f"removal must be one of {', '.join(map(repr, scales))} or a Removal, got {name!r}")
    if align_to is not None:
        return Removal(f"{scales[name]}, aligned", scales[name], dict(align_to))
    return Removal(f"{scales[name]}, sorted by the largest weight", scales[name])
