"""Mass and least mass of networks: how far weights are from their representation cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tu_symmetry.scaling.canonical import canonicalize
from tu_symmetry.states import States, as_stack
from tu_symmetry.symmetry.graph import SymmetryGraph


@dataclass(frozen=True)
class RepresentationCosts:
    """Squared L2 norms of networks' counted parameters, and the least that rescalings reach, float64 ``[S]``."""

    mass: Tensor
    minimal_mass: Tensor

    @property
    def ratio(self) -> Tensor:
        """Mass over minimal mass ``[S]``; 1 for a network of zeros, which has no mass to lose."""
        return torch.where(self.mass == self.minimal_mass, 1.0, self.mass / self.minimal_mass)


def representation_costs(graph: SymmetryGraph, states: States, **options: Any) -> RepresentationCosts:
    """Mass and representation cost (arXiv 2310.08287, section 6) of each network of a list or a stack, or of one.

    Laws: the minimal mass is the same all along the orbits of the scale groups, and under permutations. The options are
    those of :func:`~tu_symmetry.canonicalize`.
    """
    stack = as_stack(states)
    lead = graph.check_state(stack)
    count = len(next(iter(stack.values()))) if lead else 1
    if lead > 1 or count == 0:
        raise ValueError(f"expected a state or a stack of states; this one has {lead} sample axes and {count} samples")
    singles = [{n: t[i] for n, t in stack.items()} for i in range(count)] if lead else [dict(stack)]
    forms = [canonicalize(graph, single, certify=False, **options) for single in singles]
    masses = [(form.mass_before, form.mass_after) for form in forms]
    return RepresentationCosts(*torch.tensor(masses, dtype=torch.float64, device="cpu").unbind(1))
