"""What is removed from networks before they are compared: a named choice of scale and of order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from tu_symmetry.scaling.canonical import Method
from tu_symmetry.scaling.removal import Key, removal_element, remove_symmetries
from tu_symmetry.symmetry.elements import LogScale, Permutation
from tu_symmetry.symmetry.graph import SymmetryGraph

RemovalName = Literal["paper", "paper_code", "min_mass"]


@dataclass(frozen=True)
class Removal:
    """A canonical form of networks: first the scale of every unit, then the order of the units.

    Attributes:
        name: what it is called where values of it are reported.
        scale: see :func:`~tu_symmetry.canonicalize`; None leaves the scale as it is.
        sort: key by which units are sorted, see :func:`~tu_symmetry.remove_symmetries`.
        reference: a state to align to in place of sorting.
    """

    name: str
    scale: Method | None = "unit_norm"
    sort: Key = "max"
    reference: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def element(self, graph: SymmetryGraph, state: Mapping[str, Tensor]) -> tuple[LogScale, Permutation]:
        """Log-factors and permutation that bring one network to its canonical form."""
        return removal_element(graph, state, **self._options())

    def apply(self, graph: SymmetryGraph, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The canonical form of a network, or of each of a stack."""
        with torch.no_grad():
            return remove_symmetries(graph, states, certify=False, **self._options())

    def _options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}


def removal(name: RemovalName | Removal, *, align_to: Mapping[str, Tensor] | None = None) -> Removal:
    """A removal by its name; the paper is arXiv 2310.08287.

    * ``paper``: unit norm of every hidden filter, front to back; sorted by the largest weight (the paper's text)
    * ``paper_code``: the same; sorted by the first weight (the paper's code)
    * ``min_mass``: least L2 norm; sorted by the largest weight

    With ``align_to`` units are matched to those of that network instead of sorted (``min_mass, aligned`` is the choice
    of this package: sorting tears apart units whose keys are almost equal).

    Raises:
        ValueError: another name.
    """
    if isinstance(name, Removal):
        return name
    choices: dict[str, tuple[Method, Key]] = {
        "paper": ("unit_norm", "max"),
        "paper_code": ("unit_norm", "first"),
        "min_mass": ("min_mass", "max"),
    }
    if name not in choices:
        raise ValueError(f"removal must be one of {', '.join(map(repr, choices))} or a Removal, got {name!r}")
    scale, sort = choices[name]
    if align_to is not None:
        return Removal(f"{scale}, aligned", scale, sort, dict(align_to))
    return Removal(f"{scale}, sorted by {'the largest' if sort == 'max' else 'the first'} weight", scale, sort)
